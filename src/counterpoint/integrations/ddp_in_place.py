"""Averages DDP's gradients where autograd leaves them, without DDP's buckets.

DDP copies every gradient into a bucket, on the computation's stream, and back unless gradients are views of buckets. Here
DDP is told that a pass needs no synchronization, as by no_sync(), and hooks on the parameters do it instead: in the groups
of its buckets, and in their order, which is the same on all ranks. DDP tells what its buckets hold once it has laid them
out by the order of the first backward pass; until then it is on its own.

With `find_unused_parameters`, a pass may leave out parameters: what is missing counts as zeros, at the end of the pass. As
in DDP, a gradient that no rank has stays as it is. Since groups then wait for the end of the pass, a model that does leave
out parameters goes back to DDP's buckets.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import chain
from typing import Any, final
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from counterpoint.integrations.lane_collectives import streams_of
from counterpoint.units import format_bytes

Group = Sequence[nn.Parameter]
Finish = Callable[[], None]
# begins to average flat gradients, each without gaps; what it returns makes the current stream wait for that
Average = Callable[[list[torch.Tensor]], Finish]
MOST_NAMED = 3
PASSES_LATER = 2  # how much later shares are looked at: by then they have come without a wait


@final
class Usage:
    """The share of the ranks that used each parameter in a pass: numbers that are averaged with the gradients."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._noted: deque[tuple[torch.Tensor, Any]] = deque()
        self._is_complete = True

    def note(self, shares: torch.Tensor) -> None:
        """Begin to bring the shares of one more pass to the host."""
        if not shares.is_cuda:
            self._noted.append((shares.clone(), None))
            return
        host = torch.empty(shares.shape, dtype=shares.dtype, device="cpu", pin_memory=True)
        host.copy_(shares, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._noted.append((host, event))

    def is_complete(self) -> bool:
        """Return whether every rank used all parameters, as far as looked at; the same on all ranks in the same pass."""
        while len(self._noted) >= PASSES_LATER:
            shares, event = self._noted.popleft()
            if event is not None:
                event.synchronize()
            self._is_complete &= bool((shares.float() > 1 - 1 / (2 * self._num_ranks)).all())
        return self._is_complete


@final
class BackwardPass:
    """One backward pass: notes gradients, and begins to average each group when it is complete, in order.

    With `usage`, groups that are not complete follow at the end of the pass.
    """

    def __init__(self, groups: Sequence[Group], average: Average, usage: Usage | None) -> None:
        self._groups, self._average, self._usage = groups, average, usage
        self._ready: list[set[int]] = [set() for _ in groups]  # positions of parameters whose gradients are complete
        self._streams: list[set[Any]] = [set() for _ in groups]  # those on which autograd accumulated them
        self._num_begun = 0
        self._finishing: list[Finish] = []
        self._shares: torch.Tensor | None = None
        self.has_ended = False

    def note(self, number: int, position: int, parameter: torch.Tensor) -> None:
        """Note a gradient, and begin with all groups that are complete. Later backward passes are not averaged."""
        if self.has_ended and position in self._ready[number]:
            return
        if self.has_ended or position in self._ready[number]:
            raise RuntimeError(  # as DDP's own error, which the job may catch
                "A backward pass accumulated a gradient twice or too late, as reentrant checkpoints do. It is averaged "
                "once. Use checkpoints with use_reentrant=False, or wrap the model with static_graph=True."
            )
        is_first = not any(self._ready)
        self._ready[number].add(position)
        self._streams[number].update(streams_of(parameter))
        while self._num_begun < len(self._groups) and self._is_complete(self._num_begun):
            self._begin()
        if is_first if self._usage is not None else self._num_begun == len(self._groups):
            torch.autograd.Variable._execution_engine.queue_callback(partial(_untraced(), self._end))

    def missing(self) -> list[nn.Parameter]:
        """Return parameters without a gradient, if the pass has begun; with `usage` that is no error."""
        if self._usage is not None or not any(self._ready):
            return []
        groups = zip(self._groups, self._ready, strict=True)
        return [each for group, ready in groups for position, each in enumerate(group) if position not in ready]

    def _is_complete(self, number: int) -> bool:
        return len(self._ready[number]) == len(self._groups[number])

    def _begin(self) -> None:
        """Begin to average the next group."""
        number, self._num_begun = self._num_begun, self._num_begun + 1
        group = self._groups[number]
        for current in streams_of(group[0]):
            for stream in self._streams[number] - {current}:
                current.wait_stream(stream)
        with torch.no_grad():
            flat = [_flat(parameter) for parameter in group]
            shares = self._own_shares(group[0]) if self._num_begun == len(self._groups) else []
            self._finishing.append(partial(self._finish, group, flat, self._average([*flat, *shares])))

    def _own_shares(self, like: torch.Tensor) -> list[torch.Tensor]:
        """Return 1 for each parameter that has a gradient here and 0 for others; they travel with the last group."""
        if self._usage is None:
            return []
        everything = list(chain.from_iterable(self._groups))
        self._shares = torch.ones(len(everything), dtype=like.dtype, device=like.device)
        absent = [number for number, parameter in enumerate(everything) if parameter.grad is None]
        if absent:
            self._shares[absent] = 0
        return [self._shares]

    def _end(self) -> None:
        """Let the current stream wait for all averages."""
        while self._num_begun < len(self._groups):
            self._begin()
        self.has_ended = True
        with torch.no_grad():
            while self._finishing:
                self._finishing.pop()()
        if self._usage is not None and self._shares is not None:
            self._usage.note(self._shares)

    def _finish(self, group: Group, flat: Sequence[torch.Tensor], wait: Finish) -> None:
        """Wait for the averages, and copy those that are not where autograd left the gradients."""
        wait()
        for parameter, averages in zip(group, flat, strict=True):
            gradient = parameter.grad
            if gradient is None:
                if self._usage is None or self._is_used(parameter):
                    parameter.grad = _as_laid_out(averages, parameter)
            elif gradient.data_ptr() != averages.data_ptr():
                gradient.copy_(_as_laid_out(averages, parameter))

    def _is_used(self, parameter: nn.Parameter) -> bool:
        """Return whether another rank used a parameter; the last group, which has the shares, is finished first."""
        assert self._shares is not None
        number = next(number for number, each in enumerate(chain.from_iterable(self._groups)) if each is parameter)
        return bool(self._shares[number] > 0)


@final
class AveragesInPlace:
    """Hooks on the parameters of one model, which average its gradients group by group in an armed backward pass.

    A group has at least `least_part_bytes` on each rank, if the buckets allow that. `least_piece_bytes`: parameters that are
    smaller on average stay in DDP's buckets.
    """

    def __init__(self, num_ranks: int, least_part_bytes: int, least_piece_bytes: int) -> None:
        self._num_ranks, self._least_piece_bytes = num_ranks, least_piece_bytes
        self._least_bytes = least_part_bytes * num_ranks
        self._hooks: dict[nn.Parameter, Any] = {}
        self._pass: BackwardPass | None = None
        self.forget()

    def forget(self) -> None:
        """Forget what buckets hold: DDP lays them out anew."""
        self.remove()
        self._buckets: dict[int, list[nn.Parameter]] = {}
        self._groups: list[list[nn.Parameter]] | None = None  # none at all, if DDP's buckets stay
        self._is_sparse = False
        self._usage = Usage(self._num_ranks)

    def learn(self, bucket: dist.GradBucket) -> None:
        """Note what a bucket holds. The last one ends a backward pass, after which all are known."""
        if self._groups is not None:
            return
        self._buckets[bucket.index()] = list(bucket.parameters())
        self._is_sparse |= bucket.buffer().layout != torch.strided
        if bucket.is_last():
            buckets = [self._buckets[index] for index in sorted(self._buckets)]
            self._groups = groups = groups_of(buckets, self._least_bytes)
            num_pieces = sum(map(len, groups)) + self._num_ranks * len(groups)  # every rank's block begins another one
            if self._is_sparse or self.num_bytes < self._least_piece_bytes * num_pieces:
                self._groups = []

    def is_possible(self) -> bool:
        """Return whether the groups are known, their parameters large enough, and all used."""
        return bool(self._groups) and self._usage.is_complete()

    @property
    def num_bytes(self) -> int:
        """The bytes of all gradients, if they are known."""
        return sum(int(parameter.nbytes) for parameter in chain.from_iterable(self._groups or []))

    def arm(self, average: Average, *, may_leave_out: bool) -> None:
        """Average the gradients of the next backward pass in place; it may leave out parameters, if that is said."""
        assert self._groups is not None
        for number, group in enumerate(self._groups):
            for position, parameter in enumerate(group):
                if parameter.requires_grad:  # a job may freeze a model for a while, as those of two models do
                    self._hook_last(parameter, number, position)
        self._pass = BackwardPass(self._groups, average, self._usage if may_leave_out else None)

    def has_ended(self) -> bool:
        """Return whether an armed backward pass is over."""
        return self._pass is not None and self._pass.has_ended

    def disarm(self) -> None:
        """Leave the next backward pass to DDP."""
        self._pass = None

    def remove(self) -> None:
        """Remove the hooks."""
        self.disarm()
        while self._hooks:
            self._hooks.popitem()[1].remove()

    def require_finished(self, names: Callable[[], dict[nn.Parameter, str]]) -> None:
        """Raise `RuntimeError` if the last backward pass left out parameters, as DDP does in its next forward pass."""
        missing = self._pass.missing() if self._pass is not None else []
        if not missing:
            return
        name_of = names()
        shown = ", ".join(name_of.get(parameter, "one without a name") for parameter in missing[:MOST_NAMED])
        more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
        raise RuntimeError(
            f"The last backward pass computed no gradients of {shown}{more}, so DDP could not average all gradients. "
            "Use all parameters in each step, or wrap the model with find_unused_parameters=True."
        )

    def _hook_last(self, parameter: nn.Parameter, number: int, position: int) -> None:
        """Let the parameter's hook run after those of the job, which see and change this rank's own gradient, as in DDP."""
        handle = self._hooks.get(parameter)
        if handle is not None:
            if next(reversed(parameter._post_accumulate_grad_hooks)) == handle.id:
                return
            handle.remove()
        self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(self._hook(number, position))

    def _hook(self, number: int, position: int) -> Callable[[torch.Tensor], None]:
        found = ref(self)  # a parameter must not keep alive what holds the parameters

        def on_gradient(parameter: torch.Tensor) -> None:
            averages = found()
            if averages is not None and averages._pass is not None:
                averages._pass.note(number, position, parameter)

        untraced: Callable[[torch.Tensor], None] = torch.compiler.disable(on_gradient)
        return untraced


@cache
def _untraced() -> Callable[[Finish], None]:
    """Return what calls a function that torch.compile must not trace, although a compiled step calls backward()."""
    untraced: Callable[[Finish], None] = torch.compiler.disable(lambda call: call())
    return untraced


def groups_of(buckets: Sequence[Sequence[nn.Parameter]], least_bytes: int) -> list[list[nn.Parameter]]:
    """Join buckets of one type, each to the next, until they have this many bytes; the rest joins the last group."""
    groups: list[list[nn.Parameter]] = []
    growing: dict[torch.dtype, list[nn.Parameter]] = {}
    for bucket in buckets:
        group = growing.setdefault(bucket[0].dtype, [])
        group += bucket
        if sum(parameter.nbytes for parameter in group) >= least_bytes:
            groups.append(growing.pop(bucket[0].dtype))
    for dtype, rest in growing.items():
        last = max((number for number, group in enumerate(groups) if group[0].dtype == dtype), default=None)
        groups.append(rest if last is None else groups.pop(last) + rest)
    return groups


def needs_buckets(model: DistributedDataParallel) -> bool:
    """Return whether the model's gradients must be in DDP's buckets."""
    return bool(model.static_graph or model.mixed_precision is not None)


def lack_of_memory(device: torch.device, num_bytes: int) -> str:
    """Return why a GPU has no room for so many bytes beside what it held at its peak, or nothing."""
    if device.type != "cuda":
        return ""
    free, _ = torch.cuda.mem_get_info(device)
    left = max(0, free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device))
    if left >= num_bytes:
        return ""
    return (
        f"gradients beside buckets take {format_bytes(num_bytes)}, and at its peak the GPU had {format_bytes(left)} left; "
        "leave out gradient_as_bucket_view"
    )


def _flat(parameter: nn.Parameter) -> torch.Tensor:
    """Return the gradient's memory, flat and in the parameter's layout; a copy, if it has another layout or type; zeros, if
    there is none.
    """
    gradient = parameter.grad
    if gradient is None:
        return parameter.new_zeros(parameter.numel())
    if gradient.dtype == parameter.dtype and gradient.layout == torch.strided:
        if parameter.is_contiguous() and gradient.is_contiguous():
            return gradient.view(-1)
        if _is_dense(parameter) and gradient.stride() == parameter.stride():
            return gradient.as_strided((gradient.numel(),), (1,))
    copied = torch.empty(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
    _as_laid_out(copied, parameter).copy_(gradient)
    return copied


def _as_laid_out(flat: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Return flat memory as a tensor in the parameter's layout."""
    return flat.as_strided(parameter.shape, parameter.stride()) if _is_dense(parameter) else flat.view(parameter.shape)


def _is_dense(parameter: nn.Parameter) -> bool:
    """Return whether the parameter's elements fill its memory, each once."""
    return bool(torch.empty_like(parameter, device="meta").stride() == parameter.stride())  # it keeps such strides only
