"""After the first step, every rank reports its identity and whether it has the launch filter; all ranks get the outcome.

A rank on another host can lack the filter for many reasons: a launcher dropped a variable, a container lacks the path,
another C library rejects the file, or `counterpoint run` was not started there. Such a rank would be measured with the
others as if it had the plan. So a problem of one rank is a problem of the job: all ranks return to the unmodified job,
and one line names the rank, its host, the reason and the remedy. Ranks wait for each other here once; they wait at most
`ABSENCE_LIMIT_S` for a rank that never reports. This module knows nothing of torch; `why_no_filter` checks this process
only.
"""

import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from counterpoint.errors import CounterpointError
from counterpoint.launch_filter.library import LIBRARY_PREFIX
from counterpoint.ranks import Exchange
from counterpoint.supervised.settings import DIRECTORY_VARIABLE
from counterpoint.units import format_numbered
from counterpoint.value import Value

REPORT_TOPIC, ROLL_TOPIC = "rank reports", "ranks met"
ABSENCE_LIMIT_S = 30.0  # a rank that ends its first step this much later than rank 0 counts as one without an agent
SLACK_S = 10.0  # extra time that the others wait for rank 0, which waits for all
HOLD_S = 0.002  # between two checks
LOADER_LIMIT_S = 10.0
MAPS = Path("/proc/self/maps")
INSIDE = (
    "Start `counterpoint run` on each node, inside the container, directly in front of the job (`counterpoint env` "
    "shows how)"
)


class HandshakeError(CounterpointError):
    """A rank cannot take part, so no rank does. `is_told`: this rank prints it."""

    def __init__(self, message: str, *, is_told: bool) -> None:
        super().__init__(message)
        self.is_told = is_told


class RankReport(Value, frozen=True, kw_only=True):
    """The report of one rank: its host, the folder of its `counterpoint run`, the version there, and why it cannot take
    part.

    `is_silent`: `run` prints the reason at the end.
    """

    host: str
    run: str
    version: str
    problem: str = ""
    is_silent: bool = False


class Roll(Value, frozen=True, kw_only=True):
    """By rank, its host and the first rank of the same `counterpoint run`; or the `problem` of the job, in words."""

    hosts: tuple[str, ...] = ()
    runs: tuple[int, ...] = ()
    problem: str = ""
    is_silent: bool = False

    def describe(self, ranks: Sequence[int]) -> str:
        """Return words such as "ranks 4-7 (host n2)"."""
        hosts = dict.fromkeys(self.hosts[rank] for rank in ranks if rank < len(self.hosts))
        where = f" (host{'s' * (len(hosts) > 1)} {', '.join(hosts)})" if hosts else ""
        return f"{format_numbered('rank', ranks)}{where}"


def report_rank(exchange: Exchange, report: RankReport) -> None:
    """Send this rank's report. A rank may do so early, before its first step has ended."""
    exchange.offer(REPORT_TOPIC, msgspec.json.encode(report).decode())


def meet(exchange: Exchange, *, limit_s: float | None = None, slack_s: float = SLACK_S) -> Roll:
    """Wait for the reports of all ranks, this one included; `limit_s` None means `ABSENCE_LIMIT_S`. Raises
    `HandshakeError` on all ranks if one cannot take part.
    """
    limit_s = ABSENCE_LIMIT_S if limit_s is None else limit_s
    since_s = time.monotonic()
    while (roll := _roll(exchange, time.monotonic() - since_s, limit_s, slack_s)) is None:
        time.sleep(HOLD_S)
    if roll.problem:
        raise HandshakeError(roll.problem, is_told=not roll.is_silent and _speaks(exchange))
    return roll


def fail_handshake(exchange: Exchange, report: RankReport) -> None:
    """Report why this rank cannot take part; rank 0 also answers the others, which wait for it."""
    report_rank(exchange, report)
    if exchange.rank == 0:
        own = Roll(problem=f"rank 0 (host {report.host}): {report.problem}", is_silent=report.is_silent)
        exchange.announce(ROLL_TOPIC, msgspec.json.encode(own).decode())


