"""The paper's A40 by precision, link and iterations, simulated: the table of docs/paper.md. Needs no GPU."""

import argparse
import re
from collections.abc import Iterator

from msgspec.structs import replace

from benchmarks.conditions import ROOT
from counterpoint import load_machine
from counterpoint.paper.cases import paper_description, with_iterations
from counterpoint.paper.sweep import simulate_sweep
from counterpoint.paper.values import PLAIN, PRIORITY, SEQUENTIAL, SweepPoint

DOCUMENT = ROOT / "docs" / "paper.md"
ROW = re.compile(r"^\| opt\d \| (?:PCIe|bridge) .*\n", re.MULTILINE)
A40 = load_machine("a40")
# NVLink 3 bridge of two A40s: 112.5 GB/s in both directions together (NVIDIA A40 datasheet, 2022)
BRIDGE = replace(A40.link, kind="nvlink", bytes_per_s=56.25e9, per_peer_bytes_per_s=56.25e9)
LINKS = {"PCIe": A40, "bridge": replace(A40, link=BRIDGE)}


def rows() -> Iterator[str]:
    """The rows of the table, as they are simulated now."""
    for tile in ("opt1", "opt2"):
        for link, machine in LINKS.items():
            for iterations in (4, 12):
                described = with_iterations(paper_description(f"cb_ar_{tile}"), str(iterations))
                for point in simulate_sweep(described, machine, "types", ("bf16", "tf32", "fp32")).points:
                    yield f"| {tile} | {link} | {iterations} | {point.setting} | {' | '.join(_changes(point))} |\n"


def _changes(point: SweepPoint) -> Iterator[str]:
    """Plain overlap and priority against sequential, priority against plain overlap, the ideal against sequential."""
    times = [row.simulated_us for label in (SEQUENTIAL, PLAIN, PRIORITY) if (row := point.row(label)) and row.simulated_us]
    sequential, plain, priority = times
    assert point.ideal_us is not None
    for part, whole in ((plain, sequential), (priority, sequential), (priority, plain), (point.ideal_us, sequential)):
        yield f"{100 * (part / whole - 1):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="renew the table in docs/paper.md")
    is_written, made = parser.parse_args().write, "".join(rows())
    print(made, end="")
    if is_written:
        text = DOCUMENT.read_text()
        first = ROW.search(text)
        assert first is not None, "the table is there"
        without = ROW.sub("", text)
        DOCUMENT.write_text(without[: first.start()] + made + without[first.start() :])


if __name__ == "__main__":
    main()
