"""Ranks that run the operators of experts on GPUs in the way named by the argument and print `name: ok` for what holds.

Faults print the line that a user would see.
"""

import faulthandler
import os
import random
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from counterpoint import ops
from counterpoint.cuda.ranks import run_and_leave
from counterpoint.errors import CounterpointError
from counterpoint.ops import expert_routing
from counterpoint.ops.grouped_matmul import GROUPED_CAPABILITIES
from counterpoint.ops.operator_call import expert_calls_of
from counterpoint.ops.runtime import all_runtimes
from counterpoint.schedule import SEQUENTIAL, ScheduleDescription, expert_choice

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a job is run as a script: tests are not on the path
from helpers.experts_definition import Experts, check_fp8, compare

D = ScheduleDescription
COPIES = D(pattern="all_peers", along="experts")
SCHEDULES = (None, COPIES, *(D(pattern="all_peers", along="experts", chunks=chunks) for chunks in (2, 4)))
SCALE = 64  # rows and widths of the definition, so that matmuls and copies are some
ROUNDINGS = 0.03  # of bf16, of the largest number of each result: three matmuls and the sums between them
LIMIT = timedelta(seconds=10)
MOST_S = 100


def results(number: int = 30) -> None:
    """Random routings: outputs and gradients within rounding, the same bits in a second run, and as sequential."""
    chance = random.Random(11)
    for turn in range(number):
        experts = Experts(chance, torch.bfloat16, scale=SCALE)
        schedule = chance.choice(SCHEDULES)
        found = experts.found(schedule)
        compare(found, experts.expected(), ROUNDINGS)
        assert all(map(torch.equal, found, experts.found(schedule))), f"call {turn} gives other bits the second time"
        if schedule == COPIES:
            assert all(map(torch.equal, found, experts.found(SEQUENTIAL))), f"call {turn} differs from sequential"
        if turn % 4 == 0:
            compare(experts.found_by_halves(schedule), experts.expected(), ROUNDINGS)
    counted = expert_calls_of(dist.group.WORLD.group_name)
    assert counted.num_by_copies > counted.num_by_library > 0 < counted.num_bytes
    report("results")


def stress() -> None:
    """1,000 routings, sizes that change in every step: the same bits as sequential, memory bounded."""
    chance, schedules = random.Random(12), random.Random(13)
    for turn in range(1000):
        experts = Experts(chance, torch.bfloat16, scale=8, num_local=4)
        tokens, weights = experts.own()
        counts = torch.tensor(experts.counts[experts.rank], device="cuda")
        schedule = schedules.choice(SCHEDULES)
        with torch.no_grad():
            found = ops.expert_ffn(tokens, counts, *weights, schedule=schedule)
            wanted = ops.expert_ffn(tokens, counts, *weights, schedule=SEQUENTIAL)
        compare([found], [wanted], ROUNDINGS)
        if schedule == COPIES:
            assert torch.equal(found, wanted), f"call {turn}"
    held = ops.pool_report()[0].num_bytes
    assert 0 < held < 64 << 20, held
    report("stress of 1000")


def first_groups_ahead() -> None:
    """First groups begin before the host knows the counts, alone or before the rest: within rounding of sequential, forward
    and backward.
    """
    pick, chance = expert_routing.pick_pieces, random.Random(23)
    limits = {name: getattr(expert_choice, name) for name in ("FIRST_AHEAD_FROM_BYTES", "PARTS_AHEAD_FROM_BYTES")}
    try:
        for turn in range(120):
            if turn % 4 == 0:  # three calls are like the one before
                number = chance.choice((2, 3, 4))
                expert_routing.pick_pieces = lambda *_, number=number, **__: number
                vars(expert_choice).update(limits | {chance.choice(list(limits)): 0})
                experts = Experts(chance, torch.bfloat16, scale=SCALE, num_local=chance.choice((3, 8)))
            compare(experts.found(None), experts.expected(), ROUNDINGS)
            if turn % 3 == 0:
                compare(experts.found_by_halves(None), experts.expected(), ROUNDINGS)
    finally:
        expert_routing.pick_pieces = pick
        vars(expert_choice).update(limits)
    report("first groups ahead")


def other_types() -> None:
    """fp16 and fp32 by a matmul for each expert."""
    for dtype, tolerance in ((torch.float16, 0.004), (torch.float32, 1e-3)):
        experts = Experts(random.Random(14), dtype, kind="random", num_local=3, scale=16)
        compare(experts.found(COPIES), experts.expected(), tolerance)
    report("other types")


