"""Sums of blocks on CPUs: what came, the own block beside it, divisors, and the second result."""

import logging
import sys
from types import SimpleNamespace

import pytest
import torch

from counterpoint.cuda import block_sums
from counterpoint.cuda.block_sums import Arrived, sum_arrived, sum_rows, warm_up


@pytest.mark.parametrize("divisor", [1, 3, 6.5])
@pytest.mark.parametrize("rank", [0, 2])
def test_the_own_block_counts_in_place_of_its_row(rank: int, divisor: float) -> None:
    rows = torch.arange(12.0).view(3, 4)
    own = torch.full((4,), 100.0)
    wanted = (rows.sum(0) - rows[rank] + own) / divisor
    out = torch.empty(4)
    pieces = own.split([1, 3])
    sum_arrived(Arrived(rows.clone(), pieces, rank), out, divisor)
    assert torch.allclose(out, wanted)
    assert torch.equal(own, torch.full((4,), 100.0))
    sum_arrived(Arrived(rows.clone(), pieces, rank), out, divisor, into_own=True)
    assert torch.allclose(out, wanted)
    assert torch.equal(own, out)


def test_the_own_block_may_lie_in_rows_that_are_apart() -> None:
    rows, own = torch.ones(2, 8), torch.arange(12.0).view(3, 4)[:, :2]
    wanted = torch.cat([own.flatten(), torch.zeros(2)]) + 1
    out = torch.empty(8)
    sum_arrived(Arrived(rows, (own, torch.zeros(2)), 1), out, into_own=True)
    assert torch.equal(out, wanted)
    assert torch.equal(own.flatten(), wanted[:6])


def test_rows_of_half_precision_are_rounded_once() -> None:
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)  # 256 + 1 is 256 in bf16
    out = torch.empty(1, dtype=torch.bfloat16)
    sum_rows(rows, out)
    assert out.item() == 258.0


def test_without_a_compiler_torch_adds_and_one_line_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def add_blocks(*_: object, **__: object) -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable.")

    tried = []
    monkeypatch.setattr(block_sums, "_is_fused", lambda *_: not tried and not tried.append(True))
    monkeypatch.setattr(block_sums, "_failed", [])
    monkeypatch.setitem(sys.modules, "counterpoint.cuda.sum_kernel", SimpleNamespace(add_blocks=add_blocks))
    out = torch.empty(4)
    with caplog.at_level(logging.WARNING, "counterpoint"):
        for _ in range(2):
            sum_rows(torch.ones(3, 4), out)
    assert torch.equal(out, torch.full((4,), 3.0))
    assert len(block_sums._failed) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "counterpoint: torch adds blocks, since Triton failed: Failed to find C compiler."
    ]


@pytest.mark.parametrize("number", [1, 5000, 12_345])
def test_a_warm_up_changes_no_result(number: int) -> None:
    rows, out = torch.ones(3, number), torch.zeros(number)
    warm_up(Arrived(rows, (torch.ones(number),), 1), out)
    assert not out.any()
