"""Takes over the tensor-parallel linears and the routed experts of an unmodified process, switched off.

They are taken over before the first forward pass if possible, because torch.compile then sees them; `use` switches them
between steps.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, final

from torch import nn

from counterpoint.errors import IntegrationError, cause_of, reason_of
from counterpoint.integrations import expert_parallel, tensor_parallel
from counterpoint.integrations.overlapped import Overlapped
from counterpoint.integrations.paths import EXPERTS, MATMULS, Integration, PathOffer, Paths
from counterpoint.units import format_count

SECOND_DERIVATIVES = "the job differentiates gradients again (create_graph=True), and operators have no second derivative"
Overlapping = Literal["tensor_parallel", "expert_parallel"]


class OverlapWay(NamedTuple):
    """One integration: its target in words, the singular and plural of what it takes, how to find that in a model, why there
    is none, and how to take it.
    """

    integration: Overlapping
    target: str
    nouns: tuple[str, str]
    waiting: Callable[[nn.Module], Sequence[nn.Module]]
    why_none: Callable[[nn.Module], str]
    take: Callable[[nn.Module], Overlapped]


@final
class PreparedOverlaps:
    """What both integrations took; `given` names the schedules of their operators, if a plan does."""

    def __init__(self, given: Paths) -> None:
        self._integrations = (
            OverlapWay(
                "tensor_parallel",
                MATMULS,
                ("tensor-parallel linear", MATMULS),
                tensor_parallel.waiting_linears,
                tensor_parallel.why_none_waits,
                lambda root: tensor_parallel.overlap(root, schedule=given.schedule, is_on=False),
            ),
            OverlapWay(
                "expert_parallel",
                EXPERTS,
                ("layer of routed experts", "layers of routed experts"),
                expert_parallel.waiting_experts,
                expert_parallel.why_none_waits,
                lambda root: expert_parallel.overlap(root, schedule=given.experts_schedule, is_on=False),
            ),
        )
        self._taken: dict[Overlapping, list[Overlapped]] = {"tensor_parallel": [], "expert_parallel": []}
        self._refused: dict[Overlapping, str] = {}  # for some models; the others may be taken
        self._failed: dict[Overlapping, str] = {}

    def prepare(self, roots: Iterable[nn.Module]) -> None:
        """Take over the parts of these models that were not taken before."""
        for root in roots:
            for each in self._integrations:
                try:
                    if not each.waiting(root):
                        reason = each.why_none(root)
                        if reason:
                            self._refused.setdefault(each.integration, reason)
                        continue
                    taken = each.take(root)
                    taken.switch.is_watching = True
                    taken.leave_counts_to(self._taken[each.integration])  # else calls of models in one group count twice
                    self._taken[each.integration].append(taken)
                except IntegrationError as problem:
                    self._refused[each.integration] = cause_of(problem, 200)
                except Exception as problem:  # the survey reports it, and the other ranks read it
                    self._failed[each.integration] = reason_of(problem)

    def offers(self) -> list[PathOffer]:
        """Return what was taken, or why not; nothing for an integration that found nothing. The first step has ended."""
        for _, overlapped in self.counting():
            overlapped.switch.is_watching = False
        found = (self._offer(each) for each in self._integrations)
        return [offer for offer in found if offer is not None]

    def _offer(self, overlap: OverlapWay) -> PathOffer | None:
        integration = overlap.integration
        number = sum(len(each.taken) for each in self._taken[integration])
        failure = self._failed.get(integration)
        if any(each.switch.has_second_derivatives for each in self._taken[integration]):
            failure = SECOND_DERIVATIVES
        if number and not failure:
            return PathOffer(integration=integration, what=format_count(number, *overlap.nouns))
        refusal = failure or self._refused.get(integration)
        return PathOffer(integration=integration, what=overlap.target, refusal=refusal) if refusal else None

    def drop(self, integrations: Sequence[Integration]) -> None:
        """Leave these switched off for good."""
        for integration, taken in self._taken.items():
            if integration in integrations:
                taken.clear()

    def use(self, paths: Paths) -> None:
        """Switch them as the paths say; call it between steps, on every rank."""
        for overlapped in self._taken["tensor_parallel"]:
            overlapped.use(paths.overlaps_matmuls)
        for overlapped in self._taken["expert_parallel"]:
            overlapped.use(paths.overlaps_experts)

    def counting(self) -> list[tuple[str, Overlapped]]:
        """Return all objects that count, each with its target."""
        return [(each.target, taken) for each in self._integrations for taken in self._taken[each.integration]]
