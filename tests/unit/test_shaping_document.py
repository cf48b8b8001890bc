"""The tables of docs/shaping.md say what the stored measurements and the planner's rule say."""

import json
from pathlib import Path
from typing import Any

from counterpoint.planner.candidates import LEAST_CTA_US, LEAST_KEPT
from helpers.document_tables import rows_by_first_cell

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "shaping.md").read_text()
RUNS = json.loads((ROOT / "benchmarks" / "results" / "shaping_map_2x_h200.json").read_text())["runs"]


def ms(variant: dict[str, Any]) -> str:
    return f"{variant['median_us'] / 1000:.2f}"


def change(variant: dict[str, Any] | None) -> str:
    if variant is None:
        return "none"
    return f"{ms(variant)} ({100 * (variant['ratio'] - 1):+.1f} ± {100 * variant['spread']:.1f} %)"


def as_stored(step: dict[str, Any]) -> list[str]:
    """The cells of one step, from the second on."""
    found = {row["variant"]: row for row in step["rows"]}
    light, cap = found["light 64, priority"], found.get(f"light 64, priority, cap {step['residency'] - 1}, carveout 100")
    return [
        f"{step['residency']} of {step['threads']} x {step['registers']}",
        f"{step['cta_us']:.0f} us",
        f"{step['computation_us'] / 1000:.2f}, {step['chain_us'] / 1000:.2f}",
        *(ms(found[label]) for label in ("nccl, plain", "nccl, priority", "copies")),
        change(light),
        change(cap),
        f"{100 * (cap['median_us'] / light['median_us'] - 1):+.1f} %" if cap else "",
    ]


def test_the_map_is_as_measured() -> None:
    stored = {f"{step['kernel']}, {number}": as_stored(step) for number, run in enumerate(RUNS, 1) for step in run["steps"]}
    assert rows_by_first_cell(DOCUMENT, "kernel, run") == stored


def test_the_rule_is_the_planners() -> None:
    assert LEAST_KEPT == 0.75
    assert "at least three quarters" in DOCUMENT
    assert f"take {LEAST_CTA_US:g} us or more" in " ".join(DOCUMENT.split())


def test_no_variant_changed_a_bit_where_bits_were_compared() -> None:
    compared = [step["unequal"] for run in RUNS for step in run["steps"] if step["unequal"] is not None]
    assert compared == [[]] * 8
