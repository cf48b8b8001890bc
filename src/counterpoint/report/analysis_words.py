"""Wording of an `Analysis`, shared by the terminal, Markdown, the page and traces."""

from collections.abc import Iterable, Sequence

from counterpoint.analysis.logged import is_logged
from counterpoint.analysis.values import Analysis, Aspect, Cause, Recoverable
from counterpoint.errors import printable
from counterpoint.units import format_numbered, format_percent, format_us

MOST_RANKS_NAMED = 6

CAUSES: dict[Cause, tuple[str, str]] = {
    "dependent": ("dependent", "the next kernel needs the result"),
    "starved": ("starved", "launched, but waiting for SMs that other kernels hold"),
    "own_stream": ("own stream", "on the computation's own stream"),
    "queued": ("queued", "behind another collective"),
    "hardware_queue": ("hardware queue", "serialised in a hardware queue"),
    "launched_late": ("launched late", "the host issued it, or what could hide it, late"),
    "slow_rank": ("slow rank", "waiting for a rank that arrived later"),
    "uneven": ("uneven split", "this rank has more to move than others"),
    "tail": ("tail", "at the end of the step, where nothing is left to compute"),
    "gap": ("gap", "between two kernels that do not need it: a launch gap, a fill or a copy"),
}
ASPECTS: dict[Aspect, str] = {
    "collective": "collective",
    "process_group": "process group",
    "stream": "stream",
    "module": "module",
    "phase": "phase",
    "transport": "transport",
}


def ratio(part: float, whole: float) -> float | None:
    """Return a part's share of the whole; None if the whole is zero."""
    return part / whole if whole > 0 else None


def subject(analysis: Analysis) -> str:
    """Describe what was read, in one line: "ranks 0-3 of 8, NVIDIA H200"."""
    ranks = [rank.rank for rank in analysis.ranks]
    world_size = max((rank.world_size or 0 for rank in analysis.ranks), default=0)
    of_world = f" of {world_size}" if world_size else ""
    devices = sorted({rank.device_name for rank in analysis.ranks if rank.device_name})
    return printable(", ".join([name_ranks(ranks) + of_world, *devices]))


def name_ranks(ranks: Sequence[int]) -> str:
    """Name ranks: "rank 3", "ranks 0-3, 6"."""
    return format_numbered("rank", ranks, MOST_RANKS_NAMED)


def key_figures(analysis: Analysis) -> list[tuple[str, str]]:
    """Return the figures of a mean steady step with their names; none for logs, which hold no steps."""
    if is_logged(analysis.ranks):
        return []
    exposed = ratio(analysis.exposed_us, analysis.step_us)
    overlap = [] if analysis.overlap_ratio is None else [("overlap", format_percent(analysis.overlap_ratio))]
    figures = [
        ("step", format_us(analysis.step_us)),
        ("communication", format_us(analysis.communication_us)),
        ("exposed", format_us(analysis.exposed_us) + ("" if exposed is None else f" ({format_percent(exposed)})")),
        *overlap,
        ("idle", format_us(analysis.idle_us)),
        ("launch-bound", format_us(analysis.launch_bound_us)),
    ]
    if analysis.unrecoverable_us is not None:
        figures.append(("not recoverable", format_us(analysis.unrecoverable_us)))
    return figures


def applicable(analysis: Analysis) -> list[Recoverable]:
    """Return the changes that come with lines to paste, those that recover most first."""
    return sorted((each for each in analysis.recoverable if each.apply), key=lambda each: -each.recovers_us)


def notes_of(analysis: Analysis) -> list[str]:
    """Return further notes, on the whole and on each rank."""
    return _each_once(analysis.notes, ((rank.rank, rank.notes) for rank in analysis.ranks))


def problems_of(analysis: Analysis) -> list[str]:
    """Return what is unknown, of the whole and of each rank."""
    return _each_once(analysis.problems, ((rank.rank, rank.problems) for rank in analysis.ranks))


def _each_once(whole: Iterable[str], ranks: Iterable[tuple[int, tuple[str, ...]]]) -> list[str]:
    """Return sentences on the whole, then those of ranks that differ, each once with the ranks that share it."""
    owners: dict[str, list[int]] = {}
    told = list(whole)
    for rank, lines in ranks:
        for line in (each for each in dict.fromkeys(lines) if each not in told):
            owners.setdefault(line, []).append(rank)
    of_ranks = (f"{name_ranks(numbers).capitalize()}: {line}" for line, numbers in owners.items())
    return [printable(line) for line in (*told, *of_ranks)]
