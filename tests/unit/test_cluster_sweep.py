"""Sweeps: resumed where they were cut, refused where they are others'; the front holds what nothing beats, and is shown."""

import io
import pickle
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from counterpoint.cluster.description import load_cluster
from counterpoint.cluster.sweep import estimate_points, front, run_sweep
from counterpoint.cluster.sweep_file import SweepFile, load_sweep
from counterpoint.cluster.sweep_store import ROWS, SweepStore
from counterpoint.errors import CounterpointError, DeviceError, MachineError
from counterpoint.machine import save_template
from counterpoint.report.sweep import draw_front, print_sweep, tell_progress
from counterpoint.value import check_outputs

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
    counts: list[tuple[int, int]] = []
    again = run_sweep(sweep, SweepStore(cut), on_rows=lambda *each: counts.append(each))
    assert sorted(cut.read_text().splitlines()) == sorted(whole.read_text().splitlines())
    assert [row.estimate for row in again] == [row.estimate for row in rows]
    assert counts[0] == (3, 12)
    assert counts[-1] == (12, 12)
    counts.clear()
    assert run_sweep(sweep, SweepStore(cut), on_rows=lambda *each: counts.append(each)) is not None
    assert counts == [(12, 12)]
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


def test_rows_that_a_resumed_sweep_read_are_those_that_it_would_compute(tmp_path: Path) -> None:
    sweep, path = sweep_file(tmp_path), tmp_path / "rows.csv"
    rows = run_sweep(sweep, SweepStore(path))
    lines = path.read_text().splitlines(keepends=True)
    for text in (lines[0][:2], lines[0][:50], lines[0].rstrip("\n"), "".join(lines[:4]), "".join(lines)):
        path.write_text(text)
        check_outputs(((path, ROWS),))
        assert run_sweep(sweep, SweepStore(path)) == rows, "values of axes, too, whose types a Parquet file shows"
        assert sorted(path.read_text().splitlines(keepends=True)) == sorted(lines)
    path.write_text("key, but of no sweep")
    with pytest.raises(MachineError, match="holds no sweep of this version"):
        run_sweep(sweep, SweepStore(path))


def test_a_cluster_file_without_a_sweep_is_told_so() -> None:
    with pytest.raises(MachineError, match=r"the file has no \[sweep\] table\. Add it\."):
        load_sweep(BASE.with_name("h100_4096.toml"))


def test_a_sweep_given_as_a_cluster_file_is_told_so() -> None:
    with pytest.raises(MachineError, match="looks like a sweep file, and a cluster file is needed"):
        load_cluster(BASE)


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


@pytest.mark.parametrize(
    ("axes", "says"),
    [
        ("tensor = [-1]", r"sweep: tensor must be from 1 to 16,777,216; found -1\."),
        ("num_chunks = [1, 0]", r"num_chunks must be from 1 to .*; found 0\."),
        ("global_batch = [2000000000]", r"global_batch must be from 1 to 1,073,741,824"),
        ("machine = ['h100', 'nope']", r"'nope'"),
    ],
)
def test_a_value_that_no_combination_could_have_is_an_error(tmp_path: Path, axes: str, says: str) -> None:
    with pytest.raises(MachineError, match=says):
        sweep_file(tmp_path, f"[sweep]\n{axes}\n")


def test_memory_is_named_only_where_something_was_too_large(tmp_path: Path) -> None:
    for axes, says in (("tensor = [7]", "No combination is possible"), ("recompute = ['none']", "Nothing fits in memory")):
        sweep = sweep_file(tmp_path, f"[sweep]\n{axes}\nmicro_batch = [1]\nglobal_batch = [2048]\n")
        out = io.StringIO()
        print_sweep(Console(file=out, width=200), sweep, run_sweep(sweep, SweepStore(None)), [])
        assert says in out.getvalue(), out.getvalue()


def test_ray_that_is_missing_or_unreachable_and_odd_files_are_one_line(tmp_path: Path) -> None:
    sweep = sweep_file(tmp_path, "[sweep]\ntensor = [8]\n")
    with pytest.raises(DeviceError, match="ray"):
        run_sweep(sweep, SweepStore(None), ray_address="127.0.0.1:9")
    with pytest.raises(CounterpointError, match=r"A sweep file must end in \.csv or \.parquet"):
        check_outputs(((tmp_path / "rows.txt", ROWS),))


def test_the_front_is_drawn_and_no_word_of_its_table_is_cut_on_narrow_terminals(tmp_path: Path) -> None:
    sweep = sweep_file(tmp_path, '[sweep]\ntensor = [4, 8]\npipeline = [2, 4]\nrecompute = ["full", "none"]\n')
    rows = run_sweep(sweep, SweepStore(None))
    best = front(rows)
    for width in (120, 80, 60, 40):
        file = io.StringIO()
        print_sweep(Console(file=file, width=width, markup=False, emoji=False), sweep, rows, best)
        lines = file.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        words = file.getvalue().split()
        assert words.count("full") + words.count("full,") == sum(row.point["recompute"] == "full" for row in best)
        assert "recompute" in words
        assert any("GiB" in line for line in lines)
    drawn = tmp_path / "front.svg"
    pytest.importorskip("matplotlib")
    draw_front(rows, best, drawn)
    text = drawn.read_text()
    for label in ("front", "estimated", "larger than memory", "512 GPUs", "Simulated, not measured"):
        assert f"<!-- {label} -->" in text


def test_rows_with_equal_figures_stand_on_the_front_once(tmp_path: Path) -> None:
    sweep = sweep_file(tmp_path, "[sweep]\npipeline = [4]\nrecompute = ['full']\n")
    (row,) = run_sweep(sweep, SweepStore(None))
    assert front([row, row]) == [row]


def test_machine_files_with_one_name_are_told_apart_and_an_edited_one_has_other_rows(tmp_path: Path) -> None:
    slow, fast = tmp_path / "slow.toml", tmp_path / "fast.toml"
    for path in (slow, fast):
        save_template("h100", path)
    slow.write_text(slow.read_text().replace("hbm_bytes_per_s = 3.35e12", "hbm_bytes_per_s = 1e12"))
    axes = f"[sweep]\ntensor = [8]\nmachine = ['{slow}', '{fast}']\n"
    sweep = sweep_file(tmp_path, axes)
    points = list(sweep.axes.points())
    times = [row.estimate.step_us for row in estimate_points(sweep, points) if row.estimate]
    alone = [row.estimate.step_us for point in points for row in estimate_points(sweep, [point]) if row.estimate]
    assert times == alone
    assert times[0] > times[1]
    slow.write_text(fast.read_text())
    assert sweep_file(tmp_path, axes).key(points[0]) != sweep.key(points[0])


def test_progress_says_how_many_are_done_and_how_long_the_others_take() -> None:
    shown: list[str] = []
    times = iter([0.0, 0.0, 10.0, 20.0])
    tell = tell_progress(shown.append, lambda: next(times))
    for number in (100, 110, 140):
        tell(number, 200)
    assert shown == [
        "100 of 200 combinations done",
        "110 of 200 combinations done, 90 s left",
        "140 of 200 combinations done, 30 s left",
    ]


def test_a_key_is_the_same_in_another_process_and_another_for_another_cluster(tmp_path: Path) -> None:
    sweep = sweep_file(tmp_path)
    point = next(sweep.axes.points())
    elsewhere = pickle.loads(pickle.dumps(sweep))
    assert elsewhere.key(point) == sweep.key(point)
    longer = replace(sweep, base=replace(sweep.base, cluster=replace(sweep.base.cluster, name="another")))
    assert longer.key(point) != sweep.key(point)
