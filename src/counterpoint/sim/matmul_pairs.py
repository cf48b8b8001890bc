"""Finds the matmuls that belong to each collective: it gathers what they read, or reduces what one of them wrote.

Pairs follow from streams and dependencies, never from names. A collective that the computation's stream waits for at once
stands alone between two operations of that stream. Its matmul is the next one there (of an all-gather or all-to-all), or the
last one before (of a reduce-scatter or all-reduce). A few small kernels may lie between, as in code that cuts, joins and
casts tensors; a step does not say whether they do more than that. Times are in `overlapped.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from counterpoint.schedule.actions import Operation as OperatorName
from counterpoint.step import Collective, CollectiveKind, Copy, Kernel, Operation, Step
from counterpoint.value import Value

OPERATOR_OF: Mapping[CollectiveKind, OperatorName] = MappingProxyType(
    {
        "all_gather": "all_gather_matmul",
        "all_to_all": "all_to_all_matmul",
        "reduce_scatter": "matmul_reduce_scatter",
        "all_reduce": "matmul_all_reduce",
    }
)
FED_COLLECTIVES: tuple[CollectiveKind, ...] = ("reduce_scatter", "all_reduce")  # a matmul comes before them
MOST_BETWEEN = 3  # kernels; seen in traces: a cast, an addition of two gradients, a concatenation. Copies do not count
ELEMENT_SIZES = (1, 2, 4, 8)


class MatmulPair(Value, frozen=True, kw_only=True):
    """A collective and its matmuls, by number: the matmuls that read its result, or the one that feeds it.

    `follower` is the operation after the last matmul on its stream, None if there is none.
    """

    collective: int
    matmuls: tuple[int, ...]
    follower: int | None


class MatmulPairs:
    """The pairs of one step. A matmul is in one pair at most, which is that of the earlier collective."""

    def __init__(self, step: Step) -> None:
        self._operations = step.operations
        self._places: dict[int, list[int]] = {}
        self._position: list[int] = []
        self._waiting: dict[int, list[int]] = {}
        for index, operation in enumerate(step.operations):
            line = self._places.setdefault(operation.stream, [])
            self._position.append(len(line))
            line.append(index)
            for dependency in operation.waits_for:
                self._waiting.setdefault(dependency.operation, []).append(index)
        self.found: dict[int, MatmulPair] = {}
        self.obstacles: dict[int, str] = {}
        taken: set[int] = set()
        for index, operation in step.collectives().items():
            pair = self._pair(index, operation)
            if isinstance(pair, MatmulPair) and taken.intersection(pair.matmuls):
                pair = "its matmul is already joined with another collective"
            if isinstance(pair, str):
                self.obstacles[index] = pair
            else:
                self.found[index] = pair
                taken.update(pair.matmuls)

    def _pair(self, index: int, collective: Collective) -> MatmulPair | str:
        """Return the collective's pair, or why there is none."""
        obstacle = _obstacle(collective)
        if obstacle:
            return obstacle
        consumer = self._consumer(index)
        if consumer is None:
            return "nothing in the step waits for it"
        main = self._places[self._operations[consumer].stream]
        place = self._position[consumer]
        before = main[place - 1] if place else None
        if before is None or (before != index and before not in self._waited_for(index)):
            return "computation continues beside it, so nothing waits while it moves data"
        is_fed = collective.collective in FED_COLLECTIVES
        if is_fed and before == index:
            place -= 1  # it runs on the computation's own stream
        line = main[:place][::-1] if is_fed else main[place:]
        matmuls = tuple(self._matmuls(line, collective))
        if not matmuls:
            where = "before" if is_fed else "after"
            return f"no matmul comes directly {where} it"
        last = self._position[matmuls[-1]] + 1
        return MatmulPair(collective=index, matmuls=matmuls, follower=main[last] if last < len(main) else None)

    def _consumer(self, index: int) -> int | None:
        """Return the first operation that waits for this one, by a dependency or as the next computation on its stream."""
        waiting = self._waiting.get(index, [])
        line = self._places[self._operations[index].stream]
        following = line[self._position[index] + 1 :][:1]
        following = [number for number in following if not isinstance(self._operations[number], Collective)]
        return min([*waiting, *following], default=None)

    def _waited_for(self, index: int) -> set[int]:
        """Return the operations that this one depends on, and the one directly before it on its stream."""
        found = {dependency.operation for dependency in self._operations[index].waits_for}
        place = self._position[index]
        earlier = self._places[self._operations[index].stream][max(0, place - 1) : place]
        return found | set(earlier)

    def _matmuls(self, line: Sequence[int], collective: Collective) -> Iterator[int]:
        """Yield the next matmuls on the line that the sizes allow: after a gather all consecutive ones, else one."""
        num_between, is_found = 0, False
        for number in line:
            operation = self._operations[number]
            if isinstance(operation, Copy) and operation.direction != "peer_to_peer":
                continue
            if isinstance(operation, Kernel) and operation.character == "matmul":
                if not _fits(operation, collective):
                    return
                is_found = True
                yield number
                if collective.collective in FED_COLLECTIVES:
                    return
                continue
            num_between += 1
            if is_found or num_between > MOST_BETWEEN or not _is_plain(operation):
                return


def _obstacle(collective: Collective) -> str | None:
    if not collective.num_bytes:
        return "its size is unknown; it may be an operator of symmetric memory that already includes its matmul"
    if collective.collective not in OPERATOR_OF:
        return "no operator joins it with a matmul"
    if collective.transport == "copy_engine":
        return "copy engines already move it"
    if collective.group_size < 2:
        return "a single rank exchanges no rows"
    return None


def _is_plain(operation: Operation) -> bool:
    return isinstance(operation, Kernel) and operation.character in ("streaming", "row_wise")


def _fits(matmul: Kernel, collective: Collective) -> bool:
    """Return whether the known sizes allow the matmul to read what is gathered, or to have written what is reduced."""
    if matmul.matmul_sizes is None:
        return True
    rows, inner, columns = matmul.matmul_sizes
    parts = (rows * columns,) if collective.collective in FED_COLLECTIVES else (rows * inner, inner * columns)
    return any(collective.num_bytes == part * size for part in parts for size in ELEMENT_SIZES)
