"""`counterpoint calibrate` on one GPU: what it writes, that it goes on, and that the simulator's rules hold on this GPU."""

import subprocess
import sys
from pathlib import Path

import pytest

from counterpoint.sim.calibration import constants_of, read_file
from counterpoint.sim.calibration_file import broken_rules

LIMIT_S = 180


def calibrate(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "counterpoint", "calibrate", "-o", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibration") / "mine.toml"
    made = calibrate(path)
    assert made.returncode == 0, made.stderr
    return path


def test_one_gpu_gives_constants_with_their_spread_and_keeps_the_rules(path: Path) -> None:
    found = read_file(str(path))
    measured = {name for name, each in constants_of(found).items() if each.spread is not None}
    assert {"launch_gap_us", "hbm_efficiency", "matmul_peak_fraction", "characters.streaming"} <= measured
    assert not [record.failure for record in found.probes.values() if record.failure]
    assert not broken_rules(found)


def test_a_second_run_measures_nothing_again(path: Path) -> None:
    before = path.read_text()
    again = calibrate(path)
    assert again.returncode == 0, again.stderr
    assert "Going on with" in again.stdout
    assert path.read_text() == before


def test_a_file_of_another_gpu_is_refused_before_anything_runs(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text(path.read_text().replace('device_name = "', 'device_name = "another '))
    refused = calibrate(other)
    assert refused.returncode == 2
    assert "was measured on 'another" in refused.stderr
