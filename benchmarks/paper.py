"""The first paper's grid on GPUs: torchrun --nproc-per-node 4 -m benchmarks.paper [--write FOLDER] [WORKLOAD ...]

Each workload is captured twice, sequential and overlapped; plans are applied to the overlapped graph and measured
interleaved with it. Every row is printed with the spread, and beside it what the simulator said of the same step.
"""

import argparse
import faulthandler
import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from counterpoint.cuda.capture import Captured, capture
from counterpoint.cuda.rewriting import rewrite
from counterpoint.cuda.timing import measure_interleaved
from counterpoint.errors import CounterpointError
from counterpoint.machine import machine_for_device
from counterpoint.metrics import ideal_us, measure, sequential_us
from counterpoint.occupancy import cap_shared_bytes, residency
from counterpoint.plan import Control, Directive, HeadStart, Match, Plan, Priority, ResidencyCap
from counterpoint.planner.measured import tune_measured
from counterpoint.sim import Simulator
from counterpoint.step import Kernel

ITERATIONS = 4
BUFFER_BYTES = 896 << 20
SIZES = {"cb": (8192, 8192, 8192), "mb": (8192, 57344, 8192)}
TILES = {"opt1": (64, 64, 32, 4, 2), "opt2": (64, 64, 64, 4, 2), "large": (128, 128, 64, 8, 3)}
COMMUNICATION = Match(kind="communication")


@triton.jit
def matmul_kernel(  # noqa: PLR0917  Triton passes by position
    a, b, c, m, n, k, tm: tl.constexpr, tn: tl.constexpr, tk: tl.constexpr
):
    """C = A B, one tile a CTA, tiles in groups of 8 rows so that they share what L2 holds."""
    tiles_n = tl.cdiv(n, tn)
    group = tl.program_id(0) // (8 * tiles_n)
    rows = min(tl.cdiv(m, tm) - group * 8, 8)
    within = tl.program_id(0) % (8 * tiles_n)
    row, column = group * 8 + within % rows, within // rows
    row_offsets, column_offsets = row * tm + tl.arange(0, tm), column * tn + tl.arange(0, tn)
    inner = tl.arange(0, tk)
    at_a = a + row_offsets[:, None] * k + inner[None, :]
    at_b = b + inner[:, None] * n + column_offsets[None, :]
    total = tl.zeros((tm, tn), tl.float32)
    for _ in range(0, k, tk):
        total = tl.dot(tl.load(at_a), tl.load(at_b), total)
        at_a += tk
        at_b += tk * n
    # 8192 x 57344 outputs still fit 32-bit offsets
    tl.store(c + row_offsets[:, None] * n + column_offsets[None, :], total.to(tl.bfloat16))


