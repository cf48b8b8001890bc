"""Kernels of the steady steps by operator, kernel and shape: their count, time and rate."""

from bisect import bisect_left
from collections.abc import Sequence

from counterpoint.analysis.timed import TimedTrace, ns_to_us
from counterpoint.analysis.values import OperatorRow, Role
from counterpoint.kernel_names import short_name
from counterpoint.spans import Span

OperatorKey = tuple[str, str, str, tuple[int, int, int] | None]  # operator, kernel, shapes, matrix sizes
MOST_ROWS = 1000
"""Only this many rows are kept, the longest first: a step has some hundred different kernels."""


def find_operators(timed: TimedTrace, roles: tuple[Role, ...], windows: Sequence[Span]) -> tuple[OperatorRow, ...]:
    """Return the computation that started within the windows, by total time, as means per window."""
    rows: dict[OperatorKey, list[int]] = {}
    for index in started_within(timed, windows):
        if roles[index] != "computation":
            continue
        operation = timed.trace.operations[index]
        operator = timed.operator_of(index)
        name, shapes = ("", "") if operator is None else (operator.name, operator.shapes)
        key = (name, operation.name, shapes, operation.matmul_sizes)
        row = rows.setdefault(key, [0, 0])
        row[0] += 1
        row[1] += timed.ends[index] - timed.starts[index]
    longest = sorted(rows.items(), key=lambda item: (-item[1][1], item[0][1]))[:MOST_ROWS]
    return tuple(_row(key, count, time, len(windows)) for key, (count, time) in longest)


def started_within(timed: TimedTrace, windows: Sequence[Span]) -> list[int]:
    """Return the operations that started in one of the windows, by start within each."""
    found: list[int] = []
    for start, end in windows:
        found += timed.by_start[bisect_left(timed.sorted_starts, start) : bisect_left(timed.sorted_starts, end)]
    return found


def _row(key: OperatorKey, count: int, time: int, num_steps: int) -> OperatorRow:
    name, kernel, shapes, sizes = key
    return OperatorRow(
        name=name or short_name(kernel),
        kernel=kernel,
        shapes=shapes or (" x ".join(map(str, sizes)) if sizes else ""),
        count=count / num_steps,
        total_us=ns_to_us(time) / num_steps,
        mean_us=ns_to_us(time) / count,
        tflops=2 * sizes[0] * sizes[1] * sizes[2] * count / (time * 1000) if sizes and time else None,
    )
