"""How close estimates of experts' operators are to the stored times of `benchmarks.expert_layers`, on 2 and 4 GPUs.

    python -m benchmarks.expert_accuracy

Needs no GPU, and torch to draw the same routings. The estimate of a schedule begins where the host knows the counts of rows
and leaves out the host. A measured dispatch also has the exchange of counts, and the host, which waits for them. A
measured combine has neither wait.
"""

import statistics
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from benchmarks.expert_shapes import ExpertShape, counts_of
from benchmarks.heuristic_cases import MACHINE, stored_entries
from counterpoint.schedule.actions import ExpertOperation
from counterpoint.schedule.expert_choice import expert_description
from counterpoint.schedule.expert_estimate import (
    estimate_experts,
    estimate_experts_sequential,
    expert_communication_us,
    expert_computation_us,
)
from counterpoint.schedule.expert_schedules import ExpertProblem, make_expert_schedule
from counterpoint.schedule.routing import Routing

STORED = {2: "experts_2x_h200_fetched.json", 4: "experts_4x_h200.json"}  # by number of ranks
OPERATIONS: Mapping[str, ExpertOperation] = {"dispatch": "dispatch_grouped_matmul", "combine": "grouped_matmul_combine"}
NUM_GROUPS = (1, 2, 4)
FEW_TOKENS = 2048  # up to which the host's time is much of a dispatch


def estimates_us(entry: Mapping[str, Any], num_ranks: int) -> dict[str, float]:
    """The estimated times of an entry's variants, by their names."""
    shape = ExpertShape(**entry["shape"])
    routing = Routing(counts=tuple(map(tuple, counts_of(shape, entry["routing"], num_ranks))))
    problem = ExpertProblem(
        operation=OPERATIONS[entry["operation"]], routing=routing, num_inner=shape.dim, num_hidden=shape.hidden
    )
    found = {
        "matmul": expert_computation_us(problem, MACHINE),
        "nccl": expert_communication_us(problem, MACHINE),
        "library": estimate_experts_sequential(problem, MACHINE),
    }
    for number in NUM_GROUPS:
        schedule = make_expert_schedule(problem, expert_description(number))
        found[f"copies {number}"] = estimate_experts(schedule, problem, MACHINE).makespan_us
    return found


def errors(num_ranks: int) -> dict[tuple[str, str, str], list[float]]:
    """Errors by operation, tokens and variant, as shares of what was measured."""
    found = defaultdict[tuple[str, str, str], list[float]](list)
    for entry in stored_entries(STORED[num_ranks]):
        if entry["operation"] in OPERATIONS:
            tokens = "few tokens" if entry["shape"]["tokens"] <= FEW_TOKENS else "many tokens"
            for name, estimated_us in estimates_us(entry, num_ranks).items():
                error = estimated_us / entry["variants"][name]["median_us"] - 1
                found[entry["operation"], tokens, name].append(error)
    return found


def main() -> None:
    """Print the mean and the worst error of each part."""
    for num_ranks in STORED:
        print(f"{num_ranks} GPUs")
        for (operation, tokens, name), each in sorted(errors(num_ranks).items()):
            sizes = [abs(error) for error in each]
            mean, worst, bias = (f"{value:.1%}" for value in (statistics.mean(sizes), max(sizes), statistics.mean(each)))
            about = f"{operation:9}{tokens:12} {name:9} {len(each):3} cases"
            print(f"{about}: {mean} off in the mean, {worst} at worst; bias {bias}")


if __name__ == "__main__":
    main()
