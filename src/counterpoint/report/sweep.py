"""Prints a sweep: the front as a table, and all estimates as a plot. Nothing is computed here but widths."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.columns import Columns
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from counterpoint.cluster.sweep_file import SweepFile
from counterpoint.cluster.sweep_store import SweepRow
from counterpoint.errors import printable, shown
from counterpoint.report.cluster import NEVER_COMPARED
from counterpoint.report.text import new_table
from counterpoint.units import GIB, US_PER_S, format_bytes, format_count, format_percent, format_us

MOST_SHOWN = 20
BAR_WIDTH = 8
WIDE = 1000  # columns, which no table needs


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
        remedy = "Nothing fits in memory: raise tensor, pipeline, sharding or recompute in [sweep]."
        console.print(Text(remedy if too_large else "No combination is possible. Name other values in [sweep]."))
        return
    console.print()
    _print_front(console, sweep.axes.names, best[:MOST_SHOWN])
    if len(best) > MOST_SHOWN:
        console.print(Text(f"and {len(best) - MOST_SHOWN} more on the front; -o keeps all rows", style="dim"))


def _print_front(console: Console, names: Sequence[str], best: Sequence[SweepRow]) -> None:
    """Print a table; on a terminal too narrow for it, two lines for each row, so that no word is cut."""
    units = ("step", "tokens/s/GPU", "", "MFU", "memory", "GPUs")
    table = new_table(", ".join(names), *units)
    most = max(row.estimate.tokens_per_s_per_gpu for row in best if row.estimate is not None)
    lines: list[tuple[str, ...]] = []
    for row in best:
        figures = row.estimate
        assert figures is not None, "the front holds estimates"
        lines.append(
            (
                printable(", ".join(_worded(row.point.get(name)) for name in names)),
                format_us(figures.step_us),
                f"{figures.tokens_per_s_per_gpu:,.0f}",
                "█" * round(BAR_WIDTH * figures.tokens_per_s_per_gpu / most),
                format_percent(figures.model_flops_utilization),
                format_bytes(figures.memory_bytes),
                f"{figures.num_gpus:,}",
            )
        )
        table.add_row(*lines[-1])
    if console.measure(table, options=console.options.update(max_width=WIDE)).maximum <= console.width:
        console.print(table)
        return
    console.print(Text(", ".join(names), style="bold"))
    for label, *figures_of in lines:
        words = [f"{figure} {unit}" for figure, unit in zip(figures_of, units, strict=True) if unit]
        console.print(Text(label))
        console.print(Padding(Columns(words, padding=(0, 2)), (0, 0, 0, 2)))


def _worded(value: object) -> str:
    return ("+".join(value) or "none") if isinstance(value, (tuple, list)) else "none" if value is None else str(value)


def tell_progress(show: Callable[[str], None], clock: Callable[[], float]) -> Callable[[int, int], None]:
    """Return a listener that shows how many combinations are done, and how long the others will take at the present rate.

    Its first call says what was done before. `clock` gives seconds.
    """
    since: list[tuple[int, float]] = []

    def tell(num_done: int, num_all: int) -> None:
        since.append((num_done, clock())) if not since else None
        first, begun_s = since[0]
        rate = (num_done - first) / max(clock() - begun_s, 1e-9)
        left = f", {format_us((num_all - num_done) / rate * US_PER_S)} left" if rate else ""
        show(f"{num_done:,} of {format_count(num_all, 'combination')} done{left}")

    return tell


def draw_front(rows: Sequence[SweepRow], best: Sequence[SweepRow], path: Path) -> None:
    """Plot memory against tokens per second and GPU: a mark for each estimate, a line per number of GPUs for the front."""
    from matplotlib.figure import Figure  # noqa: PLC0415  an extra

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    panel = figure.subplots()
    able = [row for row in rows if row.estimate is not None and row.estimate.fits_memory]
    others = [row for row in rows if row.estimate is not None and not row.estimate.fits_memory]
    styles = (("larger than memory", "x", "0.75", 14), ("estimated", "o", "0.6", 10), ("front", "o", "#0072B2", 22))
    for (label, marker, color, size), chosen in zip(styles, (others, able, best), strict=True):
        if chosen:
            panel.scatter(*_places(chosen), marker=marker, c=color, s=size, label=label, linewidths=0.8)
    for num_gpus in sorted({row.estimate.num_gpus for row in best if row.estimate is not None}):
        members = [row for row in best if row.estimate is not None and row.estimate.num_gpus == num_gpus]
        memory, rate = _places(sorted(members, key=lambda row: row.estimate.memory_bytes if row.estimate else 0.0))
        panel.plot(memory, rate, color="#0072B2", linewidth=0.8)
        panel.annotate(f"{num_gpus:,} GPUs", (memory[-1], rate[-1]), (6, 4), textcoords="offset points", fontsize=8)
    panel.set_xlabel("memory of a GPU (GiB)")
    panel.set_ylabel("tokens per second and GPU")
    panel.set_title("Simulated, not measured", fontsize=9)
    panel.margins(x=0.12, y=0.12)  # room for the labels beside the front's last marks
    panel.set_ylim(bottom=0)
    panel.legend(loc="lower right", fontsize=8)
    figure.savefig(path)


def _places(rows: Sequence[SweepRow]) -> tuple[list[float], list[float]]:
    figures = [row.estimate for row in rows if row.estimate is not None]
    return [each.memory_bytes / GIB for each in figures], [each.tokens_per_s_per_gpu for each in figures]
