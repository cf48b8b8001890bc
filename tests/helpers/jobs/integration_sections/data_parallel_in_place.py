"""DDP whose gradients are averaged where autograd leaves them."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from counterpoint import ops
from counterpoint.integrations import ddp
from counterpoint.integrations.ddp import BucketAverages
from integration_sections.comparing import (
    DEVICE,
    assert_close,
    assert_equal,
    refused,
    said_of,
    same_on_every_rank,
    without_memory_above,
)
from integration_sections.data_parallel_switching import NUM_STEPS, trained, wrapped
from integration_sections.layered import given_to

EVERYTHING = {"least_part_bytes": 0, "least_piece_bytes": 0}
NEVER = {"least_part_bytes": 0, "least_piece_bytes": 1 << 40}


class Halves(nn.Module):
    """Two layers of which a pass may leave out one, and a third, if asked, that every pass leaves out."""

    def __init__(self, *, has_idle: bool = False) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(33, 7), nn.Linear(33, 7)
        self.idle = nn.Linear(33, 7) if has_idle else None
        self.used = "both"

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        found = [layer(given) for name, layer in (("one", self.one), ("other", self.other)) if self.used in ("both", name)]
        return torch.stack(found).sum(0)


class Checkpointed(nn.Module):
    """A layer whose activations are computed again in the backward pass, and one after it."""

    def __init__(self, *, is_reentrant: bool) -> None:
        super().__init__()
        self.first, self.last, self._is_reentrant = nn.Linear(33, 33), nn.Linear(33, 7), is_reentrant

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.last(checkpoint(self.first, given, use_reentrant=self._is_reentrant))


def as_without(
    make: Callable[[], DistributedDataParallel],
    train: Callable[[DistributedDataParallel, BucketAverages | None], list[torch.Tensor]],
) -> BucketAverages:
    """Train a model as it is, and one in place, with the same results; return what the latter counted."""
    wanted, model = train(make(), None), make()
    state = ddp.register(model, **EVERYTHING)
    assert_close(train(model, state), wanted, 1e-5)
    return state


def ddp_in_place() -> None:
    """The bits of averages in buckets, whatever the buckets, micro-batches, views and parts."""
    for options in ({}, {"gradient_as_bucket_view": True}):
        for num_micro_steps, to_none, max_buffer_bytes in ((1, True, 1 << 20), (3, True, 4096), (2, False, 4096)):
            results = []
            for sizes in (EVERYTHING, NEVER):
                model = wrapped(**options)
                state = ddp.register(model, max_buffer_bytes=max_buffer_bytes, **sizes)
                results.append(trained(model, num_micro_steps=num_micro_steps, to_none=to_none))
                # DDP lays its buckets out after the first step, and tells what they hold in the second
                assert (state.num_in_place >= 2 * (NUM_STEPS - 2)) == (sizes is EVERYTHING), state
                assert state.num_by_library == 0
            assert_equal(*results)
            assert_close(results[0], trained(wrapped(**options), num_micro_steps=num_micro_steps, to_none=to_none), 1e-4)


def ddp_joins_buckets_in_place() -> None:
    """Buckets too small for copies are joined, and what no joining makes large enough is the library's."""
    for least_part_bytes, has_some in ((3000, True), (1 << 30, False)):
        model, bare = wrapped(), trained(wrapped())
        state = ddp.register(model, least_part_bytes=least_part_bytes, least_piece_bytes=0)
        said_of(lambda: assert_close(trained(model), bare, 1e-4))  # noqa: B023  called within this turn
        assert (state.num_in_place >= NUM_STEPS - 2) == has_some, state
        assert (state.num_by_library >= NUM_STEPS) == (not has_some), state


