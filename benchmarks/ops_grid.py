"""The operators on GPUs against NCCL and PyTorch's fused operators, over 24 shapes; results are checked.

torchrun --nproc-per-node 4 -m benchmarks.ops_grid --ops ag_mm,mm_rs --shapes all -o results.json

Per shape: the collective alone, the matmul alone, both in turn (sequential), PyTorch's fused operator (peer), every
description of a small set, and what the heuristic picks. Ideal is max(collective, matmul). A shape that fails prints one
line and is left out.
"""

import argparse
import math
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from benchmarks.on_gpus import join, log, run_and_leave, save
from benchmarks.ops_shapes import HELD_OUT, Shape, shapes_named
from benchmarks.ops_timing import Timed, time_interleaved
from counterpoint import ops
from counterpoint.errors import cause_of
from counterpoint.ops.collectives import library_all_gather, library_reduce_scatter
from counterpoint.schedule import ScheduleDescription
from counterpoint.schedule.heuristic import GATHERING, REDUCING

D = ScheduleDescription
DESCRIPTIONS = {  # what the heuristic picks from, and more
    "ag_mm": (
        *GATHERING,
        D(pattern="all_peers", chunks=2),
        D(pattern="all_peers", chunks=4, matmul="fused"),
        D(pattern="all_peers", chunks=2, num_copy_streams=3),
        D(pattern="ring", chunks=2),
    ),
    "mm_rs": (
        *REDUCING,
        D(pattern="one_peer", chunks=1),
        D(pattern="one_peer", chunks=1, num_compute_streams=1),
        D(pattern="one_peer", chunks=2, matmul="peer"),
        D(pattern="ring", chunks=1),
        D(pattern="ring", chunks=4, num_compute_streams=1),
    ),
}
Call = Callable[[], object]


