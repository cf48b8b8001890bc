"""Ranks on GPUs that run operators, choose their schedules by measurement, and go by the plan; prints `tuned: ok`."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from counterpoint import ops
from counterpoint.cuda.ranks import join_ranks, run_and_leave
from counterpoint.ops.call_timer import AbstractCallTimer, open_call_timer
from counterpoint.planner.operators_on_gpu import measure_operators

ROWS, INNER, COLUMNS = 8192, 4096, 3584


class Watched(AbstractCallTimer):
    """The timer of GPUs, and how many recordings there were at each call."""

    def __init__(self, timer: AbstractCallTimer) -> None:
        self._timer = timer
        self.recordings: dict[str, set[int]] = {}

    @property
    def num_warm_up_rounds(self) -> int:
        return self._timer.num_warm_up_rounds

    def time_us(self, label: str, call: Callable[[], None]) -> float:
        time_us = self._timer.time_us(label, call)
        name = label.rpartition(" by ")[0]
        self.recordings.setdefault(name, set()).add(sum(each.num_recordings for each in ops.pool_report()))
        return time_us


def step() -> list[torch.Tensor]:
    """Every operator forward and backward on the same numbers; products and gradients."""
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator(device="cuda").manual_seed(1 + rank)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator, device="cuda").div_(8).bfloat16().requires_grad_()

    found = []
    for operator, rows in (
        (ops.all_gather_matmul, ROWS // size),
        (ops.matmul_reduce_scatter, ROWS),
        (ops.matmul_all_reduce, ROWS),
        (ops.all_to_all_matmul, ROWS),
    ):
        left, weight = matrix(rows, INNER), matrix(COLUMNS, INNER)
        product = operator(left, weight.t())
        product.backward(torch.ones_like(product))
        found += [product.detach(), left.grad, weight.grad]
    return found


def tuned() -> None:
    """Calls are measured as they are replayed, the plan is in force, results stay, and memory is given back."""
    before = step()
    taken = [(each.num_bytes, each.num_schedules) for each in ops.pool_report()]
    (runtime,) = ops.all_runtimes()
    timer = Watched(open_call_timer(runtime))
    found = measure_operators(timer=timer)
    assert [(each.num_bytes, each.num_schedules) for each in ops.pool_report()] == taken
    assert all(len(counts) == 1 for counts in timer.recordings.values()), f"recorded while timed: {timer.recordings}"
    assert ops.use_plan(found.plan) == ()
    after = step()
    assert all(each.reason.startswith("measured: ") for each in ops.explain())
    for one, other in zip(before, after, strict=True):
        assert torch.allclose(one.float(), other.float(), atol=0.02 * float(one.abs().max()) * dist.get_world_size(), rtol=0)
    if dist.get_rank() == 0:
        for directive in found.plan.directives:
            print(directive.match.name, directive.reason, sep="\n    ", flush=True)
        print(found.plan.verdict, found.plan.summary, flush=True)
        print("tuned: ok", flush=True)


def main() -> None:
    join_ranks()
    tuned()


if __name__ == "__main__":
    run_and_leave(main)
