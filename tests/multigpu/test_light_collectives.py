"""Light kernels in place of captured collectives on two GPUs: equal results, proof, refusals."""

import subprocess
from collections.abc import Callable

import pytest

Start = Callable[..., subprocess.CompletedProcess[str]]
REPLACED = (
    "all_gather",
    "all_gather in place",
    "all_to_all",
    "uneven all_to_all",
    "reduce_scatter mean",
    "all_reduce sum",
    "all_reduce mean",
    "asynchronous",
)
REFUSED = {
    "odd all_reduce": "multiples of 16 bytes",
    "all_reduce max": "by something else than a sum or a mean",
}


@pytest.fixture(scope="module")
def lines(own_gpus: None, start_ranks_once: Start) -> dict[str, str]:
    """What rank 0 printed, by case."""
    done = start_ranks_once("captured_copies", "light")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)


@pytest.mark.parametrize("case", REPLACED)
def test_a_light_kernel_gives_the_same_bits_in_every_replay_and_its_node_is_found(lines: dict[str, str], case: str) -> None:
    assert "states=verified, equal=True" in lines[case]
    assert "64 CTAs of counterpoint_light_" in lines[case]


@pytest.mark.parametrize("case", REFUSED)
def test_what_light_kernels_cannot_do_stays_as_it_is_and_says_why(lines: dict[str, str], case: str) -> None:
    assert "states=refused, equal=True" in lines[case]
    assert REFUSED[case] in lines[case]
