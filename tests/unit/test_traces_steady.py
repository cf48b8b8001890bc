"""Steps as the GPU ran them: their windows, which one is steady, and what ran in it."""

from pathlib import Path

from counterpoint.traces.formats import read_activity
from counterpoint.traces.steady import divide_into_steps, gpu_windows
from helpers.trace_builder import MATMUL, TraceBuilder


def running_ahead(num_steps: int = 4) -> TraceBuilder:
    """Steps of two matmuls of 40 us; each step's collective waits for nothing and runs a step ahead of its matmuls."""
    trace = TraceBuilder()
    for number in range(num_steps):
        trace.step(10.0 * number, 10.0 * number + 10)
    for number in range(num_steps):
        trace.collective(100.0 * number - 85 if number else 1, 60 if number else 3, host=10.0 * number + 1)
        for place in range(2):
            trace.kernel(MATMUL, 100.0 * number + 5 + 45 * place, 40, host=10.0 * number + 2 + place)
    return trace


def test_windows_follow_the_computation_when_the_host_and_a_side_stream_run_ahead(tmp_path: Path) -> None:
    trace = read_activity(running_ahead().write(tmp_path))
    windows = gpu_windows(trace, divide_into_steps(trace))
    assert windows == ((1, 105), (105, 205), (205, 305), (305, 390))
