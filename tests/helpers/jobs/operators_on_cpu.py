"""Ranks on CPUs that run the operators in the way named by the argument and print `NAME: ok` for each thing that holds."""

import itertools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from counterpoint import ops
from counterpoint.errors import CounterpointError
from counterpoint.ops import operators
from counterpoint.ops.runtime import MAX_SCHEDULES, all_runtimes
from counterpoint.schedule import SEQUENTIAL, ScheduleDescription
from counterpoint.schedule.operations import OPERATORS as OPERATOR_DEFINITIONS
from helpers.gloo_sections import report, run_sections
from helpers.operator_definitions import (
    SEVERAL,
    Operator,
    draw,
    keywords,
    products_and_gradients,
    products_and_gradients_apart,
    reference,
    with_schedules,
)

D = ScheduleDescription
GATHERS = (
    None,
    SEQUENTIAL,
    D(),
    D(pattern="one_peer", chunks=3, local="last"),
    D(pattern="all_peers", chunks=4, num_copy_streams=3),
    D(pattern="all_peers", chunks=2, matmul="fused", num_compute_streams=1),
    D(pattern="one_peer", chunks=2, matmul="peer"),
    D(pattern="one_peer", matmul="rest"),
    D(pattern="ring", chunks=2),
    D(chunks=3, chunk_growth=2.0),
    D(pattern="ring", chunks=7, along="inner", local="last"),
)
REDUCTIONS = (
    None,
    SEQUENTIAL,
    D(),
    D(pattern="one_peer", chunks=3, num_compute_streams=1),
    D(pattern="one_peer", chunks=2, matmul="peer"),
    D(pattern="all_peers", chunks=2, matmul="fused", num_copy_streams=3),
    D(pattern="ring"),
    D(pattern="ring", chunks=3),
    D(pattern="ring", chunks=5, along="columns"),
)
OPERATORS = with_schedules(GATHERS, REDUCTIONS)
INNER, COLUMNS = 7, 5
# of the largest entry, times ranks
TOLERANCE = {
    torch.float64: 1e-13,
    torch.float32: 1e-5,
    torch.float16: 0.003,
    torch.bfloat16: 0.02,
}


