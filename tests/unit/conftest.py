"""What several files need to run: the double of libcuda as a file, alone or with the launch filter, a process group of one
rank, and orders that do not vary.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.build_filter import Built, build_double, build_preloaded
from helpers.remembering_compiler import remembering_compiler


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the double of libcuda."""
    folder = tmp_path_factory.mktemp("driver")
    build_double(folder)
    return folder


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The launch filter as it is shipped, and a client that knows nothing of it; compiling them takes seconds."""
    return build_preloaded(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="session")
def folder_of_cc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PATH with a `cc` that builds the same thing once only."""
    return remembering_compiler(tmp_path_factory.mktemp("compiler")).parent


@pytest.fixture
def cc_remembers(folder_of_cc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the test, `cc` copies what it built before."""
    monkeypatch.setenv("PATH", f"{folder_of_cc}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A process group of this process alone, with nothing of an earlier test."""
    dist, ops = pytest.importorskip("torch.distributed"), pytest.importorskip("counterpoint.ops")
    ops.release()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        ops.release()
        dist.destroy_process_group()


@pytest.fixture
def same_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test draws the same orders in each run: a proof may err in `ERROR_RATE` of all orders."""
    monkeypatch.setattr("counterpoint.planner.measured.draw_seed", lambda: 7)
