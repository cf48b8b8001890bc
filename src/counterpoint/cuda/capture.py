"""Captures a step function in a CUDA graph, reads it as a step, and replays it on all ranks together.

The step function is called a few times first, so that libraries initialize outside the capture. During the capture, a CPU
profiler records the collectives that torch.distributed issues, because the graph does not hold their sizes. Lone times come
from replays of a serialized copy, which runs every node alone, in an order that is the same on all ranks. The profiler
names the nodes and times them; events time them again, because the profiler makes some kernels longer.
"""

import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from counterpoint.cuda.collective_blocks import IssuedCollective
from counterpoint.cuda.conditions import torch_version
from counterpoint.cuda.driver import driver_version
from counterpoint.cuda.driver_graph import DriverGraph
from counterpoint.cuda.graph import AbstractExecutable
from counterpoint.cuda.graph_reading import CollectiveCall, GraphTimes, ReadGraph, read_calls, read_graph, without_excess
from counterpoint.cuda.issued_calls import NotedCalls
from counterpoint.cuda.plan_cache import Conditions
from counterpoint.cuda.rendezvous import Rendezvous
from counterpoint.errors import DeviceError, StepError, cause_of
from counterpoint.step import MatmulSizes
from counterpoint.timeline import Interval, Timeline
from counterpoint.traces.classify import classify_kernel
from counterpoint.traces.kineto import GPU_CATEGORIES

WARM_UP_CALLS = 3
LONE_REPLAYS = 3
Activity = tuple[float, float, str]


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """A step function in a torch graph, the collectives that it issued, and whether it draws random numbers.

    Only torch's own `replay()` advances random numbers. `matmul_sizes`: rows, inner size and columns, by a node's handle.
    """

    graph: torch.cuda.CUDAGraph
    calls: list[CollectiveCall]
    collectives: list[IssuedCollective]
    matmul_sizes: dict[int, MatmulSizes]
    is_random: bool


class Captured:
    """A captured step: its graph, the step read from it, and the methods that replay it. Made by `capture`."""

    def __init__(self, recording: Recording, name: str, limit_s: float) -> None:
        self._owner = recording.graph
        self.is_random = recording.is_random
        self.collectives = recording.collectives
        self._kept = ExitStack()
        self.rendezvous = Rendezvous(limit_s)
        self.graph = DriverGraph(recording.graph.raw_cuda_graph())
        self.read: ReadGraph = read_graph(
            name,
            self.graph.nodes(),
            recording.calls,
            self._lone_times(),
            self.rendezvous.num_ranks,
            matmul_sizes=self.graph.by_number(recording.matmul_sizes),
        )

    def keep(self, close: Callable[[], None]) -> None:
        """Register `close`, called when the step is closed; it frees what graphs derived from this step's graph use."""
        self._kept.callback(close)

    def close(self) -> None:
        """Call what `keep` registered; this waits for the GPU. Graphs derived from the step's must not run any more."""
        self._kept.close()

    def require_repeatable(self) -> None:
        """Raise `DeviceError` if the step draws random numbers, because each of these replays would draw the same ones."""
        if self.is_random:
            raise DeviceError(
                "The step draws random numbers. Only torch's own replay advances them; other replays would "
                "repeat them. Leave them out of the captured step."
            )

    def time_us(self, executable: AbstractExecutable) -> float:
        """Time the second of two replays on all ranks, started together; return the time of the slowest, in
        microseconds.

        The first replay brings the GPUs to the clocks and the temperature of this executable, whatever ran before it.
        """
        torch.cuda.synchronize()
        self.rendezvous.meet()
        stream = torch.cuda.current_stream()
        executable.launch(stream.cuda_stream)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(stream)
        executable.launch(stream.cuda_stream)
        end.record(stream)
        self.rendezvous.wait_for(end)
        return self.rendezvous.slowest(start.elapsed_time(end) * 1000.0)

    def timeline(self, executable: AbstractExecutable) -> Timeline:
        """Profile one replay, and return the measured timeline of this rank."""
        waiting: dict[str, list[int]] = {}
        for index, operation in enumerate(self.read.step.operations):
            waiting.setdefault(operation.name, []).append(index)
        activities = self._profile(executable)
        first_us = min((start for start, _, _ in activities), default=0.0)
        intervals = []
        for start_us, end_us, name in activities:
            if not waiting.get(name):
                continue  # the kernel of a head start is not an operation of the step
            index = waiting[name].pop(0)
            operation = self.read.step.operations[index]
            intervals.append(
                Interval(
                    rank=self.rendezvous.rank,
                    stream=operation.stream,
                    operation=index,
                    name=name,
                    kind=operation.kind,
                    start_us=start_us - first_us,
                    end_us=end_us - first_us,
                )
            )
        return Timeline(step_name=self.read.step.name, origin="measured", intervals=tuple(intervals))

    def agree(self, text: str) -> str:
        """Return rank 0's text, on every rank; raises `PlanError` on all ranks if one of them captured another step."""
        return self.rendezvous.agree(self.read.step.fingerprint(), text)

    def is_everywhere(self, is_true: bool) -> bool:
        """Return whether the value is true on every rank; all ranks must call it."""
        return self.rendezvous.slowest(float(not is_true)) == 0.0

    def conditions(self) -> Conditions:
        """Return the conditions on which a plan measured here depends."""
        nccl = torch.cuda.nccl.version() if dist.is_nccl_available() else ()
        return Conditions(
            device_name=torch.cuda.get_device_name(),
            driver_version=driver_version(),
            nccl_version=".".join(str(part) for part in nccl),
            torch_version=torch_version(),
            num_ranks=self.read.step.num_ranks,
        )

    def _profile(self, executable: AbstractExecutable) -> list[Activity]:
        """Return start and end (microseconds) and name of each operation on the GPU in one replay, in order of starts."""
        torch.cuda.synchronize()
        with _profiling(ProfilerActivity.CUDA, ProfilerActivity.CPU) as profiler:
            self._replay(executable)  # not earlier: the time that a profiler takes to start differs between ranks
        return sorted(
            (float(event["ts"]), float(event["ts"]) + float(event["dur"]), str(event["name"]))
            for event in _events(profiler)
            if event.get("cat") in GPU_CATEGORIES
        )

    def _replay(self, executable: AbstractExecutable) -> None:
        """Replay on all ranks, started together, and wait for the end."""
        self.rendezvous.meet()
        executable.launch(torch.cuda.current_stream().cuda_stream)
        end = torch.cuda.Event()
        end.record(torch.cuda.current_stream())
        self.rendezvous.wait_for(end)

    def _lone_times(self) -> GraphTimes:
        """Return each node's time when it runs alone (median over replays of a serialized copy), and its full name."""
        nodes = self.graph.nodes()
        working = [number for number, node in enumerate(nodes) if node.kind != "other"]
        with closing(self.graph.copy()) as serial:
            serial.serialize()
            with closing(serial.instantiate()) as executable:
                replays = [self._profile(executable) for _ in range(1 + LONE_REPLAYS)][1:]
        for activities in replays:
            if len(activities) != len(working):
                raise DeviceError(
                    f"The profiler saw {len(activities)} operations in a replay of a graph that holds {len(working)}. "
                    "Stop other work of this process on the GPU while capturing."
                )
        times, names = [0.0] * len(nodes), [node.name for node in nodes]
        for place, number in enumerate(working):
            times[number] = statistics.median(end - start for start, end, _ in (replay[place] for replay in replays))
            names[number] = replays[0][place][2]
        collectives = [number for number in working if classify_kernel(names[number]).kind == "communication"]
        times = without_excess(times, self._by_events_us(), set(working) - set(collectives))
        least = self.rendezvous.least_of(times)
        for number in collectives:
            times[number] = least[number]  # the last rank to reach a collective waits for no rank
        return GraphTimes(device_name=torch.cuda.get_device_name(), lone_us=tuple(times), names=tuple(names))

    def _by_events_us(self) -> list[float]:
        """Return each node's time between two events when it runs alone (median over replays), with the events' own."""
        replays: list[list[float]] = []
        with (
            closing(self.graph.copy()) as serial,
            closing(serial.serialize_with_events()) as events,
            closing(serial.instantiate()) as executable,
        ):
            for _ in range(1 + LONE_REPLAYS):
                self._replay(executable)
                replays.append(events.times_us())
        return [statistics.median(times) for times in zip(*replays[1:], strict=True)]


