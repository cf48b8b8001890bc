"""The operators of experts on two GPUs: results, gradients, 1,000 routings, biases, fp8, memory, faults."""

import subprocess
from collections.abc import Callable

import pytest

Start = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("results", "results"),
        ("stress", "stress of 1000"),
        ("first_groups_ahead", "first groups ahead"),
        ("other_types", "other types"),
        ("biases_and_fp8", "biases and fp8"),
        ("no_memory", "no memory"),
        ("in_a_pool_of_the_job", "in a pool of the job"),
        ("faults", "after a fault"),
    ],
)
def test_experts_give_what_they_define(start_ranks: Start, section: str, expected: str) -> None:
    done = start_ranks("experts", section)
    print(done.stdout[-4000:], done.stderr[-2000:])
    assert done.returncode == 0
    assert f"{expected}: ok" in done.stdout.splitlines()
    if section == "faults":
        assert (
            done.stdout.count("counts: Rank 1 of the group: the counts of expert_ffn must be 0 or more and add up to") == 2
        )


def test_a_rank_that_stays_away_from_the_combine_is_a_line_and_no_hang(start_ranks: Start) -> None:
    done = start_ranks("experts", "a_rank_stays_away")
    assert any(line.startswith("a rank stays away: An operator did not end on the GPU") for line in done.stdout.splitlines())
