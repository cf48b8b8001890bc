"""Metrics: how well a timeline overlaps communication, and the best that a step's timeline could reach.

These are pure functions. They do not know whether a timeline was measured or simulated, nor its machine or plan: lone
times come from the caller. `docs/metrics.md` derives every formula in words. Sums of intervals are taken in whole
picoseconds, so they are exact and independent of the order of the intervals.
"""

from collections.abc import Iterable, Sequence

from counterpoint.display import html_table
from counterpoint.errors import StepError, require_kind, shown
from counterpoint.spans import Span, length, union, without
from counterpoint.step import Operation, Step
from counterpoint.timeline import Interval, Timeline
from counterpoint.units import format_percent, format_us, ps_to_us, us_to_ps
from counterpoint.value import Value

NOTHING_TO_GAIN = 1e-9


class RankMetrics(Value, frozen=True, kw_only=True):
    """One rank's times; each is the length of a union of intervals.

    `overlap_ratio` is None if the rank does not communicate. `idle_us` is the part of the makespan in which the rank
    neither computes nor communicates nor copies.
    """

    rank: int
    makespan_us: float
    computation_us: float
    communication_us: float
    copy_us: float
    overlapped_us: float
    exposed_us: float
    idle_us: float
    overlap_ratio: float | None = None


class Metrics(Value, frozen=True, kw_only=True):
    """Times over all ranks: `makespan_us` of the slowest, `exposed_us` of the worst, `overlap_ratio` over all
    communication.
    """

    makespan_us: float
    exposed_us: float
    ranks: tuple[RankMetrics, ...]
    overlap_ratio: float | None = None

    def _repr_html_(self) -> str:
        """Return what notebooks show of the metrics: the figures over all ranks."""
        overlap = "" if self.overlap_ratio is None else format_percent(self.overlap_ratio)
        figures = (format_us(self.makespan_us), format_us(self.exposed_us), overlap)
        return html_table("Metrics", ("makespan", "exposed", "overlap"), [figures])


def measure(timeline: Timeline) -> Metrics:
    """Compute the metrics of a timeline."""
    require_kind(timeline, Timeline, "measure takes a Timeline", "Pass the timeline that an executor's run returns.")
    by_rank: dict[int, list[Interval]] = {}
    for interval in timeline.intervals:
        by_rank.setdefault(interval.rank, []).append(interval)
    ranks = tuple(_measure_rank(rank, by_rank[rank]) for rank in sorted(by_rank))
    communication_ps = sum(us_to_ps(rank.communication_us) for rank in ranks)
    overlapped_ps = sum(us_to_ps(rank.overlapped_us) for rank in ranks)
    return Metrics(
        makespan_us=max(rank.makespan_us for rank in ranks),
        exposed_us=max(rank.exposed_us for rank in ranks),
        ranks=ranks,
        overlap_ratio=_ratio(overlapped_ps, communication_ps),
    )


def sequential_us(step: Step, lone_us: Sequence[float]) -> float:
    """Return the time of the step if nothing overlaps: one operation after the other, in the order of issue.

    It is the sum of the lone times, plus the time the GPU waits for the host if an operation is issued later than that.
    Raises `StepError` unless `lone_us` holds one time for each operation.
    """
    _check_lone_times(step, lone_us)
    end_us: list[float] = []
    for operation, time_us in zip(step.operations, lone_us, strict=True):
        end_us.append(max(end_us[-1] if end_us else 0.0, _issued_us(operation, end_us)) + time_us)
    return end_us[-1]


def ideal_us(step: Step, lone_us: Sequence[float], busy_us: float | None = None) -> float:
    """Return the least time that overlap can reach: the critical path, or `busy_us` if that is longer.

    `busy_us` is how long what operations share is busy at least. None: for the sum of all computation or communication,
    as if each filled the GPU or the link. Raises `StepError` if `lone_us` does not hold one time for each operation.
    """
    _check_lone_times(step, lone_us)
    return max(_sums_us(step, lone_us) if busy_us is None else busy_us, critical_path_us(step, lone_us))


def ideal_in_pieces_us(step: Step, lone_us: Sequence[float], busy_us: float | None = None) -> float:
    """Return the ideal if collectives are cut into pieces. `busy_us` and errors are those of `ideal_us`.

    An operation that needs a collective then needs only a piece of it, so that communication delays nothing but what
    follows on its stream: the critical path is that of the other operations, or the communication of one stream.
    """
    _check_lone_times(step, lone_us)
    others_us, on_stream_us = list(lone_us), {operation.stream: 0.0 for operation in step.operations}
    for index, operation in enumerate(step.operations):
        if operation.kind == "communication":
            on_stream_us[operation.stream] += lone_us[index]
            others_us[index] = 0.0
    shared_us = _sums_us(step, lone_us) if busy_us is None else busy_us
    return max(*on_stream_us.values(), ideal_us(step, others_us, shared_us))