class Case:
    """One operator on one shape: its calls by name, and what they must give."""

    def __init__(self, op: str, shape: Shape, seed: int) -> None:
        self.op, self.shape = op, shape
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        self.rows, local = shape.tokens, shape.wide // num_ranks
        torch.manual_seed(seed + rank)
        if op == "ag_mm":
            self.sizes = (self.rows, local, shape.hidden)
            self.left = _random(self.rows // num_ranks, shape.hidden)
            self.weight = _random(shape.hidden, local) / math.sqrt(shape.hidden)
            self.whole = _random(self.rows, shape.hidden)
        else:
            self.sizes = (self.rows, shape.hidden, local)
            self.left = _random(self.rows, local)
            self.weight = _random(local, shape.hidden) / math.sqrt(local)
            self.whole = _random(self.rows, shape.hidden)
            self.part = self.whole[: self.rows // num_ranks].clone()

    def calls(self) -> dict[str, Call]:
        group_name = dist.group.WORLD.group_name
        left, weight, whole = self.left, self.weight, self.whole
        if self.op == "ag_mm":

            def sequential() -> torch.Tensor:
                library_all_gather(whole, left)
                return torch.mm(whole, weight)

            parts: dict[str, Call] = {
                "collective": lambda: library_all_gather(whole, left),
                "matmul": lambda: torch.mm(whole, weight),
                "sequential": sequential,
                "peer": lambda: torch.ops.symm_mem.fused_all_gather_matmul(left, [weight], 0, group_name, return_A=False)[1][
                    0
                ],
            }
            operator = ops.all_gather_matmul
        else:

            def sequential() -> torch.Tensor:
                result = torch.empty_like(self.part)
                library_reduce_scatter(result, torch.mm(left, weight))
                return result

            parts = {
                "collective": lambda: library_reduce_scatter(self.part, whole),
                "matmul": lambda: torch.mm(left, weight),
                "sequential": sequential,
                "peer": lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(left, weight, "sum", 0, group_name),
            }
            operator = ops.matmul_reduce_scatter
        for description in DESCRIPTIONS[self.op]:
            parts[description.label()] = lambda chosen=description: operator(left, weight, schedule=chosen)
        parts["picked"] = lambda: operator(left, weight)
        return parts


def _random(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)


def _difference(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest difference, relative to the reference's largest element."""
    return ((result.float() - reference.float()).abs().max() / reference.float().abs().max()).item()


def check(calls: dict[str, Call]) -> tuple[dict[str, float], dict[str, Call]]:
    """Differences from sequential by name, of those that run; a call must also give the same bits twice."""
    reference = calls["sequential"]()
    differences: dict[str, float] = {}
    runnable: dict[str, Call] = {}
    for name, call in calls.items():
        try:
            if name not in ("collective", "matmul"):
                first, second = call(), call()
                differences[name] = _difference(first, reference)
                if not torch.equal(first, second) and name != "peer":
                    log(f"   {name}: two runs differ")
                    differences[name] = math.inf
                del first, second
            torch.cuda.synchronize()
            runnable[name] = call
        except Exception as problem:
            log(f"   {name} left out: {cause_of(problem, 200)}")
    return differences, runnable


def run_case(op: str, shape: Shape, num_rounds: int) -> dict[str, object]:
    case = Case(op, shape, seed=17)
    differences, calls = check(case.calls())
    timed = time_interleaved(calls, num_rounds)
    picked = next(
        (each for each in ops.explain() if each.request.startswith(_operation(op)) and " with " not in each.request), None
    )
    ideal_us = max(timed["collective"].median_us, timed["matmul"].median_us)
    result = {
        "op": op,
        "shape": shape._asdict(),
        "sizes_m_n_k": case.sizes,
        "held_out": shape.name in HELD_OUT,
        "ideal_us": round(ideal_us, 2),
        "picked": picked.schedule.label() if picked else "",
        "picked_because": picked.reason if picked else "",
        "candidates": {name: timing.as_dict() for name, timing in timed.items()},
        "differences": {name: round(value, 6) for name, value in differences.items()},
    }
    _print_row(op, shape, timed, (ideal_us, str(result["picked"]), max(differences.values())))
    ops.release()
    return result


def _operation(op: str) -> str:
    return "all_gather_matmul" if op == "ag_mm" else "matmul_reduce_scatter"


def best_of(op: str, timed: dict[str, Timed]) -> str:
    labels = [description.label() for description in DESCRIPTIONS[op] if description.label() in timed]
    return min(labels, key=lambda label: timed[label].median_us)


def _print_row(op: str, shape: Shape, timed: dict[str, Timed], rest: tuple[float, str, float]) -> None:
    ideal_us, picked, difference = rest
    best = best_of(op, timed)
    peer = timed.get("peer")
    cells = [f"{op:6}{shape.name:16}", f"coll {timed['collective'].median_us:7.0f} mm {timed['matmul'].median_us:7.0f}"]
    cells.append(f"seq {timed['sequential'].median_us:7.0f}")
    cells.append(f"peer {peer.median_us:7.0f} (+-{100 * peer.spread:.1f}%)" if peer else "peer -")
    cells.append(f"best {timed[best].median_us:7.0f} (+-{100 * timed[best].spread:.1f}%) {best:22}")
    cells.append(f"picked {timed['picked'].median_us:7.0f} {picked:22}")
    cells.append(
        f"of ideal {timed[best].median_us / ideal_us:.3f} host {timed['picked'].host_us:.0f} us diff {difference:.4f}"
    )
    log(" | ".join(cells))
    others = sorted(((timing.median_us, name) for name, timing in timed.items() if "/" in name))
    log("         " + ", ".join(f"{name} {time_us:.0f}" for time_us, name in others))


def summarize(results: list[dict]) -> None:
    """Geometric means of ratios, and how often the pick is the best."""
    for op in DESCRIPTIONS:
        of_op = [result for result in results if result["op"] == op]
        if not of_op:
            continue
        ratios: dict[str, list[float]] = {
            "peer / best": [],
            "peer / picked": [],
            "sequential / best": [],
            "best / ideal": [],
        }
        regrets: list[float] = []
        for result in of_op:
            times = {name: entry["median_us"] for name, entry in result["candidates"].items()}
            choices = {name: value for name, value in times.items() if "/" in name or name == "sequential"}
            best = min(choices.values())
            if "peer" in times:
                ratios["peer / best"].append(times["peer"] / best)
                ratios["peer / picked"].append(times["peer"] / times["picked"])
            ratios["sequential / best"].append(times["sequential"] / best)
            ratios["best / ideal"].append(best / result["ideal_us"])
            chosen = choices.get(result["picked"], times["picked"])
            regrets.append(chosen / best - 1)
        regret = 100 * sum(regrets) / len(regrets)
        means = ", ".join(f"{name} {_geometric_mean(values):.3f}" for name, values in ratios.items() if values)
        log(f"{op}: {len(of_op)} shapes; geometric means: {means}")
        near = " and ".join(f"{100 * share:g} % in {sum(each <= share for each in regrets)}" for share in (0.005, 0.01))
        log(f"{op}: the pick is within {near} of {len(of_op)} of the best, mean regret {regret:.1f} %")


def _geometric_mean(values: list[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", default="ag_mm,mm_rs")
    parser.add_argument("--shapes", default="all")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--limit-s", type=int, default=280)
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    join(arguments.limit_s)
    assert symmetric_memory is not None
    results: list[dict] = []
    for shape in shapes_named(arguments.shapes):
        for op in arguments.ops.split(","):
            try:
                results.append(run_case(op, shape, arguments.rounds))
            except Exception as problem:
                traceback.print_exc()
                log(f"{op} {shape.name} left out: {cause_of(problem, 200)}")
            save(arguments.output, results)
    if dist.get_rank() == 0:
        summarize(results)


if __name__ == "__main__":
    run_and_leave(main)
