"""Steps whose communication is exposed for a known reason: what `benchmarks.known_causes` records.

Each maker allocates what its step needs and returns a `Known`: the step, its parts, which are timed alone, and how much is
exposed for which cause, by rank, given the times of the parts. The computation before a collective is there so that
the host is ahead of the GPU; a step ends with computation that needs the collective, except where its end is the point.
Buffers of collectives hold zeros, so that sums stay finite.
"""

import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from benchmarks.known_cause_stage import Call, Causes, Known, Stage, beside, join
from counterpoint.analysis.values import Cause

STALL_US = 1000.0  # how late the host issues the collective in `launched_late`
SLOWER_US = 2000.0  # how much longer rank 1 computes in `slow_rank`, at least
SCAN_US = 1500.0  # how long the computation of few CTAs takes in `hardware_queue`, about
SCAN_ROWS = 32  # a CTA or less for each: most SMs stay free
PART, PARTS = 1, 10  # of the rows of an uneven all-to-all, how many go to rank 0


def all_reduce(stage: Stage, mebibytes: int = 64) -> Call:
    """An all-reduce of a buffer of its own, on whatever stream is current."""
    buffer = stage.buffer(mebibytes)
    return lambda: dist.all_reduce(buffer)


def all_gather(stage: Stage, mebibytes: int) -> tuple[Call, torch.Tensor]:
    """An all-gather that gives so much, on whatever stream is current, and this rank's part."""
    whole = stage.buffer(mebibytes)
    part = torch.zeros_like(whole.chunk(stage.num_ranks)[0])
    return lambda: dist.all_gather_into_tensor(whole, part), part


def all_of(cause: Cause, part: str, stage: Stage) -> Callable[[Mapping[str, float]], list[Causes]]:
    """One part is exposed for one cause, on every rank."""
    return lambda parts: [{cause: parts[part]}] * stage.num_ranks


def dependent(stage: Stage) -> Known:
    """The only matmul that is left needs the sum, which needs the matmul before."""
    before, after, reduce, side = stage.short(), stage.long(), all_reduce(stage), stage.stream()

    def step() -> None:
        before()
        with beside(side):
            reduce()
        join(side)
        after()

    return Known(step, {"collective": reduce, "before": before, "after": after}, all_of("dependent", "collective", stage))


def starved(stage: Stage) -> Known:
    """An elementwise kernel of many waves holds every SM when the gather gets ready, which it does behind a small copy."""
    side, after = stage.stream(), stage.long()
    wide = stage.buffer(2048)
    gather, part = all_gather(stage, 256)
    staged = torch.zeros_like(part[: 2 << 20], device="cpu")
    staged = staged.pin_memory() if stage.on_gpu else staged

    def step() -> None:
        with beside(side):
            pass  # the side stream waits for what came before, not for the kernel
        wide.mul_(1.0)
        with torch.cuda.stream(side):
            part[: staged.numel()].copy_(staged, non_blocking=True)
            gather()
        join(side)
        after()

    parts: dict[str, Call] = {"collective": gather, "elementwise": lambda: wide.mul_(1.0), "after": after}
    return Known(step, parts, all_of("starved", "collective", stage))


def own_stream(stage: Stage) -> Known:
    """The all-reduce runs between two matmuls that have nothing to do with it, on their stream."""
    before, after, reduce = stage.short(), stage.long(), all_reduce(stage)

    def step() -> None:
        before()
        reduce()
        after()

    return Known(step, {"collective": reduce, "before": before, "after": after}, all_of("own_stream", "collective", stage))


def launched_late(stage: Stage) -> Known:
    """The sum could be under way during the first matmul, but the host issues it 1 ms later, when that has ended."""
    beside_it, after, reduce, side = stage.short(), stage.long(), all_reduce(stage), stage.stream()

    def step() -> None:
        if stage.on_gpu:
            torch.cuda.current_stream().synchronize()  # as a loss that is printed
        with beside(side):
            pass
        beside_it()
        until_s = time.perf_counter() + STALL_US / 1e6
        while time.perf_counter() < until_s:
            pass
        with torch.cuda.stream(side):
            reduce()
        join(side)
        after()

    parts = {"collective": reduce, "beside": beside_it, "after": after}
    return Known(step, parts, all_of("launched_late", "collective", stage))


def slow_rank(stage: Stage) -> Known:
    """Rank 1 computes longer before each sum, so the others wait for it there."""
    before, more, after, reduce, side = stage.short(), stage.short(), stage.long(), all_reduce(stage, 16), stage.stream()
    more_us = max(stage.time_us(more), 1.0)
    times = round(SLOWER_US / more_us) + 1 if stage.on_gpu else 2

    def compute_more() -> None:
        for _ in range(times):
            more()

    def step() -> None:
        before()
        if stage.rank == 1:
            compute_more()
        with beside(side):
            reduce()
        join(side)
        after()

    def exposed(parts: Mapping[str, float]) -> list[Causes]:
        waits: Causes = {"slow_rank": parts["more"], "dependent": parts["collective"]}
        return [{"dependent": parts["collective"]} if rank == 1 else waits for rank in range(stage.num_ranks)]

    return Known(step, {"collective": reduce, "more": compute_more, "before": before, "after": after}, exposed)


