"""Which captures the hook reaches: subclasses, graphs kept by their owner, made before, captured again, or freed."""

import gc

import pytest

from counterpoint.cuda.graph import AbstractExecutable, AbstractGraph
from counterpoint.cuda.hook import reach_graphs
from counterpoint.errors import DeviceError
from helpers.torch_graph_double import DEVICE, KERNEL, Planner, Torch, only, replay


@pytest.fixture
def torch() -> Torch:
    return Torch()


@pytest.fixture
def planner() -> Planner:
    return Planner()


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
