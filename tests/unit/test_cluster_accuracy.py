"""The stored accuracy of the cluster estimator: what docs/scale.md claims, and that a sample of it comes out again."""

import json

import pytest
from benchmarks.cluster_accuracy import VTRAIN, Bench, regrets
from benchmarks.cluster_rows import vtrain
from benchmarks.conditions import RESULTS


def stored() -> dict[str, dict[str, dict[str, float]]]:
    result: dict[str, dict[str, dict[str, float]]] = json.loads((RESULTS / "cluster_accuracy.json").read_text())["result"]
    return result


def test_stored_errors_on_published_rows_are_within_their_limits() -> None:
    found = stored()["vtrain"]
    assert found["single node"]["mean error"] <= 0.08
    assert found["several nodes"]["mean error"] <= 0.10
    assert found["single node"]["mean regret"] <= 0.035
    assert found["several nodes"]["mean regret"] <= 0.03
    assert found["several nodes"]["worst regret"] <= 0.10
    for nodes in ("single node", "several nodes"):
        assert found[nodes]["mean error, other half"] <= 1.2 * found[nodes]["mean error, fitted half"]
        assert found[nodes]["mean regret"] < found[nodes]["naive formula: mean regret"] / 2
    for step in stored()["megascale"]:
        assert abs(step["estimated gain"] - step["published gain"]) <= 1.0  # type: ignore[index]


def test_estimates_of_several_nodes_come_out_as_stored() -> None:
    rows = vtrain(is_multi=True)
    errors = Bench().errors(rows, VTRAIN["several nodes"])
    mean = sum(abs(error) for error in errors) / len(errors)
    assert mean == pytest.approx(stored()["vtrain"]["several nodes"]["mean error"], rel=0.02)
    chosen = regrets(rows, [row.measured * (1 + error) for row, error in zip(rows, errors, strict=True)])
    assert max(chosen) <= 0.10
