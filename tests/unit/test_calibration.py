"""Calibration files: what they hold, that every constant matters, and that constants follow from points."""

import math
from datetime import date
from pathlib import Path

import msgspec
import pytest

from counterpoint import Simulator, load_machine, load_workload
from counterpoint.cli.calibrate import SAVED_S, _Record
from counterpoint.cuda.nvml import GpuState, check_alone, check_unthrottled
from counterpoint.errors import CounterpointError, DeviceError, MachineError
from counterpoint.footprints import communication_footprint
from counterpoint.machine import Machine, machine_for_device
from counterpoint.measurement.points import Point, point
from counterpoint.sim.calibrated_range import outside_calibration
from counterpoint.sim.calibration import (
    LARGE_BYTES,
    Calibration,
    ProbeRecord,
    constants_of,
    describe_origin,
    load_calibration,
)
from counterpoint.sim.calibration_curves import FIGURES_OF_MORE, SATURATIONS, fit_saturation, fit_tiles, row_wise_fraction
from counterpoint.sim.calibration_file import broken_rules, derive, save_calibration
from counterpoint.sim.calibration_fit import Points
from counterpoint.sim.costs import CostModel
from counterpoint.sim.rates import smooth_minimum
from counterpoint.sim.reach import wire_bytes
from counterpoint.step import Character, Collective, Footprint, Kernel, Step
from counterpoint.units import MIB, US_PER_S
from counterpoint.value import PACKAGE, read_toml, shipped_names

SHIPPED = PACKAGE / "calibrations"

H200, H100 = load_machine("h200"), load_machine("h100")
DEVICE = "NVIDIA H100 80GB HBM3"


def record(*points: Point) -> dict[str, ProbeRecord]:
    return {"probe": ProbeRecord(date="2026-11-23", seconds=1.0, points=points)}


def all_reduce_points(by_cta: float, fraction: float, latency_us: float, machine: Machine, ranks: int = 2) -> list[Point]:
    """Times as the simulator's formula has them, with as many CTAs as NCCL uses and with fewer."""
    link, points = machine.link.per_peer_bytes_per_s, []
    for num_ctas in ("usual", 4, 8, 16):
        number = communication_footprint(machine.gpu, "nccl").num_ctas if num_ctas == "usual" else int(num_ctas)
        for num_bytes in (64 * MIB, 256 * MIB):
            rate = smooth_minimum(number * by_cta, fraction * link)
            time_us = latency_us + US_PER_S * wire_bytes("all_reduce", num_bytes, ranks) / rate
            at = {"kind": "all_reduce", "ranks": ranks, "ctas": num_ctas, "bytes": num_bytes}
            points.append(Point(name="collective_us", value=time_us, at=at))
    return points


@pytest.mark.parametrize("name", shipped_names("calibrations"))
def test_a_shipped_file_belongs_to_a_machine_and_every_constant_has_a_source(name: str) -> None:
    machine = load_machine(name)
    calibration = load_calibration(machine)
    assert machine_for_device(calibration.device_name) == machine
    for constant in constants_of(calibration).values():
        assert constant.source
        assert constant.date.startswith("20")
    assert not broken_rules(calibration)
    assert all(not probe.failure for probe in calibration.probes.values())


def test_what_was_not_measured_on_a_gpu_is_assumed_there() -> None:
    points = [Point(name="host_copy_us", value=1000.0, spread=0.1, at={"direction": "host_to_device", "bytes": 50_000_000})]
    found = derive(H100, DEVICE, {}, record(*points))
    link = found.host_link_bytes_per_s
    assert (link.value, link.status, link.spread) == (50e9, "measured", 0.1)
    others = {name: each for name, each in constants_of(found).items() if name != "host_link_bytes_per_s"}
    assert {each.status for each in others.values()} == {"assumed"}
    assert all(each.source.startswith("as NVIDIA H200: ") for each in others.values())


