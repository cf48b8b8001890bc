"""Tests that need one GPU. Without one, each file is skipped with the reason, before it imports what is not there."""

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

import pytest


def missing() -> str:
    """What these tests lack here; empty if nothing."""
    try:
        torch = import_module("torch")
        import_module("cuda.bindings.driver")
    except ImportError as problem:
        return f"needs torch and cuda-bindings: {problem}"
    return "" if torch.cuda.is_available() else "needs a GPU, and torch.cuda.is_available() is false"


class SkippedModule(pytest.Module):
    """A file of tests that says why it does not run."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        raise pytest.skip.Exception(missing(), allow_module_level=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Calibration first: it refuses a GPU on which this process computes, as it does after other tests."""
    items.sort(key=lambda item: "test_calibrate" not in item.path.name and "tests/gpu" in item.path.as_posix())


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return SkippedModule.from_parent(parent, path=module_path) if missing() else None
