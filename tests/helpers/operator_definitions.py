"""The operators by name, their operands and their definitions, for ranks on CPUs and on GPUs."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from counterpoint import ops
from counterpoint.schedule import ScheduleDescription

Operator = Callable[..., torch.Tensor]
Descriptions = Sequence[ScheduleDescription | None]


def with_schedules(gathers: Descriptions, reductions: Descriptions) -> dict[str, tuple[Operator, Descriptions]]:
    """Every operator, with those of these schedules that it takes."""
    exchanges = [each for each in gathers if each is None or (each.pattern != "ring" and each.along == "rows")]
    of_rows = [each for each in reductions if each is None or each.along == "rows"]
    return {
        "all_gather_matmul": (ops.all_gather_matmul, gathers),
        "matmul_reduce_scatter": (ops.matmul_reduce_scatter, reductions),
        "matmul_all_reduce": (ops.matmul_all_reduce, of_rows),
        "column_parallel_matmul": (ops.column_parallel_matmul, of_rows),
        "all_to_all_matmul": (ops.all_to_all_matmul, exchanges),
    }


def draw(
    name: str, sizes: tuple[int, int, int], generator: torch.Generator, dtype: torch.dtype
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Every rank's left operand and weight for (rows, inner, columns), the same on every rank."""
    num_rows, inner, columns = sizes
    num_ranks = dist.get_world_size()
    lengths = [part.numel() for part in torch.empty(num_rows).tensor_split(num_ranks)]

    def matrix(length: int, width: int) -> torch.Tensor:
        drawn = torch.randn(length, width, generator=generator, device=generator.device, dtype=torch.float64)
        return drawn.to(dtype)

    if name == "column_parallel_matmul":  # whole on every rank
        lefts = [matrix(num_rows, inner)] * num_ranks
        return lefts, [matrix(inner, columns) for _ in range(num_ranks)]
    lefts = [matrix(length, inner) for length in (lengths if name == "all_gather_matmul" else [num_rows] * num_ranks)]
    return lefts, [matrix(inner, columns) for _ in range(num_ranks)]


def reference(name: str, lefts: list[torch.Tensor], weights: list[torch.Tensor], rank: int) -> torch.Tensor:
    """The operator's definition, in double precision."""
    lefts, weights = [each.double() for each in lefts], [each.double() for each in weights]
    num_ranks = len(lefts)
    if name == "all_gather_matmul":
        return torch.cat(lefts) @ weights[rank]
    if name == "all_to_all_matmul":
        return torch.cat([left.tensor_split(num_ranks)[rank] for left in lefts]) @ weights[rank]
    if name == "column_parallel_matmul":
        return lefts[rank] @ weights[rank]
    total = torch.stack([left @ weight for left, weight in zip(lefts, weights, strict=True)]).sum(0)
    return total if name == "matmul_all_reduce" else total.tensor_split(num_ranks)[rank]


SEVERAL = ("all_gather_matmul", "column_parallel_matmul")  # those that take several weights


def products_and_gradients(
    name: str, left: torch.Tensor, weights: Sequence[torch.Tensor], description: ScheduleDescription | None, num_rows: int
) -> list[torch.Tensor | None]:
    """Of one call for several weights: the products, and from ones all operands' gradients, the left one's first."""
    left.grad = None
    for weight in weights:
        weight.grad = None
    products = getattr(ops, name)(left, weights, schedule=description, **keywords(name, num_rows))
    torch.autograd.backward(products, [torch.ones_like(product) for product in products])
    return [*(product.detach() for product in products), left.grad, *(weight.grad for weight in weights)]


def products_and_gradients_apart(
    name: str, left: torch.Tensor, weights: Sequence[torch.Tensor], description: ScheduleDescription | None, num_rows: int
) -> list[torch.Tensor]:
    """The same of one call for each weight; the left operand's gradients are summed in double precision."""
    alone = [products_and_gradients(name, left, [weight], description, num_rows) for weight in weights]
    return [*(each[0] for each in alone), sum(each[1].double() for each in alone), *(each[2] for each in alone)]


def keywords(name: str, num_rows: int) -> dict[str, int]:
    """What a call needs besides its operands where rows do not divide by ranks."""
    return {"num_rows": num_rows} if name == "all_gather_matmul" else {}
