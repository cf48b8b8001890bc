"""Capture a step function in a CUDA graph, read it as a step, and time replays of it on all ranks together.

The step function is called a few times first, so that libraries initialize outside the capture. While it is captured, a CPU
profiler notes the collectives that torch.distributed issues, because their sizes are not in the graph. Lone times come
from replays of a serialized copy: every node alone, in an order that is the same on all ranks.
"""

import hashlib
import statistics
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from counterpoint.cuda.driver import DriverGraph
from counterpoint.cuda.graph import AbstractExecutable
from counterpoint.cuda.plan_cache import Surroundings
from counterpoint.cuda.reading import CollectiveCall, GraphTimes, ReadGraph, read_graph
from counterpoint.errors import DeviceError, PlanError
from counterpoint.traces.classify import load_rules

WARM_UP_CALLS = 3
LONE_REPLAYS = 3
RENDEZVOUS_TIMEOUT = timedelta(seconds=120)


class Captured:
    """A captured step: its graph, the step it is, and the means to time it. Made by `capture`."""

    def __init__(self, graph: torch.cuda.CUDAGraph, calls: list[CollectiveCall], name: str) -> None:
        self._owner = graph
        self.coordination = dist.new_group(backend="gloo", timeout=RENDEZVOUS_TIMEOUT) if dist.is_initialized() else None
        self.graph = DriverGraph(graph.raw_cuda_graph())
        times = GraphTimes(device_name=torch.cuda.get_device_name(), lone_us=self._lone_times())
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.read: ReadGraph = read_graph(name, self.graph.nodes(), calls, times, num_ranks)

    def time_us(self, executable: AbstractExecutable) -> float:
        """One replay on all ranks, started together; the time of the slowest, in microseconds."""
        self._meet()
        stream = torch.cuda.current_stream()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(stream)
        executable.launch(stream.cuda_stream)
        end.record(stream)
        end.synchronize()
        own = torch.tensor([start.elapsed_time(end) * 1000.0])
        if self.coordination is not None:
            dist.all_reduce(own, op=dist.ReduceOp.MAX, group=self.coordination)
        return float(own.item())

    def agree(self, text: str) -> str:
        """Rank 0's text, on every rank; raises `PlanError` on all ranks if one of them captured another step."""
        if self.coordination is None:
            return text
        mine = (self.read.step.fingerprint(), text)
        everyone: list[tuple[str, str]] = [mine] * dist.get_world_size()
        dist.all_gather_object(everyone, mine, group=self.coordination)
        fingerprints = [fingerprint for fingerprint, _ in everyone]
        if len(set(fingerprints)) > 1:
            raise PlanError(
                f"The ranks captured different steps ({', '.join(fingerprints)}), so one plan cannot fit them. "
                "Capture the same shapes and operations on every rank."
            )
        return everyone[0][1]

    def is_first_rank(self) -> bool:
        """Whether this process is the one that writes files and prints."""
        return self.coordination is None or dist.get_rank() == 0

    def surroundings(self) -> Surroundings:
        """What a plan measured here depends on."""
        nccl = torch.cuda.nccl.version() if dist.is_nccl_available() else ()
        return Surroundings(
            device_name=torch.cuda.get_device_name(),
            driver_version=str(torch._C._cuda_getDriverVersion()),
            nccl_version=".".join(str(part) for part in nccl),
            torch_version=torch.__version__,
            num_ranks=self.read.step.num_ranks,
        )

    def outputs_digest(self, executable: AbstractExecutable, outputs: list[torch.Tensor]) -> str:
        """A digest of the outputs' bits after one replay, poisoned before it."""
        for tensor in outputs:
            tensor.fill_(float("nan"))
        self.time_us(executable)
        digest = hashlib.sha256()
        for tensor in outputs:
            digest.update(tensor.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return digest.hexdigest()

    def _meet(self) -> None:
        torch.cuda.synchronize()
        if self.coordination is not None:
            dist.barrier(group=self.coordination)

    def _lone_times(self) -> tuple[float, ...]:
        """Each node's time with nothing beside it: medians over replays of a serialized copy."""
        serial = self.graph.copy()
        serial.serialize()
        executable = serial.instantiate()
        working = [number for number, node in enumerate(self.graph.nodes()) if node.kind != "other"]
        samples: list[list[float]] = []
        for replay in range(1 + LONE_REPLAYS):
            self._meet()
            with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
                executable.launch(torch.cuda.current_stream().cuda_stream)
                torch.cuda.synchronize()
            found = _device_times(profiler)
            if len(found) != len(working):
                raise DeviceError(
                    f"The profiler saw {len(found)} operations in a replay of a graph that holds {len(working)}. "
                    "Stop other work of this process on the GPU while capturing."
                )
            if replay:
                samples.append(found)
        executable.close()
        times = [0.0] * len(self.graph.nodes())
        for place, number in enumerate(working):
            times[number] = statistics.median(sample[place] for sample in samples)
        return tuple(times)


def capture(step_fn: Callable[[], object], name: str = "captured step") -> Captured:
    """Capture `step_fn`, which must issue the same work on every rank each time it is called.

    Raises `DeviceError` without a GPU or with a torch that cannot keep a captured graph.
    """
    if not torch.cuda.is_available():
        raise DeviceError("No GPU is visible, so nothing can be captured. Plan without one: counterpoint tune TRACE.")
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        for _ in range(WARM_UP_CALLS):
            step_fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with profile(activities=[ProfilerActivity.CPU]) as profiler, torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step_fn()
    return Captured(graph, _collective_calls(profiler), name)


def _device_times(profiler: profile) -> list[float]:
    """Microseconds of each operation on the GPU, in the order in which they started."""
    events = [
        (event.time_range.start, event.time_range.elapsed_us())
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]
    return [elapsed for _, elapsed in sorted(events)]


def _collective_calls(profiler: profile) -> list[CollectiveCall]:
    """The collectives that were issued while the profiler looked, in order."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "capture.json"
        profiler.export_chrome_trace(str(path))
        events = msgspec.json.decode(path.read_bytes())["traceEvents"]
    noted = [event for event in events if event.get("name") == "record_param_comms"]
    noted.sort(key=lambda event: event["ts"])
    rules = load_rules()
    calls = []
    for event in noted:
        args = event.get("args", {})
        kind = rules.collective_names.get(str(args.get("Collective name", "")).lower().lstrip("_"))
        if kind is None:
            continue
        element_bytes = rules.dtype_bytes.get(str(args.get("dtype", "")).lower(), 1)
        elements = max(int(args.get("In msg nelems", 0)), int(args.get("Out msg nelems", 0)))
        calls.append(
            CollectiveCall(collective=kind, num_bytes=elements * element_bytes, group_size=int(args.get("Group size", 1)))
        )
    return calls
