"""The values of an analysis: of one rank first (`RankAnalysis`), then of all ranks (`Analysis`).

Times are in microseconds on the clock of a rank's own trace, from its first GPU operation; those of an `Analysis` are on the
clock of its first rank. One rank's trace is reduced to a `RankAnalysis` at once, so that memory depends on the number of
collectives and of different kernels, and not on the size of the files.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from counterpoint.display import html_list, shortened
from counterpoint.measurement.values import half_width
from counterpoint.step import CollectiveKind
from counterpoint.traces.activity import HostPhase
from counterpoint.units import format_bytes, format_count
from counterpoint.value import Value

SCHEMA = "counterpoint.analysis/1"  # version of the JSON; a change that breaks readers increments it

# Communication moves data between GPUs, or belongs to a collective that does (its sums and staging copies). Waiting is a
# kernel that does nothing but wait for other ranks (barriers, signals); it counts as communication in every union of times.
Role = Literal["computation", "communication", "waiting", "copy"]
Cause = Literal[
    "dependent",  # the next kernel needs the result
    "starved",  # launched, but waiting for SMs that kernels hold
    "own_stream",  # on the computation's own stream
    "queued",  # behind another collective
    "hardware_queue",  # serialized in a hardware queue
    "launched_late",  # the host issued it late
    "slow_rank",  # waiting for a rank that arrived later
    "uneven",  # an uneven split gives this rank more to move than others
    "tail",  # at the end of the step, where nothing is left to compute
    "gap",  # between two kernels of the computation that need nothing of it: a launch gap, a fill or a copy
]
Aspect = Literal["collective", "process_group", "stream", "module", "phase", "transport"]
StepOfRank = tuple[int, int]  # rank and step


class StepFigures(Value, frozen=True, kw_only=True):
    """One step of one rank as the GPU ran it; times are lengths of unions of intervals within the step's window.

    `communication_us` includes waiting. `launch_bound_us` is the idle time that ended with an operation that the host had
    only just launched. `overlap_ratio` is None without communication. A step that is not steady is an outlier, or the first.
    """

    rank: int
    step: int
    start_us: float
    end_us: float
    computation_us: float
    communication_us: float
    waiting_us: float
    copy_us: float
    exposed_us: float
    overlapped_us: float
    idle_us: float
    launch_bound_us: float
    overlap_ratio: float | None = None
    is_steady: bool = True

    @property
    def makespan_us(self) -> float:
        """The time from the window's start to its end."""
        return self.end_us - self.start_us


class TracedCollective(Value, frozen=True, kw_only=True):
    """One collective as one rank ran it: a kernel, or the copies, sums and signals that carry it together.

    `number` counts the rank's collectives by start, `group_number` those of its process group. `step` is -1 outside the
    profiled steps. `before` says in words what the rank did before it came to the collective, for ranks that waited for this
    one. `issued_us` is the host's launch. `paused_us` is the time between its operations in which none of them runs.
    `imbalance` is the largest part over the mean part of an uneven all-to-all, 1 if parts are even, 0 if unknown.
    `group_ranks` are the ranks of the process group if the trace lists them all. `communicator` is the library's own name of
    the group, if it is logged (`inspector` describes the logs).
    """

    rank: int
    number: int
    group_number: int
    step: int
    name: str
    collective: CollectiveKind
    transport: str
    stream: int
    start_us: float
    end_us: float
    num_bytes: int = 0
    group_size: int = 1
    process_group: str | None = None
    dtype: str | None = None
    phase: HostPhase = "unknown"
    module: str = ""
    issued_us: float | None = None
    waiting_us: float = 0.0
    paused_us: float = 0.0
    exposed_us: float = 0.0
    imbalance: float = 0.0
    before: str = ""
    group_ranks: tuple[int, ...] = ()
    communicator: str = ""


class ExposedInterval(Value, frozen=True, kw_only=True):
    """A stretch of a step in which a rank communicates and computes nothing; it has exactly one cause.

    `collective` is the number of the rank's collective that runs, or of the first to have started if several run. `evidence`
    is one sentence with times. `other_rank` is the rank that was waited for.
    """

    rank: int
    step: int
    start_us: float
    end_us: float
    collective: int
    cause: Cause
    evidence: str
    other_rank: int | None = None

    @property
    def duration_us(self) -> float:
        """The length of the interval."""
        return self.end_us - self.start_us


