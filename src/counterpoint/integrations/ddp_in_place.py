"""Averages DDP's gradients where autograd leaves them, without DDP's buckets.

DDP copies every gradient into a bucket, on the computation's stream, and back unless gradients are views of buckets. Here
DDP is told that a pass needs no synchronization, as by no_sync(), and hooks on the parameters do it instead: in the groups
of its buckets, and in their order, which is the same on all ranks. DDP tells what its buckets hold once it has laid them
out by the order of the first backward pass; until then it is on its own.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, final
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from counterpoint.errors import IntegrationError
from counterpoint.integrations.lane_collectives import streams_of
from counterpoint.value import require

Gradients = list[torch.Tensor]  # of one group: flat, and each without gaps
Finish = Callable[[], None]
Average = Callable[[Gradients], Finish]  # begins to average; what it returns makes the current stream wait for that
MOST_NAMED = 3


@final
class AveragesInPlace:
    """Hooks on the parameters of one model, which average its gradients group by group in an armed backward pass.

    A group has at least `least_bytes` on each rank, if the buckets allow that. `least_piece_bytes`: parameters that are
    smaller on average stay in DDP's buckets.
    """

    def __init__(self, num_ranks: int, least_part_bytes: int, least_piece_bytes: int) -> None:
        self._num_ranks, self._least_piece_bytes = num_ranks, least_piece_bytes
        self._least_bytes = least_part_bytes * num_ranks
        self._buckets: dict[int, list[nn.Parameter]] = {}
        self._is_sparse = False
        self._groups: list[list[nn.Parameter]] | None = None  # none at all, if DDP's buckets stay
        self._hooks: list[Any] = []
        self._average: Average | None = None
        self._ready: list[set[int]] = []  # by group, the positions of parameters whose gradients are complete
        self._streams: list[set[Any]] = []  # by group, those on which autograd accumulated them
        self._num_begun = 0
        self._finishing: list[Finish] = []

    def learn(self, bucket: dist.GradBucket) -> None:
        """Note what a bucket holds. The last one ends a backward pass, after which all are known."""
        if self._groups is not None:
            return
        self._buckets[bucket.index()] = list(bucket.parameters())
        self._is_sparse |= bucket.buffer().layout != torch.strided
        if bucket.is_last():
            buckets = [self._buckets[index] for index in sorted(self._buckets)]
            groups = groups_of(buckets, self._least_bytes)
            num_bytes = sum(parameter.nbytes for parameter in chain.from_iterable(groups))
            num_pieces = sum(map(len, groups)) + self._num_ranks * len(groups)  # every rank's block begins another one
            is_large = num_bytes >= self._least_piece_bytes * num_pieces
            self._groups = groups if is_large and not self._is_sparse else []

    def forget(self) -> None:
        """Forget what buckets hold: DDP lays them out anew."""
        self._buckets, self._groups, self._is_sparse = {}, None, False

    @property
    def is_possible(self) -> bool:
        """Whether the groups are known, and their parameters large enough."""
        return bool(self._groups)

    def arm(self, average: Average) -> None:
        """Average the gradients of the next backward pass in place."""
        assert self._groups is not None
        if not self._hooks:
            for number, group in enumerate(self._groups):
                self._hooks += [
                    parameter.register_post_accumulate_grad_hook(self._hook(number, position))
                    for position, parameter in enumerate(group)
                ]
        self._average, self._num_begun, self._finishing = average, 0, []
        self._ready = [set() for _ in self._groups]
        self._streams = [set() for _ in self._groups]

    def disarm(self) -> None:
        """Leave the next backward pass to DDP."""
        self._average = None

    def remove(self) -> None:
        """Remove the hooks."""
        self.disarm()
        while self._hooks:
            self._hooks.pop().remove()

    def require_finished(self, names: Callable[[], dict[nn.Parameter, str]]) -> None:
        """Raise `IntegrationError` if the last backward pass left out parameters, as DDP does in its next forward pass."""
        if self._average is None or not any(self._ready):
            return
        assert self._groups is not None
        groups, name_of = zip(self._groups, self._ready, strict=True), names()
        missing = [
            name_of.get(parameter, "one without a name")
            for group, ready in groups
            for position, parameter in enumerate(group)
            if position not in ready
        ]
        more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
        require(
            not missing,
            IntegrationError,
            f"The last backward pass had no gradients of {', '.join(missing[:MOST_NAMED])}{more}, so not all were averaged. "
            "Use all parameters in each step, or wrap the model with find_unused_parameters=True.",
        )

    def _hook(self, number: int, position: int) -> Callable[[torch.Tensor], None]:
        found = ref(self)  # a parameter must not keep alive what holds the parameters

        def on_gradient(parameter: torch.Tensor) -> None:
            averages = found()
            if averages is not None and averages._average is not None:
                averages._note(number, position, parameter)

        return on_gradient

    def _note(self, number: int, position: int, parameter: torch.Tensor) -> None:
        """Note a gradient, and begin with all groups that are complete, in order."""
        assert self._groups is not None
        if position in self._ready[number]:
            raise IntegrationError(
                "One backward pass accumulated a gradient twice, as with reentrant checkpoints, but DDP averages it once. "
                "Use checkpoints with use_reentrant=False, or wrap the model with static_graph=True."
            )
        self._ready[number].add(position)
        self._streams[number].update(streams_of(parameter))
        while self._num_begun < len(self._groups) and self._is_complete(self._num_begun):
            self._begin(self._num_begun)
            self._num_begun += 1
        if self._num_begun == len(self._groups):
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _is_complete(self, number: int) -> bool:
        assert self._groups is not None
        return len(self._ready[number]) == len(self._groups[number])

    def _begin(self, number: int) -> None:
        assert self._average is not None
        assert self._groups is not None
        group = self._groups[number]
        for current in streams_of(group[0]):
            for stream in self._streams[number] - {current}:
                current.wait_stream(stream)
        with torch.no_grad():
            flat = [_flat(parameter) for parameter in group]
            self._finishing.append(partial(_finish, group, flat, self._average(flat)))

    def _end(self) -> None:
        self.disarm()
        with torch.no_grad():
            while self._finishing:
                self._finishing.pop(0)()


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


def obstacle_in(model: DistributedDataParallel) -> str:
    """Return why the model's gradients must be in DDP's buckets, or nothing."""
    if model.find_unused_parameters:
        return "it may leave out parameters"
    if model.static_graph:
        return "its graph is static"
    if model.mixed_precision is not None:
        return "it has a type for communication"
    return ""


def _finish(group: Sequence[nn.Parameter], flat: Gradients, wait: Finish) -> None:
    """Let the current stream wait for averages, and copy those that are not where autograd left the gradients."""
    wait()
    for parameter, averages in zip(group, flat, strict=True):
        gradient = parameter.grad
        if gradient is not None and gradient.data_ptr() != averages.data_ptr():
            gradient.copy_(_as_laid_out(averages, parameter))


def _flat(parameter: nn.Parameter) -> torch.Tensor:
    """Return the gradient's memory, flat and in the parameter's layout; a copy, if it has another layout or type."""
    gradient = parameter.grad
    assert gradient is not None
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
