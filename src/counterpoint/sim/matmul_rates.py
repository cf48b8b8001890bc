"""How fast matmuls and attentions run: what they reach of their type's peak, and whether L2 limits them."""

from counterpoint.machine import ELEMENT_BYTES, ElementType, Machine
from counterpoint.sim.calibration import Calibration
from counterpoint.sim.rates import SM_EXPONENT
from counterpoint.sim.tiles import tile_of
from counterpoint.step import Kernel
from counterpoint.workloads.gemm import matmul_flops

USUAL_ELEMENT_TYPE: ElementType = "bf16"  # the assumed type of a matmul or an attention that does not state one
# L2 limits a matmul if its tiles arrive at less than this share of the peak rate of its type: between tiles of 64x128
# (0.49), which lose 5 % without 24 of 132 SMs, and 256x64 (0.59), which lose 17 % (one H200)
MOST_FED = 0.504
# A library's matmul takes longer by what its pipeline needs to start and to end each tile: as long as for these bytes of
# a row of A. One H200, cool: 8192x8192 by 1,024, 2,048 and 8,192 reach 0.73, 0.78 and 0.81 of the peak in bf16, and 0.58
# and 0.75 by 1,024 and 8,192 in fp8.
PIPELINE_BYTES = 320
LARGE_SIZE = 8192  # rows, columns and inner size of the matmuls that gave `matmul_peak_fraction`


def reached_flops_per_s(kernel: Kernel, machine: Machine, calibration: Calibration) -> float:
    """Return the operations per second that a kernel of this kind, type and depth reaches on the whole GPU."""
    if kernel.character not in ("matmul", "attention"):
        return machine.gpu.fp32_flops_per_s * calibration.fp32_peak_fraction.value
    element_type = kernel.element_type or USUAL_ELEMENT_TYPE
    peak = machine.matmul_flops_per_s(element_type)
    if kernel.character == "attention":
        return peak * calibration.attention_peak_fraction.value
    reached = peak * calibration.matmul_fraction(element_type)
    if not kernel.is_work_sharing or kernel.matmul_sizes is None:
        return reached
    return reached * with_pipeline(element_type, LARGE_SIZE) / with_pipeline(element_type, kernel.matmul_sizes[1])


def with_pipeline(element_type: ElementType, inner_size: int) -> float:
    """Return the time of a library's matmul of this inner size, relative to its multiplications alone."""
    return 1 + PIPELINE_BYTES / ELEMENT_BYTES[element_type] / inner_size


def l2_bytes_per_s(machine: Machine, calibration: Calibration) -> float:
    """Return what L2 delivers to the whole GPU."""
    return calibration.l2_bytes_per_cycle_per_sm.value * machine.gpu.num_sms * machine.gpu.clock_mhz * 1e6


def is_l2_limited(kernel: Kernel, machine: Machine, calibration: Calibration) -> bool:
    """Return whether L2 delivers a matmul's tiles more slowly than the SMs multiply them."""
    tile = tile_of(kernel)
    if tile is None or kernel.cta_us is not None or not _has_rate(kernel, machine):
        return False
    element_bytes = ELEMENT_BYTES[kernel.element_type or USUAL_ELEMENT_TYPE]
    fed = l2_bytes_per_s(machine, calibration) / element_bytes * tile.reuse
    return fed < MOST_FED * machine.matmul_flops_per_s(kernel.element_type or USUAL_ELEMENT_TYPE)


def _has_rate(kernel: Kernel, machine: Machine) -> bool:
    """Return whether the machine multiplies the kernel's type; a kernel with a measured time needs no such rate."""
    return (kernel.element_type or USUAL_ELEMENT_TYPE) in machine.gpu.matmul_rates()


def share_of_instructions(kernel: Kernel, machine: Machine, calibration: Calibration) -> float:
    """Return how far its instructions limit a library's matmul, not the memory: 1 if that is not known.

    It takes a smooth maximum of the times that either allows at least. The share is by how much that grows with the time of
    the instructions.
    """
    is_librarys = kernel.character == "matmul" and kernel.is_work_sharing
    if kernel.matmul_sizes is None or not is_librarys or not _has_rate(kernel, machine):
        return 1.0
    rows, inner, columns = kernel.matmul_sizes
    element_bytes = ELEMENT_BYTES[kernel.element_type or USUAL_ELEMENT_TYPE]
    moved = element_bytes * (rows * inner + inner * columns + rows * columns)
    by_memory = moved / (machine.gpu.hbm_bytes_per_s * calibration.hbm_efficiency.value)
    multiplied = matmul_flops(rows, columns, inner) / reached_flops_per_s(kernel, machine, calibration)
    return 1 / (1 + (by_memory / multiplied) ** SM_EXPONENT)
