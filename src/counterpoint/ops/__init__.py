"""Operators that combine a collective with the matmul after or before it, run by copy schedules.

On NVIDIA GPUs of one host, copies run on copy engines and signals are stream memory operations, so communication takes
no SM. On CPUs the same schedules run as messages. If neither is possible, or if cutting does not pay, the library's
collective runs; `explain` says which, and why. All ranks of a group must call the same operators in the same order.

Needs torch.
"""

from collections.abc import Iterable, Sequence
from typing import overload

import msgspec
import torch
import torch.distributed as dist
from torch.utils import _pytree

from counterpoint.errors import PlanError, ScheduleError
from counterpoint.ops import operators
from counterpoint.ops.arguments import is_dense, refuse_arguments
from counterpoint.ops.expert_routing import ExpertRouting
from counterpoint.ops.experts import dispatch_grouped_matmul, expert_ffn, grouped_matmul_combine
from counterpoint.ops.gated_activation import gated_silu
from counterpoint.ops.plan_in_force import put_in_force
from counterpoint.ops.runtime import Request, Runtime, all_runtimes, forget_runtimes, group_or_world
from counterpoint.plan import Plan, Refusal
from counterpoint.schedule import ScheduleDescription
from counterpoint.schedule.actions import Operation
from counterpoint.value import Value

__all__ = [
    "ExpertRouting",
    "Explanation",
    "PoolReport",
    "Request",
    "all_gather_matmul",
    "all_to_all_matmul",
    "column_parallel_matmul",
    "dispatch_grouped_matmul",
    "expert_ffn",
    "explain",
    "gated_silu",
    "grouped_matmul_combine",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "pool_report",
    "release",
    "use_plan",
]

ROW_TYPES = (int, torch.SymInt)


# torch.compile treats a description as a constant, and compiles again for another one; without this, torch 2.11 rejects
# descriptions
_pytree.register_constant(ScheduleDescription)


def __dir__() -> list[str]:
    return sorted(__all__)


class Explanation(Value, frozen=True, kw_only=True):
    """The schedule that runs for one shape, and why."""

    request: str
    schedule: ScheduleDescription
    reason: str
    name: str  # the name that a plan's directives match


class PoolReport(Value, frozen=True, kw_only=True):
    """The symmetric memory that one group holds on this rank, and the number of its calls that are recorded as CUDA
    graphs.
    """

    group: str
    device: str
    num_bytes: int
    num_schedules: int
    num_recordings: int


@overload
def all_gather_matmul(
    shard: torch.Tensor,
    weight: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    schedule: ScheduleDescription | None = None,
    num_rows: int | None = None,
) -> torch.Tensor: ...


@overload
def all_gather_matmul(  # type: ignore[overload-cannot-match]  # torch is untyped here
    shard: torch.Tensor,
    weight: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    schedule: ScheduleDescription | None = None,
    num_rows: int | None = None,
) -> tuple[torch.Tensor, ...]: ...


