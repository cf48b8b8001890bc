"""The README is short and easy to read; its figures are those of the tool, of stored runs and of the pages it links to."""

import json
import re
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest

from helpers.command import counterpoint
from helpers.readability import of_markdown

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
FIRST_LINES = "\n".join(README.splitlines()[:60])
RESULTS = ROOT / "benchmarks" / "results"
TRACE = "examples/traces/starved.rank0.json.gz"
FIGURE = re.compile(r"\d+(?:\.\d+)?")
EXAMPLE_PAGES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "examples").rglob("README.md"))
DRIFT = 0.1  # of a figure, when the simulator changes


def table(heading: str) -> list[list[str]]:
    """Cells of the table below a heading, without its head."""
    lines = [line for line in README.split(f"\n## {heading}\n")[1].split("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def text_block_after(words: str) -> list[str]:
    return README.split(words)[1].split("```text\n")[1].split("\n```")[0].splitlines()


@cache
def tuned() -> str:
    """What the first command of the README prints."""
    return counterpoint("tune", TRACE, cwd=ROOT, COLUMNS="100").stdout


def close(shown: str, found: str) -> bool:
    """Whether two lines have the same words, and about the same figures."""
    figures = [[float(each) for each in FIGURE.findall(line)] for line in (shown, found)]
    words = [FIGURE.sub("#", " ".join(line.split())) for line in (shown, found)]
    return words[0] == words[1] and figures[0] == pytest.approx(figures[1], rel=DRIFT, abs=0.5)


def test_it_is_short_and_its_first_lines_say_what_and_how() -> None:
    assert README.count("\n") <= 150
    for needed in (
        "hides the communication",
        "It is for people who",
        "<picture>",
        "I have a trace",
        "I have a job",
        "expert model",
    ):
        assert needed in FIRST_LINES
    assert "```console\n$ counterpoint tune " in FIRST_LINES


@pytest.mark.parametrize("page", ["README.md", "docs/results.md", *EXAMPLE_PAGES])
def test_it_is_easy_to_read(page: str) -> None:
    found = of_markdown((ROOT / page).read_text())
    assert found.reading_ease > 50
    assert found.words_per_sentence < 20, found.longest


@pytest.mark.parametrize("page", ["README.md", *EXAMPLE_PAGES])
def test_links_lead_to_files_and_to_headings_that_are_there(page: str) -> None:
    path = ROOT / page
    for target, heading in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", path.read_text()):
        file = path.parent / target if target else path
        assert file.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert heading in {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}, target


def test_the_output_shown_of_a_trace_is_what_the_command_prints() -> None:
    printed = tuned().splitlines()
    for line in text_block_after("**I have a trace**"):
        assert any(close(line, each) for each in printed), line


def test_the_picture_is_of_that_command() -> None:
    found = re.search(r"GAIN .*: ([\d.]+ ms) to ([\d.]+ ms)", tuned())
    assert found
    light, dark = ((ROOT / "docs" / "images" / name).read_text() for name in ("timeline.svg", "timeline.dark.svg"))
    assert re.sub("#[0-9a-f]{6}", "", light) == re.sub("#[0-9a-f]{6}", "", dark)
    title = ElementTree.fromstring(light)[0].text or ""
    assert close(title, f"starved.rank0: before {found[1]}; after {found[2]} (simulated)")
    assert close(README.split('alt="')[1].split('"')[0].split(": ")[1].split(" ms")[0], found[1].removesuffix(" ms"))


def test_the_output_shown_of_a_job_is_that_of_the_stored_run() -> None:
    runs = json.loads((RESULTS / "live_jobs_2x_h200.json").read_text())["result"]["starved"]["runs"]
    said = [line.replace("PLAN", "plan.toml") for run in runs for line in run["said"]]
    for line in text_block_after("**I have a job**")[1:]:
        assert line in said


def test_the_output_shown_of_an_expert_model_is_that_of_the_stored_run() -> None:
    runs = json.loads((RESULTS / "torchtitan_moe_2x_h200.json").read_text())["result"]
    assert "\n".join(text_block_after("**I have a tensor-parallel or expert model.**")[-2:]) in [
        counted for run in runs for counted in run["counted"]
    ]


@pytest.mark.parametrize("row", table("Results"), ids=lambda row: row[0])
def test_the_times_of_a_result_stand_on_its_page_and_give_its_change(row: list[str]) -> None:
    _, _, otherwise, ours, change, link = row
    page = (ROOT / link.split("(")[1].split("#")[0]).read_text()
    times = [float(each) for each in FIGURE.findall(otherwise)]
    for each in [*FIGURE.findall(otherwise), ours]:
        assert re.search(rf"(?<![\d.]){re.escape(each)}(?!\d)", page), each
    assert change.strip("*") == f"{100 * (float(ours) * len(times) / sum(times) - 1):+.1f} %".replace("+0.0", "0.0")
    assert change.startswith("**") == (float(ours) * len(times) > sum(times))  # losses stand out


def test_the_validation_table_is_the_stored_one() -> None:
    stored = {}
    for entry in json.loads((RESULTS / "validation.json").read_text())["result"]:
        for origin, models in entry["origins"].items():
            gpus = entry["conditions"]["gpus"].replace("NVIDIA ", "").removesuffix(" 80GB HBM3")
            stored[f"from {origin}", gpus] = models[0]
    shown = table("How far to trust it")
    assert len(shown) == len(stored)
    for predicted, gpus, cases, *cells in shown:
        found = stored[predicted, gpus]
        assert found["model"] == "simulator"
        assert cases == f"{found['num_groups']}, {found['num_rows']}"
        shares = [float(each) / 100 for each in FIGURE.findall(" ".join(cells[:1] + cells[1:3] + cells[3].split(",")))]
        names = ("mean_error", "p90_error", "clear_sign", "mean_regret", "worst_regret")
        assert shares == pytest.approx([found[name] for name in names], abs=0.0051)
