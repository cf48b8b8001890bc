"""Gathers FSDP2's parameters and reduces its gradients by copy engines.

    use = fsdp2.use_copy_engines(model)        # after fully_shard, between two steps, on every rank
    use.use(gathers=True, reduces=False)       # from the next step on, on every rank
    use.undo()

FSDP gathers into a flat buffer, and its kernel copies every parameter out of it on the computation's stream. Here copy
engines bring the parts to where the parameters are, so that kernel has nothing to do. Gradients are likewise sent from
where they are (`fsdp2_in_place.py`). The symmetric memory is this rank's part of three groups, and one more block for each
rank of the largest group for gradients.

Small parameters, parameters of several types, and those that are sharded along another dimension go through flat buffers,
and so do all of a torch that is newer than the versions tested. These are in symmetric memory: `num_buffers` times the
largest such group. FSDP keeps two groups gathered at once, and one more for each group that it is told to prefetch. A
buffer that is still in use when its turn comes is never overwritten.

FSDP arranges its backward pass so that one reduce-scatter is in flight at a time; copies keep that. The divisor is read
from FSDP's group of parameters, because the library's reduction hides it in an opaque operation. The all-reduce between
replicas of shards (HSDP) stays with the library.
"""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, final
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from counterpoint.controls import LEAST_PART_BYTES
from counterpoint.display import capped
from counterpoint.errors import IntegrationError, RefusedTogetherError
from counterpoint.integrations.fsdp2_in_place import GatherInPlace, ReduceInPlace, can_gather_in_place
from counterpoint.integrations.gather_buffers import MAX_BUFFERS, GatherBuffers, claim, give_back
from counterpoint.integrations.lane_collectives import (
    LEAST_PIECE_BYTES,
    SWITCHED_OFF,
    CollectiveCounts,
    future_of,
    gather_into_buffer,
    reduce_scatter,
    require_least_part,
    require_least_piece,
    require_switch,
    streams_of,
)
from counterpoint.integrations.lanes import AcrossHosts, Lanes, require_across_hosts
from counterpoint.integrations.module_tree import named_modules
from counterpoint.integrations.parameter_memory import ParameterMemory
from counterpoint.integrations.stand_ins import BufferStandIn
from counterpoint.ops.collectives import library_all_gather, library_reduce_scatter
from counterpoint.ops.tested_torch import is_newer
from counterpoint.value import require

UNKNOWN_REDUCTION = "FSDP requests a reduction that is neither a sum nor a mean"


@final
class GatherByCopies(AllGather):  # type: ignore[misc]  # torch is untyped here
    """The all-gather of one group of parameters."""

    def __init__(self, parameters: FSDPParamGroup, in_use: "CopyEnginesInUse") -> None:
        self._parameters, self._in_use = parameters, in_use

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for the gathered parameters; FSDP copies this rank's part into it."""
        # after forward the parameters may be sharded among fewer ranks (reshard_after_forward=4)
        group = self._parameters._all_gather_process_group
        buffers, obstacle = self._in_use.buffers_of(group), "" if self._in_use.are_gathers_on else SWITCHED_OFF
        (num_elements,) = map(int, size)
        num_bytes, parameters = num_elements * dtype.itemsize, self._parameters.fsdp_params
        piece_bytes, least_bytes = num_bytes / (group.size() * len(parameters)), self._in_use.least_piece_bytes
        is_able = buffers.is_on_one_host and not is_newer()
        if is_able and can_gather_in_place(parameters, dtype, piece_bytes, least_bytes):
            lane = buffers.take_lane(num_bytes, obstacle)
            if lane is not None:
                return GatherInPlace(parameters, lane, buffers, self._in_use.memory).stand_in(size, dtype, device)
            self._in_use.memory.leave_to_fsdp(parameters)
            return torch.empty(*size, dtype=dtype, device=device)
        self._in_use.memory.leave_to_fsdp(parameters)
        output = buffers.take(size, dtype, obstacle)
        return torch.empty(*size, dtype=dtype, device=device) if output is None else output

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fetch the other ranks' parts; FSDP waits for the current stream, or for the returned work."""
        buffers = self._in_use.buffers_of(group)
        if isinstance(output_tensor, BufferStandIn):
            lane, gather = output_tensor.owner.lane, partial(output_tensor.owner.fetch, input_tensor)
        elif found := buffers.lane_of(output_tensor):
            lane, gather = found, partial(gather_into_buffer, found, buffers.levels, output_tensor)
        else:
            work: dist.Work | None = library_all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
            return work
        if not async_op or output_tensor.device.type == "cpu":
            gather()
            return None
        with lane.issuing():
            gather()
            future = future_of(input_tensor, streams_of(input_tensor))
        return torch._C._distributed_c10d._create_work_from_future(future)


