"""Wire formats of gradients: unchanged, as bf16, or as fp8 with a scale for every 1024 elements.

A wire format cuts a bucket into one block per rank, averages the ranks' blocks, and writes the averages back. Averages
accumulate in single precision in the order of ranks, so they have the same bits in every run and on every rank.

Errors, for an element x whose group of 1024 has the largest magnitude a: bf16 rounds to 8 bits of mantissa twice (what is
sent, and the average), at most 2^-8 |x| each time. fp8 (e4m3) rounds to 4 bits twice, at most max(2^-4 |x|, 2^-10 a / 448)
each time: elements 2^-18 times smaller than the largest of their group vanish. No error is fed back into the next step.
Infinities and NaNs survive as NaN (fp8: in the whole group), so a gradient scaler still sees them.
"""

import itertools
from abc import ABC, abstractmethod
from typing import final

import torch
from torch.nn import functional

from counterpoint.cuda.block_sums import Arrived, sum_arrived

GROUP_ELEMENTS = 1024  # elements that share a scale: 0.4 % more bytes
LARGEST_FP8 = 448.0  # torch.finfo(torch.float8_e4m3fn).max
SCALE_BYTES = 4
BLOCK_ELEMENTS = 128  # blocks start at multiples of this, so that copies and sums are aligned