def _roll(exchange: Exchange, waited_s: float, limit_s: float, slack_s: float) -> Roll | None:
    """Return the outcome, or None so far. Rank 0 gathers, so that the store gets one request per rank, not one per pair."""
    if exchange.rank != 0:
        text = exchange.heard(ROLL_TOPIC)
        if text is not None:
            return msgspec.json.decode(text, type=Roll)
        return Roll(problem=_absent(exchange, [0])) if waited_s > limit_s + slack_s else None
    texts = exchange.gathered(REPORT_TOPIC)
    if texts is not None:
        roll = compare_reports([msgspec.json.decode(text, type=RankReport) for text in texts])
    elif waited_s > limit_s:
        roll = Roll(problem=_absent(exchange, exchange.missing(REPORT_TOPIC)))
    else:
        return None
    exchange.announce(ROLL_TOPIC, msgspec.json.encode(roll).decode())
    return roll


def compare_reports(reports: Sequence[RankReport]) -> Roll:
    """Return the hosts by rank, or the problem of the first rank that has one, and how many others have one."""
    started = [(report.host, report.run) for report in reports]
    roll = Roll(hosts=tuple(report.host for report in reports), runs=tuple(map(started.index, started)))
    own = reports[0].version
    by_problem: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        other = f"Counterpoint {report.version} runs there, and {own} on rank 0. Install one version"
        problem = report.problem or (other if report.version != own else "")
        if problem:
            by_problem.setdefault(problem, []).append(rank)
    if not by_problem:
        return roll
    is_silent = all(report.is_silent for report in reports)
    spoken = [f"{roll.describe(ranks)}: {problem}" for problem, ranks in by_problem.items()]
    return msgspec.structs.replace(roll, problem="; ".join(spoken), is_silent=is_silent)


def _absent(exchange: Exchange, missing: Sequence[int]) -> str:
    return (
        f"{format_numbered('rank', missing)}: no filter and no agent reported within {ABSENCE_LIMIT_S:g} s of rank "
        f"{exchange.rank}. Either "
        "`counterpoint run` did not start the processes, or their Python cannot import counterpoint, or they "
        f"finished no step. {INSIDE}"
    )


def _speaks(exchange: Exchange) -> bool:
    """Return whether this rank speaks: rank 0 speaks for all; if rank 0 is absent, the first rank that is present."""
    if exchange.rank == 0 or exchange.heard(ROLL_TOPIC) is not None:
        return exchange.rank == 0
    absent = exchange.missing(REPORT_TOPIC)
    return all(rank in absent for rank in range(exchange.rank))


# --- this process ---


def why_no_filter(environment: Mapping[str, str], maps: Path = MAPS) -> str:
    """Return why this process lacks the launch filter, with the remedy; empty if it has it."""
    directory = environment.get(DIRECTORY_VARIABLE, "")
    with suppress(OSError):
        if LIBRARY_PREFIX in maps.read_text(errors="replace"):
            return "" if Path(directory).is_dir() else _foreign(directory)
    named = [path for path in environment.get("LD_PRELOAD", "").replace(":", " ").split() if LIBRARY_PREFIX in path]
    if not named:
        return (
            "no filter, because LD_PRELOAD does not name it there. Something between `counterpoint run` and "
            "this process cleared or replaced the variable (env -i, sudo, srun --export, a wrapper). Keep "
            f"LD_PRELOAD. {INSIDE}"
        )
    if not Path(named[0]).exists():
        where = "which does not exist on this host or in this container"
        return f"no filter, because LD_PRELOAD names {named[0]}, {where}. {INSIDE}"
    said = _loader_says(named[0])
    return (
        f"no filter, because the dynamic linker did not load {named[0]}{': ' + said if said else ''}. Install Counterpoint "
        "from its wheel, whose filter needs glibc 2.17, and set TMPDIR to a folder without noexec"
    )


def _foreign(directory: str) -> str:
    return f"no filter, because the folder of the run ({directory}) is not on this host or in this container. {INSIDE}"


def _loader_says(library: str) -> str:
    """Return the dynamic linker's message about a library that it skips: "object ... cannot be preloaded (reason):
    ignored.".
    """
    with suppress(OSError, subprocess.SubprocessError):
        ended = subprocess.run(
            ["/bin/true"],
            env={"LD_PRELOAD": library},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LOADER_LIMIT_S,
            check=False,
        )
        return ended.stderr.partition("preloaded (")[2].partition(")")[0] or ended.stderr.strip()[:100]
    return ""
