"""Ranks that run the operators on GPUs in the way named by the argument and print `name: ok` for each thing that holds."""

import ctypes
import os
import random
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from counterpoint import ops
from counterpoint.cuda.ranks import join_ranks, wait_until_all_leave
from counterpoint.ops.operator_call import calls_of
from counterpoint.schedule import ScheduleDescription

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a job is run as a script: tests are not on the path
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
GATHERS = [
    None,
    D(pattern="sequential"),
    *(D(pattern="one_peer", chunks=chunks) for chunks in (1, 3)),
    D(pattern="all_peers", chunks=4, num_copy_streams=3),
    D(pattern="all_peers", chunks=2, matmul="fused", num_compute_streams=1),
    D(pattern="one_peer", matmul="rest", local="last"),
    D(pattern="ring", chunks=2),
    D(pattern="one_peer", chunks=3, chunk_growth=2.0),
    D(pattern="one_peer", chunks=2, along="inner"),
]
REDUCTIONS = [
    None,
    D(pattern="sequential"),
    *(D(pattern="one_peer", chunks=chunks) for chunks in (1, 3)),
    D(pattern="one_peer", chunks=2, matmul="peer"),
    D(pattern="all_peers", chunks=2, matmul="fused", num_copy_streams=3),
    *(D(pattern="ring", chunks=chunks) for chunks in (1, 3)),
    *(D(pattern=pattern, chunks=3, along="columns") for pattern in ("ring", "all_peers")),
]
OPERATORS = with_schedules(GATHERS, REDUCTIONS)
LAUNCH_ORDER = 2  # CU_GRAPH_KERNEL_NODE_PORT_LAUNCH_ORDER
NUM_CALLS = 30  # addresses may take 12 calls to settle, and then alternate between two sets


class EdgeData(ctypes.Structure):
    """CUgraphEdgeData of cuda.h."""

    _fields_ = (
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    )


