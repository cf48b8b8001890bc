"""Sweeps: resumed where they were cut, refused where they are another's, the front holds what nothing beats."""

import pickle
from pathlib import Path

import pytest
from msgspec.structs import replace

from counterpoint.cluster.sweep import estimate_points, front, run_sweep
from counterpoint.cluster.sweep_file import SweepFile, load_sweep
from counterpoint.cluster.sweep_store import SweepStore, check_store
from counterpoint.errors import CounterpointError, DeviceError, MachineError

BASE = Path(__file__).parents[2] / "examples" / "clusters" / "sweep_512.toml"
AXES = "[sweep]\nrecompute = ['full']\ntensor = [4, 8]\npipeline = [2, 4]\nmicro_batch = [1, 2, 3]\n"


def sweep_file(tmp_path: Path, axes: str = AXES) -> SweepFile:
    path = tmp_path / "sweep.toml"
    path.write_text(BASE.read_text().split("[sweep]")[0] + axes)
    return load_sweep(path)


def test_a_sweep_that_was_cut_off_goes_on_and_ends_the_same(tmp_path: Path) -> None:
    sweep = sweep_file(tmp_path)
    whole, cut = tmp_path / "whole.csv", tmp_path / "cut.csv"
    rows = run_sweep(sweep, SweepStore(whole))
    lines = whole.read_text().splitlines(keepends=True)
    cut.write_text("".join(lines[:4]) + lines[4][:20])
    counts: list[int] = []
    again = run_sweep(sweep, SweepStore(cut), on_rows=counts.append)
    assert sorted(cut.read_text().splitlines()) == sorted(whole.read_text().splitlines())
    assert [row.estimate for row in again] == [row.estimate for row in rows]
    assert run_sweep(sweep, SweepStore(cut), on_rows=counts.append) is not None
    assert counts == [12]
    assert sum(bool(row.problem) for row in rows) == 4  # a micro-batch of 3 does not divide the batch
    best = front(rows)
    assert best
    assert all(
        not (
            other.estimate.tokens_per_s_per_gpu > row.estimate.tokens_per_s_per_gpu
            and other.estimate.memory_bytes < row.estimate.memory_bytes
        )
        for row in best
        for other in rows
        if row.estimate and other.estimate and other.estimate.fits_memory
    )


def test_a_key_is_the_same_in_another_process() -> None:
    described = load_sweep(Path(__file__).parents[2] / "examples" / "clusters" / "pipeline.toml")
    copied = pickle.loads(pickle.dumps(described))
    points = list(described.axes.points())
    assert [copied.key(point) for point in points] == [described.key(point) for point in points]
    assert len({described.key(point) for point in points}) == len(points)


def test_rows_of_another_sweep_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    first = sweep_file(tmp_path, "[sweep]\ntensor = [8]\n")
    SweepStore(path).append(estimate_points(first, list(first.axes.points())))
    other = sweep_file(tmp_path, "[sweep]\ntensor = [4]\n")
    with pytest.raises(MachineError, match="another sweep"):
        run_sweep(other, SweepStore(path))


@pytest.mark.parametrize(
    ("axes", "says"),
    [
        ("[sweep]\n", "no values to try"),
        ("[sweep]\ntensor = [8, 8]\n", "each value once"),
        ("[sweep]\nspeed = [1]\n", "speed"),
        ('[sweep]\ncontrols = ["fast"]\n', "controls"),
    ],
)
def test_bad_sweep_files_are_one_line(tmp_path: Path, axes: str, says: str) -> None:
    with pytest.raises(MachineError) as problem:
        sweep_file(tmp_path, axes)
    assert says in str(problem.value)
    assert "\n" not in str(problem.value)


def test_ray_that_is_missing_or_unreachable_and_odd_files_are_one_line(tmp_path: Path) -> None:
    sweep = sweep_file(tmp_path, "[sweep]\ntensor = [8]\n")
    with pytest.raises(DeviceError, match="ray"):
        run_sweep(sweep, SweepStore(None), ray_address="127.0.0.1:9")
    with pytest.raises(CounterpointError, match=r"\.csv or \.parquet"):
        check_store(tmp_path / "rows.txt")


def test_a_key_is_the_same_in_another_process_and_another_for_another_cluster(tmp_path: Path) -> None:
    sweep = sweep_file(tmp_path)
    point = next(sweep.axes.points())
    elsewhere = pickle.loads(pickle.dumps(sweep))
    assert elsewhere.key(point) == sweep.key(point)
    longer = replace(sweep, base=replace(sweep.base, cluster=replace(sweep.base.cluster, name="another")))
    assert longer.key(point) != sweep.key(point)
