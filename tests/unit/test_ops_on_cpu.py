"""The operators between processes of this machine's CPU: results, gradients, compiled graphs, memory, and faults.

What each section holds is in `helpers/jobs/operators_on_cpu.py`.
"""

from pathlib import Path

import pytest

from counterpoint.schedule import ScheduleDescription
from helpers.gloo_ranks import lines_of, run_ranks, said

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
ops = pytest.importorskip("counterpoint.ops")
runtime_of = pytest.importorskip("counterpoint.ops.runtime").runtime_of

OPERATORS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "all_to_all_matmul")


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
        (2, ("several_weights", "several_weights_looked_at"), ("several weights", "several weights looked at")),
        (3, ("results", "groups", "exchanged", "gradients"), (*OPERATORS, *OPERATORS, "exchanged", *OPERATORS)),
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
        "no weight": "Rank 1 of the group: all_gather_matmul needs a weight; found an empty list. Give one or more.",
        "not a weight": "Rank 1 of the group: all_gather_matmul takes a tensor or several as its weight; number 1 is of",
        "not a matrix": "found (2, 4, 7) and (7, 5)",
        "a vector": "Rank 1 of the group: matmul_reduce_scatter multiplies (rows, K) by (K, columns); found (4, 7) and (5,)",
        "rows missing": "all_gather_matmul of 9 rows needs 5 of them on rank 0 of 2; found 4",
        "negative rows": "Rank 1 of the group: all_gather_matmul of -8 rows needs",
        "no such schedule": "takes the pattern one_peer or all_peers; found 'ring'",
        "no rows": "Rank 0 of the group: matmul_reduce_scatter: num_rows must be from 1 to",
    }
    for lines in lines_of(run_ranks("operators_on_cpu", 2, "faults", folder=tmp_path)):
        found = said(lines)
        assert found.pop("after all that") == "ok"
        assert set(found) == set(says)
        assert {name: words for name, words in says.items() if words not in found[name]} == {}
        assert all(line.endswith(".") for line in found.values())


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("stays_away", "counterpoint: Rank 1 did not come to the same call within 2 s, or ended"),
        ("dies", "counterpoint: Rank 1 of the group did not exchange its rows"),
    ],
)
def test_a_rank_that_is_not_there_is_one_line_and_no_hang(
    fault: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIMIT_S", "2")
    first, second = lines_of(run_ranks("operators_on_cpu", 2, fault, folder=tmp_path, limit_s=60))
    assert second == []
    (line,) = first
    assert line.startswith(says)
    assert line.endswith("Look at its output, and start all ranks again.")


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
