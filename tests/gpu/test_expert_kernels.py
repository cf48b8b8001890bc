"""The Triton kernels that place and send experts' rows, for several ranks whose memory is on one GPU, and that gate them."""

import numpy as np
import pytest
import torch

from counterpoint.ops import expert_kernels as kernels
from counterpoint.ops.expert_sorting import places_on_host
from counterpoint.ops.gated_activation import activate, activate_backward, gated_silu
from counterpoint.ops.grouped_matmul import multiply_grouped
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


def gathered_of(counts: np.ndarray) -> torch.Tensor:
    """What the exchange of counts leaves on the device: each rank's counts, and last twice their sum, or 1 more."""
    flat = counts.reshape(len(counts), -1)
    last = 2 * flat.sum(1, keepdims=True) + np.arange(len(counts))[:, None] % 2
    return torch.tensor(np.concatenate([flat, last], 1), device="cuda")


@pytest.mark.parametrize(("num_ranks", "num_experts"), [(1, 3), (2, 1), (2, 4), (2, 64), (3, 5), (4, 32)])
@pytest.mark.parametrize("kind", [0, 1, 2], ids=["random", "one-hot", "nothing"])
def test_rows_are_sent_to_their_experts(num_ranks: int, num_experts: int, kind: int) -> None:
    counts = routings(num_ranks, num_experts)[kind]
    gathered = gathered_of(counts)
    layouts = [ExpertLayout(counts, rank, 1) for rank in range(num_ranks)]
    tokens = [drawn(each.num_tokens) for each in layouts]
    landed = [unwritten(layouts[0].most_grouped + 1) for _ in layouts]  # a row more, so that there is an address
    for rank, layout in enumerate(layouts):
        ends = torch.empty(num_experts, dtype=torch.int32, device="cuda")
        kernels.send_rows(kernels.Sending(rank, tokens[rank], landed[rank], addresses(landed)), gathered, ends)
        placed = kernels.find_places(gathered, layout)
        assert torch.equal(ends, placed[-1])
        for found, wanted in zip(placed, places_on_host(counts[:, rank], rank), strict=True):
            assert found.tolist() == wanted.tolist()
    for rank, layout in enumerate(layouts):
        for source in range(num_ranks):
            for sent, at, num_rows in layout.blocks(source, rank, 0):
                assert torch.equal(landed[rank][at : at + num_rows], tokens[source][sent : sent + num_rows])
        assert landed[rank][layout.num_rows :].isnan().all(), "what is behind the rows stays as it was"


@pytest.mark.parametrize("num_spare", [0, -1], ids=["room", "no room for one rank"])
@pytest.mark.parametrize(("num_ranks", "num_experts"), [(2, 4), (2, 64), (3, 5)])
def test_other_ranks_get_rows_for_first_places_and_then_the_rest(num_ranks: int, num_experts: int, num_spare: int) -> None:
    counts = routings(num_ranks, num_experts)[0]
    firsts = [0, 333, 1 << 20][:num_ranks]
    layouts = [ExpertLayout(counts, rank, 1) for rank in range(num_ranks)]
    num_places = layouts[0].most_grouped + num_spare
    tokens, landed = [drawn(each.num_tokens) for each in layouts], [unwritten(num_places) for _ in layouts]
    for part in ("first", "rest"):
        for rank in range(num_ranks):
            ends = torch.empty(num_experts, dtype=torch.int32, device="cuda")
            sending = kernels.Sending(rank, tokens[rank], landed[rank], addresses(landed))
            kernels.send_rows(sending, gathered_of(counts), ends, torch.tensor(firsts, device="cuda"), part)
            assert ends[-1].item() == (layouts[rank].num_rows if layouts[rank].num_rows <= num_places else 0)
        for rank, whole in enumerate(layouts):
            written = unwritten(num_places)
            for source in range(num_ranks if whole.num_rows <= num_places else 0):
                for sent, at, num_rows in whole.blocks(source, rank, 0):
                    is_whole = source == rank or part == "rest"
                    stop = at + num_rows if is_whole else max(at, min(at + num_rows, firsts[rank]))
                    written[at:stop] = tokens[source][sent : sent + stop - at]
            assert torch.equal(landed[rank].nan_to_num(7), written.nan_to_num(7))


