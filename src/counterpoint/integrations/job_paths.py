"""The models and collectives of a process that nobody edits, switched between the library's path and ours.

Models are found among the objects that Python's garbage collector knows, so it does not matter which framework built them,
nor when. What is found is taken over by the integrations that a user would call by hand, switched off; `use` switches them
on and off between steps. Tensor-parallel linears are taken over when an optimizer is made, before torch.compile sees them.
"""

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import final
from weakref import WeakSet

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from counterpoint.errors import IntegrationError, cause_of, reason_of
from counterpoint.integrations import collectives, ddp, fsdp2, tensor_parallel
from counterpoint.integrations.lane_collectives import Tally
from counterpoint.integrations.paths import (
    COPIED_KINDS,
    COPIES,
    LIBRARY,
    MATMULS,
    OVERLAP,
    WORDS,
    AbstractJobPaths,
    Integration,
    PathCounts,
    PathOffer,
    Paths,
)
from counterpoint.ops import pool_report
from counterpoint.schedule import ScheduleDescription
from counterpoint.step import CollectiveKind
from counterpoint.units import format_count

OLDEST_TORCH = (2, 11)
Counting = tensor_parallel.Overlapped | ddp.BucketAverages | Tally
Key = tuple[str, str]  # a control's tag, and what it is for
Counts = tuple[int, int, int]  # calls by copies, calls by the library, bytes


@final
class TorchJobPaths(AbstractJobPaths):
    """The paths of this process. See `AbstractJobPaths`. `schedule` is that of all operators, if a plan names one."""

    def __init__(self, schedule: ScheduleDescription | None = None) -> None:
        self._schedule = schedule
        self._overlapped: list[tensor_parallel.Overlapped] = []
        self._averages: list[ddp.BucketAverages] = []
        self._sharded: list[fsdp2.CopyEnginesInUse] = []
        self._replaced: collectives.ReplacedCollectives | None = None
        self._own_kinds: tuple[CollectiveKind, ...] = ()  # of collectives that the job calls itself
        self._refused: dict[Integration, str] = {}  # of some models; the others may be taken
        self._failed: dict[Integration, str] = {}
        self._seen: WeakSet[nn.Module] = WeakSet()  # parts of models, for what is put around a model changes its root
        self._in_force = LIBRARY
        self._tallies: dict[Paths, dict[Key, Counts]] = {}
        self._counted: dict[Key, Counts] = {}  # when the paths in force were put there

    def prepare(self) -> None:
        """See `AbstractJobPaths.prepare`. What cannot be served is the survey's to say."""
        if _obstacle():
            return
        if self._replaced is None and dist.is_initialized():
            self._replaced = collectives.replace(is_on=False)  # counts, so that the survey knows what the job calls
        for root in _roots(_modules()):
            if not tensor_parallel.waiting_linears(root):
                continue
            try:
                self._overlapped.append(tensor_parallel.overlap(root, schedule=self._schedule, is_on=False))
            except IntegrationError as problem:
                self._refused["tensor_parallel"] = cause_of(problem, 200)
            except Exception as problem:  # the survey says so, and the other ranks hear it
                self._failed["tensor_parallel"] = reason_of(problem)

    def survey(self) -> tuple[PathOffer, ...]:
        """See `AbstractJobPaths.survey`."""
        obstacle = _obstacle()
        modules = _modules()
        offers = [self._offer_overlap(), *_offers_of(modules)]
        self._seen.update(part for models in _parts_by_kind(modules).values() for parts in models for part in parts)
        if not any(offers):
            offers.append(self._offer_collectives())
        elif self._replaced is not None:
            self._replaced.undo()  # the frameworks' own calls have integrations of their own
            self._replaced = None
        if obstacle:
            return tuple(replace(offer, refusal=obstacle) for offer in offers if offer)
        return tuple(offer for offer in offers if offer)

    def _offer_overlap(self) -> PathOffer | None:
        self.prepare()  # models that were parallelized after the first optimizer was made
        number = sum(len(each.taken) for each in self._overlapped)
        failure = self._failed.get("tensor_parallel")
        if number and not failure:
            return PathOffer(integration="tensor_parallel", what=format_count(number, "tensor-parallel linear"))
        refusal = failure or self._refused.get("tensor_parallel")
        return PathOffer(integration="tensor_parallel", what=MATMULS, refusal=refusal) if refusal else None

    def _offer_collectives(self) -> PathOffer | None:
        """What the job calls itself; in other jobs these are the frameworks' own calls."""
        kinds = COPIED_KINDS if self._replaced is None else self._replaced.large_kinds
        if not kinds or not dist.is_initialized():
            return None
        return PathOffer(integration="collectives", what="the job's own collectives", kinds=kinds)

    def take(self, offers: Sequence[PathOffer]) -> dict[Integration, str]:
        """See `AbstractJobPaths.take`."""
        takes: dict[Integration, Callable[[PathOffer], None]] = {
            "tensor_parallel": lambda _: None,  # prepared already
            "fsdp2": self._take_fsdp2,
            "ddp": self._take_ddp,
            "collectives": self._take_collectives,
        }
        failed: dict[Integration, str] = {}
        for offer in offers:
            try:
                takes[offer.integration](offer)
            except Exception as problem:  # whatever it is, the other ranks wait for the answer
                failed[offer.integration] = reason_of(problem)
        return failed

    def _take_fsdp2(self, _: PathOffer) -> None:
        for root in _sharded_roots(_modules()):
            self._sharded.append(fsdp2.use_copy_engines(root, is_on=False))

    def _take_ddp(self, _: PathOffer) -> None:
        for model in _data_parallel(_modules()):
            self._averages.append(ddp.register(model, is_on=False))

    def _take_collectives(self, offer: PathOffer) -> None:
        self._own_kinds = offer.kinds
        if self._replaced is None:
            self._replaced = collectives.replace(is_on=False)

    def late_models(self) -> tuple[str, ...]:
        """See `AbstractJobPaths.late_models`."""
        found = []
        for kind, models in _parts_by_kind(_modules()).items():
            late = [parts for parts in models if self._seen.isdisjoint(parts)]
            self._seen.update(part for parts in late for part in parts)
            found += [format_count(len(late), kind)] if late else []
        return tuple(found)

    def drop(self, integrations: Sequence[Integration]) -> None:
        """See `AbstractJobPaths.drop`."""
        if "tensor_parallel" in integrations:
            self._overlapped.clear()
        if "fsdp2" in integrations:
            while self._sharded:
                with suppress(Exception):  # it stays, switched off
                    self._sharded.pop().undo()
        if "ddp" in integrations:
            self._averages.clear()  # the hook stays, switched off: DDP takes one in its life
        if "collectives" in integrations:
            self._own_kinds = ()

    def use(self, paths: Paths) -> None:
        """See `AbstractJobPaths.use`."""
        if paths == self._in_force:
            return
        self._tallies[self._in_force] = self._tally()
        self._counted = self._count()
        self._in_force = paths
        for overlapped in self._overlapped:
            overlapped.use(paths.overlaps_matmuls)
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
        found = []
        for control, target in paths.targets:
            by_copies, by_library, num_bytes = tally.get((control, target), (0, 0, 0))
            found.append(
                PathCounts(
                    control=control,
                    target=target,
                    num_by_copies=by_copies,
                    num_by_library=by_library,
                    num_bytes=num_bytes,
                    symmetric_bytes=symmetric_bytes,
                )
            )
        return tuple(found)

    def _tally(self) -> dict[Key, Counts]:
        """All that was counted under the paths in force, now and before."""
        earlier, now = self._tallies.get(self._in_force, {}), self._count()
        return {key: _add(earlier.get(key), _subtract(now[key], self._counted.get(key))) for key in now}

    def _count(self) -> dict[Key, Counts]:
        """All that the integrations have counted so far, by control."""
        found: dict[Key, Counts] = {}
        for overlapped in self._overlapped:
            key = (OVERLAP.tag, MATMULS)
            found[key] = _add(found.get(key), _tally_of(overlapped))
        of_kinds: list[tuple[CollectiveKind, Counting]] = [("all_reduce", averages) for averages in self._averages]
        of_kinds += [("all_gather", tally) for sharded in self._sharded for tally in sharded.gather_tallies]
        of_kinds += [("reduce_scatter", tally) for sharded in self._sharded for tally in sharded.reduce_tallies]
        if self._replaced is not None:
            of_kinds += [(kind, self._replaced.tallies[kind]) for kind in self._own_kinds]
        for kind, counted in of_kinds:
            key = (COPIES.tag, WORDS[kind])
            found[key] = _add(found.get(key), _tally_of(counted))
        return found