class Workload:
    """One of the paper's workloads as two step functions over the same buffers."""

    def __init__(self, name: str) -> None:
        size, collective, tile = name.split("_")
        self._m, self._n, self._k = SIZES[size]
        self._tile = TILES[tile]
        options = {"device": "cuda", "dtype": torch.bfloat16}
        self._a, self._b = torch.randn(self._m, self._k, **options), torch.randn(self._k, self._n, **options)
        self.product = torch.empty(self._m, self._n, **options)
        self._buffer = torch.randn(BUFFER_BYTES // 2, **options)
        self._received = torch.empty_like(self._buffer) if collective == "a2a" else None
        self._communication = torch.cuda.Stream()

    def _matmul(self) -> None:
        tm, tn, tk, warps, stages = self._tile
        grid = (triton.cdiv(self._m, tm) * triton.cdiv(self._n, tn),)
        sizes = (self._m, self._n, self._k)
        matmul_kernel[grid](self._a, self._b, self.product, *sizes, tm, tn, tk, num_warps=warps, num_stages=stages)

    def _communicate(self) -> None:
        if self._received is None:
            dist.all_reduce(self._buffer, op=dist.ReduceOp.AVG)
        else:
            dist.all_to_all_single(self._received, self._buffer)

    def sequential(self) -> None:
        for _ in range(ITERATIONS):
            self._matmul()
            self._communicate()

    def overlapped(self) -> None:
        current = torch.cuda.current_stream()
        for _ in range(ITERATIONS):
            self._matmul()
            self._communication.wait_stream(current)
            with torch.cuda.stream(self._communication):
                self._communicate()
        current.wait_stream(self._communication)


def plans_of(captured: Captured) -> dict[str, Plan]:
    """The grid: priority, caps, head starts and their combinations."""
    machine = machine_for_device(torch.cuda.get_device_name())
    assert machine is not None, "the benchmark runs on a GPU with a machine file"
    operations = captured.read.step.operations
    kernel = next(operation for operation in operations if isinstance(operation, Kernel))
    usual = residency(machine.gpu, kernel.footprint).ctas_per_sm
    matmuls = tuple(index for index, operation in enumerate(operations) if isinstance(operation, Kernel))
    priority: list[tuple[Match, Control]] = [(COMMUNICATION, Priority(priority=machine.gpu.greatest_priority))]
    grid: dict[str, list[tuple[Match, Control]]] = {"plain overlap": [], "priority": priority}
    for hold_us in (5.0, 20.0):
        ahead: list[tuple[Match, Control]] = [(Match(operations=matmuls[1:]), HeadStart(hold_us=hold_us))]
        grid[f"head start {hold_us:g} us"] = ahead
        grid[f"priority + head start {hold_us:g} us"] = priority + ahead
    for ctas_per_sm in range(usual - 1, 0, -1):
        dynamic = cap_shared_bytes(machine.gpu, kernel.footprint, ctas_per_sm)
        cap: list[tuple[Match, Control]] = [
            (Match(operations=matmuls), ResidencyCap(ctas_per_sm=ctas_per_sm, dynamic_shared_bytes=dynamic))
        ]
        grid[f"cap {ctas_per_sm} ({dynamic} B)"] = cap
        grid[f"priority + cap {ctas_per_sm} ({dynamic} B)"] = priority + cap
    return {
        label: Plan(directives=tuple(Directive(match=match, controls=(control,), reason="grid") for match, control in parts))
        for label, parts in grid.items()
    }


def run_workload(name: str) -> dict[str, object]:
    """Measure one workload over the grid, let the planner choose, and compare outputs."""
    machine = machine_for_device(torch.cuda.get_device_name())
    assert machine is not None, "the benchmark runs on a GPU with a machine file"
    workload = Workload(name)
    sequential, overlapped = capture(workload.sequential, "sequential"), capture(workload.overlapped, name)
    plans = plans_of(overlapped)
    rewritten = {label: rewrite(overlapped.graph, overlapped.read, plan) for label, plan in plans.items()}
    executables = [sequential.graph.copy().instantiate(), *(each.graph.instantiate() for each in rewritten.values())]
    labels = ["plain overlap", "sequential", *(label for label in plans if label != "plain overlap")]
    order = [1, 0, *range(2, len(executables))]
    rounds = 7 if name.startswith("mb") else 11
    found = measure_interleaved(labels, lambda candidate: overlapped.time_us(executables[order[candidate]]), rounds)
    step = overlapped.read.step
    lone_us = Simulator().lone_times_us(step, machine)
    simulated = {label: measure(Simulator().run(step, machine, plan)).makespan_us for label, plan in plans.items()}
    simulated["sequential"] = sequential_us(step, lone_us)
    digests = {
        label: overlapped.outputs_digest(executables[1 + place], [workload.product]) for place, label in enumerate(plans)
    }
    for executable in executables:
        executable.close()
    chosen = tune_measured(overlapped, machine, num_rounds=rounds)
    return {
        "workload": name,
        "ideal_us": ideal_us(step, lone_us),
        "lone_us": {"matmul": lone_us[0], "collective": lone_us[1]},
        "footprint": repr(next(op.footprint for op in step.operations if isinstance(op, Kernel))),
        "rows": [
            {
                "label": row.label,
                "median_us": row.median_us,
                "ratio_to_plain": row.ratio,
                "spread": row.spread,
                "simulated_us": simulated[row.label],
                "engaged": row.label == "sequential"
                or all(entry.state == "verified" for entry in rewritten[row.label].engagements),
            }
            for row in found
        ],
        "outputs_identical": len(set(digests.values())) == 1,
        "chosen": {"verdict": chosen.plan.verdict, "summary": chosen.plan.summary},
        "chosen_measurements": [
            {"label": each.label, "median_us": each.median_us, "ratio": each.ratio, "spread": each.spread}
            for each in chosen.measurements
        ],
    }


def _print(result: dict[str, object]) -> None:
    rows = result["rows"]
    assert isinstance(rows, list), "run_workload returns rows"
    print(f"\n{result['workload']}: ideal {result['ideal_us']:.0f} us, lone {result['lone_us']}, {result['footprint']}")
    for row in rows:
        print(
            f"  {row['label']:34} {row['median_us']:9.0f} us  x{row['ratio_to_plain']:.3f} +-{row['spread']:.3f}  "
            f"simulated {row['simulated_us']:9.0f}  {'engaged' if row['engaged'] else 'NOT ENGAGED'}"
        )
    print(f"  chosen: {result['chosen']}  outputs identical: {result['outputs_identical']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "workloads", nargs="*", default=[f"{s}_{c}_{t}" for s in SIZES for c in ("ar", "a2a") for t in TILES]
    )
    parser.add_argument("--write", type=Path, help="folder for the results")
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(500, exit=True)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    results = []
    for name in arguments.workloads:
        try:
            results.append(run_workload(name))
        except CounterpointError as problem:
            print(f"{name}: {problem}", flush=True)
            continue
        if dist.get_rank() == 0:
            _print(results[-1])
            if arguments.write:
                path = arguments.write / f"paper_{dist.get_world_size()}x.json"
                path.write_text(json.dumps(results, indent=1) + "\n")
        torch.cuda.empty_cache()
    dist.barrier()
    torch.cuda.synchronize()


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)
