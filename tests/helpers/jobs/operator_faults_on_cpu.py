"""Ranks on CPUs whose calls of the operators cannot be made, or of which one is not there; each prints the lines that a user
would see."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.distributed import distributed_c10d

from counterpoint import ops
from counterpoint.errors import CounterpointError
from counterpoint.schedule import SEQUENTIAL
from helpers.gloo_sections import LIMIT_S, report, run_sections
from helpers.jobs.operators_on_cpu import COLUMNS, INNER, OPERATORS, D, call_and_compare


def faults() -> None:
    """Calls that cannot be made, one after the other in the same processes; each is one line on every rank."""
    rank = dist.get_rank()
    shard, weight = torch.ones(4, INNER), torch.ones(INNER, COLUMNS)
    of_rank = (torch.float32, torch.float64)[rank]
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "shapes differ": lambda: ops.all_gather_matmul(torch.ones(4 + rank, INNER), weight, schedule=D()),
        "operators differ": lambda: (ops.matmul_all_reduce if rank else ops.matmul_reduce_scatter)(shard, weight),
        "schedules differ": lambda: ops.all_gather_matmul(shard, weight, schedule=D(chunks=1 + rank)),
        "types differ": lambda: ops.all_gather_matmul(shard.double() if rank else shard, weight),
        "types of ranks differ": lambda: ops.all_gather_matmul(shard.to(of_rank), weight.to(of_rank)),
        "inner sizes differ": lambda: ops.matmul_all_reduce(shard, torch.ones(INNER + 1, COLUMNS)),
        "no weight": lambda: ops.all_gather_matmul(shard, [weight][rank:], schedule=D()),
        "not a weight": lambda: ops.all_gather_matmul(shard, [weight, None if rank else weight], schedule=D()),
        "not a matrix": lambda: ops.matmul_reduce_scatter(torch.ones(2, 4, INNER), weight),
        "rows missing": lambda: ops.all_gather_matmul(shard, weight, num_rows=9, schedule=D()),
        "no such schedule": lambda: ops.all_to_all_matmul(shard, weight, schedule=D(pattern="ring")),
        "negative rows": lambda: ops.all_gather_matmul(shard, weight, num_rows=-8 if rank else 8),
        "no rows": lambda: ops.matmul_reduce_scatter(torch.ones(4 * rank, INNER), weight),
        "a vector": lambda: ops.matmul_reduce_scatter(shard, weight[0] if rank else weight),
        "no shard": lambda: ops.all_gather_matmul(None if rank else shard, weight),
        "no tensors": lambda: ops.matmul_all_reduce(*((None, None) if rank else (shard, weight))),
        "a list": lambda: ops.matmul_reduce_scatter([[1.0]] if rank else shard, weight),
        "an array": lambda: ops.all_to_all_matmul(shard.numpy() if rank else shard, weight),
        "a list of weights": lambda: ops.matmul_reduce_scatter(shard, [weight] if rank else weight),
        "sparse": lambda: ops.matmul_all_reduce(shard.to_sparse() if rank else shard, weight),
        "a sparse weight": lambda: ops.all_gather_matmul(shard, [weight, weight.to_sparse() if rank else weight]),
        "no dimensions": lambda: ops.all_gather_matmul(torch.ones(()) if rank else shard, weight),
        "rows in words": lambda: ops.all_gather_matmul(shard, weight, num_rows="8" if rank else 8),
        "rows in parts": lambda: ops.all_gather_matmul(shard, weight, num_rows=8.0 if rank else 8),
        "no memory": lambda: ops.all_gather_matmul(*(each.to("meta" if rank else "cpu") for each in (shard, weight))),
        "no group": lambda: ops.all_gather_matmul(shard, weight, 2),
        "truth values": lambda: ops.all_gather_matmul(shard.bool(), weight.bool()),
        "complex numbers": lambda: ops.matmul_reduce_scatter(shard.cfloat(), weight.cfloat()),
        "eight bits": lambda: ops.matmul_all_reduce(*(each.to(torch.float8_e4m3fn) for each in (shard, weight))),
    }
    for name, call in calls.items():
        say_refusal(name, call)
    call_and_compare("all_gather_matmul", 23, D(chunks=2), torch.float64)
    report("after all that")


def refused_later() -> None:
    """Rank 1 gives a wrong operand in a call whose shape ran before, which no rank compares any more, and in the next ones,
    which take no notice of it: what it said first must reach those that wait in the first."""
    rank, shard, weight = dist.get_rank(), torch.ones(4, INNER), torch.ones(INNER, COLUMNS)
    description = SEQUENTIAL if os.environ.get("IS_SEQUENTIAL") else D()
    for _ in range(3):
        ops.all_gather_matmul(shard, weight, schedule=description)
    meet("begun")
    began_s = time.monotonic()
    say_refusal("later", lambda: ops.all_gather_matmul(shard, weight.double() if rank else weight, schedule=description))
    print(f"later takes: {time.monotonic() - began_s:.3f}", flush=True)
    for _ in range(3 * rank):
        with suppress(CounterpointError):
            ops.all_gather_matmul(shard, weight[0], schedule=description)
    meet("ended")
    say_whole_refusal("next", lambda: ops.all_gather_matmul(shard, weight, schedule=D(chunks=2)))


def transforms() -> None:
    """Forward-mode derivatives and vmap are refused by every operator; what has no tangent runs within them."""
    shard, weight = torch.ones(4, INNER), torch.ones(INNER, COLUMNS)
    for name, (operator, _) in OPERATORS.items():
        calls = {
            "jvp": lambda operator=operator: torch.func.jvp(lambda x: operator(x, weight), (shard,), (shard,)),
            "weight": lambda operator=operator: torch.func.jvp(lambda x: operator(shard, x), (weight,), (weight,)),
            "dual": lambda operator=operator: in_dual_level(lambda: operator(forward_ad.make_dual(shard, shard), weight)),
            "vmap": lambda operator=operator: torch.vmap(lambda x: operator(x, weight))(torch.ones(2, 4, INNER)),
        }
        for kind, call in calls.items():
            say_refusal(f"{name} {kind}", call)
        apart = in_dual_level(lambda operator=operator: operator(shard, weight))
        assert torch.equal(apart, operator(shard, weight))


def in_dual_level(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    with forward_ad.dual_level():
        return call()


def stays_away() -> None:
    """Rank 1 comes to the first call only, and waits until rank 0 has noticed."""
    store = distributed_c10d._get_default_store()
    shard, weight = torch.ones(4, INNER), torch.ones(INNER, COLUMNS)
    ops.all_gather_matmul(shard, weight, schedule=D())
    if dist.get_rank() == 1:
        store.wait(["noticed"], timedelta(seconds=60))
        return
    say_refusal("counterpoint", lambda: ops.all_gather_matmul(shard, weight, schedule=D(chunks=2)))
    store.set("noticed", "")


def dies() -> None:
    """Rank 1 ends while rank 0 is in a call that both have prepared."""
    shard, weight = torch.ones(4, INNER), torch.ones(INNER, COLUMNS)
    ops.all_gather_matmul(shard, weight, schedule=D())
    if dist.get_rank() == 1:
        os._exit(0)
    say_refusal("counterpoint", lambda: [ops.all_gather_matmul(shard, weight, schedule=D()) for _ in range(3)])


def say_refusal(name: str, call: Callable[[], object]) -> CounterpointError | None:
    """Print what a call is refused with."""
    try:
        call()
    except CounterpointError as problem:
        print(f"{name}: {problem}", flush=True)
        return problem
    print(f"{name}: nothing was refused", flush=True)
    return None


def say_whole_refusal(name: str, call: Callable[[], object]) -> None:
    """Print, too, whether that took no waiting, and where it comes from."""
    began_s = time.monotonic()
    problem = say_refusal(name, call)
    if problem is not None:
        is_at_once = time.monotonic() - began_s < LIMIT_S / 2
        print(f"{name} takes: {'no time' if is_at_once else 'time'}", flush=True)
        print(f"{name} comes from: {type(problem.__cause__).__name__}", flush=True)


def meet(name: str) -> None:
    """Wait for all ranks by the store, for longer than the time-out, and without counting as a call."""
    store = distributed_c10d._get_default_store()
    store.set(f"{name} {dist.get_rank()}", "")
    store.wait([f"{name} {rank}" for rank in range(dist.get_world_size())], timedelta(seconds=60))


def out_of_step() -> None:
    """Rank 0 repeats a shape that ran before, which no rank compares, while the others call another one."""
    rank, weight = dist.get_rank(), torch.ones(INNER, COLUMNS)
    ops.all_gather_matmul(torch.ones(4, INNER), weight)
    say_whole_refusal("apart", lambda: ops.all_gather_matmul(torch.ones(4 + rank, INNER), weight))
    say_whole_refusal("next", lambda: ops.all_gather_matmul(torch.ones(8, INNER), weight))
    say_whole_refusal("next but one", lambda: ops.matmul_all_reduce(torch.ones(8, INNER), weight))


def gives_up() -> None:
    """Rank 1 waits for rank 0 until the time-out, rank 2 from later on; then rank 0 comes, and all release and go on."""
    rank, shard, weight = dist.get_rank(), torch.ones(4, INNER), torch.ones(INNER, COLUMNS)
    ops.all_gather_matmul(shard, weight, schedule=D())
    if rank == 2:
        time.sleep(LIMIT_S * 0.6)
    if rank > 0:
        say_whole_refusal("late", lambda: ops.all_gather_matmul(shard, weight, schedule=D(chunks=2)))
    meet("given up")
    say_whole_refusal("next", lambda: ops.all_gather_matmul(shard, weight, schedule=D(chunks=3)))
    meet("told")
    ops.release()
    call_and_compare("all_gather_matmul", 23, D(chunks=2), torch.float64)
    report("after release")


if __name__ == "__main__":
    run_sections(globals())
