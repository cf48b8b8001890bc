"""The interface between operators and the transport of their rows: a schedule is prepared once for a shape and run many
times.

Implementations: copy engines on symmetric memory (`copy_engines.py`), point-to-point messages on CPUs (`messages.py`).
If neither is available, or if a schedule does not pay, `collectives.py` runs the library's collective.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import final

import torch

from counterpoint.ops.lane import aligned
from counterpoint.schedule.actions import Buffer, CopySchedule, Region
from counterpoint.schedule.program import Instruction
from counterpoint.value import Value

# By the buffer's name. In a call with several weights, a buffer with a part for each has the further parts by `part_name`
Tensors = Mapping[str, torch.Tensor]
Weights = Sequence[torch.Tensor]


class Place(Value, frozen=True, kw_only=True):
    """The start of a symmetric buffer, in bytes from the start of the symmetric memory; the same on every rank."""

    buffer: str
    start: int
    num_bytes: int


class AbstractCompiledSchedule(ABC):
    """A schedule prepared for tensors of one shape and type.

    `num_sent_bytes`: bytes that this rank's copies send in one call; 0 if the library's collective moves the rows, which
    `is_by_library` says.
    """

    num_sent_bytes = 0
    is_by_library = False

    @abstractmethod
    def run(self, tensors: Tensors, weights: Weights) -> bool:
        """Issue one call, and return whether it was replayed from a recording. `tensors` holds the given and result buffers
        by name; results are filled in.

        Several weights are handled together: as many products of the same rows, or the sum of as many matrices'
        products.

        On GPUs this returns when everything is issued; later work on the current stream runs after it.
        """


class AbstractTransport(ABC):
    """Moves rows between the ranks of one group."""

    @abstractmethod
    def prepare(self, schedule: CopySchedule, dtype: torch.dtype) -> AbstractCompiledSchedule:
        """Prepare a schedule. All ranks call it with the same schedule, in the same order."""

    @abstractmethod
    def forget(self, prepared: Sequence[AbstractCompiledSchedule], *, keeps_memory: bool = False) -> None:
        """Free what only these schedules need; they are not run any more. All ranks call it alike, when none of their
        calls is in a graph that a user captured, or with `keeps_memory`, which keeps the symmetric memory for others.
        """

    @abstractmethod
    def num_symmetric_bytes(self) -> int:
        """Return the bytes of symmetric memory held on this rank."""

    @abstractmethod
    def num_recordings(self) -> int:
        """Number of calls recorded as CUDA graphs."""

    @abstractmethod
    def close(self) -> None:
        """Free all memory. Prepared schedules cannot be run any more."""


def part_name(buffer: str, number: int) -> str:
    """Return the name of a buffer's part for the weight of that number."""
    return f"{buffer} {number}" if number else buffer


def parts_of(tensors: Tensors, buffer: str) -> list[torch.Tensor]:
    """Return a buffer's parts: one for each weight, or one for all."""
    parts = [tensors[buffer]]
    while (more := tensors.get(part_name(buffer, len(parts)))) is not None:
        parts.append(more)
    return parts


def part_names(buffer: str, count: int) -> tuple[str, ...]:
    """Return the names of a buffer's parts for this many weights."""
    return tuple(part_name(buffer, number) for number in range(count))


def with_slices(tensors: Tensors, buffers: Sequence[Buffer]) -> dict[str, torch.Tensor]:
    """Return the same tensors; those that a schedule cuts into slices of columns become views (slices, rows, columns)."""
    slices = {
        buffer.name: tensors[buffer.name.split()[0]].unflatten(1, (buffer.num_slices, -1)).transpose(0, 1)
        for buffer in buffers
        if buffer.num_slices > 1
    }
    return {**tensors, **slices}


@final
class Layout:
    """The layout of a schedule's symmetric buffers: one after the other, each aligned as parts of lanes are."""

    def __init__(self, schedule: CopySchedule, element_bytes: int) -> None:
        self._row_bytes = {buffer.name: buffer.num_columns * element_bytes for buffer in schedule.buffers}
        self.places: dict[str, Place] = {}
        end = 0
        for buffer in schedule.buffers:
            if buffer.home == "symmetric":
                num_bytes = buffer.num_rows * self._row_bytes[buffer.name]
                self.places[buffer.name] = Place(buffer=buffer.name, start=end, num_bytes=num_bytes)
                end += aligned(num_bytes)
        self.num_bytes = end

    def row_bytes(self, buffer: str) -> int:
        """Return the bytes of one row."""
        return self._row_bytes[buffer]

    def sent_bytes(self, steps: Sequence[Instruction]) -> int:
        """Return the bytes that the copies of one rank's program send in one call."""
        sources = [step.action.reads[0] for step in steps if step.action.kind == "copy" and not step.is_incoming]
        return sum(source.num_rows * self._row_bytes[source.buffer] for source in sources)

    def offset(self, region: Region) -> int:
        """Return the first byte of a region, from the start of the symmetric memory or else of its tensor."""
        place = self.places.get(region.buffer)
        return (place.start if place else 0) + region.start * self._row_bytes[region.buffer]


def view_of(memory: torch.Tensor, place: Place, buffer: Buffer, dtype: torch.dtype) -> torch.Tensor:
    """Return a symmetric buffer as a matrix in `memory`, which is bytes."""
    return memory[place.start : place.start + place.num_bytes].view(dtype).view(buffer.num_rows, buffer.num_columns)
