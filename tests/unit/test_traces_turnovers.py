"""What torch's profiler adds to kernels, and what is taken off their times for it."""

import pytest

from counterpoint.step import Character, Footprint
from counterpoint.traces.operations import gpu_with_turnovers, without_turnovers

H200 = gpu_with_turnovers("NVIDIA H200")


# What the profiler added to kernels of an H200: its time for each, less that of the same calls in a row without it, in
# microseconds (benchmarks/results/profiled_kernels_h200.json)
@pytest.mark.parametrize(
    ("character", "launch", "profiled_us", "added_us", "tolerance_us"),
    [
        ("row_wise", (96_800, 1024, 32), 981.6, 39.6, 3),  # a depthwise convolution
        ("row_wise", (131_072, 128, 28), 207.3, 5.0, 1),  # an index copy
        ("row_wise", (16_384, 1024, 37), 518.2, 11.5, 3),  # softmax in single precision, of which an SM holds one CTA
        ("streaming", (131_072, 128, 34), 184.5, 0.0, 0),  # an addition, which the memory limits
        ("matmul", (132, 384, 168), 884.0, 0.0, 0),  # one wave
    ],
)
def test_what_the_profiler_adds_between_ctas_is_taken_off(
    character: Character, launch: tuple[int, int, int], profiled_us: float, added_us: float, tolerance_us: float
) -> None:
    num_ctas, threads, registers = launch
    footprint = Footprint(num_ctas=num_ctas, threads_per_cta=threads, registers_per_thread=registers)
    found_us = without_turnovers(profiled_us, character, footprint, H200)
    assert profiled_us - found_us == pytest.approx(added_us, abs=tolerance_us)
    for other in ("NVIDIA A100-SXM4-80GB", "AMD Instinct MI300X", "some GPU", None):
        gpu = gpu_with_turnovers(other)
        assert without_turnovers(profiled_us, character, footprint, gpu) == profiled_us, "measured on an H200 only"


def test_a_kernel_of_nothing_but_turnovers_keeps_half_of_its_time() -> None:
    footprint = Footprint(num_ctas=1 << 18, threads_per_cta=1024, registers_per_thread=16)
    assert without_turnovers(335.0, "row_wise", footprint, H200) > 335 / 2
    assert without_turnovers(0.0, "row_wise", footprint, H200) == 0
