"""Refuses wrong arguments of a call before there is a request: operands that are no dense tensors, and an invalid
number of rows.

The operators check only whether their arguments are dense tensors, because every call pays for the check. This module
words the error, and reports it to the ranks that wait.
"""

from collections.abc import Iterable
from typing import NoReturn

import torch
import torch.distributed as dist

from counterpoint.ops.runtime import Runtime, group_or_world, runtime_of, runtime_of_group
from counterpoint.schedule.actions import Operation
from counterpoint.schedule.operations import OPERATORS


def is_dense(given: object) -> bool:
    """Return whether something is a tensor whose elements lie in memory by strides."""
    return isinstance(given, torch.Tensor) and given.layout == torch.strided


def problem_of_layouts(operator: str, operands: Iterable[object]) -> str:
    """Return which tensor of some operands is not dense, in one line, or nothing."""
    sparse = next((each for each in operands if isinstance(each, torch.Tensor) and not is_dense(each)), None)
    if sparse is None:
        return ""
    return f"{operator} multiplies dense matrices; found one of layout {sparse.layout}. Call to_dense() on it."


def refuse_arguments(
    operation: Operation, left: object, weight: object, group: dist.ProcessGroup | None, num_rows: object = None
) -> NoReturn:
    """Raise `OperatorError` on every rank for arguments of which one has a wrong type or layout."""
    runtime = runtime_for((left, *_several(weight)), group)
    problem = _problem_of(operation, left, weight) or _problem_of_rows(operation, left, num_rows)
    assert problem, "only wrong arguments come here"
    runtime.refuse(problem)


def runtime_for(operands: Iterable[object], group: dist.ProcessGroup | None) -> Runtime:
    """Return the runtime of a call whose operands may be no tensors.

    As elsewhere, one operand on a GPU shows where the other ranks meet; without any, the group's earlier calls do.
    """
    found = group_or_world(group)
    devices = [each.device for each in operands if isinstance(each, torch.Tensor)]
    device = next((each for each in devices if each.type == "cuda"), next(iter(devices), None))
    return runtime_of_group(found) if device is None else runtime_of(found.group_name, device)


def problem_of_pair(operator: str, first: torch.Tensor, second: torch.Tensor) -> str:
    """Return what keeps two operands from being multiplied whatever their sizes, in one line, or nothing."""
    if first.device != second.device:
        return f"{operator} needs its operands on one device; found {first.device} and {second.device}. Move one."
    if first.dtype != second.dtype:
        return f"{operator} needs operands of one type; found {first.dtype} and {second.dtype}. Convert one."
    return ""


def _problem_of(operation: Operation, left: object, weight: object) -> str:
    """Return what is wrong with operands that are no dense tensors, in one line, or nothing."""
    if not isinstance(left, torch.Tensor):
        return f"{operation} takes a tensor as its {OPERATORS[operation].left_name}; {_found(left)}. Pass a tensor."
    problem = problem_of_layouts(operation, (left, *_several(weight)))
    if problem:
        return problem
    if isinstance(weight, torch.Tensor):
        return ""
    if not OPERATORS[operation].takes_several_weights:
        return f"{operation} takes a tensor as its weight; {_found(weight)}. Pass a tensor."
    weights = _several(weight)
    if not weights:
        return f"{operation} needs a weight; found an empty list. Pass one or more."
    number = next((number for number, each in enumerate(weights) if not isinstance(each, torch.Tensor)), None)
    if number is None:
        return ""
    kind = type(weights[number]).__name__
    return f"{operation} takes a tensor or several as its weight; number {number} is of type {kind}. Pass tensors."


def _problem_of_rows(operation: Operation, left: object, num_rows: object) -> str:
    if num_rows is not None and not isinstance(num_rows, (int, torch.SymInt)):
        return f"{operation} takes a whole number as num_rows; {_found(num_rows)}. Pass an int, or leave it out."
    if isinstance(left, torch.Tensor) and not left.dim():
        return f"{operation} multiplies (rows, K) by (K, columns); found a tensor without dimensions. Pass a matrix."
    return ""


def _several(weight: object) -> list[object]:
    return list(weight) if isinstance(weight, Iterable) and not isinstance(weight, (torch.Tensor, str)) else [weight]


def _found(given: object) -> str:
    """Describe the type, and the value if it is short; an array would be many lines."""
    value = f", {given!r}" if isinstance(given, (int, float, str)) and len(repr(given)) <= 40 else ""
    return f"found a value of type {type(given).__name__}{value}"
