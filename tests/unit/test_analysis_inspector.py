"""Logs of NCCL Inspector, on files whose figures are known by construction."""

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from counterpoint.analysis.combine import combine
from counterpoint.analysis.comparison import compare
from counterpoint.analysis.gate import parse_condition, violations
from counterpoint.analysis.inspector import is_inspector, read_inspector
from counterpoint.analysis.rank import analyze_rank
from counterpoint.errors import AnalysisError
from counterpoint.report.analysis_page import render_page
from counterpoint.traces.formats import read_activity
from helpers.inspector_builder import MIB, record, write_log

TRACE = Path(__file__).parents[2] / "examples" / "traces" / "ddp.rank0.json.gz"


def log(folder: Path, records: Iterable[dict[str, Any]], name: str = "host-pid1.log") -> Path:
    return write_log(folder / name, records)


@pytest.mark.parametrize(
    ("function", "kind", "num_bytes", "bus_gb_per_s"),
    # 4 MiB in 100 us among 4 ranks: the plugin's own formula, inspectorComputeOpBw; of all-to-alls that of nccl-tests
    [
        ("AllReduce", "all_reduce", 4 * MIB, 62.91),
        ("AllGather", "all_gather", 16 * MIB, 125.83),
        ("ReduceScatter", "reduce_scatter", 16 * MIB, 125.83),
        ("All2All", "all_to_all", 16 * MIB, 125.83),
        ("Broadcast", "broadcast", 4 * MIB, 41.94),
    ],
)
def test_sizes_and_bus_bandwidth_are_the_librarys(
    tmp_path: Path, function: str, kind: str, num_bytes: int, bus_gb_per_s: float
) -> None:
    found = combine([read_inspector(log(tmp_path, [record(function, num_bytes=4 * MIB, time_us=100, n_ranks=4)]))])
    assert [(size.collective, size.num_bytes, size.count) for size in found.sizes] == [(kind, num_bytes, 1)]
    assert (found.sizes[0].bus_bytes_per_s or 0) / 1e9 == pytest.approx(bus_gb_per_s, rel=1e-3)


@pytest.mark.parametrize(
    ("function", "num_bytes", "time_us", "stated_gb_per_s"),
    [("AllReduce", 17179869184, 61974, 485.119099), ("ReduceScatter", 2147483648, 41057, 366.134533)],
)
def test_bus_bandwidth_is_what_the_plugins_own_examples_state(
    tmp_path: Path, function: str, num_bytes: int, time_us: float, stated_gb_per_s: float
) -> None:
    found = combine([read_inspector(log(tmp_path, [record(function, num_bytes=num_bytes, time_us=time_us, n_ranks=8)]))])
    assert (found.sizes[0].bus_bytes_per_s or 0) / 1e9 == pytest.approx(stated_gb_per_s, rel=1e-8)


def test_what_a_log_cannot_tell_is_absent_and_said(tmp_path: Path) -> None:
    found = combine([read_inspector(log(tmp_path, [record(number=n) for n in range(3)]))])
    assert (found.causes, found.exposed, found.overlap_ratio, found.breakdowns) == ((), (), None, ())
    assert found.ranks[0].steps == ()
    assert any("exposed time" in line and "are unknown" in line for line in found.ranks[0].problems)
    assert found.headline.verdict == (
        "NCCL Inspector's log of rank 0: 3 collectives in 1 communicator; exposed time is unknown."
    )
    assert "each rank starts at zero" not in render_page(found)


@pytest.mark.parametrize("layout", ["lines", "concatenated", "indented", "packed"])
def test_every_layout_gives_the_same_collectives(tmp_path: Path, layout: str) -> None:
    records = [record("AllReduce", number=n, time_us=50 + n) for n in range(4)]
    texts = [json.dumps(each, indent=2 if layout == "indented" else None) for each in records]
    content = ("" if layout == "concatenated" else "\n").join(texts).encode()
    path = tmp_path / "host-pid1.log"
    path.write_bytes(gzip.compress(content) if layout == "packed" else content)
    found = read_inspector(path)
    assert is_inspector(path)
    assert [each.end_us for each in found.collectives] == [50, 51, 52, 53]
    assert len(found.problems) == 1


def test_a_record_that_was_written_twice_counts_once_with_its_latest_time(tmp_path: Path) -> None:
    # Sequence numbers count each function by itself, so the all-gather of the same number is another collective.
    times = ((30, 300.0), (90, 900.0), (60, 600.0))
    records = [record("AllReduce", number=7, dumped_us=dumped, time_us=time_us) for dumped, time_us in times]
    found = read_inspector(log(tmp_path, [*records, record("AllGather", number=7, time_us=5)]))
    assert sorted((each.name, each.end_us) for each in found.collectives) == [("AllGather", 5.0), ("AllReduce", 900.0)]


