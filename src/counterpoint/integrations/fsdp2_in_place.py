"""One gather of FSDP2's parameters, or one reduction of its gradients, without FSDP2's flat buffers.

A rank's own parts are copied into symmetric memory, from which copy engines bring them to where the other ranks' parameters
are. Gradients are sent from where autograd left them, in their own type, and summed in the type that FSDP asks for. Both
need parameters that are sharded along their first dimension, evenly for gradients, and that have one type in the group.
They must be large, or the driver's calls cost more than the kernels that they replace.
"""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from counterpoint.cuda.block_sums import sum_arrived
from counterpoint.integrations.gather_buffers import GatherBuffers
from counterpoint.integrations.parameter_memory import ParameterMemory
from counterpoint.integrations.stand_ins import BufferStandIn, Operators
from counterpoint.ops.host_levels import HostLevels
from counterpoint.ops.lane import AbstractLane


def can_gather_in_place(parameters: Sequence[FSDPParam], dtype: torch.dtype, piece_bytes: float, least_bytes: int) -> bool:
    """Return whether these parameters can be gathered where they are, given the mean size of a rank's pieces; the same on
    all ranks.
    """
    return piece_bytes >= least_bytes and all(
        each.fsdp_placement.dim == 0
        and not hasattr(each._sharded_local_tensor, "fsdp_pre_all_gather")
        and (each.param_dtype or each.orig_dtype) == dtype
        for each in parameters
    )


def chunk_operator() -> Any:
    """Return the operator by which FSDP puts gradients into its flat buffer; torch 2.15 has another one than before."""
    return getattr(torch.ops.fsdp, "chunk_cat_mixed_dtype", None) or torch.ops.fsdp.chunk_cat


