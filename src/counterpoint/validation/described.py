"""Describes a case from sizes alone: it uses the captured launches, and no measured time.

A kernel's binary and its library determine the launch (tile, threads, registers, shared memory); its time follows from
sizes, as for a workload file.
"""

import re

from msgspec.structs import replace

from counterpoint.errors import WorkloadError, shown
from counterpoint.step import Collective, Copy, Footprint, Kernel, Operation, Step, is_fill
from counterpoint.validation.cases import (
    Attention,
    Case,
    CollectiveWork,
    Elementwise,
    Entry,
    HostCopy,
    Matmul,
    Scan,
    Softmax,
)
from counterpoint.workloads.description import CollectiveEntry, CopyEntry, Gemm, OtherKernel
from counterpoint.workloads.gemm import tile_count
from counterpoint.workloads.reader import operation_of

# cuBLAS writes the tile and the depth of a stage in its kernels' names: nvjet_..._128x256_64x4_..., ..._128x64_8x5_...
TILE_IN_NAME = re.compile(r"_(\d+)x(\d+)_(\d+)x\d+")
XMMA_TILE_IN_NAME = re.compile(r"tilesize(\d+)x(\d+)x(\d+)")


def described_step(case: Case, captured: Step) -> Step:
    """Return the case's step with work instead of times; only names and launches are taken from `captured`.

    Raises `WorkloadError` if the name of a kernel does not state its tile.
    """
    entries = dict(zip(places_of(case, captured), case.entries, strict=True))
    operations = [
        _operation(entries[place], launched, captured.num_ranks) if place in entries else _without_time(launched)
        for place, launched in enumerate(captured.operations)
    ]
    return Step(name=case.name, num_ranks=captured.num_ranks, operations=tuple(operations))


def _without_time(launched: Operation) -> Operation:
    return replace(launched, lone_us=None)


def places_of(case: Case, step: Step) -> tuple[int, ...]:
    """Return the number of the operation that each entry became; fills that libraries put before their kernels do not count.

    Raises `WorkloadError` if the step holds other operations.
    """
    places = [number for number, each in enumerate(step.operations) if not is_fill(each)]
    wanted = [_kind(entry) for entry in case.entries]
    if wanted != [type(step.operations[place]) for place in places]:
        names = ", ".join(each.name[:40] for each in step.operations)
        raise WorkloadError(
            f"Case '{case.name}' has {len(wanted)} entries, but the captured step does not hold one operation for each: "
            f"{shown(names, 400)}."
        )
    return tuple(places)


def _kind(entry: Entry) -> type[Operation]:
    match entry.work:
        case CollectiveWork():
            return Collective
        case HostCopy():
            return Copy
        case _:
            return Kernel


def _operation(entry: Entry, launched: Operation, num_ranks: int) -> Operation:
    waits_for, stream = launched.waits_for, launched.stream
    work, name = entry.work, launched.name
    if isinstance(work, HostCopy):
        copied = CopyEntry(name=name[:200], stream=stream, direction=work.direction, bytes=work.num_bytes)
        return replace(operation_of(copied, waits_for, num_ranks), name=name)
    if isinstance(work, CollectiveWork):
        exchange = CollectiveEntry(name=name[:200], stream=stream, collective=work.collective, bytes=work.num_bytes)
        assert isinstance(launched, Collective), "the captured step has a collective for each exchange"
        made = operation_of(exchange, waits_for, num_ranks)
        return replace(made, name=name, footprint=launched.footprint)
    assert isinstance(launched, Kernel), "the captured step has a kernel for each computation"
    if isinstance(work, Matmul):
        gemm = _gemm(work, stream, launched)
        # the launched footprint: a workload file cannot state clusters of GEMMs
        made = operation_of(gemm, waits_for, num_ranks)
        return replace(made, name=name, footprint=launched.footprint)
    return replace(operation_of(_other(work, stream, launched), waits_for, num_ranks), name=name)


def _gemm(work: Matmul, stream: int, launched: Kernel) -> Gemm:
    footprint = launched.footprint
    tile = work.tile or _tile_of(launched.name)
    tiles = tile_count(work.m, work.n, tile)
    return Gemm(
        name=launched.name[:200],
        stream=stream,
        m=work.m,
        n=work.n,
        k=work.k,
        dtype=work.dtype,
        tile="x".join(map(str, tile)),
        threads_per_cta=footprint.threads_per_cta,
        registers_per_thread=footprint.registers_per_thread,
        shared_bytes_per_cta=footprint.shared_bytes,
        num_ctas=footprint.num_ctas if footprint.num_ctas < tiles else None,
        is_work_sharing=launched.is_work_sharing,
    )


def _tile_of(name: str) -> tuple[int, int, int]:
    """Return rows, columns and depth of the tile in the name of a cuBLAS kernel."""
    found = XMMA_TILE_IN_NAME.search(name) or TILE_IN_NAME.search(name)
    if found is None:
        raise WorkloadError(f"The name of '{shown(name)}' says no tile, so nothing is predicted from its sizes.")
    # cuBLAS stores matrices by columns, so it computes the transposed product of matrices that are stored by rows
    n, m, k = (int(part) for part in found.groups())
    return m, n, k


def _other(work: Elementwise | Scan | Softmax | Attention, stream: int, launched: Kernel) -> OtherKernel:
    footprint: Footprint = launched.footprint
    flops, hbm_bytes = _work_of(work)
    return OtherKernel(
        name=launched.name[:200],
        stream=stream,
        num_ctas=footprint.num_ctas,
        threads_per_cta=footprint.threads_per_cta,
        registers_per_thread=footprint.registers_per_thread,
        shared_bytes_per_cta=footprint.shared_bytes,
        ctas_per_cluster=footprint.ctas_per_cluster,
        character=launched.character,
        flops=flops,
        hbm_bytes=hbm_bytes,
        is_work_sharing=launched.is_work_sharing,
    )


def _work_of(work: Elementwise | Scan | Softmax | Attention) -> tuple[float | None, float]:
    """Return the floating-point operations, and the bytes moved from and to memory."""
    match work:
        case Elementwise():
            return None, 2.0 * work.num_bytes
        case Scan():
            return None, 2.0 * 4 * work.rows * work.columns
        case Softmax():
            return None, 2.0 * 2 * work.rows * work.columns
        case Attention():
            size = work.batch * work.heads * work.tokens * work.head_size
            return 4.0 * size * work.tokens, 4.0 * 2 * size
