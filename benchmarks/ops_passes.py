"""What ops_grid.py leaves out, timed on GPUs: backward passes, matmul + all-reduce and all-to-all + matmul.

torchrun --nproc-per-node 2 -m benchmarks.ops_passes -o passes.json
torchrun --nproc-per-node 2 -m benchmarks.ops_passes --both-sets -o passes.json

Per pass and layer: sequential (the library's collectives and the matmuls), and every candidate of the heuristic, on operands
that stay where they are, so that calls are recorded as in a training step. `--both-sets` times the candidates of gathers and
of reductions in every pass that can run them. Results are compared with those of sequential.
PyTorch has no fused operator for these.
"""

import argparse
import contextlib
import statistics
from contextlib import closing

import torch
import torch.distributed as dist

from benchmarks.on_gpus import join_with_options, log, run_and_leave, save, shared_rounds
from benchmarks.ops_shapes import Shape, shapes_named
from counterpoint.errors import ScheduleError
from counterpoint.measurement.values import half_width
from counterpoint.ops.call_timer import open_call_timer
from counterpoint.ops.runtime import Runtime, runtime_of_group
from counterpoint.ops.schedule_benchmark import ScheduleBenchmark, request_for
from counterpoint.schedule import SEQUENTIAL, Problem, ScheduleDescription, backward_description, make_schedule
from counterpoint.schedule.actions import Operation, Pass
from counterpoint.schedule.heuristic import GATHERING, REDUCING, pick_schedule, rank_candidates

PASSES: tuple[tuple[Operation, Pass], ...] = (
    ("all_gather_matmul", "backward"),
    ("matmul_reduce_scatter", "backward"),
    ("matmul_all_reduce", "forward"),
    ("column_parallel_matmul", "backward"),
    ("all_to_all_matmul", "forward"),
    ("all_to_all_matmul", "backward"),
)
WARM_UPS = 6  # operands stay, so a call is recorded the third time


def problem_of(operation: Operation, shape: Shape) -> Problem:
    """Column-parallel where rows come to the matmul, row-parallel where products leave it; tokens of one rank for an
    all-to-all."""
    num_ranks = dist.get_world_size()
    local = shape.wide // num_ranks
    is_reduced = operation in ("matmul_reduce_scatter", "matmul_all_reduce")
    return Problem(
        operation=operation,
        num_ranks=num_ranks,
        num_rows=shape.tokens,
        num_inner=local if is_reduced else shape.hidden,
        num_columns=shape.hidden if is_reduced else local,
    )


def both_sets(problem: Problem, direction: Pass) -> list[ScheduleDescription]:
    """What a pass can run of the candidates of gathers and of reductions."""
    descriptions = (*GATHERING, *REDUCING)
    if direction == "backward":
        descriptions = tuple(backward_description(problem.operation, each) for each in descriptions)
    found = []
    for description in dict.fromkeys(descriptions):
        with contextlib.suppress(ScheduleError):
            make_schedule(problem, description, direction)
            found.append(description)
    return found


def run_case(runtime: Runtime, problem: Problem, direction: Pass, arguments: argparse.Namespace) -> dict[str, object]:
    """Times of all candidates in turns."""
    ranked = rank_candidates(problem, runtime.machine, direction)
    timed = both_sets(problem, direction) if arguments.both_sets else [each.description for each in ranked]
    descriptions = (SEQUENTIAL, *timed)
    labels = [description.label() for description in descriptions]
    timer, rounds = open_call_timer(runtime), shared_rounds(len(labels))
    times: dict[str, list[float]] = {label: [] for label in labels}
    with closing(ScheduleBenchmark(runtime, request_for(problem, direction, "bf16"), descriptions)) as benchmark:
        benchmark.require_right()
        for number in range(WARM_UPS + arguments.rounds):
            for place in rounds.order(number):
                if number < WARM_UPS:
                    benchmark.warm_up([place])
                else:
                    times[labels[place]].append(benchmark.time_us(place, timer))
    return {
        "operation": problem.operation,
        "direction": direction,
        "sizes_m_n_k": [problem.num_rows, problem.num_columns, problem.num_inner],
        "picked": pick_schedule(problem, runtime.machine, direction).description.label(),
        "estimated_us": {each.description.label(): round(each.estimated_us, 1) for each in ranked},
        "candidates": {label: _summary(row) for label, row in times.items()},
    }


def _summary(times_us: list[float]) -> dict[str, float]:
    median_us = statistics.median(times_us)
    return {"median_us": round(median_us, 2), "spread": round(half_width(times_us) / median_us, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="8b-up-8k,70b-qkv-8k,405b-qkv-4k")
    parser.add_argument("--operations", default="", help="names of operators, comma-separated; all if empty")
    parser.add_argument(
        "--both-sets", action="store_true", help="time candidates of gathers and of reductions in every pass"
    )
    arguments = join_with_options(parser, limit_s=120, rounds=12)
    runtime = runtime_of_group(None)
    results = []
    for shape in shapes_named(arguments.shapes):
        assert isinstance(shape, Shape), "a layer"
        for operation, direction in PASSES:
            if arguments.operations and operation not in arguments.operations.split(","):
                continue
            found = run_case(runtime, problem_of(operation, shape), direction, arguments)
            results.append({"shape": shape.name, **found})
            save(arguments.output, results)
            cells = [f"{label} {each['median_us']:.0f}" for label, each in found["candidates"].items()]  # type: ignore[attr-defined]
            log(f"{operation} {direction} {shape.name}, picked {found['picked']}:", ", ".join(cells))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    run_and_leave(main)
