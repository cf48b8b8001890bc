"""A benchmark of one operator call on its own operands, in which several schedules take turns to be timed and compared.

Operands are random and keep their addresses, so calls are recorded as in a training step. Weights have the layout of
`torch.nn.Linear`'s, of which operators get the transpose. All memory is freed at the end. This module does not choose a
schedule.
"""

import math
from collections.abc import Sequence
from typing import final

import torch
import torch.distributed as dist

from counterpoint.errors import OperatorError, cause_of
from counterpoint.ops.call_timer import AbstractCallTimer
from counterpoint.ops.graph_cache import refuse_in_capture
from counterpoint.ops.operators import PASSES
from counterpoint.ops.runtime import Request, Runtime
from counterpoint.ops.transport import AbstractCompiledSchedule
from counterpoint.schedule import Problem, ScheduleDescription, split
from counterpoint.schedule.actions import DataType, Pass
from counterpoint.schedule.operations import OPERATORS, scheduled_pass

SEED = 17
ROUNDINGS = 2  # error of results in their type, from each rank
SUM_ROUNDINGS = 32  # error of the sums within a matmul, from each rank
Shape = tuple[int, int]


@final
class ScheduleBenchmark:
    """A request and the schedules that take turns at it; the first is `sequential`, whose results are the reference.

    All ranks of the group create and call it in the same way. Raises `OperatorError` on every rank if one cannot allocate
    the operands, `ScheduleError` for a schedule that does not fit.
    """

    def __init__(self, runtime: Runtime, request: Request, descriptions: Sequence[ScheduleDescription]) -> None:
        self._runtime, self._request = runtime, request
        self.name = request.name(runtime.group.size())
        assert descriptions[0].is_sequential, "the first schedule must be sequential"
        self.descriptions = tuple(descriptions)
        self._prepared: list[AbstractCompiledSchedule] = []
        refuse_in_capture(f"Measuring {self.name}", runtime.device)
        labels = ", ".join(description.label() for description in self.descriptions)
        self._runtime.propose(f"measuring {self.name} by {labels}", self._take_operands())
        sequential = next(each.sequential for each in PASSES if each[:2] == (request.operation, request.direction))
        try:
            for description in self.descriptions:
                self._prepared.append(runtime.prepare(request, description, sequential))
        except BaseException:
            self.close()
            raise

    def warm_up(self, order: Sequence[int]) -> None:
        """Run every schedule of `order` once."""
        for number in order:
            self._run(number)

    def time_us(self, number: int, timer: AbstractCallTimer) -> float:
        """Run a schedule once; return microseconds on the slowest rank, the same on all ranks."""
        label = self.descriptions[number].label()
        own_us = timer.time_us(f"{self.name} by {label}", lambda: self._run(number))
        return self._largest(own_us)

    def require_right(self) -> None:
        """Raise `OperatorError` on every rank if a schedule's results differ from those of `sequential` by more than
        rounding.
        """
        self._run(0)
        wanted = [result.clone() for result in self._results]
        for number, description in enumerate(self.descriptions):
            for result in self._results:
                result.fill_(math.nan)
            self._run(number)
            difference = self._largest(max(map(_difference, self._results, wanted)))
            if difference > self._tolerance():
                raise OperatorError(
                    f"{description.label()} gives wrong results for {self.name}: they differ from sequential by "
                    f"{difference:.3g} of the largest element, and rounding explains {self._tolerance():.3g}. "
                    "Do not use it, and report this."
                )

    def close(self) -> None:
        """Free all memory, on all ranks together."""
        self._runtime.forget(self._prepared)
        self._prepared.clear()
        self._tensors.clear()
        self._results.clear()
        del self._weight

    def _run(self, number: int) -> None:
        self._prepared[number].run(self._tensors, (self._weight,))

    def _take_operands(self) -> str:
        """Create operands and results; return why that is impossible, or nothing."""
        self._tensors: dict[str, torch.Tensor] = {}
        self._results: list[torch.Tensor] = []
        request, device = self._request, self._runtime.device
        if not request.dtype.is_floating_point:
            return f"measuring draws random numbers, of floating-point types only; found {request.dtype}. Leave it out."
        if OPERATORS[request.operation].of_pass(request.direction) is None:
            return (
                f"{request.operation} copies nothing in its {request.direction} pass, so there is nothing to measure. "
                "Leave it out."
            )
        generator = torch.Generator(device).manual_seed(SEED + self._runtime.group.rank())
        given, results = _shapes(request, self._runtime.group.size(), self._runtime.group.rank())
        try:
            for name, shape in given.items():
                self._tensors[name] = torch.randn(shape, generator=generator, device=device).to(request.dtype)
            for name, shape in results.items():
                self._tensors[name] = torch.empty(shape, dtype=request.dtype, device=device)
            if "weight_gradient" in results:  # has the layout of its weight
                num_inner, num_columns = results["weight_gradient"]
                self._tensors["weight_gradient"] = self._tensors["weight_gradient"].view(num_columns, num_inner).t()
            weight = torch.randn(request.num_columns, request.num_inner, generator=generator, device=device)
            linear = weight.mul_(request.num_inner**-0.5).to(request.dtype)
        except RuntimeError as problem:  # among them torch.OutOfMemoryError
            return f"operands of {self.name} cannot be allocated ({cause_of(problem, 160)}). Free memory."
        self._results = [self._tensors[name] for name in results]
        self._weight = linear.t() if request.direction == "forward" else linear
        return ""

    def _largest(self, value: float) -> float:
        """Return the largest value of all ranks, on every rank."""
        shared = torch.tensor([value], dtype=torch.float64, device=self._runtime.device)
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=self._runtime.group)
        return float(shared.item())

    def _tolerance(self) -> float:
        own = torch.finfo(self._request.dtype).eps
        of_sums = min(own, torch.finfo(torch.float32).eps)  # half-precision types are summed in single precision
        return float(self._runtime.group.size() * (ROUNDINGS * own + SUM_ROUNDINGS * of_sums))


def request_for(problem: Problem, direction: Pass, data_type: DataType) -> Request:
    """Return the request for these sizes in a type by its short name. Raises `OperatorError` for fp8, which torch.mm
    lacks.
    """
    types = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
    if data_type not in types:
        raise OperatorError(
            f"Operators multiply by torch.mm, which does not support {data_type}. Measure one of {', '.join(types)}."
        )
    return Request(
        operation=problem.operation,
        direction=direction,
        num_rows=problem.num_rows,
        num_inner=problem.num_inner,
        num_columns=problem.num_columns,
        dtype=types[data_type],
    )


def _shapes(request: Request, num_ranks: int, rank: int) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Return shapes of the given buffers and of the results, by name, as the operators create them."""
    start, stop = split(request.num_rows, num_ranks)[rank]
    problem = request.problem(num_ranks)
    given, results = (
        {
            buffer.name: buffer.shape(problem, stop - start)
            for buffer in scheduled_pass(request.operation, request.direction).buffers
            if buffer.home == home
        }
        for home in ("given", "result")
    )
    return given, results


def _difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest element; infinite if something is no number."""
    if not wanted.numel():
        return 0.0
    largest = wanted.abs().max().clamp(min=torch.finfo(wanted.dtype).tiny)
    relative = float((found - wanted).abs().max() / largest)
    return relative if math.isfinite(relative) else math.inf
