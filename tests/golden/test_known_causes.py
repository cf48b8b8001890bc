"""Traces recorded by `benchmarks/known_causes.py`: the analysis names the cause that each was built to have."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from counterpoint.analysis.combine import combine
from counterpoint.analysis.rank import analyze_rank
from counterpoint.traces.formats import read_activity

FOLDER = Path(__file__).parents[1] / "data" / "known_causes"
EXPECTED = FOLDER / "expected.json"
CASES: dict[str, Any] = json.loads(EXPECTED.read_text())["cases"] if EXPECTED.exists() else {}


def exposed_by_cause(case: str) -> dict[int, Counter[str]]:
    """Exposed microseconds of the steady steps of each rank, mean per step, by cause."""
    paths = sorted(FOLDER.glob(f"{case}.rank*.json.gz"))
    analysis = combine([analyze_rank(read_activity(path)) for path in paths])
    found: dict[int, Counter[str]] = {}
    for each in analysis.ranks:
        steady = {step.step for step in each.steps if step.is_steady}
        assert steady, f"{case}: no steady step of rank {each.rank}"
        found[each.rank] = Counter()
        for interval in analysis.exposed:
            if interval.rank == each.rank and interval.step in steady:
                found[each.rank][interval.cause] += interval.duration_us / len(steady)
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_cause_that_a_trace_was_built_to_have_is_named(case: str) -> None:
    """Where a rank's time has several causes by construction, the largest is named, and half of the case's own found."""
    cause, found = CASES[case]["cause"], exposed_by_cause(case)
    assert set(found) == {int(number) for number in CASES[case]["ranks"]}
    for number, expected in ((int(number), causes) for number, causes in CASES[case]["ranks"].items()):
        said = f"{case}, rank {number}: found {dict(found[number])}, expected {expected}"
        assert found[number], said
        if max(expected.values()) > 0.6 * sum(expected.values()):
            assert found[number].most_common(1)[0][0] == max(expected, key=expected.__getitem__), said
        if cause in expected:
            assert found[number][cause] > 0.5 * expected[cause] > 0, said


def test_every_cause_was_recorded() -> None:
    if not CASES:
        pytest.skip("no traces of known causes here; benchmarks/known_causes.py records them on 2 GPUs")
    assert not json.loads(EXPECTED.read_text())["failed"]
    assert len({entry["cause"] for entry in CASES.values()}) == 9