class Breakdown(Value, frozen=True, kw_only=True):
    """Communication of the steady steps for one value of an aspect: means per step and rank.

    `communication_us` is the time in which operations of the collectives run, without their pauses.
    """

    aspect: Aspect
    name: str
    num_collectives: float
    communication_us: float
    exposed_us: float
    num_bytes: float = 0.0


class OperatorRow(Value, frozen=True, kw_only=True):
    """Kernels of one operator and shape in the steady steps: mean count and time per step; TFLOP/s if shapes are known."""

    name: str
    kernel: str
    shapes: str = ""
    count: float
    total_us: float
    mean_us: float
    tflops: float | None = None


class IdleRow(Value, frozen=True, kw_only=True):
    """Idle time of one stream in the steady steps, mean per step, by cause: "host", "event", "launch gap" or "nothing"."""

    rank: int
    stream: int
    cause: Literal["host", "event", "launch gap", "nothing"]
    time_us: float


class PathRow(Value, frozen=True, kw_only=True):
    """Time of one kind of part on the critical path of the steady steps, mean per step."""

    rank: int
    cause: Literal["computation", "communication", "waiting", "copy", "host", "launch gap"]
    time_us: float


class Slowdown(Value, frozen=True, kw_only=True):
    """A kernel that ran slower beside communication than like kernels that ran alone; times per step.

    `by` is the resource that they shared: "SMs" (its CTAs and the collective's do not fit together) or "bandwidth". A trace
    holds no clock rates: if the power limit lowered them, `by` is the one of the two that fits.
    """

    rank: int
    kernel: str
    beside: str
    count: float
    alone_us: float
    beside_us: float
    lost_us: float
    by: Literal["SMs", "bandwidth"]


class LaneInterval(Value, frozen=True, kw_only=True, array_like=True):
    """One operation of the representative step, for drawing: `name` is an index into `RankAnalysis.names`."""

    stream: int
    start_us: float
    end_us: float
    name: int
    role: Role


class RankAnalysis(Value, frozen=True, kw_only=True):
    """The analysis of one rank's trace, or of its NCCL Inspector log, as `source` says.

    `shown_step` is the representative (median steady) step; `lanes` are its operations, at most some ten thousand.
    `problems` state what is unknown, one sentence each; `notes` are further remarks. `untrusted` is the problem that makes
    all figures wrong, if there is one. Times count from the first GPU operation, which began at `origin_us` by the
    profiler's clock, if that is known.
    """

    path: str
    rank: int
    source: Literal["trace", "inspector"] = "trace"
    world_size: int | None = None
    device_name: str | None = None
    origin_us: float | None = None
    num_operations: int = 0
    steps: tuple[StepFigures, ...] = ()
    collectives: tuple[TracedCollective, ...] = ()
    exposed: tuple[ExposedInterval, ...] = ()
    operators: tuple[OperatorRow, ...] = ()
    idle: tuple[IdleRow, ...] = ()
    critical_path: tuple[PathRow, ...] = ()
    slowdowns: tuple[Slowdown, ...] = ()
    shown_step: int = 0
    lanes: tuple[LaneInterval, ...] = ()
    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    untrusted: str = ""


def steady_steps(ranks: Sequence[RankAnalysis]) -> tuple[StepFigures, ...]:
    """Return the steady steps of all ranks, which means are taken over; for a rank without any, return all of its steps."""
    return tuple(step for analysis in ranks for step in (tuple(s for s in analysis.steps if s.is_steady) or analysis.steps))


def keys_of(steps: Sequence[StepFigures]) -> frozenset[StepOfRank]:
    """Return the rank and number of each step."""
    return frozenset((step.rank, step.step) for step in steps)


def spread_of(figures: Sequence[float]) -> float:
    """Return the half-width of the middle half, as the judge of measurements computes it; 0 if there are no figures."""
    return half_width(figures) if figures else 0.0


def label_of(collective: "TracedCollective | CollectiveSize") -> str:
    """Return a collective in words: "all_reduce of 128 MiB"."""
    return _label(collective.collective, collective.num_bytes)


@lru_cache(maxsize=1024)
def _label(kind: CollectiveKind, num_bytes: int) -> str:
    return f"{kind} of {format_bytes(num_bytes)}" if num_bytes else kind


# --- all ranks ---


