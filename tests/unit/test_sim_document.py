"""The tables of docs/simulator.md say what the calibration file and the simulator say."""

import json
from pathlib import Path
from statistics import median

from counterpoint.sim.calibration import CharacterConstants, CollectiveConstants, load_calibration

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "simulator.md"
MEASURED = ROOT / "benchmarks" / "results" / "paper_4x_h200.json"
LABELS = ("sequential", "plain overlap", "priority", "head start 5 us")


def rows(heading: str) -> dict[str, list[str]]:
    """Cells of the table whose first heading is `heading`, by their first cell without backquotes."""
    table = DOCUMENT.read_text().split(f"\n| {heading} |", maxsplit=1)[1].split("\n\n", maxsplit=1)[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {first.strip("`"): rest for first, *rest in cells}


def saturated_by(constants: CharacterConstants) -> str:
    warps = f"{constants.saturation_warps:g} warps"
    return (
        f"{constants.saturation_shared_bytes:,.0f} bytes of tiles, else {warps}"
        if constants.saturation_shared_bytes
        else warps
    )


def link_fraction(constants: CollectiveConstants) -> str:
    more = constants.link_fraction_of_more
    return f"{constants.link_fraction:g}" + ("" if more is None else f"; {more:g} of more than 2 ranks")


def test_the_constants_are_those_of_the_calibration_file() -> None:
    calibration = load_calibration()
    named = {name: getattr(calibration, name) for name in calibration.__struct_fields__}
    single = {name: entry for name, entry in named.items() if name not in ("characters", "collectives", "light_collectives")}
    assert rows("constant") == {name: [f"{entry.value:g}", entry.status] for name, entry in single.items()}


def test_the_characters_are_those_of_the_calibration_file() -> None:
    bottlenecks = {"issue": "SM", "hbm": "HBM"}
    assert rows("character") == {
        name: [bottlenecks[entry.bottleneck], saturated_by(entry), f"{entry.hbm_fraction:g}", entry.status]
        for name, entry in load_calibration().characters.items()
    }


def test_the_collectives_are_those_of_the_calibration_file() -> None:
    for heading, found in (
        ("collective", load_calibration().collectives),
        ("by light kernels", load_calibration().light_collectives),
    ):
        assert rows(heading) == {
            name: [f"{entry.bytes_per_s_per_cta / 1e9:g}", link_fraction(entry), f"{entry.latency_us:g}", entry.status]
            for name, entry in found.items()
        }


def test_the_formula_of_the_link_names_the_calibrated_constant() -> None:
    text = " ".join(DOCUMENT.read_text().split())
    assert f"1 / (1 + {load_calibration().latency_per_load.value:g} *u*)" in text


def test_the_measured_workloads_are_those_of_the_stored_result() -> None:
    workloads = json.loads(MEASURED.read_text())["result"]
    expected = {}
    for workload in workloads:
        found = {row["label"]: (row["measured_us"] / 1000, row["simulated_us"] / 1000) for row in workload["rows"]}
        expected[workload["workload"]] = [f"{found[label][0]:.2f} / {found[label][1]:.2f}" for label in LABELS]
    assert rows("workload, 4 H200s") == expected
    errors = [abs(row["simulated_us"] / row["measured_us"] - 1) for each in workloads for row in each["rows"]]
    text = " ".join(DOCUMENT.read_text().split())
    assert f"all {len(errors)} rows" in text
    assert f"the median error is {100 * median(errors):.0f} % and the worst {100 * max(errors):.0f} %" in text
