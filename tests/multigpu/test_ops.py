"""The operators on two GPUs: results, gradients, captured graphs, torch.compile, many random calls, memory."""

import subprocess
from collections.abc import Callable

import pytest

Start = Callable[..., subprocess.CompletedProcess[str]]
OPERATORS = (
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "column_parallel_matmul",
    "all_to_all_matmul",
)


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("results", OPERATORS),
        ("several_weights", ("several weights",)),
        ("captured", OPERATORS),
        ("launch_order", ("launch order",)),
        ("recorded", ("recorded",)),
        ("random_numbers", ("random numbers",)),
        ("failed_recording", ("failed recording",)),
        ("stress", ("stress of 1000",)),
        ("compiled", ("compiled",)),
        ("memory", ("memory",)),
        ("refused_memory", ("refused memory",)),
        ("leave", ("leave",)),
    ],
)
def test_the_operators_agree_with_their_definitions(
    start_ranks: Start, request: pytest.FixtureRequest, section: str, expected: tuple[str, ...]
) -> None:
    if section == "refused_memory":
        request.getfixturevalue("own_gpus")
    done = start_ranks("operators", section)
    print(done.stdout[-4000:], done.stderr[-2000:])
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert all(f"{name}: ok" in lines for name in expected)


@pytest.mark.parametrize(
    ("fault", "expected", "num_ranks"),
    [
        ("shapes differ", "The ranks disagree", 2),
        ("types differ", "operands of one type", 2),
        ("captured first", "has not run before this capture", 2),
        ("captured unseen", "all_gather_matmul of (192, 512) @ (512, 256) bfloat16", 2),
        ("captured lane", "A collective on a lane named a test has not run before this capture", 2),
        ("a rank stays away", "did not end on the GPU", 1),
        ("a rank stays away from a host that goes on", "did not end on the GPU", 1),
    ],
)
def test_a_fault_is_one_line_on_every_rank_and_no_hang(
    start_ranks: Start, fault: str, expected: str, num_ranks: int
) -> None:
    done = start_ranks("operator_faults", fault, limit_s=120)
    lines = own_lines(done.stdout)
    assert len(lines) == num_ranks, done.stdout + done.stderr[-3000:]
    assert all(expected in line for line in lines), lines


@pytest.mark.usefixtures("own_gpus")
def test_a_process_whose_wait_cannot_be_ended_for_want_of_memory_ends_with_a_line(start_ranks: Start) -> None:
    done = start_ranks("operator_faults", "a rank stays away from a host without memory", limit_s=120)
    assert not own_lines(done.stdout)
    first, *_, last = own_lines(done.stderr)
    assert "did not end on the GPU" in first
    assert "this process ends" in last
    assert done.returncode


def own_lines(output: str) -> list[str]:
    """What our users read."""
    return [line for line in output.splitlines() if line.startswith("counterpoint:")]
