"""The Triton kernels that place and send experts' rows, for several ranks whose memory is on one GPU."""

import numpy as np
import pytest
import torch

from counterpoint.ops import expert_kernels as kernels
from counterpoint.ops.expert_sorting import places_on_host
from counterpoint.schedule.expert_layout import ExpertLayout

WIDTH = 72  # bf16 numbers in a row, which are nine vectors


def routings(num_ranks: int, num_experts: int) -> list[np.ndarray]:
    """Counts by source, destination and expert: random ones, all rows for one expert, and none."""
    random = np.random.default_rng(num_ranks).integers(0, 300, (num_ranks, num_ranks, num_experts))
    one_hot, nothing = np.zeros_like(random), np.zeros_like(random)
    one_hot[:, num_ranks - 1, 0] = 2000
    return [random, one_hot, nothing]


def drawn(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, WIDTH, device="cuda").bfloat16()


def unwritten(num_rows: int) -> torch.Tensor:
    return torch.full((num_rows, WIDTH), torch.nan, device="cuda", dtype=torch.bfloat16)


def addresses(memory: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([each.data_ptr() for each in memory], device="cuda")


@pytest.mark.parametrize(("num_ranks", "num_experts"), [(1, 3), (2, 1), (2, 4), (2, 64), (3, 5), (4, 32)])
@pytest.mark.parametrize("kind", [0, 1, 2], ids=["random", "one-hot", "nothing"])
def test_rows_are_sent_to_their_experts(num_ranks: int, num_experts: int, kind: int) -> None:
    counts = routings(num_ranks, num_experts)[kind]
    flat = counts.reshape(num_ranks, -1)
    gathered = torch.tensor(np.concatenate([flat, flat.sum(1, keepdims=True)], 1), device="cuda")
    layouts = [ExpertLayout(counts, rank, 1) for rank in range(num_ranks)]
    tokens = [drawn(each.num_tokens) for each in layouts]
    landed = [unwritten(each.num_rows + 1) for each in layouts]  # a row more, so that there is an address
    for rank, layout in enumerate(layouts):
        ends = torch.empty(num_experts, dtype=torch.int32, device="cuda")
        kernels.send_rows(kernels.Sending(tokens[rank], landed[rank], addresses(landed)), gathered, layout, ends)
        placed = kernels.find_places(gathered, layout)
        assert torch.equal(ends, placed[-1])
        for found, wanted in zip(placed, places_on_host(counts[:, rank], rank), strict=True):
            assert found.tolist() == wanted.tolist()
    for rank, layout in enumerate(layouts):
        for source in range(num_ranks):
            for sent, at, num_rows in layout.blocks(source, rank, 0):
                assert torch.equal(landed[rank][at : at + num_rows], tokens[source][sent : sent + num_rows])
        assert landed[rank][layout.num_rows :].isnan().all(), "what is behind the rows stays as it was"
