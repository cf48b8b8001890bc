"""What `counterpoint run` says when the job has ended: proof per rank, what live tuning found, what was left undone.

Everything goes to standard error, since standard output is the job's.
"""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

from counterpoint.engagement import Engagement, State
from counterpoint.report.gpu import STATE_STYLES, print_measurements
from counterpoint.report.text import MIN_WIDTH, new_table, print_plan, shorten
from counterpoint.supervised.proof import ControlProof, ProcessProof
from counterpoint.supervised.run import RunOutcome
from counterpoint.supervised.settings import UNDECIDED, LiveRecord
from counterpoint.units import format_count, format_numbers

NOTHING_LOADED = (
    "nothing was changed, because no process of the command launched a kernel on a GPU; if some did, the command clears "
    "LD_PRELOAD, through which Counterpoint sees launches"
)
NO_STEP = (
    "live tuning never began: no process with a rank (RANK, as torchrun sets it) came to the end of a step, which is a call "
    "of an optimizer's step() or of counterpoint.step()"
)


def new_error_console() -> Console:
    """Like the console of all reports, on standard error."""
    console = Console(stderr=True, soft_wrap=False, markup=False, emoji=False)
    console.width = max(MIN_WIDTH, console.width)
    return console


def print_outcome(console: Console, outcome: RunOutcome) -> None:
    """The proof, rank by rank; equal lines of several ranks are one."""
    if outcome.ended.num_leftover:
        ended = format_count(outcome.ended.num_leftover, "process", "processes")
        print_line(console, f"the command was ended by a signal; {ended} that it left behind were ended, too")
    if not outcome.is_filtered:
        return
    for remark in outcome.remarks:
        print_line(console, remark)
    if outcome.damaged:
        print_line(console, describe_damage(outcome.damaged))
    elif not outcome.processes:
        print_line(console, NOTHING_LOADED)
    for process in outcome.processes:
        if process.problem:
            print_line(console, f"{_who(process)}: {process.problem}")
    _print_proofs(console, outcome)


def describe_damage(damaged: Sequence[str]) -> str:
    """One line for all files that cannot be read."""
    first, *others = damaged
    more = f", and {format_count(len(others), 'other')}" if others else ""
    return f"what took effect is not known in full, because files of this run are damaged ({first}{more})"


def _print_proofs(console: Console, outcome: RunOutcome) -> None:
    """One table: control, kernels, ranks, launches that got it, asked, found, state; below it the reasons in full."""
    rows = _group(outcome)
    if not rows:
        return
    table = new_table("control", "on", "ranks", "launches", "asked", "found", "state")
    table.columns[0].no_wrap = True
    for column in (1, 2, 4, 5, 6):
        table.columns[column].justify = "left"
    for entry, ranks, launches in rows:
        state = Text(entry.state, style=STATE_STYLES[entry.state])
        asked = "" if entry.asked == entry.control else entry.asked
        found = "as asked" if entry.found == entry.asked else entry.found
        table.add_row(entry.control, shorten(entry.target), ranks, launches, asked, found, state)
    console.print(table)
    _print_reasons(console, [entry for entry, _, _ in rows])


def _print_reasons(console: Console, entries: Iterable[Engagement]) -> None:
    """Why controls did not take effect, once for each reason: a column of 80 would cut it into pieces of a word."""
    targets: dict[tuple[str, State, str], list[str]] = {}
    for entry in entries:
        if entry.reason:
            targets.setdefault((entry.control, entry.state, entry.reason), []).append(shorten(entry.target))
    for (control, state, reason), names in targets.items():
        others = f" and {format_count(len(names) - 1, 'other')}" if len(names) > 1 else ""
        console.print(Text(f" - {control} on {names[0]}{others} {state}: {reason}", style=STATE_STYLES[state]))


def print_line(console: Console, line: str) -> None:
    """One line in the manner of all messages, however wide the terminal is."""
    console.print(Text(f"counterpoint: {line}"), soft_wrap=True)


def _group(outcome: RunOutcome) -> list[tuple[Engagement, str, str]]:
    """Equal engagements of several ranks, with the ranks and the launches that were changed of those that matched."""
    found: dict[Engagement, list[tuple[ProcessProof | None, ControlProof]]] = {}
    for applied in outcome.unasked:
        found.setdefault(applied.engagement, []).append((None, applied))
    for process in outcome.processes:
        for applied in process.applied:
            found.setdefault(applied.engagement, []).append((process, applied))
    return [
        (entry, _ranks(process for process, _ in members), _launches([applied for _, applied in members]))
        for entry, members in found.items()
    ]


def _ranks(processes: Iterable[ProcessProof | None]) -> str:
    """Ranks as ranges: "0-3, 6"; processes without a rank by their number."""
    named = [process for process in processes if process is not None]
    ranks = format_numbers(process.rank for process in named if process.rank >= 0)
    parts = [ranks] if ranks else []
    parts += [f"process {process.pid}" for process in named if process.rank < 0]
    return ", ".join(parts)


def _launches(members: Sequence[ControlProof]) -> str:
    """Launches that got the control of those it was meant for, on one rank; a range where ranks differ."""

    def span(numbers: list[int]) -> str:
        return f"{min(numbers):,}" if min(numbers) == max(numbers) else f"{min(numbers):,} to {max(numbers):,}"

    if not any(member.num_matched for member in members):
        return ""
    return f"{span([member.num_applied for member in members])} of {span([member.num_matched for member in members])}"


def _who(process: ProcessProof) -> str:
    return f"rank {process.rank}" if process.rank >= 0 else f"process {process.pid}"


def print_measured(console: Console, outcome: RunOutcome) -> None:
    """What live tuning measured and decided, or where it stood when the job ended, if rank 0 ran here.

    While the job ran, one line told the decision; here is the whole plan, since that line is far up by now.
    """
    record = outcome.record
    if not outcome.processes:
        return  # said already
    if record is None:
        if outcome.is_tuned and outcome.has_rank_0 and not outcome.damaged:
            print_line(console, NO_STEP)
        return
    if record.measurements:
        print_measurements(console, record.measurements)
    if outcome.is_tuned and record.plan is not None and record.stage != "reverted":
        print_plan(console, record.plan)
    if record.stage in UNDECIDED:
        print_line(console, _unfinished(record))
    elif record.stage != "decided":
        for note in record.notes:
            print_line(console, note)


def _unfinished(record: LiveRecord) -> str:
    """What was missing to a decision."""
    steps, needed = format_count(record.num_steps, "step"), record.num_steps_needed
    return (
        f"the job ended after {steps} while live tuning was {record.stage}, and a decision may take until step {needed} "
        f"(--budget); {'no plan was decided' if record.plan is None else 'the plan decided before is kept'}"
    )