def biases_and_fp8() -> None:
    """Biases on top of grouped matmuls, and forward in fp8 where the GPU multiplies it."""
    chance = random.Random(20)
    for schedule in (SEQUENTIAL, *SCHEDULES[1:]):
        experts = Experts(chance, torch.bfloat16, kind="random", num_local=3, scale=SCALE)
        compare(experts.found(schedule, has_biases=True), experts.expected(has_biases=True), ROUNDINGS)
    if torch.cuda.get_device_capability() in GROUPED_CAPABILITIES:
        check_fp8(Experts(chance, torch.bfloat16, kind="random", num_local=2, scale=16), (SEQUENTIAL, COPIES))
    report("biases and fp8")


def no_memory() -> None:
    """A routing that needs more memory than there is runs by the library on all ranks."""
    ops.release()  # what other parts left
    small = Experts(random.Random(15), torch.bfloat16, kind="random", num_local=2, scale=8)
    small.found(COPIES)
    group = all_runtimes()[0].experts()
    pool, counted = group.copies._pool, expert_calls_of(dist.group.WORLD.group_name)
    replace, by_library = pool.replace, counted.num_by_library
    pool.replace = lambda num_bytes, *others, **named: replace(num_bytes + (1 << 40), *others, **named)
    large = Experts(random.Random(16), torch.bfloat16, kind="random", num_local=2, scale=32)
    compare(large.found(COPIES), large.expected(), ROUNDINGS)
    assert counted.num_by_library == by_library + 2, "forward and backward by the library"
    pool.replace = replace
    compare(small.found(COPIES), small.expected(), ROUNDINGS)
    assert counted.num_by_library == by_library + 2, "a smaller one by copies again"
    report("no memory")


def in_a_pool_of_the_job() -> None:
    """Memory for results that grows inside a `torch.cuda.MemPool` of the job, and again outside, before the pool ends."""
    ops.release()

    def call(seed: int, scale: int) -> None:
        experts = Experts(random.Random(seed), torch.bfloat16, kind="random", num_local=2, scale=scale)
        for schedule in SCHEDULES[1:]:
            compare(experts.found(schedule), experts.expected(), ROUNDINGS)

    call(18, 8)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        call(19, SCALE)
    call(20, 2 * SCALE)
    del pool
    call(18, 8)
    report("in a pool of the job")


def faults() -> None:
    """Counts that do not add up on one rank are a line on all, and the next call works."""
    experts = Experts(random.Random(17), torch.bfloat16, kind="random", num_local=2, scale=8)
    tokens, weights = experts.own()
    counts = list(experts.counts[experts.rank])
    for wrong in (1, 0):
        try:
            ops.expert_ffn(tokens, [counts[0] + wrong * experts.rank, *counts[1:]], *weights)
            report("after a fault")
        except CounterpointError as problem:
            print(f"counts: {problem}", flush=True)


def a_rank_stays_away() -> None:
    """Rank 1 does not come to the combine; rank 0 is told, and does not hang."""
    experts = Experts(random.Random(18), torch.bfloat16, kind="random", num_local=2, scale=8)
    experts.found_by_halves(COPIES)  # the ranks agree on these calls
    tokens, (w1, w2, _) = experts.own()
    hidden, routing = ops.dispatch_grouped_matmul(tokens, experts.counts[experts.rank], w1, schedule=COPIES)
    torch.cuda.synchronize()
    if experts.rank == 0:
        began = time.monotonic()
        try:
            for _ in range(2):
                ops.grouped_matmul_combine(hidden, w2, routing)
                torch.cuda.synchronize()
        except CounterpointError as problem:
            print(f"a rank stays away: {problem}", flush=True)
        assert time.monotonic() - began < 40
    else:
        time.sleep(16)


def report(name: str) -> None:
    """Tell the test that a part holds."""
    torch.cuda.synchronize()
    if dist.get_rank() == 0:
        print(f"{name}: ok", flush=True)


def main() -> None:
    local_rank = int(os.environ["LOCAL_RANK"])
    faulthandler.dump_traceback_later(MOST_S, exit=True)
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank), timeout=LIMIT)
    for name in sys.argv[1:]:
        globals()[name]()


if __name__ == "__main__":
    try:
        run_and_leave(main)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
