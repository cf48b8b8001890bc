"""The figures of docs/paper.md: the A40 by precision, link and iterations is what is simulated."""

import re
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from counterpoint import load_machine
from counterpoint.paper.cases import paper_description, with_iterations
from counterpoint.paper.sweep import simulate_sweep
from counterpoint.paper.values import PLAIN, PRIORITY, SEQUENTIAL, SweepPoint

DOCUMENT = Path(__file__).parents[2] / "docs" / "paper.md"
ROW = re.compile(r"^\| opt\d \| (?:PCIe|bridge) .*$", re.MULTILINE)
FIGURE = re.compile(r"-?\d+\.\d")
# Simulated figures move when the simulator does; beyond this many points the table and what is said of it must be renewed.
TOLERANCE = 3.0
A40 = load_machine("a40")
# NVLink 3 bridge of two A40s: 112.5 GB/s in both directions together (NVIDIA A40 datasheet, 2022)
BRIDGE = replace(A40.link, kind="nvlink", bytes_per_s=56.25e9, per_peer_bytes_per_s=56.25e9)
LINKS = {"PCIe": A40, "bridge": replace(A40, link=BRIDGE)}


def a40_rows() -> Iterator[str]:
    """The rows of the table, as they are simulated now."""
    for tile in ("opt1", "opt2"):
        for link, machine in LINKS.items():
            for iterations in (4, 12):
                described = with_iterations(paper_description(f"cb_ar_{tile}"), str(iterations))
                for point in simulate_sweep(described, machine, "types", ("bf16", "tf32", "fp32")).points:
                    yield f"| {tile} | {link} | {iterations} | {point.setting} | {' | '.join(_changes(point))} |"


def _changes(point: SweepPoint) -> Iterator[str]:
    """Plain overlap and priority against sequential, priority against plain overlap, the ideal against sequential."""
    times = [row.simulated_us for label in (SEQUENTIAL, PLAIN, PRIORITY) if (row := point.row(label)) and row.simulated_us]
    sequential, plain, priority = times
    assert point.ideal_us is not None
    for part, whole in ((plain, sequential), (priority, sequential), (priority, plain), (point.ideal_us, sequential)):
        yield f"{100 * (part / whole - 1):.1f}"


def test_the_a40_by_precision_link_and_iterations_is_what_is_simulated() -> None:
    stored, made = ROW.findall(DOCUMENT.read_text()), list(a40_rows())
    assert [FIGURE.sub("", row) for row in stored] == [FIGURE.sub("", row) for row in made]
    for old, new in zip(stored, made, strict=True):
        for before, now in zip(FIGURE.findall(old), FIGURE.findall(new), strict=True):
            assert abs(float(before) - float(now)) <= TOLERANCE, f"{old} is simulated as {new}"
