"""DDP that changes between copies and the library between steps: the same bits as a bare job whenever copies are off."""

import copy
import gc
import io
from collections.abc import Callable
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

from counterpoint import ops
from counterpoint.integrations import ddp
from integration_sections.comparing import DEVICE, assert_close, assert_equal, refused, said_of, without_memory_above
from integration_sections.layered import deep_model, given_to

Job = Callable[[int], None]  # what is done before a step of that number
Learning = Callable[[nn.Module, torch.Tensor], None]
NUM_STEPS = 5


def learn(called: nn.Module, given: torch.Tensor) -> None:
    called(given).float().pow(2).mean().backward()


def trained(
    model: DistributedDataParallel, before_step: Job = lambda _: None, num_micro_steps: int = 1, *, to_none: bool = True
) -> list[torch.Tensor]:
    """The parameters after some steps, each of several micro-batches whose gradients are summed before they are averaged."""
    return trained_by(model, model, before_step, num_micro_steps, to_none=to_none)


def trained_by(
    called: nn.Module,
    model: DistributedDataParallel,
    before_step: Job,
    num_micro_steps: int = 1,
    *,
    to_none: bool = True,
    learns: Learning = learn,
) -> list[torch.Tensor]:
    """As above, where what is called is a compiled form of the model, or what learns is compiled."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(NUM_STEPS):
        before_step(step)
        # torch itself fails where the first step of a static graph does not synchronize
        num_now = num_micro_steps if step or not model.static_graph else 1
        for micro in range(num_now):
            model.require_backward_grad_sync = micro == num_now - 1  # as no_sync() does
            given = given_to(dist.get_rank() + 10 * step + 1000 * micro)
            learns(called, given)
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
    return [parameter.detach().clone() for parameter in model.parameters()]


def wrapped(**options: object) -> DistributedDataParallel:
    return DistributedDataParallel(deep_model(), bucket_cap_mb=0.01, **options)


VARIANTS: tuple[dict[str, object], ...] = (
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"static_graph": True, "gradient_as_bucket_view": True},
)


def ddp_switched_off_is_a_bare_job() -> None:
    """Off from the start, or registered off in the middle of training: the bits of a job that never heard of us."""
    for options in VARIANTS:
        for num_micro_steps in (1, 3):
            bare = trained(wrapped(**options), num_micro_steps=num_micro_steps)
            for registered_at in (0, 2):
                model, states = wrapped(**options), []

                def register(step: int) -> None:
                    if step == registered_at:  # noqa: B023  called within this turn
                        states.append(ddp.register(model, is_on=False, least_part_bytes=0))  # noqa: B023  as above

                assert_equal(trained(model, register, num_micro_steps), bare)
                assert states[0].num_by_copies == 0
                assert states[0].num_by_library >= NUM_STEPS - registered_at
                assert "switched off" in str(states[0])


def ddp_switches_between_steps() -> None:
    """On and off by turns, from the start or from the middle: within rounding of the bare job, and both were used."""
    for options in VARIANTS:
        bare = trained(wrapped(**options), num_micro_steps=2)
        results = []
        for _ in range(2):
            model, states = wrapped(**options), []

            def switch(step: int) -> None:
                if step == 1:
                    states.append(ddp.register(model, least_part_bytes=0))  # noqa: B023  called within this turn
                elif step > 1:
                    states[0].use(step % 2 == 0)  # noqa: B023  as above

            results.append(trained(model, switch, 2))
            assert states[0].num_by_copies >= 3
            assert states[0].num_by_library >= 1
            assert states[0].num_bytes > 0
        assert_close(results[0], bare, 1e-4)
        assert_equal(*results)


def ddp_compiled() -> None:
    """All ways of compiling, registered before the first step and after two."""
    torch._dynamo.reset()
    bare = trained(wrapped())
    for compiled in ("the model", "its module", "a step with its backward pass"):
        for registered_at in (0, 2):
            plain = deep_model()
            inner = torch.compile(plain, backend="aot_eager") if compiled == "its module" else plain
            model = DistributedDataParallel(inner)  # compiled models want buckets of 1 MB or more
            called = torch.compile(model, backend="aot_eager") if compiled == "the model" else model
            learns = torch.compile(learn, backend="aot_eager") if compiled.startswith("a step") else learn
            states = []

            def register(step: int) -> None:
                if step == registered_at:  # noqa: B023  called within this turn
                    states.append(ddp.register(model, least_part_bytes=0, least_piece_bytes=0))  # noqa: B023  as above
                if step == NUM_STEPS - 1:
                    states[0].use(False)  # noqa: B023  as above

            assert_close(trained_by(called, model, register, learns=learns), bare, 1e-4)
            assert states[0].num_by_copies >= 2
            assert states[0].num_in_place >= 1, (compiled, registered_at, states)


def ddp_refuses_a_second_hook() -> None:
    """One line, whoever's the first hook is; the model goes on as it was."""
    model = wrapped()
    first = ddp.register(model, least_part_bytes=0)
    refused(
        lambda: ddp.register(model), r"register\(\) was already called for this model. Switch the object that it returned"
    )
    refused(lambda: first.use("on"), "is_on must be True or False; found 'on'")
    with_hook = wrapped()
    with_hook.register_comm_hook(None, default_hooks.allreduce_hook)
    refused(lambda: ddp.register(with_hook), "already has a communication hook, allreduce_hook, and DDP accepts only one")
    built_in = wrapped()
    built_in._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    refused(lambda: ddp.register(built_in), "already has a communication hook, a built-in hook of torch")
    within_backward = deep_model()
    _apply_optimizer_in_backward(torch.optim.SGD, within_backward.parameters(), {"lr": 0.1})
    refused(
        lambda: ddp.register(DistributedDataParallel(within_backward)),
        "already has a communication hook, with which DDP runs optimizers within the backward pass",
    )
    assert_close(trained(model), trained(with_hook), 1e-4)