def capture(step_fn: Callable[[], object], name: str = "captured step", *, limit_s: float = 120.0) -> Captured:
    """Capture `step_fn`, which must issue the same work on every rank each time it is called.

    `limit_s`: how long ranks wait for each other. Raises `DeviceError` without a GPU or if a rank is gone, and
    `StepError` if the step cannot be captured.
    """
    return Captured(record(step_fn), name, limit_s)


def record(step_fn: Callable[[], object]) -> Recording:
    """Call `step_fn` a few times, then once while a graph is captured. Raises as `capture` does."""
    if not torch.cuda.is_available():
        raise DeviceError("No GPU is visible, so nothing can be captured. Plan without one: counterpoint tune TRACE.")
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    drawn_before = generator.get_offset()
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        for _ in range(WARM_UP_CALLS):
            step_fn()
    torch.cuda.synchronize()
    is_random = generator.get_offset() != drawn_before
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    try:
        with (
            _profiling(ProfilerActivity.CPU) as profiler,
            torch.cuda.graph(graph, capture_error_mode="thread_local"),
            NotedCalls() as noted,
        ):
            step_fn()
    except torch.AcceleratorError as problem:
        raise StepError(
            f"The step cannot be captured in a CUDA graph: {cause_of(problem)}. "
            "Leave synchronizations and host reads out of it."
        ) from problem
    return Recording(
        graph=graph,
        calls=read_calls(_events(profiler)),
        collectives=noted.collectives,
        matmul_sizes=noted.matmul_sizes,
        is_random=is_random,
    )


@contextmanager
def _profiling(*activities: ProfilerActivity) -> Iterator[profile]:
    """Run a profiler of one cycle, without torch's warning that a second cycle would drop the events of the first."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Profiler clears events")
        with profile(activities=activities) as profiler:
            yield profiler


def _events(profiler: profile) -> list[dict[str, Any]]:
    """Return the events of the profiler's trace; `profiler.events()` would take minutes for thousands of launches."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        found: list[dict[str, Any]] = msgspec.json.decode(path.read_bytes())["traceEvents"]
    return found
