"""One workload of the paper's grid on the GPUs at hand: captured in each of its forms, then measured."""

from contextlib import closing

from counterpoint.cuda.capture import capture
from counterpoint.ops.captured_copies import offer_copies
from counterpoint.paper.grid import SEQUENTIAL, PaperResult, Variant, measure_paper
from counterpoint.paper.workloads import PaperWorkload
from counterpoint.planner.on_gpu import machine_of


def measure_workload(name: str, num_rounds: int) -> PaperResult:
    """Capture the workload and measure its grid; all ranks call this together. Raises what capturing raises."""
    workload = PaperWorkload(name)
    sequential, overlapped = capture(workload.sequential, "sequential"), capture(workload.overlapped, name)
    in_turn = Variant(executable=sequential.graph.instantiate(), is_engaged=True, output_bits=workload.output_bits)
    with closing(overlapped):
        offer_copies(overlapped)
        return measure_paper(
            overlapped, machine_of(overlapped), workload.output_bits, forms={SEQUENTIAL: in_turn}, num_rounds=num_rounds
        )
