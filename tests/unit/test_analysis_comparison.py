"""Two analyses are compared figure by figure, the largest change first, and noise is left out."""

import pytest

from counterpoint.analysis.combine import combine
from counterpoint.analysis.comparison import compare, comparison_problems
from counterpoint.analysis.values import Analysis, OperatorRow
from helpers.rank_builder import MIB, rank_of, traced


def run_of(times: tuple[float, ...], operators: dict[str, float], **more: object) -> Analysis:
    """One all-reduce per step that takes the given time, all exposed, and operators with times per step."""
    collectives = [traced(0, n, 1000.0 * n, 1000.0 * n + time, step=n + 1) for n, time in enumerate(times)]
    rows = tuple(
        OperatorRow(name=name, kernel=f"{name}_kernel", count=1, total_us=time, mean_us=time)
        for name, time in operators.items()
    )
    return combine([rank_of(0, collectives, world_size=1, operators=rows, **more)])  # type: ignore[arg-type]


def test_changes_are_sorted_by_size_and_hold_their_spread() -> None:
    before = run_of((100.0, 110.0, 120.0), {"mm": 500.0, "add": 20.0})
    after = run_of((200.0, 210.0, 220.0), {"mm": 460.0, "add": 21.0})
    changes = compare(before, after)
    found = {change.what: change for change in changes}

    assert [abs(c.after - c.before) for c in changes if c.unit == "us"] == sorted(
        (abs(c.after - c.before) for c in changes if c.unit == "us"), reverse=True
    )
    exposed = found["exposed communication"]
    assert (exposed.before, exposed.after, exposed.spread) == pytest.approx((110.0, 210.0, 20.0))
    assert found["exposed: dependent"].after == pytest.approx(210.0)
    assert found[f"all_reduce of 1 MiB ({MIB} B), NCCL, dp of 2"].before == pytest.approx(110.0)
    assert found["operator: mm"].after == 460.0
    assert "operator: add" not in found  # 1 us, where the computation of a step varies by 20


def test_nothing_changes_between_a_run_and_itself() -> None:
    analysis = run_of((100.0, 110.0), {"mm": 500.0})

    assert all(change.before == change.after for change in compare(analysis, analysis))
    assert comparison_problems(analysis, analysis) == ()


def test_a_run_whose_times_contradict_each_other_has_no_verdict_and_is_named_in_a_comparison() -> None:
    wrong = run_of((100.0,), {}, untrusted="1 operation overlaps its predecessor.")

    assert wrong.headline.verdict == (
        "UNKNOWN: the times of rank 0 contradict each other. 1 operation overlaps its predecessor."
    )
    assert (wrong.headline.why, wrong.headline.next) == ((), ())
    assert comparison_problems(wrong, run_of((100.0,), {})) == (
        "rank0.json cannot be compared. 1 operation overlaps its predecessor.",
    )


def test_other_gpus_and_collectives_of_one_run_only_are_named() -> None:
    before = run_of((100.0,), {}, device_name="NVIDIA H200")
    after = combine(
        [rank_of(0, [traced(0, 0, 0, 90, num_bytes=2 * MIB)], world_size=1, device_name="NVIDIA H100 80GB HBM3")]
    )

    assert "different GPUs" in comparison_problems(before, after)[0]
    counts = {change.what: (change.before, change.after) for change in compare(before, after) if change.unit == "count"}
    assert counts == {
        f"count: all_reduce of 1 MiB ({MIB} B), NCCL, dp of 2": (1, 0),
        f"count: all_reduce of 2 MiB ({2 * MIB} B), NCCL, dp of 2": (0, 1),
    }
