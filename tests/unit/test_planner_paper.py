"""The paper's grid measured on a graph in memory: its rows, what they say of each control, and that everything is freed."""

import pytest

from counterpoint import load_machine
from counterpoint.cuda.graph import AbstractExecutable, GraphNode
from counterpoint.cuda.reading import CollectiveCall, GraphTimes, read_graph
from counterpoint.errors import DeviceError
from counterpoint.plan import Plan
from counterpoint.planner.paper import PLAIN, SEQUENTIAL, PaperResult, measure_paper, paper_grid
from counterpoint.step import Footprint
from helpers.graph_double import ExecutableDouble, Faults, GraphDouble, ReplayDouble, controls_of
from helpers.toy_steps import NCCL
from helpers.trace_builder import NCCL as ALL_REDUCE

H200 = load_machine("h200")
TILED = Footprint(num_ctas=4096, threads_per_cta=128, registers_per_thread=128, dynamic_shared_bytes=24_576)
NODES = (
    GraphNode(kind="kernel", name="matmul", footprint=TILED),
    GraphNode(kind="kernel", name=ALL_REDUCE, footprint=NCCL, waits_for=(0,)),
    GraphNode(kind="kernel", name="matmul", footprint=TILED, waits_for=(0,)),
)
CALL = CollectiveCall(collective="all_reduce", num_bytes=1 << 28, group_size=4)
READ = read_graph("made up", NODES, [CALL], GraphTimes(device_name="NVIDIA H200", lone_us=(600.0, 900.0, 600.0)), 4)


def clock(plan: Plan) -> float:
    return 800.0 if controls_of(plan) == {"priority"} else 1000.0


class Bench:
    """A captured workload in memory, its sequential form, and outputs that differ where a head start is in force."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.overlapped = GraphDouble(NODES, H200.gpu, faults)
        self.in_sequence = GraphDouble(NODES, H200.gpu)

    def measure(self) -> PaperResult:
        replays = ReplayDouble(self.overlapped, READ, clock)
        return measure_paper(replays, self.in_sequence.instantiate(), H200, self.output_bits, 4)

    def output_bits(self, executable: AbstractExecutable) -> bytes:
        assert isinstance(executable, ExecutableDouble)
        return b"other" if any(edit.method == "hold" for edit in executable.edits) else b"same"

    def num_open(self) -> int:
        return self.overlapped.log.num_open() + self.in_sequence.log.num_open()


def test_the_rows_are_plain_overlap_then_sequential_then_the_grid() -> None:
    labels = [row.label for row in Bench().measure().rows]
    assert labels == [PLAIN, SEQUENTIAL, *list(paper_grid(READ.step, H200))[1:]]


def test_every_row_has_its_time_against_plain_overlap_beside_the_simulated_one() -> None:
    rows = {row.label: row for row in Bench().measure().rows}
    assert (rows["priority"].measured_us, rows["priority"].ratio) == (800.0, 0.8)
    assert (rows[PLAIN].measured_us, rows[PLAIN].ratio) == (1000.0, 1.0)
    assert all(row.simulated_us for row in rows.values())


def test_outputs_that_differ_from_plain_overlaps_are_reported() -> None:
    for row in Bench().measure().rows:
        assert row.is_identical == ("head start" not in row.label)


def test_a_control_that_the_driver_ignores_is_reported_as_not_engaged() -> None:
    for row in Bench(Faults(ignores_priority=True)).measure().rows:
        assert row.is_engaged == ("priority" not in row.label)


def test_everything_is_freed_when_all_is_measured() -> None:
    bench = Bench()
    bench.measure()
    assert bench.overlapped.log.copies
    assert bench.num_open() == 0


def test_everything_is_freed_when_a_variant_cannot_be_made_ready() -> None:
    bench = Bench(Faults(lacks_memory_for=lambda graph: any(edit.method == "hold" for edit in graph.edits)))
    with pytest.raises(DeviceError, match="OUT_OF_MEMORY"):
        bench.measure()
    assert bench.overlapped.log.executables
    assert bench.num_open() == 0
