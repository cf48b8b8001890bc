"""Probing on a real GPU, against what torch says of it and against a copy that torch makes."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from counterpoint.cuda import device_query
from counterpoint.cuda.probing import Probed, probe
from counterpoint.machine import Gpu, Link, load_machine, machine_for_device
from counterpoint.measurement.tournament import measure_rounds

MAIN = "from counterpoint.cli.main import main; main()"


@pytest.fixture(scope="module")
def probed() -> Probed:
    return probe()


def test_the_figures_are_those_that_torch_reads(probed: Probed) -> None:
    gpu, properties = probed.machine.gpu, torch.cuda.get_device_properties(0)
    assert gpu.num_sms == properties.multi_processor_count
    assert gpu.compute_capability == f"{properties.major}.{properties.minor}"
    assert gpu.warp_size * gpu.max_warps_per_sm == properties.max_threads_per_multi_processor
    assert gpu.shared_bytes_per_sm == properties.shared_memory_per_multiprocessor
    assert gpu.max_shared_bytes_per_cta == properties.shared_memory_per_block_optin
    assert gpu.registers_per_sub_partition * gpu.num_sub_partitions == properties.regs_per_multiprocessor
    assert gpu.l2_bytes == properties.L2_cache_size
    assert gpu.hbm_bytes == properties.total_memory
    # torch makes streams of fewer priorities than the driver has
    assert gpu.greatest_priority <= torch.cuda.Stream.priority_range()[1]
    assert probed.machine.num_gpus == torch.cuda.device_count()
    assert probed.machine.device_names == (properties.name,)


def test_every_figure_says_where_it_is_from(probed: Probed) -> None:
    figures = [f"gpu.{name}" for name in Gpu.__struct_fields__] + [f"link.{name}" for name in Link.__struct_fields__]
    assert [figure for figure in figures if not probed.machine.sources.get(figure)] == []


def test_a_gpu_that_ships_with_a_machine_file_is_as_the_file_says(probed: Probed) -> None:
    if machine_for_device(torch.cuda.get_device_name()) is None:
        pytest.skip(f"no machine file is shipped for {torch.cuda.get_device_name()}")
    assert [entry for entry in probed.differences if entry.figure != "num_gpus"] == []


def test_the_copy_within_the_gpu_is_as_fast_as_one_of_torch(probed: Probed) -> None:
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    destination = torch.empty_like(source)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def copy_us(_: int) -> float:
        start.record()
        destination.copy_(source)
        end.record()
        end.synchronize()
        return 1000 * start.elapsed_time(end)

    rate = 2e6 * source.numel() / measure_rounds(["torch"], copy_us, 7, seed=1)[0].median_us
    print(f"\nHBM copy: {probed.measured.hbm_copy_bytes_per_s / 1e12:.3f} TB/s, by torch {rate / 1e12:.3f} TB/s")
    assert probed.measured.hbm_copy_bytes_per_s == pytest.approx(rate, rel=0.1)


def test_probing_takes_no_memory_and_changes_no_context() -> None:
    torch.cuda.synchronize()
    before, device = torch.cuda.mem_get_info(), torch.cuda.current_device()
    probe()
    assert torch.cuda.mem_get_info() == before
    assert torch.cuda.current_device() == device
    assert float(torch.ones(4, device="cuda").sum()) == 4


def test_a_copy_by_the_way_between_gpus_takes_time() -> None:
    """One GPU sending to itself goes the same way through the driver, but for the access."""
    with device_query._opened(0, 2) as gpu:
        one, two = device_query._send_us(gpu, [gpu]), device_query._send_us(gpu, [gpu, gpu])
    assert device_query.BUFFER_BYTES / one < 10e6  # bytes per microsecond: below any GPU's memory
    assert two > one


def test_pairs_of_gpus_are_measured_both_ways(probed: Probed) -> None:
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"needs 2 GPUs, found {count}")
    measured = probed.measured
    for peer in measured.peers:
        print(f"\nGPU {peer.source} to {peer.destination}: {peer.copy_bytes_per_s / 1e9:.1f} GB/s")
        assert peer.has_access == torch.cuda.can_device_access_peer(peer.source, peer.destination)
    assert measured.all_peers_bytes_per_s is not None
    print(f"\nGPU 0 to all others: {measured.all_peers_bytes_per_s / 1e9:.1f} GB/s")
    assert {(peer.source, peer.destination) for peer in measured.peers} == {
        (one, other) for one in range(count) for other in range(count) if one != other
    }
    slowest = min(peer.copy_bytes_per_s for peer in measured.peers)
    assert measured.all_peers_bytes_per_s > 0.8 * slowest


def test_the_command_saves_a_machine_that_loads(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    command = [sys.executable, "-c", MAIN, "machines", "--probe", "-o", str(path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert load_machine(str(path)) == msgspec.json.decode(done.stdout, type=Probed).machine


def test_the_command_prints_what_it_measured_and_where_it_differs() -> None:
    done = subprocess.run([sys.executable, "-c", MAIN, "machines", "--probe"], capture_output=True, text=True, check=False)
    print("\n" + done.stdout.partition("measured: copies")[2])
    assert (done.returncode, done.stderr) == (0, "")
    assert "within GPU 0, read and written" in done.stdout
    assert "differs from" in done.stdout or "No figure differs" in done.stdout
