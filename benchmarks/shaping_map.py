"""Where occupancy shaping pays: steps of one kernel in common use next to a chain of all-gathers, under every control.

    torchrun --nproc-per-node 2 -m benchmarks.shaping_map -o map.json

Each step launches a kernel several times while a chain of all-gathers runs on the process group's stream; nothing waits for
the chain but the step's end. It is captured once, and every variant is the same graph under a plan: collectives by NCCL, by
copies, or by light kernels of several numbers of CTAs; with priority or without; the kernel capped at several residencies
and carveouts. Each control is proven from the driver. Times are of the slowest rank, in balanced rounds.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.on_gpus import join, log, run_and_leave, save, shared_rounds
from benchmarks.shaping_kernels import KERNELS, Launch
from benchmarks.shaping_steps import ChainStep, TwoBatches
from counterpoint.controls import Control, LightKernel, Priority, ResidencyCap
from counterpoint.cuda.capture import Captured, capture
from counterpoint.cuda.graph_rewriting import MOVED, rewrite
from counterpoint.errors import CounterpointError, OccupancyError
from counterpoint.measurement.values import Measurement, summarize_rounds
from counterpoint.occupancy import cap_shared_bytes, residency
from counterpoint.ops.captured_copies import offer_copies
from counterpoint.ops.light_collectives import offer_light_kernels
from counterpoint.plan import Directive, Match, Plan
from counterpoint.planner.on_gpu import machine_of
from counterpoint.step import Collective, Footprint, Kernel
from counterpoint.units import MIB

GATHERED_BYTES = 8 * MIB
CHAIN_SHARE = 0.8  # of the computation's time: what the chain takes alone, by NCCL
CTA_COUNTS = (16, 32, 64, 132)
PRIORITY = Priority(priority=-5)
TWO_BATCHES = "two batches"
NCCL_WARP_BYTES = 4112  # of the 82,240 dynamic bytes that NCCL 2.28 asks for 20 warps


class Variant(NamedTuple):
    """A plan, and NCCL's dynamic bytes where they are lowered."""

    label: str
    plan: Plan
    nccl_bytes: int | None = None


class Found(NamedTuple):
    """One kernel's part of the map."""

    kernel: str
    facts: dict[str, object]
    measurements: tuple[Measurement, ...]
    problems: dict[str, str]

    def as_dict(self) -> dict[str, object]:
        rows = [
            {
                "variant": each.label,
                "median_us": round(each.median_us, 1),
                "ratio": round(each.ratio, 4),
                "spread": round(each.spread, 4),
                "rounds": each.num_rounds,
            }
            for each in self.measurements
        ]
        return {"kernel": self.kernel, **self.facts, "rows": rows, "problems": self.problems}


def plan_of(*communication: Control, caps: Sequence[tuple[str, ResidencyCap]] = ()) -> Plan:
    directives = [
        Directive(match=Match(name=name, kind="computation"), controls=(cap,), reason="measured") for name, cap in caps
    ]
    if communication:
        directives.append(Directive(match=Match(kind="communication"), controls=communication, reason="measured"))
    return Plan(directives=tuple(directives))


def longest_kernel(captured: Captured) -> Kernel:
    """The kernel that takes most of the step."""
    spent: dict[str, float] = {}
    kernels = [each for each in captured.read.step.operations if isinstance(each, Kernel)]
    for each in kernels:
        spent[each.name] = spent.get(each.name, 0.0) + (each.lone_us or 0.0)
    name = max(spent, key=lambda name: spent[name])
    return next(each for each in kernels if each.name == name)


