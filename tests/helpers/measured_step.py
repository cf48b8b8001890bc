"""A step of four kernels and an all-reduce as a graph in memory, tuned by measurement with clocks that the tests set."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from msgspec.structs import replace

from counterpoint import load_machine
from counterpoint.cuda.graph import GraphNode
from counterpoint.cuda.graph_reading import CollectiveCall, GraphTimes, ReadGraph, read_graph
from counterpoint.plan import Plan
from counterpoint.planner.measured import MeasuredTuning, tune_measured
from counterpoint.step import CollectiveKind, Footprint
from helpers.graph_double import Faults, GraphDouble, Ranks, ReplayDouble, controls_of
from helpers.toy_steps import NCCL
from helpers.trace_builder import NCCL as ALL_REDUCE

H200 = load_machine("h200")
ROOMY = Footprint(num_ctas=132 * 8 * 2, threads_per_cta=128, registers_per_thread=64)
SMALL = Footprint(num_ctas=24, threads_per_cta=128, registers_per_thread=32)  # of a collective that a cap lets in
BASELINE_US = 1000.0
LONE_US = (50.0, 600.0, 600.0, 900.0, 50.0)
Clock = Callable[[Plan], float]


def work(name: str, *waits_for: int) -> GraphNode:
    return GraphNode(kind="kernel", name=name, footprint=ROOMY, waits_for=waits_for)


# The all-reduce is ready with 'long', loses the race and waits for its CTAs: a priority, a head start and caps all act.
NODES = (
    work("producer"),
    work("long", 0),
    work("longer", 1),
    GraphNode(kind="kernel", name=ALL_REDUCE, footprint=SMALL, waits_for=(0,)),
    work("last", 2, 3),
)

# The same by NCCL, whose CTA no cap lets in, beside shorter CTAs.
NCCL_NODES = tuple(
    replace(node, footprint=NCCL if node.name == ALL_REDUCE else replace(ROOMY, num_ctas=132 * 8 * 6)) for node in NODES
)


def read(
    nodes: tuple[GraphNode, ...] = NODES,
    lone_us: tuple[float, ...] = LONE_US,
    num_bytes: int = 1 << 28,
    collective: CollectiveKind = "all_reduce",
) -> ReadGraph:
    call = CollectiveCall(collective=collective, num_bytes=num_bytes, group_size=4)
    calls = [call] * sum(node.name == ALL_REDUCE for node in nodes)
    return read_graph("made up", nodes, calls, GraphTimes(device_name="NVIDIA H200", lone_us=lone_us), 4)


def taking(times: dict[frozenset[str], float], otherwise: float = BASELINE_US) -> Clock:
    """A clock by the kinds of controls in the plan."""
    return lambda plan: times.get(controls_of(plan), otherwise)


def only(*controls: str) -> frozenset[str]:
    return frozenset(controls)


def captured(
    clock: Clock, *, faults: Faults | None = None, nodes: tuple[GraphNode, ...] = NODES, **more: object
) -> ReplayDouble:
    return ReplayDouble(GraphDouble(nodes, H200.gpu, faults), read(nodes), clock, **more)  # type: ignore[arg-type]


def tuned(clock: Clock, *, num_rounds: int = 7, **more: object) -> MeasuredTuning:
    return tune_measured(captured(clock, **more), H200, num_rounds=num_rounds)  # type: ignore[arg-type]


def on_two_ranks(make: Callable[[Ranks, int], ReplayDouble]) -> list[Future[MeasuredTuning]]:
    """Tune on two ranks at once; each gets the double that `make` builds for it."""
    ranks = Ranks(2)
    with ThreadPoolExecutor(2) as pool:
        return [pool.submit(tune_measured, make(ranks, rank), H200, num_rounds=7) for rank in range(2)]


def labels(tuning: MeasuredTuning) -> list[str]:
    return [measurement.label for measurement in tuning.comparison.measurements]


def refused(tuning: MeasuredTuning, control: str) -> list[str]:
    return [refusal.reason for refusal in tuning.plan.refusals if refusal.control == control]
