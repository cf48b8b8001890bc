"""The tables of docs/simulator.md say what the calibration file and the simulator say."""

from pathlib import Path

import pytest

from counterpoint.sim.calibration import CharacterConstants, CollectiveConstants, Constant, load_calibration
from helpers.document_tables import rows_by_first_cell
from helpers.paper_runs import captured_steps, measured_rows, simulated_rows

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "simulator.md").read_text()
LABELS = {
    2: ("plain overlap", "priority", "head start 5 us", "copy engines"),
    4: ("sequential", "plain overlap", "priority", "head start 5 us", "copy engines"),
}


def saturated_by(constants: CharacterConstants) -> str:
    warps = f"{constants.saturation_warps:g} warps"
    if constants.saturation_bytes_in_flight:
        return f"{constants.saturation_bytes_in_flight:,.0f} bytes in flight or {warps}"
    return f"{constants.saturation_registers:,.0f} registers or {warps}" if constants.saturation_registers else warps


def link_fraction(constants: CollectiveConstants) -> str:
    more = constants.link_fraction_of_more
    return f"{constants.link_fraction:g}" + ("" if more is None else f"; {more:g} of more than 2 ranks")


def test_the_constants_are_those_of_the_calibration_file() -> None:
    calibration = load_calibration()
    named = {name: getattr(calibration, name) for name in calibration.__struct_fields__}
    single = {name: entry for name, entry in named.items() if isinstance(entry, Constant)}
    assert rows_by_first_cell(DOCUMENT, "constant") == {
        name: [f"{entry.value:g}", entry.status] for name, entry in single.items()
    }


def test_the_characters_are_those_of_the_calibration_file() -> None:
    bottlenecks = {"issue": "SM", "hbm": "HBM", "latency": "own loads"}
    assert rows_by_first_cell(DOCUMENT, "character") == {
        name: [bottlenecks[entry.bottleneck], saturated_by(entry), f"{entry.hbm_fraction:g}", entry.status]
        for name, entry in load_calibration().characters.items()
    }


def test_the_collectives_are_those_of_the_calibration_file() -> None:
    assert rows_by_first_cell(DOCUMENT, "collective") == {
        name: [f"{entry.bytes_per_s_per_cta / 1e9:g}", link_fraction(entry), f"{entry.latency_us:g}", entry.status]
        for name, entry in load_calibration().collectives.items()
    }


def test_the_formula_of_the_link_names_the_calibrated_constant() -> None:
    text = " ".join(DOCUMENT.split())
    assert f"1 / (1 + {load_calibration().latency_per_load.value:g} *u*)" in text


@pytest.mark.parametrize("num_ranks", LABELS)
def test_the_measured_workloads_are_as_stored_and_as_simulated(num_ranks: int) -> None:
    measured = measured_rows(num_ranks)
    simulated = {name: simulated_rows(step) for name, step in captured_steps(num_ranks).items()}
    assert rows_by_first_cell(DOCUMENT, f"workload, {num_ranks} H200s") == {
        name: [
            f"{found[label] / 1000:.2f} / {simulated[name][label] / 1000:.2f}" if label in found else "-"
            for label in LABELS[num_ranks]
        ]
        for name, found in measured.items()
    }
    errors = [abs(simulated[name][label] / found[label] - 1) for name, found in measured.items() for label in found]
    text = " ".join(DOCUMENT.split())
    mean, worst = 100 * sum(errors) / len(errors), 100 * max(errors)
    assert f"all {len(errors)} rows on {num_ranks} GPUs the mean error is {mean:.1f} % and the worst {worst:.0f} %" in text
