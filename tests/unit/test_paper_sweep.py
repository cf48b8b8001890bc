"""Sweeps of the paper's workloads: what an axis changes, what is refused, and what a sweep says."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from counterpoint import load_machine, load_workload
from counterpoint.errors import WorkloadError
from counterpoint.machine import machine_names
from counterpoint.paper.cases import (
    AXES,
    DEFAULTS,
    RESERVE_BYTES,
    cases_of,
    memory_bytes,
    paper_description,
    parse_sweep,
    with_stages,
)
from counterpoint.paper.launches import compiled_for
from counterpoint.paper.sweep import simulate_sweep
from counterpoint.paper.values import COPY_ENGINES, PLAIN, PRIORITY, SEQUENTIAL, Sweep
from counterpoint.sim.calibration import load_calibration
from counterpoint.step import Kernel
from counterpoint.units import MIB
from counterpoint.workloads import build_step, workload_names
from helpers.command import counterpoint, refusal

H200, A40 = load_machine("h200"), load_machine("a40")


def simulated(name: str, text: str, machine: str = "h200") -> Sweep:
    return simulate_sweep(paper_description(name), load_machine(machine), *parse_sweep(text))


def ratios(sweep: Sweep, label: str) -> list[float]:
    return [row.time_ratio or 0.0 for point in sweep.points if (row := point.row(label))]


@pytest.mark.parametrize("name", workload_names())
def test_one_cta_per_tile_on_an_h200_is_the_shipped_workload(name: str) -> None:
    (case,) = cases_of(paper_description(name), "ctas", ("tiles",))
    assert build_step(compiled_for(case.description, H200.gpu)) == load_workload(name)


@pytest.mark.parametrize(("name", "stage_bytes"), [("cb_ar_opt1", 8192), ("cb_ar_opt2", 16_384), ("mb_a2a_large", 32_768)])
def test_a_captured_step_learns_the_stages_of_its_gemm_and_nothing_else(name: str, stage_bytes: int) -> None:
    description = paper_description(name)
    described = build_step(compiled_for(description, H200.gpu))
    gemms = [each for each in described.operations if isinstance(each, Kernel)]
    assert {each.stage_bytes for each in gemms} == {stage_bytes}
    captured = replace(
        described,
        operations=tuple(
            replace(each, stage_bytes=None) if isinstance(each, Kernel) else each for each in described.operations
        ),
    )
    assert with_stages(captured, description) == described


def test_each_axis_changes_what_it_names() -> None:
    base = paper_description("cb_ar_opt2")
    found = {axis: cases_of(base, axis, DEFAULTS[axis][:1])[0].description for axis in AXES}
    gemms = {axis: described.gemms[0] for axis, described in found.items()}
    assert (gemms["ctas"].num_ctas, gemms["sizes"].m, gemms["tiles"].tile, gemms["types"].dtype) == (
        2,
        2048,
        "32x32x32",
        "fp32",
    )
    assert found["bytes"].collectives[0].bytes == 56 * MIB
    assert (found["ranks"].num_ranks, found["iterations"].iterations) == (2, 1)
    assert all(described != base for described in found.values())


@pytest.mark.parametrize("machine", machine_names(variants=False))
def test_plain_overlap_nears_sequential_at_the_papers_high_cta_counts(machine: str) -> None:
    sweep = simulated("cb_ar_opt2", "ctas=64,tiles", machine)
    few, many = ratios(sweep, PLAIN)
    ideals = [
        point.ideal_us / row.simulated_us for point in sweep.points if (row := point.row(SEQUENTIAL)) and point.ideal_us
    ]
    # the power limit lowers the clock of a step that overlaps, as it draws more; the ideal has the clock of a burst
    assert few == pytest.approx(ideals[0], abs=0.08 if load_calibration(load_machine(machine)).power else 0.03)
    assert many > ideals[1] + 0.015
    assert (PRIORITY in sweep.labels) == load_machine(machine).gpu.priority_is_effective
    assert COPY_ENGINES in sweep.labels


def test_more_iterations_hide_more_of_the_communication() -> None:
    sweep = simulated("mb_a2a_opt2", "iterations=4,12")
    overlaps = [point.row(PRIORITY).overlap_ratio for point in sweep.points if point.row(PRIORITY)]
    assert overlaps[0] == pytest.approx(3 / 4, abs=0.06)
    assert overlaps[1] == pytest.approx(11 / 12, abs=0.06)


def test_the_time_ratio_is_the_time_over_the_sequential_time() -> None:
    (point,) = simulated("cb_a2a_opt1", "ctas=tiles").points
    sequential, plain = point.row(SEQUENTIAL), point.row(PLAIN)
    assert sequential is not None
    assert plain is not None
    expected = (plain.simulated_us or 0.0) / (sequential.simulated_us or 1.0)
    assert (sequential.time_ratio, plain.time_ratio) == (1.0, expected)


def test_the_same_kernel_takes_another_launch_on_other_gpus() -> None:
    described = paper_description("cb_ar_opt2")
    (here,), (there,) = (compiled_for(described, machine.gpu).gemms for machine in (H200, A40))
    assert (here.registers_per_thread, here.shared_bytes) == (72, 32_768)
    assert (there.registers_per_thread, there.shared_bytes) == (96, 16_384)


def test_what_a_machine_cannot_run_stays_in_the_sweep_with_the_reason() -> None:
    points = simulated("cb_ar_opt2", "types=bf16,fp8", "a40").points
    assert points[0].rows
    assert not points[1].rows
    assert points[1].why_left_out.startswith("Triton compiles no fp8 matmul of tile 64x64x64 for compute capability 8.6.")


def test_ranks_beyond_the_node_are_swept_only_where_they_are_named() -> None:
    assert [point.num_ranks for point in simulated("cb_ar_opt2", "ranks", "a40").points] == [2, 4]
    assert "A40" in simulated("cb_ar_opt2", "ranks=8", "a40").points[0].why_left_out.upper()


def test_buffers_are_operands_outputs_and_two_buffers_of_an_all_to_all() -> None:
    gemm = 3 * 8192 * 8192 * 2
    assert memory_bytes(paper_description("cb_ar_opt1")) == gemm + 896 * MIB
    assert memory_bytes(paper_description("cb_a2a_opt1")) == gemm + 2 * 896 * MIB


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nothing", "--sweep must be one of ctas, sizes, bytes, tiles, types, ranks, iterations"),
        ("ctas=", "--sweep ctas has an empty value"),
        ("ctas=0", "--sweep ctas takes whole numbers from 1 to 999,999,999, or tiles for one CTA per tile; found '0'."),
        ("ctas=9999999999", "from 1 to 999,999,999, or tiles for one CTA per tile; found '9999999999'."),
        ("types=int8", "--sweep types must name some of fp32, tf32, bf16, fp16, fp8; found 'int8'."),
        ("tiles=64x64", "tile must be three sizes"),
        ("sizes=99999999", "needs 3054 GiB of memory on each GPU"),
        ("bytes=1 parsec", "--sweep bytes must be a whole number of bytes"),
    ],
)
def test_a_bad_value_is_one_line(text: str, said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        simulated("cb_ar_opt2", text)


def test_sizes_that_do_not_fit_are_refused_with_what_is_needed_and_there() -> None:
    with pytest.raises(WorkloadError, match=r"but a GPU of 'h200' has 1\d\d(\.\d)? GiB\. Choose smaller sizes\."):
        simulated("mb_ar_opt2", "sizes=2097152")
    assert RESERVE_BYTES > 0


def test_a_sweep_is_printed_and_stored(tmp_path: Path) -> None:
    command = ("bench", "paper", "cb_ar_opt2", "cb_a2a_large", "--simulate", "h200", "--iterations", "12")
    done = counterpoint(
        *command, "--sweep", "ctas=128,tiles", "--sweep", "types", "-o", tmp_path / "sweep.json", COLUMNS="120"
    )
    assert done.returncode == 0, done.stderr
    assert "cb_a2a_large on h200, 4 ranks, 12 iterations; simulated; TimeRatio, overlap ratio" in done.stdout
    stored = json.loads((tmp_path / "sweep.json").read_text())
    assert stored["conditions"] == {"gpus": "none used, simulated"}
    assert [(each["workload"], each["axis"]) for each in stored["result"]] == [
        (name, axis) for name in ("cb_ar_opt2", "cb_a2a_large") for axis in ("ctas", "types")
    ]


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        (("--energy",), "--energy reads the GPU's counter, and a simulation has none."),
        (("--rounds", "5"), "--rounds repeats measurements, and a simulation has none."),
        (("--plot", "a.svg"), "--plot draws sweeps, and none was asked for."),
    ],
)
def test_options_that_do_not_go_together_are_refused(rest: tuple[str, ...], said: str, tmp_path: Path) -> None:
    assert refusal("bench", "paper", "cb_ar_opt2", "--simulate", "h200", *rest, cwd=tmp_path).startswith(said)
