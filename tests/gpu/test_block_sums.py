"""The kernel that adds blocks, against torch's sum in single precision."""

import pytest
import torch

from counterpoint.cuda.block_sums import Arrived, sum_arrived, sum_rows

TYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("kind", TYPES, ids=str)
@pytest.mark.parametrize(("count", "number"), [(2, 4096), (3, 1), (4, 12_345), (4, 5_000_000), (8, 1_000_003), (16, 4097)])
def test_blocks_are_added_in_single_precision_in_the_order_of_ranks(kind: torch.dtype, count: int, number: int) -> None:
    torch.manual_seed(count)
    rows = torch.randn(count, number + 5, device="cuda").to(kind)[:, :number]  # rows that are not next to each other
    wanted = torch.zeros(number, device="cuda")
    for row in rows:
        wanted += row.float()
    out = torch.empty(number, device="cuda", dtype=kind)
    sum_rows(rows, out)
    assert torch.equal(out, wanted.to(kind))
    for rank in {0, count - 1}:
        own = rows[rank].clone()
        hidden = rows.clone()
        hidden[rank] = torch.nan
        pieces = own.split([number // 3, 0, number - number // 3])
        sum_arrived(Arrived(hidden, pieces, rank), out, count, into_own=True)
        assert torch.equal(out, (wanted * (1.0 / count)).to(kind))
        assert torch.equal(own, out)


def test_what_the_kernel_does_not_add_is_left_to_torch() -> None:
    rows = torch.randn(4, 1000, device="cuda", dtype=torch.float64)
    out = torch.empty(1000, device="cuda", dtype=torch.float64)
    sum_rows(rows, out, 4)
    assert torch.allclose(out, rows.mean(0))
    in_pieces = torch.randn(1000, 2, device="cuda")[:, 0]
    arrived = torch.randn(3, 1000, device="cuda")
    out = torch.empty(1000, device="cuda")
    wanted = arrived[0] + in_pieces + arrived[2]
    sum_arrived(Arrived(arrived, (in_pieces,), 1), out)
    assert torch.allclose(out, wanted)
