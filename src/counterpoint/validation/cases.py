"""The validation set: what each case runs, as values. No case may ever be used to fit a constant.

The set was drawn once with a seed, from kernels, collectives and sizes that no calibration uses. `set_digest` changes if a
case does, and measurements of another set are refused. If a case is used for a fit, delete it and measure the set anew.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Literal

import msgspec

from counterpoint.machine import ElementType
from counterpoint.step import CollectiveKind, CopyDirection
from counterpoint.units import MIB
from counterpoint.value import Value

SEED = 20261123
Family = Literal["pairs", "training", "types", "one GPU"]
CTA_LIMITS = (8, 12)  # the collectives of a case also run with these limits, each in its own process group
COLLECTIVES: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
# the calibration was measured at 64, 256 and 896 MiB
COLLECTIVE_MIB = (40, 96, 144, 192, 320, 448, 576)
DIMENSIONS = (3072, 4096, 5120, 6144, 7168)


class Matmul(Value, frozen=True, kw_only=True, tag="matmul"):
    """C[m, n] = A[m, k] B[k, n], computed by cuBLAS, or by a Triton kernel with one CTA per tile if `tile` is given."""

    m: int
    n: int
    k: int
    dtype: ElementType = "bf16"
    tile: tuple[int, int, int] | None = None
    num_warps: int = 4
    num_stages: int = 3


class Elementwise(Value, frozen=True, kw_only=True, tag="elementwise"):
    """Scales one tensor of `num_bytes` in bf16 into another."""

    num_bytes: int


class Scan(Value, frozen=True, kw_only=True, tag="scan"):
    """Cumulative sums along the rows of a matrix in fp32."""

    rows: int
    columns: int


class Softmax(Value, frozen=True, kw_only=True, tag="softmax"):
    """Softmax along the rows of a matrix in bf16."""

    rows: int
    columns: int


class Attention(Value, frozen=True, kw_only=True, tag="attention"):
    """Attention without a mask, in bf16, forward only, by cuDNN."""

    batch: int
    heads: int
    tokens: int
    head_size: int = 128


class CollectiveWork(Value, frozen=True, kw_only=True, tag="collective"):
    """A collective of all ranks in bf16; `num_bytes` is counted as by nccl-tests."""

    collective: CollectiveKind
    num_bytes: int


class HostCopy(Value, frozen=True, kw_only=True, tag="host copy"):
    """A copy between the GPU and pinned memory."""

    direction: CopyDirection
    num_bytes: int


Work = Matmul | Elementwise | Scan | Softmax | Attention | CollectiveWork | HostCopy


class Entry(Value, frozen=True, kw_only=True):
    """One operation, in the order of issue; it waits for earlier entries, by number, besides those of its stream."""

    work: Work
    stream: int = 0
    waits_for: tuple[int, ...] = ()


class Case(Value, frozen=True, kw_only=True):
    """One step. `is_traced`: it also runs without a graph, under the profiler."""

    name: str
    family: Family
    entries: tuple[Entry, ...]
    is_traced: bool = False


def cases_for(num_ranks: int) -> tuple[Case, ...]:
    """Return the set for one GPU, or the set for several."""
    return _one_gpu() if num_ranks == 1 else _several_gpus()


def set_digest(num_ranks: int) -> str:
    """Return twelve hexadecimal digits that change with any case of the set."""
    return hashlib.sha256(msgspec.json.encode(cases_for(num_ranks))).hexdigest()[:12]


@cache
def _several_gpus() -> tuple[Case, ...]:
    drawn = random.Random(SEED)
    return (*drawn_pairs(drawn), *_types(drawn), *_training())


def _triton(tile: tuple[int, int, int], num_warps: int, num_stages: int) -> Callable[[random.Random], Matmul]:
    def draw(drawn: random.Random) -> Matmul:
        m, n, k = (drawn.choice(DIMENSIONS) for _ in range(3))
        return Matmul(m=m, n=n, k=k, tile=tile, num_warps=num_warps, num_stages=num_stages)

    return draw


def _cublas(drawn: random.Random) -> Matmul:
    return Matmul(m=2 * drawn.choice(DIMENSIONS), n=drawn.choice(DIMENSIONS), k=drawn.choice(DIMENSIONS))


def _elementwise(drawn: random.Random) -> Elementwise:
    return Elementwise(num_bytes=drawn.choice((192, 384, 768)) * MIB)


def _scan(drawn: random.Random) -> Scan:
    return Scan(rows=drawn.choice((4096, 8192, 12288)), columns=drawn.choice((8192, 16384)))


def _softmax(drawn: random.Random) -> Softmax:
    return Softmax(rows=drawn.choice((8192, 16384, 24576)), columns=drawn.choice((8192, 16384)))


def _attention(drawn: random.Random) -> Attention:
    return Attention(batch=drawn.choice((1, 2)), heads=drawn.choice((16, 24, 40)), tokens=drawn.choice((4096, 6144)))


KERNELS: dict[str, Callable[[random.Random], Work]] = {
    "triton128x64": _triton((128, 64, 64), 4, 3),
    "triton64x128": _triton((64, 128, 32), 4, 4),
    "triton256x64": _triton((256, 64, 32), 8, 3),
    "cublas": _cublas,
    "elementwise": _elementwise,
    "scan": _scan,
    "softmax": _softmax,
    "attention": _attention,
}


def drawn_pairs(drawn: random.Random) -> list[Case]:
    """Draw each kernel in two cases and each collective as often; chains alternate with steps that issue both at once."""
    collectives = [*COLLECTIVES] * (2 * len(KERNELS) // len(COLLECTIVES))
    drawn.shuffle(collectives)
    cases = []
    for number, collective in enumerate(collectives):
        name = list(KERNELS)[number % len(KERNELS)]
        is_chain = number < len(KERNELS)
        computations = [KERNELS[name](drawn) for _ in range(2 if is_chain else 3)]
        exchange = CollectiveWork(collective=collective, num_bytes=drawn.choice(COLLECTIVE_MIB) * MIB)
        entries = chain(computations[:1], exchange, 4) if is_chain else _at_once(computations, exchange)
        form = "chain" if is_chain else "at once"
        is_traced = number % 2 == 0
        cases.append(Case(name=f"{name}, {collective}, {form}", family="pairs", entries=tuple(entries), is_traced=is_traced))
    return cases


def chain(computations: Sequence[Work], exchange: CollectiveWork, iterations: int) -> list[Entry]:
    """Issue collectives that wait for the kernels of their iteration and may run beside those of the next one."""
    entries: list[Entry] = []
    for _ in range(iterations):
        entries.extend(Entry(work=work) for work in computations)
        entries.append(Entry(work=exchange, stream=1, waits_for=(len(entries) - 1,)))
    return entries


def _at_once(computations: Sequence[Work], exchange: CollectiveWork) -> list[Entry]:
    """Issue a collective that becomes ready together with a kernel, wait for both, and do so once more."""
    first = [Entry(work=exchange, stream=1), *(Entry(work=work) for work in computations)]
    last = len(first) - 1
    second = [Entry(work=exchange, stream=1, waits_for=(last,)), Entry(work=computations[0], waits_for=(0,))]
    return [*first, *second, *(Entry(work=work) for work in computations[1:])]


def _types(drawn: random.Random) -> list[Case]:
    """Draw matmuls of every type and of unusual shapes beside a collective, for predictions from sizes alone."""
    shapes: list[Matmul] = [
        Matmul(m=10240, n=7168, k=5120),
        Matmul(m=4096, n=12288, k=3072),
        Matmul(m=7168, n=7168, k=7168, dtype="fp16"),
        Matmul(m=6144, n=6144, k=6144, dtype="tf32"),
        Matmul(m=4096, n=3072, k=4096, dtype="fp32"),
        Matmul(m=8192, n=10240, k=6144, dtype="fp8"),
        Matmul(m=128, n=28672, k=8192),
        Matmul(m=1024, n=5120, k=20480),
    ]
    cases = []
    for number, shape in enumerate(shapes):
        collective = COLLECTIVES[number % len(COLLECTIVES)]
        exchange = CollectiveWork(collective=collective, num_bytes=drawn.choice(COLLECTIVE_MIB) * MIB)
        repeated = 6 if shape.m < 1000 else 1
        name = f"{shape.dtype} {shape.m}x{shape.n}x{shape.k}, {collective}"
        entries = chain([shape] * repeated, exchange, 3)
        cases.append(Case(name=name, family="types", entries=tuple(entries)))
    return cases


def _training() -> list[Case]:
    """Return small steps in the order in which data-parallel and sharded training issues them."""
    return [
        Case(name="DDP, 4 layers", family="training", entries=tuple(data_parallel(4, 6144, 4096)), is_traced=True),
        Case(name="FSDP, 4 layers", family="training", entries=tuple(sharded(4, 5120, 4096)), is_traced=True),
        Case(name="experts, 3 layers", family="training", entries=tuple(experts(3, 4096, 8192)), is_traced=True),
    ]


def data_parallel(layers: int, width: int, tokens: int) -> list[Entry]:
    """Issue the forward pass, then both gradients of each layer, and the weight's all-reduce beside what follows."""
    grow = Matmul(m=tokens, n=width, k=width)
    weight_gradient = Matmul(m=width, n=width, k=tokens)
    activation = Elementwise(num_bytes=2 * tokens * width)
    entries = [Entry(work=work) for _ in range(layers) for work in (grow, activation)]
    exchange = CollectiveWork(collective="all_reduce", num_bytes=2 * width * width)
    for _ in range(layers):
        entries += [Entry(work=activation), Entry(work=weight_gradient)]
        entries.append(Entry(work=exchange, stream=1, waits_for=(len(entries) - 1,)))
        entries.append(Entry(work=grow))
    return entries


