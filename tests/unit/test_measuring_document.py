"""docs/measuring.md names commands, files and pages that there are, and every result that is kept."""

import re
from pathlib import Path

from counterpoint.cuda.probes import PROBES

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "measuring.md").read_text()
RESULTS = ROOT / "benchmarks" / "results"
# of these no GPU was used; the commands that renew them stand below the tables
WITHOUT_GPU = {
    "cluster_accuracy.json",
    "filter_campaign.json",
    "filter_in_root_file_systems.json",
    "filter_overhead.json",
    "heuristic_accuracy.json",
    "judgement.json",
    "simulator_accuracy.json",
    "speed.json",
    "trace_reading.json",
    "validation.json",
}


def cells() -> list[list[str]]:
    lines = [line for line in TEXT.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if not line.startswith("| what")]


def test_every_row_says_what_how_where_and_when() -> None:
    assert len(cells()) > 25
    for row in cells():
        assert len(row) == 7
        what, command, gpus, _, _, page, state = row
        assert what
        assert re.match(r"`(counterpoint|torchrun|python|make) ", command)
        assert gpus[0].isdigit()
        assert page
        assert re.search(r"H[12]00|not yet", state)


def test_every_module_that_is_named_exists() -> None:
    modules = set(re.findall(r"-m (benchmarks\.\w+)", TEXT))
    assert len(modules) > 15
    for name in modules:
        assert (ROOT / f"{name.replace('.', '/')}.py").exists(), name


def test_every_result_that_is_kept_is_named_and_exists() -> None:
    named = set(re.findall(r"(\w+\.json)`", TEXT))
    kept = {path.name for path in RESULTS.glob("*.json")}
    assert kept - WITHOUT_GPU <= named
    shipped = {path.name for path in (ROOT / "src" / "counterpoint" / "validation" / "measured").glob("*.json")}
    assert named <= kept | shipped
    assert kept >= WITHOUT_GPU


def test_every_probe_that_is_named_exists() -> None:
    assert set(re.findall(r"--only ([a-z]+) -o", TEXT)) <= set(PROBES)
