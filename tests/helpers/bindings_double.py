"""A double of the CUDA driver's Python bindings, and the modules that need them, imported on it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

MODULES = (
    "counterpoint.cuda.driver",
    "counterpoint.ops.driver_calls",
    "counterpoint.ops.gpu_progress",
    "counterpoint.ops.signals",
    "counterpoint.ops.call_order",
    "counterpoint.ops.launch_order",
    "counterpoint.ops.compiled_copies",
    "counterpoint.ops.copy_engines",
    "counterpoint.ops.copy_lane",
)
EQUAL, FLUSH = 1, 1 << 30


class Operation:
    """Stands for CUstreamBatchMemOpParams."""

    def __init__(self) -> None:
        self.waitValue, self.writeValue = SimpleNamespace(), SimpleNamespace()


@contextmanager
def double_of_bindings() -> Iterator[MagicMock]:
    """Let the modules that need the bindings be imported on a double of them; afterwards all is as before."""
    double = MagicMock()
    double.CUresult = SimpleNamespace(CUDA_SUCCESS="success")
    double.CUstreamWaitValue_flags = SimpleNamespace(CU_STREAM_WAIT_VALUE_EQ=EQUAL, CU_STREAM_WAIT_VALUE_FLUSH=FLUSH)
    double.CUstreamBatchMemOpType = SimpleNamespace(
        CU_STREAM_MEM_OP_WAIT_VALUE_32="wait", CU_STREAM_MEM_OP_WRITE_VALUE_32="write"
    )
    double.CUstreamBatchMemOpParams = Operation
    double.CUdeviceptr = double.cuuint32_t = lambda number: number
    double.cuDeviceGet = lambda number: ("success", number)
    bindings = ModuleType("cuda.bindings")
    bindings.driver = double  # type: ignore[attr-defined]
    replaced = ("cuda", "cuda.bindings", *MODULES)
    known = {name: sys.modules.pop(name, None) for name in replaced}
    sys.modules |= {"cuda": ModuleType("cuda"), "cuda.bindings": bindings}
    try:
        yield double
    finally:
        for name, before in known.items():
            sys.modules.pop(name, None)
            if before is not None:
                sys.modules[name] = before
