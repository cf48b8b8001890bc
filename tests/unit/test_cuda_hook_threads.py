"""The hook where several threads capture, replay, revert and stop at once."""

import threading

import pytest

from counterpoint.cuda.graph import AbstractExecutable, AbstractGraph
from counterpoint.cuda.hook import reach_graphs
from helpers.torch_graph_double import CudaGraphDouble, Planner, Torch, only, replay


@pytest.fixture
def torch() -> Torch:
    return Torch()


@pytest.fixture
def planner() -> Planner:
    return Planner()


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
