"""Reads the logs of NCCL Inspector, and of RCCL Inspector, whose format is the same.

The library's plugin writes one file per process, with one JSON object for each collective, send and receive of each
communicator: its function, its size, and how long it ran. It writes no computation, and no starts unless it is verbose. The
format is described in NVIDIA/nccl, plugins/profiler/inspector/README.md (version v4.0). Two facts are from the source there,
as of June 2026. The size of all-gathers, reduce-scatters and all-to-alls is one rank's part (`inspectorComputeOpBw`).
Sequence numbers count each function of a communicator separately (`seqNumber` in src/include/comm.h).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from counterpoint.analysis.inspector_records import MOST_RANGES, Lines, Record, left_out
from counterpoint.analysis.values import RankAnalysis, TracedCollective
from counterpoint.errors import AnalysisError, CounterpointError, shown, shown_path
from counterpoint.files import MAX_TRACE_BYTES, read_pieces
from counterpoint.step import CollectiveKind
from counterpoint.units import KIB, format_count, format_numbers
from counterpoint.value import require

HEAD_BYTES = 64 * KIB
KEYS = (b'"coll_perf"', b'"p2p_perf"', b'"inspector_output_format_version"')
UNNAMED = ("", "unknown")  # the plugin's names for a communicator without a name
TRANSPORT = "nccl"  # logs of RCCL do not state that they are RCCL's
KINDS: dict[str, CollectiveKind] = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "allgatherv": "all_gather",
    "reducescatter": "reduce_scatter",
    "all2all": "all_to_all",
    "alltoall": "all_to_all",
    "alltoallpivot": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "send": "send_recv",
    "recv": "send_recv",
    "sendrecv": "send_recv",
}
SIZED_BY_PART = ("all_gather", "reduce_scatter", "all_to_all")
NOT_LOGGED = (
    "NCCL Inspector's log holds no computation and no start times. So exposed time, its causes, steps and "
    "recoverable time are unknown."
)
REMEDY = "give a log of NCCL Inspector (.log, .jsonl)"

Key = tuple[str, int, str, int]  # communicator, rank in it, function, sequence number


def is_inspector(path: Path | str) -> bool:
    """Return whether a file's content is a log of NCCL Inspector, gzipped or not. Unreadable files give False."""
    path = Path(path)
    if not path.is_file():  # a pipe can be read only once
        return False
    head = b""
    try:
        for piece in read_pieces(path, AnalysisError, REMEDY, most=MAX_TRACE_BYTES, is_unpacked=True):
            head += piece
            if len(head) >= HEAD_BYTES:
                break
    except CounterpointError:
        return False
    return any(key in head[:HEAD_BYTES] for key in KEYS)


def read_inspector(path: Path | str) -> RankAnalysis:
    """Return the collectives of one process's log, without steps and without what needs computation or start times.

    The rank is that in the largest communicator. `group_number` is the collective's sequence number, `end_us` its duration
    in microseconds, and `start_us` is 0. If a record was written twice, the latest is kept. Lines that hold no record are
    counted in `problems`. Raises `AnalysisError` if the file cannot be read, or holds no record.
    """
    lines = Lines()
    found: dict[Key, Record] = {}
    for record in lines.records(read_pieces(path, AnalysisError, REMEDY, most=MAX_TRACE_BYTES, is_unpacked=True)):
        key = _key(record)
        held = found.get(key)
        if held is None or held.metadata.dump_timestamp_us <= record.metadata.dump_timestamp_us:
            found[key] = record
    said = lines.describe_bad()
    require(bool(found), AnalysisError, f"{shown_path(path)} holds no record of NCCL Inspector. {said}Record it again.")
    world = min(
        (record.header for record in found.values()), key=lambda header: (-header.n_ranks, str(header.id), header.rank)
    )
    records, others = _of_one_rank(found.values())
    rank = next((r.header.rank for r in records if r.header.id == world.id), world.rank)
    known = [record for record in records if _kind(record) is not None]
    return RankAnalysis(
        path=str(path),
        rank=rank,
        source="inspector",
        num_operations=len(known),
        collectives=tuple(_collective(record, rank, number) for number, record in enumerate(known)),
        notes=_notes(known),
        problems=(NOT_LOGGED, *([said.strip()] if said else []), *others, *_problems(records)),
    )


