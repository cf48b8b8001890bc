"""The models and collectives of an unmodified process, switched between the library's path and Counterpoint's.

Models are found among the objects that Python's garbage collector tracks, so it does not matter which framework built
them, or when. The same integrations that a user would call take them over, switched off; `use` switches them on and off
between steps. Tensor-parallel linears and experts are taken over when an optimizer is created, before torch.compile sees
them.
"""

import operator
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import final
from weakref import WeakSet

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from counterpoint.cuda.ranks import OLDEST_TORCH
from counterpoint.cuda.rendezvous import num_ranks
from counterpoint.errors import reason_of
from counterpoint.integrations import collectives, ddp, expert_parallel, fsdp2, tensor_parallel
from counterpoint.integrations.lane_collectives import CollectiveCounts
from counterpoint.integrations.module_tree import alive, modules_of_process, modules_within, own_parameters, roots_of
from counterpoint.integrations.paths import (
    COPIED_KINDS,
    COPIES,
    LIBRARY,
    OVERLAP,
    WORDS,
    AbstractJobPaths,
    Integration,
    PathCounts,
    PathOffer,
    Paths,
)
from counterpoint.integrations.prepared_overlaps import PreparedOverlaps
from counterpoint.ops import pool_report
from counterpoint.step import REDUCING_COLLECTIVES, CollectiveKind
from counterpoint.units import format_count

Counting = tensor_parallel.Overlapped | ddp.BucketAverages | CollectiveCounts
Key = tuple[str, str]  # a control's tag, and its target
# calls by copies, those of them in place, those replayed, calls by the library, those of them in operators, bytes
Counts = tuple[int, ...]
NONE: Counts = (0, 0, 0, 0, 0, 0)
UNSEEN = (
    "run did not see the collectives of the first step, because the job created no optimizer after init_process_group(); "
    "create one there, or call counterpoint.step() after each step"
)
OF_THE_JOB = "the job calls collectives.replace() itself, which decides about them; without that call, run can switch them"
FRAMEWORKS_KINDS: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter", "all_reduce")  # called by DDP and FSDP2


