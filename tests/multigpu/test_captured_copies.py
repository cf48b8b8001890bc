"""Collectives of captured steps by copy engines on two GPUs: equal results, proof, refusals, memory given back."""

import re
import subprocess
from collections.abc import Callable

import pytest

Start = Callable[..., subprocess.CompletedProcess[str]]
MOVED = (
    "all_gather",
    "all_gather in place",
    "all_to_all",
    "uneven all_to_all",
    "reduce_scatter mean",
    "all_reduce sum",
    "all_reduce mean",
    "odd all_reduce",
    "asynchronous",
)


@pytest.fixture(scope="module")
def lines(own_gpus: None, start_ranks_once: Start) -> dict[str, str]:
    """What rank 0 printed, by case."""
    done = start_ranks_once("captured_copies")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)


@pytest.mark.parametrize("case", MOVED)
def test_a_moved_collective_gives_the_same_bits_in_every_replay_and_its_copies_are_found(
    lines: dict[str, str], case: str
) -> None:
    assert "states=verified, equal=True" in lines[case]
    assert "to other GPUs" in lines[case]


def test_what_is_neither_a_sum_nor_a_mean_stays_as_it_is_and_says_why(lines: dict[str, str]) -> None:
    assert "states=refused, equal=True" in lines["all_reduce max"]
    assert "by something else than a sum or a mean" in lines["all_reduce max"]


def test_under_a_guard_both_graphs_run_in_turns_and_closing_gives_the_rows_back(lines: dict[str, str]) -> None:
    assert "equal=True" in lines["guarded"]
    freed = re.search(r"freed=(\d+)", lines["guarded"])
    assert freed
    assert int(freed[1]) >= 64 << 20, "two rows, one for each rank, of half of 64 MiB"
