"""Finds which GPU operations carry one collective together.

A library's kernel is a collective of its own. Copies between GPUs, the staging copies and sums that belong to them, and
signals are joined: operations that the host issued one after the other carry one collective, until

- the host issues computation that is no matmul (operators of matmuls and communication issue matmuls between the pieces), or
  any computation if the copies run on a stream that only communicates;
- the copies move to another stream that only communicates, or those of another module or annotation begin;
- the host launches another CUDA graph, or computation was issued and another step begins: if only matmuls run between two
  calls of an operator, nothing else distinguishes the calls;
- a sum on a stream that also computes has ended the collective, or a new staging copy follows copies that followed a sum (an
  all-reduce by copies is a sum between two rounds of copies).
"""

from bisect import bisect_right
from collections.abc import Sequence

from counterpoint.analysis.roles import is_staging, is_sum
from counterpoint.analysis.timed import TimedTrace
from counterpoint.analysis.values import Role
from counterpoint.spans import Span
from counterpoint.step import CollectiveKind
from counterpoint.traces.activity import GpuOperation
from counterpoint.traces.classify import classify_kernel
from counterpoint.value import Value

NAMED_KINDS: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
# parts of the names that operators of experts have in a trace, forward and backward; they send rows as an all-to-all does
EXPERT_OPERATORS = (
    "expert_ffn",
    "ExpertFfn",
    "dispatch_grouped_matmul",
    "grouped_matmul_combine",
    "DispatchBackward",
    "CombineBackward",
)
TRIFLE_US = 5.0
"""Shorter kernels between the pieces of a collective (spins, counters) do not end it."""


class Members(Value, frozen=True, kw_only=True):
    """The operations of one collective, by start; `is_library` if it is one kernel of a library."""

    operations: tuple[int, ...]
    is_library: bool


def find_members(timed: TimedTrace, roles: tuple[Role, ...], windows: Sequence[Span]) -> tuple[Members, ...]:
    """Return all collectives of a trace, by start. `windows` are those of its steps."""
    found: list[Members] = []
    pieces = _Pieces(timed, roles, windows)
    for index, operation in enumerate(timed.trace.operations):
        role = roles[index]
        if role == "communication" and _is_library_kernel(operation):
            found.append(Members(operations=(index,), is_library=True))
        elif role in ("communication", "waiting"):
            pieces.add(index)
        elif role == "computation":
            pieces.see_computation(index)
    found += [
        Members(operations=tuple(sorted(group, key=lambda index: (timed.starts[index], index))), is_library=False)
        for group in pieces.groups
    ]
    return tuple(sorted(found, key=lambda each: (timed.starts[each.operations[0]], each.operations)))


def kind_of_copies(timed: TimedTrace, members: Members) -> CollectiveKind:
    """Return what a collective carried by copies does: by its operator's name, else by the order of sums and copies."""
    operator = timed.operator_of(members.operations[0])
    if operator is not None:
        if any(part in operator.name for part in EXPERT_OPERATORS):
            return "all_to_all"
        for kind in NAMED_KINDS:
            if kind in f"{operator.module} {operator.name}":
                return kind
    operations = [timed.trace.operations[index] for index in members.operations]
    sums = [place for place, operation in enumerate(operations) if is_sum(operation)]
    copies = [place for place, operation in enumerate(operations) if is_between_gpus(operation)]
    if not copies:
        return "reduce_scatter" if sums else "send_recv"
    if not sums:
        return "all_gather"
    return "all_reduce" if copies[-1] > sums[-1] else "reduce_scatter"


def bytes_of_copies(timed: TimedTrace, members: Members, kind: CollectiveKind, group_size: int) -> int:
    """Return the size of a collective carried by copies, as the library counts it, from what this rank copied from peers."""
    moved = sum(
        timed.trace.operations[index].arguments.num_bytes
        for index in members.operations
        if is_between_gpus(timed.trace.operations[index])
    )
    if group_size < 2 or kind == "send_recv":
        return moved
    rounds = 2 if kind == "all_reduce" else 1
    return round(moved * group_size / (rounds * (group_size - 1)))


def is_between_gpus(operation: GpuOperation) -> bool:
    """Return whether an operation that takes part in communication is a copy between GPUs."""
    return operation.category == "memcpy" and not is_staging(operation)


def _is_library_kernel(operation: GpuOperation) -> bool:
    return operation.category == "kernel" and classify_kernel(operation.name).kind == "communication"


class _Pieces:
    """Joins pieces of collectives, which are given in the order in which the host issued them."""

    def __init__(self, timed: TimedTrace, roles: tuple[Role, ...], windows: Sequence[Span]) -> None:
        self.groups: list[list[int]] = []
        self._timed = timed
        self._ends_of_steps = [end for _, end in windows]
        self._is_open = False
        self._has_computed = False  # since the last piece
        self._lane: int | None = None  # the stream of the open collective, if that stream only communicates
        self._has_sum = self._has_copy_after_sum = False
        self._module = ""
        self._computes = {
            stream
            for stream, line in timed.streams.items()
            if any(roles[index] == "computation" and not self._is_trifle(index) for index in line)
        }

    def add(self, index: int) -> None:
        """Add the next piece."""
        operation = self._timed.trace.operations[index]
        stream = operation.arguments.stream
        lane = None if stream in self._computes else stream
        is_other_lane = self._is_open and lane is not None and self._lane is not None and lane != self._lane
        is_next_round = self._has_copy_after_sum and is_staging(operation)
        is_past_sum = self._has_sum and lane is None and not is_sum(operation)
        operator = self._timed.operator_of(index)
        module = operator.module if operator is not None else ""
        is_other_call = is_other_lane or is_next_round or is_past_sum or module != self._module
        if not self._is_open or is_other_call or self._is_of_another_time(index):
            self.groups.append([])
            self._lane, self._has_sum, self._has_copy_after_sum, self._module = None, False, False, module
        self.groups[-1].append(index)
        self._is_open, self._has_computed = True, False
        self._lane = lane if self._lane is None else self._lane
        self._has_sum = self._has_sum or is_sum(operation)
        self._has_copy_after_sum = self._has_sum and (self._has_copy_after_sum or is_between_gpus(operation))

    def _is_of_another_time(self, index: int) -> bool:
        """Return whether a piece belongs to another graph replay, or to another step, than the piece before it."""
        timed = self._timed
        last, this = (timed.trace.operations[number] for number in (self.groups[-1][-1], index))
        graphs = {operation.graph_launch for operation in (last, this)}
        steps = {bisect_right(self._ends_of_steps, timed.starts[number]) for number in (self.groups[-1][-1], index)}
        return len(graphs) > 1 or (self._has_computed and len(steps) > 1)

    def see_computation(self, index: int) -> None:
        """Record computation that the host issued after the last piece."""
        operation = self._timed.trace.operations[index]
        if not self._is_open or self._is_trifle(index):
            return
        self._has_computed = True
        if self._lane is not None or classify_kernel(operation.name).character != "matmul":
            self._is_open = False

    def _is_trifle(self, index: int) -> bool:
        return self._timed.trace.operations[index].duration_us < TRIFLE_US
