"""One call of an operator: checks its operands, looks up the picked schedule, and runs it.

The checks and look-ups of a call depend on the properties of its tensors and not on their numbers, so they are made
once: `OperatorCall` makes them, and keeps a `KnownCall` for later calls.
"""

from collections.abc import Hashable, Sequence
from functools import cache
from typing import NamedTuple, final

import torch
from torch.distributed import distributed_c10d

from counterpoint.errors import OperatorError
from counterpoint.ops.arguments import problem_of_pair
from counterpoint.ops.collectives import Collectives, Sequential
from counterpoint.ops.dispatch import Matrices
from counterpoint.ops.runtime import PickedSchedule, Request, Runtime, known_calls, runtime_of
from counterpoint.schedule.actions import Operation, Pass
from counterpoint.value import require

# most known calls of a process; a model has a few shapes, and a job whose shapes keep changing stays within this limit
MAX_KNOWN_CALLS = 4096
Key = tuple[Hashable, ...]


class TorchPass(NamedTuple):
    """One pass of an operator, and the sequential form that runs if nothing is cut."""

    operation: Operation
    direction: Pass
    sequential: Sequential


@final
class CallCounts:
    """Calls of operators so far, forward and backward: the calls whose rows were copied, how many of them were replayed from
    recordings, and the bytes that they sent from this rank; the calls that ran the library's collective, their number by
    reason, and how many of them ran a module as it originally is. `most_kept_bytes`: the most that one forward call of
    experts made for its backward pass.

    A call counts where the operator runs, so code made by torch.compile counts as well. A CUDA graph that holds a call
    counts once, when it is captured.
    """

    __slots__ = (
        "by_reason",
        "most_kept_bytes",
        "num_by_copies",
        "num_by_library",
        "num_bytes",
        "num_original",
        "num_replayed",
    )

    def __init__(self) -> None:
        self.num_by_copies = self.num_replayed = self.num_bytes = self.most_kept_bytes = 0
        self.num_by_library = self.num_original = 0
        self.by_reason: dict[str, int] = {}

    def add_library(self, reason: str, *, is_original: bool = False) -> None:
        """Count a call that ran the library's collective, in an operator or in a module as it originally is."""
        self.num_by_library += 1
        self.num_original += is_original
        self.by_reason[reason] = self.by_reason.get(reason, 0) + 1

    def note_kept(self, num_bytes: int) -> None:
        """Note what a forward call made for its backward pass."""
        self.most_kept_bytes = max(self.most_kept_bytes, num_bytes)

    def add(self, picked: PickedSchedule, *, is_replayed: bool) -> None:
        """Count a call that ran this schedule."""
        prepared = picked.prepared
        if prepared.is_by_library:
            self.add_library(picked.pick.reason)
        else:
            self.num_by_copies += 1
            self.num_replayed += is_replayed
            self.num_bytes += prepared.num_sent_bytes


@cache
def calls_of(group_name: str) -> CallCounts:
    """Return the counts of operators for linears in a group; they continue after its memory was released."""
    return CallCounts()


@cache
def expert_calls_of(group_name: str) -> CallCounts:
    """Return those of operators for experts, which may run in the same group as linears."""
    return CallCounts()


@final
class KnownCall:
    """The schedule, and the layout of the results, of calls with tensors of the same shapes, strides, types and
    devices.
    """

    __slots__ = ("_counts", "_names", "_picked", "_results", "_runtime", "group")

    def __init__(self, runtime: Runtime, picked: PickedSchedule, names: Sequence[str], like: Matrices) -> None:
        """`names` are those of the given buffers, then of the results, which are like `like`."""
        self.group, self._runtime, self._picked = runtime.group, runtime, picked
        self._counts, self._names = calls_of(runtime.group.group_name), tuple(names)
        self._results = tuple((result.shape, result.stride()) for result in like)

    def begin(self) -> None:
        """Count the beginning of one more call."""
        agreement = self._runtime.agreement
        agreement.num_calls = self._picked.last_call = agreement.num_calls + 1

    @property
    def is_by_library(self) -> bool:
        """Whether the library's collective moves the rows."""
        return isinstance(self._picked.prepared, Collectives)

    def sum_by_library(self, product: torch.Tensor) -> None:
        """Begin and end one more call, which is by the library: sum its product over the ranks in place."""
        assert isinstance(self._picked.prepared, Collectives), "only calls by the library are summed so"
        self.begin()
        self._picked.prepared.reduce_all(product)
        self._counts.add(self._picked, is_replayed=False)

    def run(self, given: Matrices, weights: Matrices) -> list[torch.Tensor]:
        """Run the call that has begun, and return its results."""
        first, prepared = given[0], self._picked.prepared
        results = [first.new_empty_strided(*each) for each in self._results]
        is_replayed = prepared.run(dict(zip(self._names, (*given, *results), strict=True)), weights)
        self._counts.add(self._picked, is_replayed=is_replayed)
        return results