def queued(stage: Stage) -> Known:
    """A small sum that the next matmul needs is behind a large gather, which nothing needs yet, in the same communicator."""
    before, after = stage.short(), stage.long()
    gathered = stage.buffer(512)
    part, small = torch.zeros_like(gathered.chunk(stage.num_ranks)[0]), stage.buffer(1)

    def step() -> None:
        before()
        gather = dist.all_gather_into_tensor(gathered, part, async_op=True)
        needed = dist.all_reduce(small, async_op=True)
        needed.wait()
        after()
        gather.wait()

    parts: dict[str, Call] = {
        "large": lambda: dist.all_gather_into_tensor(gathered, part),
        "small": lambda: dist.all_reduce(small),
        "before": before,
        "after": after,
    }
    return Known(step, parts, lambda times: [{"queued": times["large"], "dependent": times["small"]}] * stage.num_ranks)


def uneven(stage: Stage) -> Known:
    """Every rank sends one row of ten to rank 0 and shares the other nine among the other ranks; then all compute alike."""
    before, after, side = stage.short(), stage.long(), stage.stream()
    given = stage.buffer(256 * (stage.num_ranks - 1))
    rows = given[: given.numel() // PARTS * PARTS]
    first = rows.numel() // PARTS * PART
    others = [(rows.numel() - first) // (stage.num_ranks - 1)] * (stage.num_ranks - 1)
    sent = [first, *others]
    received = [sent[stage.rank]] * stage.num_ranks
    sending, got = rows[: sum(sent)], rows.new_zeros(sum(received))
    even = [rows.numel() // stage.num_ranks] * stage.num_ranks
    evenly, got_evenly = rows[: sum(even)], rows.new_zeros(sum(even))

    def exchange() -> None:
        dist.all_to_all_single(got, sending, received, sent)

    def step() -> None:
        before()
        with beside(side):
            exchange()
        join(side)
        after()

    def exposed(parts: Mapping[str, float]) -> list[Causes]:
        more_us = max(0.0, parts["collective"] - parts["even"])
        return [{"uneven": more_us, "dependent": parts["collective"] - more_us}] * stage.num_ranks

    parts: dict[str, Call] = {
        "collective": exchange,
        "even": lambda: dist.all_to_all_single(got_evenly, evenly, even, even),  # without splits PyTorch takes another path
        "before": before,
        "after": after,
    }
    return Known(step, parts, exposed)


def tail(stage: Stage) -> Known:
    """The sum of the last gradient, with which the step ends."""
    earlier, last, reduce, side = stage.long(), stage.short(), all_reduce(stage), stage.stream()

    def step() -> None:
        earlier()
        last()
        with beside(side):
            reduce()
        join(side)

    return Known(step, {"collective": reduce, "earlier": earlier, "last": last}, all_of("tail", "collective", stage))


def by_copies(stage: Stage) -> Known:
    """Our all-gather + matmul of so few columns that the peer's rows take longer than the matmul beside them."""
    from counterpoint import ops  # noqa: PLC0415  the other cases run where it cannot

    return _beside_its_matmul(stage, ops.all_gather_matmul)


def fused(stage: Stage) -> Known:
    """PyTorch's fused all-gather + matmul, with as few columns."""
    from torch.distributed import _symmetric_memory  # noqa: F401, PLC0415  it registers the operators

    group = dist.group.WORLD.group_name
    return _beside_its_matmul(
        stage, lambda shard, weight: torch.ops.symm_mem.fused_all_gather_matmul(shard, [weight], 0, group)
    )


def _beside_its_matmul(stage: Stage, gather: Callable[[torch.Tensor, torch.Tensor], object]) -> Known:
    """An all-gather + matmul between two matmuls; what it takes beyond its own matmul is exposed."""
    before, after = stage.short(), stage.long()
    shard, weight = stage.matrix(8192, 8192), stage.matrix(8192, 512)
    whole = stage.matrix(8192 * stage.num_ranks, 8192)

    def gathered() -> None:
        gather(shard, weight)

    def step() -> None:
        before()
        gathered()
        after()

    def exposed(parts: Mapping[str, float]) -> list[Causes]:
        return [{"dependent": max(0.0, parts["call"] - parts["matmul"])}] * stage.num_ranks

    parts: dict[str, Call] = {"call": gathered, "matmul": lambda: torch.mm(whole, weight), "before": before, "after": after}
    return Known(step, parts, exposed)


def in_graph(stage: Stage) -> Known:
    """`dependent`, captured in a CUDA graph: no launch of its own, and no arguments of the collective in the trace."""
    eager = dependent(stage)
    for _ in range(3):
        eager.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        eager.step()
    return eager._replace(step=graph.replay)


def hardware_queue(stage: Stage) -> Known:
    """With one hardware queue, the sum is behind another stream's kernel that waits for the scan, though SMs are free.

    The scan has few CTAs. Its row length is chosen on the spot.
    """
    waiting, side, after, reduce = stage.stream(), stage.stream(), stage.long(), all_reduce(stage)
    trial = torch.ones(SCAN_ROWS, 1 << 17, device=stage.device)
    columns = int((1 << 17) * SCAN_US / max(stage.time_us(lambda: torch.cumsum(trial, 1)), 1.0))
    rows = torch.ones(SCAN_ROWS, min(max(columns, 1 << 17), 1 << 23) if stage.on_gpu else 64, device=stage.device)
    sums, small = torch.empty_like(rows), torch.ones(1 << 16, device=stage.device)

    def scan() -> None:
        torch.cumsum(rows, 1, out=sums)

    def step() -> None:
        with beside(side):
            pass
        scan()
        with beside(waiting):
            small.mul_(1.0)
        with torch.cuda.stream(side):
            reduce()
        join(side)
        join(waiting)
        after()

    return Known(step, {"collective": reduce, "scan": scan, "after": after}, all_of("hardware_queue", "collective", stage))
