"""The launch of the paper's matmuls on a machine: registers and shared memory as Triton compiles them for its GPU.

`launches.toml` holds them by compute capability; `benchmarks/paper_launches.py` makes that file, without a GPU. The shipped
workload files give the launch on an H200; on other GPUs the same kernel uses other registers and other shared memory.
"""

from functools import cache

from msgspec.structs import replace

from counterpoint.errors import MachineError, StepError
from counterpoint.machine import ElementType, Gpu
from counterpoint.value import Value, read_shipped
from counterpoint.workloads.description import Description, Gemm


class CompiledLaunches(Value, frozen=True, kw_only=True):
    """By compute capability: type, tile, registers per thread, those of the persistent kernel, bytes of shared memory."""

    source: str
    launches: dict[str, tuple[tuple[ElementType, str, int, int, int], ...]]


@cache
def compiled_launches() -> CompiledLaunches:
    """Return the shipped table."""
    return read_shipped("paper/launches.toml", CompiledLaunches, MachineError)


def compiled_for(description: Description, gpu: Gpu) -> Description:
    """Return the workload with its GEMMs' launches as Triton compiles them for this GPU.

    If the table does not hold a tile or GPU, the launch is unchanged. Raises `StepError` for a type that Triton does not
    compile for this GPU.
    """
    rows = compiled_launches().launches.get(gpu.compute_capability, ())
    return replace(description, gemms=tuple(_compiled(gemm, gpu, rows) for gemm in description.gemms))


def _compiled(gemm: Gemm, gpu: Gpu, rows: tuple[tuple[ElementType, str, int, int, int], ...]) -> Gemm:
    by_type = {dtype: (usual, persistent, shared) for dtype, tile, usual, persistent, shared in rows if tile == gemm.tile}
    if not by_type:
        return gemm
    if gemm.dtype not in by_type:
        raise StepError(
            f"Triton compiles no {gemm.dtype} matmul of tile {gemm.tile} for compute capability {gpu.compute_capability}. "
            f"Types that it compiles: {', '.join(by_type)}."
        )
    usual, persistent, shared = by_type[gemm.dtype]
    registers = usual if gemm.num_ctas is None else persistent
    return replace(gemm, registers_per_thread=registers, shared_bytes_per_cta=shared, stages=None)
