"""The hook on graphs that others capture, with doubles of torch's graph class and of the driver: no torch and no GPU."""

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from counterpoint.cuda.graph import AbstractExecutable, AbstractGraph, GraphNode
from counterpoint.cuda.hook import Reached, reach_graphs
from counterpoint.cuda.reached import GraphAccess
from counterpoint.errors import DeviceError
from counterpoint.machine import load_machine
from counterpoint.step import Footprint
from helpers.graph_double import ExecutableDouble, Faults, GraphDouble

GPU = load_machine("h200").gpu
KERNEL = GraphNode(
    kind="kernel", name="matmul", footprint=Footprint(num_ctas=1, threads_per_cta=32, registers_per_thread=32)
)
PRIORITY = -5
DEVICE = 3


class NativeGraph:
    """What torch's class inherits: like a C++ class, it takes `keep_graph` in `__init__` and refuses what torch refuses."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.keeps = keep_graph
        self.nodes: list[GraphNode] | None = None
        self.is_ready = False
        self.num_replays = 0
        self.draws = False
        self.generators: list[object] = []
        self.faults = Faults()

    def register_generator_state(self, generator: object) -> None:
        self.generators.append(generator)


class CudaGraphDouble(NativeGraph):
    """Like torch.cuda.CUDAGraph. `state` stands for the device's random state."""

    state = 0
    was_made_to_keep: bool

    def __new__(cls, keep_graph: bool = False) -> "CudaGraphDouble":
        made = super().__new__(cls)
        made.was_made_to_keep = keep_graph  # torch 2.14 notes it here, and earlier ones nowhere
        return made

    def capture_end(self) -> None:
        if self.nodes is not None:
            raise RuntimeError("the capture was invalidated")
        self.nodes = [KERNEL]
        if not self.keeps:
            self.is_ready = True

    def instantiate(self) -> None:
        assert self.nodes is not None, "capture_end comes first"
        self.is_ready = True

    def replay(self) -> None:
        self.is_ready = True
        self.num_replays += 1
        type(self).state += self.draws

    def reset(self) -> None:
        self.nodes, self.is_ready = None, False


class Torch:
    """A torch of its own for each test: a fresh graph class, and what was asked of the driver."""

    def __init__(self, has_own_hook: bool = False) -> None:
        self.graph_class: type[CudaGraphDouble] = type("CudaGraph", (CudaGraphDouble,), dict(vars(CudaGraphDouble)))
        self.copies: list[GraphDouble] = []
        self.freed: list[GraphDouble] = []
        self.launches: list[tuple[AbstractExecutable, int]] = []
        self.hooks: dict[int, Callable[[Any], None]] = {}
        self.launch_problem: Exception | None = None
        self.during_launch: Callable[[], None] = lambda: None
        self.num_sheltered = 0
        self.access = GraphAccess(
            graph_class=self.graph_class,
            copy=self.copy,
            device=lambda: DEVICE,
            random_state=lambda device: bytes([self.graph_class.state, device]),
            launch=self.launch,
            sheltered=self.sheltered,
            register_capture_end=self.register if has_own_hook else None,
        )

    def copy(self, graph: CudaGraphDouble) -> tuple[GraphDouble, Callable[[], None]]:
        assert self.num_sheltered, "copying could end another thread's capture"
        if not graph.keeps:
            raise RuntimeError("You cannot access the raw graph unless keep_graph=true\nC++ stack")
        assert graph.nodes is not None
        copied = GraphDouble(graph.nodes, GPU, graph.faults).copy()
        self.copies.append(copied)
        return copied, lambda: self.free(copied)

    def free(self, copied: GraphDouble) -> None:
        assert self.num_sheltered, "freeing could end another thread's capture"
        assert copied not in self.freed, "a copy is freed once"
        self.freed.append(copied)

    def launch(self, executable: AbstractExecutable, device: int) -> None:
        if self.launch_problem is not None:
            raise self.launch_problem
        self.during_launch()
        executable.launch(0)
        self.launches.append((executable, device))

    @contextmanager
    def sheltered(self) -> Iterator[None]:
        self.num_sheltered += 1
        yield
        self.num_sheltered -= 1

    def register(self, hook: Callable[[Any], None]) -> "Handle":
        self.hooks[0] = hook
        return Handle(self.hooks)

    def capture(self, keep_graph: bool = False) -> CudaGraphDouble:
        graph = self.graph_class(keep_graph=keep_graph)
        graph.capture_end()
        return graph


