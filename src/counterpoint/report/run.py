"""Prints what `counterpoint run` reports when the job has ended: proof per rank, what live tuning found, what is
missing.

Everything goes to standard error, because standard output belongs to the job.
"""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

from counterpoint.engagement import Engagement, State
from counterpoint.plan import Refusal
from counterpoint.report.gpu import STATE_STYLES, print_measurements
from counterpoint.report.refusals import merge_alike
from counterpoint.report.text import new_table, print_plan, shorten
from counterpoint.supervised.proof import ControlProof, ProcessProof
from counterpoint.supervised.run import RunOutcome, why_no_step
from counterpoint.supervised.settings import UNDECIDED, LiveRecord
from counterpoint.units import format_count, format_numbers

NOTHING_LOADED = "nothing was changed: no process of the command launched a GPU kernel that Counterpoint could see"


def print_outcome(console: Console, outcome: RunOutcome) -> None:
    """Print what there is to remark, what live tuning found, and the proof of what took effect."""
    print_remarks(console, outcome)
    print_measured(console, outcome)
    print_proofs(console, outcome)


def print_remarks(console: Console, outcome: RunOutcome) -> None:
    """Print what was left behind, what is damaged, and problems of processes."""
    if outcome.ended.num_leftover:
        ended = format_count(outcome.ended.num_leftover, "process", "processes")
        print_line(console, f"a signal ended the command; {ended} that it left behind were ended as well")
    if not outcome.is_filtered:
        return
    for remark in outcome.remarks:
        print_line(console, remark)
    if outcome.damaged:
        print_line(console, describe_damage(outcome.damaged))
    elif not outcome.has_acted:
        status = outcome.ended.exit_status
        why = f"The command ended with status {status}" if status else "Either the job used no GPU, or it clears LD_PRELOAD"
        print_line(console, f"{NOTHING_LOADED}. {why}")
    for process in outcome.processes:
        if process.problem:
            print_line(console, f"{_who(process)}: {process.problem}")


def describe_damage(damaged: Sequence[str]) -> str:
    """Describe all unreadable files in one line."""
    first, *others = damaged
    more = f", and {format_count(len(others), 'other')}" if others else ""
    return f"the proof is incomplete, because files of this run are damaged ({first}{more})"


def print_proofs(console: Console, outcome: RunOutcome) -> None:
    """Print one table: control, kernels, ranks, launches changed, asked, found, state; below it the reasons.

    Equal lines of several ranks are merged.
    """
    rows = _group(outcome) if outcome.is_filtered else []
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
    console.print()


def _print_reasons(console: Console, entries: Iterable[Engagement]) -> None:
    """Print why controls did not take effect, once per kind of reason; a column of an 80-column table would be too
    narrow.
    """
    told: dict[State, list[Refusal]] = {}
    for entry in entries:
        if entry.reason:
            refusal = Refusal(control=entry.control, target=entry.target, reason=entry.reason)
            told.setdefault(entry.state, []).append(refusal)
    for state, refusals in told.items():
        for each in merge_alike(refusals):
            console.print(Text(f" - {each.control} on {each.target} {state}: {each.reason}", style=STATE_STYLES[state]))


def print_line(console: Console, line: str) -> None:
    """Print one line in the style of all messages, whatever the width of the terminal."""
    console.print(Text(f"counterpoint: {line}"), soft_wrap=True)


def _group(outcome: RunOutcome) -> list[tuple[Engagement, str, str]]:
    """Return equal engagements of several ranks, with those ranks and the launches changed of those that matched."""
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
    """Return ranks as ranges, "0-3, 6"; processes without a rank by their process number."""
    named = [process for process in processes if process is not None]
    ranks = format_numbers(process.rank for process in named if process.rank >= 0)
    parts = [ranks] if ranks else []
    parts += [f"process {process.pid}" for process in named if process.rank < 0]
    return ", ".join(parts)


def _launches(members: Sequence[ControlProof]) -> str:
    """Return how many of the matched launches got the control, on one rank; a range if ranks differ."""

    def span(numbers: list[int]) -> str:
        return f"{min(numbers):,}" if min(numbers) == max(numbers) else f"{min(numbers):,} to {max(numbers):,}"

    if not any(member.num_matched for member in members):
        return ""
    return f"{span([member.num_applied for member in members])} of {span([member.num_matched for member in members])}"


def _who(process: ProcessProof) -> str:
    return f"rank {process.rank}" if process.rank >= 0 else f"process {process.pid}"


def print_measured(console: Console, outcome: RunOutcome) -> None:
    """Print what live tuning measured and decided, or how far it got before the job ended, if rank 0 ran here.

    One line told the decision while the job ran. This prints it again, because that line has scrolled away by now.
    """
    record = outcome.record
    if not outcome.has_acted:
        return  # already printed
    if record is None:
        if outcome.is_tuned and outcome.has_rank_0 and not outcome.damaged:
            print_line(console, f"live tuning never began: {why_no_step(outcome.ended)}")
        return
    if outcome.plan_found is not None:
        print_plan(console, outcome.plan_found)
    if record.measurements:
        print_measurements(console, record.measurements)
    if record.stage in UNDECIDED:
        print_line(console, _unfinished(record))
    elif record.stage != "decided":
        for note in record.notes:
            print_line(console, note)


def _unfinished(record: LiveRecord) -> str:
    """Return what was missing for a decision."""
    steps, needed = format_count(record.num_steps, "step"), record.num_steps_needed
    return (
        f"the job ended after {steps}, while live tuning was {record.stage}; a decision may take until step "
        f"{needed} (--budget); "
        f"{'no plan was decided' if record.plan is None else 'the plan decided before is kept'}"
    )
