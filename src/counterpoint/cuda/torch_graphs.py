"""Torch's captured graphs and the CUDA driver, as the hook asks for them (`reached.py`). Needs torch and cuda-bindings.

Copying, making ready and freeing graphs are calls that would end a capture that another thread has begun in the global mode;
torch relaxes the mode of its own thread around them (CUDAGraph::reset in its CUDAGraph.cpp), and so does `_sheltered`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from cuda.bindings import driver as cu

from counterpoint.cuda.driver import DriverGraph, check
from counterpoint.cuda.graph import AbstractExecutable, AbstractGraph
from counterpoint.cuda.reached import GraphAccess

RELAXED = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


def torch_access() -> GraphAccess:
    """Access to the graphs of this process; torch's own capture-end hook is used where it has one, from 2.14."""
    return GraphAccess(
        graph_class=torch.cuda.CUDAGraph,
        copy=_copy,
        device=torch.cuda.current_device,
        random_state=_random_state,
        launch=_launch,
        sheltered=_sheltered,
        register_capture_end=getattr(torch.cuda.graphs, "register_graph_capture_end_hook", None),
    )


def _copy(graph: torch.cuda.CUDAGraph) -> tuple[AbstractGraph, Callable[[], None]]:
    copied = DriverGraph(graph.raw_cuda_graph()).copy()
    return copied, copied.close


def _random_state(device: int) -> bytes:
    state: bytes = torch.cuda.default_generators[device].get_state().numpy().tobytes()
    return state


def _launch(executable: AbstractExecutable, device: int) -> None:
    with torch.cuda.device(device):
        executable.launch(torch.cuda.current_stream().cuda_stream)


@contextmanager
def _sheltered() -> Iterator[None]:
    before = check("Relaxing this thread's capture mode", cu.cuThreadExchangeStreamCaptureMode(RELAXED))
    try:
        yield
    finally:
        check("Restoring this thread's capture mode", cu.cuThreadExchangeStreamCaptureMode(before))
