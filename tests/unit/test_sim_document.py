"""The tables of docs/simulator.md say what the calibration file and the simulator say."""

from pathlib import Path

from counterpoint.sim.calibration import CharacterConstants, load_calibration

DOCUMENT = Path(__file__).parents[2] / "docs" / "simulator.md"


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


def test_the_constants_are_those_of_the_calibration_file() -> None:
    calibration = load_calibration()
    named = {name: getattr(calibration, name) for name in calibration.__struct_fields__}
    single = {name: entry for name, entry in named.items() if name not in ("characters", "collectives")}
    assert rows("constant") == {name: [f"{entry.value:g}", entry.status] for name, entry in single.items()}


def test_the_characters_are_those_of_the_calibration_file() -> None:
    bottlenecks = {"issue": "SM", "hbm": "HBM"}
    assert rows("character") == {
        name: [bottlenecks[entry.bottleneck], saturated_by(entry), f"{entry.hbm_fraction:g}", entry.status]
        for name, entry in load_calibration().characters.items()
    }


def test_the_collectives_are_those_of_the_calibration_file() -> None:
    assert rows("collective") == {
        name: [f"{entry.bytes_per_s_per_cta / 1e9:g}", f"{entry.link_fraction:g}", f"{entry.latency_us:g}", entry.status]
        for name, entry in load_calibration().collectives.items()
    }


def test_the_formula_of_the_link_names_the_calibrated_constant() -> None:
    text = " ".join(DOCUMENT.read_text().split())
    assert f"1 / (1 + {load_calibration().latency_per_load.value:g} *u*)" in text
