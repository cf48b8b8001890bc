"""The paper's grid measured on a graph in memory: its rows, what they say of each control, and that everything is freed."""

import io
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from rich.console import Console

from counterpoint import ideal_us, load_machine
from counterpoint.cuda.graph import AbstractExecutable, GraphNode
from counterpoint.cuda.graph_reading import CollectiveCall, GraphTimes, read_graph
from counterpoint.cuda.graph_rewriting import MOVED
from counterpoint.errors import DeviceError
from counterpoint.machine import machine_names
from counterpoint.paper.accuracy import simulation_accuracy
from counterpoint.paper.grid import (
    Readings,
    Variant,
    measure_paper,
    measure_variants,
    paper_grid,
    simulate_paper,
    simulated_rows,
    sweep_plans,
    why_no_copies,
)
from counterpoint.paper.values import CHOICE, COPY_ENGINES, PLAIN, SEQUENTIAL, Energy, PaperResult, PaperRow
from counterpoint.plan import LEAVE_IT, Directive, Match, Plan
from counterpoint.planner.ideal import scale_of
from counterpoint.report.paper import print_paper
from counterpoint.sim import Simulator
from counterpoint.step import Collective, Footprint, Step
from counterpoint.units import MIB
from counterpoint.workloads import load_workload, workload_names
from helpers.graph_double import ExecutableDouble, Faults, GraphDouble, ReplayDouble, controls_of
from helpers.toy_steps import NCCL
from helpers.trace_builder import NCCL as ALL_REDUCE

H200 = load_machine("h200")
TILED = Footprint(num_ctas=4096, threads_per_cta=128, registers_per_thread=128, dynamic_shared_bytes=24_576)
NODES = (
    GraphNode(kind="kernel", name="matmul", footprint=TILED),
    GraphNode(kind="kernel", name="matmul", footprint=TILED, waits_for=(0,)),  # placed before the collective
    GraphNode(kind="kernel", name=ALL_REDUCE, footprint=NCCL, waits_for=(0,)),
)
CALL = CollectiveCall(collective="all_reduce", num_bytes=1 << 28, group_size=4)
READ = read_graph("made up", NODES, [CALL], GraphTimes(device_name="NVIDIA H200", lone_us=(600.0, 600.0, 900.0)), 4)
MOVED_PLAN = Plan(directives=(Directive(match=Match(kind="communication"), controls=(MOVED,), reason="test"),))


def clock(plan: Plan) -> float:
    return {frozenset({"priority"}): 800.0, frozenset({"transport"}): 700.0}.get(controls_of(plan), 1000.0)


class Bench:
    """A captured workload in memory, its sequential form, and outputs that differ under head starts and copies."""

    def __init__(self, faults: Faults | None = None, obstacles: dict[int, str] | None = None) -> None:
        self.overlapped = GraphDouble(NODES, H200.gpu, faults, obstacles=obstacles)
        self.in_sequence = GraphDouble(NODES, H200.gpu)

    def measure(self) -> PaperResult:
        replays = ReplayDouble(self.overlapped, READ, clock)
        with self._forms() as forms:
            return measure_paper(replays, H200, self.readings(), forms=forms, num_rounds=4)

    def measure_variants(self) -> tuple[PaperRow, ...]:
        replays = ReplayDouble(self.overlapped, READ, clock)
        plans = sweep_plans(READ.step, H200)
        with self._forms() as forms:
            return measure_variants(replays, H200, self.readings(), plans=plans, forms=forms, num_rounds=4)[0]

    def readings(self) -> Readings:
        return Readings(
            output_bits=self.output_bits,
            overlap_ratio=lambda executable: 0.25,
            energy=lambda executable: Energy(joules_per_step=7.0, watts=700.0),
        )

    @contextmanager
    def _forms(self) -> Iterator[dict[str, Variant]]:
        with closing(self.in_sequence.instantiate()) as executable:
            yield {SEQUENTIAL: Variant(executable=executable, is_engaged=True)}

    def output_bits(self, executable: AbstractExecutable) -> bytes:
        assert isinstance(executable, ExecutableDouble)
        return b"other" if any(edit.method in {"hold", "copies"} for edit in executable.edits) else b"same"

    def num_open(self) -> int:
        return self.overlapped.log.num_open() + self.in_sequence.log.num_open()


def test_the_rows_are_plain_overlap_then_sequential_then_the_grid_then_the_planners_choice() -> None:
    labels = [row.label for row in Bench().measure().rows]
    assert labels == [PLAIN, SEQUENTIAL, *list(paper_grid(READ.step, H200))[1:], CHOICE]


def test_the_planners_choice_runs_in_the_same_rounds_as_the_grid() -> None:
    result = Bench().measure()
    rows = {row.label: row for row in result.rows}
    assert result.choice.verdict == "GAIN"
    assert rows[CHOICE].ratio == rows["priority"].ratio == 0.8


@pytest.mark.parametrize("machine", machine_names(variants=False))
@pytest.mark.parametrize("workload", workload_names())
def test_no_variant_of_the_grid_is_said_to_take_less_than_the_ideal(workload: str, machine: str) -> None:
    result = simulate_paper(load_workload(workload), load_machine(machine))
    assert min(row.simulated_us or 0.0 for row in result.rows) >= result.ideal_us


