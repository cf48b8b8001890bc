"""Reads traces of several ranks of one job: the analysis of all together, and the step of the rank that sets the pace."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec.structs import replace

from counterpoint.errors import AnalysisError, StepError, shown_path
from counterpoint.units import format_count

if TYPE_CHECKING:
    from counterpoint.analysis.values import Analysis, RankAnalysis
    from counterpoint.job import Job
    from counterpoint.traces import TracedStep

UNNAMED = -1  # the rank is unknown
LEAST_WAIT = 0.01  # of a rank's steps: a smaller difference of waits changes what can be recovered by no more than that
LEAST_MATCHED = 0.5  # of the collectives of the rank with most: with fewer, its waits say little
RANK_IN_NAME = re.compile(r"rank[_-]?(\d{1,6})")


class RanksRead(NamedTuple):
    """All ranks together, and the step of the file `source`; no step if it was not asked for, or if a log has none."""

    analysis: "Analysis"
    step: "TracedStep | None"
    source: str


def read_ranks(traces: Sequence[str], rules: Path | None, show: Callable[[str], None], *, simulates: bool) -> RanksRead:
    """Analyze all ranks together. If `simulates` is set, read the step of the rank that waits least for others: it sets the
    pace. `show` is called with what is done.
    """
    from counterpoint.analysis.combine import combine  # noqa: PLC0415  a fast --help
    from counterpoint.report.text import reading  # noqa: PLC0415

    _check_sources(traces)
    ranks: list[RankAnalysis] = []
    step: TracedStep | None = None
    for rank, traced in _each_rank(traces, rules, reading(show, traces[0]), simulates=simulates):
        step = step if ranks else traced
        ranks.append(rank)
        show(f"read {len(ranks)} of {format_count(len(traces), 'trace')}")
    found = combine(_numbered(ranks))
    source = traces[0] if step is None else _setting_the_pace(found, traces[0])
    if source != traces[0]:
        show(f"reading {shown_path(source)} again: its rank waits least for others")
        _, step = _analyze_file(source, _num_ranks(traces), True)
        assert step is not None, "an Inspector log has no waits"
    return RanksRead(found, step, source)


def job_of_steps(steps: Sequence[str], machine_name: str | None, show: Callable[[str], None]) -> "tuple[Job, str]":
    """Return the job of a step, as `load_job` reads it, or of the traces of several ranks: that of the rank that sets the
    pace, with its waits as the other ranks' traces show them. And its file.

    Raises what `load_job` raises of a trace, and `StepError` where one of several is no trace, or not of the others' job.
    """
    from counterpoint.job import load_job  # noqa: PLC0415
    from counterpoint.report.text import reading  # noqa: PLC0415

    if len(steps) == 1:
        return load_job(steps[0], machine_name, reading(show, steps[0])), steps[0]
    return _job_of_ranks(steps, machine_name, show)


def _job_of_ranks(traces: Sequence[str], machine_name: str | None, show: Callable[[str], None]) -> "tuple[Job, str]":
    """See `job_of_steps`."""
    from counterpoint.analysis.recoverable import without_waits  # noqa: PLC0415
    from counterpoint.job import job_of, names_function, names_workload  # noqa: PLC0415

    for each in traces:
        if names_function(each) or names_workload(each):
            raise StepError(f"'{shown_path(each)}' is no trace. Give traces of the ranks of one job, or one STEP.")
    found, traced, source = read_ranks(traces, None, show, simulates=True)
    name = shown_path(source)
    if traced is None:
        raise StepError(f"'{name}' is a log of NCCL Inspector, which holds no step. Name a profiler trace first.")
    if found.untrusted or found.left_out:
        raise StepError(found.untrusted or found.left_out[0])
    said = f"{name} is planned: of {format_count(len(traces), 'trace')}, its rank waits least for the others."
    if not found.skews:
        said = f"Waits of the ranks for each other are unknown, so {name} is planned alone."
        said = " ".join((said, *found.problems[:1]))
    known = without_waits(traced.step, found, source)
    return job_of(replace(traced, step=known, notes=(*traced.notes, said)), machine_name), source


def _setting_the_pace(found: "Analysis", first: str) -> str:
    """Return the trace of the rank that waits least for others: the first trace, unless another's waits are shorter by more
    than a small part of its steps. Ranks of which few collectives were matched do not count.
    """
    most = max((each.num_collectives for each in found.waits), default=0)
    waited = {each.rank: most * each.mean_us for each in found.waits if each.num_collectives >= LEAST_MATCHED * most}
    by_rank = {rank.rank: rank for rank in found.ranks if rank.rank in waited}
    least = min(by_rank, key=lambda rank: waited[rank], default=None)
    own = next((number for number, rank in by_rank.items() if rank.path == first), None)
    if least is None or own is None:
        return first
    traced_us = sum(step.makespan_us for step in by_rank[own].steps)
    return by_rank[least].path if waited[own] - waited[least] > LEAST_WAIT * traced_us else first


def _each_rank(
    traces: Sequence[str], rules: Path | None, on_progress: Callable[[int, int], None], *, simulates: bool
) -> "Iterator[tuple[RankAnalysis, TracedStep | None]]":
    """Yield the analysis of each file, computed in parallel on all cores; the first has its step if `simulates` is set.

    `on_progress` is called with how much of the file is read, if there is only one.
    """
    from counterpoint.analysis.values import RankAnalysis  # noqa: PLC0415
    from counterpoint.traces.classify import use_rules  # noqa: PLC0415
    from counterpoint.workers import num_cores, worker_processes  # noqa: PLC0415  multiprocessing takes a fifth of --help

    plans = [simulates and place == 0 for place in range(len(traces))]
    num_ranks = [_num_ranks(traces)] * len(traces)
    num_workers = min(len(traces), num_cores())
    if num_workers == 1:
        yield from (_analyze_file(*each, on_progress) for each in zip(traces, num_ranks, plans, strict=True))
        return
    with worker_processes(num_workers, AnalysisError, "name fewer traces at once", use_rules, rules) as pool:
        for packed, step in pool.map(_packed_analysis, traces, num_ranks, plans):
            yield msgspec.msgpack.decode(packed, type=RankAnalysis), step


def _num_ranks(traces: Sequence[str]) -> int:
    """Return how many ranks a job has as far as the files' number and names show it."""
    return max(len(traces), *(1 + (_rank_in_name(path) or 0) for path in traces))


