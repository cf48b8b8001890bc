"""Graphs that torch itself captures, reached through the hook on a real GPU, and left as they were afterwards."""

import gc
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from cuda.bindings import driver as cu

from counterpoint.cuda.driver import DriverGraph, check
from counterpoint.cuda.graph import AbstractExecutable, AbstractGraph
from counterpoint.cuda.hook import reach_graphs
from counterpoint.cuda.torch_graphs import torch_access

PRIORITY = -5
# what torch warns of on its own account while it compiles and captures is not the hook's
pytestmark = pytest.mark.filterwarnings("default")


class Counted(AbstractExecutable):
    """An executable that counts its launches."""

    def __init__(self, inner: AbstractExecutable) -> None:
        self.inner = inner
        self.num_launches = 0
        self.is_open = True

    def launch(self, stream: int) -> None:
        self.num_launches += 1
        self.inner.launch(stream)

    def honors_priority(self) -> bool:
        return self.inner.honors_priority()

    def close(self) -> None:
        self.is_open = False
        self.inner.close()


class Raise:
    """An `on_capture` that raises the priority of every kernel on a copy, and keeps what it made."""

    def __init__(self) -> None:
        self.edited: list[AbstractGraph] = []
        self.executables: list[Counted] = []

    def __call__(self, graph: AbstractGraph) -> AbstractExecutable:
        edited = graph.copy()
        for number, node in enumerate(graph.nodes()):
            if node.kind == "kernel":
                edited.set_priority(number, PRIORITY)
        self.edited.append(edited)
        self.executables.append(Counted(edited.instantiate()))
        return self.executables[-1]

    def launches(self) -> list[int]:
        return [executable.num_launches for executable in self.executables]

    def priorities(self) -> set[int]:
        return {node.priority for graph in self.edited for node in graph.nodes() if node.kind == "kernel"}


@pytest.fixture(autouse=True)
def torch_class_is_what_it_was() -> Iterator[None]:
    before = dict(vars(torch.cuda.CUDAGraph))
    yield
    assert dict(vars(torch.cuda.CUDAGraph)) == before


def mlp(dropout: float = 0.0) -> torch.nn.Sequential:
    torch.manual_seed(7)
    layers = (torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Dropout(dropout), torch.nn.Linear(512, 256))
    return torch.nn.Sequential(*layers).cuda()


