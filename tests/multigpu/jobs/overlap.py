"""Two ranks: a step that overlaps spinning CTAs with an all-reduce, under plans; prints `name: value` lines for the test.

The kernel's CTAs hold their slots for a known time, so what overlaps does not depend on clocks.
"""

import os
import sys
import traceback

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from counterpoint.cuda.applied import apply
from counterpoint.cuda.capture import capture
from counterpoint.cuda.ranks import join_ranks
from counterpoint.cuda.rewriting import rewrite
from counterpoint.machine import load_machine
from counterpoint.occupancy import cap_shared_bytes
from counterpoint.plan import Directive, Match, Plan, Priority, ResidencyCap
from counterpoint.step import Kernel

SPIN_NS = 1_000_000
NUM_CTAS = 132 * 4


@triton.jit
def spin(out, duration_ns):
    start = tl.extra.cuda.globaltimer()
    now = start
    while now - start < duration_ns:
        now = tl.extra.cuda.globaltimer()
    tl.store(out + tl.program_id(0), now - start)


def main() -> None:
    rank = join_ranks()
    spun = torch.zeros(NUM_CTAS, dtype=torch.int64, device="cuda")
    buffer = torch.ones(64 << 19, dtype=torch.bfloat16, device="cuda")
    side = torch.cuda.Stream()

    def kernel() -> None:
        spin[(NUM_CTAS,)](spun, SPIN_NS, num_warps=8)

    def collective() -> None:
        dist.all_reduce(buffer, op=dist.ReduceOp.AVG)

    def both() -> None:
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        kernel()
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000)
            collective()
        current.wait_stream(side)

    captured = capture(both, "spin and all-reduce")
    operations = captured.read.step.operations
    spins = tuple(i for i, op in enumerate(operations) if isinstance(op, Kernel) and op.footprint.num_ctas == NUM_CTAS)
    gpu = load_machine("h200").gpu
    footprint = operations[spins[0]].footprint
    dynamic = cap_shared_bytes(gpu, footprint, 1)
    priority = Directive(match=Match(kind="communication"), controls=(Priority(priority=-5),), reason="test")
    caps = {
        percent: Directive(
            match=Match(operations=spins),
            controls=(ResidencyCap(ctas_per_sm=1, dynamic_shared_bytes=dynamic, carveout_percent=percent),),
            reason="test",
        )
        for percent in (100, -1)
    }
    lone = {
        op.kind if op.kind == "communication" else "kernel": op.lone_us
        for i, op in enumerate(operations)
        if op.kind == "communication" or i in spins
    }
    plans = {"plain": Plan(), "cap": Plan(directives=(priority, caps[100]))}
    plans["cap without carveout"] = Plan(directives=(priority, caps[-1]))
    for name, plan in plans.items():
        edited = rewrite(captured.graph, captured.read, plan)
        executable = edited.graph.instantiate()
        found: dict[str, list[float]] = {"kernel": [], "collective": [], "waits": []}
        for _ in range(9):
            spans = {interval.operation: interval for interval in captured.timeline(executable).intervals}
            communication = next(spans[i] for i, op in enumerate(operations) if op.kind == "communication")
            ready = max(
                spans[i].end_us for i in range(len(operations)) if i not in spins and operations[i].kind != "communication"
            )
            found["kernel"].append(spans[spins[0]].duration_us)
            found["collective"].append(communication.duration_us)
            found["waits"].append(communication.start_us - ready)
        states = sorted({entry.state for entry in edited.engagements})
        if rank == 0:
            figures = ", ".join(f"{key}={min(values):.1f}" for key, values in found.items())
            print(f"{name}: {figures}, states={'/'.join(states)}")
        executable.close()
    identical = captured.outputs_are_identical(
        rewrite(captured.graph, captured.read, plans["cap"]).graph.instantiate(), [buffer]
    )
    applied = apply(captured, plans["cap"], is_strict=True, guard_every=20)
    for _ in range(40):
        applied.replay()
    torch.cuda.synchronize()
    if rank == 0:
        print(f"lone: kernel={lone['kernel']:.1f}, collective={lone['communication']:.1f}")
        print(f"identical={identical}, guard kept the plan={applied.is_active}")


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)