@final
class ReduceByCopies(ReduceScatter):  # type: ignore[misc]  # as above
    """The reduce-scatter of one group of parameters."""

    def __init__(self, parameters: FSDPParamGroup, in_use: "CopyEnginesInUse") -> None:
        self._parameters, self._in_use = parameters, in_use
        self._awaited = 0  # elements of the sums that FSDP allocates next

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for gradients that are to be reduced, then for their sums: a stand-in, then ordinary memory."""
        num_elements, num_ranks = int(size[0]), self._parameters._reduce_scatter_process_group.size()
        is_output, self._awaited = num_elements == self._awaited, 0
        if is_output or num_ranks == 1 or is_newer() or not self._in_use.are_reduces_on:
            return torch.empty(*size, dtype=dtype, device=device)
        self._awaited = num_elements // num_ranks
        return ReduceInPlace(num_ranks, self._in_use.least_piece_bytes).stand_in(size, dtype, device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Compute this rank's block of the ranks' sum or mean; later work of the current stream can use it."""
        lanes, tally = self._in_use.reduce_lanes_of(group)
        divisor = self._divisor(op, group.size())
        obstacle = self._obstacle(divisor) or lanes.obstacle_to("reduce_scatter", input_tensor.nbytes)
        num_hosts = 1 if obstacle else lanes.num_hosts
        in_place = _in_place(input_tensor) if num_hosts == 1 else None
        block_bytes = in_place.block_bytes if in_place else output_tensor.nbytes
        if not (async_op or lanes.leave_to_library(tally, block_bytes * num_hosts, obstacle)):
            try:
                lane, levels = lanes.next(), lanes.levels
                if in_place:
                    num_bytes = in_place.reduce(lane, levels, output_tensor, divisor)
                else:
                    blocks = _flat(input_tensor).view(group.size(), -1)
                    num_bytes = reduce_scatter(lane, levels, output_tensor, blocks, divisor)
                tally.count_copies(num_bytes, num_hosts, is_in_place=in_place is not None)
            except RefusedTogetherError as refusal:
                lanes.give_up(refusal)
                tally.count_library(lanes.obstacle)
            else:
                return None
        work: dist.Work | None = library_reduce_scatter(
            output_tensor, _flat(input_tensor), op=op, group=group, async_op=async_op
        )
        return work

    def _obstacle(self, divisor: float) -> str:
        if not self._in_use.are_reduces_on:
            return SWITCHED_OFF
        return UNKNOWN_REDUCTION if math.isnan(divisor) else ""

    def _divisor(self, op: Any, num_ranks: int) -> float:
        """Return the divisor of the sum; NaN if it is unknown.

        A factor set by the user arrives as a sum of inputs multiplied by its inverse, which cannot be inspected.
        """
        if op == dist.ReduceOp.SUM:
            return 1
        if op == dist.ReduceOp.AVG:
            return num_ranks
        factor = self._parameters.gradient_divide_factor
        return float(factor) if op == dist.ReduceOp.PREMUL_SUM and factor else math.nan


