"""Prints `validate`: figures of each way to predict, beside naive models, and the worst errors."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from counterpoint.report.text import new_table
from counterpoint.units import format_change, format_us
from counterpoint.validation.figures import Figures
from counterpoint.validation.outcome import Outcome

NUM_WORST = 8


def print_validation(console: Console, outcomes: Sequence[Outcome]) -> None:
    """Print every file of measurements in turn."""
    for outcome in outcomes:
        conditions = outcome.conditions
        what = f"{conditions.get('gpus', outcome.machine)}, measured {conditions.get('date', 'at an unknown date')}"
        console.print(Text.assemble((what, "bold"), f"; simulated as {outcome.machine}"))
        table = new_table("from", "cases", "rows", "error", "p90", "bias", "sign", "ranks", "regret", "worst")
        for found in outcome.origins:
            for figures in found.figures:
                name = found.origin if figures.model == "simulator" else f"  {figures.model}"
                table.add_row(name, *_cells(figures))
        console.print(table)
        for found in outcome.origins:
            worst = sorted(found.rows, key=lambda row: -abs(row.error))[:NUM_WORST]
            misses = new_table(f"worst from {found.origin}", "variant", "measured", "predicted", "error")
            for row in worst:
                times = format_us(row.measured_us), format_us(row.predicted_us), format_change(row.error)
                misses.add_row(row.group, row.label, *times)
            console.print(misses)
        for line in outcome.left_out:
            console.print(Text(f"left out: {line}", style="yellow"))
        console.print()


def _cells(figures: Figures) -> list[str]:
    sign = "-" if figures.clear_sign is None else f"{figures.clear_sign:.0%}"
    ranks = "-" if figures.rank_correlation is None else f"{figures.rank_correlation:z.2f}"
    return [
        str(figures.num_groups),
        str(figures.num_rows),
        f"{figures.mean_error:.1%}",
        f"{figures.p90_error:.0%}",
        f"{figures.bias:+.0%}",
        sign,
        ranks,
        f"{figures.mean_regret:.1%}",
        f"{figures.worst_regret:.0%}",
    ]
