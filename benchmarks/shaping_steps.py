"""Steps in which collectives run beside kernels whose CTAs hold the SMs for long.

A step is called to issue its work once; `outputs` are the tensors that it leaves, which no control may change.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.on_gpus import largest
from benchmarks.shaping_kernels import Launch, ScanInputs, cumulative_sum, scan_into
from counterpoint.units import MIB

COMPUTE_US = 4000.0


def timed_us(launch: Callable[[], object], repeats: int = 3) -> float:
    """The least time of a call in microseconds, the longest of all ranks."""
    times = []
    for _ in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        launch()
        end.record()
        torch.cuda.synchronize()
        times.append(1000 * start.elapsed_time(end))
    return float(largest([min(times[1:])])[0])


class ChainStep:
    """Launches of one kernel beside a chain of all-gathers, for which nothing waits but the step's end.

    Alone, the launches take about `COMPUTE_US`, and the chain by NCCL `share` of that. `num_bytes` is what an all-gather
    leaves on a rank.
    """

    def __init__(self, launch: Launch, share: float, num_bytes: int) -> None:
        self._launch = launch
        self._given = torch.randn(num_bytes // 4 // dist.get_world_size(), device="cuda")
        self._got = torch.empty(num_bytes // 4, device="cuda")
        self.outputs = [self._got]
        self.num_launches = max(1, round(COMPUTE_US / timed_us(launch)))
        gather_us = timed_us(lambda: [dist.all_gather_into_tensor(self._got, self._given) for _ in range(20)]) / 20
        compute_us = timed_us(lambda: [launch() for _ in range(self.num_launches)])
        self.num_gathers = max(2, round(share * compute_us / gather_us))

    def __call__(self) -> None:
        works = [dist.all_gather_into_tensor(self._got, self._given, async_op=True) for _ in range(self.num_gathers)]
        for _ in range(self.num_launches):
            self._launch()
        works[-1].wait()


def make_step() -> ChainStep:
    """Cumulative sums beside 98 all-gathers of 8 MiB or so, for `counterpoint tune benchmarks.shaping_steps:make_step`."""
    return ChainStep(cumulative_sum(4224, 768, 128), share=0.8, num_bytes=8 * MIB)


class TwoBatches:
    """Two batches in turns through a tensor-parallel stack of state-space layers, as dual-batch overlap runs them.

    A layer is a matmul, Mamba's selective scan over this rank's channels, a matmul and an all-reduce, which runs beside the
    other batch's layer.
    """

    def __init__(self, batch: int, length: int, width: int, num_layers: int) -> None:
        make = {"device": "cuda", "dtype": torch.bfloat16}
        channels, tokens = width, batch * length  # twice the width inside, over two ranks
        self._weights = [
            (torch.randn(width, channels, **make) / width**0.5, torch.randn(channels, width, **make) / channels**0.5)
            for _ in range(num_layers)
        ]
        self._scan = ScanInputs(batch, length, channels)
        self._given = [torch.randn(tokens, width, **make) for _ in range(2)]
        self.outputs: list[torch.Tensor] = []
        self.num_launches, self.num_gathers = 2 * num_layers, 2 * num_layers

    def __call__(self) -> None:
        hidden = list(self._given)
        works: list[dist.Work | None] = [None, None]
        for inward, outward in self._weights:
            for number in range(2):
                if works[number] is not None:
                    works[number].wait()
                hidden[number] = scan_into(self._scan, hidden[number] @ inward) @ outward
                works[number] = dist.all_reduce(hidden[number], async_op=True)
        for work in works:
            work.wait()
        self.outputs = hidden