class Handle:
    """What torch gives for a hook that it registered."""

    def __init__(self, hooks: dict[int, Callable[[Any], None]]) -> None:
        self.hooks = hooks

    def remove(self) -> None:
        self.hooks.clear()


class Planner:
    """An `on_capture` that raises the priority of the first node on a copy, and remembers what it gave."""

    def __init__(self) -> None:
        self.given: list[ExecutableDouble] = []

    def __call__(self, graph: AbstractGraph) -> ExecutableDouble:
        edited = graph.copy()
        edited.set_priority(0, PRIORITY)
        executable = edited.instantiate()
        assert isinstance(executable, ExecutableDouble)
        self.given.append(executable)
        return executable


def leave(graph: AbstractGraph) -> None:
    return None


@pytest.fixture
def torch() -> Torch:
    return Torch()


@pytest.fixture
def planner() -> Planner:
    return Planner()


def replay(graph: CudaGraphDouble, times: int) -> None:
    for _ in range(times):
        graph.replay()


def only(reached: Reached) -> Any:
    assert len(reached.graphs) == 1
    return reached.graphs[0]


def test_a_graph_captured_meanwhile_keeps_what_it_captured_and_is_ready_to_run_as_always(torch: Torch) -> None:
    with reach_graphs(leave, torch.access) as reached:
        graph = torch.capture()
        assert graph.keeps
        assert graph.was_made_to_keep
        assert graph.is_ready
        assert only(reached).graph.nodes() == (KERNEL,)


def test_replays_after_the_first_launch_what_was_returned_on_the_device_of_the_capture(
    torch: Torch, planner: Planner
) -> None:
    with reach_graphs(planner, torch.access) as reached:
        graph = torch.capture()
        replay(graph, 3)
        assert graph.num_replays == 1
        assert torch.launches == [(planner.given[0], DEVICE)] * 2
        assert planner.given[0].nodes[0].priority == PRIORITY
        assert only(reached).is_replaced
        assert reached.notes == ()


def test_none_leaves_the_graph_to_torch(torch: Torch) -> None:
    with reach_graphs(leave, torch.access) as reached:
        graph = torch.capture()
        replay(graph, 3)
        assert graph.num_replays == 3
        assert not only(reached).is_replaced


def test_a_graph_can_be_replaced_again_without_capturing_it_again(torch: Torch, planner: Planner) -> None:
    with reach_graphs(leave, torch.access) as reached:
        graph = torch.capture()
        replay(graph, 1)
        record = only(reached)
        record.replace(planner(record.graph))
        replay(graph, 1)
        record.replace(planner(record.graph))
        replay(graph, 1)
        assert [executable for executable, _ in torch.launches] == planner.given
        assert [executable.is_open for executable in planner.given] == [False, True]


def test_reverting_gives_the_graph_back_to_torch_and_frees_what_stood_in(torch: Torch, planner: Planner) -> None:
    with reach_graphs(planner, torch.access) as reached:
        graph = torch.capture()
        replay(graph, 2)
        only(reached).revert()
        replay(graph, 2)
        assert (graph.num_replays, len(torch.launches)) == (3, 1)
        assert not planner.given[0].is_open
        only(reached).replace(planner(only(reached).graph))
        replay(graph, 1)
        assert len(torch.launches) == 2


def test_the_original_is_never_edited(torch: Torch, planner: Planner) -> None:
    with reach_graphs(planner, torch.access):
        graph = torch.capture()
        assert graph.nodes == [KERNEL]


