"""Probing without a GPU: made-up answers of a driver, and what becomes of them."""

import io
import sys
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.console import Console

from counterpoint.cuda.device_facts import (
    ATTRIBUTES,
    OLDEST_CUDA,
    Measured,
    Peer,
    Queried,
    check_alike,
    check_driver,
    kernel_module_version,
)
from counterpoint.cuda.probing import COPY_ENGINE_FRACTION, Probed, describe, probe, shipped_machine, spread_sms
from counterpoint.errors import DeviceError, MachineError
from counterpoint.machine import Gpu, load_machine, save_machine
from counterpoint.report.shipped import print_probed

TODAY = date(2026, 11, 21)
# what `nvidia-smi` and the CUDA device query of an H200 print, driver 580.159
H200 = {
    "MULTIPROCESSOR_COUNT": 132,
    "WARP_SIZE": 32,
    "MAX_BLOCKS_PER_MULTIPROCESSOR": 32,
    "MAX_THREADS_PER_BLOCK": 1024,
    "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 233_472,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232_448,
    "RESERVED_SHARED_MEMORY_PER_BLOCK": 1024,
    "L2_CACHE_SIZE": 62_914_560,
    "ASYNC_ENGINE_COUNT": 3,
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "CLOCK_RATE": 1_980_000,
    "MAX_THREADS_PER_MULTIPROCESSOR": 2048,
    "MAX_REGISTERS_PER_MULTIPROCESSOR": 65_536,
    "MEMORY_CLOCK_RATE": 3_201_000,
    "GLOBAL_MEMORY_BUS_WIDTH": 6016,
}
HBM_COPY = 4.3e12


def queried(name: str = "NVIDIA H200", hbm_bytes: int = 150_109_880_320, **attributes: int) -> Queried:
    return Queried(
        device_name=name,
        cuda_version=(13, 0),
        attributes=H200 | attributes,
        hbm_bytes=hbm_bytes,
        greatest_priority=-5,
    )


def peers(rate: float, *, has_native_atomics: bool = True) -> tuple[Peer, ...]:
    return tuple(
        Peer(
            source=one,
            destination=other,
            has_access=True,
            has_native_atomics=has_native_atomics,
            copy_bytes_per_s=rate,
        )
        for one, other in ((0, 1), (1, 0))
    )


def probed(one: Queried | None = None, measured: Measured | None = None, count: int = 1) -> Probed:
    one = one or queried()
    measured = measured or Measured(hbm_copy_bytes_per_s=HBM_COPY)
    return describe(shipped_machine(one), (one,) * count, measured, TODAY)


def linked(rate: float, all_rate: float | None = None, *, has_native_atomics: bool = True) -> Probed:
    found = peers(rate, has_native_atomics=has_native_atomics)
    copies = Measured(hbm_copy_bytes_per_s=HBM_COPY, peers=found, all_peers_bytes_per_s=all_rate or rate)
    return probed(measured=copies, count=2)


def differing(found: Probed) -> dict[str, tuple[Any, Any]]:
    return {entry.figure: (entry.shipped, entry.found) for entry in found.differences}


def test_every_attribute_that_is_asked_for_is_in_the_example() -> None:
    assert set(ATTRIBUTES) == set(H200)


def test_a_node_of_h200s_differs_in_nothing_but_how_many_gpus_are_visible() -> None:
    assert differing(probed()) == {"num_gpus": (8, 1)}
    assert differing(probed(count=8)) == {}


def test_the_probed_gpu_is_the_shipped_one_but_for_the_memory_rate_of_the_driver() -> None:
    gpu, shipped = probed().machine.gpu, load_machine("h200").gpu
    assert replace(gpu, hbm_bytes_per_s=shipped.hbm_bytes_per_s) == shipped
    assert gpu.hbm_bytes_per_s == 2 * 3_201e6 * 6016 / 8


def test_every_figure_has_a_source_that_says_whether_it_was_probed() -> None:
    machine = linked(350e9).machine
    rates = ("bytes_per_s", "per_peer_bytes_per_s", "latency_us")
    parts = {"gpu": Gpu.__struct_fields__, "link": ("kind", *rates), "network": rates}
    for prefix, names in parts.items():
        for name in names:
            assert machine.sources[f"{prefix}.{name}"]
    assert machine.sources["gpu.num_sms"].startswith("probed: CUDA 13.0 driver, NVIDIA H200, 2026-11-21")
    for name in ("carveout_steps_bytes", "num_sub_partitions", "shared_allocation_unit_bytes", "sms_per_gpc"):
        assert machine.sources[f"gpu.{name}"].startswith("not probed, from machine 'h200': ")
    assert machine.sources["network.latency_us"].startswith("not probed")


