"""The paths of a job's collectives: the library's, or copies and operators instead, as values without torch.

A supervised job switches between them at step boundaries, all ranks together. `job_paths.py` does that with torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Literal, final

from counterpoint.controls import LEAST_PART_BYTES, OverlapMatmul, Transport
from counterpoint.schedule import ScheduleDescription
from counterpoint.step import REDUCING_COLLECTIVES, CollectiveKind
from counterpoint.units import format_bytes
from counterpoint.value import Value

COPIES, OVERLAP = Transport(transport="copy_engine"), OverlapMatmul()
NO_EXCHANGE = "the job's first step has none that copies take; they take large ones whose calls give no sizes"
NO_LARGE_CALL = (
    f", and in its first step it calls none itself with {format_bytes(LEAST_PART_BYTES)} or more from each rank; torch's "
    "functional collectives are not taken"
)
Integration = Literal["tensor_parallel", "expert_parallel", "fsdp2", "ddp", "collectives"]
COPIED_KINDS: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
MATMULS, EXPERTS = "tensor-parallel linears", "routed experts"  # the targets of overlap_matmul, in words
WORDS: dict[CollectiveKind, str] = {
    "all_gather": "all-gathers",
    "reduce_scatter": "reduce-scatters",
    "all_reduce": "all-reduces",
    "all_to_all": "all-to-alls",
}


class Paths(Value, frozen=True, kw_only=True):
    """Which collectives use copies instead of the library's kernels, and which matmuls overlap with their collectives:
    those of tensor-parallel linears, and those of routed experts.

    `schedule` is that of the linears' operators, `experts_schedule` that of the experts'; None leaves it to the
    heuristic.
    """

    copies: tuple[CollectiveKind, ...] = ()
    overlaps_matmuls: bool = False
    overlaps_experts: bool = False
    schedule: ScheduleDescription | None = None
    experts_schedule: ScheduleDescription | None = None

    @property
    def targets(self) -> tuple[tuple[str, str], ...]:
        """The controls in it, each by its tag and its target."""
        copies = tuple((COPIES.tag, WORDS[kind]) for kind in self.copies)
        overlaps = ((MATMULS, self.overlaps_matmuls), (EXPERTS, self.overlaps_experts))
        return (*copies, *((OVERLAP.tag, target) for target, is_asked in overlaps if is_asked))

    @property
    def keeps_bits(self) -> bool:
        """Whether results have the same bits as by the library: controls that only move data keep them; a sum in another
        order may not.
        """
        is_overlapped = self.overlaps_matmuls or self.overlaps_experts
        return not is_overlapped and not any(kind in REDUCING_COLLECTIVES for kind in self.copies)


LIBRARY = Paths()


class PathOffer(Value, frozen=True, kw_only=True):
    """What one integration could take over in one rank's process: `what` in words, or the `refusal`."""

    integration: Integration
    what: str = ""
    kinds: tuple[CollectiveKind, ...] = ()
    refusal: str = ""


# what a job may have, if a rank could not check
UNKNOWN_OFFERS = (
    PathOffer(integration="tensor_parallel", what=MATMULS),
    PathOffer(integration="expert_parallel", what=EXPERTS),
    PathOffer(integration="collectives", what="the job's collectives", kinds=COPIED_KINDS),
)


class PathCounts(Value, frozen=True, kw_only=True):
    """The counts of one control on one rank while certain paths were applied.

    `num_in_place` of those by copies needed no flat buffer, and `num_replayed` were replayed from recordings.
    `num_in_operators` of those by the library ran in an operator, which had replaced a module. `num_bytes` were sent by
    copies. `reason` is why the library did most of the others. `symmetric_bytes` is the symmetric memory that
    this rank's GPU holds for all of them now.
    """

    control: str
    target: str
    num_by_copies: int = 0
    num_in_place: int = 0
    num_replayed: int = 0
    num_by_library: int = 0
    num_in_operators: int = 0
    num_bytes: int = 0
    symmetric_bytes: int = 0
    reason: str = ""
    problem: str = ""

    @property
    def num_applied(self) -> int:
        """The calls on which the control took effect. An operator whose rows are too small for copies runs the library's
        collective, but not the module that it replaced.
        """
        return self.num_by_copies + self.num_in_operators


