"""What several files need to run: the double of libcuda as a file, and a process group of one rank."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.build_filter import build_double


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the double of libcuda."""
    folder = tmp_path_factory.mktemp("driver")
    build_double(folder)
    return folder


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