def test_a_constant_of_whole_steps_is_scaled_by_what_the_same_probe_found_on_both_gpus() -> None:
    at = {"type": "bf16", "bytes": 1 << 30}
    there = next(
        each.value
        for each in load_calibration().probes["streaming"].points
        if each.name == "streaming_us" and each.at["type"] == "bf16"
    )
    as_fast = there * H200.gpu.hbm_bytes_per_s / H100.gpu.hbm_bytes_per_s  # for its peak
    found = derive(H100, DEVICE, {}, record(Point(name="streaming_us", value=2 * as_fast, at=at)))
    assert math.isclose(found.hbm_efficiency.value, load_calibration().hbm_efficiency.value / 2, rel_tol=1e-3)


def test_launch_gap_and_dependency_latency_count_only_together() -> None:
    gap = Point(name="launch_gap_us", value=9.0, at={"issued": "eagerly"})
    latency = Point(name="dependency_latency_us", value=12.0, at={"issued": "eagerly"})
    assert derive(H100, DEVICE, {}, record(gap)).launch_gap_us.status == "assumed"
    both = derive(H100, DEVICE, {}, record(gap, latency))
    assert both.launch_gap_us.status == both.dependency_latency_us.status == "measured"


def test_the_bandwidth_of_a_collective_is_recovered_from_its_times() -> None:
    found = derive(H100, DEVICE, {}, record(*all_reduce_points(12e9, 0.5, 25.0, H100))).collectives["all_reduce"]
    assert math.isclose(found.bytes_per_s_per_cta, 12e9, rel_tol=0.02)
    assert math.isclose(found.link_fraction, 0.5, rel_tol=0.02)
    assert math.isclose(found.latency_us, 25.0, rel_tol=0.1)
    assert found.spread is not None
    assert found.spread < 0.005
    of_four = all_reduce_points(12e9, 0.6, found.latency_us, H100, ranks=4)
    more = derive(H100, DEVICE, {}, record(*all_reduce_points(12e9, 0.5, 25.0, H100), *of_four)).collectives["all_reduce"]
    assert more.link_fraction == found.link_fraction
    assert math.isclose(more.link_fraction_of_more or 0.0, 0.6, rel_tol=0.02)
    assert math.isclose(more.bytes_per_s_per_cta_of_more or 0.0, 12e9, rel_tol=0.05)


def test_one_fit_finds_the_warps_that_fill_the_memory_and_how_its_latency_grows() -> None:
    known = load_calibration().probes["streaming"].points
    found = derive(H200, "NVIDIA H200", {}, record(*known))
    shipped = load_calibration()
    assert math.isclose(found.latency_at_low_load.value, shipped.latency_at_low_load.value, rel_tol=0.02)
    warps, expected = (each.characters["streaming"].saturation_warps for each in (found, shipped))
    assert math.isclose(warps, expected, rel_tol=0.02)


@pytest.mark.parametrize("character", SATURATIONS)
def test_what_saturates_an_sm_follows_from_kernels_at_each_residency(character: Character) -> None:
    shipped = load_calibration()
    points = Points(each for probe in shipped.probes.values() for each in probe.points)
    found = fit_saturation(points, H200, shipped, character)
    assert found is not None
    constant = SATURATIONS[character][0]
    assert math.isclose(found.value, getattr(shipped.characters[character], constant), rel_tol=0.02)
    assert found.spread < 0.07


@pytest.mark.parametrize("machine", [H200, H100])
def test_one_fit_finds_what_tiles_saturate_an_sm_and_how_they_crowd_l2(machine: Machine) -> None:
    shipped = load_calibration(machine)
    points = Points(each for probe in shipped.probes.values() for each in probe.points)
    found = fit_tiles(points, machine, shipped)
    in_flight = shipped.characters["matmul"].saturation_bytes_in_flight
    assert found["saturation_bytes_in_flight"].value == pytest.approx(in_flight, rel=0.02)
    assert found["l2_crowding"].value == pytest.approx(shipped.l2_crowding.value, rel=0.02)
    assert found["l2_crowding"].spread < 0.07
    without = fit_tiles(Points([]), machine, shipped)
    assert without == {}