@final
class CopyEnginesInUse:
    """The state of `use_copy_engines`, with its switches and its counts; `print` shows the counts."""

    def __init__(
        self, device: torch.device, num_buffers: int | None, limits: tuple[int, int], across_hosts: AcrossHosts
    ) -> None:
        self._device, self._num_buffers, self._across_hosts = device, num_buffers, across_hosts
        self._least_part_bytes, self.least_piece_bytes = limits
        self._buffers: dict[str, GatherBuffers] = {}
        self._reduces: dict[str, tuple[Lanes, CollectiveCounts]] = {}
        # not the model itself: whoever keeps this object does not keep the parameters
        self._earlier: list[tuple[ref[FSDPParamGroup], AllGather, ReduceScatter]] = []
        self._claims: list[tuple[str, str, int]] = []
        self.memory = ParameterMemory(device)
        self.are_gathers_on = self.are_reduces_on = False
        self.refused: dict[str, str] = {}  # modules that stay unchanged, and why

    def use(self, gathers: bool, reduces: bool) -> None:
        """Choose which collectives go by copies from the next step on; the library does the others, as without
        Counterpoint.

        Call it between steps, with the same arguments on every rank. Raises `IntegrationError`.
        """
        require_switch(gathers=gathers, reduces=reduces)
        require(
            bool(self._earlier),
            IntegrationError,
            "undo() has restored the model's own collectives. Call use_copy_engines(model) again, on every rank.",
        )
        self.are_gathers_on, self.are_reduces_on = gathers, reduces

    @property
    def is_on(self) -> bool:
        """Whether anything goes by copies, unless something prevents it."""
        return self.are_gathers_on or self.are_reduces_on

    @property
    def num_by_copies(self) -> int:
        """The number of collectives done by copy engines."""
        return sum(tally.num_by_copies for tally in self._tallies())

    @property
    def num_by_library(self) -> int:
        """The number of collectives done by the library, because they were too small, switched off, or could not be
        copied.
        """
        return sum(tally.num_by_library for tally in self._tallies())

    @property
    def num_bytes(self) -> int:
        """The bytes that copies moved from this rank to others."""
        return sum(tally.num_bytes for tally in self._tallies())

    @property
    def gather_tallies(self) -> list[CollectiveCounts]:
        """What was done with gathers of parameters, for each group of ranks."""
        return [each.tally for each in self._buffers.values()]

    @property
    def reduce_tallies(self) -> list[CollectiveCounts]:
        """What was done with reductions of gradients, for each group of ranks."""
        return [tally for _, tally in self._reduces.values()]

    def _tallies(self) -> list[CollectiveCounts]:
        return [*self.gather_tallies, *self.reduce_tallies]

    def __repr__(self) -> str:
        """Describe the counts of each group of ranks, what is on, and which modules were refused."""
        gathers, reduces = ("on" if each else "off" for each in (self.are_gathers_on, self.are_reduces_on))
        num_buffers = sum(each.num_buffers for each in self._buffers.values())
        lines = [
            f"{len(self._earlier)} groups of parameters; by copies: gathers are {gathers} ({num_buffers} buffers), "
            f"reductions are {reduces}"
        ]
        refusals = [f"{name} is left alone: {why}" for name, why in self.refused.items()]
        return capped("\n".join([*lines, *map(str, self._tallies()), *refusals]))

    def buffers_of(self, group: dist.ProcessGroup) -> GatherBuffers:
        """Return the buffers of a group of ranks, which its groups of parameters share."""
        name = group.group_name
        if name not in self._buffers:
            purpose = self._purpose(name, "fsdp2 gather")
            tally = CollectiveCounts("a gather of parameters", self._least_part_bytes, group)
            self._buffers[name] = GatherBuffers(
                (group, self._device, purpose), (self._num_buffers, self._across_hosts), tally
            )
        return self._buffers[name]

    def reduce_lanes_of(self, group: dist.ProcessGroup) -> tuple[Lanes, CollectiveCounts]:
        """Return a group of ranks' lane for gradients, and its tally."""
        name = group.group_name
        if name not in self._reduces:
            lanes = Lanes((group, self._device, self._purpose(name, "fsdp2 reduce")), 1, self._across_hosts)
            self._reduces[name] = lanes, CollectiveCounts("a reduction of gradients", self._least_part_bytes, group)
        return self._reduces[name]

    def _purpose(self, group_name: str, purpose: str) -> str:
        """Name lanes for this model only: another model's steps run on other streams, and hold their own gathered
        groups.
        """
        number = claim(group_name, purpose)
        self._claims.append((group_name, purpose, number))
        return f"{purpose} of model {number}"

    def take_over(self, parameters: FSDPParamGroup) -> None:
        """Replace this group of parameters' collectives by copies."""
        taken = ref(parameters, self._free_memory)
        self._earlier.append((taken, parameters._all_gather_comm, parameters._reduce_scatter_comm))
        self.memory.adopt(parameters)
        parameters._all_gather_comm = GatherByCopies(parameters, self)
        parameters._reduce_scatter_comm = ReduceByCopies(parameters, self)

    def _free_memory(self, _: ref[FSDPParamGroup]) -> None:
        """Free what is kept of the model's gathered parameters, if the model is gone. Its lanes stay, for ranks notice the
        end of a model at different times.
        """
        if not any(taken() for taken, _, _ in self._earlier):
            self.memory.undo([])

    def undo(self) -> None:
        """Restore the original collectives where the job has set no others since. Call it between steps, on every rank."""
        alive = [(each, gather, reduce) for taken, gather, reduce in self._earlier if (each := taken()) is not None]
        for parameters, gather, reduce in alive:
            if isinstance(parameters._all_gather_comm, GatherByCopies):
                parameters._all_gather_comm = gather
            if isinstance(parameters._reduce_scatter_comm, ReduceByCopies):
                parameters._reduce_scatter_comm = reduce
        self.memory.undo(parameters for parameters, _, _ in alive)
        self.are_gathers_on = self.are_reduces_on = False
        self._earlier.clear()
        while self._claims:
            give_back(*self._claims.pop())


