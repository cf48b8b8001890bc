"""Traces are known by their content, whatever they are called; a new format is a module and a line in one table."""

import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest

from counterpoint.errors import TraceError
from counterpoint.job import load_job
from counterpoint.step import Collective
from counterpoint.traces import formats, kineto, read_trace
from counterpoint.traces.activity import ActivityTrace
from counterpoint.traces.formats import TraceFormat, is_trace, read_activity
from helpers.command import counterpoint, refusal
from helpers.trace_builder import MATMUL, NCCL, TraceBuilder, small_trace

TEXT = small_trace().text()
PACKED = gzip.compress(TEXT, mtime=0)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", TEXT),
        ("a.json", PACKED),
        ("a.json.gz", TEXT),
        ("A.JSON", TEXT),
        ("A.Json.GZ", PACKED),
        ("a.txt", TEXT),
        ("a", PACKED),
        ("a.json", b"\xef\xbb\xbf" + TEXT),
    ],
)
def test_a_trace_is_read_by_its_content(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert is_trace(str(tmp_path / name))
    step = load_job(str(tmp_path / name)).step
    assert step.name.lower() == "a" if name != "a.txt" else "a.txt"
    assert len(step.operations) == len(read_trace(tmp_path / name).step.operations)


@pytest.mark.parametrize("content", [b"", b"name = 'x'", PACKED[:7], b"\x1f\x8b\xff\xff", b"\x00" * 100])
def test_other_content_under_another_name_is_no_trace(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "notes").write_bytes(content)
    assert not is_trace(str(tmp_path / "notes"))
    assert "is neither a trace (.json, .json.gz, .sqlite) nor a workload file (.toml)" in refusal(
        "tune", "notes", cwd=tmp_path
    )


def test_a_new_format_is_one_line_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(path: Path, pieces: Iterator[bytes]) -> ActivityTrace:
        assert b"".join(pieces) == b"ROC\n"
        return kineto.read(path, iter([TEXT]))

    line = TraceFormat(name="made up", suffixes=(".rpd",), knows=lambda head: head.startswith(b"ROC"), read=read)
    monkeypatch.setattr(formats, "FORMATS", (*formats.FORMATS, line))
    (tmp_path / "a.bin").write_bytes(b"ROC\n")
    assert is_trace(str(tmp_path / "a.bin"))
    assert len(read_trace(tmp_path / "a.bin").step.operations) > 0
    monkeypatch.undo()
    with pytest.raises(TraceError):
        read_trace(tmp_path / "a.bin")


def test_an_address_is_refused_as_it_was_written() -> None:
    assert "'https://host/a.json' is an address, but only files can be read." in refusal("tune", "https://host/a.json")


def test_small_manners_of_the_command_line(tmp_path: Path) -> None:
    assert "Usage: counterpoint tune" in counterpoint("tune", "-h").stdout
    assert "'-' cannot be used as a file" in refusal("tune", "cb_ar_opt2", "-o", "-", cwd=tmp_path)
    assert not (tmp_path / "-").exists()
    lines = counterpoint("tune", "cb_ar_opt2").stdout.splitlines()
    assert [line for line in lines if line != line.rstrip()] == []


def test_a_workload_may_be_named_in_any_case(tmp_path: Path) -> None:
    shipped = Path(formats.__file__).parents[1] / "workloads" / "cb_ar_opt2.toml"
    (tmp_path / "OWN.TOML").write_bytes(shipped.read_bytes())
    assert load_job(str(tmp_path / "OWN.TOML")).step == load_job("CB_AR_OPT2").step


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_of_nested_calls_with_one_correlation_the_outer_launches(order: tuple[int, ...], tmp_path: Path) -> None:
    """ROCm 7 traces a fill of HIP's runtime, and the launches that it consists of, under one correlation (pytorch 2.9)."""
    trace = TraceBuilder()
    trace.step(0, 1000)
    trace.kernel("__amd_rocclr_fillBufferAligned.kd", 30, 2, call="hipMemsetAsync", host=10)
    outer = trace.events[-2]
    outer["dur"] = 9.3
    calls = [outer, *(outer | {"name": "hipLaunchKernel", "ts": ts, "dur": 4} for ts in (10, 15))]
    trace.events[1:2] = [calls[place] for place in order]
    [operation] = read_activity(trace.write(tmp_path)).operations
    assert (operation.launch_call, operation.launched_us) == ("hipMemsetAsync", 10)


@pytest.mark.parametrize("change", [{"ts": 15, "dur": 5}, {"tid": 2}, {"ts": 9}, {"dur": 9.3}])
def test_calls_with_one_correlation_that_are_not_nested_in_a_thread_are_refused(
    change: dict[str, float], tmp_path: Path
) -> None:
    trace = TraceBuilder()
    trace.step(0, 1000)
    trace.kernel("fill", 30, 2, call="hipMemsetAsync", host=10)
    trace.events[1]["dur"] = 9.3
    trace.events.append(trace.events[1] | {"name": "hipLaunchKernel", "dur": 8} | change)
    with pytest.raises(TraceError, match="correlation 1 names two host calls"):
        read_activity(trace.write(tmp_path))


def test_a_trace_of_2021_reads_the_same_with_its_names_of_categories(tmp_path: Path) -> None:
    trace = small_trace()
    fields = {"ph": "X", "pid": 0, "tid": 1, "dur": 5}
    for number in range(3):
        for event in trace.events:
            if 10_000.0 * number <= event["ts"] < 10_000.0 * (number + 1) and event["cat"] == "kernel":
                event["args"]["External id"] = number + 1
        at = 10_000.0 * number + 12
        trace.events.append(fields | {"cat": "cpu_op", "name": "aten::mm", "ts": at, "args": {"External id": number + 1}})
        trace.events.append(fields | {"cat": "user_annotation", "name": "Optimizer.step#SGD.step", "ts": at + 10})
    new = read_activity(trace.write(tmp_path))
    old = {"cpu_op": "Operator", "user_annotation": "Operator", "cuda_runtime": "Runtime"}
    old |= {"kernel": "Kernel", "gpu_memset": "Memset"}
    for event in trace.events:
        event["cat"] = old.get(event["cat"], event["cat"])
    assert read_activity(trace.write(tmp_path)) == new
    assert len(new.step_windows) == 3
    assert {operator.phase for operator in new.operators} == {"forward", "optimizer"}


def test_old_traces_have_sizes_of_collectives_from_the_ranges_that_launched_them(tmp_path: Path) -> None:
    trace = TraceBuilder()
    send = "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)"
    called = {"nccl:all_to_all": ([[6144]], "float"), "nccl:_all_gather_base": ([[4, 16]], "c10::BFloat16")}
    for number in range(3):
        begin = 10_000.0 * number
        trace.step(begin, begin + 9_000)
        trace.kernel(MATMUL, begin + 20, 500)
        for place, (name, (dims, dtype)) in enumerate(called.items()):
            host = begin + 100 + 50 * place
            trace.range(name, host - 10, host + 10, **{"Input Dims": dims, "Input type": [dtype]})
            trace.kernel(send if place == 0 else NCCL, begin + 600 + 300 * place, 200, host=host, stream=19)
    found = [each for each in read_trace(trace.write(tmp_path)).step.operations if isinstance(each, Collective)]
    assert [(each.collective, each.num_bytes, each.group_size) for each in found] == [
        ("all_to_all", 6144 * 4, 4),
        ("all_gather", 4 * 64 * 2, 4),
    ]
