"""Prints runs on GPUs: measurements, and proof of engagement."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

from counterpoint.engagement import Engagement, summarize_engagements
from counterpoint.measurement.values import Measurement
from counterpoint.planner.operators import TunedOperator
from counterpoint.report.text import new_table, shorten
from counterpoint.units import format_change, format_percent, format_us

LEAST_EXPLAINED = 0.01
"""A change that differs by more than this from that of the medians is explained: it is found round by round."""
STATE_STYLES = {"verified": "green", "refused": "yellow", "failed": "bold red"}


def _change(row: Measurement) -> Text:
    style = "green" if row.is_faster() else "red" if row.is_slower() else ""
    return Text(format_change(row.ratio - 1), style=style)


def print_measurements(console: Console, measurements: Sequence[Measurement]) -> None:
    """Print every measured candidate against the first, which is the unchanged step."""
    table = new_table("candidate (measured)", "median", "change", "spread", "rounds")
    for number, row in enumerate(measurements):
        change = _change(row) if number else ""
        spread = format_percent(row.spread)
        table.add_row(row.label, format_us(row.median_us), change, spread, str(row.num_rounds))
    console.print(table)
    if any(abs(row.median_us / measurements[0].median_us - row.ratio) > LEAST_EXPLAINED for row in measurements[1:]):
        console.print(Text("A change is the median of those within each round, so medians do not give it.", style="dim"))
    console.print()


def print_tuned_operator(console: Console, tuned: TunedOperator) -> None:
    """Print one call of an operator: its schedules against sequential, which one is kept, and the estimated ideal."""
    console.print(Text(tuned.name, style="bold"))
    table = new_table("schedule (measured)", "median", "change", "spread", "")
    table.columns[-1].justify = "left"
    for number, row in enumerate(tuned.measurements):
        remarks = ["the estimate's pick"] if number == tuned.estimated else []
        remarks += ["kept"] if number == tuned.chosen else []
        change = _change(row) if number else ""
        remark = Text(", ".join(remarks), style="dim")
        name = Text(row.label, style="bold" if number == tuned.chosen else "")
        table.add_row(name, format_us(row.median_us), change, format_percent(row.spread), remark)
    ideal = Text("ideal (estimated)", style="dim")
    table.add_row(ideal, format_us(tuned.ideal_us), "", "", Text("the longer of the two, each alone", style="dim"))
    console.print(table)
    console.print()


def print_engagements(console: Console, engagements: Iterable[Engagement]) -> None:
    """Print what was asked, found and verified, one line for equal launches."""
    rows = summarize_engagements(engagements)
    if not rows:
        return
    table = new_table("control", "on", "launches", "asked", "found", "state")
    for row in rows:
        entry = row.engagement
        state = Text(entry.state if not entry.reason else f"{entry.state}: {entry.reason}", style=STATE_STYLES[entry.state])
        table.add_row(entry.control, shorten(entry.target), str(row.count), entry.asked, entry.found, state)
    console.print(table)
    console.print()
