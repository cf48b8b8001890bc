"""The values of an analysis: of one rank first (`RankAnalysis`), then of all of them (`Analysis`).

Times are in microseconds on the clock of a rank's own trace, from its first GPU operation; those of an `Analysis` are on the
clock of its first rank. What one rank's trace holds is reduced to a `RankAnalysis` at once, so that memory depends on the
number of collectives and of different kernels, and not on the size of the files.
"""

from functools import lru_cache
from typing import Literal

from counterpoint.display import html_list, shortened
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
    "hardware_queue",  # serialised in a hardware queue
    "launched_late",  # the host issued it late
    "slow_rank",  # waiting for a rank that arrived later
    "uneven",  # an uneven split gives this rank more to move than others
    "tail",  # at the end of the step, where nothing is left to compute
    "gap",  # between two kernels of the computation that need nothing of it: a launch gap, a fill or a copy
]
Aspect = Literal["collective", "process_group", "stream", "module", "phase", "transport"]


class StepFigures(Value, frozen=True, kw_only=True):
    """One step of one rank as the GPU ran it; times are lengths of unions of intervals within its window.

    `communication_us` holds waiting, too. `launch_bound_us` is the idle time that ended with an operation only just
    launched. `overlap_ratio` is None without communication. A step that is not steady is an outlier, or the first.
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
        """From the window's start to its end."""
        return self.end_us - self.start_us


class TracedCollective(Value, frozen=True, kw_only=True):
    """One collective as one rank ran it: a kernel, or the copies, sums and signals that carry it together.

    `number` counts the rank's collectives by start, `group_number` those of its process group. `step` is -1 outside the
    profiled steps. `before` says in words what the rank did before it came to the collective, for ranks that waited for this
    one. `issued_us` is the host's launch; `imbalance` the largest part over the mean part of an uneven all-to-all, 1 where
    parts are even, 0 if unknown. `group_ranks` are the ranks of the process group where the trace lists them all.
    `communicator` is the library's own name of the group, where it is logged: `inspector` says what logs hold.
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
    exposed_us: float = 0.0
    imbalance: float = 0.0
    before: str = ""
    group_ranks: tuple[int, ...] = ()
    communicator: str = ""


class ExposedInterval(Value, frozen=True, kw_only=True):
    """A stretch of a step in which a rank communicates and computes nothing; it has exactly one cause.

    `collective` is the number of the rank's collective that runs, the first to have started where several do. `evidence` is
    one sentence with times. `other_rank` is the rank that was waited for.
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
        """How long."""
        return self.end_us - self.start_us


class Breakdown(Value, frozen=True, kw_only=True):
    """Communication of the steady steps by one aspect: mean times per step and rank.

    `num_collectives` and `num_bytes` are sums over the steady steps of all ranks.
    """

    aspect: Aspect
    name: str
    num_collectives: int
    communication_us: float
    exposed_us: float
    num_bytes: int = 0


class OperatorRow(Value, frozen=True, kw_only=True):
    """Kernels of one operator and shape in the steady steps: mean count and time per step; TFLOP/s where shapes say so."""

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
    """The critical path of the steady steps by what it goes through, mean per step."""

    rank: int
    cause: Literal["computation", "communication", "waiting", "copy", "host", "launch gap"]
    time_us: float


class Slowdown(Value, frozen=True, kw_only=True):
    """A kernel that communication beside it made slower than its like that ran alone; times per step.

    `by`: what they shared, "SMs" (its CTAs and the collective's do not fit together) or "bandwidth". A trace holds no clock
    rates: where the power limit lowers them, the reason is the other of the two that fits.
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
    """One operation of the representative step, for drawing: `name` numbers `RankAnalysis.names`."""

    stream: int
    start_us: float
    end_us: float
    name: int
    role: Role


class RankAnalysis(Value, frozen=True, kw_only=True):
    """Everything kept of one rank's trace, or of its NCCL Inspector log, as `source` says.

    `shown_step` is the representative (median steady) step; `lanes` are its operations, at most some ten thousand.
    `problems` are what is unknown, one sentence each; `notes` are further remarks.
    """

    path: str
    rank: int
    source: Literal["trace", "inspector"] = "trace"
    world_size: int | None = None
    device_name: str | None = None
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


def label_of(collective: "TracedCollective | CollectiveSize") -> str:
    """A collective in words: "all_reduce of 128 MiB"."""
    return _label(collective.collective, collective.num_bytes)


@lru_cache(maxsize=1024)
def _label(kind: CollectiveKind, num_bytes: int) -> str:
    return f"{kind} of {format_bytes(num_bytes)}" if num_bytes else kind


# --- all ranks ---


class CauseTotal(Value, frozen=True, kw_only=True):
    """Exposed time of one cause, mean per steady step and rank. The shares of all causes add up to 1."""

    cause: Cause
    exposed_us: float
    share: float
    num_intervals: int
    example: str


class RankWaits(Value, frozen=True, kw_only=True):
    """How long one rank waited in the collectives that all present ranks of a group ran, and when it came last or first."""

    rank: int
    waited_us: float
    mean_us: float
    times_last: int
    times_first: int
    num_collectives: int


class CollectiveSkew(Value, frozen=True, kw_only=True):
    """One collective across ranks: who came first and last, how far apart, and what it took once all were there."""

    name: str
    process_group: str | None
    group_number: int
    step: int
    first_rank: int
    last_rank: int
    skew_us: float
    latency_us: float
    waits_us: tuple[tuple[int, float], ...]  # by rank
    last_did: str = ""


class CollectiveSize(Value, frozen=True, kw_only=True):
    """Collectives of one kind, size, group and transport, of all steps; one that several ranks ran counts once.

    Times are latencies once all present ranks had come where several ran it, else durations. Bus bandwidth is as nccl-tests
    counts it, from the mean latency, else from the shortest duration. `num_bytes` is the mean over ranks. `spread_us` is the
    half-width of the middle half of times.
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
    """The gain per step of a control, operator, integration or change to the job; simulated.

    `apply` are lines to paste. Values of several entries do not add up: each is for that change alone.
    """

    causes: tuple[Cause, ...]
    what: str
    recovers_us: float
    apply: tuple[str, ...] = ()
    is_within_replay_error: bool = False


class Headline(Value, frozen=True, kw_only=True):
    """The summary on one screen: verdict, why, next."""

    verdict: str
    why: tuple[str, ...]
    next: tuple[str, ...]


class Change(Value, frozen=True, kw_only=True):
    """One figure in two analyses; `spread` is the half-width of the middle half over steady steps, of the wider one."""

    what: str
    before: float
    after: float
    spread: float
    unit: Literal["us", "share", "count"]


class Analysis(Value, frozen=True, kw_only=True, tag_field="schema", tag=SCHEMA):
    """Traces of one job, of one rank or many. The means of `steps` are over steady steps and ranks."""

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

    def _in_short(self) -> str:
        return f"of {format_count(len(self.ranks), 'rank')}: {shortened(self.headline.verdict, 300)}"

    def _repr_html_(self) -> str:
        """Return what notebooks show of the analysis: the verdict, why, and what to do next."""
        why = [f"why: {sentence}" for sentence in self.headline.why]
        return html_list(self.headline.verdict, [*why, *(f"next: {sentence}" for sentence in self.headline.next)])