def test_a_graph_that_draws_random_numbers_is_left_as_it_is(torch: Torch, planner: Planner) -> None:
    with reach_graphs(planner, torch.access) as reached:
        graph = torch.capture()
        graph.draws = True
        replay(graph, 4)
        assert (graph.num_replays, torch.graph_class.state) == (4, 4)
        assert torch.launches == []
        assert not planner.given[0].is_open
        assert len(reached.notes) == 1
        assert "Graph 0 is left as it is: it draws random numbers" in reached.notes[0]
        executable = planner(only(reached).graph)
        with pytest.raises(DeviceError, match="draws random numbers"):
            only(reached).replace(executable)
        assert executable.is_open


def test_a_graph_with_a_generator_of_its_own_is_left_before_its_first_replay(torch: Torch, planner: Planner) -> None:
    with reach_graphs(planner, torch.access) as reached:
        graph = torch.graph_class()
        graph.register_generator_state("generator")
        graph.capture_end()
        replay(graph, 2)
        assert (graph.generators, graph.num_replays) == (["generator"], 2)
        assert planner.given == []
        assert "random numbers" in reached.notes[0]


def test_a_graph_that_cannot_be_copied_is_left_and_noted(torch: Torch, planner: Planner) -> None:
    with reach_graphs(planner, torch.access) as reached:
        graph = torch.graph_class()
        graph.faults = Faults(refuses_copy=True)
        graph.capture_end()
        replay(graph, 2)
        assert graph.num_replays == 2
        assert reached.graphs == ()
        assert reached.notes == (
            "Graph 0 is left as it is: Copying the graph failed with CUDA_ERROR_NOT_SUPPORTED: update the driver.",
        )


def test_an_error_in_on_capture_does_not_reach_the_job(torch: Torch, planner: Planner) -> None:
    def fail(graph: AbstractGraph) -> AbstractExecutable:
        raise ZeroDivisionError("division by zero\nand more")

    with reach_graphs(fail, torch.access) as reached:
        graph = torch.capture()
        replay(graph, 2)
        assert graph.num_replays == 2
        assert reached.notes == ("Graph 0 is left as it is: ZeroDivisionError: division by zero.",)
        only(reached).replace(planner(only(reached).graph))
        replay(graph, 1)
        assert len(torch.launches) == 1


@pytest.mark.parametrize("problem", [DeviceError("Launching the graph failed."), OSError("broken")])
def test_a_launch_that_fails_goes_back_to_the_original_in_the_same_replay(
    torch: Torch, planner: Planner, problem: Exception
) -> None:
    with reach_graphs(planner, torch.access) as reached:
        graph = torch.capture()
        replay(graph, 1)
        torch.launch_problem = problem
        replay(graph, 1)
        assert graph.num_replays == 2
        assert not only(reached).is_replaced
        assert not planner.given[0].is_open
        assert len(reached.notes) == 1
        assert reached.notes[0].startswith("Graph 0 is as it was again: ")


def test_afterwards_the_class_is_what_it_was(torch: Torch, planner: Planner) -> None:
    before = dict(vars(torch.graph_class))
    reached = reach_graphs(planner, torch.access)
    assert dict(vars(torch.graph_class)) != before
    torch.capture()
    reached.stop()
    assert dict(vars(torch.graph_class)) == before
    assert not torch.capture().keeps
    assert len(planner.given) == 1


def test_afterwards_graphs_go_on_as_they_were_captured(torch: Torch, planner: Planner) -> None:
    with reach_graphs(planner, torch.access) as reached:
        graph = torch.capture()
        replay(graph, 2)
    replay(graph, 2)
    assert (graph.num_replays, len(torch.launches)) == (3, 1)
    assert not planner.given[0].is_open
    assert torch.freed == torch.copies
    with pytest.raises(DeviceError, match="hook is stopped"):
        only(reached).replace(planner.given[0])


def test_stopping_twice_does_nothing_more(torch: Torch, planner: Planner) -> None:
    with reach_graphs(planner, torch.access) as reached:
        torch.capture()
        reached.stop()
        second = reach_graphs(planner, torch.access)
    assert torch.capture().keeps, "the second hook is still on"
    second.stop()


