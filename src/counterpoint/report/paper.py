"""Prints the first paper's grid and its sweeps: times, TimeRatio, overlap ratio, energy."""

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from counterpoint.paper.accuracy import simulation_accuracy
from counterpoint.paper.values import COPY_ENGINES, PLAIN, SEQUENTIAL, PaperResult, PaperRow, Sweep, SweepPoint
from counterpoint.report.text import bullets, new_table
from counterpoint.units import format_change, format_percent, format_span, format_us
from counterpoint.validation.bounds import ErrorBounds


def print_paper(console: Console, result: PaperResult, bounds: ErrorBounds | None = None) -> None:
    """Print one workload of the paper's grid; measured columns appear only if something ran, bounds only if they are
    given.
    """
    ideal = f" on {result.machine}, {result.num_ranks} ranks; ideal {format_us(result.ideal_us)}"
    console.print(Text.assemble((result.workload, "bold"), ideal))
    is_measured = any(row.measured_us is not None for row in result.rows)
    headers = ["measured", "against plain", "spread"] if is_measured else []
    headers += ["J/step"] if any(row.energy for row in result.rows) else []
    bounded = ["expected"] if bounds else []
    table = new_table("variant", *headers, "TimeRatio", "overlap", "simulated", *bounded, "")
    table.columns[-1].justify = "left"
    for row in result.rows:
        figures = [_figure(row, header) for header in headers]
        ratios = (_ratio(row.time_ratio), _overlap(row))
        simulated = format_us(row.simulated_us) if row.simulated_us is not None else "-"
        name = Text(row.label, style="bold" if row.label in (PLAIN, SEQUENTIAL) else "")
        expected = [format_span(*bounds.around(row.simulated_us)) if row.simulated_us else "-"] if bounds else []
        table.add_row(name, *figures, *ratios, simulated, *expected, Text(_remarks(row), "red"))
    console.print(table)
    origin = result.choice.expectation.origin if result.choice.expectation else "simulated"
    console.print(Text(f"planner's choice ({origin}): {result.choice.verdict}  {result.choice.summary}"))
    if all(row.label != COPY_ENGINES for row in result.rows):
        reasons = dict.fromkeys(each.reason for each in result.choice.refusals if each.control == "transport")
        console.print(bullets(Text(f"copy engines were left out: {reason}") for reason in reasons))
    _print_accuracy(console, result)
    if bounds:
        console.print(Text(bounds.note, style="dim"))
    console.print()


def _figure(row: PaperRow, header: str) -> str:
    if header == "J/step":
        return f"{row.energy.joules_per_step:.3g}" if row.energy else ""
    if row.measured_us is None or row.ratio is None or row.spread is None:
        return ""
    return {
        "measured": format_us(row.measured_us),
        "against plain": format_change(row.ratio - 1),
        "spread": format_percent(row.spread),
    }[header]


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"


def _overlap(row: PaperRow) -> str:
    return "-" if row.overlap_ratio is None else format_percent(row.overlap_ratio)


def _remarks(row: PaperRow) -> str:
    remarks = ["NOT ENGAGED"] if row.is_engaged is False else []
    return ", ".join(remarks + (["OUTPUTS DIFFER"] if row.is_identical is False else []))


def print_sweep(console: Console, sweep: Sweep, bounds: ErrorBounds | None = None) -> None:
    """Print one workload along one axis: a line for each value, with TimeRatio and overlap ratio of each variant.

    `bounds` are those of its times, if given.
    """
    is_measured = any(row.measured_us is not None for point in sweep.points for row in point.rows)
    shape = ", ".join(f"{counts} {name}" for name, counts in _shapes(sweep))
    origin = "measured" if is_measured else "simulated"
    console.print(
        Text.assemble((sweep.workload, "bold"), f" on {sweep.machine}, {shape}; {origin}; TimeRatio, overlap ratio")
    )
    labels = [label for label in sweep.labels if label != SEQUENTIAL]
    table = new_table(sweep.axis, SEQUENTIAL, *labels, "ideal")
    for point in sweep.points:
        if not point.rows:
            table.add_row(point.setting, *["-"] * (len(labels) + 2))
            continue
        table.add_row(point.setting, _time(point), *(_cell(point, label) for label in labels), _ideal(point))
    console.print(table)
    _print_energies(console, sweep)
    console.print(bullets(Text(line) for line in _left_out(sweep)))
    if bounds:
        console.print(Text(bounds.note, style="dim"))
    console.print()


def _shapes(sweep: Sweep) -> Iterator[tuple[str, str]]:
    """Describe the ranks and iterations of the points, as one value or a range."""
    for name, counts in (
        ("ranks", {point.num_ranks for point in sweep.points}),
        ("iterations", {point.iterations for point in sweep.points}),
    ):
        if counts:
            yield name, str(min(counts)) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"


def _time(point: SweepPoint) -> str:
    row = point.row(SEQUENTIAL)
    return "-" if row is None or row.time_us is None else format_us(row.time_us)


def _cell(point: SweepPoint, label: str) -> str:
    row = point.row(label)
    if row is None:
        return "-"
    remarks = _remarks(row)
    return f"{_ratio(row.time_ratio)} {_overlap(row)}{f' {remarks}' if remarks else ''}"


def _ideal(point: SweepPoint) -> str:
    """Return the ideal over the sequential time, both simulated or from the captured lone times."""
    row = point.row(SEQUENTIAL)
    if row is None or not row.simulated_us or point.ideal_us is None:
        return "-"
    return _ratio(point.ideal_us / row.simulated_us)


def _print_energies(console: Console, sweep: Sweep) -> None:
    """Print joules per step of all GPUs, if they were measured."""
    if not any(row.energy for point in sweep.points for row in point.rows):
        return
    table = new_table(f"{sweep.axis}: J per step, W per GPU", *sweep.labels)
    for point in sweep.points:
        found = [row.energy if (row := point.row(label)) else None for label in sweep.labels]
        table.add_row(point.setting, *(f"{each.joules_per_step:.4g}  {each.watts:.0f}" if each else "-" for each in found))
    console.print(table)


def _left_out(sweep: Sweep) -> Iterator[str]:
    for point in sweep.points:
        if point.why_left_out:
            yield f"{sweep.axis} {point.setting}: {point.why_left_out}"


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