def test_the_ideal_takes_the_faster_transport_of_each_collective_that_may_be_moved_or_that_a_plan_moves() -> None:
    def gather(num_bytes: int) -> Step:
        moved = Collective(name="gather", stream=0, collective="all_gather", num_bytes=num_bytes, group_size=4)
        return Step(name="gather", num_ranks=4, operations=(moved,))

    for num_bytes, moved_unasked in ((1024 * MIB, True), (32 * MIB, False)):
        step = gather(num_bytes)
        by_kernels_us, moved_us = (
            ideal_us(step, Simulator().lone_times_us(step, H200, plan)) for plan in (Plan(), MOVED_PLAN)
        )
        assert moved_us < by_kernels_us
        assert scale_of(step, H200).ideal_us == (moved_us if moved_unasked else by_kernels_us)
        assert scale_of(step, H200, [MOVED_PLAN]).ideal_us == moved_us
        assert scale_of(step, H200, [MOVED_PLAN]).sequential_us == by_kernels_us


def rows_of(measured: list[float], simulated: list[float]) -> PaperResult:
    rows = [
        PaperRow(label=str(number), measured_us=each, simulated_us=other)
        for number, (each, other) in enumerate(zip(measured, simulated, strict=True))
    ]
    rows.append(PaperRow(label=CHOICE, measured_us=1.0, simulated_us=99.0))
    return PaperResult(workload="w", machine="m", num_ranks=2, ideal_us=1.0, rows=tuple(rows), choice=Plan())


def test_the_simulators_errors_are_over_the_variants_without_the_choice_among_them() -> None:
    accuracy = simulation_accuracy(rows_of([100.0, 200.0, 300.0], [110.0, 180.0, 300.0]))
    assert accuracy is not None
    assert accuracy.num_rows == 3
    assert accuracy.mean_absolute_error == pytest.approx(0.2 / 3)
    assert (abs(accuracy.worst_error), accuracy.rank_correlation) == (pytest.approx(0.1), pytest.approx(1.0))


def test_equal_times_share_their_rank() -> None:
    # ranks 1, 2, 3 against 1.5, 1.5, 3: Pearson's correlation of these is sqrt(3)/2
    accuracy = simulation_accuracy(rows_of([1.0, 2.0, 3.0], [5.0, 5.0, 6.0]))
    assert accuracy is not None
    assert accuracy.rank_correlation == pytest.approx(3**0.5 / 2)


def test_an_order_turned_round_correlates_with_minus_one() -> None:
    accuracy = simulation_accuracy(rows_of([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]))
    assert accuracy is not None
    assert accuracy.rank_correlation == pytest.approx(-1.0)


def test_two_variants_are_too_few_to_speak_of_accuracy() -> None:
    assert simulation_accuracy(rows_of([1.0, 2.0], [1.0, 2.0])) is None


def test_every_row_has_its_time_against_plain_overlap_beside_the_simulated_one() -> None:
    rows = {row.label: row for row in Bench().measure().rows}
    assert (rows["priority"].measured_us, rows["priority"].ratio) == (800.0, 0.8)
    assert (rows[PLAIN].measured_us, rows[PLAIN].ratio) == (1000.0, 1.0)
    assert all(row.simulated_us for row in rows.values())


def test_every_row_has_its_time_over_the_sequential_one_and_what_else_was_read() -> None:
    rows = {row.label: row for row in Bench().measure().rows}
    assert (rows[SEQUENTIAL].time_ratio, rows["priority"].time_ratio) == (1.0, 0.8)
    assert (rows[SEQUENTIAL].overlap_ratio, rows[PLAIN].overlap_ratio) == (None, 0.25)
    assert all(row.energy == Energy(joules_per_step=7.0, watts=700.0) for row in rows.values())


def test_the_variants_of_a_sweep_are_measured_like_the_grid_and_freed() -> None:
    bench = Bench(obstacles={2: ""})
    rows = bench.measure_variants()
    assert [row.label for row in rows] == [PLAIN, SEQUENTIAL, *list(sweep_plans(READ.step, H200))[1:]]
    assert [row.time_ratio for row in rows] == [1.0, 1.0, 0.8, 0.7]
    assert bench.num_open() == 0


def test_collectives_that_can_be_copies_are_a_row_that_is_measured_simulated_and_whose_outputs_are_compared() -> None:
    bench = Bench(obstacles={2: ""})
    rows = {row.label: row for row in bench.measure().rows}
    assert rows[COPY_ENGINES].is_engaged
    assert rows[COPY_ENGINES].measured_us == 700.0
    _, simulated = simulated_rows(READ.step, H200, {PLAIN: LEAVE_IT, COPY_ENGINES: MOVED_PLAN})
    assert rows[COPY_ENGINES].simulated_us == pytest.approx(simulated[-1].simulated_us, rel=0.02)
    assert rows[COPY_ENGINES].simulated_us != rows[PLAIN].simulated_us
    assert not rows[COPY_ENGINES].is_identical
    assert rows[SEQUENTIAL].is_identical
    assert bench.num_open() == 0


def test_a_choice_that_moves_sums_is_a_row_like_the_others() -> None:
    result = Bench(obstacles={2: ""}).measure()
    assert controls_of(result.choice) == {"transport"}
    rows = {row.label: row for row in result.rows}
    assert rows[CHOICE].measured_us == 700.0
    assert rows[CHOICE].simulated_us == rows[COPY_ENGINES].simulated_us


def test_without_copies_in_store_there_is_no_such_row_and_the_report_says_why() -> None:
    result = Bench().measure()
    assert COPY_ENGINES not in {row.label for row in result.rows}
    console = Console(file=io.StringIO(), width=200)
    print_paper(console, result)
    assert "copy engines were left out: no copies were prepared" in console.file.getvalue()
    bench = Bench()
    assert why_no_copies(ReplayDouble(bench.overlapped, READ, clock)) == "no copies were prepared"
    able = Bench(obstacles={2: ""})
    assert why_no_copies(ReplayDouble(able.overlapped, READ, clock)) == ""


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