def ddp_models_that_come_and_go() -> None:
    """A second model in the process, and the first wrapped again: each has its own state, and all train as without us."""
    bare = trained(wrapped(), to_none=False)
    teacher = wrapped()
    model = deep_model()
    first = DistributedDataParallel(model, bucket_cap_mb=0.01)
    states = [ddp.register(each, least_part_bytes=0) for each in (first, teacher)]

    def train_teacher(step: int) -> None:
        teacher(given_to(step)).sum().backward()

    found = trained(first, train_teacher, to_none=False)
    assert_close(found, bare, 1e-4)
    again = DistributedDataParallel(model, bucket_cap_mb=0.01)
    states.append(ddp.register(again, least_part_bytes=0))
    trained(again)
    assert all(state.num_by_copies >= NUM_STEPS for state in states)
    counts = [state.num_by_copies for state in states]
    trained(first)
    assert states[0].num_by_copies > counts[0]
    assert [state.num_by_copies for state in states[1:]] == counts[1:]


def ddp_keeps_no_model() -> None:
    """A model that the job drops is gone, although what was returned is kept."""
    model = wrapped()
    state = ddp.register(model, least_part_bytes=0, least_piece_bytes=0)
    trained(model)
    assert state.num_in_place > 0
    parameters = [ref(each) for each in model.parameters()]
    del model
    gc.collect()
    assert not any(each() is not None for each in parameters)


def ddp_checkpoints() -> None:
    """What is saved under the integration is what a bare job would save, and loads into one."""
    model = wrapped()
    ddp.register(model, least_part_bytes=0)
    trained(model)
    saved, other = model.state_dict(), wrapped()
    assert list(saved) == list(other.state_dict())
    other.load_state_dict(saved)
    assert_equal(other.state_dict().values(), saved.values())


def ddp_copies_of_a_model() -> None:
    """A model under the integration can be copied and saved whole; a copy is a bare model."""
    model = wrapped()
    state = ddp.register(model, least_part_bytes=0)
    trained(model)
    whole = io.BytesIO()
    torch.save(model, whole)
    whole.seek(0)
    num_by_copies, bare = state.num_by_copies, wrapped()
    bare.load_state_dict(model.state_dict())
    expected = trained(bare)
    for other in (copy.deepcopy(model), torch.load(whole, weights_only=False)):
        assert_close(trained(other), expected, 1e-5)  # buckets are laid out anew, so four ranks add up in other orders
    assert state.num_by_copies == num_by_copies
    trained(model)
    assert state.num_by_copies > num_by_copies


