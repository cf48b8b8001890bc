"""The operators of experts between processes of this machine's CPU: results, gradients, skewed routings, memory, faults.

What each section holds is in `helpers/jobs/experts_on_cpu.py` and `expert_faults_on_cpu.py`.
"""

from pathlib import Path

import pytest

from helpers.gloo_ranks import lines_of, run_ranks, said

pytest.importorskip("torch")

pytestmark = pytest.mark.xdist_group("ranks")  # one worker, whose ranks have imported torch
OF_TWO = ("random_routings", "in_fp8")
OF_ANY = (
    "types",
    "partly_frozen",
    "without_gradients",
    "after_inference",
    "activations",
    "biases",
    "in_order",
    "checkpointed",
    "ahead",
    "error_of_one_rank",
    "error_beside",
    "no_memory",
)


@pytest.mark.parametrize(("num_ranks", "sections"), [(2, (*OF_TWO, *OF_ANY)), (3, OF_ANY)])
def test_experts_give_what_they_define(num_ranks: int, sections: tuple[str, ...], tmp_path: Path) -> None:
    for found in lines_of(run_ranks("experts_on_cpu", num_ranks, *sections, folder=tmp_path)):
        assert found == [f"{name.replace('_', ' ')}: ok" for name in sections]


def test_a_call_of_experts_that_cannot_be_made_is_one_line_on_every_rank_and_the_next_call_works(tmp_path: Path) -> None:
    says = {
        "counts that do not add up": "Rank 1 of the group: the counts of expert_ffn must be 0 or more and add up to its 9",
        "negative counts": "found a sum of 9 and a least count of -1",
        "counts that wrap around": "found a sum of 18446744073709551625 and a least count of 0.",
        "fractions": "Rank 1 of the group: the counts of expert_ffn must be whole numbers; found one that is not.",
        "no number": "Rank 1 of the group: the counts of expert_ffn must be whole numbers; found one that is not.",
        "whole numbers of 8 bits": "ok",
        "sparse counts": "Rank 1 of the group: expert_ffn takes whole numbers as counts; found torch.sparse_coo.",
        "fp8 differs": "The ranks disagree: rank 0 calls expert_ffn of experts (2, 2, 16, 16) bfloat16, rank 1 calls",
        "no counts": "Rank 1 of the group: expert_ffn takes whole numbers as counts; found NoneType.",
        "counts in a matrix": "4 experts, 2 on each rank; found a shape of (1, 4). Count the rows of every expert.",
        "whole numbers of another type": "ok",
        "sizes differ": "The ranks disagree: rank 0 calls expert_ffn of experts (2, 2, 2, 6) float64, rank 1 calls",
        "schedules differ": "The ranks disagree",
        "a count is missing": "Rank 1 of the group: expert_ffn needs a count for each of 4 experts, 2 on each rank; found 3",
        "types differ": "Rank 1 of the group: expert_ffn needs operands of one type; found torch.float32 and torch.float64",
        "shapes do not fit": "Rank 1 of the group: expert_ffn takes w1 and w3 of (E, hidden, dim) and w2 of",
        "sparse tokens": "Rank 1 of the group: expert_ffn multiplies dense matrices; found one of layout torch.sparse_coo.",
        "no tensor": "Rank 1 of the group: expert_ffn takes tensors as tokens and weights; found a value of type NoneType",
        "an activation by name": "expert_ffn takes a function as activation; found one of type str.",
        "totals are missing": "Rank 1 of the group: expert_ffn takes totals for each of 2 weights, or none; found 1.",
        "biases are missing": "Rank 1 of the group: expert_ffn takes 2 biases, one for each weight or None; found 1.",
        "fp8 of other types": "of the group: expert_ffn in fp8 takes operands in bf16; found torch.float64. Convert them.",
        "a bias does not fit": "Rank 1 of the group: expert_ffn adds a bias of (2, 11) torch.float64 on cpu; found (",
        "second halves differ": "disagree: rank 0 calls grouped_matmul_combine of experts (2, 3, 4) float64, rank 1 calls",
        "a second half without weights": "grouped_matmul_combine takes a list of matrices and a tensor; found a value of",
        "no schedule": "schedule takes a ScheduleDescription; found a str",
        "a schedule that does not fit": "Experts take the pattern all_peers along experts, or sequential; found ring",
        "after all that": "ok",
        "refused when agreed": "Rank 1 of the group: expert_ffn needs a count for each of 4 experts",
    }
    for lines in lines_of(run_ranks("expert_faults_on_cpu", 2, "faults", folder=tmp_path)):
        found = said(lines)
        assert set(found) == set(says)
        assert {name: words for name, words in says.items() if words not in found[name]} == {}


def test_a_rank_that_ends_between_the_halves_is_one_line(tmp_path: Path) -> None:
    first, _ = lines_of(run_ranks("expert_faults_on_cpu", 2, "a_rank_ends", folder=tmp_path))
    assert said(first)["a rank ends"].startswith(
        "A rank of the group did not exchange the rows of its experts in time, or ended"
    )
