"""Two ranks: a step that overlaps spinning CTAs with an all-reduce, under plans; prints `name: value` lines for the test.

The kernel's CTAs hold their slots for a known time, so what overlaps does not depend on clocks.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from counterpoint.controls import Priority, ResidencyCap
from counterpoint.cuda.applied import apply
from counterpoint.cuda.capture import Captured, capture
from counterpoint.cuda.graph_rewriting import rewrite
from counterpoint.cuda.ranks import join_ranks, run_and_leave
from counterpoint.machine import load_machine
from counterpoint.occupancy import cap_shared_bytes
from counterpoint.plan import Directive, Match, Plan
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


def make_step() -> Callable[[], None]:
    """The spinning kernel on the current stream, and on another one an all-reduce that is ready a little later."""
    spun = torch.zeros(NUM_CTAS, dtype=torch.int64, device="cuda")
    buffer = torch.ones(64 << 19, dtype=torch.bfloat16, device="cuda")
    side = torch.cuda.Stream()

    def step() -> None:
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        spin[(NUM_CTAS,)](spun, SPIN_NS, num_warps=8)
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000)
            dist.all_reduce(buffer, op=dist.ReduceOp.AVG)
        current.wait_stream(side)

    return step


def make_plans(kernel: Kernel, index: int) -> dict[str, Plan]:
    """As it is, and with the kernel capped to one CTA per SM, with the carveout and without."""
    dynamic = cap_shared_bytes(load_machine("h200").gpu, kernel.footprint, 1)
    priority = Directive(match=Match(kind="communication"), controls=(Priority(priority=-5),), reason="test")
    plans = {"plain": Plan()}
    for name, percent in (("cap", 100), ("cap without carveout", -1)):
        cap = ResidencyCap(ctas_per_sm=1, dynamic_shared_bytes=dynamic, carveout_percent=percent)
        capped = Directive(match=Match(operations=(index,)), controls=(cap,), reason="test")
        plans[name] = Plan(directives=(priority, capped))
    return plans


def replay(captured: Captured, plan: Plan, spinning: int, collective: int) -> str:
    """The shortest of several replays: ranks do not start a profiled replay at the same moment."""
    edited = rewrite(captured.graph, captured.read, plan)
    executable = edited.graph.instantiate()
    found: dict[str, list[float]] = {"kernel": [], "collective": [], "waits": []}
    for _ in range(9):
        spans = {interval.operation: interval for interval in captured.timeline(executable).intervals}
        ready_us = max(span.end_us for index, span in spans.items() if index not in (spinning, collective))
        found["kernel"].append(spans[spinning].duration_us)
        found["collective"].append(spans[collective].duration_us)
        found["waits"].append(spans[collective].start_us - ready_us)
    executable.close()
    states = sorted({entry.state for entry in edited.engagements})
    return ", ".join(f"{key}={min(values):.1f}" for key, values in found.items()) + f", states={'/'.join(states)}"


def main() -> None:
    rank = join_ranks()
    captured = capture(make_step(), "spin and all-reduce")
    operations = captured.read.step.operations
    collective = next(index for index, each in enumerate(operations) if each.kind == "communication")
    spinning, kernel = next(
        (index, each)
        for index, each in enumerate(operations)
        if isinstance(each, Kernel) and each.footprint.num_ctas == NUM_CTAS
    )
    lines = [f"lone: kernel={kernel.lone_us:.1f}, collective={operations[collective].lone_us:.1f}"]
    plans = make_plans(kernel, spinning)
    lines += [f"{name}: {replay(captured, plan, spinning, collective)}" for name, plan in plans.items()]
    applied = apply(captured, plans["cap"], is_strict=True, guard_every=48)
    for _ in range(100):
        applied.replay()
    torch.cuda.synchronize()
    applied.close()
    if rank == 0:
        print(*lines, f"guard kept the plan={applied.is_active}", sep="\n")


if __name__ == "__main__":
    run_and_leave(main)