def test_another_gpu_of_the_architecture_takes_what_no_query_tells_from_the_shipped_file() -> None:
    found = probed(queried("NVIDIA H30", 85_520_809_984, MULTIPROCESSOR_COUNT=114, CLOCK_RATE=1_755_000))
    gpu, like = found.machine.gpu, load_machine(found.shipped).gpu
    assert like.compute_capability == "9.0"
    assert gpu.carveout_steps_bytes == like.carveout_steps_bytes
    assert (gpu.num_sms, sum(gpu.sms_per_gpc), gpu.clock_mhz) == (114, 114, 1755.0)
    assert gpu.bf16_flops_per_s == pytest.approx(like.bf16_flops_per_s * 114 / 132 * 1755 / 1980)
    assert {"gpu.num_sms", "gpu.sms_per_gpc", "gpu.clock_mhz", "gpu.bf16_flops_per_s"} <= set(differing(found))


def test_one_byte_of_shared_memory_is_a_difference_and_a_rounded_memory_size_is_not() -> None:
    less = queried(MAX_SHARED_MEMORY_PER_BLOCK_OPTIN=232_447)
    assert differing(probed(less)) == {"num_gpus": (8, 1), "gpu.max_shared_bytes_per_cta": (232_448, 232_447)}
    assert differing(probed(queried(hbm_bytes=150_000_000_000))) == {"num_gpus": (8, 1)}
    assert "gpu.hbm_bytes" in differing(probed(queried(hbm_bytes=120_000_000_000)))


def test_a_driver_that_hides_the_memory_clock_leaves_the_shipped_rate() -> None:
    machine = probed(queried(MEMORY_CLOCK_RATE=0)).machine
    assert machine.gpu.hbm_bytes_per_s == load_machine("h200").gpu.hbm_bytes_per_s
    assert machine.sources["gpu.hbm_bytes_per_s"].startswith("not probed")


@pytest.mark.parametrize("rate", [346e9, 360e9])
def test_copies_that_agree_with_the_stated_link_leave_it(rate: float) -> None:
    found = linked(rate)
    assert found.machine.link == load_machine("h200").link
    assert differing(found) == {"num_gpus": (8, 2)}
    assert "agrees with" in found.machine.sources["link.per_peer_bytes_per_s"]


def test_slower_copies_replace_the_stated_link_by_what_they_imply() -> None:
    found = linked(200e9)
    assert found.machine.link.per_peer_bytes_per_s == pytest.approx(250e9)
    assert found.machine.link.bytes_per_s == pytest.approx(250e9)
    assert {"link.bytes_per_s", "link.per_peer_bytes_per_s"} <= set(differing(found))


def test_a_mesh_sends_more_to_all_peers_than_to_one() -> None:
    link = linked(100e9, 300e9).machine.link
    assert (link.per_peer_bytes_per_s, link.bytes_per_s) == (pytest.approx(125e9), pytest.approx(375e9))
    assert (link.topology, linked(350e9).machine.link.topology) == ("direct", "switch")


def test_without_atomics_between_the_gpus_the_link_is_pcie() -> None:
    found = linked(20e9, has_native_atomics=False)
    assert found.machine.link.kind == "pcie"
    assert found.machine.link.latency_us == load_machine("a40").link.latency_us
    assert differing(found)["link.kind"] == ("nvlink", "pcie")


@given(rate=st.floats(1e9, 2e12), times=st.floats(0.2, 8))
def test_a_link_is_never_below_what_was_measured(rate: float, times: float) -> None:
    found = linked(rate, rate * times)
    link = found.machine.link
    assert link.per_peer_bytes_per_s <= link.bytes_per_s
    # a stated link is kept within a tenth of what the copies imply
    assert link.per_peer_bytes_per_s * COPY_ENGINE_FRACTION == pytest.approx(rate, rel=0.12)


