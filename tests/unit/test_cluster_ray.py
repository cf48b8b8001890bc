"""Sweeps on a real local Ray of several workers: `make test-ray` installs Ray, and without it these tests are skipped."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from counterpoint.cluster.sweep import run_sweep
from counterpoint.cluster.sweep_file import load_sweep
from counterpoint.cluster.sweep_store import SweepStore
from helpers.command import COUNTERPOINT

ray = pytest.importorskip("ray", reason="Ray is not installed; make test-ray installs it and runs these tests")
pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]
BASE = Path(__file__).parents[2] / "examples" / "clusters" / "sweep_512.toml"
AXES = "[sweep]\nrecompute = ['full']\ntensor = [1, 2, 4, 8]\npipeline = [1, 2, 4, 8]\nmicro_batch = [1, 2, 3, 4]\n"
NUM_ROWS = 64
LIMIT_S = 240


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A Ray cluster of three nodes of one worker each, on this host."""
    from ray.cluster_utils import Cluster  # noqa: PLC0415  an extra

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    yield cluster.address
    cluster.shutdown()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "sweep.toml"
    path.write_text(BASE.read_text().split("[sweep]")[0] + AXES)
    return path


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_a_sweep_on_several_workers_gives_the_rows_of_local_cores(address: str, file: Path, tmp_path: Path) -> None:
    sweep = load_sweep(file)
    counts: list[tuple[int, int]] = []
    found = run_sweep(
        sweep, SweepStore(tmp_path / "ray.csv"), ray_address=address, on_rows=lambda *each: counts.append(each)
    )
    assert found == run_sweep(sweep, SweepStore(None))
    assert len(found) == NUM_ROWS
    assert counts[0] == (0, NUM_ROWS)
    assert counts[-1] == (NUM_ROWS, NUM_ROWS)


def test_a_sweep_on_ray_that_is_interrupted_goes_on(address: str, file: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    command = [str(COUNTERPOINT), "sweep", str(file), "-o", str(rows), "--ray", address]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + LIMIT_S
    while num_lines(rows) < 2 and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    kept = rows.read_text().splitlines()
    assert 2 <= len(kept) < NUM_ROWS + 1
    again = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert again.returncode == 0, again.stderr
    lines = rows.read_text().splitlines()
    assert lines[: len(kept)] == kept, "what was done is not done again"
    assert len(lines) == NUM_ROWS + 1
    assert len({line.split(",")[0] for line in lines}) == NUM_ROWS + 1