def test_matmuls_that_l2_does_not_limit_say_nothing_of_how_they_crowd_it() -> None:
    shipped = load_calibration()
    points = Points(each for probe in shipped.probes.values() for each in probe.points)
    gpu = msgspec.structs.replace(H200.gpu, bf16_flops_per_s=H200.gpu.bf16_flops_per_s / 4)
    found = fit_tiles(points, msgspec.structs.replace(H200, gpu=gpu), shipped)
    assert list(found) == ["saturation_bytes_in_flight"]


def test_row_wise_kernels_reach_a_share_of_the_memory_that_their_uncapped_time_says() -> None:
    for machine in (H200, H100):
        shipped = load_calibration(machine)
        points = Points(each for probe in shipped.probes.values() for each in probe.points)
        row_wise = shipped.characters["row_wise"]
        reached = shipped.hbm_efficiency.value * machine.gpu.hbm_bytes_per_s
        found = row_wise_fraction(points, reached, row_wise.saturation_warps)
        assert found == pytest.approx(row_wise.hbm_fraction, rel=0.01)
    assert row_wise_fraction(Points([]), 1e12, 50.0) is None


def test_elsewhere_kernels_that_wait_for_their_own_loads_keep_their_rate_for_each_sm() -> None:
    h200, footprint = load_machine("h200"), Footprint(num_ctas=12_288, threads_per_cta=1024, registers_per_thread=32)
    constants = load_calibration(h200)

    def lone_us(machine: Machine, character: Character) -> float:
        kernel = Kernel(name="k", stream=0, footprint=footprint, character=character, hbm_bytes=6e8)
        return CostModel(machine, constants).lone_us(kernel)

    h100, a40 = load_machine("h100"), load_machine("a40")
    assert lone_us(h100, "row_wise") == pytest.approx(lone_us(h200, "row_wise"), rel=0.02), "the same SMs and clock"
    assert lone_us(h100, "streaming") == pytest.approx(lone_us(h200, "streaming") * 4.8 / 3.35, rel=0.02)
    reached = a40.gpu.hbm_bytes_per_s * constants.hbm_efficiency.value
    assert lone_us(a40, "row_wise") >= 6e8 / reached * 1e6, "no faster than the memory"


def test_what_a_kind_feels_of_latency_is_relative_to_an_all_reduce() -> None:
    probes = load_calibration().probes
    points = [each for name in ("collectives of 2 ranks", "contention of 2 ranks") for each in probes[name].points]
    found = derive(H200, "NVIDIA H200", {}, record(*points)).collectives
    assert found["all_reduce"].latency_weight == 1.0
    assert 1.0 < found["all_gather"].latency_weight < found["all_to_all"].latency_weight < 2.0
    assert found["reduce_scatter"].latency_weight == 1.0, "not in these points"
    slowed = point("collective_beside_us", [1600.0], kind="reduce_scatter", kernel="streaming", bytes=256 * MIB)
    found = derive(H200, "NVIDIA H200", {}, record(*points, slowed)).collectives
    assert found["reduce_scatter"].latency_weight > 1.0


def test_latencies_of_small_messages_lie_between_the_measured_ones() -> None:
    known = load_calibration().collectives["all_reduce"]
    small = msgspec.structs.replace(known, latency_us=30.0, latency_us_by_bytes=((2.0**16, 8.0), (2.0**20, 12.0)))
    assert [small.latency_us_of(size) for size in (1, 2**16, 2**18, 2**20)] == [8.0, 8.0, 10.0, 12.0]
    assert 12.0 < small.latency_us_of(2**24) < 30.0
    assert small.latency_us_of(LARGE_BYTES) == small.latency_us_of(1e12) == 30.0
    assert msgspec.structs.replace(small, latency_us_by_bytes=()).latency_us_of(1) == 30.0


