"""Draws sweeps as plots: TimeRatio and overlap ratio of each variant along the axis, one panel per workload and machine.

Needs matplotlib, the extra `report`. Nothing is computed here. A measured sweep also shows the simulation of the captured
steps, as a thin line of the same color.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from counterpoint.errors import CounterpointError
from counterpoint.paper.values import COPY_ENGINES, PLAIN, PRIORITY, SEQUENTIAL, PaperRow, Sweep, SweepPoint
from counterpoint.value import OutputKind

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MATPLOTLIB = "matplotlib>=3.8,<4"  # the extra `report`
PLOT = OutputKind("plot", (".svg", ".png", ".pdf"), lambda content: b"atplotlib" in content)  # it names itself in each
MOST_PANELS, MOST_COLUMNS = 32, 4
PANEL_INCHES = (3.8, 2.9)
# the Okabe-Ito palette, which people with color blindness can tell apart
COLORS = {PLAIN: "#D55E00", PRIORITY: "#0072B2", COPY_ENGINES: "#009E73"}
AXIS_NAMES = {
    "ctas": "CTAs of the matmul",
    "sizes": "M of the matmul",
    "bytes": "bytes of the collective",
    "tiles": "tile (M x N x K)",
    "types": "type of the operands",
    "ranks": "ranks",
    "iterations": "iterations",
}


def check_plot() -> None:
    """Raise `CounterpointError` if no plot can be drawn here, before anything runs."""
    if find_spec("matplotlib") is None:
        raise CounterpointError(
            f"--plot needs 'matplotlib', which is not installed. Install it: pip install '{MATPLOTLIB}'."
        )


def check_panels(number: int) -> None:
    """Raise `CounterpointError` if there are more sweeps than one file can show."""
    if number > MOST_PANELS:
        raise CounterpointError(
            f"A plot shows at most {MOST_PANELS} sweeps; found {number}. Name fewer workloads, or one machine."
        )


def draw_sweeps(sweeps: Sequence[Sweep], path: Path, where: str) -> None:
    """Draw all sweeps into one file; `where` says what they ran on. Raises `CounterpointError` for too many of them."""
    check_panels(len(sweeps))
    from matplotlib.figure import Figure  # noqa: PLC0415  an extra

    columns = min(MOST_COLUMNS, len(sweeps))
    rows = -(-len(sweeps) // columns)
    figure = Figure(figsize=(columns * PANEL_INCHES[0], rows * PANEL_INCHES[1] + 0.8), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel, sweep in zip(panels, sweeps, strict=False):
        _draw(panel, sweep)
    for panel in panels[len(sweeps) :]:
        panel.set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, fontsize=8)
    figure.supxlabel(_origin(sweeps, where), fontsize=9)
    figure.savefig(path)


def _origin(sweeps: Sequence[Sweep], where: str) -> str:
    measured = any(row.measured_us is not None for sweep in sweeps for point in sweep.points for row in point.rows)
    return f"Measured on {where}; thin lines: simulated from the captured steps" if measured else "Simulated, not measured"


def _draw(panel: "Axes", sweep: Sweep) -> None:
    points = [point for point in sweep.points if point.rows]
    places = range(len(points))
    for label in sweep.labels:
        if label == SEQUENTIAL:
            continue
        found = [point.row(label) for point in points]
        color = COLORS.get(label)
        ratios = [None if row is None else row.time_ratio for row in found]
        panel.plot(places, _gaps(ratios), color=color, marker="o", markersize=3, label=f"TimeRatio, {label}")
        hidden = [None if row is None else row.overlap_ratio for row in found]
        if any(each is not None for each in hidden):
            panel.plot(places, _gaps(hidden), color=color, linestyle=":", label=f"overlap ratio, {label}")
        if any(row is not None and row.measured_us is not None for row in found):
            simulated = [_simulated(point, row) for point, row in zip(points, found, strict=True)]
            panel.plot(places, _gaps(simulated), color=color, linewidth=0.6)
    panel.axhline(1.0, color="0.7", linewidth=0.8)
    panel.set_xticks(list(places), [point.setting for point in points], rotation=45, ha="right", fontsize=7)
    panel.set_xlabel(AXIS_NAMES[sweep.axis], fontsize=8)
    panel.set_ylim(bottom=0)
    panel.set_title(f"{sweep.workload}, {sweep.machine}", fontsize=9)


def _simulated(point: SweepPoint, row: PaperRow | None) -> float | None:
    """Return the simulated TimeRatio that belongs to a measured one."""
    sequential = point.row(SEQUENTIAL)
    if row is None or sequential is None or not row.simulated_us or not sequential.simulated_us:
        return None
    return row.simulated_us / sequential.simulated_us


def _gaps(values: Sequence[float | None]) -> list[float]:
    """Show missing values as gaps in the line."""
    return [float("nan") if value is None else value for value in values]