def _tally_of(counted: Counting) -> Counts:
    return counted.num_by_copies, counted.num_by_library, counted.num_bytes


def _add(one: Counts | None, other: Counts) -> Counts:
    return other if one is None else (one[0] + other[0], one[1] + other[1], one[2] + other[2])


def _subtract(one: Counts, other: Counts | None) -> Counts:
    return one if other is None else (one[0] - other[0], one[1] - other[1], one[2] - other[2])


def _obstacle() -> str:
    """Why nothing can be taken over in this process, or nothing."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        return f"the job's torch is {torch.__version__}, and integrations need {oldest} or later"
    return ""


def _modules() -> list[nn.Module]:
    """Every module that is alive. `type` is asked, not `isinstance`, which would run the code of lazy proxies."""
    return [each for each in gc.get_objects() if issubclass(type(each), nn.Module) and "_modules" in vars(each)]


def _roots(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Modules that lie in no other."""
    inner = {id(child) for module in modules for child in module.children()}
    return [module for module in modules if id(module) not in inner]


def _data_parallel(modules: Sequence[nn.Module]) -> list[DistributedDataParallel]:
    return [module for module in modules if isinstance(module, DistributedDataParallel)]


def _sharded_roots(modules: Sequence[nn.Module]) -> list[nn.Module]:
    return [root for root in _roots(modules) if any(isinstance(each, FSDPModule) for each in root.modules())]


def _parts_by_kind(modules: Sequence[nn.Module]) -> dict[str, list[list[nn.Module]]]:
    """The parallel models: of each the modules that make it one, by how a line names it."""
    roots = _roots(modules)
    sharded = [[each for each in root.modules() if isinstance(each, FSDPModule)] for root in roots]
    split = [tensor_parallel.waiting_linears(root) for root in roots]
    return {
        "DDP model": [[model] for model in _data_parallel(modules)],
        "FSDP2 model": [parts for parts in sharded if parts],
        "tensor-parallel model": [parts for parts in split if parts],
    }


def _offers_of(modules: Sequence[nn.Module]) -> list[PathOffer]:
    """What the data-parallel models and the process's own collectives could take over."""
    offers = []
    replicated, sharded = _data_parallel(modules), _sharded_roots(modules)
    if replicated:
        what = f"gradient buckets of {format_count(len(replicated), 'DDP model')}"
        offers.append(PathOffer(integration="ddp", what=what, kinds=("all_reduce",)))
    if sharded:
        what = format_count(len(sharded), "FSDP2 model")
        offers.append(PathOffer(integration="fsdp2", what=what, kinds=("all_gather", "reduce_scatter")))
    return offers
