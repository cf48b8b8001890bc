"""DDP's gradient buckets averaged by copy engines, several buckets in flight.

    model = DistributedDataParallel(model, bucket_cap_mb=100, gradient_as_bucket_view=True)
    ddp.register(model)

Beside NCCL's kernels matmuls lose SMs; beside copies they run at their lone speed, and only the sums of a bucket need SMs.
Large buckets pay (100 MB; DDP's 25 MB are below the limit on 4 ranks and stay NCCL's). docs/integrations.md has figures.
It knows nothing of static graphs, of join() and of sparse gradients beyond what a communication hook is told.
"""

from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from counterpoint.controls import ALL_REDUCES_IN_FLIGHT, LEAST_PART_BYTES
from counterpoint.errors import IntegrationError
from counterpoint.integrations.compression import AbstractWire, AsBfloat16, AsIs, AsScaledFloat8
from counterpoint.integrations.lane_collectives import (
    MAX_BUFFER_BYTES,
    Fallbacks,
    Lanes,
    all_reduce_mean,
    require_least_part,
)
from counterpoint.value import require

Compression = Literal["bf16", "fp8"]
MAX_IN_FLIGHT = 8
LEAST_BUFFER_BYTES = 4096
WIRES: dict[Compression | None, type[AbstractWire]] = {None: AsIs, "bf16": AsBfloat16, "fp8": AsScaledFloat8}
WIDER_THAN_BFLOAT16 = (torch.float32, torch.float64)


@final
class BucketAverages:
    """State of the hook: lanes, the wire format, and what was done how."""

    def __init__(self, lanes: Lanes, compression: Compression | None, limits: tuple[int, int]) -> None:
        self._lanes = lanes
        least_part_bytes, self._max_buffer_bytes = limits
        self._wire, self._as_is = WIRES[compression](), AsIs()
        self._compression = compression
        self._fallbacks = Fallbacks("a gradient bucket", least_part_bytes)
        self.num_by_copies = 0

    @property
    def num_by_library(self) -> int:
        """Buckets that the library's collective averaged."""
        return self._fallbacks.num_times

    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """What DDP calls for every bucket."""
        flat = bucket.buffer()
        num_ranks = self._lanes.group.size()
        if self._fallbacks.is_due(-(-flat.nbytes // num_ranks), self._lanes.obstacle):
            return _average_by_library(flat, self._lanes.group)
        self.num_by_copies += 1
        wire = self._wire_for(flat.dtype)
        if flat.device.type == "cpu":
            self._average_parts(flat, wire)
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(flat)
            return future
        future = torch.futures.Future(devices=[flat.device])
        current = torch.cuda.current_stream(flat.device)
        lane_streams = self._average_parts(flat, wire)
        # a future remembers the streams that are current when it is set: whoever waits for it waits for them
        with torch.cuda.stream(lane_streams[-1]):
            for stream in lane_streams[:-1]:
                lane_streams[-1].wait_stream(stream)
            flat.record_stream(lane_streams[-1])
            future.set_result(flat)
        assert torch.cuda.current_stream(flat.device) == current
        return future

    def _wire_for(self, dtype: torch.dtype) -> AbstractWire:
        """Buckets that bf16 would not make smaller travel as they are."""
        return self._as_is if self._compression == "bf16" and dtype not in WIDER_THAN_BFLOAT16 else self._wire

    def _average_parts(self, flat: torch.Tensor, wire: AbstractWire) -> list[Any]:
        """Average the bucket in as many parts as the buffers ask for; the streams on which that is done."""
        streams = []
        for part in flat.split(self._max_buffer_bytes // flat.itemsize):
            lane = self._lanes.next()
            with lane.issuing():
                all_reduce_mean(lane, part, wire)
                if flat.is_cuda:
                    streams.append(torch.cuda.current_stream(flat.device))
        return streams


def register(
    model: DistributedDataParallel,
    *,
    in_flight: int = ALL_REDUCES_IN_FLIGHT,
    compression: Compression | None = None,
    least_part_bytes: int = LEAST_PART_BYTES,
    max_buffer_bytes: int = MAX_BUFFER_BYTES,
) -> BucketAverages:
    """Average the model's gradient buckets by copy engines from now on; on every rank, before the first step.

    `in_flight`: buckets at a time, each with buffers of its own. `compression`: what travels (see `wire.py` for its error).
    `least_part_bytes`: a bucket with less from each rank stays the library's. `max_buffer_bytes`: larger ones go through in
    parts. Returns the hook's state with its counts. DDP takes one hook in its life: to undo, wrap the model again.
    Raises `IntegrationError`.
    """
    require(
        isinstance(model, DistributedDataParallel),
        IntegrationError,
        f"register() takes a model wrapped in DistributedDataParallel; found {type(model).__name__}. Wrap it first.",
    )
    require(
        isinstance(in_flight, int) and 1 <= in_flight <= MAX_IN_FLIGHT,
        IntegrationError,
        f"in_flight must be from 1 to {MAX_IN_FLIGHT}; found {in_flight!r}. Three are enough on 4 GPUs.",
    )
    require_least_part(least_part_bytes)
    require(
        isinstance(max_buffer_bytes, int) and max_buffer_bytes >= LEAST_BUFFER_BYTES,
        IntegrationError,
        f"max_buffer_bytes must be {LEAST_BUFFER_BYTES} or more; found {max_buffer_bytes!r}. Leave it out, or raise it.",
    )
    require(
        compression in list(WIRES),
        IntegrationError,
        f"compression is None, 'bf16' or 'fp8'; found {compression!r}. Choose one.",
    )
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    require(
        compression != "bf16" or any(dtype in WIDER_THAN_BFLOAT16 for dtype in dtypes),
        IntegrationError,
        f"compression='bf16' makes nothing smaller: the gradients are {_names(dtypes)}. Leave it out, or take 'fp8'.",
    )
    require(
        all(dtype.is_floating_point for dtype in dtypes),
        IntegrationError,
        f"Only gradients of floating-point types can be averaged; found {_names(dtypes)}. Keep them out of DDP.",
    )
    group = model.process_group
    device = next(iter(model.parameters())).device
    lanes = Lanes(group, device, "ddp", in_flight)
    state = BucketAverages(lanes, compression, (least_part_bytes, max_buffer_bytes))
    model.register_comm_hook(state, BucketAverages.average)
    return state


def _average_by_library(flat: torch.Tensor, group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(flat.div_(group.size()), group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


def _names(dtypes: set[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
