"""The figures of docs/paper.md: the A40's are what is simulated now, the measured ones are stored."""

import json
import re

import msgspec
from benchmarks.conditions import ROOT
from benchmarks.paper_a40 import DOCUMENT, ROW, rows

from counterpoint.paper.values import SEQUENTIAL, Sweep

FIGURE = re.compile(r"-?\d+\.\d")
# Simulated figures move when the simulator does; beyond this many points the table and what is said of it must be renewed.
TOLERANCE = 3.0


def test_the_a40_by_precision_link_and_iterations_is_what_is_simulated() -> None:
    stored, made = ROW.findall(DOCUMENT.read_text()), list(rows())
    assert [FIGURE.sub("", row) for row in stored] == [FIGURE.sub("", row) for row in made]
    for old, new in zip(stored, made, strict=True):
        for before, now in zip(FIGURE.findall(old), FIGURE.findall(new), strict=True):
            said = f"{old.strip()} is simulated as {new.strip()}; python -m benchmarks.paper_a40 --write renews the table"
            assert abs(float(before) - float(now)) <= TOLERANCE, said


def test_the_measured_point_is_what_is_stored_with_its_conditions() -> None:
    stored = json.loads((ROOT / "benchmarks" / "results" / "paper_sweep_2x_h200.json").read_text())
    assert {"date", "gpus", "driver", "cuda", "torch", "nccl", "rounds"} <= set(stored["conditions"])
    (sweep,) = msgspec.convert(stored["result"], list[Sweep])
    (point,) = sweep.points
    sequential, text = point.row(SEQUENTIAL), DOCUMENT.read_text()
    assert sequential is not None
    for row in point.rows:
        assert row.is_engaged
        assert row.is_identical
        assert row.energy is not None
        simulated = (row.simulated_us or 0.0) / (sequential.simulated_us or 1.0)
        overlap = "-" if row.overlap_ratio is None else f"{100 * row.overlap_ratio:.1f} %"
        energy = f"{row.energy.joules_per_step:.1f} | {row.energy.watts:.0f} |"
        figures = f"{(row.measured_us or 0.0) / 1000:.2f} | {row.time_ratio:.3f} | {simulated:.3f} | {overlap} | {energy}"
        assert f"| {row.label} | {figures}" in text