def block_elements(num_elements: int, num_ranks: int) -> int:
    """Return the elements of each rank's block of this many."""
    return -(-num_elements // (num_ranks * BLOCK_ELEMENTS)) * BLOCK_ELEMENTS


class AbstractWire(ABC):
    """A format of gradients between ranks."""

    @abstractmethod
    def encode(self, bucket: torch.Tensor, num_ranks: int) -> list[torch.Tensor]:
        """Return the bucket as one flat block per rank; the blocks are views of the bucket if nothing needs converting."""

    @abstractmethod
    def reduce(self, arrived: Arrived, out: torch.Tensor, num_hosts: int = 1, *, into_own: bool = False) -> None:
        """Write the mean (or the sum, for a sum format) of the ranks' blocks to `out`, or with `into_own` to both `out` and
        this rank's own block.

        On several hosts this is the share of this host, to which the library adds the shares of the other hosts.
        """

    @abstractmethod
    def decode(self, blocks: list[torch.Tensor], bucket: torch.Tensor) -> None:
        """Write blocks of averages, which `encode` returned and the lane has filled, back into the bucket."""

    @property
    def is_summable(self) -> bool:
        """Whether the library can add up blocks of several hosts."""
        return True

    @property
    def key(self) -> tuple[str, ...]:
        """What distinguishes work in this format from work in another at the same addresses; empty if the format
        allocates memory, so that its work cannot be recorded."""
        return ()


@final
class AsIs(AbstractWire):
    """Sends gradients unchanged; `is_mean` is False for sums."""

    def __init__(self, *, is_mean: bool = True) -> None:
        self._is_mean = is_mean

    def encode(self, bucket: torch.Tensor, num_ranks: int) -> list[torch.Tensor]:
        """See `AbstractWire.encode`. Blocks are parts of the bucket; the last ones may be shorter, or empty."""
        block = block_elements(bucket.numel(), num_ranks)
        starts = [min(rank * block, bucket.numel()) for rank in range(num_ranks + 1)]
        return [bucket[start:stop] for start, stop in itertools.pairwise(starts)]

    def reduce(self, arrived: Arrived, out: torch.Tensor, num_hosts: int = 1, *, into_own: bool = False) -> None:
        """See `AbstractWire.reduce`."""
        sum_arrived(arrived, out, len(arrived.rows) * num_hosts if self._is_mean else 1, into_own=into_own)

    def decode(self, blocks: list[torch.Tensor], bucket: torch.Tensor) -> None:
        """See `AbstractWire.decode`: the blocks are the bucket."""

    @property
    def key(self) -> tuple[str, ...]:
        """See `AbstractWire.key`."""
        return ("mean" if self._is_mean else "sum",)


@final
class AsBfloat16(AbstractWire):
    """Sends gradients of wider types as bf16."""

    def __init__(self) -> None:
        self._as_is = AsIs()

    def encode(self, bucket: torch.Tensor, num_ranks: int) -> list[torch.Tensor]:
        """See `AbstractWire.encode`."""
        return self._as_is.encode(bucket.to(torch.bfloat16), num_ranks)

    def reduce(self, arrived: Arrived, out: torch.Tensor, num_hosts: int = 1, *, into_own: bool = False) -> None:
        """See `AbstractWire.reduce`."""
        self._as_is.reduce(arrived, out, num_hosts, into_own=into_own)

    def decode(self, blocks: list[torch.Tensor], bucket: torch.Tensor) -> None:
        """See `AbstractWire.decode`."""
        for part, block in zip(bucket.split([len(block) for block in blocks]), blocks, strict=True):
            part.copy_(block)


@final
class AsScaledFloat8(AbstractWire):
    """Sends gradients as e4m3; each group of elements is divided by a scale that maps its largest to the type's largest.

    A block is a sequence of bytes: the elements of its groups, then their scales in single precision.
    """

    def encode(self, bucket: torch.Tensor, num_ranks: int) -> list[torch.Tensor]:
        """See `AbstractWire.encode`. The bucket is padded with zeros to whole groups, equally many for each rank."""
        groups = -(-bucket.numel() // (num_ranks * GROUP_ELEMENTS))
        missing = num_ranks * groups * GROUP_ELEMENTS - bucket.numel()
        padded = functional.pad(bucket, (0, missing)) if missing else bucket
        wire = padded.new_empty(num_ranks, groups * (GROUP_ELEMENTS + SCALE_BYTES), dtype=torch.uint8)
        _quantize(padded.view(num_ranks, groups, GROUP_ELEMENTS), wire)
        return list(wire.unbind())

    @property
    def is_summable(self) -> bool:
        """See `AbstractWire.is_summable`: scales differ."""
        return False

    def reduce(self, arrived: Arrived, out: torch.Tensor, num_hosts: int = 1, *, into_own: bool = False) -> None:
        """See `AbstractWire.reduce`."""
        assert num_hosts == 1, "such blocks cannot be added up"
        rows = arrived.completed()
        elements, scales = _parts(rows)
        total = elements[0].float() * scales[0]
        for rank in range(1, len(rows)):
            total.addcmul_(elements[rank].float(), scales[rank])
        _quantize((total / len(rows))[None], out[None])
        if into_own:
            arrived.own[0].copy_(out)

    def decode(self, blocks: list[torch.Tensor], bucket: torch.Tensor) -> None:
        """See `AbstractWire.decode`."""
        start = 0
        for block in blocks:
            elements, scales = _parts(block[None])
            values = (elements[0].float() * scales[0]).flatten()[: bucket.numel() - start]
            bucket[start : start + len(values)].copy_(values)
            start += len(values)


def _quantize(groups: torch.Tensor, wire: torch.Tensor) -> None:
    """Quantize groups (rows, groups, elements) into the bytes of as many rows. A group of zeros has the scale 1."""
    scales = torch.linalg.vector_norm(groups, torch.inf, -1, keepdim=True).float() / LARGEST_FP8
    scales.masked_fill_(scales == 0, 1.0)
    elements, kept_scales = _parts(wire)
    elements.copy_(groups / scales)
    kept_scales.copy_(scales)


def _parts(wire: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return elements (rows, groups, 1024) and scales (rows, groups, 1) as views of rows of bytes."""
    num_groups = wire.shape[1] // (GROUP_ELEMENTS + SCALE_BYTES)
    num_bytes = num_groups * GROUP_ELEMENTS
    elements = wire[:, :num_bytes].view(torch.float8_e4m3fn).view(len(wire), num_groups, GROUP_ELEMENTS)
    return elements, wire[:, num_bytes:].view(torch.float32)[..., None]
