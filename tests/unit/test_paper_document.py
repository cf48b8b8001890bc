"""The figures of docs/paper.md: the A40 by precision, link and iterations is what is simulated."""

import re

from benchmarks.paper_a40 import DOCUMENT, ROW, rows

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
