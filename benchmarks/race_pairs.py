"""Pairs: one collective and one long kernel that are ready at the same moment, and when each ended.

A spinning kernel gives the host time to issue everything, then a tiny all-reduce lets the GPUs meet; the event behind it is
the moment. The collective is issued first, as frameworks do. Its streams are those of DDP (`async_op=True`: the group's own
stream), of FSDP2 (`async_op=False` on a stream of the caller's with priority -1) and of tensor parallelism (`async_op=False`
on the current stream, with the kernel on another). Results are compared with sums and copies made without the library.
"""

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn import functional

from benchmarks.jobs import starved
from benchmarks.on_gpus import largest, log
from benchmarks.race_variants import Case, Race, Variant, all_variants, measure
from counterpoint.ops.call_timer import SPIN_CYCLES

NUM_UNTIMED, NUM_TIMED = 1, 3
DDP_BYTES, FSDP_BYTES, TP_BYTES = 100 << 20, 256 << 20, 64 << 20
MOST_VALUE = 4  # small whole numbers, so that sums are exact in bf16
Kernel = Callable[[], object]


def make_kernels() -> dict[str, Kernel]:
    """Persistent kernels (cuBLAS, attention) and kernels of many waves (elementwise, Triton)."""
    kind = {"device": "cuda", "dtype": torch.bfloat16}
    a, b = torch.randn(8192, 8192, **kind), torch.randn(8192, 8192, **kind)
    c = torch.empty_like(a)
    q = torch.randn(4, 32, 4096, 128, **kind)
    x = torch.randn(1 << 30, **kind)
    y = torch.empty_like(x)
    tokens, few = torch.randn(2048, 8192, **kind), torch.empty(2048, 8192, **kind)
    triton_matmul = starved.make_matmul("cuda")
    return {
        "matmul 8192^3": lambda: torch.mm(a, b, out=c),
        "attention": lambda: functional.scaled_dot_product_attention(q, q, q, is_causal=True),
        "elementwise": lambda: torch.mul(x, 1.01, out=y),
        "Triton, 4096 CTAs": lambda: triton_matmul(tokens, b, few),
    }


class Moments:
    """The events of one repetition."""

    def __init__(self) -> None:
        self.ready, self.collective_end, self.kernel_end = (torch.cuda.Event(enable_timing=True) for _ in range(3))

    def times_ms(self) -> list[float]:
        return [self.ready.elapsed_time(self.collective_end), self.ready.elapsed_time(self.kernel_end)]


class Collective:
    """One collective on the streams of one kind of parallelism; each repetition leaves a result that can be checked."""

    def __init__(self, name: str, num_bytes: int, *, is_gather: bool = False) -> None:
        self.name = name
        self._is_gather = is_gather
        self._num_ranks = dist.get_world_size()
        count = num_bytes // 2 // self._num_ranks * self._num_ranks
        source = count // self._num_ranks if is_gather else count
        self._sources = [self._values(rank, source) for rank in range(self._num_ranks)]
        self._own = self._sources[dist.get_rank()]
        self.buffer = torch.empty(count, device="cuda", dtype=torch.bfloat16)

    @staticmethod
    def _values(rank: int, count: int) -> torch.Tensor:
        generator = torch.Generator(device="cuda").manual_seed(rank)
        drawn = torch.randint(-MOST_VALUE, MOST_VALUE + 1, (count,), generator=generator, device="cuda", dtype=torch.int8)
        return drawn.to(torch.bfloat16)

    def refill(self) -> None:
        if self._is_gather:
            self.buffer.fill_(float("nan"))
        else:
            self.buffer.copy_(self._own)

    def issue(self, group: dist.ProcessGroup, *, is_async: bool) -> dist.Work | None:
        if self._is_gather:
            return dist.all_gather_into_tensor(self.buffer, self._own, group=group, async_op=is_async)
        return dist.all_reduce(self.buffer, group=group, async_op=is_async)

    def is_right(self, num_repetitions: int) -> bool:
        """Whether the buffer holds what that many repetitions since the refill must leave: sums of sums, or a gather."""
        if self._is_gather:
            return torch.equal(self.buffer, torch.cat(self._sources))
        expected = torch.stack(self._sources).sum(0) * float(self._num_ranks ** (num_repetitions - 1))
        return torch.equal(self.buffer, expected)


