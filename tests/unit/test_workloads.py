"""Workload files: what they turn into, and that whatever is wrong with one is said in one line."""

import itertools
from math import ceil
from pathlib import Path

import pytest

from counterpoint.errors import WorkloadError
from counterpoint.step import Collective, Kernel, Step
from counterpoint.workloads import load_workload, workload_names
from counterpoint.workloads.description import parse_bytes
from counterpoint.workloads.gemm import matmul_hbm_bytes, matmul_l2_bytes

PAPER = [f"{load}_{collective}_{tile}" for load in ("cb", "mb") for collective in ("ar", "a2a") for tile in ("opt1", "opt2")]
MIB = 1 << 20

GEMM = """
[[gemms]]
name = "up"
stream = 0
m = 1000
n = 500
k = 256
dtype = "bf16"
tile = "64x32x16"
threads_per_cta = 128
registers_per_thread = 64
stages = 3
"""
COLLECTIVE = """
[[collectives]]
name = "sum"
stream = 1
collective = "all_reduce"
bytes = "2 MiB"
"""


def write(folder: Path, body: str) -> str:
    path = folder / "mine.toml"
    path.write_text('name = "mine"\nnum_ranks = 4\n' + body)
    return str(path)


def kernels(step: Step) -> list[Kernel]:
    return [operation for operation in step.operations if isinstance(operation, Kernel)]


def test_the_first_papers_workloads_ship_with_both_tiles() -> None:
    assert set(PAPER) <= set(workload_names())


@pytest.mark.parametrize("name", PAPER)
def test_paper_workload_has_the_papers_sizes(name: str) -> None:
    load, collective, tile = name.split("_")
    step = load_workload(name)
    n = {"cb": 8192, "mb": 57344}[load]
    shared_bytes, registers = {"opt1": (16_384, 64), "opt2": (32_768, 72)}[tile]
    assert (step.name, step.num_ranks, len(step.operations)) == (name, 4, 8)
    for gemm in kernels(step):
        assert gemm.flops == 2 * 8192 * n * 8192
        assert gemm.footprint.num_ctas == 128 * n // 64
        assert (gemm.footprint.shared_bytes, gemm.footprint.registers_per_thread) == (shared_bytes, registers)
        assert (gemm.footprint.threads_per_cta, gemm.character, gemm.lone_us) == (128, "matmul", None)
    for operation in step.collectives().values():
        assert operation.collective == {"ar": "all_reduce", "a2a": "all_to_all"}[collective]
        assert (operation.num_bytes, operation.group_size, operation.footprint) == (896 * MIB, 4, None)


@pytest.mark.parametrize("name", PAPER)
def test_each_collective_waits_for_its_own_gemm_and_the_next_gemm_does_not_wait_for_it(name: str) -> None:
    step = load_workload(name)
    for iteration in range(4):
        gemm, collective = step.operations[2 * iteration : 2 * iteration + 2]
        assert isinstance(gemm, Kernel)
        assert isinstance(collective, Collective)
        assert gemm.waits_for == ()
        assert [dependency.operation for dependency in collective.waits_for] == [2 * iteration]
        assert gemm.stream != collective.stream


@pytest.mark.parametrize("num_ctas", [2, 16, 1024])
def test_a_cta_sweep_changes_the_ctas_of_every_gemm_and_not_the_work(num_ctas: int) -> None:
    swept, usual = load_workload("cb_ar_opt1", num_ctas=num_ctas), load_workload("cb_ar_opt1")
    assert {kernel.footprint.num_ctas for kernel in kernels(swept)} == {num_ctas}
    assert [(k.flops, k.hbm_bytes) for k in kernels(swept)] == [(k.flops, k.hbm_bytes) for k in kernels(usual)]
    assert swept.collectives() == usual.collectives()
    assert swept.fingerprint() != usual.fingerprint()


@pytest.mark.parametrize("num_ctas", [0, -1, 16_385])
def test_a_cta_count_beyond_the_tiles_is_refused(num_ctas: int) -> None:
    with pytest.raises(WorkloadError, match=rf"from 1 to 16384; found {num_ctas}"):
        load_workload("cb_ar_opt1", num_ctas=num_ctas)


def test_a_gemm_has_one_cta_per_tile_and_the_shared_memory_of_its_stages(tmp_path: Path) -> None:
    (gemm,) = kernels(load_workload(write(tmp_path, GEMM)))
    assert gemm.footprint.num_ctas == ceil(1000 / 64) * ceil(500 / 32)
    assert gemm.footprint.shared_bytes == 3 * 2 * (64 * 16 + 16 * 32)
    assert gemm.flops == 2 * 1000 * 500 * 256


def walked_traffic(m: int, n: int, k: int, tile_m: int) -> int:
    """Walk the tile rows in groups of 8 as the grouped order does, and count what each group has to fetch."""
    total = 0
    for first_row in range(0, m, 8 * tile_m):
        rows = min(8 * tile_m, m - first_row)
        total += 2 * rows * k + 2 * k * n + 2 * rows * n
    return total