def test_a_rule_that_does_not_hold_is_named() -> None:
    at = {"case": "equal_priority_with_room"}
    kept = derive(H100, DEVICE, {}, record(Point(name="second_kernel_starts_waves", value=3.0, at=at)))
    broken = derive(H100, DEVICE, {}, record(Point(name="second_kernel_starts_waves", value=0.1, at=at)))
    assert not broken_rules(kept)
    assert "measured 0.1 waves, expected 3" in broken_rules(broken)[0]


def test_a_file_reads_back_as_it_was_and_changes_what_is_simulated(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    made = derive(H200, "NVIDIA H200", {"driver": "580"}, record(*all_reduce_points(5e9, 0.2, 25.0, H200)))
    save_calibration(made, path)
    assert read_toml(path, Calibration, MachineError) == made
    step = load_workload("cb_ar_opt2")
    mine = msgspec.structs.replace(H200, calibration=str(path))
    assert sum(Simulator().lone_times_us(step, mine)) > 1.2 * sum(Simulator().lone_times_us(step, H200))
    with pytest.raises(MachineError, match="was measured on 'NVIDIA H200', but machine 'h100'"):
        load_calibration(msgspec.structs.replace(H100, calibration=str(path)))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ("[hbm_efficiency]\nvalue = nan", "hbm_efficiency: value must be above 0 and below 1e+18; found nan. Correct it."),
        ("[hbm_efficiency]\nvalue = 0", "hbm_efficiency: value must be above 0 and below 1e+18; found 0. Correct it."),
        ("[collectives.all_reduce]\nlatency_us = -3", "latency_us must be 0 or more and below 1e+18; found -3. Correct it."),
        (
            "[collectives.all_reduce]\nlatency_us_by_bytes = [[3, 4], [2, 5]]",
            "latency_us_by_bytes must be pairs of rising sizes above 0 and latencies of 0 or more; found",
        ),
        ("[characters.streaming]\nsaturation_warps = inf", "saturation_warps must be above 0 and below 1e+18; found inf"),
    ],
)
def test_a_figure_that_no_measurement_gives_is_refused(changed: str, says: str, tmp_path: Path) -> None:
    path, (header, line) = tmp_path / "mine.toml", changed.split("\n")
    before, found, rest = (SHIPPED / "h200.toml").read_text().partition(f"{header}\n")
    assert found
    fields, ended, others = rest.partition("\n\n")
    kept = [each for each in fields.splitlines() if not each.startswith(f"{line.split()[0]} = ")]
    path.write_text(before + found + "\n".join([line, *kept]) + ended + others)
    with pytest.raises(MachineError) as refused:
        load_calibration(msgspec.structs.replace(H200, calibration=str(path)))
    assert says in str(refused.value)


def test_a_report_says_where_constants_are_from() -> None:
    assert describe_origin(H200) == ""
    assert "measured on it" in describe_origin(H100)
    assert "never calibrated" in describe_origin(load_machine("a100"))


@pytest.mark.parametrize(
    ("num_ranks", "num_bytes", "says"),
    [(2, 64 * MIB, ""), (2, 1024, "1 KiB (measured: 64 MiB to 256 MiB)"), (3, 64 * MIB, "of 3 ranks (measured: 2, 4)")],
)
def test_operations_outside_the_calibrated_range_are_named(
    num_ranks: int, num_bytes: int, says: str, tmp_path: Path
) -> None:
    points = [each for ranks in (2, 4) for each in all_reduce_points(12e9, 0.5, 25.0, H200, ranks)]
    made = derive(H200, "NVIDIA H200", {}, record(*points))
    save_calibration(made, tmp_path / "mine.toml")
    machine = msgspec.structs.replace(H200, calibration=str(tmp_path / "mine.toml"))
    operation = Collective(name="x", stream=0, collective="all_reduce", num_bytes=num_bytes, group_size=num_ranks)
    step = Step(name="x", num_ranks=num_ranks, operations=(operation,))
    found = outside_calibration(step, machine)
    assert says in "".join(found)
    assert bool(found) == bool(says)
    given = msgspec.structs.replace(step, operations=(msgspec.structs.replace(operation, lone_us=1.0),))
    assert outside_calibration(given, machine) == ()


