"""Writes a plan as the CSV file of NVIDIA's example tuner plugin, so that a job can use it without Counterpoint.

NCCL asks a tuner plugin for each collective's algorithm, protocol and CTAs (channels), by kind and size. The plugin in
NCCL's sources (plugins/tuner/example, before 2.29.7 ext-tuner/example) answers from a file with the columns
collective_type, min_bytes, max_bytes, algorithm, protocol, channels, nNodes, nRanks, numPipeOps, regBuff. The first
matching line counts; -1 matches everything. Its sizes are the larger of a rank's buffers (enqueue.cc:
ncclFuncMaxSendRecvCount), as in a step. The plugin of 2.30.7 has read such files in a small test program; it has not run
in a job or with GPUs.

Only a plan's limit on CTAs is used. A plan holds no algorithm and no protocol, and such a line must name both.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from counterpoint.controls import CommunicationCtas
from counterpoint.errors import PlanError
from counterpoint.plan import Directive, Match, Plan
from counterpoint.step import CollectiveKind, Step
from counterpoint.value import Value, require, text_output

Algorithm = Literal["tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat"]
Protocol = Literal["ll", "ll128", "simple"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
PROTOCOLS: tuple[Protocol, ...] = get_args(Protocol)
# tuner plugins are not asked about sends and receives, nor about all-to-alls, which consist of them (NCCL 2.28.9,
# src/include/plugin/tuner)
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
TUNER = text_output("tuner", (), HEADER.partition("\n")[0])


class TunerLine(Value, frozen=True, kw_only=True):
    """One line: the collectives of a kind with sizes in a range, and the CTAs, algorithm and protocol they get."""

    collective: CollectiveKind
    least_bytes: int
    most_bytes: int
    num_ctas: int

    def written(self, algorithm: Algorithm, protocol: Protocol) -> str:
        """Write the line for the plugin: for any number of nodes, ranks and operations, with and without registered
        buffers.
        """
        sizes = f"{self.least_bytes},{self.most_bytes}"
        return f"{TUNED[self.collective]},{sizes},{algorithm},{protocol},{self.num_ctas},-1,-1,-1,-1"


class TunerFile(Value, frozen=True, kw_only=True):
    """The lines, those for single sizes first, and a description of what the file leaves out of the plan."""

    lines: tuple[TunerLine, ...]
    left_out: tuple[str, ...] = ()

    def written(self, algorithm: Algorithm, protocol: Protocol) -> str:
        """Return the text of the file."""
        return HEADER + "".join(f"{line.written(algorithm, protocol)}\n" for line in self.lines)


def tuner_file(plan: Plan, step: Step | None = None) -> TunerFile:
    """Translate the part of a plan that a tuner plugin can apply; `step` resolves matches by name or number to
    collectives.

    Raises `PlanError` if there is no such part, if two limits conflict for one size, or if the step is needed.
    """
    require(bool(plan.directives), PlanError, "The plan changes nothing, so there is nothing to write. Start the job alone.")
    lines: dict[tuple[CollectiveKind, int, int], int] = {}
    left_out: list[str] = []
    for directive in plan.directives:
        limit = next((each for each in directive.controls if isinstance(each, CommunicationCtas)), None)
        left_out += [
            f"{control.tag} on {directive.match.describe(4)}: a tuner plugin chooses only CTAs, algorithm and protocol"
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
                    f"The plan asks for {lines[kind, least, most]} and for {limit.max_ctas} CTAs for {kind} of "
                    f"{least:,} bytes; a tuner plugin cannot tell the two apart. Keep one of them."
                )
    if not lines:
        why = f" ({left_out[0]})" if left_out else ""
        raise PlanError(
            f"The plan limits the CTAs of no collective that NCCL asks tuner plugins about{why}. Use `run --plan`."
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
    """Yield the kinds and sizes that a match accepts."""
    match = directive.match
    if step is None:
        _require_kinds(match)
        kinds: Sequence[CollectiveKind] = (match.collective,) if match.collective is not None else tuple(TUNED)
        found = [(kind, match.num_bytes) for kind in kinds]
    else:
        meant = set(match.accepted(step))
        found = list(dict.fromkeys(_size_of(step, number) for number in step.collectives() if number in meant))
        others = {_size_of(step, number) for number in step.collectives() if number not in meant}
        left_out += [
            f"other {kind} of {size:,} bytes get the same CTAs, because a tuner plugin cannot tell them apart"
            for kind, size in found
            if (kind, size) in others
        ]
    for kind, size in found:
        if kind in TUNED:
            yield (kind, 0, LARGEST) if size is None else (kind, size, size)
        else:
            left_out.append(f"{kind}: NCCL asks tuner plugins only about {', '.join(TUNED)}")


def _size_of(step: Step, index: int) -> tuple[CollectiveKind, int | None]:
    operation = step.collective(index)
    return operation.collective, operation.num_bytes


def _require_kinds(match: Match) -> None:
    """Raise `PlanError` if a step is needed to know which kinds and sizes are meant."""
    known = Match(kind=match.kind, collective=match.collective, num_bytes=match.num_bytes)
    if match != known:
        raise PlanError(
            f"The plan matches {match.describe(4)}, but a tuner plugin knows only kinds and sizes. Add --step "
            "TRACE, the trace that the plan was made from; it gives the sizes."
        )
