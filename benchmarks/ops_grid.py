"""The operators on GPUs against NCCL and PyTorch's fused operators, over layers and the FiCCO paper's GEMMs; results are
checked.

torchrun --nproc-per-node 4 -m benchmarks.ops_grid --ops ag_mm,mm_rs --shapes all -o results.json
torchrun --nproc-per-node 2 -m benchmarks.ops_grid --shapes gemms --only-candidates --budget-s 3 -o gemms.json

Per shape: the collective alone, the matmul alone, both in turn (sequential), PyTorch's fused operator (peer), every
description of a small set (`--only-candidates`: of what the heuristic picks from), and what the heuristic picks. Ideal is
max(collective, matmul). A shape that fails prints one line and is left out. Shapes that the output file holds already are
not measured again, so a grid goes on where it was cut off: `--shapes g10,g12,g13` adds three to the others. With
`--budget-s` as many rounds are run as fit into so many seconds for a shape, 3 at least; calls of over 20 ms are warmed up
less, and of over 250 ms not, as the host's part in them is small. With `--block-ms`, calls of over 3 ms run several
times in a row, for about so long: the power limit acts on them, and single ones differ by several percent.
"""

import argparse
import gc
import math
import time
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from benchmarks.on_gpus import join_with_options, largest, log, run_and_leave, save, stored
from benchmarks.ops_shapes import HELD_OUT, AnyShape, shapes_named
from benchmarks.ops_timing import Timed, time_interleaved
from counterpoint import ops
from counterpoint.errors import cause_of
from counterpoint.ops.call_timer import WARM_UP_ROUNDS
from counterpoint.ops.collectives import library_all_gather, library_reduce_scatter
from counterpoint.ops.runtime import runtime_of_group
from counterpoint.schedule import Problem, ScheduleDescription
from counterpoint.schedule.heuristic import GATHERING, REDUCING, candidate_descriptions, pick_schedule

D = ScheduleDescription
OPERATIONS = {"ag_mm": "all_gather_matmul", "mm_rs": "matmul_reduce_scatter"}
DESCRIPTIONS = {  # what the heuristic picks from, and more
    "ag_mm": (
        *GATHERING,
        D(pattern="all_peers", chunks=2),
        D(pattern="all_peers", chunks=4, matmul="fused"),
        D(pattern="all_peers", chunks=2, num_copy_streams=3),
        D(pattern="ring", chunks=2),
        D(pattern="one_peer", chunks=3, chunk_growth=2.0),
        D(pattern="one_peer", chunks=3, chunk_growth=0.5),
        D(pattern="one_peer", chunks=2, along="inner"),
    ),
    "mm_rs": (
        *REDUCING,
        D(pattern="one_peer", chunks=1),
        D(pattern="one_peer", chunks=1, num_compute_streams=1),
        D(pattern="one_peer", chunks=2, matmul="peer"),
        D(pattern="ring", chunks=1),
        D(pattern="ring", chunks=4, num_compute_streams=1),
        D(pattern="ring", chunks=3, chunk_growth=0.5),
        D(pattern="one_peer", chunks=3, chunk_growth=0.5),
        D(pattern="ring", chunks=2, along="columns"),
        D(pattern="all_peers", chunks=2, along="columns"),
    ),
}
Call = Callable[[], object]
COMPARED_ROWS = 4096  # of a result, spread over it: a second whole result has no room beside the largest
LONG_CALL_S, LONGEST_WARM_CALL_S = 0.02, 0.25  # a call's host time is less than 1 ms
WARM_UPS_OF_LONG_CALLS = 1  # after two that are compared: a call is recorded when it comes for the third time
LEAST_ROUNDS, MOST_ROUNDS = 3, 40
LIMITED_CALL_S = 0.003  # the power limit acts on longer ones