def operands(name: str, num_rows: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Every rank's left operand and weight, the same on every rank."""
    return draw(name, (num_rows, INNER, COLUMNS), torch.Generator().manual_seed(1), dtype)


def assert_close(found: torch.Tensor, wanted: torch.Tensor, what: object) -> None:
    assert found.shape == wanted.shape, (what, found.shape, wanted.shape)
    if wanted.numel():
        difference = ((found.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1)).item()
        assert difference <= TOLERANCE[found.dtype] * dist.get_world_size(), (what, difference)


def call_and_compare(name: str, num_rows: int, description: ScheduleDescription | None, dtype: torch.dtype) -> None:
    """One operator, forward twice and backward once, against its definition and that definition's gradients."""
    what = (name, num_rows, description.label() if description else "picked", dtype)
    rank, operator = dist.get_rank(), OPERATORS[name][0]
    lefts, weights = operands(name, num_rows, dtype)
    left, weight = lefts[rank].clone().requires_grad_(), weights[rank].clone().requires_grad_()
    lefts = [each.double().requires_grad_() for each in lefts]
    weights = [each.double().requires_grad_() for each in weights]
    if name == "column_parallel_matmul":  # all ranks have the same left operand, so its gradients are summed
        lefts = lefts[:1] * len(lefts)
    wanted = [reference(name, lefts, weights, other) for other in range(len(lefts))]

    found = operator(left, weight, schedule=description, **keywords(name, num_rows))
    again = operator(left, weight, schedule=description, **keywords(name, num_rows))
    assert torch.equal(found, again), what
    assert_close(found, wanted[rank], what)

    generator = torch.Generator().manual_seed(9)
    gradients = [torch.randn(each.shape, generator=generator, dtype=torch.float64).to(dtype) for each in wanted]
    if name == "matmul_all_reduce":  # one product that all ranks have: its gradient counts once
        gradients = gradients[:1] * len(wanted)
        wanted = wanted[:1]
    torch.autograd.backward(wanted, [each.double() for each in gradients[: len(wanted)]])
    found.backward(gradients[rank])
    assert_close(left.grad, lefts[rank].grad, (*what, "left gradient"))
    assert_close(weight.grad, weights[rank].grad, (*what, "weight gradient"))


def results() -> None:
    """Every operator, description and size, odd ones too; fewer rows than ranks are among them."""
    for name, (_, descriptions) in OPERATORS.items():
        for description in descriptions:
            for num_rows in (24, 23, 2):
                call_and_compare(name, num_rows, description, torch.float64)
        report(name)


def few_results() -> None:
    """Every operator and description with one odd size."""
    for name, (_, descriptions) in OPERATORS.items():
        for description in descriptions:
            call_and_compare(name, 23, description, torch.float64)
        report(name)


def data_types() -> None:
    """Single and half precision, and operands that are views."""
    for name, (operator, _) in OPERATORS.items():
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            call_and_compare(name, 24, D(chunks=2), dtype)
        rank = dist.get_rank()
        lefts, weights = operands(name, 24, torch.float64)
        wanted = reference(name, lefts, weights, rank)
        left, weight = lefts[rank].t().contiguous().t(), weights[rank].t().contiguous().t()
        assert not left.is_contiguous()
        assert_close(operator(left, weight, schedule=D(chunks=2), **keywords(name, 24)), wanted, (name, "strided"))
        report(name)
    column = torch.arange(6.0).view(2, 3).t()[:, :1]  # torch calls it contiguous, although its last stride is 3
    gathered = ops.all_gather_matmul(column, torch.ones(1, 2), schedule=D(chunks=1))
    assert torch.equal(gathered, column.expand(3, 2).repeat(dist.get_world_size(), 1))


def gradients() -> None:
    """Frozen operands, gradients that are views, calls without gradients, and second derivatives, which are refused."""
    rank = dist.get_rank()
    for name, (operator, descriptions) in OPERATORS.items():
        lefts, weights = operands(name, 23, torch.float64)
        rest = keywords(name, 23)
        for description in descriptions:
            found = []
            for needs in ((True, True), (True, False), (False, True)):
                left, weight = lefts[rank].clone(), weights[rank].t().contiguous()  # a linear's weight, seen transposed
                left.requires_grad_(needs[0])
                weight.requires_grad_(needs[1])
                product = operator(left, weight.t(), schedule=description, **rest)
                product.backward(torch.ones((), dtype=torch.float64).expand(product.shape))
                found.append((left.grad, weight.grad))
            both, of_left, of_weight = found
            assert_close(of_left[0], both[0], (name, description, "the weight is frozen"))
            assert_close(of_weight[1], both[1], (name, description, "the left operand is frozen"))
            assert of_left[1] is None
            assert of_weight[0] is None
        left, weight = lefts[rank].clone().requires_grad_(), weights[rank].clone().requires_grad_()
        with torch.no_grad():
            assert not operator(left, weight, **rest).requires_grad
        assert operator(left, weight, **rest).requires_grad
        with pytest.raises(CounterpointError, match=rf"^{name} has no second derivative\. .* without create_graph=True\.$"):
            torch.autograd.grad(operator(left, weight, **rest).sum(), left, create_graph=True)
        report(name)


def frozen_weights_gather_nothing() -> None:
    """What a weight's gradient alone would need is not communicated for a weight that needs none."""
    rank = dist.get_rank()
    runs = {
        "all_gather_matmul": "matmul_reduce_scatter of (24,",
        "matmul_reduce_scatter": "all_gather_matmul of (24,",
        "column_parallel_matmul": "matmul_all_reduce of (24,",
    }
    for name, wanted in runs.items():
        ops.release()
        lefts, weights = operands(name, 24, torch.float64)
        for schedule in (None, D(pattern="ring", chunks=2)):
            OPERATORS[name][0](lefts[rank].requires_grad_(), weights[rank], schedule=schedule).sum().backward()
        pair = [*[False] * (OPERATOR_DEFINITIONS[name].forward is not None), True]
        assert [each.request.startswith(wanted) for each in ops.explain()] == pair * 2, ops.explain()
        if name in SEVERAL:
            ops.release()
            products = OPERATORS[name][0](lefts[rank], weights[rank].split([2, 3], 1), schedule=D(chunks=2))
            sum(product.sum() for product in products).backward()
            assert ops.explain()[-1].request.startswith(wanted), ops.explain()
    report("frozen weights")


def after_inference() -> None:
    """Memory that a call in inference mode was the first to need serves training afterwards."""
    rank = dist.get_rank()
    for name, (operator, _) in OPERATORS.items():
        ops.release()
        lefts, weights = operands(name, 24, torch.float64)
        with torch.inference_mode():
            found = operator(lefts[rank], weights[rank], schedule=D(chunks=2), **keywords(name, 24))
        assert_close(found, reference(name, lefts, weights, rank), (name, "in inference mode"))
        call_and_compare(name, 24, D(chunks=2), torch.float64)
        report(name)


def autocast() -> None:
    """Operands are taken as they are, forward and backward, whatever type autocast gives to others."""
    for name in OPERATORS:
        for description in (SEQUENTIAL, D(chunks=2)):
            with torch.autocast("cpu", torch.bfloat16):
                call_and_compare(name, 24, description, torch.float32)
        report(name)


class Seen(TorchDispatchMode):
    """Remembers the operators that pass the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def looked_at() -> None:
    """Whoever looks at operators sees ours whole, forward and backward; results are the same bits as without."""
    rank = dist.get_rank()
    for name, (operator, _) in OPERATORS.items():
        lefts, weights = operands(name, 24, torch.float64)
        mode, counter, profile = Seen(), FlopCounterMode(display=False), torch.profiler.profile()
        found = []
        for context in (nullcontext(), mode, counter, profile):
            left, weight = lefts[rank].clone().requires_grad_(), weights[rank].clone().requires_grad_()
            with context:
                product = operator(left, weight, schedule=D(chunks=2), **keywords(name, 24))
                product.sum().backward()
            found.append((product.detach(), left.grad, weight.grad))
        backward = set() if name == "matmul_all_reduce" else {f"counterpoint::{name}_backward"}
        for names in (mode.names, {entry.key for entry in profile.key_averages()}):
            assert {f"counterpoint::{name}", *backward} <= names, (name, names)
        assert counter.get_total_flops() == 3 * 2 * 24 * INNER * COLUMNS, (name, counter.get_flop_counts())
        for other in found[1:]:
            assert all(torch.equal(one, same) for one, same in zip(found[0], other, strict=True)), name
        report(name)


def groups() -> None:
    """A group whose ranks are not the world's, beside a group of one."""
    rank = dist.get_rank()
    pair, alone = dist.new_group([1, 2]), [dist.new_group([each]) for each in range(dist.get_world_size())]
    for name, (operator, _) in OPERATORS.items():
        lefts, weights = operands(name, 24, torch.float64)
        if rank in (1, 2):
            lengths = (24, 24) if name != "all_gather_matmul" else (8, 8)
            members = [left[:length] for left, length in zip(lefts[1:], lengths, strict=True)]
            found = operator(lefts[rank], weights[rank], pair, schedule=D(chunks=3))
            assert_close(found, reference(name, members, weights[1:], rank - 1), (name, "pair"))
        for description in (None, D(chunks=2)):
            left, weight = lefts[rank].clone().requires_grad_(), weights[rank].clone().requires_grad_()
            found = operator(left, weight, alone[rank], schedule=description)
            assert_close(found, left @ weight, (name, "alone"))
            found.sum().backward()
            assert_close(left.grad, torch.ones_like(found) @ weight.t(), (name, "alone, left gradient"))
            assert_close(weight.grad, left.t() @ torch.ones_like(found), (name, "alone, weight gradient"))
        report(name)


def same_bits() -> None:
    """All-reduce gives every rank the same bits, though sums of floating-point numbers depend on their order."""
    for description in OPERATORS["matmul_all_reduce"][1]:
        lefts, weights = operands("matmul_all_reduce", 23, torch.float32)
        rank = dist.get_rank()
        found = ops.matmul_all_reduce(lefts[rank], weights[rank], schedule=description)
        others = [torch.empty_like(found) for _ in lefts]
        dist.all_gather(others, found)
        assert all(torch.equal(found, other) for other in others), description
    report("same bits")


def pool() -> None:
    """Memory is reported, grows with the largest shape only, and is given back; shapes are explained."""
    rank, held = dist.get_rank(), []
    ops.release()
    for num_rows in (24, 240, 24):
        lefts, weights = operands("all_gather_matmul", num_rows, torch.float64)
        ops.all_gather_matmul(lefts[rank], weights[rank], schedule=D(chunks=2))
        held.append(ops.pool_report()[0].num_bytes)
    gathered_bytes = 240 * INNER * 8
    assert held[0] < held[1] == held[2], held
    assert gathered_bytes <= held[1] < gathered_bytes + 512, held
    assert [each.num_schedules for each in ops.pool_report()] == [2]
    ops.all_gather_matmul(lefts[rank], weights[rank])
    first, _, picked = ops.explain()
    assert first.request.startswith("all_gather_matmul of (24, 7) @ (7, 5) float64"), first
    assert (first.schedule, first.reason) == (D(chunks=2), "named by the caller")
    assert picked.schedule.is_sequential
    assert "rank's block is" in picked.reason
    ops.release()
    assert ops.pool_report() == ()
    assert ops.explain() == ()
    call_and_compare("all_gather_matmul", 23, D(chunks=2), torch.float64)
    report("pool")


def compiled() -> None:
    """Inside torch.compile, whole, forward and backward, the operators give what they give outside."""
    lefts, weights = operands("all_gather_matmul", 24, torch.float64)
    rank, down = dist.get_rank(), torch.full((COLUMNS, INNER), 0.5, dtype=torch.float64)

    chunked = D(chunks=2)

    def block(shard: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(ops.all_gather_matmul(shard, up, schedule=chunked))
        reduced = ops.matmul_reduce_scatter(hidden, down, schedule=chunked)
        return ops.all_to_all_matmul(reduced, up).sum() + ops.matmul_all_reduce(hidden, down).sum()

    gradients = []
    for run in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        shard, up = lefts[rank].clone().requires_grad_(), weights[rank].clone().requires_grad_()
        found = run(shard, up)
        found.backward()
        gradients.append((found.detach(), shard.grad, up.grad))
    for eager, whole in zip(*gradients, strict=True):
        assert torch.equal(eager, whole)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def gather(shard: torch.Tensor, up: torch.Tensor, schedule: ScheduleDescription) -> torch.Tensor:
        return ops.all_gather_matmul(shard, up, schedule=schedule)

    for description in (D(chunks=2), D(chunks=3), D(chunks=2)):
        gather(lefts[rank], weights[rank], description)
    run = {each.schedule.chunks for each in ops.explain() if each.request.startswith("all_gather_matmul of (24, 7)")}
    assert run == {2, 3}, "a compiled function must not keep the schedule of its first call"

    frozen = weights[rank].clone()
    left, again = (lefts[rank].clone().requires_grad_() for _ in range(2))
    gather(left, frozen, chunked).sum().backward()
    ops.all_gather_matmul(again, frozen, schedule=chunked).sum().backward()
    assert torch.equal(left.grad, again.grad)
    report("compiled")


def several_weights() -> None:
    """One call for several weights gives what one for each of them gives, and the sum of their left operands' gradients."""
    rank = dist.get_rank()
    for name in SEVERAL:
        for description, num_rows in itertools.product(OPERATORS[name][1], (24, 23)):
            lefts, weights = operands(name, num_rows, torch.float64)
            left = lefts[rank].clone().requires_grad_()
            parts = [part.clone().requires_grad_() for part in weights[rank].split([1, 3, 1], 1)]
            found = products_and_gradients(name, left, parts, description, num_rows)
            wanted = products_and_gradients_apart(name, left, parts, description, num_rows)
            for one, other in zip(found, wanted, strict=True):
                assert_close(one, other, (description, num_rows))
            for frozen in (parts[:1], parts):
                for part in frozen:
                    part.requires_grad_(False)
                again = products_and_gradients(name, left, parts, description, num_rows)
                assert all(torch.equal(*pair) for pair in zip(found[:3], again[:3], strict=True))
                assert_close(again[3], found[3], "of the left operand")
                assert [each is None for each in again[4:]] == [not part.requires_grad for part in parts]
    report("several weights")


def several_weights_looked_at() -> None:
    """torch.compile, dispatch modes and torch's own check take a list of weights."""
    rank, group_name = dist.get_rank(), dist.group.WORLD.group_name
    for name in SEVERAL:
        lefts, weights = operands(name, 24, torch.float64)
        left = lefts[rank].clone().requires_grad_()
        parts = [part.clone().requires_grad_() for part in weights[rank].split([2, 3], 1)]
        torch.library.opcheck(getattr(operators, name).custom, (left, parts, *keywords(name, 24).values(), group_name, ""))
        wanted = products_and_gradients(name, left, parts, None, 24)
        with Seen() as mode:
            found = products_and_gradients(name, left, parts, None, 24)
        assert {f"counterpoint::{name}", f"counterpoint::{name}_backward"} <= mode.names
        left.grad = parts[0].grad = parts[1].grad = None
        operator = OPERATORS[name][0]

        def call(*given: torch.Tensor, operator: Operator = operator) -> tuple[torch.Tensor, ...]:
            return operator(given[0], given[1:])

        products = torch.compile(call, backend="aot_eager", fullgraph=True)(left, *parts)
        torch.autograd.backward(products, [torch.ones_like(product) for product in products])
        for others in (found, [*products, left.grad, *(part.grad for part in parts)]):
            assert all(torch.equal(*pair) for pair in zip(wanted, others, strict=True))
    report("several weights looked at")


def several_weights_unused() -> None:
    """A weight whose product was not used gets no gradient, so no optimizer moves it; the others get the same."""
    rank, chunked = dist.get_rank(), D(chunks=2)
    for name in SEVERAL:
        lefts, weights = operands(name, 24, torch.float64)
        operator = OPERATORS[name][0]

        def call(*given: torch.Tensor, operator: Operator = operator) -> torch.Tensor:
            return operator(given[0], given[1:], schedule=chunked)[1]

        whole = torch.compile(call, backend="aot_eager", fullgraph=True)
        for run, context in ((call, nullcontext()), (call, Seen()), (whole, nullcontext())):
            left = lefts[rank].clone().requires_grad_()
            parts = [part.clone().requires_grad_() for part in weights[rank].split([2, 3], 1)]
            with context:
                run(left, *parts).sum().backward()
            unused, used = [part.grad for part in parts]
            alone = products_and_gradients(name, lefts[rank].clone().requires_grad_(), parts[1:], chunked, 24)
            assert_close(left.grad, alone[1], name)
            assert unused is None
            assert_close(used, alone[2], name)
    report("several weights unused")


def registered() -> None:
    """torch's own check of custom operators: schemas, shapes without numbers, gradients' registration."""
    group_name = dist.group.WORLD.group_name
    lefts, weights = operands("all_gather_matmul", 24, torch.float64)
    rank = dist.get_rank()
    left, weight = lefts[rank].requires_grad_(), weights[rank].requires_grad_()
    whole = torch.randn(24, INNER, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(operators.all_gather_matmul.custom, (left, [weight], 24, group_name, ""))
    for operator in (operators.matmul_reduce_scatter, operators.matmul_all_reduce, operators.all_to_all_matmul):
        torch.library.opcheck(operator.custom, (whole, weight, group_name, ""))
    report("registered")


def many_shapes() -> None:
    """Shapes that never end: what is kept for them does, on all ranks alike, and a shape that was evicted runs again."""
    rank, weight = dist.get_rank(), torch.ones(INNER, COLUMNS)
    store = distributed_c10d._get_default_store()
    kept, num_keys = [], []
    for number in [*range(1, 501), 1, 2, 500]:
        shard = torch.full((number, INNER), float(rank + 1))
        product = ops.all_gather_matmul(shard, weight, schedule=D(chunks=2))
        assert torch.equal(product[:, 0], INNER * torch.tensor([1.0] * number + [2.0] * number)), number
        assert len(ops.explain()) <= MAX_SCHEDULES
        (runtime,) = all_runtimes()
        kept.append((len(runtime._prepared), len(runtime.transport._prepared)))
        num_keys.append(store.num_keys())
    assert max(kept) == (MAX_SCHEDULES, MAX_SCHEDULES)
    dist.barrier()
    assert max(num_keys[300:]) - max(num_keys[:20]) <= 4, (num_keys[:20], num_keys[300:])
    print(f"kept: {len(ops.explain())}", flush=True)


if __name__ == "__main__":
    run_sections(globals())
