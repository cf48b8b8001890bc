"""Sums of blocks on CPUs: what came, the own block beside it, divisors, and the second result."""

import pytest
import torch

from counterpoint.cuda.block_sums import Arrived, sum_arrived, sum_rows


@pytest.mark.parametrize("divisor", [1, 3, 6.5])
@pytest.mark.parametrize("rank", [0, 2])
def test_the_own_block_counts_in_place_of_its_row(rank: int, divisor: float) -> None:
    rows = torch.arange(12.0).view(3, 4)
    own = torch.full((4,), 100.0)
    wanted = (rows.sum(0) - rows[rank] + own) / divisor
    out, copy = torch.empty(4), torch.empty(4)
    sum_arrived(Arrived(rows.clone(), own, rank), out, divisor, copy)
    assert torch.allclose(out, wanted)
    assert torch.equal(copy, out)


def test_the_own_block_may_lie_in_pieces_and_take_the_result() -> None:
    rows, own = torch.ones(2, 6), torch.arange(12.0).view(3, 4)[:, :2]
    out = torch.empty(6)
    sum_arrived(Arrived(rows, own, 1), out)
    assert torch.equal(out, own.flatten() + 1)
    flat = torch.arange(6.0)
    sum_arrived(Arrived(torch.ones(2, 6), flat, 0), out, copy=flat)
    assert torch.equal(flat, torch.arange(6.0) + 1)


def test_rows_of_half_precision_are_rounded_once() -> None:
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)  # 256 + 1 is 256 in bf16
    out = torch.empty(1, dtype=torch.bfloat16)
    sum_rows(rows, out)
    assert out.item() == 258.0
