"""What the sections share: the device, the same tensors on every rank, how near is near, and refusals."""

import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from counterpoint.errors import IntegrationError

LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))
DEVICE = torch.device("cuda", LOCAL_RANK) if torch.cuda.is_available() else torch.device("cpu")
ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def everyones(num_elements: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Every rank's tensor, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(num_elements, generator=generator).to(dtype).to(DEVICE) for _ in range(dist.get_world_size())]


def assert_close(found: Iterable[torch.Tensor], wanted: Iterable[torch.Tensor], limit: float, what: str = "") -> None:
    """Within `limit` of the largest element, or of 1e-3: some gradients are zero but for rounding."""
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one.shape == other.shape, (one.shape, other.shape)
        if other.numel():
            scale = other.double().abs().max().clamp_min(1e-3)
            difference = ((one.double() - other.double()).abs().max() / scale).item()
            assert difference < limit, (what, number, difference, limit)


def assert_equal(found: Iterable[torch.Tensor], wanted: Iterable[torch.Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def same_on_every_rank(tensor: torch.Tensor) -> bool:
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return all(torch.equal(each, tensor) for each in gathered)


def refused(call: Callable[[], object], word: str) -> None:
    with pytest.raises(IntegrationError, match=word) as caught:
        call()
    assert "\n" not in str(caught.value)


def said_of(work: Callable[[], None]) -> list[str]:
    """What the logger `counterpoint` says meanwhile: of what is true of every rank, rank 0 alone."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("counterpoint")
    logger.addHandler(handler)
    try:
        work()
    finally:
        logger.removeHandler(handler)
    return said


@contextmanager
def without_memory_above(num_bytes: int, on_rank: int) -> Iterator[None]:
    """Within it, one rank's larger pieces of memory for lanes cannot be had, as on a GPU that others have filled."""
    module, name = (symmetric_memory, "empty") if DEVICE.type == "cuda" else (torch, "empty")
    real = getattr(module, name)

    def limited(*sizes: Any, **options: Any) -> torch.Tensor:
        wanted = math.prod(size for size in sizes if isinstance(size, int))
        if options.get("dtype") is torch.uint8 and wanted > num_bytes and dist.get_rank() == on_rank:
            raise RuntimeError("out of memory")
        return real(*sizes, **options)

    setattr(module, name, limited)
    try:
        yield
    finally:
        setattr(module, name, real)