def test_lines_that_hold_no_record_are_counted_and_named(tmp_path: Path) -> None:
    good = json.dumps(record())
    path = tmp_path / "host-pid1.log"
    strange = json.dumps(record("Mystery", number=9))
    negative = json.dumps(record(time_us=-1.0, number=10))
    path.write_text("\n".join([good[: len(good) // 2], good, "hello", negative, "{}", strange, good[:-1]]))
    found = read_inspector(path)
    assert len(found.collectives) == 1
    said = " ".join(found.problems)
    assert "5 entries (lines 1, 3-5, 7) could not be read" in said
    assert "1 entry of unknown functions ('Mystery')" in said


def test_entries_without_a_time_or_by_the_host_are_said_and_give_no_bandwidth(tmp_path: Path) -> None:
    records = [record(number=1, time_us=0), record(number=2, time_us=100), record(number=3, time_us=0, num_bytes=7)]
    found = combine([read_inspector(log(tmp_path, [*records, record(number=4, num_bytes=9, source="kernel_cpu")]))])
    rates = {size.num_bytes: size.bus_bytes_per_s for size in found.sizes}
    assert rates[MIB] == pytest.approx(MIB / 100e-6)
    assert rates[7] is None
    said = " ".join(found.ranks[0].problems)
    assert "2 entries have no time" in said
    assert "1 time is the host's" in said


def test_ranks_that_came_early_waited_for_the_one_whose_time_is_least(tmp_path: Path) -> None:
    times = {0: (300, 80), 1: (100, 90), 2: (180, 80)}
    logs = [
        log(
            tmp_path,
            [
                record("AllReduce", number=1, rank=rank, n_ranks=3, time_us=of_rank[0]),
                record("Broadcast", number=1, rank=rank, n_ranks=3, time_us=of_rank[1]),
                record("Send", number=1, rank=rank, n_ranks=3, time_us=10, is_p2p=True),
            ],
            f"host-pid{rank}.log",
        )
        for rank, of_rank in times.items()
    ]
    found = combine([read_inspector(path) for path in logs])
    assert {each.rank: (each.waited_us, each.times_last, each.num_collectives) for each in found.waits} == {
        0: (200, 0, 1),
        1: (0, 1, 1),
        2: (80, 0, 1),
    }
    assert {size.collective: (size.count, size.mean_us) for size in found.sizes} == {
        "all_reduce": (1, 100),  # once all had come
        "broadcast": (1, 90),  # a root may be done before others come
        "send_recv": (3, 10),
    }
    assert any("Rank 1 waited least" in line for line in found.headline.why)


def test_ranks_are_those_of_the_largest_communicator_and_groups_have_their_names(tmp_path: Path) -> None:
    world = [record(rank=rank, n_ranks=4, id="0xw", name="world") for rank in (0, 1)]
    halves = [record(rank=0, n_ranks=2, id=f"0xh{rank}", name="unknown", time_us=rank + 1) for rank in (0, 1)]
    logs = [log(tmp_path, [halves[rank], world[rank]], f"{rank}.log") for rank in (0, 1)]
    found = combine([read_inspector(path) for path in logs])
    assert [rank.rank for rank in found.ranks] == [0, 1]
    assert {size.process_group for size in found.sizes} == {"world", "0xh0", "0xh1"}
    assert found.missing_ranks == (2, 3)
    assert len(found.skews) == 1, "different communicators are not matched"


def test_logs_without_a_communicator_of_all_are_numbered_in_the_order_of_files(tmp_path: Path) -> None:
    logs = [log(tmp_path, [record(rank=0, n_ranks=4, id=f"0x{place}")], f"{place}.log") for place in range(3)]
    found = combine([read_inspector(path) for path in logs])
    assert [rank.rank for rank in found.ranks] == [0, 1, 2]
    assert (found.missing_ranks, found.waits) == ((), ())
    assert "numbered in the order of the files" in found.notes[0]


def test_of_a_process_with_several_gpus_the_lowest_rank_is_read(tmp_path: Path) -> None:
    found = read_inspector(log(tmp_path, [record(rank=rank, time_us=rank + 1, n_ranks=4) for rank in (2, 1, 3)]))
    assert (found.rank, [each.end_us for each in found.collectives]) == (1, [2.0])
    assert any("ranks 1-3 in one file" in line for line in found.problems)


def test_what_needs_steps_is_refused_and_comparison_keeps_to_collectives(tmp_path: Path) -> None:
    one, other = (  # a communicator without a name has another hash in each run
        combine([read_inspector(log(tmp_path, [record(time_us=time_us, id=hex(time_us), name="")], f"{time_us}.log"))])
        for time_us in (100, 200)
    )
    assert [(change.before, change.after, change.unit) for change in compare(one, other)] == [(100, 200, "us")]
    with pytest.raises(AnalysisError, match="--fail-if needs profiler traces"):
        violations(one, [parse_condition("exposed > 5%")])
    with pytest.raises(AnalysisError, match="Give one kind at a time"):
        combine([*one.ranks, analyze_rank(read_activity(TRACE))])


@pytest.mark.parametrize("content", ["", "{}", '{"traceEvents": []}', "text"])
def test_other_files_are_no_logs(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.log"
    path.write_text(content)
    assert not is_inspector(path)
    with pytest.raises(AnalysisError, match="holds no record of NCCL Inspector"):
        read_inspector(path)
