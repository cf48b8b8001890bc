"""The hook on graphs that others capture: what stands in for them, how it is undone, and what goes wrong on the way."""

import sys

import pytest

from counterpoint.cuda.graph import AbstractExecutable, AbstractGraph
from counterpoint.cuda.hook import reach_graphs
from counterpoint.errors import DeviceError
from helpers.graph_double import Faults
from helpers.torch_graph_double import DEVICE, KERNEL, PRIORITY, Planner, Torch, leave, only, replay


@pytest.fixture
def torch() -> Torch:
    return Torch()


@pytest.fixture
def planner() -> Planner:
    return Planner()


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


def test_there_is_one_hook_at_a_time(torch: Torch) -> None:
    with reach_graphs(leave, torch.access):
        before = dict(vars(torch.graph_class))
        with pytest.raises(DeviceError, match="Stop that one first"):
            reach_graphs(leave, torch.access)
        assert dict(vars(torch.graph_class)) == before
    reach_graphs(leave, torch.access).stop()


@pytest.mark.parametrize("module", ["torch", "cuda.bindings"])
def test_without_torch_or_bindings_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "counterpoint.cuda.torch_graphs", raising=False)
    with pytest.raises(DeviceError, match=r"Install it: pip install 'torch>=2\.11,<3' 'cuda-bindings>=13,<14'") as problem:
        reach_graphs(leave)
    assert "\n" not in str(problem.value)
