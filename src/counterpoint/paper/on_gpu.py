"""One workload of the paper's grid on the GPUs at hand: captured in each of its forms, then measured.

Copy engines are no rewriting of a captured collective, so an all-to-all moved by them is a form of its own, captured beside
the others. Where it cannot be had, the grid runs without it and says why.
"""

from counterpoint.cuda.capture import capture, record
from counterpoint.cuda.driver import DriverGraph
from counterpoint.errors import CounterpointError, say
from counterpoint.ops.runtime import open_exchange
from counterpoint.paper.grid import COPY_ENGINES, SEQUENTIAL, PaperResult, Variant, measure_paper
from counterpoint.paper.workloads import BUFFER_BYTES, ITERATIONS, PaperWorkload
from counterpoint.planner.on_gpu import machine_of
from counterpoint.traces.classify import is_communication


def measure_workload(name: str, num_rounds: int) -> PaperResult:
    """Capture the workload and measure its grid; all ranks call this together. Raises what capturing raises."""
    workload = PaperWorkload(name)
    sequential, overlapped = capture(workload.sequential, "sequential"), capture(workload.overlapped, name)
    in_turn = Variant(executable=sequential.graph.instantiate(), is_engaged=True, output_bits=workload.output_bits)
    forms, owner = {SEQUENTIAL: in_turn}, None
    if workload.is_all_to_all:
        try:
            forms[COPY_ENGINES], owner = _by_copy_engines(workload, overlapped.read.step.num_ranks)
        except CounterpointError as problem:
            say(f"{name} by copy engines is left out: {problem}")
    result = measure_paper(overlapped, machine_of(overlapped), workload.output_bits, forms=forms, num_rounds=num_rounds)
    del owner  # what was captured needs its memory until here
    return result


def _by_copy_engines(workload: PaperWorkload, num_ranks: int) -> tuple[Variant, object]:
    """The workload with its all-to-all by copy engines, and the owner of the graph.

    Engaged means that the graph holds a copy for every peer and iteration, and no kernel that communicates.
    """
    exchange = open_exchange("bench paper", BUFFER_BYTES // num_ranks)
    recording = record(lambda: workload.exchanged(exchange))
    graph = DriverGraph(recording.graph.raw_cuda_graph())
    nodes = graph.nodes()
    num_copies = sum(node.kind == "copy" for node in nodes)
    by_kernels = any(node.kind == "kernel" and is_communication("kernel", node.name) for node in nodes)
    variant = Variant(
        executable=graph.instantiate(),
        is_engaged=num_copies >= ITERATIONS * (num_ranks - 1) and not by_kernels,
        output_bits=workload.exchanged_bits,
    )
    return variant, recording.graph
