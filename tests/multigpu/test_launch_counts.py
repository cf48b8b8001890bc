"""The launch filter sees every kernel of stock DDP, FSDP2 and tensor-parallel jobs that the profiler sees."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from counterpoint.launch_filter.control_block import INITIAL_BLOCK, ControlBlock
from counterpoint.launch_filter.library import filter_library
from counterpoint.supervised.settings import DIRECTORY_VARIABLE

Start = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("job", ["ddp", "fsdp2", "tp"])
def test_every_launch_of_a_stock_job_is_seen(
    start_ranks: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, job: str
) -> None:
    ControlBlock.write_initial(tmp_path / INITIAL_BLOCK, ())
    monkeypatch.setenv("LD_PRELOAD", str(filter_library()))
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    done = start_ranks("launch_counts", job)
    print(done.stdout[-2000:], done.stderr[-3000:])
    assert done.returncode == 0
    rows = re.findall(r"rank (\d): filter (\d+), profiler (\d+), collectives (\d+)", done.stdout)
    assert sorted(rank for rank, *_ in rows) == ["0", "1"]
    for _, seen, profiled, collectives in rows:
        assert seen == profiled
        assert int(collectives) > 0
