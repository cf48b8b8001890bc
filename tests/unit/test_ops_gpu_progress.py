"""Where waits are freed from: another context, or, with a line, the job's own where there can be no other. On a double of
the driver."""

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest

from counterpoint.errors import DeviceError

torch = pytest.importorskip("torch")

UNDER_TEST = ("counterpoint.cuda.driver", "counterpoint.ops.gpu_progress")
FLAGS = (0x1000, 64)


def returning(*values: object) -> MagicMock:
    """A call of the driver that succeeds."""
    return MagicMock(return_value=("success", *values))


@pytest.fixture
def driver() -> MagicMock:
    double = MagicMock()
    double.CUresult = SimpleNamespace(CUDA_SUCCESS="success", CUDA_ERROR_NOT_READY="not ready")
    double.CUstream, double.CUdeviceptr = lambda stream: stream, lambda address: address
    made = {"cuCtxGetCurrent": "job", "cuCtxGetDevice": 0, "cuStreamCreate": "stream", "cuMemHostGetDevicePointer": 8}
    for name, value in {**made, "cuCtxCreate": "other", "cuCtxPopCurrent": "other"}.items():
        setattr(double, name, returning(value))
    for name in ("cuStreamQuery", "cuMemsetD32Async", "cuStreamSynchronize", "cuStreamDestroy"):
        setattr(double, name, returning())
    for name in ("cuCtxPushCurrent", "cuCtxSynchronize", "cuCtxDestroy"):
        setattr(double, name, returning())
    return double


@pytest.fixture
def calls(driver: MagicMock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    bindings = ModuleType("cuda.bindings")
    bindings.driver = driver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    known = {name: sys.modules.pop(name, None) for name in UNDER_TEST}
    module = importlib.import_module(UNDER_TEST[-1])
    pageable = SimpleNamespace(zeros=lambda size, **_: torch.zeros(size, dtype=torch.int32), int32=torch.int32)
    monkeypatch.setattr(module, "torch", pageable)
    yield module.GpuProgress(FLAGS)
    for name, before in known.items():
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before


def test_waits_are_freed_from_one_context_made_when_it_comes_to_that(driver: MagicMock, calls: Any) -> None:
    driver.cuCtxCreate.assert_not_called()
    calls.free_waits()
    calls.free_waits()
    driver.cuCtxCreate.assert_called_once_with(None, 0, 0)
    assert driver.cuMemsetD32Async.call_args_list == [call(FLAGS[0], 1, FLAGS[1], 0)] * 2
    calls.close()
    driver.cuCtxDestroy.assert_called_once_with("other")


def test_a_round_that_is_still_to_come_is_no_error_and_no_other_is_queued(driver: MagicMock, calls: Any) -> None:
    driver.cuStreamQuery.return_value = ("not ready",)
    calls.free_waits()
    driver.cuMemsetD32Async.assert_not_called()


def test_where_no_other_context_can_be_had_that_is_said_once_and_waits_are_freed_from_the_jobs_own(
    driver: MagicMock, calls: Any
) -> None:
    driver.cuCtxCreate.return_value = (SimpleNamespace(name="CUDA_ERROR_OUT_OF_MEMORY"), None)
    with pytest.raises(DeviceError, match=r"Making another CUDA context .*OUT_OF_MEMORY.* from the job's own context"):
        calls.free_waits()
    calls.free_waits()
    driver.cuMemsetD32Async.assert_called_once_with(FLAGS[0], 1, FLAGS[1], "stream")
    calls.close()
    driver.cuCtxDestroy.assert_not_called()


def test_an_error_of_the_other_context_leaves_the_callers_current(driver: MagicMock, calls: Any) -> None:
    calls.free_waits()
    driver.cuCtxSynchronize.return_value = (SimpleNamespace(name="CUDA_ERROR_ILLEGAL_ADDRESS"),)
    with pytest.raises(DeviceError, match="ILLEGAL_ADDRESS"):
        calls.close()
    driver.cuCtxPopCurrent.assert_called_once_with()
