"""Host time that a call of `tensor_parallel.overlap`'s linears takes, beside NCCL and a matmul, eager and compiled.

    torchrun --nproc-per-node 2 -m benchmarks.overlap_host -o results.json

A call is one linear: half of a column-parallel and a row-parallel linear in a row, on a sharded sequence. "nccl
and matmul" are `all_gather_into_tensor`, two `torch.mm` and `reduce_scatter_tensor` on plain tensors, and for the backward
pass three collectives, four `torch.mm` and two additions, without autograd: the least that eager PyTorch can do. "matmuls"
are modules that communicate nothing, with as large matmuls: what modules, autograd and torch.compile take by themselves.
"overlap, ..., no launch" looks its recorded graph up and launches none: the Python of a warm call by itself (its results are
none); `benchmarks.graph_launches` takes the launch apart. The others are modules that `parallelize_module` split. Host times
are medians over interleaved rounds while the GPU is kept busy, of the slowest rank; GPU times stand beside them.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.on_gpus import join, largest, log, run_and_leave, save
from benchmarks.ops_timing import time_interleaved
from counterpoint.integrations import tensor_parallel
from counterpoint.ops.graph_cache import Recordings

SIZES = ((2048, 4096, 14336), (8192, 4096, 14336))  # tokens, features, hidden features
LINEARS = 2
Call = Callable[[], object]


class Pair(nn.Sequential):
    """A column-parallel and a row-parallel linear, split over the ranks."""

    def __init__(self, features: int, hidden: int) -> None:
        with torch.device("cuda"):
            super().__init__(nn.Linear(features, hidden, bias=False), nn.Linear(hidden, features, bias=False))
        self.to(torch.bfloat16)
        plan = {"0": ColwiseParallel(input_layouts=Shard(1)), "1": RowwiseParallel(output_layouts=Shard(1))}
        parallelize_module(self, init_device_mesh("cuda", (dist.get_world_size(),)), plan)


class NoLaunch:
    """In the place of a recorded graph."""

    def replay(self) -> None:
        """Launch nothing."""


def without_launch(call: Call) -> Call:
    """The call with every recorded graph left out, on all ranks alike, so that nobody waits."""
    find = Recordings.find

    def run() -> None:
        Recordings.find = lambda *_: NoLaunch()
        try:
            call()
        finally:
            Recordings.find = find

    return run


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
            if kind == "overlap":
                for calls in (forward, both):
                    calls[f"{kind}, {way}, no launch"] = without_launch(calls[f"{kind}, {way}"])
    return {"forward": forward, "forward and backward": both}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--limit-s", type=int, default=200)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    join(options.limit_s)
    results: list[object] = []
    for sizes in SIZES:
        for passes, calls in calls_of(*sizes).items():
            timed = time_interleaved(calls, options.rounds)
            (hosts,) = largest([[each.host_us / LINEARS for each in timed.values()]])
            log(f"{passes}, {sizes[0]} tokens, {sizes[1]} to {sizes[2]} features: host and GPU us per linear")
            for name, host_us in zip(timed, hosts, strict=True):
                gpu_us = timed[name].median_us / LINEARS
                log(f"   {name:28}{host_us:9.1f}{gpu_us:9.1f}")
                row = {"passes": passes, "sizes": sizes, "variant": name}
                results.append({**row, "host_us": round(host_us, 1), "gpu_us": round(gpu_us, 1)})
        save(options.output, results)


if __name__ == "__main__":
    run_and_leave(main)