def test_an_error_of_the_job_passes_through_and_stops_the_hook(torch: Torch) -> None:
    with pytest.raises(KeyError), reach_graphs(leave, torch.access):
        raise KeyError("job")
    assert not torch.capture().keeps


def test_a_capture_that_fails_says_what_torch_says(torch: Torch, planner: Planner) -> None:
    with reach_graphs(planner, torch.access) as reached:
        graph = torch.graph_class()
        graph.nodes = []
        with pytest.raises(RuntimeError, match="the capture was invalidated"):
            graph.capture_end()
        assert (reached.graphs, reached.notes, planner.given) == ((), (), [])


def test_subclasses_and_names_taken_before_are_reached(torch: Torch, planner: Planner) -> None:
    taken = torch.graph_class

    class Engine(taken):  # type: ignore[misc,valid-type]
        def capture_end(self) -> None:
            super().capture_end()

    with reach_graphs(planner, torch.access) as reached:
        for graph in (taken(), Engine(), Engine(keep_graph=False)):
            graph.capture_end()
            assert isinstance(graph, taken)
            assert any(record.is_replaced for record in reached.graphs)
        del graph
    assert len(planner.given) == 3


def test_a_graph_made_before_the_hook_is_left_and_noted_when_it_did_not_keep_its_capture(
    torch: Torch, planner: Planner
) -> None:
    graph = torch.graph_class()
    with reach_graphs(planner, torch.access) as reached:
        graph.capture_end()
        replay(graph, 2)
        assert graph.num_replays == 2
        note = "Graph 0 is left as it is: RuntimeError: You cannot access the raw graph unless keep_graph=true."
        assert reached.notes == (note,)


def test_a_graph_captured_before_the_hook_is_not_touched(torch: Torch, planner: Planner) -> None:
    graph = torch.capture(keep_graph=True)
    with reach_graphs(planner, torch.access) as reached:
        replay(graph, 2)
        assert (graph.num_replays, reached.graphs) == (2, ())


@pytest.mark.parametrize("prepare", ["instantiate", "replay"])
def test_edits_of_an_owner_who_keeps_the_graph_are_in_what_is_reached(torch: Torch, planner: Planner, prepare: str) -> None:
    edited = KERNEL.__class__(kind="kernel", name="edited", footprint=KERNEL.footprint)
    with reach_graphs(planner, torch.access) as reached:
        graph = torch.capture(keep_graph=True)
        assert not graph.is_ready, "the owner says when"
        assert reached.graphs == ()
        graph.nodes = [edited]
        getattr(graph, prepare)()
        assert only(reached).graph.nodes() == (edited,)
        replay(graph, 2)
        assert torch.launches == [(planner.given[0], DEVICE)]


def test_an_owner_who_edits_again_replaces_what_stood_in(torch: Torch, planner: Planner) -> None:
    with reach_graphs(planner, torch.access) as reached:
        graph = torch.capture(keep_graph=True)
        graph.instantiate()
        graph.nodes = [KERNEL, KERNEL]
        graph.instantiate()
        assert len(only(reached).graph.nodes()) == 2
        assert [executable.is_open for executable in planner.given] == [False, True]
        assert len(torch.freed) == 1


def test_there_is_one_hook_at_a_time(torch: Torch) -> None:
    with reach_graphs(leave, torch.access):
        before = dict(vars(torch.graph_class))
        with pytest.raises(DeviceError, match="Stop that one first"):
            reach_graphs(leave, torch.access)
        assert dict(vars(torch.graph_class)) == before
    reach_graphs(leave, torch.access).stop()


def test_graphs_that_on_capture_captures_are_not_reached(torch: Torch, planner: Planner) -> None:
    def capture_more(graph: AbstractGraph) -> AbstractExecutable:
        replay(torch.capture(), 1)
        return planner(graph)

    with reach_graphs(capture_more, torch.access) as reached:
        graph = torch.capture()
        assert len(reached.graphs) == len(planner.given) == 1
        replay(graph, 2)
        assert len(torch.launches) == 1