IDLE = GpuState(
    clock_mhz=345,
    max_clock_mhz=1980,
    power_w=81.0,
    power_limit_w=700.0,
    temperature_c=35,
    reasons=1,
    busy_percent=0,
    used_bytes=648_347_648,
    num_processes=0,
)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, ""),
        ({"reasons": 4}, ""),  # the power limit is no fault
        ({"reasons": 0x20, "temperature_c": 88}, "throttled: software thermal slowdown at 88 C, 81 of 700 W, SM clock 345"),
        ({"num_processes": 1}, "shared: 1 processes compute on it"),
        ({"busy_percent": 97}, "busy for 97 %"),
        ({"used_bytes": 9 << 30}, "9 GiB of its memory"),
    ],
)
def test_a_gpu_that_is_throttled_or_shared_is_refused_with_the_reading(changes: dict[str, int], says: str) -> None:
    def check() -> None:
        state = msgspec.structs.replace(IDLE, **changes)
        check_unthrottled(state, "GPU 0")
        check_alone(state, "GPU 0")

    if not says:
        check()
        return
    with pytest.raises(DeviceError, match="GPU 0 is .*" + says):
        check()


def test_a_point_is_the_median_and_half_of_the_middle_half() -> None:
    assert point("x_us", [1.0, 2.0, 3.0, 4.0, 5.0], bytes=8) == Point(name="x_us", value=3.0, spread=0.3333, at={"bytes": 8})
    assert point("x_us", [7.0]).spread == 0.0


class Result(msgspec.Struct):
    """What the runner of the probes hands over."""

    probe: str
    seconds: float = 1.0
    points: tuple[Point, ...] = ()
    failure: str = ""


def test_a_calibration_goes_on_where_it_ended_unless_the_driver_is_another(tmp_path: Path) -> None:
    path, driver = tmp_path / "mine.toml", {"driver": "580"}
    first = _Record(H100, DEVICE, path, driver)
    first.add(Result(probe="launches", points=(Point(name="host_launch_us", value=5.0),)))  # type: ignore[arg-type]
    first.add(Result(probe="sums", failure="it took longer than its limit of 10 s"))  # type: ignore[arg-type]
    assert not path.exists(), "constants are derived once for several short probes"
    first.save()
    second = _Record(H100, DEVICE, path, driver)
    second.go_on()
    assert second.done() == {"launches"}
    with pytest.raises(CounterpointError, match="with driver 580, and now it is 590"):
        _Record(H100, DEVICE, path, {"driver": "590"}).go_on()
    with pytest.raises(MachineError, match="Name another file"):
        _Record(H200, "NVIDIA H200", path, driver).go_on()


def test_one_probe_alone_changes_its_own_constants_and_no_other_ones_date(tmp_path: Path) -> None:
    shipped, path = load_calibration(), tmp_path / "mine.toml"
    save_calibration(shipped, path)
    slower = [
        msgspec.structs.replace(each, value=each.value * (1.2 if each.at["ctas_per_sm"] == 1 else 1.0))
        for each in shipped.probes["rows"].points
    ]
    collected = _Record(H200, "NVIDIA H200", path, dict(shipped.conditions))
    collected.go_on()
    collected.add(Result(probe="rows", seconds=SAVED_S, points=tuple(slower)))  # type: ignore[arg-type]
    found, today = read_toml(path, Calibration, MachineError), date.today().isoformat()
    assert found.probes["rows"].date == found.characters["row_wise"].date == today
    assert found.characters["row_wise"].saturation_warps > 1.1 * shipped.characters["row_wise"].saturation_warps
    others, before = constants_of(found), constants_of(shipped)
    assert {name for name in others if others[name] != before[name]} == {"characters.row_wise"}
    assert found.rules == shipped.rules


