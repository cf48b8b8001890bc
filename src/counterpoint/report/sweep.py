"""Prints a sweep: the front as a table, and all estimates as a plot. Nothing is computed here but widths."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from counterpoint.cluster.sweep_file import SweepFile
from counterpoint.cluster.sweep_store import SweepRow
from counterpoint.errors import printable, shown
from counterpoint.report.cluster import NEVER_COMPARED
from counterpoint.report.text import new_table
from counterpoint.units import GIB, format_bytes, format_count, format_percent, format_us

MOST_SHOWN = 20
BAR_WIDTH = 8


def print_sweep(console: Console, sweep: SweepFile, rows: Sequence[SweepRow], best: Sequence[SweepRow]) -> None:
    """Print what was tried, the front, and what was impossible."""
    estimated = [row for row in rows if row.estimate is not None]
    too_large = sum(not row.estimate.fits_memory for row in estimated if row.estimate is not None)
    console.print(
        Text(
            f"{format_count(len(rows), 'combination')}: {len(estimated)} estimated, {too_large} of them larger than memory, "
            f"{len(rows) - len(estimated)} impossible"
        )
    )
    for problem, count in Counter(row.problem for row in rows if row.problem).most_common(2):
        console.print(Text(f"  impossible, {count}: e.g. {printable(shown(problem, 160))}", style="dim"))
    console.print(Text(NEVER_COMPARED, style="dim"))
    if not best:
        console.print(Text("Nothing fits in memory: raise tensor, pipeline, sharding or recompute in [sweep]."))
        return
    console.print()
    names = sweep.axes.names
    table = new_table(", ".join(names), "step", "tokens/s/GPU", "", "MFU", "memory", "GPUs")
    most = max(row.estimate.tokens_per_s_per_gpu for row in best if row.estimate is not None)
    for row in best[:MOST_SHOWN]:
        figures = row.estimate
        assert figures is not None, "the front holds estimates"
        table.add_row(
            printable(", ".join(_worded(row.point.get(name)) for name in names)),
            format_us(figures.step_us),
            f"{figures.tokens_per_s_per_gpu:,.0f}",
            "█" * round(BAR_WIDTH * figures.tokens_per_s_per_gpu / most),
            format_percent(figures.model_flops_utilization),
            format_bytes(figures.memory_bytes),
            f"{figures.num_gpus:,}",
        )
    console.print(table)
    if len(best) > MOST_SHOWN:
        console.print(Text(f"and {len(best) - MOST_SHOWN} more on the front; -o keeps all rows", style="dim"))


def _worded(value: object) -> str:
    return ("+".join(value) or "none") if isinstance(value, (tuple, list)) else "none" if value is None else str(value)


def draw_front(rows: Sequence[SweepRow], best: Sequence[SweepRow], path: Path) -> None:
    """Plot memory against tokens per second and GPU: a dot for every estimate, a line for the front."""
    from matplotlib.figure import Figure  # noqa: PLC0415  an extra

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    panel = figure.subplots()
    for color, size, chosen in (("0.7", 8, rows), ("#0072B2", 18, best)):
        found = [row.estimate for row in chosen if row.estimate is not None]
        memory = [each.memory_bytes / GIB for each in found]
        panel.scatter(memory, [each.tokens_per_s_per_gpu for each in found], c=color, s=size)
    line = sorted((row.estimate.memory_bytes / GIB, row.estimate.tokens_per_s_per_gpu) for row in best if row.estimate)
    panel.plot([x for x, _ in line], [y for _, y in line], color="#0072B2", linewidth=0.8, label="front")
    panel.set_xlabel("memory of a GPU (GiB)")
    panel.set_ylabel("tokens per second and GPU")
    panel.set_title("Simulated, not measured", fontsize=9)
    panel.set_ylim(bottom=0)
    panel.legend()
    figure.savefig(path)