@given(rate=st.floats(1e12, 9e12))
def test_a_copy_within_the_gpu_differs_beyond_a_tenth_of_what_is_expected(rate: float) -> None:
    expected = 0.9 * 4.8e12
    found = differing(probed(measured=Measured(hbm_copy_bytes_per_s=rate)))
    if abs(rate / expected - 1) > 0.1001:
        assert found["measured.hbm_copy_bytes_per_s"] == (pytest.approx(expected), rate)
    elif abs(rate / expected - 1) < 0.0999:
        assert "measured.hbm_copy_bytes_per_s" not in found


@given(num_sms=st.integers(1, 400), num_gpcs=st.integers(1, 20))
def test_sms_are_spread_over_the_gpcs_as_evenly_as_pairs_allow(num_sms: int, num_gpcs: int) -> None:
    sizes = spread_sms(num_sms, num_gpcs)
    assert sum(sizes) == num_sms
    assert len(sizes) <= num_gpcs
    assert min(sizes) > 0
    assert max(sizes) - min(sizes) <= 2 or len(sizes) < num_gpcs or num_sms % 2


@pytest.mark.parametrize(("version", "expected"), [(12060, (12, 6)), (12090, (12, 9)), (13000, (13, 0)), (13020, (13, 2))])
def test_a_recent_driver_is_accepted_with_its_version(version: int, expected: tuple[int, int]) -> None:
    assert check_driver(version) == expected >= OLDEST_CUDA


@pytest.mark.parametrize("version", [12050, 11080, 0])
def test_an_old_driver_is_refused_with_both_versions(version: int) -> None:
    with pytest.raises(DeviceError, match=r"it supports CUDA \d+\.\d+, but 12\.6 or later is needed\. Update") as caught:
        check_driver(version)
    assert f"CUDA {version // 1000}.{version % 1000 // 10}," in str(caught.value)


def test_gpus_of_two_kinds_are_refused_by_name() -> None:
    check_alike((queried(), queried()))
    with pytest.raises(DeviceError, match=r"2 kinds are visible: NVIDIA H200, NVIDIA L40S\. Choose .*CUDA_VISIBLE_DEVICES"):
        check_alike((queried(), queried("NVIDIA L40S")))


def test_an_unknown_architecture_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(
        DeviceError, match=r"compute capability 12\.0; .* 8\.0, 8\.6, 8\.9, 9\.0, 10\.0\. Write a machine file"
    ):
        shipped_machine(queried("NVIDIA RTX 5090", COMPUTE_CAPABILITY_MAJOR=12))


def test_a_probed_machine_is_saved_and_loaded_again(tmp_path: Path) -> None:
    machine = linked(200e9).machine
    save_machine(machine, tmp_path / "mine.toml")
    assert load_machine(str(tmp_path / "mine.toml")) == machine
    with pytest.raises(MachineError, match=r"must end in \.toml; found"):
        save_machine(machine, tmp_path / "mine")
    with pytest.raises(MachineError, match="Cannot write the machine to"):
        save_machine(machine, tmp_path / "missing" / "mine.toml")


def test_what_was_probed_round_trips_through_json() -> None:
    found = linked(200e9)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Probed) == found


def test_the_report_shows_rates_and_differences() -> None:
    console = Console(width=160, file=io.StringIO())
    print_probed(console, linked(200e9))
    text = console.file.getvalue()
    assert "GPU 1 to 0" in text
    assert "200 GB/s" in text
    assert "differs from 'h200'" in text
    assert "link.per_peer_bytes_per_s" in text


def test_without_the_bindings_probing_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.delitem(sys.modules, "counterpoint.cuda.device_query", raising=False)
    monkeypatch.delitem(sys.modules, "counterpoint.cuda.driver", raising=False)
    with pytest.raises(DeviceError, match=r"'cuda-bindings' is needed .* 'torch>=2\.11,<2\.16' 'cuda-bindings>=13,<14'"):
        probe()


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Release Build\nGCC version: gcc 13.3.0\n",
            "580.159.04",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65  Release Build\n", "580.65"),
        ("no number here\n", ""),
        (None, ""),
    ],
)
def test_the_kernel_modules_version_is_read_where_it_is_loaded(text: str | None, version: str, tmp_path: Path) -> None:
    file = tmp_path / "version"
    if text is not None:
        file.write_text(text)
    assert kernel_module_version(file) == version