class CauseTotal(Value, frozen=True, kw_only=True):
    """Exposed time of one cause, mean per steady step and rank. The shares of all causes add up to 1.

    `num_intervals` is the sum over the steady steps of all ranks.
    """

    cause: Cause
    exposed_us: float
    share: float
    num_intervals: int
    example: str


class RankWaits(Value, frozen=True, kw_only=True):
    """How long one rank waited in collectives that all present ranks of a group ran, and how often it came last or first."""

    rank: int
    waited_us: float
    mean_us: float
    times_last: int
    times_first: int
    num_collectives: int


class CollectiveSkew(Value, frozen=True, kw_only=True):
    """One collective across ranks: which came first and last, how far apart, and its time once all ranks were there."""

    name: str
    process_group: str | None
    group_number: int
    step: int
    first_rank: int
    last_rank: int
    skew_us: float
    latency_us: float
    waits_us: tuple[tuple[int, float], ...]  # by rank
    group_numbers: tuple[tuple[int, int], ...] = ()  # by rank, because profiles may begin at different collectives
    last_did: str = ""


class CollectiveSize(Value, frozen=True, kw_only=True):
    """Collectives of one kind, size, group and transport, of all steps; one that several ranks ran counts once.

    Times are latencies after the last present rank arrived if several ranks ran it, else durations. Bus bandwidth is as
    nccl-tests counts it, from the mean latency, else from the shortest duration. `num_bytes` is the mean over ranks.
    `spread_us` is the half-width of the middle half of times.
    """

    collective: CollectiveKind
    transport: str
    process_group: str | None
    num_bytes: int
    group_size: int
    count: int
    mean_us: float
    least_us: float
    most_us: float
    bus_bytes_per_s: float | None = None
    imbalance: float = 0.0
    spread_us: float = 0.0


class Recoverable(Value, frozen=True, kw_only=True):
    """The simulated gain per step of a control, operator, integration or change to the job.

    `apply` are lines to paste. `saved_us` is the time alone of kernels that are not needed any more. The gains of several
    entries do not add up: each is for that change alone.
    """

    causes: tuple[Cause, ...]
    what: str
    recovers_us: float
    apply: tuple[str, ...] = ()
    saved_us: float = 0.0
    is_within_replay_error: bool = False


class Headline(Value, frozen=True, kw_only=True):
    """The summary on one screen: verdict, why, next."""

    verdict: str
    why: tuple[str, ...]
    next: tuple[str, ...]


class Change(Value, frozen=True, kw_only=True):
    """One figure in two analyses; `spread` is the wider one's half-width of the middle half over steady steps."""

    what: str
    before: float
    after: float
    spread: float
    unit: Literal["us", "share", "count"]


class Analysis(Value, frozen=True, kw_only=True, tag_field="schema", tag=SCHEMA):
    """The analysis of traces of one job, of one rank or many. The means of `steps` are over steady steps and ranks.

    `untrusted` says why the traces are not of one job, so that means over them mean nothing; it is empty if nothing says so.
    `left_out` says why traces are not part of it.
    """

    ranks: tuple[RankAnalysis, ...]
    headline: Headline
    step_us: float
    communication_us: float
    exposed_us: float
    overlap_ratio: float | None = None
    idle_us: float = 0.0
    launch_bound_us: float = 0.0
    causes: tuple[CauseTotal, ...] = ()
    exposed: tuple[ExposedInterval, ...] = ()
    breakdowns: tuple[Breakdown, ...] = ()
    sizes: tuple[CollectiveSize, ...] = ()
    waits: tuple[RankWaits, ...] = ()
    skews: tuple[CollectiveSkew, ...] = ()
    clock_offsets_us: tuple[tuple[int, float], ...] = ()  # by rank: what is added to its times
    missing_ranks: tuple[int, ...] = ()
    recoverable: tuple[Recoverable, ...] = ()
    unrecoverable_us: float | None = None
    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    untrusted: str = ""
    left_out: tuple[str, ...] = ()

    def _in_short(self) -> str:
        return f"of {format_count(len(self.ranks), 'rank')}: {shortened(self.headline.verdict, 300)}"

    def _repr_html_(self) -> str:
        """Return what notebooks show of the analysis: the verdict, why, and what to do next."""
        why = [f"why: {sentence}" for sentence in self.headline.why]
        return html_list(self.headline.verdict, [*why, *(f"next: {sentence}" for sentence in self.headline.next)])