def all_gather_matmul(
    shard: torch.Tensor,
    weight: torch.Tensor | Sequence[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    schedule: ScheduleDescription | None = None,
    num_rows: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Gather all ranks' shards, one below the other, and multiply by this rank's weight: (M / W, K), (K, N) -> (M, N).

    Several weights (K, N1), (K, N2) ... give as many products, and rows are gathered once; for plans and the heuristic
    it is one call of N1 + N2 + ... columns. The shard's gradient is then the sum of as many products, each rounded once.
    If one weight needs its gradient, the gradients of all weights are computed.

    `num_rows` is M if M does not divide by W: shards must then be split as by `torch.tensor_split` of M rows. Without
    it, all shards are as long as this one. `schedule` overrides the current plan and the heuristic. Raises
    `OperatorError`.
    """
    name, size = _name_and_size(group)
    if not (is_dense(shard) and shard.dim() and (num_rows is None or isinstance(num_rows, ROW_TYPES))):
        refuse_arguments("all_gather_matmul", shard, weight, group, num_rows)
    rows = num_rows if num_rows is not None else shard.shape[0] * size
    weights = _several("all_gather_matmul", shard, weight, group)
    products = operators.all_gather_matmul(shard, weights, rows, name, _text(schedule))
    return products[0] if isinstance(weight, torch.Tensor) else tuple(products)


def matmul_reduce_scatter(
    activation: torch.Tensor,
    weight: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    schedule: ScheduleDescription | None = None,
) -> torch.Tensor:
    """Multiply and return this rank's block of the sum of all ranks' products: (M, K), (K, N) -> (M / W, N).

    If M does not divide by W, blocks are split as by `torch.tensor_split` of M rows. Raises `OperatorError`.
    """
    name = _name_for("matmul_reduce_scatter", activation, weight, group)
    return operators.matmul_reduce_scatter(activation, weight, name, _text(schedule))


def matmul_all_reduce(
    activation: torch.Tensor,
    weight: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    schedule: ScheduleDescription | None = None,
) -> torch.Tensor:
    """Multiply and return the sum of all ranks' products: (M, K), (K, N) -> (M, N), with the same bits on every rank.

    Backward assumes that the product's gradient is the same on every rank, as in tensor parallelism. Raises
    `OperatorError`.
    """
    name = _name_for("matmul_all_reduce", activation, weight, group)
    return operators.matmul_all_reduce(activation, weight, name, _text(schedule))


@overload
def column_parallel_matmul(
    activation: torch.Tensor,
    weight: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    schedule: ScheduleDescription | None = None,
) -> torch.Tensor: ...


@overload
def column_parallel_matmul(  # type: ignore[overload-cannot-match]  # torch is untyped here
    activation: torch.Tensor,
    weight: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    schedule: ScheduleDescription | None = None,
) -> tuple[torch.Tensor, ...]: ...


def column_parallel_matmul(
    activation: torch.Tensor,
    weight: torch.Tensor | Sequence[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    schedule: ScheduleDescription | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Multiply an activation that is whole on every rank by this rank's weight: (M, K), (K, N) -> (M, N).

    Nothing is sent in forward. In backward the activation's gradient is summed over all ranks, beside the matmul of the
    weight's gradient. Several weights (K, N1), (K, N2) ... give as many products, and the gradient is summed once; if one
    weight needs its gradient, the gradients of all weights are computed. `schedule` is that of the backward pass. Raises
    `OperatorError`.
    """
    name, _ = _name_and_size(group)
    if not (is_dense(activation) and activation.dim()):
        refuse_arguments("column_parallel_matmul", activation, weight, group)
    weights = _several("column_parallel_matmul", activation, weight, group)
    products = operators.column_parallel_matmul(activation, weights, name, _text(schedule))
    return products[0] if isinstance(weight, torch.Tensor) else tuple(products)


def all_to_all_matmul(
    tokens: torch.Tensor,
    weight: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    schedule: ScheduleDescription | None = None,
) -> torch.Tensor:
    """Exchange blocks of tokens and multiply: block r of every rank's tokens, in the order of ranks, times this rank's
    weight: (M, K), (K, N) -> (W * M / W, N).

    Blocks are split as by `torch.tensor_split` of M rows, so rank r gets W blocks of equal length. Raises
    `OperatorError`.
    """
    name = _name_for("all_to_all_matmul", tokens, weight, group)
    return operators.all_to_all_matmul(tokens, weight, name, _text(schedule))


def explain(group: dist.ProcessGroup | None = None) -> tuple[Explanation, ...]:
    """Return what was picked for every shape that the group has run so far on this rank, in the order of first calls."""
    return tuple(
        Explanation(
            request=request.words(),
            schedule=plan.pick.description,
            reason=plan.pick.reason,
            name=request.name(runtime.group.size()),
        )
        for runtime in _of_group(group)
        for request, plan in runtime.plans.items()
    )


def use_plan(plan: Plan) -> tuple[Refusal, ...]:
    """Use the schedules that a plan names for requests, from their next calls on; `LEAVE_IT` undoes it.

    A schedule named by a call overrides the plan, and the plan overrides the heuristic. Call it on every rank with the
    same plan: ranks compare at the next call of every shape. Graphs that were captured before keep their schedules.
    Returns the refusals of controls that are not for operators.
    """
    if not isinstance(plan, Plan):
        raise PlanError(
            f"use_plan takes a Plan; found a value of type {type(plan).__name__}. "
            "Read a file by counterpoint.load_plan('plan.toml')."
        )
    refusals = put_in_force(plan).refusals
    for runtime in all_runtimes():
        runtime.pick_anew()
    return refusals


def pool_report() -> tuple[PoolReport, ...]:
    """Return the symmetric memory in use, by group."""
    return tuple(
        PoolReport(
            group=runtime.group.group_name,
            device=str(runtime.device),
            num_bytes=runtime.num_symmetric_bytes(),
            num_schedules=len(runtime.plans),
            num_recordings=runtime.num_recordings(),
        )
        for runtime in all_runtimes()
    )


def release() -> None:
    """Free all symmetric memory and all schedules. Call it on every rank, when no captured graph is needed any
    more.
    """
    forget_runtimes()


def _name_and_size(group: dist.ProcessGroup | None) -> tuple[str, int]:
    found = group_or_world(group)
    return found.group_name, found.size()


def _name_for(operation: Operation, left: object, weight: object, group: dist.ProcessGroup | None) -> str:
    """Return the group's name if the operands are dense tensors; refuse others on every rank."""
    name, _ = _name_and_size(group)
    if not (is_dense(left) and is_dense(weight)):
        refuse_arguments(operation, left, weight, group)
    return name


def _several(operation: Operation, left: object, weight: object, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Return one weight or several as a list of dense tensors; refuse others on every rank."""
    if is_dense(weight):
        return [weight]
    weights = list(weight) if isinstance(weight, Iterable) and not isinstance(weight, torch.Tensor) else []
    if not weights or not all(is_dense(each) for each in weights):
        refuse_arguments(operation, left, weights or weight, group)
    return weights


def _of_group(group: dist.ProcessGroup | None) -> list[Runtime]:
    name = _name_and_size(group)[0]
    return [runtime for runtime in all_runtimes() if runtime.group.group_name == name]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # compiled code is for one schedule
def _text(schedule: ScheduleDescription | None) -> str:
    if schedule is None:
        return ""
    if not isinstance(schedule, ScheduleDescription):
        raise ScheduleError(
            f"schedule takes a ScheduleDescription; found a {type(schedule).__name__}. Make one: "
            'ScheduleDescription(pattern="ring").'
        )
    return msgspec.json.encode(schedule).decode()
