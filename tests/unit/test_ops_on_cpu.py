"""The operators between processes of this machine's CPU: results, gradients, compiled graphs, memory, and faults.

What each section holds is in `helpers/jobs/operators_on_cpu.py` and, of faults, `helpers/jobs/operator_faults_on_cpu.py`.
"""

from pathlib import Path

import pytest

from counterpoint.schedule import ScheduleDescription
from helpers.gloo_ranks import lines_of, run_ranks, said

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
ops = pytest.importorskip("counterpoint.ops")
runtime_of = pytest.importorskip("counterpoint.ops.runtime").runtime_of

pytestmark = pytest.mark.xdist_group("ranks")  # one worker, whose ranks have imported torch
OPERATORS = (
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "column_parallel_matmul",
    "all_to_all_matmul",
)


# each start of the ranks takes seconds, so several sections share one
@pytest.mark.parametrize(
    ("num_ranks", "sections", "lines"),
    [
        (2, ("results", "pool", "compiled", "registered"), (*OPERATORS, "pool", "compiled", "registered")),
        (
            2,
            ("looked_at", "after_inference", "autocast", "frozen_weights_gather_nothing"),
            (*OPERATORS, *OPERATORS, *OPERATORS, "frozen weights"),
        ),
        (
            2,
            ("several_weights", "several_weights_looked_at", "several_weights_unused"),
            ("several weights", "several weights looked at", "several weights unused"),
        ),
        (3, ("results", "groups", "gradients"), (*OPERATORS, *OPERATORS, *OPERATORS)),
        (
            4,
            ("few_results", "data_types", "same_bits", "several_weights"),
            (*OPERATORS, *OPERATORS, "same bits", "several weights"),
        ),
    ],
)
def test_operators_give_what_they_define(
    num_ranks: int, sections: tuple[str, ...], lines: tuple[str, ...], tmp_path: Path
) -> None:
    for found in lines_of(run_ranks("operators_on_cpu", num_ranks, *sections, folder=tmp_path)):
        assert found == [f"{name}: ok" for name in lines]


def test_a_call_that_cannot_be_made_is_one_line_on_every_rank_and_the_next_call_works(tmp_path: Path) -> None:
    says = {
        "shapes differ": "The ranks disagree: rank 0 calls all_gather_matmul of (8, 7) @ (7, 5) float32",
        "operators differ": "rank 0 calls matmul_reduce_scatter of (4, 7) @ (7, 5) float32, rank 1 calls matmul_all_reduce",
        "schedules differ": 'rank 1 calls all_gather_matmul of (8, 7) @ (7, 5) float32 with {"chunks":2}',
        "types differ": "Rank 1 of the group: all_gather_matmul needs operands of one type; found torch.float64",
        "types of ranks differ": "The ranks disagree",
        "inner sizes differ": "multiplies (rows, K) by (K, columns); found (4, 7) and (8, 5)",
        "no weight": "Rank 1 of the group: all_gather_matmul needs a weight; found an empty list. Pass one or more.",
        "not a weight": "Rank 1 of the group: all_gather_matmul takes a tensor or several as its weight; number 1 is of",
        "not a matrix": "found (2, 4, 7) and (7, 5)",
        "a vector": "Rank 1 of the group: matmul_reduce_scatter multiplies (rows, K) by (K, columns); found (4, 7) and (5,)",
        "rows missing": "all_gather_matmul of 9 rows needs 5 of them on rank 0 of 2; found 4",
        "negative rows": "Rank 1 of the group: all_gather_matmul of -8 rows needs",
        "no such schedule": "takes the pattern one_peer or all_peers; found 'ring'",
        "no shard": "Rank 1 of the group: all_gather_matmul takes a tensor as its shard; found a value of type NoneType",
        "no tensors": "Rank 1 of the group: matmul_all_reduce takes a tensor as its activation; found a value of type None",
        "a list": "Rank 1 of the group: matmul_reduce_scatter takes a tensor as its activation; found a value of type list",
        "an array": "Rank 1 of the group: all_to_all_matmul takes a tensor as its tokens; found a value of type ndarray",
        "a list of weights": "Rank 1 of the group: matmul_reduce_scatter takes a tensor as its weight; found a value",
        "sparse": "Rank 1 of the group: matmul_all_reduce multiplies dense matrices; found one of layout torch.sparse_coo.",
        "a sparse weight": "Rank 1 of the group: all_gather_matmul multiplies dense matrices; found one of layout torch",
        "no dimensions": "Rank 1 of the group: all_gather_matmul multiplies (rows, K) by (K, columns); found a tensor",
        "rows in words": "all_gather_matmul takes a whole number as num_rows; found a value of type str",
        "rows in parts": "all_gather_matmul takes a whole number as num_rows; found a value of type float",
        "no memory": "Rank 1 of the group: Operators run on GPUs and CPUs; found a tensor on 'meta'. Move it",
        "no group": "found a value of type int. Pass what new_group() or a mesh's get_group() returns",
        "truth values": "all_gather_matmul does not multiply torch.bool on this device",
        "complex numbers": "matmul_reduce_scatter does not multiply torch.complex64 on this device.",
        "eight bits": "matmul_all_reduce does not multiply torch.float8_e4m3fn on this device.",
        "no rows": "Rank 0 of the group: matmul_reduce_scatter: num_rows must be from 1 to",
    }
    for lines in lines_of(run_ranks("operator_faults_on_cpu", 2, "faults", folder=tmp_path)):
        found = said(lines)
        assert found.pop("after all that") == "ok"
        assert set(found) == set(says)
        assert {name: words for name, words in says.items() if words not in found[name]} == {}
        assert all(line.endswith(".") for line in found.values())


