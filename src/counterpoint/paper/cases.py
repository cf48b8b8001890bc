"""The first paper's workloads as descriptions, and the axes of a sweep: CTAs, sizes, tiles, types, ranks.

A case is a `Description`, the content of a workload file, so the same case is simulated and run on GPUs. From the paper: the
sizes, the collective's 896 MiB, the tiles of opt1 and opt2, and CTA counts from 2 to 1024. The registers and shared
memory of a launch are those that Triton compiles for the GPU (`launches.py`).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, get_args

from msgspec.structs import replace

from counterpoint.errors import WorkloadError, shown
from counterpoint.machine import ElementType, Machine
from counterpoint.step import Kernel, Step
from counterpoint.units import GIB, format_bytes
from counterpoint.value import Value
from counterpoint.workloads import load_description
from counterpoint.workloads.description import Description, Gemm, parse_bytes
from counterpoint.workloads.gemm import matmul_bytes, parse_tile, stage_bytes

Axis = Literal["ctas", "sizes", "bytes", "tiles", "types", "ranks", "iterations"]
AXES: tuple[Axis, ...] = get_args(Axis)
ONE_PER_TILE = "tiles"
MOST_SWEPT = 999_999_999
SIZES, COLLECTIVES = ("cb", "mb"), ("ar", "a2a")
TILES = {"opt1": "64x64x32", "opt2": "64x64x64", "large": "128x128x64"}
TYPES: tuple[ElementType, ...] = ("fp32", "tf32", "bf16", "fp16", "fp8")  # the types that the matmuls here compute
DEFAULTS: dict[Axis, tuple[str, ...]] = {
    "ctas": (*(str(2**power) for power in range(1, 11)), ONE_PER_TILE),
    "sizes": ("2048", "4096", "8192", "16384", "32768"),
    "bytes": ("56 MiB", "224 MiB", "896 MiB", "3584 MiB"),
    "tiles": ("32x32x32", "64x64x32", "64x64x64", "128x64x64", "128x128x64"),
    "types": TYPES,
    "ranks": ("2", "4", "8"),
    "iterations": ("1", "2", "4", "8", "12", "24"),
}
# Memory that CUDA, NCCL and the caching allocator take besides a workload's own buffers; an assumption, 2026-11-23.
RESERVE_BYTES = GIB
# Registers besides the accumulators of a tile that is not in `launches.toml`. Assumed, from 64x64x64 in bf16: 72 less 32.
REGISTERS_BESIDE_TILE, MAX_REGISTERS = 40, 255


class SweepCase(Value, frozen=True, kw_only=True):
    """One point of a sweep: the requested value of the axis, and the workload with that value."""

    setting: str
    description: Description


def paper_workload_names() -> list[str]:
    """Return the names, as `SIZE_COLLECTIVE_TILE`, small sizes first."""
    return [f"{size}_{collective}_{tile}" for size in SIZES for collective in COLLECTIVES for tile in TILES]


def paper_description(name_or_path: Path | str) -> Description:
    """Return a workload of the paper, the same with the `large` tile, or a user's own from a path that ends in `.toml`.

    Raises `WorkloadError`.
    """
    name = str(name_or_path).lower()
    if name in paper_workload_names() and name.endswith("_large"):
        case = name.removesuffix("_large")
        return replace(with_tile(load_description(f"{case}_opt2"), TILES["large"]), name=name)
    return load_description(name_or_path)


def with_tile(description: Description, tile: str) -> Description:
    """Return the same work in other tiles: threads, pipeline stages and (assumed) registers follow the tile."""
    return _with_gemms(description, lambda gemm: retiled(gemm, tile, gemm.dtype))


def retiled(gemm: Gemm, tile: str, dtype: ElementType) -> Gemm:
    """Return the GEMM in another tile and type, with the launch that `PaperWorkload` gives it and assumed registers."""
    tile_m, tile_n, _ = parse_tile(tile, "--sweep tiles")
    threads = 128 if tile_m * tile_n <= 128 * 64 else 256
    return replace(
        gemm,
        tile=tile,
        dtype=dtype,
        threads_per_cta=threads,
        registers_per_thread=min(MAX_REGISTERS, tile_m * tile_n // threads + REGISTERS_BESIDE_TILE),
        stages=3 if tile == TILES["large"] else 2,
        shared_bytes_per_cta=None,
        hbm_bytes=None,
    )


def with_stages(step: Step, description: Description) -> Step:
    """Return a captured step of the workload with the stages of its GEMM, which no graph says."""
    (gemm,) = description.gemms
    known = stage_bytes(gemm.dtype, gemm.tile_sizes)
    operations = (replace(each, stage_bytes=known) if isinstance(each, Kernel) else each for each in step.operations)
    return replace(step, operations=tuple(operations))


def parse_sweep(text: str) -> tuple[Axis, tuple[str, ...]]:
    """Read `"ctas"` or `"ctas=64,256,tiles"`: return the axis and its values, or the paper's values if none are given.

    Raises `WorkloadError`.
    """
    name, has_values, values = text.partition("=")
    axis = next((each for each in AXES if each == name.strip()), None)
    if axis is None:
        raise WorkloadError(f"--sweep must be one of {', '.join(AXES)}, as in ctas or ctas=64,256; found '{shown(text)}'.")
    found = tuple(part.strip() for part in values.split(",")) if has_values else DEFAULTS[axis]
    if not all(found):
        raise WorkloadError(f"--sweep {axis} has an empty value; give values as in {axis}={','.join(DEFAULTS[axis][:2])}.")
    return axis, found


def cases_of(description: Description, axis: Axis, values: Sequence[str], machine: Machine | None = None) -> list[SweepCase]:
    """Return the workload at each value of an axis.

    If `values` are the default ranks, those beyond the `machine`'s GPUs are left out. Raises `WorkloadError`.
    """
    if not description.gemms and axis in ("ctas", "sizes", "tiles", "types"):
        raise WorkloadError(
            f"Workload '{shown(description.name)}' has no GEMM, so --sweep {axis} changes nothing; leave it out."
        )
    if not description.collectives and axis in ("bytes", "ranks"):
        name = shown(description.name)
        raise WorkloadError(f"Workload '{name}' has no collective, so --sweep {axis} changes nothing; leave it out.")
    if axis == "ranks" and values is DEFAULTS["ranks"] and machine is not None:
        values = [value for value in values if int(value) <= machine.num_gpus]
    return [SweepCase(setting=value, description=CHANGES[axis](description, value)) for value in values]


def with_iterations(description: Description, value: str) -> Description:
    """Return the same workload with another number of iterations."""
    return replace(description, iterations=_number(value, "iterations"))


def with_ranks(description: Description, value: str) -> Description:
    """Return the same workload on another number of ranks; a collective's group size follows if it was all ranks."""
    num_ranks = _number(value, "ranks")
    collectives = tuple(
        replace(each, group_size=None if each.group_size in (None, description.num_ranks) else each.group_size)
        for each in description.collectives
    )
    return replace(description, num_ranks=num_ranks, collectives=collectives)


