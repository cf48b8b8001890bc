"""A captured graph read as a step: what waits for what, which stream, which collective is which; without torch."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from counterpoint.cuda.graph import GraphNode
from counterpoint.cuda.graph_reading import CollectiveCall, GraphTimes, ReadGraph, read_calls, read_graph
from counterpoint.errors import StepError
from counterpoint.step import Collective, CollectiveKind, Copy, Footprint, Kernel
from helpers.toy_steps import NCCL
from helpers.trace_builder import ELEMENTWISE, MATMUL
from helpers.trace_builder import NCCL as ALL_REDUCE

SMALL = Footprint(num_ctas=264, threads_per_cta=128, registers_per_thread=32)
CUSTOM = "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 4>(vllm::RankData*)"
WITHOUT_LIBRARIES = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "cuda", "triton", "cupy"):
            raise ImportError(f"{name} is not there")

sys.meta_path.insert(0, Blocked())
import counterpoint.cuda
loaded = sorted(name for name in sys.modules if name.startswith("counterpoint.cuda."))
assert not loaded, loaded
import counterpoint.cuda.graph, counterpoint.cuda.graph_reading, counterpoint.cuda.graph_rewriting, counterpoint.measurement
import counterpoint.cuda.plan_cache, counterpoint.engagement, counterpoint.planner.measured
assert not {"torch", "cuda", "triton"} & set(sys.modules)
"""


def work(*waits_for: int, name: str = ELEMENTWISE) -> GraphNode:
    return GraphNode(kind="kernel", name=name, waits_for=waits_for, footprint=SMALL)


def reduction(*waits_for: int, name: str = ALL_REDUCE) -> GraphNode:
    return GraphNode(kind="kernel", name=name, waits_for=waits_for, footprint=NCCL)


def event(*waits_for: int) -> GraphNode:
    return GraphNode(kind="other", name="event_record", waits_for=waits_for)


def call(collective: CollectiveKind = "all_reduce", num_bytes: int = 1 << 20) -> CollectiveCall:
    return CollectiveCall(collective=collective, num_bytes=num_bytes, group_size=4)


def test_sizes_of_matmuls_are_those_that_were_noted_for_their_nodes() -> None:
    nodes = (work(name=MATMUL), work(0), work(1, name=MATMUL))
    times = GraphTimes(device_name="NVIDIA H200", lone_us=(10.0, 1.0, 10.0))
    step = read_graph("made up", nodes, (), times, 1, matmul_sizes={0: (128, 64, 256), 1: (128, 64, 256)}).step
    assert [each.matmul_sizes for each in step.operations if isinstance(each, Kernel)] == [(128, 64, 256), None, None]


def read(*nodes: GraphNode, calls: tuple[CollectiveCall, ...] = (), names: tuple[str, ...] = ()) -> ReadGraph:
    lone_us = tuple(10.0 + number if node.kind != "other" else 0.0 for number, node in enumerate(nodes))
    times = GraphTimes(device_name="NVIDIA H200", lone_us=lone_us, names=names)
    return read_graph("made up", nodes, calls, times, 4)


def waits(found: ReadGraph) -> list[list[int]]:
    return [[dependency.operation for dependency in operation.waits_for] for operation in found.step.operations]


def streams(found: ReadGraph) -> list[int]:
    return [operation.stream for operation in found.step.operations]


def test_dependencies_pass_through_nodes_without_work() -> None:
    found = read(work(), event(0), event(1), work(2), work(0, 2), event(4, 3), work(5))
    assert found.nodes == (0, 3, 4, 6)
    assert waits(found) == [[], [0], [0], [1, 2]]


def test_every_dependency_is_exact_for_the_graph_states_it() -> None:
    found = read(work(), event(0), work(0, 1))
    assert {dependency.origin for operation in found.step.operations for dependency in operation.waits_for} == {"exact"}


def test_sixty_layers_of_nodes_without_work_are_walked_once_not_along_each_of_their_paths() -> None:
    nodes = [work(), event(0), event(0)]
    for _ in range(60):
        nodes += [event(len(nodes) - 2, len(nodes) - 1), event(len(nodes) - 2, len(nodes) - 1)]
    found = read(*nodes, work(len(nodes) - 2, len(nodes) - 1))
    assert waits(found) == [[], [0]]


def test_a_chain_of_dependencies_is_one_stream() -> None:
    assert streams(read(work(), work(0), event(1), work(2))) == [0, 0, 0]