def test_shapes_without_end_leave_bounded_memory_on_every_rank(tmp_path: Path) -> None:
    first, second = lines_of(run_ranks("operators_on_cpu", 2, "many_shapes", folder=tmp_path))
    assert first == second
    assert first[0].startswith("kept: ")


@pytest.mark.parametrize("is_sequential", ["", "1"])
def test_a_wrong_operand_in_a_shape_that_ran_before_is_told_to_every_rank_at_once(
    is_sequential: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IS_SEQUENTIAL", is_sequential)
    problem = "all_gather_matmul needs operands of one type; found torch.float32 and torch.float64. Convert one."
    for lines in lines_of(run_ranks("operator_faults_on_cpu", 2, "refused_later", folder=tmp_path)):
        found = said(lines)
        assert found["later"] == f"Rank 1 of the group: {problem}"
        assert float(found["later takes"]) < 3  # of a time-out of 30
        assert found["next"].startswith(
            "The ranks of the group are out of step since a call was refused. Rank 1 of the group"
        )
        assert found["next takes"] == "no time"


def test_forward_mode_derivatives_and_vmap_are_refused_in_one_line(tmp_path: Path) -> None:
    for lines in lines_of(run_ranks("operator_faults_on_cpu", 2, "transforms", folder=tmp_path)):
        found = said(lines)
        assert len(found) == 4 * len(OPERATORS)
        for name in OPERATORS:
            for kind in ("jvp", "weight", "dual"):
                assert found[f"{name} {kind}"].startswith(f"{name} has no forward-mode derivative (torch.func.jvp, ")
            assert found[f"{name} vmap"] == f"{name} has no batching rule for torch.vmap. Call it once for each matrix."


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("stays_away", "counterpoint: Rank 1 did not reach the same call within 2 s, or ended. Look"),
        ("dies", "counterpoint: Rank 1 of the group did not exchange its rows in time, or ended. Look"),
    ],
)
def test_a_rank_that_is_not_there_is_one_line_and_no_hang(
    fault: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIMIT_S", "2")
    first, second = lines_of(run_ranks("operator_faults_on_cpu", 2, fault, folder=tmp_path, limit_s=60))
    assert second == []
    (line,) = first
    assert line.startswith(says)
    assert line.endswith("Look at its output, and start all ranks again.")


START_AGAIN = "start all ranks again."
MISSED = "did not reach all_gather_matmul in time, or ended"


def test_after_a_time_out_every_later_comparison_is_refused_at_once_and_none_is_false(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIMIT_S", "2")
    first, second = (
        said(lines) for lines in lines_of(run_ranks("operator_faults_on_cpu", 2, "out_of_step", folder=tmp_path))
    )
    assert first["apart"] == f"A rank of the group {MISSED}. Look at the other ranks' output, and {START_AGAIN}"
    assert first["apart comes from"] == "RuntimeError"
    by_itself = f"Rank 0 did not reach the same call within 2 s, or ended. Look at its output, and {START_AGAIN}"
    by_rank_0 = f"The ranks of the group are out of step since rank 0 gave up: a rank of the group {MISSED}. Start all"
    assert second["apart"].startswith((by_itself, by_rank_0)), "both time-outs end at one time"
    for found in (first, second):
        for name in ("next", "next but one"):
            assert found[f"{name} takes"] == "no time"
            assert found[name].startswith("The ranks of the group are out of step since rank ")
            assert found[name].endswith(f"or ended. S{START_AGAIN[1:]}")


def test_a_rank_that_gives_up_tells_those_that_wait_and_those_that_come_and_release_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIMIT_S", "4")
    found = [said(lines) for lines in lines_of(run_ranks("operator_faults_on_cpu", 3, "gives_up", folder=tmp_path))]
    assert found[1]["late"].startswith("Rank 0 did not reach the same call within 4 s, or ended. Look at its output")
    why = "rank 1 gave up: rank 0 did not reach the same call within 4 s, or ended"
    wanted = f"The ranks of the group are out of step since {why}. S{START_AGAIN[1:]}"
    assert found[2]["late"] == wanted, "woken by rank 1, before its own time-out"
    for lines in found:
        assert (lines["next"], lines["next takes"]) == (wanted, "no time")
        assert lines["after release"] == "ok"


def test_a_group_with_the_name_of_one_that_was_destroyed_gets_a_runtime_of_its_own() -> None:
    shard, weight = torch.ones(4, 3), torch.ones(3, 2)
    found = []
    try:
        for _ in range(2):
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            ops.all_gather_matmul(shard, weight, schedule=ScheduleDescription(chunks=2))
            assert dist.group.WORLD is not None
            found.append(runtime_of(dist.group.WORLD.group_name, shard.device))
            dist.destroy_process_group()
    finally:
        ops.release()
    first, second = found
    assert first.group is not second.group
    assert first.num_symmetric_bytes() == 0, "what is not used any more is given back"