@pytest.mark.parametrize(("m", "n", "k"), [(8192, 8192, 8192), (1000, 57344, 4096), (8192, 57344, 8192)])
def test_traffic_is_what_a_walk_over_groups_of_tile_rows_fetches(m: int, n: int, k: int) -> None:
    assert matmul_hbm_bytes(m, n, k, "bf16", (64, 64, 32)) == walked_traffic(m, n, k, 64)


def test_a_matrix_that_stays_in_l2_is_read_once() -> None:
    assert matmul_hbm_bytes(131_072, 1024, 1024, "bf16", (64, 64, 32)) == 2 * (131_072 * 1024 * 2 + 1024 * 1024)


def test_tiles_read_from_l2_what_each_loads_for_itself() -> None:
    loads = [(64 + 64) * 32 * 2 for _ in range(8192 // 64) for _ in range(1024 // 64) for _ in range(512 // 32)]
    assert matmul_l2_bytes(8192, 1024, 512, "bf16", (64, 64, 32)) == sum(loads)


@pytest.mark.parametrize("sizes", list(itertools.product((1, 100, 8192), repeat=3)))
def test_traffic_is_never_below_the_compulsory(sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    assert matmul_hbm_bytes(m, n, k, "bf16", (128, 128, 64)) >= 2 * (m * k + k * n + m * n)


def test_stated_figures_replace_modelled_ones(tmp_path: Path) -> None:
    body = GEMM.replace("stages = 3", 'shared_bytes_per_cta = 5000\nhbm_bytes = "3 MB"\nlone_us = 12.5\nnum_ctas = 7')
    (gemm,) = kernels(load_workload(write(tmp_path, body)))
    assert (gemm.hbm_bytes, gemm.lone_us, gemm.footprint.shared_bytes, gemm.footprint.num_ctas) == (3e6, 12.5, 5000, 7)


def test_operations_come_after_what_they_wait_for_whatever_the_order_of_the_file(tmp_path: Path) -> None:
    body = (
        "iterations = 3\n"
        + GEMM
        + 'waits_for = ["first", { name = "sum", previous = true }]\n'
        + '[[kernels]]\nname = "first"\nstream = 0\nnum_ctas = 10\nthreads_per_cta = 64\nregisters_per_thread = 16\n'
        + "lone_us = 4.0\n"
        + COLLECTIVE
        + 'waits_for = ["up"]\n'
    )
    step = load_workload(write(tmp_path, body))
    assert [operation.name for operation in step.operations] == ["first", "up", "sum"] * 3
    waits = [[dependency.operation for dependency in operation.waits_for] for operation in step.operations]
    assert waits == [[], [0], [1], [], [2, 3], [4], [], [5, 6], [7]]


def test_a_collective_that_names_its_ctas_gets_nccls_kernel(tmp_path: Path) -> None:
    (operation,) = load_workload(write(tmp_path, COLLECTIVE + "num_ctas = 24\n")).collectives().values()
    assert operation.footprint is not None
    assert (operation.footprint.num_ctas, operation.footprint.ctas_per_cluster) == (24, 4)
    assert (operation.footprint.threads_per_cta, operation.footprint.registers_per_thread) == (544, 96)
    assert operation.footprint.shared_bytes == 103_808


def test_a_cluster_that_does_not_divide_the_ctas_is_dropped_as_nccl_does(tmp_path: Path) -> None:
    (operation,) = load_workload(write(tmp_path, COLLECTIVE + "num_ctas = 6\n")).collectives().values()
    assert operation.footprint is not None
    assert operation.footprint.ctas_per_cluster == 1


def test_a_copy_and_a_smaller_group_are_taken_as_described(tmp_path: Path) -> None:
    copy = '[[copies]]\nname = "push"\nstream = 2\ndirection = "peer_to_peer"\nbytes = 4096\nwaits_for = ["sum"]\n'
    step = load_workload(write(tmp_path, COLLECTIVE + "group_size = 2\n" + copy))
    (collective,) = step.collectives().values()
    assert collective.group_size == 2
    assert [(operation.name, operation.kind) for operation in step.operations] == [
        ("sum", "communication"),
        ("push", "communication"),
    ]


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [(7, 7), ("7", 7), ("7 B", 7), ("2KiB", 2048), ("896 MiB", 896 * MIB), ("1.5 GB", 1_500_000_000), ("1 kb", 1000)],
)
def test_sizes_are_read_in_decimal_and_binary_units(text: int | str, num_bytes: int) -> None:
    assert parse_bytes(text, "size") == num_bytes


@pytest.mark.parametrize(
    "text", ["", "MiB", "12 parsecs", "-1", "0", "0.3 B", "1e9", "1 2", "9999999 GiB", "nan", "\N{ARABIC-INDIC DIGIT FIVE}"]
)
def test_a_bad_size_is_refused_with_the_text_found(text: str) -> None:
    with pytest.raises(WorkloadError, match=r"^size .*found '"):
        parse_bytes(text, "size")


BAD_FILES = {
    "unknown wait": (COLLECTIVE + 'waits_for = ["nothing"]\n', ["'sum'", "'nothing'"]),
    "cycle": (GEMM + 'waits_for = ["sum"]\n' + COLLECTIVE + 'waits_for = ["up"]\n', ["cycle", "up -> sum -> up"]),
    "waits for itself": (GEMM + 'waits_for = ["up"]\n', ["up -> up"]),
    "missing figure": (GEMM.replace("k = 256\n", ""), ["gemms[0] lacks 'k'"]),
    "no work": (
        '[[kernels]]\nname = "act"\nstream = 0\nnum_ctas = 1\nthreads_per_cta = 1\nregisters_per_thread = 1\n',
        ["'act'", "lone_us"],
    ),
    "bad unit": (COLLECTIVE.replace("2 MiB", "2 MB/s"), ["'sum'", "2 MB/s"]),
    "bad tile": (GEMM.replace("64x32x16", "64x32"), ["'up'", "'64x32'"]),
    "endless tile": (GEMM.replace("64x32x16", "9" * 5000 + "x1x1"), ["'up'", "4096"]),
    "bad kind": (COLLECTIVE.replace('"all_reduce"', '"gossip"'), ["gossip", "collectives[0]"]),
    "wrong type": (GEMM.replace("m = 1000", 'm = "wide"'), ["gemms[0].m must be a whole number; found 'wide'"]),
    "negative size": (GEMM.replace("m = 1000", "m = -1000"), ["'up'", "m must be", "-1000"]),
    "huge size": (GEMM.replace("m = 1000", "m = " + "9" * 400), ["mine.toml"]),
    "longer than Python reads": (GEMM.replace("m = 1000", "m = " + "9" * 5000), ["TOML"]),
    "deep nesting": ("x = " + "[" * 100_000, ["TOML"]),
    "both memories": (GEMM + "shared_bytes_per_cta = 1\n", ["'up'", "either"]),
    "too many ctas": (GEMM + "num_ctas = 1000\n", ["'up'", "256", "1000"]),
    "too big a group": (COLLECTIVE + "group_size = 8\n", ["'sum'", "group_size", "4", "8"]),
    "empty group": (COLLECTIVE + "group_size = 0\n", ["'sum'", "group_size", "found 0"]),
    "figures without ctas": (COLLECTIVE + "threads_per_cta = 96\n", ["'sum'", "num_ctas"]),
    "same name twice": (GEMM + COLLECTIVE.replace('"sum"', '"up"'), ["'up'", "two"]),
    "nothing": ("", ["no entry"]),
    "unknown field": (COLLECTIVE + "speed = 3\n", ["speed"]),
    "no iteration": ("iterations = 0\n" + COLLECTIVE, ["iterations", "0"]),
    "negative stream": (COLLECTIVE.replace("stream = 1", "stream = -1"), ["'sum'", "stream", "-1"]),
    "no threads": (GEMM.replace("threads_per_cta = 128", "threads_per_cta = 0"), ["'up'", "threads_per_cta", "0"]),
    "not a time": (GEMM + "lone_us = nan\n", ["'up'", "lone_us", "nan"]),
    "two-line name": (COLLECTIVE.replace('"sum"', '"su\\nm"'), ["printable", "su"]),
    "two-line name of a bad entry": (
        COLLECTIVE.replace('"sum"', '"su\\nm"').replace("2 MiB", "2 furlongs"),
        ["su", "furlongs"],
    ),
    "not TOML": ("[[gemms]\n", ["TOML"]),
    "binary": ("\udcff", []),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_refused_in_one_line_that_names_file_entry_and_value(tmp_path: Path, case: str) -> None:
    body, named = BAD_FILES[case]
    path = tmp_path / "mine.toml"
    path.write_bytes(('name = "mine"\nnum_ranks = 4\n' + body).encode("utf-8", "surrogateescape"))
    with pytest.raises(WorkloadError) as refusal:
        load_workload(str(path))
    message = str(refusal.value)
    assert "\n" not in message
    assert len(message) < 600
    for words in ["mine.toml", *named]:
        assert words in message


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(WorkloadError, match=r"'cb_ar'.*cb_ar_opt1"):
        load_workload("cb_ar")


def test_a_cluster_file_given_as_a_workload_is_told_so() -> None:
    with pytest.raises(WorkloadError, match=r"looks like a cluster file, .* is for `counterpoint simulate --cluster`"):
        load_workload(Path(__file__).parents[2] / "examples" / "clusters" / "h100_4096.toml")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"none\.toml: No such file"):
        load_workload(str(tmp_path / "none.toml"))


def test_a_cta_sweep_of_a_file_without_gemms_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="no GEMM"):
        load_workload(write(tmp_path, COLLECTIVE), num_ctas=4)