def test_on_the_h200_itself_a_source_does_not_compare_it_with_itself(tmp_path: Path) -> None:
    shipped, path = load_calibration(), tmp_path / "mine.toml"
    save_calibration(shipped, path)
    points = [msgspec.structs.replace(each, value=2 * each.value) for each in shipped.probes["launches"].points]
    collected = _Record(H200, "NVIDIA H200", path, dict(shipped.conditions))
    collected.go_on()
    collected.add(Result(probe="launches", seconds=SAVED_S, points=tuple(points)))  # type: ignore[arg-type]
    gap = read_toml(path, Calibration, MachineError).launch_gap_us
    assert gap.value == pytest.approx(2 * shipped.launch_gap_us.value)
    assert gap.source.startswith("1.6 x 3 / 1.5, this probe now and before: launch_gap_us")


OF_TWO = {name: each for name, each in load_calibration().probes.items() if not name.endswith(" of 4 ranks")}


def file_of_two_ranks(path: Path) -> Calibration:
    """Write what two ranks measured on H200s, with the shipped constants, and return it."""
    found = msgspec.structs.replace(load_calibration(), probes=OF_TWO)
    save_calibration(found, path)
    return found


def results_of_four(slower: float, *points: Point) -> list[Result]:
    """What four ranks report: points of the same conditions as those of two, and of collectives."""
    same = {
        name: [msgspec.structs.replace(each, value=slower * each.value) for each in OF_TWO[f"{name} of 2 ranks"].points]
        for name in ("copies", "contention")
    }
    named = [*same.items(), ("collectives", list(points))]
    return [Result(probe=f"{name} of 4 ranks", seconds=SAVED_S, points=tuple(found)) for name, found in named]


