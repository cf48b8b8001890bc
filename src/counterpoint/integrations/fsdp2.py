"""FSDP2's parameters gathered and gradients reduced by copy engines.

    use = fsdp2.use_copy_engines(model)        # after fully_shard, before the first step, on every rank
    ...
    use.undo()

Gathered parameters lie in symmetric memory, where FSDP writes a rank's own part and copy engines bring the others', so there
is no copy more than with NCCL. The memory is `num_buffers` times the largest gathered group, which FSDP would otherwise
allocate as it goes, and one more for gradients. FSDP keeps two groups gathered at once, and one more for each group that
it is told to prefetch; a buffer that is still in use when its turn comes is refused, never overwritten.

FSDP divides the work of its backward pass so that one reduce-scatter is in flight at a time; so is ours.
"""

import math
import weakref
from collections.abc import Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from counterpoint.controls import LEAST_PART_BYTES
from counterpoint.errors import IntegrationError
from counterpoint.integrations.lane_collectives import Fallbacks, Lanes, reduce_scatter, require_least_part
from counterpoint.ops.collectives import library_all_gather, library_reduce_scatter
from counterpoint.ops.lane import AbstractLane
from counterpoint.value import require

MAX_BUFFERS = 16


@final
class GatherByCopies(AllGather):  # type: ignore[misc]  # torch is untyped here
    """The all-gather of one group of ranks: buffers in turn, each a lane of its own."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, num_buffers: int, least_part_bytes: int) -> None:
        self._lanes = Lanes(group, device, "fsdp2 gather", num_buffers)
        self._group, self._num_buffers = group, num_buffers
        self._fallbacks = Fallbacks("a gathering of parameters", least_part_bytes)
        self._holders: dict[AbstractLane, weakref.ref[torch.Tensor]] = {}
        self.num_by_copies = 0

    @property
    def num_by_library(self) -> int:
        """Gatherings that the library's collective did."""
        return self._fallbacks.num_times

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for the gathered parameters; FSDP copies this rank's part in."""
        num_elements = math.prod(int(length) for length in size)
        part_bytes = num_elements * dtype.itemsize // self._group.size()
        if self._fallbacks.is_due(part_bytes, self._lanes.obstacle):
            return torch.empty(*size, dtype=dtype, device=device)
        lane = self._lanes.next()
        self._check_unused(lane)
        lane.reserve(part_bytes)
        output = lane.gathered(num_elements, dtype).view(*size)
        self._holders[lane] = weakref.ref(output)
        return output

    def _check_unused(self, lane: AbstractLane) -> None:
        """The tensor lives while FSDP has use for the buffer; then its streams wait for that use to end."""
        holder = self._holders.get(lane)
        require(
            holder is None or holder() is None,
            IntegrationError,
            f"FSDP holds more than {self._num_buffers} gathered groups at once, as it does when it prefetches several. "
            f"Call use_copy_engines(model, num_buffers={self._num_buffers + 1}) or higher.",
        )

    def _lane_of(self, output: torch.Tensor) -> AbstractLane | None:
        """The lane whose memory this is. Were it another tensor on the same memory, its life would tell nothing."""
        for lane, holder in self._holders.items():
            held = holder()
            if held is output:
                return lane
            require(
                held is None or held.data_ptr() != output.data_ptr(),
                IntegrationError,
                f"torch {torch.__version__} hands FSDP's gathered tensor on as another one, so its end cannot be seen. "
                "Use NCCL, or torch 2.11 to 2.13.",
            )
        return None

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Bring the other ranks' parts; FSDP waits for the current stream, or for the work that is returned."""
        lane = self._lane_of(output_tensor)
        if lane is None:
            work: dist.Work | None = library_all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
            return work
        self.num_by_copies += 1
        if not async_op or output_tensor.device.type == "cpu":
            lane.gather(output_tensor)
            return None
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[output_tensor.device])
        with lane.issuing():
            lane.gather(output_tensor)
            future.set_result(output_tensor)
        return torch._C._distributed_c10d._create_work_from_future(future)


