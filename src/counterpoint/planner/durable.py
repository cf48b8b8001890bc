"""Rewrites directives that name operations by number so that they hold for the next run of the job.

Planners name operations by number. A number becomes wrong as soon as the job launches one more kernel. The plan that a
user gets therefore describes operations: collectives by kind, process group and bytes, kernels by name. If only some of
these are meant, the plan adds ordinals, counted in the order of the step. The widest description that matches no other
operation is used, because it has the least that can change. Module names are not used: profilers write them only if
Python stacks are recorded.
"""

from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from counterpoint.controls import Control, OverlapMatmul, Transport
from counterpoint.plan import Directive, Match
from counterpoint.step import Collective, Copy, Operation, Step


class DurableMatches:
    """Builds matches for operations of one step. It caches what each match accepts, because the trials of a search share
    most matches.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self._accepted: dict[Match, tuple[int, ...]] = {}

    def directives(self, directives: Iterable[Directive]) -> tuple[Directive, ...]:
        """Return the same directives without operation numbers: one per match that is needed, in the order of the step."""
        return tuple(replace(directive, match=match) for directive in directives for match in self._matches_of(directive))

    def matches(self, operations: Iterable[int], controls: Sequence[Control]) -> tuple[Match, ...]:
        """Return the widest matches that together accept these operations, each of them once, and no other."""
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
        """Return the widest match of operation `number` that accepts only operations in the remaining set; if none does,
        use ordinals.
        """
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
    """Return descriptions of an operation, from the widest to the narrowest.

    Whether copies can move a collective, or whether it can be joined with its matmul, depends on its kind, so the kind
    is always given.
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