@pytest.mark.parametrize("slower", [1.0, 2.0])
def test_a_file_of_two_ranks_goes_on_with_four_and_only_figures_of_more_ranks_change(slower: float, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    before = file_of_two_ranks(path)
    collected = _Record(H200, "NVIDIA H200", path, dict(before.conditions))
    collected.go_on()
    known = before.collectives["all_reduce"]
    for each in results_of_four(slower, *all_reduce_points(known.bytes_per_s_per_cta, 0.5, 40.0, H200, ranks=4)):
        collected.add(each)  # type: ignore[arg-type]
    found = read_toml(path, Calibration, MachineError)
    constants, old = constants_of(found), constants_of(before)
    assert {name for name in constants if constants[name] != old[name]} == {"collectives.all_reduce"}
    now = found.collectives["all_reduce"]
    assert now.link_fraction_of_more == pytest.approx(0.5, rel=0.05)
    assert now.source.startswith(known.source.partition("; of more ranks")[0])
    assert "times of 4 ranks" in now.source
    assert now.bytes_per_s_per_cta_of_more == pytest.approx(known.bytes_per_s_per_cta, rel=0.05)
    changed = {name for name in now.__struct_fields__ if getattr(now, name) != getattr(known, name)}
    assert changed <= {*FIGURES_OF_MORE, "date", "source"}
    again = _Record(H200, "NVIDIA H200", path, dict(before.conditions))
    again.go_on()
    assert again.done() == {*OF_TWO, "copies of 4 ranks", "contention of 4 ranks", "collectives of 4 ranks"}


def test_four_ranks_alone_tell_of_more_ranks_and_of_copies_between_two_gpus() -> None:
    four = {each.probe: each for each in results_of_four(1.0, *all_reduce_points(12e9, 0.5, 40.0, H200, ranks=4))}
    probes = {name: ProbeRecord(date="2026-11-26", seconds=1.0, points=each.points) for name, each in four.items()}
    found, shipped = derive(H100, DEVICE, {}, probes), load_calibration()
    assert found.copy_engine_fraction.status == "measured"
    assert "ranks 4" in found.copy_latency_us.source
    of_four, known = found.collectives["all_reduce"], shipped.collectives["all_reduce"]
    assert of_four.link_fraction_of_more not in (None, known.link_fraction_of_more)
    assert (of_four.link_fraction, of_four.latency_us) == (known.link_fraction, known.latency_us)
    assert found.collectives["all_gather"].status == "assumed"


def test_two_ranks_of_another_gpu_keep_what_more_ranks_changed_on_the_h200() -> None:
    found = derive(H100, DEVICE, {}, record(*all_reduce_points(12e9, 0.5, 25.0, H100))).collectives["all_reduce"]
    known = load_calibration().collectives["all_reduce"]
    assert found.link_fraction_of_more == known.link_fraction_of_more
    assert known.bytes_per_s_per_cta_of_more is not None
    more = known.bytes_per_s_per_cta_of_more / known.bytes_per_s_per_cta
    assert found.bytes_per_s_per_cta_of_more == pytest.approx(more * found.bytes_per_s_per_cta, rel=1e-3)


def test_points_of_the_same_conditions_count_as_the_fewest_ranks_measured_them() -> None:
    same = {"kind": "all_reduce", "kernel": "streaming"}
    points = [Point(name="x_us", value=float(ranks), at=same | {"ranks": ranks}) for ranks in (4, 2, 2, 8)]
    assert [each.value for each in Points(points).of_fewest_ranks("x_us", kind="all_reduce")] == [2.0, 2.0]
    assert Points(points).of_fewest_ranks("y_us") == []
    assert len(Points([*points, Point(name="x_us", value=1.0)]).of_fewest_ranks("x_us")) == 1


def test_points_are_saved_if_no_constant_can_be_derived_and_a_later_run_derives_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    before = file_of_two_ranks(path)

    def fail(*_: object) -> Calibration:
        raise ZeroDivisionError("float division by zero")

    collected = _Record(H200, "NVIDIA H200", path, dict(before.conditions))
    collected.go_on()
    results = results_of_four(2.0, *all_reduce_points(12e9, 0.5, 40.0, H200, ranks=4))
    with monkeypatch.context() as patch:
        patch.setattr("counterpoint.sim.calibration_file.derive", fail)
        for each in results:
            collected.add(each)  # type: ignore[arg-type]
        collected.report()
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "could not be derived from the points (ZeroDivisionError: float division by zero)" in told
    kept = read_toml(path, Calibration, MachineError)
    assert constants_of(kept) == constants_of(before)
    assert {name for name, each in kept.probes.items() if not each.is_derived} == {each.probe for each in results}
    assert all(kept.probes[each.probe].points == each.points for each in results)

    later = _Record(H200, "NVIDIA H200", path, dict(before.conditions))
    later.go_on()
    assert {each.probe for each in results} <= later.done(), "no probe runs again"
    later.save()
    found = read_toml(path, Calibration, MachineError)
    assert all(each.is_derived for each in found.probes.values())
    constants, old = constants_of(found), constants_of(before)
    assert {name for name in constants if constants[name] != old[name]} == {"collectives.all_reduce"}


def test_points_are_saved_without_a_file_from_before_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.toml"
    collected = _Record(H100, DEVICE, path, {"driver": "580"})
    monkeypatch.setattr("counterpoint.sim.calibration_file.derive", lambda *_: 1 / 0)
    collected.add(Result(probe="launches", points=(Point(name="host_launch_us", value=5.0),)))  # type: ignore[arg-type]
    collected.save()
    found = load_calibration(msgspec.structs.replace(H100, calibration=str(path)))
    assert {each.status for each in constants_of(found).values()} == {"assumed"}
    assert not found.probes["launches"].is_derived


def test_a_file_that_changed_is_read_again_in_the_same_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origin = 'status = "assumed"\ndate = "2026-11-28"\nsource = "a test"\n'
    mine = msgspec.structs.replace(H200, calibration="mine.toml")
    found = []
    for folder, value in (("a", 2.0), ("a", 32.5), ("b", 4.0)):
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        Path("mine.toml").write_text(f'device_name = "NVIDIA H200"\n[launch_gap_us]\nvalue = {value}\n{origin}')
        found.append(load_calibration(mine).launch_gap_us.value)
    assert found == [2.0, 32.5, 4.0]
    assert load_calibration(mine) is load_calibration(mine), "an unchanged file is read once"