def _key(record: Record) -> Key:
    """Return a key that is unique among the collectives of a process."""
    performed = record.performed
    assert performed is not None, "records without one are left out"
    function = performed.function if record.coll_perf is not None else "p2p"
    return record.communicator, record.header.rank, function, performed.number


def _of_one_rank(found: Iterable[Record]) -> tuple[list[Record], list[str]]:
    """Return the lowest rank's records of each communicator, and notes on others: a process may drive several GPUs."""
    records = list(found)
    lowest: dict[str, int] = {}
    for record in records:
        lowest[record.communicator] = min(record.header.rank, lowest.get(record.communicator, record.header.rank))
    kept = [record for record in records if record.header.rank == lowest[record.communicator]]
    if len(kept) == len(records):
        return kept, []
    ranks = {record.header.rank for record in records}
    count = format_count(len(records) - len(kept), "entry", "entries")
    return kept, [
        f"The log holds ranks {format_numbers(ranks, MOST_RANGES)} in one file; only the lowest of each communicator is "
        f"read, and {count} of the others {left_out(len(records) - len(kept))}. Give a log for each "
        f"process, and run one process for each GPU."
    ]


def _kind(record: Record) -> CollectiveKind | None:
    """Return the collective that a record's function is; None for a function that is unknown here."""
    performed = record.performed
    return None if performed is None else KINDS.get(performed.function.replace("_", "").lower())


def _collective(record: Record, rank: int, number: int) -> TracedCollective:
    performed, kind, header = record.performed, _kind(record), record.header
    assert performed is not None, "records without one are left out"
    assert kind is not None, "only known ones are asked for"
    return TracedCollective(
        rank=rank,
        number=number,
        group_number=performed.number,
        step=-1,
        name=performed.function,
        collective=kind,
        transport=TRANSPORT,
        stream=-1,
        start_us=0.0,
        end_us=performed.time_us,
        num_bytes=performed.num_bytes * (header.n_ranks if kind in SIZED_BY_PART else 1),
        group_size=header.n_ranks,
        process_group=record.communicator if (header.comm_name or "") in UNNAMED else header.comm_name,
        communicator=record.communicator,
    )


def _notes(records: Sequence[Record]) -> tuple[str, ...]:
    if not any(record.p2p_perf is not None for record in records):
        return ()
    return ("Sends and receives are listed one by one, so an all-to-all that consists of them does not show as one.",)


def _problems(records: Sequence[Record]) -> list[str]:
    """Return what this log lacks, apart from what every log lacks."""
    performed = [(record, record.performed) for record in records if record.performed is not None]
    unknown = Counter(each.function for record, each in performed if _kind(record) is None)
    untimed = sum(each.time_us == 0 for record, each in performed if _kind(record) is not None)
    by_host = sum(each.timing_source.endswith("_cpu") for _, each in performed)
    problems = []
    if unknown:
        named = ", ".join(f"'{shown(name)}'" for name in sorted(unknown)[:MOST_RANGES])
        count = format_count(unknown.total(), "entry", "entries")
        problems.append(f"{count} of unknown functions ({named}) {left_out(unknown.total())}.")
    if untimed:
        problems.append(f"{format_count(untimed, 'entry has', 'entries have')} no time: no bandwidth is taken from them.")
    if by_host:
        what = format_count(by_host, "time is", "times are")
        problems.append(
            f"{what} the host's (kernel_cpu, collective_cpu), not the GPU's, so waits and bandwidths include its delays."
        )
    return problems
