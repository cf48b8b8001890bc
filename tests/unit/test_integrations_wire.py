"""What compression of gradients may cost, against its documented bounds; and misuse that needs no second rank to be seen."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from counterpoint.cuda.block_sums import Arrived
from counterpoint.errors import IntegrationError
from counterpoint.integrations import ddp, fsdp2, tensor_parallel
from counterpoint.integrations.compression import GROUP_ELEMENTS, AbstractWire, AsBfloat16, AsIs, AsScaledFloat8

WIRES = (AsIs(), AsBfloat16(), AsScaledFloat8())
SIZES = st.integers(1, 5000)
RANKS = st.integers(1, 5)


def random_bucket(num_elements: int, seed: int, spread: float) -> torch.Tensor:
    """Magnitudes over `spread` powers of ten."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randn(num_elements, generator=generator)
    return signs * 10 ** (spread * (torch.rand(num_elements, generator=generator) - 0.5))


def there_and_back(wire: AbstractWire, bucket: torch.Tensor, num_ranks: int) -> torch.Tensor:
    found = bucket.clone()
    blocks = wire.encode(found, num_ranks)
    assert len(blocks) == num_ranks
    wire.decode(blocks, found)
    return found


@settings(deadline=None, max_examples=60)
@given(SIZES, RANKS, st.integers(0, 100), st.floats(0, 12))
def test_what_travels_as_it_is_comes_back_as_it_was(size: int, ranks: int, seed: int, spread: float) -> None:
    bucket = random_bucket(size, seed, spread)
    assert torch.equal(there_and_back(AsIs(), bucket, ranks), bucket)


@settings(deadline=None, max_examples=60)
@given(SIZES, RANKS, st.integers(0, 100), st.floats(0, 12))
def test_bf16_rounds_within_its_bound(size: int, ranks: int, seed: int, spread: float) -> None:
    bucket = random_bucket(size, seed, spread)
    error = (there_and_back(AsBfloat16(), bucket, ranks) - bucket).abs()
    assert bool((error <= 2.0**-8 * bucket.abs()).all())


@settings(deadline=None, max_examples=60)
@given(SIZES, RANKS, st.integers(0, 100), st.floats(0, 12))
def test_fp8_rounds_within_its_bound(size: int, ranks: int, seed: int, spread: float) -> None:
    bucket = random_bucket(size, seed, spread)
    error = (there_and_back(AsScaledFloat8(), bucket, ranks) - bucket).abs()
    padded = nn.functional.pad(bucket, (0, -size % GROUP_ELEMENTS))
    largest = padded.view(-1, GROUP_ELEMENTS).abs().amax(1, keepdim=True).expand(-1, GROUP_ELEMENTS).flatten()[:size]
    bound = torch.maximum(2.0**-4 * bucket.abs(), 2.0**-10 * largest / 448)
    assert bool((error <= bound * (1 + 1e-5)).all())


@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: type(wire).__name__)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_a_gradient_scaler_looks_for_survives(wire: AbstractWire, value: float) -> None:
    bucket = torch.ones(3000)
    bucket[1500] = value
    assert not bool(torch.isfinite(there_and_back(wire, bucket, 2)[1500]))


@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: type(wire).__name__)
def test_zeros_stay_zeros(wire: AbstractWire) -> None:
    assert torch.equal(there_and_back(wire, torch.zeros(2000), 3), torch.zeros(2000))


@settings(deadline=None, max_examples=40)
@given(SIZES, st.integers(1, 4), st.integers(0, 50))
def test_the_average_of_one_block_from_each_rank_is_their_mean(size: int, ranks: int, seed: int) -> None:
    """As two ranks of the sum see it: row r is what rank r sent."""
    for wire, limit in zip(WIRES, (1e-6, 2.0**-7, 2.0**-3), strict=True):
        buckets = [random_bucket(size, seed + rank, 1) for rank in range(ranks)]
        sent = [wire.encode(bucket.clone(), ranks) for bucket in buckets]
        averages = []
        for block in range(ranks):
            rows = torch.stack([blocks[block] for blocks in sent])
            averages.append(torch.empty_like(rows[0]))
            wire.reduce(Arrived(rows, (rows[0].clone(),), 0), averages[-1])
        found = torch.empty(size)
        wire.decode(averages, found)
        if isinstance(wire, AsIs):
            found = torch.cat(averages)
        sent_bytes = torch.stack(buckets)
        bound = limit * sent_bytes.abs().amax(0) + 1e-5 * sent_bytes.abs().max()
        assert bool(((found - sent_bytes.mean(0)).abs() <= bound).all())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ddp.register(nn.Linear(2, 2)), "wrapped in DistributedDataParallel; found Linear"),
        (lambda: fsdp2.use_copy_engines(nn.Linear(2, 2)), "fully_shard"),
        (lambda: tensor_parallel.overlap(nn.Linear(2, 2)), "parallelize_module"),
    ],
    ids=["ddp", "fsdp2", "tensor_parallel"],
)
def test_a_model_of_another_kind_is_refused_in_one_line(call: object, words: str) -> None:
    with pytest.raises(IntegrationError, match=words) as caught:
        call()  # type: ignore[operator]
    assert "\n" not in str(caught.value)