class Case:
    """One operator on one shape: its calls by name, and what they must give."""

    def __init__(self, op: str, shape: AnyShape, seed: int) -> None:
        self.op, self.shape = op, shape
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        self.sizes = rows, columns, inner = shape.sizes(op, num_ranks)
        torch.manual_seed(seed + rank)
        self.weight = _random(inner, columns).div_(math.sqrt(inner))
        if op == "ag_mm":
            self.left = _random(rows // num_ranks, inner)
            self.whole = _random(rows, inner)
        else:
            self.left = _random(rows, inner)
            self.whole = _random(rows, columns)
            self.part = self.whole[: rows // num_ranks].clone()

    def calls(self, descriptions: Sequence[ScheduleDescription], *, is_picked_timed: bool) -> dict[str, Call]:
        """All calls by name; `is_picked_timed`: once more as operators pick."""
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
        for description in descriptions:
            parts[description.label()] = lambda chosen=description: operator(left, weight, schedule=chosen)
        if is_picked_timed:
            parts["picked"] = lambda: operator(left, weight)
        return parts


def _random(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)


def _sample_of(call: Call) -> torch.Tensor:
    """Rows spread over a call's result; of the lone collective, which returns none, nothing."""
    result = call()
    if not isinstance(result, torch.Tensor):
        return torch.empty(0)
    return result[:: max(1, result.shape[0] // COMPARED_ROWS)].clone()


def _difference(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest difference, relative to the reference's largest element."""
    return ((result.float() - reference.float()).abs().max() / reference.float().abs().max()).item()


class Checked(NamedTuple):
    """Calls that run, their differences from sequential, and how long a round of all of them takes."""

    calls: dict[str, Call]
    differences: dict[str, float]
    round_s: float
    longest_s: float


def check(calls: dict[str, Call]) -> Checked:
    """Compare each result with that of sequential; a call must also give the same bits twice."""
    reference = _sample_of(calls["sequential"])
    differences: dict[str, float] = {}
    runnable: dict[str, Call] = {}
    took_s: list[float] = []
    for name, call in calls.items():
        try:
            first = _sample_of(call)
            torch.cuda.synchronize()
            began = time.perf_counter()
            second = _sample_of(call)
            torch.cuda.synchronize()
            took_s.append(time.perf_counter() - began)
            if name not in ("collective", "matmul"):
                differences[name] = _difference(first, reference)
                if not torch.equal(first, second) and name != "peer":
                    log(f"   {name}: two runs differ")
                    differences[name] = math.inf
            runnable[name] = call
        except Exception as problem:
            log(f"   {name} left out: {cause_of(problem, 200)}")
    round_s, longest_s = largest([sum(took_s), max(took_s)])
    return Checked(runnable, differences, round_s, longest_s)


def num_rounds_of(checked: Checked, num_rounds: int, budget_s: float | None) -> tuple[int, int]:
    """(rounds, warm-ups before them), the same on all ranks."""
    num_warm_ups = WARM_UPS_OF_LONG_CALLS if checked.longest_s > LONG_CALL_S else WARM_UP_ROUNDS
    if checked.longest_s > LONGEST_WARM_CALL_S:
        num_warm_ups = 0
    if budget_s is None:
        return num_rounds, num_warm_ups
    return min(MOST_ROUNDS, max(LEAST_ROUNDS, int(budget_s / checked.round_s))), num_warm_ups


def run_case(op: str, shape: AnyShape, arguments: argparse.Namespace) -> dict[str, object]:
    case = Case(op, shape, seed=17)
    problem, machine = _problem(op, case.sizes), runtime_of_group(None).machine
    descriptions = candidate_descriptions(problem, machine) if arguments.only_candidates else DESCRIPTIONS[op]
    checked = check(case.calls(descriptions, is_picked_timed=not arguments.only_candidates))
    in_a_row = 1
    if arguments.block_ms and checked.longest_s > LIMITED_CALL_S:
        in_a_row = max(1, round(arguments.block_ms / 1000 * len(checked.calls) / checked.round_s))
    row = checked._replace(round_s=in_a_row * checked.round_s)
    num_rounds, num_warm_ups = num_rounds_of(row, arguments.rounds, arguments.budget_s)
    timed = time_interleaved(checked.calls, num_rounds, -(-num_warm_ups // in_a_row), in_a_row)
    picked = pick_schedule(problem, machine)  # what the operators pick for this call
    ideal_us = max(timed["collective"].median_us, timed["matmul"].median_us)
    result = {
        "op": op,
        "shape": shape._asdict(),
        "sizes_m_n_k": case.sizes,
        "held_out": shape.name in HELD_OUT,
        "rounds": num_rounds,
        "in_a_row": in_a_row,
        "ideal_us": round(ideal_us, 2),
        "picked": picked.description.label(),
        "picked_because": picked.reason,
        "candidates": {name: timing.as_dict() for name, timing in timed.items()},
        "differences": {name: round(value, 6) for name, value in checked.differences.items()},
    }
    _print_row(op, shape, timed, (ideal_us, picked.description.label(), max(checked.differences.values())))
    return result


def _problem(op: str, sizes: tuple[int, int, int]) -> Problem:
    num_rows, num_columns, num_inner = sizes
    return Problem(
        operation=OPERATIONS[op],
        num_ranks=dist.get_world_size(),
        num_rows=num_rows,
        num_columns=num_columns,
        num_inner=num_inner,
    )


def best_of(timed: dict[str, Timed]) -> str:
    return min((label for label in timed if "/" in label or label == "sequential"), key=lambda label: timed[label].median_us)


def _print_row(op: str, shape: AnyShape, timed: dict[str, Timed], rest: tuple[float, str, float]) -> None:
    ideal_us, picked, difference = rest
    best = best_of(timed)
    peer = timed.get("peer")
    cells = [f"{op:6}{shape.name:16}", f"coll {timed['collective'].median_us:7.0f} mm {timed['matmul'].median_us:7.0f}"]
    cells.append(f"seq {timed['sequential'].median_us:7.0f}")
    cells.append(f"peer {peer.median_us:7.0f} (+-{100 * peer.spread:.1f}%)" if peer else "peer -")
    cells.append(f"best {timed[best].median_us:7.0f} (+-{100 * timed[best].spread:.1f}%) {best:22}")
    as_picked = timed.get("picked", timed.get(picked, timed["sequential"]))
    cells.append(f"picked {as_picked.median_us:7.0f} {picked:22}")
    cells.append(f"of ideal {timed[best].median_us / ideal_us:.3f} host {as_picked.host_us:.0f} us diff {difference:.4f}")
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
            chosen = choices.get(result["picked"], times.get("picked", times["sequential"]))
            if "peer" in times:
                ratios["peer / best"].append(times["peer"] / best)
                ratios["peer / picked"].append(times["peer"] / times.get("picked", chosen))
            ratios["sequential / best"].append(times["sequential"] / best)
            ratios["best / ideal"].append(best / result["ideal_us"])
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
    parser.add_argument("--budget-s", type=float, help="rounds as many as fit into so many seconds for a shape")
    parser.add_argument("--block-ms", type=float, default=0.0, help="run calls of over 3 ms in a row, for so long")
    parser.add_argument("--only-candidates", action="store_true", help="time only what the heuristic picks from")
    parser.add_argument("--stop-after-s", type=float, default=math.inf, help="begin no further shape after so long")
    arguments = join_with_options(parser, limit_s=280, rounds=9)
    assert symmetric_memory is not None
    results, known = stored(arguments.output)
    done = {(result["op"], result["shape"]["name"]) for result in results}
    began = time.perf_counter()
    for shape in shapes_named(arguments.shapes):
        if largest([time.perf_counter() - began])[0] > arguments.stop_after_s:
            log(f"stopped before {shape.name}")
            break
        for op in arguments.ops.split(","):
            if (op, shape.name) in done:
                log(f"{op} {shape.name}: in {arguments.output} already")
                continue
            try:
                results.append(run_case(op, shape, arguments))
            except Exception as problem:
                traceback.print_exc()
                log(f"{op} {shape.name} left out: {cause_of(problem, 200)}")
            save(arguments.output, results, **known)
            ops.release()
            gc.collect()
            torch.cuda.empty_cache()
    if dist.get_rank() == 0:
        summarize(results)


if __name__ == "__main__":
    run_and_leave(main)