@final
class GatherInPlace:
    """One gather into the parameters' own memory; `stand_in` is what FSDP takes for the flat buffer."""

    def __init__(
        self, parameters: Sequence[FSDPParam], lane: AbstractLane, buffers: GatherBuffers, memory: ParameterMemory
    ) -> None:
        self._parameters, self._buffers, self._memory = parameters, buffers, memory
        self.lane = lane
        self._sizes: Sequence[int] = ()
        self._outputs: Sequence[torch.Tensor] = ()

    def stand_in(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> BufferStandIn:
        """Return what FSDP takes for its buffer."""
        fsdp = torch.ops.fsdp
        operators: Operators = {
            fsdp.all_gather_copy_in.default: self._copy_in,
            fsdp.split_with_sizes_copy.default: self._copy_out,
        }
        return BufferStandIn(size, (dtype, device), self, operators)

    def _copy_in(
        self, own: Sequence[torch.Tensor], whole: BufferStandIn, sizes: Sequence[int], num_elements: int, rank: int
    ) -> tuple[torch.Tensor, BufferStandIn]:
        """Copy this rank's parts to where the others fetch them."""
        shared = self.lane.shared(num_elements, whole.dtype)
        torch._foreach_copy_(torch.split(shared, sizes), own)
        self._sizes = sizes
        return shared, whole

    def fetch(self, shared: torch.Tensor) -> None:
        """Fill the parameters, after the former users of their memory."""
        lane, sizes = self.lane, self._sizes
        self._outputs = outputs = self._memory.allocate(lambda: self._memory_of_parameters(shared))

        def issue() -> int:
            places = [output.view(lane.num_ranks, -1) for output in outputs]
            lane.fetch([[place[rank] for place in places] for rank in range(lane.num_ranks)])
            torch._foreach_copy_([place[lane.rank] for place in places], torch.split(shared, sizes))
            return 0

        counted = tuple(output for output in outputs if not output.is_inference())
        with torch.autograd._unsafe_preserve_version_counter(counted):
            lane.repeat(("gather in place", shared.dtype, *sizes, *(output.data_ptr() for output in outputs)), issue)
        self._buffers.note_read(lane)

    def _memory_of_parameters(self, shared: torch.Tensor) -> list[torch.Tensor]:
        for parameter, size in zip(self._parameters, self._sizes, strict=True):
            parameter.init_all_gather_outputs([size], [shared.dtype], self.lane.num_ranks, shared.device)
        return [parameter.all_gather_outputs[0] for parameter in self._parameters]

    def _copy_out(self, _: BufferStandIn, sizes: Sequence[int], dim: int = 0, *, out: Sequence[torch.Tensor]) -> None:
        """Do nothing: the parameters are there. Copy, if FSDP has other tensors than the ones that were filled."""
        filled = [output.view(self.lane.num_ranks, -1) for output in self._outputs]
        others = [(to, origin) for to, origin in zip(out, filled, strict=True) if to.data_ptr() != origin.data_ptr()]
        if others:
            torch._foreach_copy_([to for to, _ in others], [origin for _, origin in others])


@final
class ReduceInPlace:
    """One reduction of gradients from where they are; `stand_in` is what FSDP takes for the flat buffer.

    FSDP keeps the stand-in, and with it the gradients, until the computation has waited for the reduction.
    """

    def __init__(self, num_ranks: int, least_piece_bytes: int) -> None:
        self._num_ranks, self._least_piece_bytes = num_ranks, least_piece_bytes
        self._gradients: Sequence[torch.Tensor] = ()
        self._flat: torch.Tensor | None = None

    def stand_in(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> BufferStandIn:
        """Return what FSDP takes for its buffer."""
        operators: Operators = {chunk_operator().default: self._take, torch.ops.aten.div_.Tensor: self._divide}
        return BufferStandIn(size, (dtype, device), self, operators)

    def _take(self, gradients: Sequence[torch.Tensor], dim: int, num_chunks: int, *, out: BufferStandIn) -> None:
        """Keep the gradients, to be sent from where they are."""
        self._gradients = list(gradients)
        if not self._can_send(out):
            self.flatten(out)
            self._gradients = ()  # later work of this stream may have their memory

    def _can_send(self, whole: BufferStandIn) -> bool:
        first = self._gradients[0]
        num_bytes = sum(each.nbytes for each in self._gradients)
        return num_bytes >= self._least_piece_bytes * self._num_ranks * len(self._gradients) and all(
            each.is_contiguous()
            and each.dtype == first.dtype
            and each.itemsize <= whole.itemsize
            and len(each) % self._num_ranks == 0
            for each in self._gradients
        )

    def _divide(self, whole: BufferStandIn, divisor: float) -> BufferStandIn:
        self.flatten(whole).div_(divisor)
        return whole

    def flatten(self, whole: BufferStandIn) -> torch.Tensor:
        """Return the flat buffer; the gradients are copied into it at the first call."""
        if self._flat is None:
            self._flat = torch.empty(whole.numel(), dtype=whole.dtype, device=whole.device)
            rows = self._flat.view(self._num_ranks, -1)
            chunk_operator()(self._gradients, dim=0, num_chunks=self._num_ranks, out=rows)
        return self._flat

    @property
    def block_bytes(self) -> int:
        """The bytes of a block that another rank gets; 0 if the flat buffer is to be used."""
        return 0 if self._flat is not None else sum(int(each.nbytes) for each in self._gradients) // self._num_ranks

    def reduce(self, lane: AbstractLane, levels: HostLevels, output: torch.Tensor, divisor: float) -> int:
        """Compute the divided sum over ranks of this rank's block. Return the bytes that copies sent from this rank.

        Raises `RefusedTogetherError` before anything has changed.
        """
        num_bytes, gradients = self.block_bytes, self._gradients
        levels.reserve(lane, num_bytes)

        def issue() -> int:
            chunks = [gradient.view(self._num_ranks, -1) for gradient in gradients]
            arrived = lane.exchange([[chunk[rank] for chunk in chunks] for rank in range(lane.num_ranks)])
            sum_arrived(arrived, output, divisor)
            lane.release()
            return (lane.num_ranks - 1) * num_bytes

        places = [(each.data_ptr(), each.numel()) for each in gradients]
        return lane.repeat(("reduce in place", divisor, output.data_ptr(), output.dtype, gradients[0].dtype, *places), issue)
