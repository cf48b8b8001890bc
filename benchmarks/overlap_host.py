"""Host time that a call of `tensor_parallel.overlap`'s linears takes, beside NCCL and a matmul, eager and compiled.

    torchrun --nproc-per-node 2 -m benchmarks.overlap_host -o results.json

A call is one linear: half of a column-parallel and a row-parallel linear in a row, on a sharded sequence. "nccl
and matmul" are `all_gather_into_tensor`, two `torch.mm` and `reduce_scatter_tensor` on plain tensors, and for the backward
pass three collectives, four `torch.mm` and two additions, without autograd: the least that eager PyTorch can do. "matmuls"
are modules that communicate nothing, with as large matmuls: what modules, autograd and torch.compile take by themselves.
The others are modules that `parallelize_module` split.

Each variant is called several times in a row, as a training step calls its layers, so that torch's allocator gives the same
addresses again; the variants take turns in balanced order. The first calls of a turn do not count. Host times are medians
while the GPU is kept busy, of the slowest rank. Beside them stand the part of it that launching recorded graphs takes, and
the share of operator calls that were launched from a recording.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.on_gpus import join_with_options, largest, log, run_and_leave, save, shared_rounds
from counterpoint.integrations import tensor_parallel
from counterpoint.ops.call_timer import SPIN_CYCLES
from counterpoint.ops.graph_cache import Key, Recordings

SIZES = ((2048, 4096, 14336), (8192, 4096, 14336))  # tokens, features, hidden features
LINEARS = 2
IN_A_ROW, NUM_SKIPPED = 8, 3  # calls of a turn, and how many of them do not count
WARM_UP_ROUNDS = 4  # addresses settle, and calls are recorded at the third sighting
Call = Callable[[], object]


class Pair(nn.Sequential):
    """A column-parallel and a row-parallel linear, split over the ranks."""

    def __init__(self, features: int, hidden: int) -> None:
        with torch.device("cuda"):
            super().__init__(nn.Linear(features, hidden, bias=False), nn.Linear(hidden, features, bias=False))
        self.to(torch.bfloat16)
        plan = {"0": ColwiseParallel(input_layouts=Shard(1)), "1": RowwiseParallel(output_layouts=Shard(1))}
        parallelize_module(self, init_device_mesh("cuda", (dist.get_world_size(),)), plan)


class Launches:
    """While in force: how many operator calls were looked up and found recorded, and the host time of launching them."""

    def __init__(self) -> None:
        self.num_calls = self.num_found = 0
        self.took_us = 0.0
        self._find = Recordings.find

    def __enter__(self) -> "Launches":
        def find(recordings: Recordings, key: Key) -> object:
            graph = self._find(recordings, key)
            self.num_calls += 1
            if graph is None:
                return None
            self.num_found += 1
            return TimedGraph(graph.replay, self)

        Recordings.find = find
        return self

    def __exit__(self, *_: object) -> None:
        Recordings.find = self._find


class TimedGraph:
    """In the place of a recorded graph: launches it and takes the time."""

    def __init__(self, launch: Call, launches: Launches) -> None:
        self._launch, self._launches = launch, launches

    def replay(self) -> None:
        """Launch it."""
        began = time.perf_counter()
        self._launch()
        self._launches.took_us += (time.perf_counter() - began) * 1e6


class ByHand:
    """The same on plain tensors by the library's calls, without autograd."""

    def __init__(self, x: torch.Tensor, features: int, hidden: int) -> None:
        num_ranks = dist.get_world_size()
        self.rows = x.view(-1, features)
        self.up = torch.randn(hidden // num_ranks, features, device="cuda", dtype=x.dtype)
        self.down = torch.randn(features, hidden // num_ranks, device="cuda", dtype=x.dtype)
        self.of_up, self.of_down = torch.zeros_like(self.up), torch.zeros_like(self.down)
        self.gradient = torch.ones_like(self.rows)

    def forward(self) -> torch.Tensor:
        """The result of `hidden`, by which backward begins."""
        hidden = torch.mm(gathered(self.rows), self.up.t())
        scattered(torch.mm(hidden, self.down.t()))
        return hidden

    def forward_and_backward(self) -> None:
        """What is gathered is not kept, so it is gathered again."""
        hidden, gradient = self.forward(), gathered(self.gradient)
        of_hidden = torch.mm(gradient, self.down)
        self.of_down.add_(torch.mm(gradient.t(), hidden))
        scattered(torch.mm(of_hidden, self.up))
        self.of_up.add_(torch.mm(of_hidden.t(), gathered(self.rows)))


def gathered(rows: torch.Tensor) -> torch.Tensor:
    whole = rows.new_empty(rows.shape[0] * dist.get_world_size(), rows.shape[1])
    dist.all_gather_into_tensor(whole, rows)
    return whole


def scattered(partial: torch.Tensor) -> torch.Tensor:
    part = partial.new_empty(partial.shape[0] // dist.get_world_size(), partial.shape[1])
    dist.reduce_scatter_tensor(part, partial)
    return part


def matmuls(features: int, hidden: int) -> nn.Module:
    part = hidden // dist.get_world_size()
    up, down = nn.Linear(features, part, bias=False), nn.Linear(part, features, bias=False)
    return nn.Sequential(up, down).to("cuda", torch.bfloat16)


def calls_of(tokens: int, features: int, hidden: int) -> dict[str, dict[str, Call]]:
    """Variants by what they do: a forward pass without gradients, and a forward and a backward pass."""
    x = torch.randn(1, tokens // dist.get_world_size(), features, device="cuda", dtype=torch.bfloat16)
    hand = ByHand(x, features, hidden)
    forward: dict[str, Call] = {"nccl and matmul": hand.forward}
    both: dict[str, Call] = {"nccl and matmul": hand.forward_and_backward}
    for way in ("eager", "compiled"):
        for kind in ("matmuls", "torch", "overlap"):
            module: nn.Module = matmuls(features, hidden) if kind == "matmuls" else Pair(features, hidden)
            given = torch.randn(1, tokens, features, device="cuda", dtype=x.dtype) if kind == "matmuls" else x
            if kind == "overlap":
                tensor_parallel.overlap(module)
            called = torch.compile(module) if way == "compiled" else module
            forward[f"{kind}, {way}"] = torch.no_grad()(lambda called=called, given=given: called(given))
            gradient = torch.ones_like(given)
            both[f"{kind}, {way}"] = lambda called=called, given=given, gradient=gradient: called(given).backward(gradient)
    return {"forward": forward, "forward and backward": both}


class HostTimes:
    """Of one variant: host time of each call, of launching in it, and GPU time, in us; and the calls of operators in it."""

    def __init__(self) -> None:
        self.host_us: list[float] = []
        self.launch_us: list[float] = []
        self.num_calls = self.num_found = 0

    def measure(self, call: Call) -> None:
        """One call that counts."""
        with Launches() as launches:
            began = time.perf_counter()
            call()
            self.host_us.append((time.perf_counter() - began) * 1e6)
        self.launch_us.append(launches.took_us)
        self.num_calls += launches.num_calls
        self.num_found += launches.num_found

    def row(self) -> tuple[float, float, float]:
        """Median host and launch time per linear on the slowest rank, and the smallest share of recorded calls."""
        share = self.num_found / self.num_calls if self.num_calls else 0.0
        host_us, launch_us = (statistics.median(each) / LINEARS for each in (self.host_us, self.launch_us))
        ((host_us, launch_us, missing),) = largest([[host_us, launch_us, 1 - share]])
        return round(host_us, 1), round(launch_us, 1), round(1 - missing, 3)


def host_times(calls: dict[str, Call], num_rounds: int) -> dict[str, HostTimes]:
    """Turns of calls in a row, the variants in an order of each round's own, the same on all ranks."""
    names, found = list(calls), {name: HostTimes() for name in calls}
    token, rounds = torch.ones(1, device="cuda"), shared_rounds(len(calls))
    for number in range(WARM_UP_ROUNDS + num_rounds):
        for name in (names[place] for place in rounds.order(number)):
            for turn in range(IN_A_ROW):
                torch.cuda._sleep(SPIN_CYCLES)
                dist.all_reduce(token)
                if number < WARM_UP_ROUNDS or turn < NUM_SKIPPED:
                    calls[name]()
                else:
                    found[name].measure(calls[name])
            torch.cuda.synchronize()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = join_with_options(parser, limit_s=200, rounds=12)
    results: list[object] = []
    for sizes in SIZES:
        for passes, calls in calls_of(*sizes).items():
            log(f"{passes}, {sizes[0]} tokens, {sizes[1]} to {sizes[2]} features, per linear: host us, launch us, recorded")
            for name, each in host_times(calls, options.rounds).items():
                host_us, launch_us, recorded = each.row()
                log(f"   {name:20}{host_us:9.1f}{launch_us:9.1f}{recorded:9.0%}")
                row = {"passes": passes, "sizes": sizes, "variant": name}
                results.append({**row, "host_us": host_us, "launch_us": launch_us, "recorded": recorded})
        save(options.output, results)


if __name__ == "__main__":
    run_and_leave(main)