def ddp_gives_way_to_a_hook_of_the_job() -> None:
    """In a job that nobody edits, a hook that it registers in mid-training takes over."""

    def doubled(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return default_hooks.allreduce_hook(None, bucket).then(lambda done: 2 * done.value())

    ddp.watch_job()
    results, states = [], []
    for is_ours in (False, True):
        model = wrapped()
        if is_ours:
            states.append(ddp.register(model, least_part_bytes=0))

        def register(step: int) -> None:
            if step == 2:
                model.register_comm_hook(None, doubled)  # noqa: B023  called within this turn

        said = said_of(lambda: results.append(trained(model, register)))  # noqa: B023  as above
    assert len(said) == (1 if dist.get_rank() == 0 else 0), said
    assert_close(results[1], results[0], 1e-4)
    assert 0 < states[0].num_by_copies < states[0].num_by_library
    assert "a communication hook of its own" in str(states[0])


def ddp_sparse_gradients() -> None:
    """Sparse buckets are the library's, divided as DDP does."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(50, 33, sparse=True), nn.Linear(33, 7)

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return self.out(self.table((given[:, 0].abs() * 10).long()))

    results = []
    for is_ours in (False, True):
        torch.manual_seed(0)
        model = DistributedDataParallel(Words().to(DEVICE))
        state = ddp.register(model, least_part_bytes=0) if is_ours else None
        given = given_to(dist.get_rank())
        said = said_of(lambda: model(given).pow(2).sum().backward())  # noqa: B023  called within this turn
        results.append([each.grad.to_dense() for each in model.parameters()])
    assert_close(results[1], results[0], 1e-5)
    assert state is not None
    assert (state.num_by_copies, state.num_by_library) == (1, 1)
    assert len(said) == (1 if dist.get_rank() == 0 else 0)
    assert all(line.endswith("its gradients are sparse.") for line in said)


def ddp_without_memory() -> None:
    """One rank has no memory in mid-job, within a bucket of several parts: all go on with the library, and say so once."""
    ops.release()
    model, bare = wrapped(), trained(wrapped())
    state = ddp.register(model, least_part_bytes=0, max_buffer_bytes=4096)
    last = dist.get_world_size() - 1
    with without_memory_above(2048, on_rank=last):
        said = said_of(lambda: assert_close(trained(model), bare, 1e-4))
    assert len(said) == (1 if dist.get_rank() == 0 else 0), said
    assert all(f"Rank {last} of the group" in line for line in said)
    assert state.num_by_copies == 0
    assert state.num_by_library >= NUM_STEPS
    ops.release()


def ddp_in_join() -> None:
    """Where ranks have unlike numbers of steps, the library averages, over as many ranks as the job says."""
    for choices in ({}, {"divide_by_initial_world_size": False}):
        bare, model = wrapped(), wrapped()
        state = ddp.register(model, least_part_bytes=0, least_piece_bytes=0)
        results = [_joined(bare, choices)]
        said = said_of(lambda: results.append(_joined(model, choices)))  # noqa: B023  called within this turn
        assert_close(results[1], results[0], 1e-4)
        assert 0 < state.num_in_place < state.num_by_copies
        assert state.num_by_library > 0
        assert len(said) == (1 if dist.get_rank() == 0 else 0), said
        assert all("runs in join()" in each for each in said)


def _joined(model: DistributedDataParallel, choices: dict[str, bool]) -> list[torch.Tensor]:
    """The parameters after some steps of all ranks, and more in join(), of which each rank has one more than the last."""
    trained(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Join([model], **choices):  # as model.join() does, which takes no other model or optimizer
        for step in range(2 + dist.get_rank()):
            model(given_to(dist.get_rank() + 10 * step)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [each.detach().clone() for each in model.parameters()]