def test_a_graph_that_nobody_holds_is_freed_with_what_stood_in(torch: Torch, planner: Planner) -> None:
    with reach_graphs(planner, torch.access) as reached:
        graph = torch.capture()
        record = only(reached)
        del graph
        gc.collect()
        assert reached.graphs == ()
        assert not planner.given[0].is_open
        assert torch.freed == torch.copies
        with pytest.raises(DeviceError, match="Graph 0 is gone"):
            record.replace(planner(torch.copies[0]))


def test_a_graph_that_is_reset_and_captured_again_is_reached_again(torch: Torch, planner: Planner) -> None:
    with reach_graphs(planner, torch.access) as reached:
        graph = torch.capture()
        replay(graph, 2)
        graph.reset()
        assert (graph.nodes, reached.graphs) == (None, ())
        assert not planner.given[0].is_open
        graph.capture_end()
        replay(graph, 2)
        assert [executable for executable, _ in torch.launches] == planner.given
        assert [record.number for record in reached.graphs] == [1]


def test_captures_of_many_threads_are_all_reached_one_at_a_time(torch: Torch) -> None:
    num_threads, captures = 8, 25
    inside: list[int] = []
    most: list[int] = []
    graphs: list[CudaGraphDouble] = []

    def watch(graph: AbstractGraph) -> AbstractExecutable:
        inside.append(1)
        most.append(len(inside))
        executable = graph.instantiate()
        inside.pop()
        return executable

    def work() -> None:
        start.wait()
        for _ in range(captures):
            graphs.append(torch.capture())
            replay(graphs[-1], 2)

    start = threading.Barrier(num_threads)
    with reach_graphs(watch, torch.access) as reached:
        threads = [threading.Thread(target=work) for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [record.number for record in reached.graphs] == list(range(num_threads * captures))
        assert max(most) == 1
        assert reached.notes == ()


def test_another_thread_that_reverts_waits_until_a_launch_is_through(torch: Torch, planner: Planner) -> None:
    was_open: list[bool] = []

    def revert_beside() -> None:
        thread.start()
        thread.join(0.05)
        was_open.append(planner.given[0].is_open)

    with reach_graphs(planner, torch.access) as reached:
        graph = torch.capture()
        replay(graph, 1)
        thread = threading.Thread(target=only(reached).revert)
        torch.during_launch = revert_beside
        replay(graph, 1)
        thread.join()
        assert was_open == [True]
        assert not planner.given[0].is_open


def test_stopping_while_another_thread_replays_never_launches_what_is_freed(torch: Torch, planner: Planner) -> None:
    problems: list[BaseException] = []
    is_done = threading.Event()

    def work() -> None:
        try:
            while not is_done.is_set():
                graph.replay()
        except BaseException as problem:
            problems.append(problem)

    for _ in range(20):
        is_done.clear()
        with reach_graphs(planner, torch.access) as reached:
            graph = torch.capture()
            thread = threading.Thread(target=work)
            thread.start()
            only(reached).replace(planner(only(reached).graph))
        is_done.set()
        thread.join()
    assert problems == []
    assert not any(executable.is_open for executable in planner.given)


def test_where_torch_says_itself_when_a_capture_ends_that_is_used(planner: Planner) -> None:
    torch = Torch(has_own_hook=True)
    own = vars(torch.graph_class)["capture_end"]
    with reach_graphs(planner, torch.access) as reached:
        assert vars(torch.graph_class)["capture_end"] is own
        graph = torch.capture()
        assert reached.graphs == ()
        torch.hooks[0](graph)
        replay(graph, 2)
        assert torch.launches == [(planner.given[0], DEVICE)]
    assert torch.hooks == {}


@pytest.mark.parametrize("module", ["torch", "cuda.bindings"])
def test_without_torch_or_bindings_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "counterpoint.cuda.torch_graphs", raising=False)
    with pytest.raises(DeviceError, match=r"Install it: pip install torch cuda-bindings") as problem:
        reach_graphs(leave)
    assert "\n" not in str(problem.value)
