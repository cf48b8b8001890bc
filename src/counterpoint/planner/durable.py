"""What planners chose by number in one step, said so that it holds for the next run of the job.

Inside, planners name operations by number. A number means nothing once a kernel more is launched, so the plan that a user
gets says what the operations are: collectives by kind, process group and bytes, kernels by name; and where only some of
these are meant, which, counted in the order of the step. The widest description that means no other operation is taken,
since it needs the least to stay the same. Modules are not told: profilers write them only where Python stacks are recorded.
"""

from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from counterpoint.controls import Control, OverlapMatmul, Transport
from counterpoint.plan import Directive, Match
from counterpoint.step import Collective, Copy, Operation, Step


class DurableMatches:
    """Matches for operations of one step. What a match accepts is remembered: trials of a search share most of them."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._accepted: dict[Match, tuple[int, ...]] = {}

    def directives(self, directives: Iterable[Directive]) -> tuple[Directive, ...]:
        """The same directives without operation numbers: one for each match that is needed, in the order of the step."""
        return tuple(replace(directive, match=match) for directive in directives for match in self._matches_of(directive))

    def matches(self, operations: Iterable[int], controls: Sequence[Control] = ()) -> tuple[Match, ...]:
        """The widest matches that together accept these operations, each of them once, and no other."""
        left = dict.fromkeys(sorted(set(operations)))
        found: list[Match] = []
        while left:
            number = next(iter(left))
            match = self._widest(number, left, controls)
            found.append(match)
            for accepted in self._of(match) if match.ordinals is None else self._chosen(match):
                del left[accepted]
        return tuple(found)

    def _matches_of(self, directive: Directive) -> tuple[Match, ...]:
        if directive.match.operations is None:
            return (directive.match,)
        return self.matches(directive.match.accepted(self._step), directive.controls)

    def _widest(self, number: int, left: dict[int, None], controls: Sequence[Control]) -> Match:
        """The widest match of operation `number` that accepts nothing but what is left; at last, some of the narrowest."""
        match = Match()
        for match in _levels(self._step.operations[number], controls):
            if all(each in left for each in self._of(match)):
                return match
        return replace(match, ordinals=tuple(place for place, each in enumerate(self._of(match)) if each in left))

    def _of(self, match: Match) -> tuple[int, ...]:
        if match not in self._accepted:
            self._accepted[match] = match.accepted(self._step)
        return self._accepted[match]

    def _chosen(self, match: Match) -> Iterator[int]:
        candidates = self._of(replace(match, ordinals=None))
        return (candidates[ordinal] for ordinal in match.ordinals or ())


def _levels(operation: Operation, controls: Sequence[Control]) -> Iterator[Match]:
    """Descriptions of an operation, from the widest to the narrowest.

    Whether a collective can be moved by copies, or joined with its matmul, hangs on which collective it is; so that is said.
    """
    whole = Match(kind=operation.kind)
    if isinstance(operation, Collective):
        if not any(isinstance(control, (Transport, OverlapMatmul)) for control in controls):
            yield whole
        one = Match(kind="communication", collective=operation.collective)
        yield one
        if operation.process_group is not None:
            one = replace(one, process_group=operation.process_group)
            yield one
        yield replace(one, num_bytes=operation.num_bytes)
        return
    yield whole
    named = Match(name=operation.name, kind=operation.kind)
    yield named
    if isinstance(operation, Copy):
        yield replace(named, num_bytes=operation.num_bytes)