def sharded(layers: int, width: int, tokens: int) -> list[Entry]:
    """Issue all-gathers one layer ahead on their own stream, and in the backward pass reduce-scatters on a third stream."""
    weights = 2 * 2 * width * width
    gather = CollectiveWork(collective="all_gather", num_bytes=weights)
    scatter = CollectiveWork(collective="reduce_scatter", num_bytes=weights)
    forward = (Matmul(m=tokens, n=2 * width, k=width), Elementwise(num_bytes=4 * tokens * width))
    backward = (Matmul(m=tokens, n=width, k=2 * width), Matmul(m=width, n=2 * width, k=tokens))
    entries = [Entry(work=gather, stream=1)]
    gathered = 0
    computed: tuple[int, ...] = ()  # the computation that the next all-gather waits for
    for layer in range(2 * layers):
        needed = gathered
        if layer + 1 < 2 * layers:
            entries.append(Entry(work=gather, stream=1, waits_for=computed))
            gathered = len(entries) - 1
        first, second = forward if layer < layers else backward
        entries += [Entry(work=first, waits_for=(needed,)), Entry(work=second)]
        computed = (len(entries) - 1,)
        if layer >= layers:
            entries.append(Entry(work=scatter, stream=2, waits_for=computed))
    return entries


def experts(layers: int, width: int, tokens: int) -> list[Entry]:
    """Issue attention, an all-to-all, a matmul of the tokens that came, and an all-to-all back beside a shared expert."""
    attention = Attention(batch=2, heads=width // 128, tokens=tokens // 2)
    expert = Matmul(m=tokens, n=2 * width, k=width)
    shared = Matmul(m=tokens, n=width, k=width)
    exchange = CollectiveWork(collective="all_to_all", num_bytes=2 * 2 * tokens * width)
    entries: list[Entry] = []
    back: tuple[int, ...] = ()
    for _ in range(layers):
        start = len(entries)
        entries += [
            Entry(work=attention, waits_for=back),
            Entry(work=exchange, stream=1, waits_for=(start,)),
            Entry(work=shared),
            Entry(work=expert, waits_for=(start + 1,)),
            Entry(work=exchange, stream=1, waits_for=(start + 3,)),
            Entry(work=shared),
        ]
        back = (start + 4,)
    return entries


@cache
def _one_gpu() -> tuple[Case, ...]:
    """Return kernels beside each other and beside copies to the host, as in offloading."""
    drawn = random.Random(SEED + 1)
    to_host, from_host = (
        HostCopy(direction=direction, num_bytes=drawn.choice((48, 80)) * MIB)
        for direction in ("device_to_host", "host_to_device")
    )
    cases = []
    for number, beside in enumerate(drawn_side_by_side(drawn)):
        cases.append(msgspec.structs.replace(beside, is_traced=number % 4 == 0))
        name, computation = list(KERNELS)[number], beside.entries[0].work
        copy = (to_host, from_host)[number % 2]
        entries = [Entry(work=copy, stream=1), *(Entry(work=computation) for _ in range(3))]
        cases.append(Case(name=f"{name} beside a {copy.direction} copy", family="one GPU", entries=tuple(entries)))
    for shape in _shapes_alone():
        name = f"{shape.dtype} {shape.m}x{shape.n}x{shape.k}, alone"
        cases.append(Case(name=name, family="types", entries=(Entry(work=shape), Entry(work=shape))))
    return tuple(cases)


def drawn_side_by_side(drawn: random.Random) -> Iterator[Case]:
    """Draw each kind of kernel three times in a row, and beside it one of another kind, ready with the second."""
    for number, name in enumerate(KERNELS):
        other = list(KERNELS)[(number + 4) % len(KERNELS)]
        first, second = KERNELS[name](drawn), KERNELS[other](drawn)
        entries = (Entry(work=first), Entry(work=first), Entry(work=second, stream=1, waits_for=(0,)), Entry(work=first))
        yield Case(name=f"{name} beside {other}", family="one GPU", entries=entries)


def _shapes_alone() -> tuple[Matmul, ...]:
    return (
        Matmul(m=10240, n=5120, k=7168),
        Matmul(m=5120, n=5120, k=5120, dtype="fp16"),
        Matmul(m=5120, n=6144, k=4096, dtype="tf32"),
        Matmul(m=3072, n=5120, k=3072, dtype="fp32"),
        Matmul(m=6144, n=7168, k=8192, dtype="fp8"),
        Matmul(m=64, n=20480, k=8192),
    )
