"""FSDP2's parameters gathered and gradients reduced by copy engines.

    use = fsdp2.use_copy_engines(model)        # after fully_shard, between two steps, on every rank
    use.use(gathers=True, reduces=False)       # from the next step on, on every rank
    use.undo()

Gathered parameters lie in symmetric memory, where FSDP writes a rank's own part and copy engines bring the others', so there
is no copy more than with NCCL. The memory is `num_buffers` times the largest gathered group, which FSDP would otherwise
allocate as it goes, and one more for gradients. FSDP keeps two groups gathered at once, and one more for each group that
it is told to prefetch; a buffer that is still in use when its turn comes is never overwritten.

FSDP divides the work of its backward pass so that one reduce-scatter is in flight at a time; so is ours. What it divides by
is read from its group of parameters: in the library's reduction it hides in an opaque operation. The all-reduce between
replicas of shards (HSDP) stays the library's.
"""

import math
from collections.abc import Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from counterpoint.controls import LEAST_PART_BYTES
from counterpoint.errors import IntegrationError, RefusedTogetherError
from counterpoint.integrations.gather_buffers import MAX_BUFFERS, GatherBuffers, claim, give_back
from counterpoint.integrations.lane_collectives import (
    SWITCHED_OFF,
    Lanes,
    Tally,
    future_of,
    reduce_scatter,
    require_least_part,
    require_switch,
    streams_of,
)
from counterpoint.ops.collectives import library_all_gather, library_reduce_scatter
from counterpoint.value import require

UNKNOWN_REDUCTION = "FSDP asks for a reduction that is neither a sum nor a mean"


@final
class GatherByCopies(AllGather):  # type: ignore[misc]  # torch is untyped here
    """The all-gather of one group of parameters."""

    def __init__(self, parameters: FSDPParamGroup, in_use: "CopyEnginesInUse") -> None:
        self._parameters, self._in_use = parameters, in_use

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for the gathered parameters; FSDP copies this rank's part in."""
        # after forward the parameters may be sharded among fewer ranks (reshard_after_forward=4)
        buffers = self._in_use.buffers_of(self._parameters._all_gather_process_group)
        output = buffers.take(size, dtype, "" if self._in_use.are_gathers_on else SWITCHED_OFF)
        return torch.empty(*size, dtype=dtype, device=device) if output is None else output

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Bring the other ranks' parts; FSDP waits for the current stream, or for the work that is returned."""
        lane = self._in_use.buffers_of(group).lane_of(output_tensor)
        if lane is None:
            work: dist.Work | None = library_all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
            return work
        if not async_op or output_tensor.device.type == "cpu":
            lane.gather(output_tensor)
            return None
        with lane.issuing():
            lane.gather(output_tensor)
            future = future_of(output_tensor, streams_of(output_tensor))
        return torch._C._distributed_c10d._create_work_from_future(future)


