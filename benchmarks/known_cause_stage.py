"""Where steps of known causes run: on a GPU with its streams, or on a CPU in order and at a small size."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

from counterpoint.analysis.values import Cause

Call = Callable[[], object]
Causes = dict[Cause, float]
PAUSE_CYCLES = 10_000_000  # about 5 ms: the host needs up to 1 ms for a call of PyTorch's fused operators


class Known(NamedTuple):
    """`exposed` gives microseconds per step by cause, for each rank, from the times of the parts in microseconds."""

    step: Call
    parts: Mapping[str, Call]
    exposed: Callable[[Mapping[str, float]], list[Causes]]


class Stage:
    """Where steps run: tensors, matmuls and other streams on a GPU, or small ones in order on a CPU."""

    def __init__(self, device: str) -> None:
        self.device, self.on_gpu = device, device == "cuda"
        self._divisor = 1 if self.on_gpu else 64
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()

    def matrix(self, rows: int, columns: int) -> torch.Tensor:
        """Random numbers; on CPUs a 64th in both directions."""
        size = (rows // self._divisor, columns // self._divisor)
        return torch.randn(size, device=self.device, dtype=torch.bfloat16)

    def buffer(self, mebibytes: int) -> torch.Tensor:
        """Zeros in bf16; on CPUs a 4,096th of the size."""
        return torch.zeros((mebibytes << 19) // self._divisor**2, device=self.device, dtype=torch.bfloat16)

    def matmul(self, rows: int, columns: int, inner: int) -> Call:
        """A matmul with operands of its own."""
        left, right, result = self.matrix(rows, inner), self.matrix(inner, columns), self.matrix(rows, columns)
        return lambda: torch.mm(left, right, out=result)

    def short(self) -> Call:
        """A matmul of about 0.4 ms on an H200."""
        return self.matmul(4096, 4096, 8192)

    def long(self) -> Call:
        """A matmul of about 1.6 ms on an H200."""
        return self.matmul(8192, 8192, 8192)

    def stream(self) -> torch.cuda.Stream | None:
        """Another stream."""
        return torch.cuda.Stream() if self.on_gpu else None

    def time_us(self, call: Call, times: int = 7) -> float:
        """The median of single calls, of which two before are not timed.

        Before each the GPU pauses, so that the host is ahead, and a call that is not timed brings the ranks together.
        """
        measured = [self._once_us(call) for _ in range(times + 2)][2:]
        return sorted(measured)[len(measured) // 2]

    def _once_us(self, call: Call) -> float:
        if not self.on_gpu:
            call()
            start_s = time.perf_counter()
            call()
            return (time.perf_counter() - start_s) * 1e6
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(PAUSE_CYCLES)
        call()
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3


@contextmanager
def beside(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """On that stream, after all that the current one was given before."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield


def join(stream: torch.cuda.Stream | None) -> None:
    """What is issued from now on waits for that stream."""
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)
