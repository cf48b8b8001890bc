"""A plan as the CSV file of NVIDIA's example tuner plugin, so that a job can use it without us.

NCCL asks a tuner plugin for each collective: algorithm, protocol and CTAs (channels), by kind and size. The plugin in NCCL's
sources (plugins/tuner/example, before 2.29.7 ext-tuner/example) answers from a file with the columns collective_type,
min_bytes, max_bytes, algorithm, protocol, channels, nNodes, nRanks, numPipeOps, regBuff; the first line that fits counts, -1
fits everything. Its sizes are the larger of a rank's buffers (enqueue.cc: ncclFuncMaxSendRecvCount), as a step's are. Files
were read back by the plugin of 2.30.7, compiled with a program that asks it; in a job, and with GPUs, it has not run.

Of a plan it takes the limit on CTAs alone. A plan says nothing of algorithm and protocol, which such a line must name.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from counterpoint.controls import CommunicationCtas
from counterpoint.errors import PlanError
from counterpoint.plan import Directive, Match, Plan
from counterpoint.step import Collective, CollectiveKind, Step
from counterpoint.value import Value

Algorithm = Literal["tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat"]
Protocol = Literal["ll", "ll128", "simple"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
PROTOCOLS: tuple[Protocol, ...] = get_args(Protocol)
# a send or a receive, of which an all-to-all consists, is no collective to a tuner (NCCL 2.28.9, src/include/plugin/tuner)
TUNED: dict[CollectiveKind, str] = {
    "broadcast": "broadcast",
    "reduce": "reduce",
    "all_gather": "allgather",
    "reduce_scatter": "reducescatter",
    "all_reduce": "allreduce",
}
LARGEST = (1 << 64) - 1
HEADER = """\
# For the example tuner plugin of NCCL's sources: NCCL_TUNER_PLUGIN=/path/to/libnccl-tuner-example.so
# NCCL_TUNER_CONFIG_FILE=/path/to/this/file, the same file on every rank: ranks that choose differently hang.
# Build it from NCCL 2.30.3 or later (plugins/tuner/example; it serves NCCL 2.28 and 2.29 as well). The examples of
# 2.27.5 to 2.29.7 read NCCL's table of costs as pointers and crash at the first line that fits.
# Before it is built, change "*nChannels = 1;" of plugin.c to "*nChannels = 0;": as it is (2.30.7), it gives one
# channel to every collective that no line here fits, and NCCL takes that.
# Channels are the plan's CTAs. Algorithm and protocol were chosen when the file was written, not by the plan.
# collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff
"""


class TunerLine(Value, frozen=True, kw_only=True):
    """One line: collectives of a kind with sizes in a range, and what they run with."""

    collective: CollectiveKind
    least_bytes: int
    most_bytes: int
    num_ctas: int

    def written(self, algorithm: Algorithm, protocol: Protocol) -> str:
        """As the plugin reads it: for any number of nodes, ranks and operations, with registered buffers and without."""
        sizes = f"{self.least_bytes},{self.most_bytes}"
        return f"{TUNED[self.collective]},{sizes},{algorithm},{protocol},{self.num_ctas},-1,-1,-1,-1"


class TunerFile(Value, frozen=True, kw_only=True):
    """The lines, those of single sizes first; and in words what of the plan is not in them."""

    lines: tuple[TunerLine, ...]
    left_out: tuple[str, ...] = ()

    def written(self, algorithm: Algorithm, protocol: Protocol) -> str:
        """The file."""
        return HEADER + "".join(f"{line.written(algorithm, protocol)}\n" for line in self.lines)


def tuner_file(plan: Plan, step: Step | None = None) -> TunerFile:
    """What a tuner plugin can do of a plan; `step` says which collectives a match by name or number means.

    Raises `PlanError` where that is nothing, where two limits meet on one size, or where the step is needed.
    """
    lines: dict[tuple[CollectiveKind, int, int], int] = {}
    left_out: list[str] = []
    for directive in plan.directives:
        limit = next((each for each in directive.controls if isinstance(each, CommunicationCtas)), None)
        left_out += [
            f"{control.tag} on {directive.match.describe(4)}: a tuner plugin chooses CTAs, algorithm and protocol alone"
            for control in directive.controls
            if control is not limit
        ]
        if limit is None:
            continue
        if limit.num_threads is not None:
            left_out.append(f"{limit.num_threads} threads of a CTA: set NCCL_NTHREADS={limit.num_threads}")
        for kind, least, most in _ranges(directive, step, left_out):
            if lines.setdefault((kind, least, most), limit.max_ctas) != limit.max_ctas:
                raise PlanError(
                    f"The plan asks for {lines[kind, least, most]} and {limit.max_ctas} CTAs for {kind} of {least:,} bytes, "
                    "and a tuner plugin cannot tell them apart. Keep one of the two."
                )
    if not lines:
        why = f" ({left_out[0]})" if left_out else ""
        raise PlanError(
            f"The plan limits the CTAs of no collective that a tuner plugin is asked about{why}. Use `run --plan`."
        )
    ordered = sorted(lines.items(), key=lambda item: (item[0][2] - item[0][1], item[0]))
    return TunerFile(
        lines=tuple(
            TunerLine(collective=kind, least_bytes=least, most_bytes=most, num_ctas=count)
            for (kind, least, most), count in ordered
        ),
        left_out=tuple(dict.fromkeys(left_out)),
    )


def _ranges(directive: Directive, step: Step | None, left_out: list[str]) -> Iterator[tuple[CollectiveKind, int, int]]:
    """The kinds and sizes that a match means."""
    match = directive.match
    if step is None:
        _require_kinds(match)
        kinds: Sequence[CollectiveKind] = (match.collective,) if match.collective is not None else tuple(TUNED)
        found = [(kind, match.num_bytes) for kind in kinds]
    else:
        meant = match.accepted(step)
        found = list(
            dict.fromkeys(_size_of(step, index) for index in meant if isinstance(step.operations[index], Collective))
        )
        others = {
            _size_of(step, i) for i, each in enumerate(step.operations) if i not in meant and isinstance(each, Collective)
        }
        left_out += [
            f"other {kind} of {size:,} bytes, which a tuner plugin cannot tell apart, get the same CTAs"
            for kind, size in found
            if (kind, size) in others
        ]
    for kind, size in found:
        if kind in TUNED:
            yield (kind, 0, LARGEST) if size is None else (kind, size, size)
        else:
            left_out.append(f"{kind}: NCCL asks tuner plugins about {', '.join(TUNED)} alone")


def _size_of(step: Step, index: int) -> tuple[CollectiveKind, int | None]:
    operation = step.operations[index]
    assert isinstance(operation, Collective), "only collectives are asked for"
    return operation.collective, operation.num_bytes


def _require_kinds(match: Match) -> None:
    """Raise `PlanError` where only a step tells which kinds and sizes are meant."""
    known = Match(kind=match.kind, collective=match.collective, num_bytes=match.num_bytes)
    if match != known:
        raise PlanError(
            f"The plan means {match.describe(4)}, and a tuner plugin knows collectives by kind and size. Add --step TRACE, "
            "the trace that the plan was made from, which tells the sizes."
        )
