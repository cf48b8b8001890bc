"""How DDP's buckets are joined, which parameters all ranks used, and when a GPU has no room for gradients beside buckets."""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from counterpoint.integrations.ddp_in_place import PASSES_LATER, Usage, groups_of, lack_of_memory
from counterpoint.units import GIB


def of_bytes(*num_bytes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.empty(each // dtype.itemsize, dtype=dtype, device="meta")) for each in num_bytes]


def sizes(groups: list[list[nn.Parameter]]) -> list[list[int]]:
    return [[parameter.nbytes for parameter in group] for group in groups]


def test_buckets_are_joined_until_they_are_large_enough_and_the_rest_joins_the_last() -> None:
    buckets = [of_bytes(100), of_bytes(400, 600), of_bytes(1200), of_bytes(800), of_bytes(200), of_bytes(40)]
    assert sizes(groups_of(buckets, 1000)) == [[100, 400, 600], [1200], [800, 200, 40]]
    assert sizes(groups_of(buckets, 0)) == sizes(buckets)
    assert sizes(groups_of(buckets, 5000)) == [[100, 400, 600, 1200, 800, 200, 40]], "too small together: the library's"


def test_types_are_kept_apart() -> None:
    buckets = [of_bytes(600), of_bytes(700, dtype=torch.bfloat16), of_bytes(600), of_bytes(700, dtype=torch.bfloat16)]
    groups = groups_of([*buckets, of_bytes(80)], 1000)
    assert sizes(groups) == [[700, 700], [600, 600, 80]], "the rest comes last, so the group that it joins does"
    assert [len({parameter.dtype for parameter in group}) for group in groups] == [1, 1]


@pytest.mark.parametrize(
    ("num_ranks", "num_used", "is_complete"), [(8, 8, True), (8, 7, False), (128, 128, True), (128, 127, False)]
)
def test_a_parameter_that_one_rank_leaves_out_is_seen_in_narrow_types(
    num_ranks: int, num_used: int, is_complete: bool
) -> None:
    usage = Usage(num_ranks)
    for _ in range(PASSES_LATER):
        usage.note(torch.tensor([num_used / num_ranks, 1.0], dtype=torch.bfloat16))
    assert usage.is_complete() == is_complete


def test_room_for_gradients_is_what_the_peak_left(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 60 * GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 66 * GIB)
    assert not lack_of_memory(gpu, 4 * GIB)
    assert lack_of_memory(gpu, 5 * GIB) == (
        "gradients beside buckets take 5 GiB, and at its peak the GPU had 4 GiB left; leave out gradient_as_bucket_view"
    )
    assert not lack_of_memory(torch.device("cpu"), 5 * GIB)