@final
class TorchJobPaths(AbstractJobPaths):
    """The paths of this process. See `AbstractJobPaths`. `given` are those of a plan, if there is one."""

    def __init__(self, given: Paths = LIBRARY) -> None:
        self._overlaps = PreparedOverlaps(given)
        self._averages: list[ddp.BucketAverages] = []
        self._sharded: list[fsdp2.CopyEnginesInUse] = []
        self._replaced: collectives.ReplacedCollectives | None = None
        self._own_kinds: tuple[CollectiveKind, ...] = ()  # of collectives that the job calls itself
        self._seen: WeakSet[nn.Module] = WeakSet()  # parts of models, because a wrapper around a model changes its root
        self._in_force = LIBRARY
        self._tallies: dict[Paths, dict[Key, Counts]] = {}
        self._counted: dict[Key, Counts] = {}  # when the current paths were applied
        self._num_large_sums = 0  # when `trains` was last asked
        self._of_shared_model = WeakIdKeyDictionary()  # optimizers that were looked at, and what was found
        self._may_begin = WeakIdKeyDictionary()  # the same

    def prepare(self) -> None:
        """See `AbstractJobPaths.prepare`. The survey reports what is not supported."""
        self._may_begin.clear()  # the new optimizer may be the one that trains the job's model
        if _obstacle():
            return
        if self._replaced is None and dist.is_initialized() and not collectives.in_place():
            self._replaced = collectives.ReplacedCollectives.in_job()  # counts calls for the survey
        self._overlaps.prepare(roots_of(modules_of_process()))

    def survey(self) -> tuple[PathOffer, ...]:
        """See `AbstractJobPaths.survey`."""
        obstacle, modules = _obstacle(), modules_of_process()
        refusal = OF_THE_JOB if collectives.in_place() else UNSEEN if self._replaced is None else ""
        self.prepare()  # models that were parallelized after the first optimizer was created
        offers = [*self._overlaps.offers(), *_offers_of(modules)]
        self._seen.update(part for models in _parts_by_kind(modules).values() for parts in models for part in parts)
        of_job = self._offer_collectives(FRAMEWORKS_KINDS if offers else (), refusal, modules)
        if offers and all(each.refusal for each in of_job) and self._replaced is not None:
            self._replaced.undo()
            self._replaced = None
        offers += of_job
        ddp.watch_joins().update(_data_parallel(modules))
        obstacle = obstacle or self.why_apart() or _of_some_ranks(modules)
        if obstacle:
            return tuple(replace(offer, refusal=obstacle) for offer in offers)
        return tuple(offers)

    def _offer_collectives(
        self, frameworks: Collection[CollectiveKind], refusal: str, modules: Sequence[nn.Module]
    ) -> list[PathOffer]:
        """Offer the collectives that the job itself calls, or refuse them. Kinds of the `frameworks` are left out: they
        have integrations of their own.
        """
        known = COPIED_KINDS if refusal or self._replaced is None else self._replaced.large_kinds
        if any(kind in REDUCING_COLLECTIVES for kind in known) and _updates_parts(modules):
            known = (*known, "all_gather")
        kinds = tuple(kind for kind in COPIED_KINDS if kind in known and kind not in frameworks)
        if not kinds or not dist.is_initialized():
            return []
        return [PathOffer(integration="collectives", what="the job's own collectives", kinds=kinds, refusal=refusal)]

    def take(self, offers: Sequence[PathOffer]) -> dict[Integration, str]:
        """See `AbstractJobPaths.take`."""
        takes: dict[Integration, Callable[[PathOffer], None]] = {
            "tensor_parallel": lambda _: None,  # prepared already
            "expert_parallel": lambda _: None,
            "fsdp2": self._take_fsdp2,
            "ddp": self._take_ddp,
            "collectives": self._take_collectives,
        }
        failed: dict[Integration, str] = {}
        for offer in offers:
            try:
                takes[offer.integration](offer)
            except Exception as problem:  # whatever failed, the other ranks wait for the answer
                failed[offer.integration] = reason_of(problem)
        return failed

    def _take_fsdp2(self, _: PathOffer) -> None:
        for root in _sharded_roots(modules_of_process()):
            self._sharded.append(fsdp2.use_copy_engines(root, is_on=False))

    def _take_ddp(self, _: PathOffer) -> None:
        ddp.watch_job()
        for model in _data_parallel(modules_of_process()):
            self._averages.append(ddp.register(model, is_on=False))

    def _take_collectives(self, offer: PathOffer) -> None:
        self._own_kinds = offer.kinds

    def late_models(self) -> tuple[str, ...]:
        """See `AbstractJobPaths.late_models`."""
        found = []
        for kind, models in _parts_by_kind(modules_of_process()).items():
            late = [parts for parts in models if self._seen.isdisjoint(parts)]
            self._seen.update(part for parts in late for part in parts)
            found += [format_count(len(late), kind)] if late else []
        return tuple(found)

    def why_apart(self) -> str:
        """See `AbstractJobPaths.why_apart`."""
        return ddp.IN_JOIN if any(model._join_config.enable for model in ddp.watch_joins()) else ""

    def may_begin(self, optimizer: object) -> bool:
        """See `AbstractJobPaths.may_begin`. If optimizers have copies of parameters, none trains the model."""
        assert isinstance(optimizer, torch.optim.Optimizer)
        if optimizer not in self._may_begin:
            replicated, everyone = _ranks_of_replicated(modules_of_process()), alive(torch.optim.Optimizer)
            is_one = _is_shared(optimizer, replicated)
            self._may_begin[optimizer] = is_one or not any(_is_shared(each, replicated) for each in everyone)
        return bool(self._may_begin[optimizer])

    def trains(self, optimizer: object, *, is_due: bool) -> bool:
        """See `AbstractJobPaths.trains`. It has parameters of a model of all ranks; or, where sums that the job calls itself
        may be switched, a large one ran since the last call. Other calls say nothing: models also run without training.

        One without parameters may be this rank's part of an optimizer that others have, too.
        """
        assert isinstance(optimizer, torch.optim.Optimizer)
        if self._replaced is not None and any(kind in REDUCING_COLLECTIVES for kind in self._own_kinds):
            earlier, self._num_large_sums = self._num_large_sums, self._replaced.num_large_sums
            return self._num_large_sums > earlier
        if not is_due:
            return True
        if optimizer not in self._of_shared_model:
            has_none = not any(group["params"] for group in optimizer.param_groups)
            self._of_shared_model[optimizer] = has_none or _is_shared(optimizer, _ranks_of_replicated(modules_of_process()))
        return bool(self._of_shared_model[optimizer])

    def drop(self, integrations: Sequence[Integration]) -> None:
        """See `AbstractJobPaths.drop`."""
        self._overlaps.drop(integrations)
        if "fsdp2" in integrations:
            while self._sharded:
                with suppress(Exception):  # it stays, switched off
                    self._sharded.pop().undo()
        if "ddp" in integrations:
            self._averages.clear()  # the hook stays, switched off: DDP accepts only one
        if "collectives" in integrations:
            self._own_kinds = ()

    def use(self, paths: Paths) -> None:
        """See `AbstractJobPaths.use`."""
        if paths == self._in_force:
            return
        self._tallies[self._in_force] = self._tally()
        self._counted = self._count()
        self._in_force = paths
        self._overlaps.use(paths)
        for averages in self._averages:
            averages.use("all_reduce" in paths.copies)
        for sharded in self._sharded:
            sharded.use(gathers="all_gather" in paths.copies, reduces="reduce_scatter" in paths.copies)
        if self._replaced is not None:
            kinds = [kind for kind in self._own_kinds if kind in paths.copies]
            self._replaced.use(bool(kinds), kinds)

    def counts(self, paths: Paths) -> tuple[PathCounts, ...]:
        """See `AbstractJobPaths.counts`."""
        tally = self._tally() if paths == self._in_force else self._tallies.get(paths, {})
        symmetric_bytes = sum(pool.num_bytes for pool in pool_report())
        reasons = {key: reason for key, counted in self._counting() if (reason := counted.library_reason)}
        found = []
        for control, target in paths.targets:
            by_copies, in_place, replayed, by_library, in_operators, num_bytes = tally.get((control, target), NONE)
            found.append(
                PathCounts(
                    control=control,
                    target=target,
                    num_by_copies=by_copies,
                    num_in_place=in_place,
                    num_replayed=replayed,
                    num_by_library=by_library,
                    num_in_operators=in_operators,
                    num_bytes=num_bytes,
                    symmetric_bytes=symmetric_bytes,
                    reason=reasons.get((control, target), ""),
                )
            )
        return tuple(found)

    def _tally(self) -> dict[Key, Counts]:
        """Return all counts under the current paths, now and before."""
        earlier, now = self._tallies.get(self._in_force, {}), self._count()
        return {key: _add(earlier.get(key, NONE), _subtract(now[key], self._counted.get(key, NONE))) for key in now}

    def _count(self) -> dict[Key, Counts]:
        """Return all counts of the integrations so far, by control."""
        found: dict[Key, Counts] = {}
        for key, counted in self._counting():
            found[key] = _add(found.get(key, NONE), _tally_of(counted))
        return found

    def _counting(self) -> list[tuple[Key, Counting]]:
        """Return the objects that count, by control."""
        of_kinds: list[tuple[CollectiveKind, Counting]] = [("all_reduce", averages) for averages in self._averages]
        of_kinds += [("all_gather", tally) for sharded in self._sharded for tally in sharded.gather_tallies]
        of_kinds += [("reduce_scatter", tally) for sharded in self._sharded for tally in sharded.reduce_tallies]
        if self._replaced is not None:
            of_kinds += [(kind, self._replaced.tallies[kind]) for kind in self._own_kinds]
        of_controls: list[tuple[Key, Counting]] = [
            ((OVERLAP.tag, target), each) for target, each in self._overlaps.counting()
        ]
        return of_controls + [((COPIES.tag, WORDS[kind]), counted) for kind, counted in of_kinds]