def caps_of(captured: Captured, kernel: Kernel) -> Iterator[tuple[str, ResidencyCap]]:
    """Caps of a kernel: one CTA fewer than usual, three quarters, half; with the full carveout and as the driver has it."""
    gpu = machine_of(captured).gpu
    usual = residency(gpu, kernel.footprint).ctas_per_sm
    for count in dict.fromkeys((usual - 1, usual * 3 // 4, usual // 2)):
        for percent in (100, -1):
            try:
                num_bytes = cap_shared_bytes(gpu, kernel.footprint, count) if count >= 1 else 0
            except OccupancyError:
                continue
            if count >= 1:
                cap = ResidencyCap(ctas_per_sm=count, dynamic_shared_bytes=num_bytes, carveout_percent=percent)
                yield f"cap {count}, carveout {percent}", cap


def variants_of(captured: Captured, kernel: Kernel, *, is_short: bool) -> Iterator[Variant]:
    """The first is what others are compared with: NCCL with priority alone."""
    caps = list(caps_of(captured, kernel))
    yield Variant("nccl, priority", plan_of(PRIORITY))
    yield Variant("nccl, plain", Plan())
    yield Variant("copies", plan_of(MOVED))
    for label, cap in caps[::2]:
        yield Variant(f"nccl, priority, {label}", plan_of(PRIORITY, caps=[(kernel.name, cap)]))
    for num_ctas in CTA_COUNTS:
        yield Variant(f"light {num_ctas}, priority", plan_of(LightKernel(num_ctas=num_ctas), PRIORITY))
    most = CTA_COUNTS[-1]
    yield Variant(f"light {most}, plain", plan_of(LightKernel(num_ctas=most)))
    for label, cap in caps[:1] if is_short else caps:
        for num_ctas in CTA_COUNTS[-2:]:
            light = LightKernel(num_ctas=num_ctas)
            yield Variant(f"light {num_ctas}, priority, {label}", plan_of(light, PRIORITY, caps=[(kernel.name, cap)]))
    for label, cap in caps[:1]:
        yield Variant(f"light {most}, {label}", plan_of(LightKernel(num_ctas=most), caps=[(kernel.name, cap)]))


def lowered_variants(captured: Captured, kernel: Kernel) -> Iterator[Variant]:
    """NCCL with the dynamic bytes of the warps that it has, next to NCCL as it is."""
    warps = footprint_of_collective(captured).threads_per_cta // 32
    lowered = warps * NCCL_WARP_BYTES
    yield Variant("nccl, priority", plan_of(PRIORITY))
    yield Variant("nccl, plain", Plan())
    yield Variant(f"nccl of {lowered} bytes, priority", plan_of(PRIORITY), nccl_bytes=lowered)
    for label, cap in list(caps_of(captured, kernel))[::2]:
        yield Variant(f"nccl, priority, {label}", plan_of(PRIORITY, caps=[(kernel.name, cap)]))
        yield Variant(
            f"nccl of {lowered} bytes, priority, {label}", plan_of(PRIORITY, caps=[(kernel.name, cap)]), nccl_bytes=lowered
        )


def footprint_of_collective(captured: Captured) -> Footprint:
    collective = next(each for each in captured.read.step.operations if isinstance(each, Collective))
    assert collective.footprint is not None, "a captured collective has a footprint"
    return collective.footprint


def facts_of(captured: Captured, kernel: Kernel, step: ChainStep | TwoBatches) -> dict[str, object]:
    """What the step is made of."""
    operations, gpu = captured.read.step.operations, machine_of(captured).gpu
    usual = residency(gpu, kernel.footprint).ctas_per_sm
    waves = kernel.footprint.num_ctas / max(1, usual * gpu.num_sms)
    return {
        "name": kernel.name[:120],
        "num_ctas": kernel.footprint.num_ctas,
        "threads": kernel.footprint.threads_per_cta,
        "registers": kernel.footprint.registers_per_thread,
        "static_bytes": kernel.footprint.static_shared_bytes,
        "dynamic_bytes": kernel.footprint.dynamic_shared_bytes,
        "residency": usual,
        "waves": round(waves, 2),
        "cta_us": round((kernel.lone_us or 0) / max(1.0, waves), 1),
        "num_launches": step.num_launches,
        "num_gathers": step.num_gathers,
        "computation_us": round(sum(each.lone_us or 0 for each in operations if not isinstance(each, Collective)), 1),
        "chain_us": round(sum(each.lone_us or 0 for each in operations if isinstance(each, Collective)), 1),
    }


def measure_kernel(name: str, options: argparse.Namespace) -> Found:
    """Capture the step of one kernel and measure all its variants."""
    step = TwoBatches(16, 1024, 2048, 3) if name == TWO_BATCHES else ChainStep(KERNELS[name](), options.share, options.bytes)
    captured = capture(step, name)
    kernel = longest_kernel(captured)
    facts, problems = facts_of(captured, kernel, step), {}
    log(f"\n{name}: {facts}")
    chosen = (
        lowered_variants(captured, kernel)
        if options.lowered
        else variants_of(captured, kernel, is_short=name not in options.full)
    )
    offer_copies(captured)
    offer_light_kernels(captured)
    with ExitStack() as opened:
        opened.callback(captured.close)
        executables, labels = [], []
        for variant in chosen:
            try:
                rewritten = rewrite(captured.graph, captured.read, variant.plan)
                unproven = [
                    f"{each.state}: {each.reason or each.found}"
                    for each in rewritten.engagements
                    if each.state != "verified"
                ]
                if variant.nccl_bytes is not None:
                    lower(rewritten.graph, captured, variant.nccl_bytes)
                executable = rewritten.graph.instantiate()
                rewritten.graph.close()
            except CounterpointError as problem:
                unproven = [str(problem)]
            if captured.is_everywhere(not unproven):
                opened.callback(executable.close)
                executables.append(executable)
                labels.append(variant.label)
            else:
                problems[variant.label] = "; ".join(dict.fromkeys(unproven))[:200] or "refused on another rank"
        rounds = measured_rounds(captured, executables, options.rounds)
        facts["unequal"] = unequal(captured, executables, labels, step)
    return Found(name, facts, summarize_rounds(labels, rounds), problems)


def lower(graph, captured: Captured, num_bytes: int) -> None:
    """Give the collectives' CTAs fewer dynamic bytes than NCCL asked for."""
    for number, operation in zip(captured.read.nodes, captured.read.step.operations, strict=True):
        if isinstance(operation, Collective):
            graph.set_shared_memory(number, num_bytes, -1)


def unequal(captured: Captured, executables, labels: Sequence[str], step: ChainStep | TwoBatches) -> list[str]:
    """The variants that leave other bits than the first one, on any rank."""
    wanted: list[torch.Tensor] = []
    found = []
    for executable, label in zip(executables, labels, strict=True):
        for output in step.outputs:
            output.zero_()
        captured.time_us(executable)
        torch.cuda.synchronize()
        wanted = wanted or [output.clone() for output in step.outputs]
        pairs = zip(wanted, step.outputs, strict=True)
        if not captured.is_everywhere(all(torch.equal(one, other) for one, other in pairs)):
            found.append(label)
    return found


def measured_rounds(captured: Captured, executables, num_rounds: int) -> list[list[float]]:
    """Times in microseconds, a row a round."""
    for executable in executables:
        captured.time_us(executable)
    orders = shared_rounds(len(executables))
    rounds = []
    for number in range(num_rounds):
        times = [0.0] * len(executables)
        for place in orders.order(number):
            times[place] = captured.time_us(executables[place])
        rounds.append(times)
    return rounds


def single(collective: str, num_elements: int) -> Launch:
    """One collective of bf16 elements, counted over all ranks."""
    whole = torch.ones(num_elements, device="cuda", dtype=torch.bfloat16)
    part = torch.ones(num_elements // dist.get_world_size(), device="cuda", dtype=torch.bfloat16)
    if collective == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part)
    if collective == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole)
    return lambda: dist.all_reduce(whole)


def measure_bandwidth(options: argparse.Namespace) -> list[dict[str, object]]:
    """Times of single collectives alone, by NCCL and by light kernels of several numbers of CTAs."""
    found = []
    for collective in ("all_gather", "reduce_scatter", "all_reduce"):
        for mib in options.sizes:
            call = single(collective, mib * MIB // 2)
            captured = capture(lambda call=call: [call() for _ in range(4)], collective)
            offer_light_kernels(captured)
            times = {"nccl": captured.graph.instantiate()}
            for num_ctas in (8, *CTA_COUNTS, 264):
                plan = plan_of(LightKernel(num_ctas=num_ctas), PRIORITY)
                rewritten = rewrite(captured.graph, captured.read, plan)
                times[f"light {num_ctas}"] = rewritten.graph.instantiate()
            row = {
                label: round(statistics.median(captured.time_us(each) for _ in range(7)) / 4, 1)
                for label, each in times.items()
            }
            log(collective, mib, "MiB, us:", row)
            found.append({"collective": collective, "mib": mib, **row})
            for each in times.values():
                each.close()
            captured.close()
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--kernels", nargs="*", default=list(KERNELS), choices=[*KERNELS, TWO_BATCHES])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--share", type=float, default=CHAIN_SHARE, help="the chain's time as a share of the computation's")
    parser.add_argument("--bytes", type=int, default=GATHERED_BYTES, help="of each all-gather")
    parser.add_argument("--sizes", type=int, nargs="*", default=[], help="MiB of single collectives to time alone")
    parser.add_argument("--full", nargs="*", default=[], choices=[*KERNELS, TWO_BATCHES], help="every cap for these")
    parser.add_argument("--lowered", action="store_true", help="NCCL with the shared memory of the warps it has")
    parser.add_argument("--limit", type=int, default=110)
    return parser.parse_args()


def main() -> None:
    options = parse()
    join(options.limit)
    found: list[object] = list(measure_bandwidth(options))
    save(options.output, found)
    for name in options.kernels:
        try:
            result = measure_kernel(name, options)
        except (CounterpointError, RuntimeError) as problem:
            log(f"{name}: {str(problem)[:300]}")
            found.append({"kernel": name, "problem": str(problem)[:300]})
            continue
        found.append(result.as_dict())
        save(options.output, found)
        for each in result.measurements:
            log(f"  {each.label:45s} {each.median_us:9.1f} us  {100 * (each.ratio - 1):+6.1f} %  +- {100 * each.spread:.1f}")
        log("  other bits:", result.facts["unequal"] or "none")
        for label, problem in result.problems.items():
            log(f"  {label}: {problem}")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    run_and_leave(main)
