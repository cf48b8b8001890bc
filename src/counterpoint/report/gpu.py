"""What the command line prints of runs on GPUs: measurements, proof of engagement, the paper's grid."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

from counterpoint.engagement import Engagement, summarize_engagements
from counterpoint.measurement.values import Measurement
from counterpoint.paper.grid import PLAIN, SEQUENTIAL, PaperResult, simulation_accuracy
from counterpoint.planner.operators import TunedOperator
from counterpoint.report.text import new_table, shorten
from counterpoint.units import format_change, format_percent, format_us

STATE_STYLES = {"verified": "green", "refused": "yellow", "failed": "bold red"}


def _change(row: Measurement) -> Text:
    style = "green" if row.is_faster() else "red" if row.is_slower() else ""
    return Text(format_change(row.ratio - 1), style=style)


def print_measurements(console: Console, measurements: Sequence[Measurement]) -> None:
    """Every measured candidate against the first, which is the step as it is."""
    table = new_table("candidate (measured)", "median", "change", "spread", "rounds")
    for number, row in enumerate(measurements):
        change = _change(row) if number else ""
        spread = format_percent(row.spread)
        table.add_row(row.label, format_us(row.median_us), change, spread, str(row.num_rounds))
    console.print(table)
    console.print()


def print_tuned_operator(console: Console, tuned: TunedOperator) -> None:
    """One call of an operator: its schedules against sequential, which of them is kept, and the ideal by the estimate."""
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
    table.add_row(ideal, format_us(tuned.ideal_us), "", "", Text("the longer of both, each alone", style="dim"))
    console.print(table)
    console.print()


def print_engagements(console: Console, engagements: Iterable[Engagement]) -> None:
    """Asked, found and verified, one line for equal launches."""
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


def print_paper(console: Console, result: PaperResult) -> None:
    """One workload of the paper's grid; measured columns only where something ran."""
    console.print(
        Text.assemble(
            (result.workload, "bold"),
            f" on {result.machine}, {result.num_ranks} ranks; ideal {format_us(result.ideal_us)}",
        )
    )
    is_measured = any(row.measured_us is not None for row in result.rows)
    headers = ["variant", "measured", "against plain", "spread", "simulated"] if is_measured else ["variant", "simulated"]
    table = new_table(*headers, "")
    table.columns[-1].justify = "left"
    for row in result.rows:
        simulated = format_us(row.simulated_us) if row.simulated_us is not None else "-"
        name = Text(row.label, style="bold" if row.label in (PLAIN, SEQUENTIAL) else "")
        if row.measured_us is None or row.ratio is None or row.spread is None:
            table.add_row(name, *([""] * 3 if is_measured else []), simulated, "")
            continue
        remarks = [] if row.is_engaged else ["NOT ENGAGED"]
        remarks += [] if row.is_identical else ["OUTPUTS DIFFER"]
        change = format_change(row.ratio - 1)
        table.add_row(
            name, format_us(row.measured_us), change, format_percent(row.spread), simulated, Text(", ".join(remarks), "red")
        )
    console.print(table)
    origin = result.choice.expectation.origin if result.choice.expectation else "simulated"
    console.print(Text(f"planner's choice ({origin}): {result.choice.verdict}  {result.choice.summary}"))
    _print_accuracy(console, result)
    console.print()


def _print_accuracy(console: Console, result: PaperResult) -> None:
    accuracy = simulation_accuracy(result)
    if accuracy is not None:
        console.print(
            Text(
                f"simulated against measured: {format_percent(accuracy.mean_absolute_error)} off on average, at most "
                f"{format_change(accuracy.worst_error)} ({accuracy.worst_label}); rank correlation "
                f"{accuracy.rank_correlation:z.2f} over {accuracy.num_rows} variants"
            )
        )