def _tally_of(counted: Counting) -> Counts:
    if isinstance(counted, tensor_parallel.Overlapped):
        num_in_place, num_replayed, num_in_operators = 0, counted.num_replayed, counted.num_in_operators
    else:
        num_in_place, num_replayed, num_in_operators = counted.num_in_place, 0, 0
    by_library = counted.num_by_library, num_in_operators
    return counted.num_by_copies, num_in_place, num_replayed, *by_library, counted.num_bytes


def _add(one: Counts, other: Counts) -> Counts:
    return tuple(map(operator.add, one, other))


def _subtract(one: Counts, other: Counts) -> Counts:
    return tuple(map(operator.sub, one, other))


def _obstacle() -> str:
    """Return why nothing can be taken over in this process, or nothing."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        return f"the job's torch is {torch.__version__}, but integrations need {oldest} or later"
    return ""


def _data_parallel(modules: Sequence[nn.Module]) -> list[DistributedDataParallel]:
    return [module for module in modules if isinstance(module, DistributedDataParallel)]


def _ranks_of_replicated(modules: Sequence[nn.Module]) -> dict[int, int]:
    """Return how many ranks train each parameter of the DDP models, by its id."""
    found: dict[int, int] = {}
    for model in _data_parallel(modules):
        mesh = vars(model).get("device_mesh")
        number = model.process_group.size() if mesh is None else _ranks_of_mesh(mesh)
        found |= {id(each): number for part in modules_within(model) for each in own_parameters(part)}
    return found


def _ranks_of_mesh(mesh: DeviceMesh) -> int:
    """Return the number of ranks of the whole mesh, of which this one may be a part, as that of a pipeline's stage."""
    return int(mesh._get_root_mesh().size())