@final
class ReduceByCopies(ReduceScatter):  # type: ignore[misc]  # as above
    """The reduce-scatter of one group of ranks."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, least_part_bytes: int) -> None:
        self._lanes = Lanes(group, device, "fsdp2 reduce", 1)
        self._fallbacks = Fallbacks("a reduction of gradients", least_part_bytes)
        self.num_by_copies = 0

    @property
    def num_by_library(self) -> int:
        """Reductions that the library's collective did."""
        return self._fallbacks.num_times

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
        obstacle = self._lanes.obstacle
        if not obstacle and op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            obstacle = "a gradient divide factor of the user's is applied by the library"
        if async_op or self._fallbacks.is_due(output_tensor.nbytes, obstacle):
            work: dist.Work | None = library_reduce_scatter(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )
            return work
        self.num_by_copies += 1
        reduce_scatter(self._lanes.next(), output_tensor, input_tensor, is_mean=op == dist.ReduceOp.AVG)
        return None


@final
class CopyEnginesInUse:
    """What `use_copy_engines` put in place, with its counts."""

    def __init__(self) -> None:
        self._gathers: dict[str, GatherByCopies] = {}
        self._reduces: dict[str, ReduceByCopies] = {}
        self._earlier: list[tuple[FSDPModule, AllGather, ReduceScatter]] = []

    @property
    def num_by_copies(self) -> int:
        """Collectives that copy engines did."""
        gathers, reduces = self._gathers.values(), self._reduces.values()
        return sum(each.num_by_copies for each in gathers) + sum(each.num_by_copies for each in reduces)

    @property
    def num_by_library(self) -> int:
        """Collectives that were too small, or had no way, and were done by the library."""
        gathers, reduces = self._gathers.values(), self._reduces.values()
        return sum(each.num_by_library for each in gathers) + sum(each.num_by_library for each in reduces)

    def take_over(self, module: FSDPModule, num_buffers: int, least_part_bytes: int) -> None:
        """Put our collectives in place of the module's; modules that share a group of ranks share buffers."""
        found = module._get_fsdp_state()._fsdp_param_group
        if found is None:  # no parameters of its own
            return
        self._earlier.append((module, found._all_gather_comm, found._reduce_scatter_comm))
        gather, reduce, device = found._all_gather_process_group, found._reduce_scatter_process_group, found.device
        if gather.group_name not in self._gathers:
            self._gathers[gather.group_name] = GatherByCopies(gather, device, num_buffers, least_part_bytes)
        if reduce.group_name not in self._reduces:
            self._reduces[reduce.group_name] = ReduceByCopies(reduce, device, least_part_bytes)
        module.set_custom_all_gather(self._gathers[gather.group_name])
        module.set_custom_reduce_scatter(self._reduces[reduce.group_name])

    def undo(self) -> None:
        """Put back the collectives that were there before. Call it between steps, on every rank."""
        for module, gather, reduce in self._earlier:
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(reduce)
        self._earlier.clear()


def use_copy_engines(
    model: nn.Module, *, num_buffers: int = 3, least_part_bytes: int = LEAST_PART_BYTES
) -> CopyEnginesInUse:
    """Let copy engines gather and reduce for every FSDP2 module of the model; on every rank.

    `num_buffers`: gathered groups at once. `least_part_bytes`: groups with less on each rank stay the library's.
    Raises `IntegrationError`.
    """
    require(
        isinstance(model, nn.Module),
        IntegrationError,
        f"use_copy_engines() takes a module sharded by FSDP2; found one of type {type(model).__name__}. Give the model.",
    )
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    require(
        bool(modules),
        IntegrationError,
        f"No module of {type(model).__name__} is sharded by FSDP2. Call torch.distributed.fsdp.fully_shard on it first.",
    )
    require(
        isinstance(num_buffers, int) and 2 <= num_buffers <= MAX_BUFFERS,
        IntegrationError,
        f"num_buffers must be from 2 to {MAX_BUFFERS}, for FSDP gathers a group while it uses another; found "
        f"{num_buffers!r}. Three are enough without explicit prefetching.",
    )
    require_least_part(least_part_bytes)
    in_use = CopyEnginesInUse()
    for module in modules:
        in_use.take_over(module, num_buffers, least_part_bytes)
    return in_use