def critical_path_us(step: Step, lone_us: Sequence[float]) -> float:
    """Return the makespan if each operation takes its lone time and only stream order, dependencies and issue delay it.

    Raises `StepError` if `lone_us` does not hold one time for each operation.
    """
    _check_lone_times(step, lone_us)
    end_us: list[float] = []
    stream_end_us: dict[int, float] = {}
    for operation, time_us in zip(step.operations, lone_us, strict=True):
        start_us = max(_issued_us(operation, end_us), stream_end_us.get(operation.stream, 0.0))
        for dependency in operation.waits_for:
            start_us = max(start_us, end_us[dependency.operation])
        end_us.append(start_us + time_us)
        stream_end_us[operation.stream] = end_us[-1]
    return max(end_us)


def _sums_us(step: Step, lone_us: Sequence[float]) -> float:
    """Return the sum of all computation or of all communication, whichever is longer."""
    totals_us = {"computation": 0.0, "communication": 0.0, "copy": 0.0}
    for operation, time_us in zip(step.operations, lone_us, strict=True):
        totals_us[operation.kind] += time_us
    return max(totals_us["computation"], totals_us["communication"])


def _issued_us(operation: Operation, end_us: Sequence[float]) -> float:
    """Return when the host issued the operation, from the start of the step, given the ends of the earlier ones."""
    waited_us = 0.0 if operation.issued_after is None else end_us[operation.issued_after]
    return waited_us + (operation.issued_us or 0.0)


def share_of_ideal(sequential_us: float, measured_us: float, ideal_us: float) -> float | None:
    """Return the share of the possible gain that was reached: 0 at the sequential time, 1 at the ideal, negative if
    slower.

    None if overlap cannot gain anything (the ideal is the sequential time).
    """
    possible_us = sequential_us - ideal_us
    if possible_us <= NOTHING_TO_GAIN * abs(sequential_us):
        return None
    return (sequential_us - measured_us) / possible_us


def interference(step: Step, timeline: Timeline, lone_us: Sequence[float]) -> tuple[float | None, ...]:
    """Return each operation's time in the timeline divided by its lone time; with several ranks, that of the slowest.

    None for an operation that the timeline does not show or whose lone time is 0. Raises `StepError` if `lone_us` does
    not hold one time for each operation, or if the timeline shows an operation that the step does not have.
    """
    _check_lone_times(step, lone_us)
    found: dict[tuple[int, int], list[Interval]] = {}
    for interval in timeline.intervals:
        found.setdefault((interval.operation, interval.rank), []).append(interval)
    slowest_ps = [0] * len(step.operations)
    for (operation, _), intervals in found.items():
        if not 0 <= operation < len(step.operations):
            raise StepError(
                f"The timeline shows operation {operation}, but step '{shown(step.name)}' has operations 0 to "
                f"{len(step.operations) - 1}. Pass the step that this timeline belongs to."
            )
        slowest_ps[operation] = max(slowest_ps[operation], length(union(_spans(intervals))))
    is_shown = {operation for operation, _ in found}
    return tuple(
        ps_to_us(slowest_ps[index]) / alone_us if index in is_shown and alone_us > 0 else None
        for index, alone_us in enumerate(lone_us)
    )


def _measure_rank(rank: int, intervals: Sequence[Interval]) -> RankMetrics:
    computation, communication, copies = (
        union(_spans(interval for interval in intervals if interval.kind == kind))
        for kind in ("computation", "communication", "copy")
    )
    everything = _spans(intervals)
    makespan_ps = max(end for _, end in everything) - min(start for start, _ in everything)
    communication_ps, exposed_ps = length(communication), length(without(communication, computation))
    overlapped_ps = communication_ps - exposed_ps
    return RankMetrics(
        rank=rank,
        makespan_us=ps_to_us(makespan_ps),
        computation_us=ps_to_us(length(computation)),
        communication_us=ps_to_us(communication_ps),
        copy_us=ps_to_us(length(copies)),
        overlapped_us=ps_to_us(overlapped_ps),
        exposed_us=ps_to_us(exposed_ps),
        idle_us=ps_to_us(makespan_ps - length(union(everything))),
        overlap_ratio=_ratio(overlapped_ps, communication_ps),
    )


def _spans(intervals: Iterable[Interval]) -> list[Span]:
    """Return the start and end of each interval, in picoseconds."""
    return [(us_to_ps(interval.start_us), us_to_ps(interval.end_us)) for interval in intervals]


def _ratio(overlapped_ps: int, communication_ps: int) -> float | None:
    return overlapped_ps / communication_ps if communication_ps else None


def _check_lone_times(step: Step, lone_us: Sequence[float]) -> None:
    if len(lone_us) != len(step.operations):
        raise StepError(
            f"Step '{shown(step.name)}' has {len(step.operations)} operations, but {len(lone_us)} lone times were given. "
            f"Give one for each operation."
        )
    for index, time_us in enumerate(lone_us):
        if not 0 <= time_us < float("inf"):
            raise StepError(
                f"The lone time of operation {index} ('{step.operations[index].name[:60]}') must be 0 us or more, "
                f"and finite; found {time_us}."
            )