def _is_shared(optimizer: torch.optim.Optimizer, replicated: dict[int, int]) -> bool:
    """Return whether a parameter is one of a model that all ranks train."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    numbers = (
        _ranks_of_mesh(each.device_mesh) if isinstance(each, DTensor) else replicated.get(id(each)) for each in parameters
    )
    return dist.is_initialized() and any(number == dist.get_world_size() for number in numbers)


def _updates_parts(modules: Sequence[nn.Module]) -> bool:
    """Return whether an optimizer updates tensors that are parameters of no model. If these are this rank's parts of the
    models, as with ZeRO, the job gathers the others' after the optimizer's step, which the first step does not show.
    """
    of_models = {id(each) for module in modules for each in own_parameters(module)}
    groups = (group["params"] for optimizer in alive(torch.optim.Optimizer) for group in optimizer.param_groups)
    return any(id(each) not in of_models for group in groups for each in group)


def _of_some_ranks(modules: Sequence[nn.Module]) -> str:
    """Return why nothing can be switched if only some ranks train a model, because they need not step with the others."""
    whole = num_ranks()
    parameters = [each for module in modules for each in own_parameters(module) if each.requires_grad]
    meshes = {each.device_mesh for each in parameters if isinstance(each, DTensor)}
    fewest = min([*_ranks_of_replicated(modules).values(), *map(_ranks_of_mesh, meshes)], default=whole)
    if fewest >= whole:
        return ""
    return (
        f"{fewest} of the job's {whole} ranks train a model by themselves, and may take other numbers of steps than the "
        "rest. If all ranks step alike, make the model parallel by a part of a DeviceMesh that has all ranks"
    )


def _sharded_roots(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the FSDP2 models; roots that have parts in common, such as two modules around one model, are one."""
    found: list[tuple[set[nn.Module], list[nn.Module]]] = []  # parts, and the roots that have them
    for root in roots_of(modules):
        parts, roots = {each for each in modules_within(root) if isinstance(each, FSDPModule)}, [root]
        for others in [each for each in found if not parts.isdisjoint(each[0])]:
            found.remove(others)
            parts, roots = parts | others[0], others[1] + roots
        if parts:
            found.append((parts, roots))
    return [nn.ModuleList(roots) if len(roots) > 1 else roots[0] for _, roots in found]


def _parts_by_kind(modules: Sequence[nn.Module]) -> dict[str, list[list[nn.Module]]]:
    """Return the parallel models by kind, each as the modules that make it one, with the words for a line."""
    roots = roots_of(modules)
    sharded = [[each for each in modules_within(root) if isinstance(each, FSDPModule)] for root in roots]
    split = [tensor_parallel.waiting_linears(root) for root in roots]
    spread = [expert_parallel.waiting_experts(root) for root in roots]
    return {
        "DDP model": [[model] for model in _data_parallel(modules)],
        "FSDP2 model": [parts for parts in sharded if parts],
        "tensor-parallel model": [parts for parts in split if parts],
        "expert-parallel model": [parts for parts in spread if parts],
    }


def _offers_of(modules: Sequence[nn.Module]) -> list[PathOffer]:
    """Offer the data-parallel models."""
    offers = []
    replicated, sharded = _data_parallel(modules), _sharded_roots(modules)
    if replicated:
        what = f"gradient buckets of {format_count(len(replicated), 'DDP model')}"
        offers.append(PathOffer(integration="ddp", what=what, kinds=("all_reduce",)))
    if sharded:
        what = format_count(len(sharded), "FSDP2 model")
        offers.append(PathOffer(integration="fsdp2", what=what, kinds=("all_gather", "reduce_scatter")))
    return offers