@pytest.mark.parametrize(
    "wrong", ["too many for rank 1", "a sum of rank 0", "a negative count of rank 0", "a sum that wraps"]
)
def test_rows_without_room_or_with_wrong_counts_are_not_sent(wrong: str) -> None:
    counts = np.full((2, 2, 2), 3)
    counts[:, 1] += "many" in wrong
    gathered = gathered_of(counts)
    if wrong == "a sum of rank 0":
        gathered[0, -1] += 2
    elif wrong == "a negative count of rank 0":
        gathered[0, :2] = torch.tensor([-1, 7])
    elif wrong == "a sum that wraps":
        gathered[0, :2], gathered[0, -1] = 2**63 - 2, 4  # the sum of all four is 2 in 64 bits
    tokens, landed = [drawn(14), drawn(14)], [unwritten(12), unwritten(12)]
    ends = torch.full((2, 2), -1, dtype=torch.int32, device="cuda")
    for rank in range(2):
        kernels.send_rows(kernels.Sending(rank, tokens[rank], landed[rank], addresses(landed)), gathered, ends[rank])
    written = [[not bool(row.isnan().any()) for row in each] for each in landed]
    if "many" in wrong:
        assert (ends.tolist(), written) == ([[6, 12], [0, 0]], [[True] * 12, [False] * 12])
    else:
        assert written[1] == [False, False, False, True, True, True] * 2, "rank 0 sends nothing, rank 1 all of its rows"


def test_rows_are_put_into_their_places_and_taken_back() -> None:
    rows, target, back = drawn(50), unwritten(64), unwritten(50)
    places = torch.randperm(64, device="cuda")[:40].sort().values
    kernels.put_rows(rows, slice(7, 47), places, target)
    assert torch.equal(target[places], rows[7:47])
    assert int(target.isnan().all(1).sum()) == 24, "no other place is written"
    origin = int(places[13])  # the first row of a group
    kernels.take_rows(target[origin:].clone(), places, (13, origin), back, slice(20, 47))
    assert torch.equal(back[20:47], rows[20:47])
    assert int(back.isnan().all(1).sum()) == 23, "no other row is written"


def test_a_grouped_matmul_leaves_rows_behind_its_ends_alone() -> None:
    rows, weights = torch.randn(96, 64, device="cuda").bfloat16(), torch.randn(2, 32, 64, device="cuda").bfloat16()
    rows[40:] = torch.nan
    ends = torch.tensor([8, 40], dtype=torch.int32, device="cuda")
    found = multiply_grouped(rows, weights.mT, ends)
    if found is None:
        pytest.skip("no grouped matmul in one kernel here")
    wanted = torch.cat([rows[:8] @ weights[0].T, rows[8:40] @ weights[1].T])
    torch.testing.assert_close(found[:40], wanted)
    assert torch.equal(found[:40], multiply_grouped(rows[:40], weights.mT, ends)), "the same bits as without the other rows"


@pytest.mark.parametrize("shape", [(1, 8), (37, 24), (5, 512), (1000, 768), (513, 1408)])
def test_gate_and_up_of_one_matrix_give_the_bits_of_two(shape: tuple[int, int]) -> None:
    num_rows, width = shape
    both = torch.randn(num_rows, 2 * width, device="cuda").bfloat16()
    apart = [each.contiguous() for each in both.chunk(2, 1)]
    assert torch.equal(activate(gated_silu, [both]), activate(None, apart))
    gradient = torch.randn(num_rows, width, device="cuda").bfloat16()
    of_both, of_apart = [torch.empty_like(both)], [torch.empty_like(gradient) for _ in range(2)]
    again, other = torch.empty_like(gradient), torch.empty_like(gradient)
    activate_backward(gated_silu, [both], gradient, [again, *of_both])
    activate_backward(None, apart, gradient, [other, *of_apart])
    assert torch.equal(again, other)
    assert torch.equal(of_both[0], torch.cat(of_apart, 1))