def _rank_in_name(path: str) -> int | None:
    found = RANK_IN_NAME.search(os.path.basename(path))
    return int(found[1]) if found else None


def _packed_analysis(path: str, num_ranks: int, is_planned: bool) -> "tuple[bytes, TracedStep | None]":
    """Return an analysis as MessagePack, because pickling its values takes ten times as long."""
    rank, step = _analyze_file(path, num_ranks, is_planned)
    return msgspec.msgpack.encode(rank), step


def _analyze_file(
    path: str, num_ranks: int, is_planned: bool, on_progress: Callable[[int, int], None] | None = None
) -> "tuple[RankAnalysis, TracedStep | None]":
    """Analyze a file; several files have a process each, which returns the analysis and not the trace's contents.

    A trace that states no number of ranks, as Nsight's and torch 2.0's do not, is taken to be of `num_ranks`.
    """
    from counterpoint.analysis.inspector import is_inspector, read_inspector  # noqa: PLC0415
    from counterpoint.analysis.rank import analyze_rank, analyze_rank_and_step  # noqa: PLC0415
    from counterpoint.traces.formats import read_activity  # noqa: PLC0415
    from counterpoint.traces.traced_step import in_one_line  # noqa: PLC0415

    if is_inspector(Path(path)):
        return read_inspector(Path(path)), None
    with in_one_line(Path(path)):
        trace = read_activity(Path(path), on_progress)
        sized = trace if trace.world_size or num_ranks == 1 else replace(trace, world_size=num_ranks)
        rank, step = analyze_rank_and_step(sized) if is_planned else (analyze_rank(sized), None)
    rank = replace(rank, world_size=trace.world_size)
    if trace.rank is None:
        named = _rank_in_name(path)
        rank = replace(rank, rank=UNNAMED if named is None else named)
    return rank, step


def _check_sources(traces: Sequence[str]) -> None:
    for path in traces:
        if os.path.isdir(path):
            raise AnalysisError(f"'{shown_path(path)}' is a folder. Name the traces in it, such as {path}/*.json.gz.")
        if not os.path.exists(path):
            raise AnalysisError(f"'{shown_path(path)}' does not exist. Name traces, such as traces/*.json.gz.")
    twice = next((path for path in traces if traces.count(path) > 1), None)
    if twice is not None:
        raise AnalysisError(f"'{shown_path(twice)}' is named twice. Name each trace once.")


def _numbered(ranks: "Sequence[RankAnalysis]") -> "list[RankAnalysis]":
    """Number the ranks that neither a trace nor its name states: the lowest free numbers, in the order of the files."""
    taken = {each.rank for each in ranks}
    free = (number for number in range(2 * len(ranks)) if number not in taken)
    return [replace(each, rank=next(free)) if each.rank == UNNAMED else each for each in ranks]