def inputs(count: int) -> list[torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(11)
    return [torch.randn(64, 256, device="cuda", generator=generator) for _ in range(count)]


def train(model: Callable[[torch.Tensor], torch.Tensor], parameters: list[torch.Tensor], count: int) -> list[torch.Tensor]:
    """Outputs and gradients of a few steps, one after the other."""
    found = []
    for given in inputs(count):
        output = model(given.requires_grad_())
        found += [output.detach().clone(), *torch.autograd.grad(output.square().sum(), parameters)]
        found = [tensor.clone() for tensor in found]
    return found


def capture(work: Callable[[], None], **options: str) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        work()
    return graph


def identical(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(first, second) for first, second in zip(one, other, strict=True))


def test_graphed_callables_are_reached_forward_and_backward() -> None:
    plain = mlp()
    expected = train(torch.cuda.make_graphed_callables(plain, (inputs(1)[0],)), list(plain.parameters()), 4)
    on_capture, model = Raise(), mlp()
    with reach_graphs(on_capture) as reached:
        graphed = torch.cuda.make_graphed_callables(model, (inputs(1)[0],))
        found = train(graphed, list(model.parameters()), 4)
        assert reached.notes == ()
        assert len(reached.graphs) == 2
        assert on_capture.launches() == [3, 3], "all but the first replay of each"
        assert on_capture.priorities() == {PRIORITY}
        assert {node.priority for record in reached.graphs for node in record.graph.nodes()} == {0}
    assert identical(found, expected)
    assert identical(train(graphed, list(model.parameters()), 4), expected)
    assert on_capture.launches() == [3, 3]
    assert not any(executable.is_open for executable in on_capture.executables)


def test_a_model_compiled_to_reduce_overhead_is_reached() -> None:
    def run(model: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            return [model(given).clone() for given in inputs(6)]

    model = mlp()
    expected = run(torch.compile(model, mode="reduce-overhead"))
    torch.compiler.reset()
    on_capture = Raise()
    with reach_graphs(on_capture) as reached:
        compiled = torch.compile(model, mode="reduce-overhead")
        found = run(compiled)
        # torch captures an empty graph of its own beside the model's
        assert [sum(node.kind == "kernel" for node in graph.nodes()) > 0 for graph in on_capture.edited].count(True) == 1
        assert max(on_capture.launches()) >= 3
        assert on_capture.priorities() == {PRIORITY}
        assert all("random" not in note for note in reached.notes)
        launches = on_capture.launches()
    assert identical(found, expected)
    assert identical(run(compiled), expected)
    assert on_capture.launches() == launches
    torch.compiler.reset()


def test_dropout_draws_the_same_numbers_as_without_the_hook() -> None:
    def draw(on_capture: Raise | None) -> tuple[list[torch.Tensor], tuple[str, ...]]:
        model, given, found = mlp(dropout=0.5), inputs(1)[0], []
        output = torch.empty_like(given)
        with torch.no_grad():
            model(given)
            torch.cuda.synchronize()
            hook = reach_graphs(on_capture) if on_capture else None
            graph = capture(lambda: output.copy_(model(given)))
            torch.manual_seed(3)
            for _ in range(4):
                graph.replay()
                found.append(output.clone())
        if hook is None:
            return found, ()
        hook.stop()
        return found, hook.notes

    expected, _ = draw(None)
    found, notes = draw(Raise())
    assert identical(found, expected)
    assert not torch.equal(found[1], found[2])
    assert len(notes) == 1
    assert "random numbers" in notes[0]


def test_a_graph_that_allocates_memory_is_left_and_noted() -> None:
    values = torch.zeros(1024, device="cuda")

    def work() -> None:
        stream = cu.CUstream(torch.cuda.current_stream().cuda_stream)
        pointer = check("allocating", cu.cuMemAllocAsync(4096, stream))
        check("filling", cu.cuMemsetD32Async(pointer, 7, 1024, stream))
        check("copying", cu.cuMemcpyDtoDAsync(values.data_ptr(), pointer, 4096, stream))
        check("freeing", cu.cuMemFreeAsync(pointer, stream))

    on_capture = Raise()
    with reach_graphs(on_capture) as reached:
        graph = capture(work)
        for _ in range(3):
            values.zero_()
            graph.replay()
            assert bool((values.view(torch.int32) == 7).all())
        assert on_capture.executables == []
        assert len(reached.notes) == 1
        assert "allocate memory" in reached.notes[0]


def test_replays_follow_the_stream_they_are_called_on_and_can_be_replaced_again() -> None:
    values = torch.zeros(1 << 24, device="cuda")
    on_capture, side = Raise(), torch.cuda.Stream()
    with reach_graphs(lambda graph: None) as reached:
        graph = capture(lambda: values.add_(1))
        graph.replay()
        record = reached.graphs[0]
        for count in (2, 3):
            record.replace(on_capture(record.graph))
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                graph.replay()
                assert float(values.amax()) == count
        assert on_capture.launches() == [1, 1]
        record.revert()
        graph.replay()
        assert float(values.amin()) == 4
        assert on_capture.launches() == [1, 1]


def test_the_memory_of_a_graph_goes_back_when_its_owner_lets_go() -> None:
    def reserved(hooked: bool) -> int:
        hook = reach_graphs(Raise()) if hooked else None
        graph = capture(lambda: torch.zeros(1 << 26, device="cuda").add_(1))
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
        del graph
        gc.collect()
        torch.cuda.empty_cache()
        left = torch.cuda.memory_reserved()
        if hook:
            assert hook.graphs == ()
            hook.stop()
        return left

    assert reserved(hooked=True) == reserved(hooked=False)


def test_reaching_and_freeing_do_not_end_the_capture_of_another_thread() -> None:
    values = torch.zeros(1024, device="cuda")
    is_capturing, may_end = threading.Event(), threading.Event()
    problems: list[BaseException] = []
    graphs: list[torch.cuda.CUDAGraph] = []

    def work() -> None:
        values.add_(1)
        is_capturing.set()
        may_end.wait(60)
        values.add_(1)

    def other() -> None:
        try:
            graphs.append(capture(work))  # in the global mode, which minds what every thread does
        except BaseException as problem:
            problems.append(problem)

    with reach_graphs(Raise()) as reached:
        kept = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(kept):
            values.mul_(1)
        kept.instantiate()
        access = torch_access()
        thread = threading.Thread(target=other)
        thread.start()
        assert is_capturing.wait(60)
        with access.sheltered():
            copied, free = access.copy(kept)
            copied.instantiate().close()
            free()
        reached.graphs[0].revert()
        reached.stop()  # torch's own reset() of a graph would end the other capture, with or without a hook
        may_end.set()
        thread.join()
        assert problems == []
        graphs[0].replay()
        graphs[0].replay()
        assert float(values.amax()) == 4


def test_what_the_owner_of_a_kept_graph_changes_is_in_the_replays() -> None:
    values = torch.zeros(16, device="cuda")
    with reach_graphs(Raise()) as reached:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            values.add_(1)
        own = DriverGraph(graph.raw_cuda_graph())
        own.set_priority(0, -2)
        graph.replay()
        assert reached.graphs[0].graph.nodes()[0].priority == -2
        graph.replay()
        assert float(values.amax()) == 2