@final
class ReduceByCopies(ReduceScatter):  # type: ignore[misc]  # as above
    """The reduce-scatter of one group of parameters."""

    def __init__(self, parameters: FSDPParamGroup, in_use: "CopyEnginesInUse") -> None:
        self._parameters, self._in_use = parameters, in_use

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Ordinary memory: blocks leave from where they are."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """This rank's block of the ranks' sum or mean; later work of the current stream finds it."""
        lanes, tally = self._in_use.reduce_lanes_of(group)
        divisor = self._divisor(op, group.size())
        obstacle = self._obstacle(divisor) or lanes.obstacle
        if not async_op and not tally.is_librarys(output_tensor.nbytes, obstacle):
            blocks = input_tensor.chunk(group.size())
            try:
                tally.count_copies(reduce_scatter(lanes.next(), output_tensor, blocks, divisor))
            except RefusedTogetherError as refusal:
                lanes.give_up(refusal)
                tally.count_library(lanes.obstacle)
            else:
                return None
        work: dist.Work | None = library_reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        return work

    def _obstacle(self, divisor: float) -> str:
        if not self._in_use.are_reduces_on:
            return SWITCHED_OFF
        return UNKNOWN_REDUCTION if math.isnan(divisor) else ""

    def _divisor(self, op: Any, num_ranks: int) -> float:
        """What the sum is divided by; NaN where that is unknown.

        A factor of the user's arrives as a sum of inputs multiplied by its inverse, which nobody can look into.
        """
        if op == dist.ReduceOp.SUM:
            return 1
        if op == dist.ReduceOp.AVG:
            return num_ranks
        factor = self._parameters.gradient_divide_factor
        return float(factor) if op == dist.ReduceOp.PREMUL_SUM and factor else math.nan


@final
class CopyEnginesInUse:
    """What `use_copy_engines` put in place, with its switches and its counts; printed, it says what was done how."""

    def __init__(self, device: torch.device, num_buffers: int | None, least_part_bytes: int) -> None:
        self._device, self._num_buffers = device, num_buffers
        self._least_part_bytes = least_part_bytes
        self._buffers: dict[str, GatherBuffers] = {}
        self._reduces: dict[str, tuple[Lanes, Tally]] = {}
        self._earlier: list[tuple[FSDPParamGroup, AllGather, ReduceScatter]] = []
        self._claims: list[tuple[str, str, int]] = []
        self.are_gathers_on = self.are_reduces_on = False
        self.refused: dict[str, str] = {}  # modules that stay as they are, and why

    def use(self, gathers: bool, reduces: bool) -> None:
        """Which collectives go by copies from the next step on; the others are the library's, as without us.

        Call it between steps, on every rank alike. Raises `IntegrationError`.
        """
        require_switch(gathers=gathers, reduces=reduces)
        require(
            bool(self._earlier),
            IntegrationError,
            "undo() has put the model's own collectives back. Call use_copy_engines(model) again, on every rank.",
        )
        self.are_gathers_on, self.are_reduces_on = gathers, reduces

    @property
    def is_on(self) -> bool:
        """Whether anything goes by copies, if nothing is in the way."""
        return self.are_gathers_on or self.are_reduces_on

    @property
    def num_by_copies(self) -> int:
        """Collectives that copy engines did."""
        return sum(tally.num_by_copies for tally in self._tallies())

    @property
    def num_by_library(self) -> int:
        """Collectives that were too small, switched off, or had no way, and were done by the library."""
        return sum(tally.num_by_library for tally in self._tallies())

    @property
    def num_bytes(self) -> int:
        """Bytes that copies moved from this rank to others."""
        return sum(tally.num_bytes for tally in self._tallies())

    @property
    def gather_tallies(self) -> list[Tally]:
        """What was done with gatherings of parameters, one for each group of ranks."""
        return [each.tally for each in self._buffers.values()]

    @property
    def reduce_tallies(self) -> list[Tally]:
        """What was done with reductions of gradients, one for each group of ranks."""
        return [tally for _, tally in self._reduces.values()]

    def _tallies(self) -> list[Tally]:
        return [*self.gather_tallies, *self.reduce_tallies]

    def __str__(self) -> str:
        """What was done how for each group of ranks, what is on, and which modules were refused."""
        gathers, reduces = ("on" if each else "off" for each in (self.are_gathers_on, self.are_reduces_on))
        num_buffers = sum(each.num_buffers for each in self._buffers.values())
        lines = [
            f"{len(self._earlier)} groups of parameters; by copies: gathers are {gathers} ({num_buffers} buffers), "
            f"reductions are {reduces}"
        ]
        refusals = [f"{name} is left alone: {why}" for name, why in self.refused.items()]
        return "\n".join([*lines, *map(str, self._tallies()), *refusals])

    def buffers_of(self, group: dist.ProcessGroup) -> GatherBuffers:
        """The buffers of a group of ranks, which its groups of parameters share."""
        name = group.group_name
        if name not in self._buffers:
            purpose = self._purpose(name, "fsdp2 gather")
            tally = Tally("a gathering of parameters", self._least_part_bytes, group)
            self._buffers[name] = GatherBuffers((group, self._device, purpose), self._num_buffers, tally)
        return self._buffers[name]

    def reduce_lanes_of(self, group: dist.ProcessGroup) -> tuple[Lanes, Tally]:
        """The lane of a group of ranks for gradients, and what was done with it."""
        name = group.group_name
        if name not in self._reduces:
            lanes = Lanes(group, self._device, self._purpose(name, "fsdp2 reduce"), 1)
            self._reduces[name] = lanes, Tally("a reduction of gradients", self._least_part_bytes, group)
        return self._reduces[name]

    def _purpose(self, group_name: str, purpose: str) -> str:
        """Lanes of this model alone: another one's steps run on other streams, and hold gathered groups of their own."""
        number = claim(group_name, purpose)
        self._claims.append((group_name, purpose, number))
        return f"{purpose} of model {number}"

    def take_over(self, parameters: FSDPParamGroup) -> None:
        """Put our collectives in place of this group of parameters'."""
        self._earlier.append((parameters, parameters._all_gather_comm, parameters._reduce_scatter_comm))
        parameters._all_gather_comm = GatherByCopies(parameters, self)
        parameters._reduce_scatter_comm = ReduceByCopies(parameters, self)

    def undo(self) -> None:
        """Put back the collectives that were there before. Call it between steps, on every rank."""
        for parameters, gather, reduce in self._earlier:
            parameters._all_gather_comm, parameters._reduce_scatter_comm = gather, reduce
        self.are_gathers_on = self.are_reduces_on = False
        self._earlier.clear()
        while self._claims:
            give_back(*self._claims.pop())