def operands(
    name: str, num_rows: int, seed: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Every rank's left operand and weight, the same on every rank."""
    lefts, weights = draw(name, (num_rows, 256, 384), torch.Generator(device="cuda").manual_seed(seed), dtype)
    return lefts, [weight / 16 for weight in weights]


def assert_close(found: torch.Tensor, wanted: torch.Tensor, what: object) -> None:
    """Within the rounding of bf16, of which a ring does one per rank."""
    # a rank without rows has gradients of zeros only
    difference = (
        ((found.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-9)).item() if wanted.numel() else 0.0
    )
    assert found.shape == wanted.shape, (what, found.shape, wanted.shape)
    assert difference < 0.01 * dist.get_world_size(), (what, difference)


def results() -> None:
    """Every operator, description and size agrees with its definition, twice with the same bits; gradients too."""
    rank = dist.get_rank()
    for name, (operator, descriptions) in OPERATORS.items():
        for num_rows in (512, 515, 3):
            for description in descriptions:
                what = (name, num_rows, description.label() if description else "picked")
                lefts, weights = operands(name, num_rows, seed=1)
                for each in (*lefts, *weights):
                    each.requires_grad_()
                if name == "column_parallel_matmul":  # all ranks have the same left operand, so its gradients are summed
                    lefts = lefts[:1] * len(lefts)
                wanted = [reference(name, lefts, weights, other) for other in range(len(lefts))]
                left, weight = lefts[rank].detach().clone().requires_grad_(), weights[rank].detach().clone().requires_grad_()
                found = operator(left, weight, schedule=description, **keywords(name, num_rows))
                again = operator(left, weight, schedule=description, **keywords(name, num_rows))
                assert torch.equal(found, again), what
                assert_close(found, wanted[rank], what)
                gradients = [torch.ones_like(each) for each in wanted]
                summed = wanted[:1] if name == "matmul_all_reduce" else wanted
                torch.autograd.backward(summed, gradients[: len(summed)])
                found.backward(gradients[rank].to(found.dtype))
                assert_close(left.grad, lefts[rank].grad.double(), (*what, "left gradient"))
                assert_close(weight.grad, weights[rank].grad.double(), (*what, "weight gradient"))
        report(name)


def several_weights() -> None:
    """One call for several weights, issued, recorded and replayed, gives what one for each of them gives."""
    rank = dist.get_rank()
    for name in SEVERAL:
        for description in OPERATORS[name][1]:
            lefts, weights = operands(name, 512, seed=5)
            left = lefts[rank].clone().requires_grad_()
            parts = [part.clone().requires_grad_() for part in weights[rank].split([256, 64, 64], 1)]
            wanted = products_and_gradients_apart(name, left, parts, description, 512)
            before = num_recordings()
            first = products_and_gradients(name, left, parts, description, 512)
            for _ in range(NUM_CALLS):
                found = products_and_gradients(name, left, parts, description, 512)
                assert all(torch.equal(*pair) for pair in zip(found, first, strict=True)), (name, description)
            for one, other in zip(first, wanted, strict=True):
                assert_close(one, other.double(), (name, description))
            is_cut = description is not None and not description.is_sequential
            assert num_recordings() > before or not is_cut, (name, description, "is not recorded")
    report("several weights")


def captured() -> None:
    """Calls in a graph, replayed among eager ones with new numbers, and a graph of an odd number of calls after another."""
    for name, (operator, descriptions) in OPERATORS.items():
        for description in descriptions:
            if description is None or not description.is_sequential:
                replay(name, operator, description, 512)
                replay(name, operator, description, 1)  # a rank without rows
        report(name)


def replay(name: str, operator: Operator, description: ScheduleDescription | None, num_rows: int) -> None:
    """A call behind a kernel of the caller's, captured, replayed twice for each of several sets of numbers."""
    rank = dist.get_rank()

    def call() -> torch.Tensor:
        return operator(left, weight + 0, schedule=description, **keywords(name, num_rows))

    lefts, weights = operands(name, num_rows, seed=2)
    left, weight = lefts[rank].clone(), weights[rank].clone()
    call()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = call()
    for seed in range(3, 9):
        lefts, weights = operands(name, num_rows, seed)
        left.copy_(lefts[rank])
        weight.copy_(weights[rank])
        graph.replay()
        graph.replay()
        wanted = reference(name, lefts, weights, rank)
        assert_close(found, wanted, (name, description, num_rows, seed))
        if seed % 2:
            assert_close(call(), wanted, (name, description, num_rows, "eager"))


def launch_order() -> None:
    """A captured call on two computation streams launches the second one's first matmul behind the first one's."""
    rank = dist.get_rank()
    lefts, weights = operands("matmul_reduce_scatter", 512, seed=2)
    for description in (D(pattern="one_peer"), D(pattern="ring", chunks=2), D(pattern="ring", num_compute_streams=1)):
        ops.matmul_reduce_scatter(lefts[rank], weights[rank], schedule=description)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            ops.matmul_reduce_scatter(lefts[rank], weights[rank], schedule=description)
        assert ports(graph.raw_cuda_graph()).count(LAUNCH_ORDER) == description.num_compute_streams - 1, description
    report("launch order")


def ports(graph: int) -> list[int]:
    """What each edge of a graph waits for, as CUDA numbers it. (cuda-bindings 13.0 frees edges before it returns them.)"""
    count = ctypes.c_size_t()
    read = ctypes.CDLL("libcuda.so.1").cuGraphGetEdges_v2
    assert read(ctypes.c_void_p(graph), None, None, None, ctypes.byref(count)) == 0
    earlier, later, edges = ((kind * count.value)() for kind in (ctypes.c_void_p, ctypes.c_void_p, EdgeData))
    assert read(ctypes.c_void_p(graph), earlier, later, edges, ctypes.byref(count)) == 0
    return [edge.from_port for edge in edges]


def recorded() -> None:
    """Calls that come again at the same addresses are replayed with new numbers, the same bits as call by call, also after
    the group's memory has grown."""
    for num_rows in (512, 1 << 14):
        for name, (operator, descriptions) in OPERATORS.items():
            for description in descriptions:
                if description is None or description.is_sequential:
                    continue
                repeat(name, operator, description, num_rows)
        # the larger size has taken larger memory, and what was recorded with the old is forgotten
    repeat("all_gather_matmul", ops.all_gather_matmul, GATHERS[2], 512)
    report("recorded")


def repeat(name: str, operator: Operator, description: ScheduleDescription, num_rows: int) -> None:
    """Two sets of numbers in turn at the same addresses: the first of each is issued call by call. Memory that torch gives
    back meanwhile and takes anew may come at the same addresses."""
    rank, num_replayed = dist.get_rank(), calls_of(dist.group.WORLD.group_name).num_replayed
    numbers = [operands(name, num_rows, seed) for seed in (3, 4)]
    left, weight = (each[rank].clone().requires_grad_() for each in numbers[0])
    first: list[list[torch.Tensor]] = []
    for turn in range(NUM_CALLS):
        lefts, weights = numbers[turn % 2]
        with torch.no_grad():
            left.copy_(lefts[rank])
            weight.copy_(weights[rank])
        left.grad = weight.grad = None
        product = operator(left, weight, schedule=description)
        product.backward(product.detach())
        found = [product.detach().clone(), left.grad.clone(), weight.grad.clone()]
        del product
        if turn == 8:
            torch.cuda.empty_cache()
        if turn < 2:
            assert_close(found[0], reference(name, lefts, weights, rank), (name, description.label()))
            first.append(found)
            before = num_recordings()
        for each, wanted in zip(found, first[turn % 2], strict=True):
            assert torch.equal(each, wanted), (name, description.label(), num_rows, turn)
    assert num_recordings() > before, (name, description.label(), num_rows, "is not recorded")
    assert calls_of(dist.group.WORLD.group_name).num_replayed > num_replayed, (name, description.label(), "is not counted")


def random_numbers() -> None:
    """What is drawn beside calls that are issued, recorded and replayed, in eager code or a graph, is as without them."""
    rank = dist.get_rank()
    lefts, weights = operands("all_gather_matmul", 512, seed=6)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = torch.rand(1 << 20, device="cuda")

    def draw_beside(call: Callable[[], object]) -> torch.Tensor:
        torch.cuda.manual_seed(7)
        found = torch.empty(8, 2, 1 << 20, device="cuda")
        for in_graph, eager in found:
            graph.replay()
            call()
            in_graph.copy_(drawn)
            torch.rand(1 << 20, out=eager)
        return found

    wanted = draw_beside(lambda: None)
    before = num_recordings()
    found = draw_beside(lambda: ops.all_gather_matmul(lefts[rank], weights[rank], schedule=GATHERS[2]))
    assert num_recordings() > before
    assert torch.equal(found, wanted)
    report("random numbers")


def failed_recording() -> None:
    """A recording that ends with an error, and one that CUDA ends, leave torch as it was, and calls are issued."""
    rank, multiply = dist.get_rank(), torch.mm
    lefts, weights = operands("all_gather_matmul", 512, seed=8)
    wanted = reference("all_gather_matmul", lefts, weights, rank)
    for disturb in (run_out_of_memory, torch.cuda.synchronize):
        ops.release()
        disturbances: list[object] = []

        def disturbed(*arguments: object, **named: object) -> torch.Tensor:
            if torch.cuda.is_current_stream_capturing():
                disturbances.append(disturb)  # noqa: B023  called within this turn only
                disturb()  # noqa: B023
            return multiply(*arguments, **named)

        torch.mm = disturbed
        for _ in range(8):
            assert_close(ops.all_gather_matmul(lefts[rank], weights[rank], schedule=GATHERS[2]), wanted, disturb)
        torch.mm = multiply
        assert len(disturbances) == 1, "after one failure no other is tried"
        assert num_recordings() == 0
        assert_no_capture_goes_on()
    ops.release()
    repeat("all_gather_matmul", ops.all_gather_matmul, GATHERS[2], 512)
    report("failed recording")


def assert_no_capture_goes_on() -> None:
    """To torch: it would refuse to draw, and keep memory that another stream has used."""
    torch.rand(1, device="cuda")
    used_elsewhere = torch.ones(1 << 28, dtype=torch.uint8, device="cuda")
    used_elsewhere.record_stream(torch.cuda.Stream())
    held = torch.cuda.memory_stats()["active_bytes.all.current"]
    del used_elsewhere
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")
    assert torch.cuda.memory_stats()["active_bytes.all.current"] < held


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("said by the test")


def leave() -> None:
    """The process ends by itself with recordings alive."""
    repeat("all_gather_matmul", ops.all_gather_matmul, GATHERS[2], 512)
    dist.destroy_process_group()
    print("leave: ok\n", end="", flush=True)


def num_recordings() -> int:
    return sum(entry.num_recordings for entry in ops.pool_report())


def stress(num_calls: int = 1000) -> None:
    """Random operators, sizes and streams, issued without waiting; every result is compared."""
    rank, chance = dist.get_rank(), random.Random(5)
    streams = [torch.cuda.Stream() for _ in range(3)]
    pending: list[tuple[torch.Tensor, torch.Tensor, object]] = []
    for number in range(num_calls):
        name = chance.choice(list(OPERATORS))
        operator, descriptions = OPERATORS[name]
        num_rows, description = chance.choice((64, 97, 512)), chance.choice(descriptions)
        stream = chance.choice(streams)
        with torch.cuda.stream(stream):
            lefts, weights = operands(name, num_rows, seed=number)
            found = operator(lefts[rank], weights[rank], schedule=description, **keywords(name, num_rows))
            pending.append((found, reference(name, lefts, weights, rank), (name, num_rows, description, number)))
        if len(pending) == 20:
            torch.cuda.synchronize()
            for result, wanted, what in pending:
                assert_close(result, wanted, what)
            pending.clear()
    report(f"stress of {num_calls}")


def compiled() -> None:
    """The operators inside torch.compile, forward and backward."""
    rank = dist.get_rank()
    lefts, weights = operands("all_gather_matmul", 512, seed=3)
    down = torch.randn(384, 256, device="cuda", dtype=torch.bfloat16) / 16

    def block(shard: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return ops.matmul_reduce_scatter(torch.relu(ops.all_gather_matmul(shard, up)), down)

    shard, up = lefts[rank].clone().requires_grad_(), weights[rank].clone().requires_grad_()
    eager = block(shard, up)
    eager.sum().backward()
    wanted = shard.grad.clone(), up.grad.clone()
    shard.grad = up.grad = None
    found = torch.compile(block, fullgraph=True)(shard, up)
    found.sum().backward()
    assert_close(found, eager.double(), "compiled")
    assert_close(shard.grad, wanted[0].double(), "compiled, shard gradient")
    assert_close(up.grad, wanted[1].double(), "compiled, weight gradient")
    report("compiled")


def memory() -> None:
    """Memory is reported, grows with the largest shape only, and comes back.

    What the first use leaves is the libraries': cuBLAS has a workspace of some 34 MiB for each stream, and a group keeps its
    streams. One new stream in the second use would show.
    """
    use_memory()
    free = torch.cuda.mem_get_info()[0]
    use_memory()
    missing = free - torch.cuda.mem_get_info()[0]
    assert missing < 16 << 20, f"{missing} bytes did not come back"
    report("memory")


def refused_memory() -> None:
    """Where memory for a larger shape is refused, it runs the library's collective; shapes that ran before run on, though
    theirs was given back for it."""
    rank, description = dist.get_rank(), D(pattern="one_peer", chunks=2)
    lefts, weights = operands("all_gather_matmul", 512, seed=5)
    wanted = reference("all_gather_matmul", lefts, weights, rank)
    assert_close(ops.all_gather_matmul(lefts[rank], weights[rank], schedule=description), wanted, "before")
    large = torch.ones(1 << 20, 256, device="cuda", dtype=torch.bfloat16)
    torch.cuda.empty_cache()
    dist.all_gather_into_tensor(torch.empty(2, device="cuda"), torch.ones(1, device="cuda"))  # NCCL takes its own memory now
    torch.empty(8 << 30, dtype=torch.uint8, device="cuda")  # stays with torch's allocator, where the library's call finds it
    ballast = (
        torch.empty(torch.cuda.mem_get_info()[0] - (256 << 20), dtype=torch.uint8, device="cuda") if rank == 1 else None
    )
    ops.all_gather_matmul(large, weights[rank], schedule=description)
    (picked,) = [each for each in ops.explain() if f"({2 * large.shape[0]}, " in each.request]
    assert picked.schedule.is_sequential, picked
    assert "of symmetric memory cannot be allocated" in picked.reason, picked
    del ballast, large
    torch.cuda.empty_cache()
    for _ in range(2):
        assert_close(ops.all_gather_matmul(lefts[rank], weights[rank], schedule=description), wanted, "after")
    report("refused memory")


def use_memory() -> None:
    """Small, large and small sizes, then everything given back."""
    rank = dist.get_rank()
    description = D(pattern="one_peer", chunks=2)
    held = []
    for num_rows in (512, 1 << 19, 512):
        lefts, weights = operands("all_gather_matmul", num_rows, seed=4)
        ops.all_gather_matmul(lefts[rank], weights[rank], schedule=description)
        held.append(ops.pool_report()[0].num_bytes)
    assert held[0] < held[1] == held[2], held
    del lefts, weights
    ops.release()
    torch.cuda.empty_cache()
    assert ops.pool_report() == ()


def report(name: str) -> None:
    torch.cuda.synchronize()
    if dist.get_rank() == 0:
        print(f"{name}: ok\n", end="", flush=True)  # a line at once: ranks share the output


SECTIONS = {
    each.__name__: each
    for each in (
        results,
        several_weights,
        captured,
        launch_order,
        recorded,
        random_numbers,
        failed_recording,
        stress,
        compiled,
        memory,
        refused_memory,
        leave,
    )
}

if __name__ == "__main__":
    try:
        join_ranks()
        for section in sys.argv[1:]:
            ops.release()  # addresses that another section recorded may come again
            SECTIONS[section]()
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        os._exit(1)
    sys.stdout.flush()
    wait_until_all_leave()
    if sys.argv[-1] != "leave":
        os._exit(0)