def ddp_in_place_of_several_types() -> None:
    """Gradients of two types, and of memory in another order than their shape's."""

    class Pictures(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filters = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
            self.wide, self.out = nn.Linear(8, 33).double(), nn.Linear(33, 7).double()

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            pictures = given[:, :27].reshape(-1, 3, 3, 3).to(memory_format=torch.channels_last)
            return self.out(torch.tanh(self.wide(self.filters(pictures).flatten(1).double())))

    results = []
    for sizes in (None, EVERYTHING):
        torch.manual_seed(0)
        model = DistributedDataParallel(Pictures().to(DEVICE), bucket_cap_mb=0.001)
        state = ddp.register(model, **sizes) if sizes else None
        results.append(trained(model))
    assert state is not None
    assert state.num_in_place >= 2 * (NUM_STEPS - 2), state
    assert_close(results[1], results[0], 1e-5)


def ddp_in_place_refuses() -> None:
    """Where DDP's own averages would be refused or wrong, one line says so, and DDP stays in charge of what it knows."""

    refused(lambda: ddp.register(wrapped(), least_piece_bytes=-1), "least_piece_bytes .* 0 or more; found -1")
    model = DistributedDataParallel(Halves().to(DEVICE), bucket_cap_mb=0.0001)
    ddp.register(model, **EVERYTHING)
    given = given_to(dist.get_rank())
    for _ in range(3):
        model(given).sum().backward()
    model.module.used = "one"
    model(given).sum().backward()
    with pytest.raises(RuntimeError, match=r"computed no gradients of other\.bias, other\.weight, so DDP could not"):
        model(given)  # of DDP's own type
    model = wrapped(static_graph=True)
    state = ddp.register(model, **EVERYTHING)
    trained(model)
    assert state.num_by_copies > NUM_STEPS
    assert state.num_in_place == 0


def ddp_in_place_that_leaves_out_parameters() -> None:
    """With `find_unused_parameters`: as DDP has it, whichever rank leaves out what. If some do, buckets are used again. A
    pass in place may be the last one before copies are switched off.
    """
    rank = dist.get_rank()
    uses: tuple[tuple[str, ...], ...] = (("both",) * 8, ("both", "one", "both", "other", "one", "both", "both", "both"))
    for has_idle, turns, off_at in (
        (False, uses[0], 8),
        (False, uses[1], 8),
        (True, uses[1], 8),
        (False, ("both",) * 3 + ("one",), 3),
    ):
        results = []
        for is_ours in (False, True):
            torch.manual_seed(0)
            model = DistributedDataParallel(
                Halves(has_idle=has_idle).to(DEVICE), bucket_cap_mb=0.0001, find_unused_parameters=True
            )
            state = ddp.register(model, **EVERYTHING) if is_ours else None
            found = []
            for step in range(len(turns)):
                if state is not None and step == off_at:
                    state.use(False)
                model.module.used = turns[step if off_at < len(turns) else (step + rank) % len(turns)]
                model.zero_grad()
                model(given_to(rank + 10 * step)).pow(2).sum().backward()
                found += [torch.ones(1) if each.grad is None else each.grad.clone() for each in model.parameters()]
            results.append(found)
        assert_close(results[1], results[0], 1e-5)
        assert state is not None
        assert state.num_in_place > 0
        if off_at < len(turns):
            continue
        leaves_out = has_idle or turns is uses[1]
        # one pass tells the buckets; what a pass left out is known two passes later
        assert (state.num_by_copies - state.num_in_place > 3) == leaves_out, state


def ddp_in_place_among_other_passes() -> None:
    """Passes without gradients between a forward pass and its backward pass, two forward passes for one backward pass, and a
    second backward pass: what DDP averages is averaged, and what it leaves is left.
    """
    rank = dist.get_rank()

    def train(model: DistributedDataParallel, _state: BucketAverages | None) -> list[torch.Tensor]:
        found = []
        for step in range(6):
            model.zero_grad()
            loss = model(given_to(rank + 10 * step)).pow(2).sum()
            if step % 2:
                with torch.no_grad():
                    model(given_to(rank + 1))
            else:
                loss = loss + model(given_to(rank + 2)).pow(2).sum()
            if step == 4:
                with model.no_sync():
                    loss = loss + model(given_to(rank + 3)).pow(2).sum()
            loss.backward(retain_graph=step == 5)
            if step == 5:
                loss.backward()
            found += [each.grad.clone() for each in model.parameters()]
        return found

    for options in ({}, {"find_unused_parameters": True}):
        state = as_without(partial(wrapped, **options), train)
        assert state.num_in_place >= 4, state


def ddp_in_place_among_passes_of_a_frozen_model() -> None:
    """Two models that train each other: one is frozen while the other learns through it; and a model frozen in part."""
    rank = dist.get_rank()

    def train(model: DistributedDataParallel, _state: BucketAverages | None, *, is_in_part: bool) -> list[torch.Tensor]:
        found = []
        for step in range(6):
            model.zero_grad()
            model(given_to(rank + 10 * step)).pow(2).sum().backward()
            found += [each.grad.clone() for each in model.parameters()]
            model.zero_grad()
            frozen = list(model.parameters())[:: 2 if is_in_part else 1]
            for each in frozen:
                each.requires_grad_(False)
            given = given_to(rank + 5).requires_grad_()
            model(given).pow(2).sum().backward()
            found += [given.grad, *(each.grad.clone() for each in model.parameters() if each.grad is not None)]
            for each in frozen:
                each.requires_grad_(True)
        return found

    for is_in_part, options in (
        (False, {}),
        (False, {"find_unused_parameters": True}),
        (True, {"find_unused_parameters": True}),
    ):
        state = as_without(partial(wrapped, **options), partial(train, is_in_part=is_in_part))
        assert state.num_in_place >= (1 if is_in_part else 4), state


def ddp_in_place_among_hooks_of_the_job() -> None:
    """Hooks of the job, registered before and in mid-job, see and change this rank's own gradients, as under DDP."""
    results = []
    for is_ours in (False, True):
        model, seen = wrapped(), []

        def halve(parameter: torch.Tensor) -> None:
            seen.append(parameter.grad.clone())  # noqa: B023  called within this turn
            parameter.grad.mul_(0.5)

        def hook(step: int) -> None:
            if step in (0, 4):
                for parameter in model.parameters():  # noqa: B023  called within this turn
                    parameter.register_post_accumulate_grad_hook(halve)

        state = ddp.register(model, **EVERYTHING) if is_ours else None
        results.append([*trained(model, hook), *seen])
    assert state is not None
    assert state.num_in_place >= 2 * (NUM_STEPS - 2), state
    assert_close(results[1], results[0], 1e-5)


def ddp_in_place_with_checkpoints() -> None:
    """Checkpoints that are not reentrant are averaged; where reentrant ones are not, one line says so."""
    for is_reentrant in (False, True):
        model = DistributedDataParallel(Checkpointed(is_reentrant=is_reentrant).to(DEVICE), find_unused_parameters=True)
        ddp.register(model, **EVERYTHING)
        given = given_to(dist.get_rank()).requires_grad_()

        def train() -> None:
            for _ in range(3):
                model(given).pow(2).sum().backward()  # noqa: B023  called within this turn

        if is_reentrant:
            with pytest.raises(RuntimeError, match=r"mark a variable ready|twice or too late"):
                train()
        else:
            train()
            assert same_on_every_rank(torch.cat([each.grad.flatten() for each in model.parameters()]))


def ddp_in_place_by_turns() -> None:
    """On and off between steps, with a hook of the job's own in the end: the averages are those of the path in force."""
    results = []
    for is_ours in (False, True):
        model, states = wrapped(), []

        def switch(step: int) -> None:
            if is_ours and step == 0:  # noqa: B023  called within this turn
                states.append(ddp.register(model, **EVERYTHING))  # noqa: B023  as above
            if is_ours and step > 1:  # noqa: B023  as above
                states[0].use(step % 2 == 0)  # noqa: B023  as above

        results.append(trained(model, switch))
    assert_close(*results, 1e-4)
    assert states[0].num_in_place >= 2, states
    assert states[0].num_by_library >= 1, states
    # a job of two models may step the other one between this one's forward pass and its backward pass
    rank = dist.get_rank()

    def train(model: DistributedDataParallel, state: BucketAverages | None) -> list[torch.Tensor]:
        found = []
        for step in range(8):
            model.zero_grad()
            loss = model(given_to(rank + 10 * step)).pow(2).sum()
            if state is not None:
                state.use(step % 3 == 0)
            loss.backward()
            found += [each.grad.clone() for each in model.parameters()]
        return found

    for options in ({}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}):
        state = as_without(partial(wrapped, **options), train)
        assert state.num_in_place >= 2, state