def use_copy_engines(
    model: nn.Module,
    *,
    num_buffers: int | None = None,
    least_part_bytes: int = LEAST_PART_BYTES,
    least_piece_bytes: int = LEAST_PIECE_BYTES,
    across_hosts: AcrossHosts = "auto",
    is_on: bool = True,
) -> CopyEnginesInUse:
    """Let copy engines gather and reduce for every FSDP2 module of the model; call it on every rank, between two steps.

    `num_buffers`: concurrently gathered flat buffers; None makes as many as FSDP turns out to hold. `least_part_bytes`:
    groups with less on each rank stay with the library. `least_piece_bytes`: groups whose parameters have less on each rank,
    on average, go through flat buffers. `across_hosts`: whether collectives of several hosts are split into two
    levels. `is_on`: False leaves everything to the library until `use(...)`. Raises `IntegrationError`.
    """
    groups = _groups_of(model)
    require(
        num_buffers is None or (isinstance(num_buffers, int) and 2 <= num_buffers <= MAX_BUFFERS),
        IntegrationError,
        f"num_buffers must be from 2 to {MAX_BUFFERS}, because FSDP gathers one group while it uses another; "
        f"found {num_buffers!r}. Leave it out, and FSDP gets as many as it needs.",
    )
    require_least_part(least_part_bytes)
    require_least_piece(least_piece_bytes)
    require_across_hosts(across_hosts)
    require_switch(is_on=is_on)
    _require_untaken(groups)
    obstacles = {parameters: _obstacle_to(parameters) for parameters in groups}
    refused = {groups[parameters]: obstacle for parameters, obstacle in obstacles.items() if obstacle}
    able = [parameters for parameters, obstacle in obstacles.items() if not obstacle]
    if not able:
        why = "; ".join(f"{name}: {obstacle}" for name, obstacle in refused.items())
        raise IntegrationError(
            f"No FSDP2 module of {type(model).__name__} has sharded parameters that copies can serve"
            f"{f' ({why})' if why else ''}. Shard one that has some, and leave its collectives to FSDP."
        )
    limits = least_part_bytes, least_piece_bytes
    in_use = CopyEnginesInUse(able[0].device, num_buffers, limits, across_hosts)
    in_use.refused |= refused
    for parameters in able:
        in_use.take_over(parameters)
    in_use.use(gathers=is_on, reduces=is_on)
    return in_use


def _groups_of(model: nn.Module) -> dict[FSDPParamGroup, str]:
    """Return the model's groups of parameters with the names of their modules. Raises `IntegrationError` without any."""
    require(
        isinstance(model, nn.Module),
        IntegrationError,
        f"use_copy_engines() takes a module sharded by FSDP2; found one of type {type(model).__name__}. Pass the model.",
    )
    modules = {name: module for name, module in named_modules(model) if isinstance(module, FSDPModule)}
    require(
        bool(modules),
        IntegrationError,
        f"No module of {type(model).__name__} is sharded by FSDP2. Call torch.distributed.fsdp.fully_shard on it first.",
    )
    groups: dict[FSDPParamGroup, str] = {}
    for name, module in modules.items():
        for parameters in _parameters_of(module):
            groups.setdefault(parameters, name or "the root")  # modules that were sharded as a list share a group
    return groups


def _obstacle_to(parameters: FSDPParamGroup) -> str:
    """Return why a group of parameters is left alone, or nothing."""
    if not isinstance(parameters.mesh_info, FSDPMeshInfo):
        return "its parameters are replicated, not sharded"
    for each in (type(parameters._all_gather_comm), type(parameters._reduce_scatter_comm)):
        if not each.__module__.startswith("torch.distributed.fsdp."):
            return f"the job has set a collective of its own, {each.__name__}"
    return ""


def _in_place(gradients: torch.Tensor) -> ReduceInPlace | None:
    """Return what sends these gradients from where they are, unless they are in a flat buffer."""
    found: ReduceInPlace | None = gradients.owner if isinstance(gradients, BufferStandIn) else None
    return found if found is not None and found.block_bytes else None


def _flat(gradients: torch.Tensor) -> torch.Tensor:
    return gradients.owner.flatten(gradients) if isinstance(gradients, BufferStandIn) else gradients


def _parameters_of(module: FSDPModule) -> list[FSDPParamGroup]:
    """Return the module's own groups of parameters: one or none; with torch 2.13 and shards on several meshes, more."""
    state = module._get_fsdp_state()
    found: list[FSDPParamGroup] | None = getattr(state, "_fsdp_param_groups", None)
    if found is not None:
        return found
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _require_untaken(groups: Iterable[FSDPParamGroup]) -> None:
    require(
        not any(isinstance(parameters._all_gather_comm, GatherByCopies) for parameters in groups),
        IntegrationError,
        "use_copy_engines() was already called for modules of this model. Switch the object that it returned, "
        "by use(gathers=..., reduces=...), or call undo() on it first.",
    )