def use_copy_engines(
    model: nn.Module,
    *,
    num_buffers: int | None = None,
    least_part_bytes: int = LEAST_PART_BYTES,
    is_on: bool = True,
) -> CopyEnginesInUse:
    """Let copy engines gather and reduce for every FSDP2 module of the model; on every rank, between two steps.

    `num_buffers`: gathered groups at once; without it as many as FSDP turns out to hold. `least_part_bytes`: groups with
    less on each rank stay the library's. `is_on`: False leaves all to it until `use(...)`. Raises `IntegrationError`.
    """
    require(
        isinstance(model, nn.Module),
        IntegrationError,
        f"use_copy_engines() takes a module sharded by FSDP2; found one of type {type(model).__name__}. Give the model.",
    )
    modules = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    require(
        bool(modules),
        IntegrationError,
        f"No module of {type(model).__name__} is sharded by FSDP2. Call torch.distributed.fsdp.fully_shard on it first.",
    )
    require(
        num_buffers is None or (isinstance(num_buffers, int) and 2 <= num_buffers <= MAX_BUFFERS),
        IntegrationError,
        f"num_buffers must be from 2 to {MAX_BUFFERS}, for FSDP gathers a group while it uses another; found "
        f"{num_buffers!r}. Leave it out: as many are made as FSDP needs.",
    )
    require_least_part(least_part_bytes)
    require_switch(is_on=is_on)
    groups = {name or "the root": _parameters_of(module) for name, module in modules.items()}
    _require_untaken([each for found in groups.values() for each in found])
    in_use: CopyEnginesInUse | None = None
    for name, found in groups.items():
        for parameters in found:
            in_use = in_use or CopyEnginesInUse(parameters.device, num_buffers, least_part_bytes)
            if isinstance(parameters.mesh_info, FSDPMeshInfo):
                in_use.take_over(parameters)
            else:
                in_use.refused[name] = "its parameters are replicated, not sharded"
    if in_use is None or not in_use._earlier:
        raise IntegrationError(f"No FSDP2 module of {type(model).__name__} has sharded parameters. Shard one that has some.")
    in_use.use(gathers=is_on, reduces=is_on)
    return in_use


def _parameters_of(module: FSDPModule) -> list[FSDPParamGroup]:
    """The module's own groups of parameters: one, or none; with torch 2.13 and shards on several meshes more."""
    state = module._get_fsdp_state()
    found: list[FSDPParamGroup] | None = getattr(state, "_fsdp_param_groups", None)
    if found is not None:
        return found
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _require_untaken(groups: list[FSDPParamGroup]) -> None:
    require(
        not any(isinstance(parameters._all_gather_comm, GatherByCopies) for parameters in groups),
        IntegrationError,
        "use_copy_engines() has modules of this model already. Switch what it returned then, by use(gathers=..., "
        "reduces=...), or call undo() on it first.",
    )