def _with_ctas(description: Description, value: str) -> Description:
    num_ctas = None if value == ONE_PER_TILE else _number(value, "ctas")
    return _with_gemms(description, lambda gemm: replace(gemm, num_ctas=num_ctas))


def _with_rows(description: Description, value: str) -> Description:
    return _with_gemms(description, lambda gemm: replace(gemm, m=_number(value, "sizes"), hbm_bytes=None))


def _with_bytes(description: Description, value: str) -> Description:
    num_bytes = parse_bytes(value, "--sweep bytes")
    collectives = tuple(replace(each, bytes=num_bytes, lone_us=None) for each in description.collectives)
    return replace(description, collectives=collectives)


def _with_type(description: Description, value: str) -> Description:
    dtype = next((each for each in TYPES if each == value), None)
    if dtype is None:
        raise WorkloadError(f"--sweep types must name some of {', '.join(TYPES)}; found '{shown(value)}'.")
    return _with_gemms(description, lambda gemm: replace(gemm, dtype=dtype, hbm_bytes=None))


def _with_gemms(description: Description, change: Callable[[Gemm], Gemm]) -> Description:
    """Change every GEMM, and remove a time that the file states, because it is that of another launch."""
    return replace(description, gemms=tuple(replace(change(gemm), lone_us=None) for gemm in description.gemms))


CHANGES: dict[Axis, Callable[[Description, str], Description]] = {
    "ctas": _with_ctas,
    "sizes": _with_rows,
    "bytes": _with_bytes,
    "tiles": with_tile,
    "types": _with_type,
    "ranks": with_ranks,
    "iterations": with_iterations,
}


def _number(value: str, axis: Axis) -> int:
    if not (value.isascii() and value.isdigit() and len(value) <= len(str(MOST_SWEPT)) and int(value) > 0):
        words = f", or {ONE_PER_TILE} for one CTA per tile" if axis == "ctas" else ""
        raise WorkloadError(f"--sweep {axis} takes whole numbers from 1 to {MOST_SWEPT:,}{words}; found '{shown(value)}'.")
    return int(value)


def memory_bytes(description: Description) -> int:
    """Return the bytes of GPU memory that the buffers take on each rank, one set for all iterations.

    A GEMM has its operands and its output; a collective one buffer, but an all-to-all two; copies none of their own.
    """
    matmuls = sum(matmul_bytes(gemm.m, gemm.n, gemm.k, gemm.dtype) for gemm in description.gemms)
    buffers = sum(
        parse_bytes(each.bytes, each.name) * (2 if each.collective == "all_to_all" else 1)
        for each in description.collectives
    )
    return matmuls + buffers


def check_memory(description: Description, available_bytes: int, where: str) -> None:
    """Raise `WorkloadError` if the buffers and `RESERVE_BYTES` exceed the available memory; `where` names that memory."""
    needed = memory_bytes(description) + RESERVE_BYTES
    if needed > available_bytes:
        raise WorkloadError(
            f"Workload '{shown(description.name)}' needs {format_bytes(needed)} of memory on each GPU "
            f"({format_bytes(RESERVE_BYTES)} of it for CUDA and NCCL), but {where} {format_bytes(available_bytes)}. "
            "Choose smaller sizes."
        )