class AbstractJobPaths(ABC):
    """The interface to the models and collectives of one rank's process, on either of two paths."""

    @abstractmethod
    def prepare(self) -> None:
        """Handle a new optimizer: set up what must exist before the first forward pass, switched off."""

    @abstractmethod
    def survey(self) -> tuple[PathOffer, ...]:
        """Return what could be taken over here; what has to be prepared for that is prepared, and stays switched off."""

    @abstractmethod
    def take(self, offers: Sequence[PathOffer]) -> dict[Integration, str]:
        """Prepare what all ranks offer, switched off; return the integrations that failed here, and why."""

    @abstractmethod
    def late_models(self) -> tuple[str, ...]:
        """Return models, in words, that were parallelized since the survey or the last call; each once."""

    def why_apart(self) -> str:
        """Return why ranks may take different numbers of steps from now on, so that none can wait for another; or nothing.

        All ranks find the same after the same step.
        """
        return ""

    def may_begin(self, optimizer: object) -> bool:
        """Return whether the first step of the job may be one of this optimizer, as it then is on all ranks. It may not, if
        another optimizer trains what can be switched: a rank may have this one for itself, or step it at will.
        """
        return True

    def trains(self, optimizer: object, *, is_due: bool) -> bool:
        """Return whether this optimizer, which has just stepped, trains what can be switched, as it then does on all ranks.

        One of a model that a rank has for itself, such as a linear probe, does not. What takes long to find out is only
        looked at if the answer `is_due`; before that, True may also mean that it is not known.
        """
        return True

    @abstractmethod
    def drop(self, integrations: Sequence[Integration]) -> None:
        """Leave these to the library for good, because some rank could not prepare them."""

    @abstractmethod
    def use(self, paths: Paths) -> None:
        """Let the next step's collectives use these paths; call it at the same step on every rank."""

    @abstractmethod
    def counts(self, paths: Paths) -> tuple[PathCounts, ...]:
        """Return what was done while these paths were applied, control by control."""


@final
class NoPaths(AbstractJobPaths):
    """A job whose collectives all use the library."""

    def prepare(self) -> None:
        """See `AbstractJobPaths.prepare`."""

    def survey(self) -> tuple[PathOffer, ...]:
        """See `AbstractJobPaths.survey`."""
        return ()

    def take(self, offers: Sequence[PathOffer]) -> dict[Integration, str]:
        """See `AbstractJobPaths.take`."""
        return {}

    def late_models(self) -> tuple[str, ...]:
        """See `AbstractJobPaths.late_models`."""
        return ()

    def drop(self, integrations: Sequence[Integration]) -> None:
        """See `AbstractJobPaths.drop`."""

    def use(self, paths: Paths) -> None:
        """See `AbstractJobPaths.use`."""

    def counts(self, paths: Paths) -> tuple[PathCounts, ...]:
        """See `AbstractJobPaths.counts`."""
        return tuple(PathCounts(control=control, target=target) for control, target in paths.targets)


def path_problems(paths: Paths, offers: Iterable[PathOffer]) -> dict[str, str]:
    """Return why controls of these paths are not among what all ranks offer, by their targets."""
    found: dict[str, str] = {}
    given = list(offers)
    wanted: list[tuple[str, list[PathOffer]]] = [
        (WORDS[kind], [offer for offer in given if kind in offer.kinds]) for kind in paths.copies
    ]
    if paths.overlaps_matmuls:
        wanted.append((MATMULS, [offer for offer in given if offer.integration == "tensor_parallel"]))
    if paths.overlaps_experts:
        wanted.append((EXPERTS, [offer for offer in given if offer.integration == "expert_parallel"]))
    for target, fitting in wanted:
        if not fitting:
            besides = " besides what is overlapped" if paths.overlaps_matmuls or paths.overlaps_experts else ""
            or_calls = "" if target in (MATMULS, EXPERTS) else NO_LARGE_CALL
            is_of_job = target == WORDS["all_to_all"]  # no model calls these
            found[target] = NO_EXCHANGE if is_of_job else f"the job has no model{besides} that could take it{or_calls}"
        elif all(offer.refusal for offer in fitting):
            found[target] = fitting[0].refusal
    return found
