"""Two ranks: collectives of captured steps moved to copy engines, or with the argument `light` to light kernels, by plans;
prints a `name: key=value` line for each.

Every case is replayed as captured and as planned, several times each and in turns, on inputs that are set anew, so that
flags that are not lowered, or blocks that come too late, show.
"""

import statistics
import sys
from collections.abc import Callable
from contextlib import closing

import torch
import torch.distributed as dist

from counterpoint.controls import LightKernel
from counterpoint.cuda.applied import apply
from counterpoint.cuda.capture import Captured, capture
from counterpoint.cuda.graph import AbstractExecutable
from counterpoint.cuda.graph_rewriting import MOVED, rewrite
from counterpoint.cuda.ranks import join_ranks, run_and_leave
from counterpoint.ops.captured_copies import offer_copies
from counterpoint.ops.light_collectives import offer_light_kernels
from counterpoint.plan import Directive, Match, Plan

NUM_ELEMENTS = 32 << 20
IS_LIGHT = "light" in sys.argv[1:]
PLAN = Plan(
    directives=(
        Directive(
            match=Match(kind="communication"), controls=(LightKernel(num_ctas=64) if IS_LIGHT else MOVED,), reason="test"
        ),
    )
)
offer = offer_light_kernels if IS_LIGHT else offer_copies
Case = Callable[[torch.Tensor, torch.Tensor], None]


def tensors(seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(1000 * dist.get_rank() + seed)
    return torch.randint(-64, 64, (NUM_ELEMENTS,), generator=generator, device="cuda").to(dtype)


def uneven(given: torch.Tensor, got: torch.Tensor) -> None:
    """Rank 0 keeps a quarter and gives three; rank 1 gives a quarter."""
    quarter, rank = NUM_ELEMENTS // 4, dist.get_rank()
    lengths_given = [quarter, 3 * quarter] if rank == 0 else [quarter, quarter]
    lengths_got = [quarter, quarter] if rank == 0 else [3 * quarter, quarter]
    dist.all_to_all_single(got[: sum(lengths_got)], given[: sum(lengths_given)], lengths_got, lengths_given)


def half(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[: NUM_ELEMENTS // 2]


def asynchronous(given: torch.Tensor, got: torch.Tensor) -> None:
    """One collective after the other on the group's own stream, beside work on this one."""
    works = [dist.all_gather_into_tensor(got, half(given), async_op=True) for _ in range(2)]
    (given.view(-1, 4096)[:4096] @ torch.eye(4096, dtype=given.dtype, device="cuda")).sum()
    for work in works:
        work.wait()
    dist.all_reduce(got)


CASES: dict[str, Case] = {
    "all_gather": lambda given, got: dist.all_gather_into_tensor(got, half(given)),
    "all_gather in place": lambda given, got: dist.all_gather_into_tensor(
        got, got.chunk(2)[dist.get_rank()].copy_(half(given))
    ),
    "all_to_all": lambda given, got: dist.all_to_all_single(got, given),
    "uneven all_to_all": uneven,
    "reduce_scatter mean": lambda given, got: dist.reduce_scatter_tensor(half(got), given, op=dist.ReduceOp.AVG),
    "all_reduce sum": lambda given, got: dist.all_reduce(got.copy_(given)),
    "all_reduce mean": lambda given, got: dist.all_reduce(got.copy_(given), op=dist.ReduceOp.AVG),
    "odd all_reduce": lambda given, got: dist.all_reduce(got.copy_(given)[: NUM_ELEMENTS - 1]),
    "asynchronous": asynchronous,
}
REFUSED: dict[str, Case] = {
    "all_reduce max": lambda given, got: dist.all_reduce(got.copy_(given), op=dist.ReduceOp.MAX),
}


def bits(captured: Captured, executable: AbstractExecutable, inputs: torch.Tensor, given: torch.Tensor, got: torch.Tensor):
    """What one replay on these inputs leaves."""
    given.copy_(inputs)
    got.fill_(7)
    torch.cuda.synchronize()
    captured.rendezvous.meet()
    executable.launch(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    return got.clone()


def run(name: str, case: Case, dtype: torch.dtype = torch.bfloat16) -> str:
    given, got = tensors(0, dtype), torch.empty(NUM_ELEMENTS, dtype=dtype, device="cuda")
    with closing(capture(lambda: case(given, got), name)) as captured:
        offer(captured)
        rewritten = rewrite(captured.graph, captured.read, PLAN)
        states = "/".join(sorted({each.state for each in rewritten.engagements}))
        reasons = "/".join(sorted({each.reason or each.found for each in rewritten.engagements}))
        plain, planned = captured.graph.instantiate(), rewritten.graph.instantiate()
        is_equal = True
        for seed in range(3):
            inputs = tensors(seed, dtype)
            wanted = bits(captured, plain, inputs, given, got)
            for _ in range(2):
                is_equal &= torch.equal(wanted, bits(captured, planned, inputs, given, got))
        found = {
            label: statistics.median(captured.time_us(each) for _ in range(5))
            for label, each in (("plain", plain), ("planned", planned))
        }
        is_equal = captured.is_everywhere(is_equal)
        plain.close()
        planned.close()
        rewritten.graph.close()
    times = ", ".join(f"{label}_us={time_us:.0f}" for label, time_us in found.items())
    return f"{name}: states={states}, equal={is_equal}, {times}, reasons={reasons}"


def guarded() -> str:
    """Under a guard the planned and the captured graph run in turns; afterwards all memory is given back.

    Whether the plan is still active at the end is the guard's business: where copies are slower, it takes them out.
    """
    given, got = tensors(0, torch.bfloat16), torch.empty(NUM_ELEMENTS, dtype=torch.bfloat16, device="cuda")
    captured = capture(lambda: dist.all_reduce(got.copy_(given)), "guarded")
    offer_copies(captured)
    applied = apply(captured, PLAN, is_strict=True, guard_every=48, is_owner=True)
    for _ in range(300):
        applied.replay()
    wanted = given.clone()
    dist.all_reduce(wanted)
    is_equal = captured.is_everywhere(torch.equal(wanted, got))
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()  # with the rows, and with all that this function made
    applied.close()
    applied.close()
    freed = held - torch.cuda.memory_allocated()
    assert captured.is_everywhere(freed >= got.nbytes), f"closing freed {freed:,} bytes; the rows alone are {got.nbytes:,}"
    return f"guarded: equal={is_equal}, active={applied.is_active}, freed={freed}"


def main() -> None:
    rank = join_ranks()
    for name, case in (*CASES.items(), *REFUSED.items()):
        line = run(name, case)
        if rank == 0:
            print(line, flush=True)
    if not IS_LIGHT:
        line = guarded()
        if rank == 0:
            print(line, flush=True)


if __name__ == "__main__":
    run_and_leave(main)