def test_at_a_fork_the_kernel_continues_the_stream_and_the_collective_starts_one_for_the_kernel_is_placed_first() -> None:
    found = read(work(), reduction(0), work(0), work(2), work(1, 3))
    assert streams(found) == [0, 1, 0, 0, 0]
    assert waits(found) == [[], [0], [0], [2], [1, 3]]


def test_a_collective_that_no_kernel_races_with_stays_on_its_stream() -> None:
    assert streams(read(work(), reduction(0), work(1), reduction(2))) == [0, 0, 0, 0]


def test_like_collectives_take_the_least_time_of_them_for_the_rest_is_waiting() -> None:
    found = read(work(), reduction(0), work(1), reduction(2), reduction(3), calls=(call(), call(), call(num_bytes=1 << 10)))
    lone_us = [each.lone_us for each in found.step.operations if isinstance(each, Collective)]
    assert lone_us == [11.0, 11.0, 14.0]


def test_independent_nodes_have_a_stream_each() -> None:
    assert streams(read(work(), work(), work())) == [0, 1, 2]


@st.composite
def graphs(draw: st.DrawFn) -> list[GraphNode]:
    nodes = []
    for number in range(draw(st.integers(1, 14))):
        earlier = draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else set()
        nodes.append((event if draw(st.booleans()) else work)(*sorted(earlier)))
    return [*nodes, work(*range(len(nodes)))]


def reachable(nodes: list[GraphNode], number: int, *, through: str | None = None) -> set[int]:
    """All nodes before `number`, by recursion; stopping at nodes of another kind than `through` if that is given."""
    found = set()
    for wait in nodes[number].waits_for:
        found.add(wait)
        if through is None or nodes[wait].kind == through:
            found |= reachable(nodes, wait, through=through)
    return found


@given(graphs())
def test_any_graph_keeps_its_order_and_each_stream_is_a_chain(nodes: list[GraphNode]) -> None:
    found = read(*nodes)
    assert list(found.nodes) == [number for number, node in enumerate(nodes) if node.kind == "kernel"]
    last_of_stream: dict[int, int] = {}
    for index, operation in enumerate(found.step.operations):
        number = found.nodes[index]
        expected = {wait for wait in reachable(nodes, number, through="other") if nodes[wait].kind == "kernel"}
        assert [found.nodes[dependency.operation] for dependency in operation.waits_for] == sorted(expected)
        earlier = last_of_stream.get(operation.stream)
        assert earlier is None or earlier in reachable(nodes, number)
        last_of_stream[operation.stream] = number


def test_collectives_take_the_recorded_calls_in_order() -> None:
    calls = (call("all_gather", 1 << 20), call("reduce_scatter", 1 << 21), call("all_reduce", 1 << 22))
    found = read(reduction(), work(0), reduction(0), reduction(2), calls=calls)
    collectives = [operation for operation in found.step.operations if isinstance(operation, Collective)]
    assert [(each.collective, each.num_bytes) for each in collectives] == [
        ("all_gather", 1 << 20),
        ("reduce_scatter", 1 << 21),
        ("all_reduce", 1 << 22),
    ]
    assert {(each.group_size, each.library, each.footprint) for each in collectives} == {(4, "nccl", NCCL)}


@pytest.mark.parametrize("num_calls", [1, 3, 4])
def test_more_or_fewer_calls_than_collectives_is_one_clear_error(num_calls: int) -> None:
    with pytest.raises(StepError) as caught:
        read(reduction(), reduction(0), work(1), calls=(call(),) * num_calls)
    message = str(caught.value)
    assert f"holds 2 collectives, but {num_calls} were recorded" in message
    assert "\n" not in message
    assert "do not coalesce" in message


def test_without_any_recorded_call_sizes_are_unknown_and_kinds_come_from_the_names() -> None:
    found = read(reduction(), reduction(0, name=ALL_REDUCE.replace("AllReduce", "AllGather")))
    assert [(each.collective, each.num_bytes) for each in found.step.operations] == [("all_reduce", 0), ("all_gather", 0)]


def test_a_collective_that_torch_does_not_record_takes_no_call_from_one_that_it_does() -> None:
    found = read(reduction(name=CUSTOM), reduction(0), calls=(call(num_bytes=4096),))
    assert [(each.library, each.num_bytes) for each in found.step.operations] == [("custom_all_reduce", 0), ("nccl", 4096)]


