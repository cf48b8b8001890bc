"""The tables of docs/scale.md hold what their commands compute, and what the stored accuracy says."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from benchmarks.conditions import RESULTS

from counterpoint.cluster.estimate import ClusterEstimate
from counterpoint.cluster.sweep import estimate_points
from counterpoint.cluster.sweep_file import load_sweep

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "scale.md").read_text()
CONTROLS = ["as it is", "priority", "shaping", "copy engines", "operators", "all four"]
GPUS = {"8": 1, "16": 2, "64": 8, "512": 64, "4,096": 512}  # nodes
NUMBER = re.compile(r"[-+]?[\d,]*\d(?:\.\d+)?")
Point = dict[str, Any]


def table_below(mark: str) -> list[dict[str, str]]:
    """The rows of the first table below a text, by heading."""
    lines = TEXT[TEXT.index(mark) :].split("\n\n| ", 1)[1].split("\n\n", 1)[0].splitlines()
    names, _, *rows = [[cell.strip(" *") for cell in line.removeprefix("|").removesuffix("|").split("|")] for line in lines]
    return [dict(zip(names, row, strict=True)) for row in rows]


@cache
def swept(name: str, *, is_plain: bool = False) -> list[tuple[Point, ClusterEstimate]]:
    """The estimates of an example's sweep; `is_plain`: those without controls."""
    sweep = load_sweep(ROOT / "examples" / "clusters" / f"{name}.toml")
    points = [point for point in sweep.axes.points() if not (is_plain and point["controls"])]
    rows = estimate_points(sweep, points)
    return [(row.point, row.estimate) for row in rows if row.estimate is not None]


def step_us(rows: list[tuple[Point, ClusterEstimate]], **wanted: object) -> float:
    found = [each.step_us for point, each in rows if all(point[name] == value for name, value in wanted.items())]
    assert len(found) == 1, wanted
    return found[0]


def assert_shown(cell: str, *values: float) -> None:
    """The numbers of a cell are `values` rounded to the digits that are shown."""
    shown = NUMBER.findall(cell)
    assert len(shown) == len(values), cell
    for text, value in zip(shown, values, strict=True):
        unit = 10.0 ** -len(text.partition(".")[2])
        assert abs(float(text.replace(",", "")) - value) <= 0.501 * unit, f"'{cell}' should hold {value:.6g}"


def assert_controls_shown(name: str, columns: list[str]) -> None:
    rows = swept(name, is_plain=columns == CONTROLS[:1])
    controls = dict(zip(CONTROLS, dict.fromkeys(point["controls"] for point, _ in rows), strict=False))
    for line in table_below(f"sweep examples/clusters/{name}.toml"):
        base = step_us(rows, num_nodes=GPUS[line["GPUs"]], controls=())
        assert_shown(line["as it is"], base / 1e6)
        for column in columns[1:]:
            changed = step_us(rows, num_nodes=GPUS[line["GPUs"]], controls=controls[column])
            if line[column] == "0":
                assert changed == pytest.approx(base, rel=5e-4)
            else:
                assert_shown(line[column], 100 * (changed / base - 1))


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("controls_fsdp", CONTROLS),
        ("controls_tensor", CONTROLS[:1]),
        pytest.param("controls_tensor", CONTROLS, marks=pytest.mark.slow),
    ],
)
def test_what_controls_bring_is_what_the_sweep_computes(name: str, columns: list[str]) -> None:
    assert_controls_shown(name, columns)


def test_two_levels_are_what_the_sweep_computes() -> None:
    rows = swept("two_levels")
    for line in table_below("sweep examples/clusters/two_levels.toml"):
        ring, two = (step_us(rows, num_nodes=GPUS[line["GPUs"]], algorithm=each) for each in ("auto", "hierarchical"))
        assert_shown(line["NCCL's rings"], ring / 1e6)
        assert_shown(line["two levels, one after the other"], two / 1e6)
        assert_shown(line["change"], 100 * (two / ring - 1))


def test_compression_is_what_the_sweeps_compute() -> None:
    methods = {"none": "none", "bf16": "bf16", "fp8": "fp8", "PowerSGD, rank 4": "powersgd", "top-k, 1 %": "topk"}
    for line in table_below("sweep examples/clusters/compression.toml"):
        rows = swept("compression" if line["network"].startswith("400") else "compression_slow")
        for column, method in methods.items():
            found = step_us(rows, num_nodes=GPUS[line["GPUs"]], compression=method)
            assert_shown(line[column], found / 1e3)


def test_bubbles_are_what_the_sweep_computes() -> None:
    kinds = {"1F1B": ("1f1b", 1), "zero bubble (ZB-H1)": ("zero_bubble", 1)}
    rows = swept("pipeline")
    for line in table_below("sweep examples/clusters/pipeline.toml -o rows.csv"):
        schedule, chunks = kinds.get(line["schedule"]) or ("interleaved", int(line["schedule"].split()[1]))
        for column, batch in (("batch 512: step, bubble, data", 512), ("1,024", 1024), ("4,096", 4096)):
            wanted = {"schedule": schedule, "num_chunks": chunks, "global_batch": batch}
            (found,) = [each for point, each in rows if point == wanted]
            assert_shown(line[column], found.step_us / 1e3, found.bubble_us / 1e3, found.data_exposed_us / 1e3)


def test_the_accuracy_is_the_stored_one() -> None:
    stored = json.loads((RESULTS / "cluster_accuracy.json").read_text())["result"]
    lines = table_below("python -m benchmarks.cluster_accuracy")
    errors = [stored["vtrain"][each] for each in ("single node", "several nodes")]
    for line, found in zip(lines[:2], errors, strict=True):
        assert_shown(line["figure"], 100 * found["mean error"])
        halves = [100 * found[f"mean error, {half} half"] for half in ("fitted", "other")]
        assert_shown(line["fitted half, other half"], *halves)
        assert_shown(line["naive formula"], 100 * found["naive formula: mean error"])
    for line, found in zip(lines[2:4], reversed(errors), strict=True):
        assert_shown(line["figure"], 100 * found["mean regret"], 100 * found["worst regret"])
    for line, key in zip(lines[4:6], ("all", "one model and micro-batch"), strict=True):
        shares = [100 * stored["scaling"][key][f"within 2 points{half}"] for half in ("", ", fitted half", ", other half")]
        assert_shown(line["figure"], shares[0])
        assert_shown(line["fitted half, other half"], *shares[1:])
    gains = [each[f"{kind} gain"] for kind in ("published", "estimated") for each in stored["megascale"]]
    assert_shown(lines[6]["figure"], *gains)