def key_of(what: Key, *tensors: torch.Tensor) -> Key:
    """Return everything that distinguishes calls, besides the values in their tensors: `what` they are, and the
    properties of their tensors.
    """
    return what, *[(each.shape, each.stride(), each.dtype, each.device) for each in tensors]


def known_call(key: Key, group_name: str) -> KnownCall | None:
    """Return what is known of calls with this key, one of which begins now; nothing before the first one ran."""
    found = earlier_call(key, group_name)
    if found is not None:
        found.begin()
    return found


def earlier_call(key: Key, group_name: str) -> KnownCall | None:
    """Return what is known of calls with this key, if one ran in this group."""
    found: KnownCall | None = known_calls().get(key)
    # a group may be destroyed and another one may get its name
    return None if found is None or distributed_c10d._resolve_process_group(group_name) is not found.group else found


@final
class OperatorCall:
    """The first call of its kind: checks its operands, finds the plan, and keeps both for the calls to come.

    There is one left matrix for all weights, or one for each.
    """

    _picked: PickedSchedule

    def __init__(self, torch_pass: TorchPass, operands: tuple[Matrices, Matrices, str]) -> None:
        self._operation, self._direction, self._sequential = torch_pass
        lefts, self._weights, group_name = operands
        self._left = lefts[0]
        # if one operand is on the CPU by mistake, the other ranks meet on the GPU
        device = next((each.device for each in (*lefts, *self._weights) if each.is_cuda), self._left.device)
        self._runtime: Runtime = runtime_of(group_name, device)
        pairs = zip(lefts if len(lefts) > 1 else [self._left] * len(self._weights), self._weights, strict=True)
        problem = next((found for pair in pairs if (found := _problem_of(self._operation, *pair))), "")
        if problem:
            self._runtime.refuse(problem)

    def plan(self, sizes: tuple[int, int, int], schedule: str) -> None:
        """Find the plan for (rows, inner, columns), before memory for results is allocated, so that ranks fail
        together here.
        """
        num_rows, num_inner, num_columns = sizes
        request = Request(
            operation=self._operation,
            direction=self._direction,
            num_rows=num_rows,
            num_inner=num_inner,
            num_columns=num_columns,
            dtype=self._left.dtype,
            schedule=schedule,
        )
        self._picked = self._runtime.plan(request, self._sequential)

    def keep(self, key: Key, names: Sequence[str], like: Matrices) -> KnownCall:
        """Keep what this call and later ones have in common; see `KnownCall`."""
        known = known_calls()
        if len(known) >= MAX_KNOWN_CALLS:
            known.clear()
        made = known[key] = KnownCall(self._runtime, self._picked, names, like)
        return made

    def require_shard(self, num_rows: int) -> None:
        """Refuse a shard that is not this rank's part of `num_rows` rows."""
        group, found = self._runtime.group, self._left.shape[0]
        wanted = own_rows(num_rows, group.group_name)
        if found != wanted:
            self._runtime.refuse(
                f"{self._operation} of {num_rows} rows needs {wanted} of them on rank {group.rank()} of "
                f"{group.size()}; found {found}. Split them by torch.tensor_split, or pass the right num_rows."
            )


def require_operands(operation: Operation, left: torch.Tensor, weight: torch.Tensor) -> None:
    """Raise `OperatorError` on this rank alone if an operation that sends nothing cannot multiply two operands."""
    problem = _problem_of(operation, left, weight)
    require(not problem, OperatorError, problem)


def _problem_of(operation: Operation, left: torch.Tensor, weight: torch.Tensor) -> str:
    """Return what is wrong with two operands, in one line, or nothing."""
    problem = problem_of_pair(operation, left, weight)
    if problem:
        return problem
    if not _is_multiplied(left):
        return f"{operation} does not multiply {left.dtype} on this device. Convert both operands to another type."
    if left.dim() != 2 or weight.dim() != 2 or left.shape[1] != weight.shape[0]:
        shapes = f"{tuple(left.shape)} and {tuple(weight.shape)}"
        return f"{operation} multiplies (rows, K) by (K, columns); found {shapes}. Change one."
    return ""


def _is_multiplied(matrix: torch.Tensor) -> bool:
    """Return whether operators multiply matrices of that type: no floating-point types of 8 bits or fewer, no complex ones,
    whose gradients are conjugated, and on GPUs no integers.
    """
    dtype = matrix.dtype
    if dtype.is_floating_point:
        return bool(dtype.itemsize > 1)
    return bool(dtype != torch.bool and not dtype.is_complex and not matrix.is_cuda)


def group_size(group_name: str) -> int:
    """Return how many ranks the group has."""
    return int(distributed_c10d._resolve_process_group(group_name).size())


def own_rows(num_rows: int, group_name: str) -> int:
    """Return the rows of this rank's block, split as by `torch.tensor_split`."""
    group = distributed_c10d._resolve_process_group(group_name)
    size, rank = int(group.size()), int(group.rank())
    return num_rows // size + int(rank < num_rows % size)