def test_kernels_collectives_and_copies_carry_what_the_graph_says() -> None:
    fill = GraphNode(kind="copy", name="Memset (Device)", num_bytes=4096, direction="set")
    found = read(fill, work(0, name=MATMUL), reduction(1), calls=(call(),))
    copied, matmul, reduced = found.step.operations
    assert isinstance(copied, Copy)
    assert (copied.direction, copied.num_bytes, copied.lone_us) == ("set", 4096, 10.0)
    assert isinstance(matmul, Kernel)
    assert (matmul.character, matmul.footprint, matmul.lone_us) == ("matmul", SMALL, 11.0)
    assert isinstance(reduced, Collective)
    assert (reduced.lone_us, found.step.device_name, found.step.num_ranks) == (12.0, "NVIDIA H200", 4)


def test_full_names_of_the_profiler_replace_the_graphs_own_before_kernels_are_classified() -> None:
    found = read(work(name="kernel"), reduction(0, name="nccl"), names=(MATMUL, ALL_REDUCE))
    assert [(operation.name, operation.kind) for operation in found.step.operations] == [
        (MATMUL, "computation"),
        (ALL_REDUCE, "communication"),
    ]


def test_a_graph_without_work_is_refused() -> None:
    with pytest.raises(StepError, match="holds no operation"):
        read(event(), event(0))


def test_the_fingerprint_is_that_of_the_work_not_of_its_times() -> None:
    nodes = (work(), reduction(0))
    slower = GraphTimes(device_name="NVIDIA H200", lone_us=(99.0, 98.0))
    same = read_graph("made up", nodes, (call(),), slower, 4).step.fingerprint()
    assert read(*nodes, calls=(call(),)).step.fingerprint() == same
    assert read(*nodes, calls=(call(num_bytes=5),)).step.fingerprint() != same


def test_graphs_are_read_rewritten_and_measured_without_torch_or_cuda() -> None:
    ended = subprocess.run([sys.executable, "-c", WITHOUT_LIBRARIES], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_calls_carry_the_description_of_their_process_group_or_its_name_where_that_says_more() -> None:
    def noted(ts: float, **group: str) -> dict[str, object]:
        args = {"Collective name": "allreduce", "dtype": "Float", "In msg nelems": 1, "Out msg nelems": 1}
        return {"name": "record_param_comms", "ts": ts, "args": args | {f"Process Group {k}": v for k, v in group.items()}}

    groups = [
        {"Name": "0", "Description": "default_pg"},
        {"Name": "3", "Description": "mesh_tp"},
        {"Name": "4", "Description": "undefined"},
        {"Name": "5", "Description": "mesh_dp"},
        {"Name": "6", "Description": "mesh_dp"},
        {"Name": "0", "Description": "default_pg"},
        {},
    ]
    calls = read_calls([noted(float(ts), **group) for ts, group in enumerate(groups)])
    assert [made.process_group for made in calls] == ["default_pg", "mesh_tp", "4", "5", "6", "default_pg", None]
    read_step = read(work(), reduction(0), calls=(replace(call(), process_group="mesh_tp"),)).step
    assert read_step.operations[1].process_group == "mesh_tp"  # type: ignore[union-attr]


def test_calls_are_read_in_order_of_issue_with_their_sizes_in_bytes() -> None:
    """As torch 2.11's profiler writes them: numbers and names of types as in the shipped traces."""

    def noted(ts: float, name: str, dtype: str, sent: int, received: int) -> dict[str, object]:
        args = {"Collective name": name, "dtype": dtype, "In msg nelems": sent, "Out msg nelems": received, "Group size": 4}
        return {"name": "record_param_comms", "ts": ts, "args": args}

    events = [
        {"name": "aten::mm", "ts": 0.0},
        noted(3.0, "_allgather_base", "BFloat16", 256, 1024),
        noted(1.0, "allreduce", "Float", 1000, 1000),
        noted(2.0, "init", "Byte", 0, 0),
        noted(4.0, "allreduce", "a type of tomorrow", 8, 8),
    ]
    assert read_calls(events) == [
        CollectiveCall(collective="all_reduce", num_bytes=4000, group_size=4),
        CollectiveCall(collective="all_gather", num_bytes=2048, group_size=4),
        CollectiveCall(collective="all_reduce", num_bytes=0, group_size=4),
    ]
