"""Schedules whose chunks are slices of columns instead of rows: of the product if products are sent (N), of the inner size
if rows are gathered (K).

A sliced buffer holds the slices of a block one below the other, each with its own columns only, so rows are still copied
whole. Such a schedule has more and narrower rows. What is not sliced is mapped back: the rows of the other operand, and in a
gather the rows of the product, to which every slice after the first adds its part.

Slices of N multiply whole rows with some of the weight's columns: every element is one sum as before. Slices of K round the
product once per slice, in its own type, so results differ from those of one matmul.
"""

from typing import NamedTuple

import msgspec

from counterpoint.errors import ScheduleError
from counterpoint.schedule.actions import Action, Buffer, Problem, Region, split
from counterpoint.schedule.builder import Builder, Rows
from counterpoint.schedule.description import ScheduleDescription
from counterpoint.schedule.operations import Part, Source, scheduled_pass
from counterpoint.units import format_choice
from counterpoint.value import require

SLICED = {"columns": "matmul_reduce_scatter", "inner": "all_gather_matmul"}
SHARD_SLICES = "shard slices"  # the given shard, viewed slice by slice


def sliced_builder(problem: Problem, description: ScheduleDescription) -> Builder:
    """Build all actions of a forward pass in slices. Raises `ScheduleError` if the description or a size forbids it."""
    _require_sliceable(problem, description)
    count, is_inner = description.chunks, description.along == "inner"
    changes = {"num_inner": problem.num_inner // count} if is_inner else {"num_columns": problem.num_columns // count}
    narrow = msgspec.structs.replace(problem, num_rows=count * problem.num_rows, **changes)
    builder = Builder(narrow, description)
    blocks = split(problem.num_rows, problem.num_ranks)
    builder.blocks = tuple((count * start, count * stop) for start, stop in blocks)
    longest = max(stop - start for start, stop in blocks)
    definition = scheduled_pass(problem.operation, "forward")
    for buffer in definition.buffers:
        builder.buffer(buffer.name, buffer.home, *buffer.shape(narrow, count * longest))
    definition.generate(builder)
    numbering = _Numbering(blocks, count)
    if is_inner:
        _gather_slices(builder, numbering, problem, longest)
    else:
        builder.actions = [_whole_activation(action, numbering, narrow.num_columns) for action in builder.actions]
        builder.buffers = [_unsliced(buffer, problem, longest) for buffer in builder.buffers]
    return builder


class _Numbering(NamedTuple):
    """Rows of the sliced matrix, block by block and slice by slice within a block."""

    blocks: tuple[Rows, ...]
    num_slices: int

    def place_of(self, region: Region) -> tuple[int, Rows]:
        """Return the slice that a region lies in, and its rows in the matrix that is not sliced."""
        start, stop = next(
            block for block in self.blocks if self.num_slices * block[0] <= region.start < self.num_slices * block[1]
        )
        number, row = divmod(region.start - self.num_slices * start, stop - start)
        first = start + row
        assert first + region.num_rows <= stop, "a piece of one slice"
        return number, (first, first + region.num_rows)


def _require_sliceable(problem: Problem, description: ScheduleDescription) -> None:
    operation, granularities = SLICED[description.along], ("chunk",) if description.along == "inner" else ("chunk", "fused")
    require(
        problem.operation == operation,
        ScheduleError,
        f"Slices along {description.along} are for the forward pass of {operation}; found {problem.operation}. Cut rows.",
    )
    require(
        description.matmul in granularities and description.chunk_growth == 1,
        ScheduleError,
        f"Slices along {description.along} must be equal and have matmul granularity "
        f"{format_choice(granularities)}; found '{description.matmul}' and chunk_growth "
        f"{description.chunk_growth:g}. Choose one of these.",
    )
    size = problem.num_inner if description.along == "inner" else problem.num_columns
    require(
        description.chunks > 1 and size % description.chunks == 0,
        ScheduleError,
        f"The number of slices along {description.along} must be 2 or more and divide {size}; found chunks "
        f"{description.chunks}. Choose a divisor, or cut rows.",
    )


def _whole_activation(action: Action, numbering: _Numbering, width: int) -> Action:
    """Return the action as a matmul of whole rows with a slice of the weight's columns."""
    if action.kind not in ("matmul", "add_matmul"):
        return action
    places = {region: numbering.place_of(region) for region in action.reads if region.buffer == "activation"}
    (number,) = {number for number, _ in places.values()}
    reads = tuple(_moved(region, places[region][1]) if region in places else region for region in action.reads)
    return msgspec.structs.replace(action, reads=reads, weight_columns=(number * width, (number + 1) * width))


def _unsliced(buffer: Buffer, problem: Problem, longest: int) -> Buffer:
    """Return the activation's buffer as given, and the product's as it is before slicing."""
    if buffer.name == "activation":
        return msgspec.structs.replace(buffer, num_rows=problem.num_rows)
    if buffer.name == "product":
        return msgspec.structs.replace(buffer, num_slices=buffer.num_rows // longest)
    return buffer


def _gather_slices(builder: Builder, numbering: _Numbering, problem: Problem, longest: int) -> None:
    """Send slices; every rank multiplies its own rows whole, and adds up the slices of others."""
    count, width = numbering.num_slices, builder.problem.num_inner
    written: dict[tuple[int, Rows], int] = {}
    actions: list[Action] = []
    for position, action in enumerate(builder.actions):
        if action.kind == "copy":
            reads = tuple(
                msgspec.structs.replace(region, buffer=SHARD_SLICES) if region.buffer == "shard" else region
                for region in action.reads
            )
            actions.append(msgspec.structs.replace(action, reads=reads))
        elif action.kind == "matmul" and action.reads[0].buffer == "shard":
            rows = numbering.blocks[action.rank]
            own = (0, rows[1] - rows[0])
            reads, writes = (_moved(action.reads[0], own),), (_moved(action.writes[0], rows),)
            actions.append(msgspec.structs.replace(action, reads=reads, writes=writes))
        elif action.kind == "matmul":
            number, rows = numbering.place_of(action.writes[0])
            before = written.get((action.rank, rows))
            weight_rows = (number * width, (number + 1) * width)
            actions.append(_adding(action, builder.actions, (rows, before), weight_rows))
            written[action.rank, rows] = position
        else:
            actions.append(action)
    builder.actions = actions
    builder.buffers = [
        Buffer(name="shard", home="given", num_rows=longest, num_columns=problem.num_inner),
        Buffer(name=SHARD_SLICES, home="given", num_rows=count * longest, num_columns=width, num_slices=count),
        *(buffer for buffer in builder.buffers if buffer.name == "gathered"),
        Buffer(name="product", home="result", num_rows=problem.num_rows, num_columns=problem.num_columns),
    ]


def _adding(action: Action, actions: list[Action], place: tuple[Rows, int | None], weight_rows: Rows) -> Action:
    """Return the matmul of one slice, which adds to the previous slice's result."""
    rows, before = place
    target = _moved(action.writes[0], rows)
    if before is None:
        return msgspec.structs.replace(action, writes=(target,), weight_rows=weight_rows)
    is_other_stream = actions[before].stream != action.stream
    return msgspec.structs.replace(
        action,
        kind="add_matmul",
        reads=(*action.reads, target),
        writes=(target,),
        after=tuple(sorted({*action.after, before})) if is_other_stream else action.after,
        weight_rows=weight_rows,
    )


def sliced_parts(parts: list[Part], rank: int, description: ScheduleDescription) -> list[tuple[Part, tuple[int, ...]]]:
    """Return what a product holds in slices: parts as the operator defines them, and for each source the slice of the weight
    that multiplies it, -1 for the whole weight."""
    numbers = range(description.chunks)
    if description.along == "columns":
        return [(part, (number,) * len(part.sources)) for number in numbers for part in parts]
    found: list[tuple[Part, tuple[int, ...]]] = []
    for part in parts:
        (source,) = part.sources
        if source.owner == rank:
            found.append((part, (-1,)))
            continue
        sources = tuple(
            Source(source.owner, SHARD_SLICES, source.start + number * part.num_rows, source.weights) for number in numbers
        )
        found.append((Part(part.num_rows, sources), tuple(numbers)))
    return found


def _moved(region: Region, rows: Rows) -> Region:
    return msgspec.structs.replace(region, start=rows[0], stop=rows[1])