def ddp_in_place_without_room() -> None:
    """Where gradients are views of buckets, they need memory of their own: if one rank has none, all leave them there."""
    bare = trained(wrapped())
    last = dist.get_world_size() - 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ddp, "lack_of_memory", lambda _, num_bytes: f"{num_bytes} bytes" if dist.get_rank() == last else "")
        for has_views in (True, False):
            model = wrapped(gradient_as_bucket_view=has_views)
            state = ddp.register(model, **EVERYTHING)
            said = said_of(lambda: assert_close(trained(model), bare, 1e-4))  # noqa: B023  called within this turn
            assert (state.num_in_place == 0) == has_views
            assert state.num_by_library == 0
            assert len(said) == (1 if has_views and dist.get_rank() == 0 else 0), said
            assert all(f"Gradients stay in DDP's buckets: Rank {last} of the group: 18904 bytes." in line for line in said)


def ddp_in_place_without_memory() -> None:
    """One rank has no memory for a part in mid-job: all go on with the library, and say so once."""
    ops.release()
    model, bare = wrapped(), trained(wrapped())
    state = ddp.register(model, **EVERYTHING, max_buffer_bytes=16384)
    with ExitStack() as stack:

        def shrink(step: int) -> None:
            if step == 3:
                ops.release()
                stack.enter_context(without_memory_above(2048, on_rank=dist.get_world_size() - 1))

        said = said_of(lambda: assert_close(trained(model, shrink), bare, 1e-4))
    assert len(said) == (1 if dist.get_rank() == 0 else 0), said
    assert state.num_by_copies > 0
    assert state.num_by_library >= NUM_STEPS - 2, state
    ops.release()