class Streams:
    """One repetition on each kind of streams. The kernel is issued after the collective; None leaves either out."""

    def __init__(self) -> None:
        self.default = torch.cuda.current_stream()
        self.beside, self.gather = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
        self._token = torch.ones(1, device="cuda")

    def gate(self) -> Moments:
        """From here on the host has about a millisecond."""
        torch.cuda._sleep(SPIN_CYCLES)
        dist.all_reduce(self._token)
        moments = Moments()
        moments.ready.record()
        return moments

    def ddp(self, collective: Collective | None, kernel: Kernel | None, group: dist.ProcessGroup) -> Moments:
        moments = self.gate()
        work = collective.issue(group, is_async=True) if collective else None
        if kernel:
            kernel()
        moments.kernel_end.record()
        with torch.cuda.stream(self.beside):  # it waits for the collective alone
            self.beside.wait_event(moments.ready)
            if work:
                work.wait()
            moments.collective_end.record()
        self.default.wait_stream(self.beside)
        return moments

    def fsdp2(self, collective: Collective | None, kernel: Kernel | None, group: dist.ProcessGroup) -> Moments:
        moments = self.gate()
        self.gather.wait_event(moments.ready)
        with torch.cuda.stream(self.gather):
            if collective:
                collective.issue(group, is_async=False)
            moments.collective_end.record()
        if kernel:
            kernel()
        moments.kernel_end.record()
        self.default.wait_stream(self.gather)
        return moments

    def tensor_parallel(self, collective: Collective | None, kernel: Kernel | None, group: dist.ProcessGroup) -> Moments:
        moments = self.gate()
        self.beside.wait_event(moments.ready)
        if collective:
            collective.issue(group, is_async=False)
        moments.collective_end.record()
        with torch.cuda.stream(self.beside):
            if kernel:
                kernel()
            moments.kernel_end.record()
        self.default.wait_stream(self.beside)
        return moments


Once = Callable[[Collective | None, Kernel | None, dist.ProcessGroup], Moments]


class Pair:
    """A collective and a kernel on certain streams, under all variants and each alone."""

    def __init__(self, race: Race, once: Once, collective: Collective, kernel: Kernel) -> None:
        self._race, self._once, self._collective = race, once, collective
        self.num_wrong, self.num_late = 0, 0
        self.variants = all_variants(race.priority)
        self.candidates: list[tuple[Variant, Collective | None, Kernel | None]] = [
            *((variant, collective, kernel) for variant in self.variants),
            (Variant("collective alone"), collective, None),
            (Variant("kernel alone"), None, kernel),
        ]

    def run(self, candidate: int) -> list[float]:
        """ms from the moment to the end of the collective, and to the end of the kernel, of each timed repetition."""
        variant, collective, kernel = self.candidates[candidate]
        group = self._race.groups[variant.has_option]
        self._race.begin(variant)
        self._collective.refill()
        found: list[Moments] = []
        for number in range(NUM_UNTIMED + NUM_TIMED):
            found.append(self._once(collective, kernel, group))
            self.num_late += number >= NUM_UNTIMED and found[-1].ready.query()  # ready before all was issued
        self._race.end(variant, NUM_UNTIMED + NUM_TIMED)
        if collective is not None:
            self.num_wrong += not collective.is_right(NUM_UNTIMED + NUM_TIMED)
        return [time_ms for moments in found[NUM_UNTIMED:] for time_ms in moments.times_ms()]


def run_case(race: Race, share: float, name: str, pair: Pair) -> Case:
    pair.run(0)  # loads and compiles what is new
    pair.num_wrong = pair.num_late = 0
    flat: list[float] = []
    for order in race.orders(len(pair.candidates), share):
        times = {candidate: pair.run(candidate) for candidate in order}
        flat.extend(value for candidate in range(len(pair.candidates)) for value in times[candidate])
    ends_ms = torch.tensor(largest(flat)).view(-1, len(pair.candidates), NUM_TIMED, 2)  # the last: collective, kernel
    collective = ends_ms[..., 0].median(-1).values.tolist()
    both = ends_ms.amax(-1).median(-1).values.tolist()
    num_variants = len(pair.variants)
    timed = {
        "both ended": measure(pair.variants, [row[:num_variants] for row in both]),
        "collective ended": measure(pair.variants, [row[:num_variants] for row in collective]),
    }
    alone_ms = {
        what: round(statistics.median(row[num_variants + place] for row in both), 4)
        for place, what in enumerate(("collective", "kernel"))
    }
    num_wrong, num_late = (int(value) for value in largest([pair.num_wrong, pair.num_late]))
    results = f"{num_wrong} RESULTS WRONG" if num_wrong else "results right"
    late = f"; {num_late} repetitions were ready before all was issued" if num_late else ""
    return Case(name=name, timed=timed, alone_ms=alone_ms, checks=results + late)


def run_pairs(race: Race) -> list[Case]:
    """Every collective with every kernel."""
    streams, kernels = Streams(), make_kernels()
    kinds: dict[str, tuple[Once, Collective]] = {
        "DDP": (streams.ddp, Collective("all-reduce", DDP_BYTES)),
        "FSDP2": (streams.fsdp2, Collective("all-gather", FSDP_BYTES, is_gather=True)),
        "TP": (streams.tensor_parallel, Collective("all-reduce", TP_BYTES)),
    }
    cases: list[Case] = []
    num_cases = len(kinds) * len(kernels)
    for kind, (once, collective) in kinds.items():
        for what, kernel in kernels.items():
            pair = Pair(race, once, collective, kernel)
            cases.append(run_case(race, (len(cases) + 1) / num_cases, f"{kind} {collective.name}, {what}", pair))
            log(f"... {cases[-1].name}: {cases[-1].checks}")
    return cases
