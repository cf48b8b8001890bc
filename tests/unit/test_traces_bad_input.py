"""Whatever is wrong with a file becomes one line that says so; nothing else ever escapes."""

import copy
import gzip
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.errors import CounterpointError, TraceError
from counterpoint.traces import TracedStep, read_trace
from helpers.trace_builder import MATMUL, TraceBuilder, small_trace


def failure(path: Path | str) -> str:
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.json", b"", "is empty"),
        ("a.json.gz", b"", "is empty"),
        ("a.json.gz", b'{"traceEvents": []}', "no GPU activity"),
        ("a.json.gz", gzip.compress(small_trace().text(), mtime=0)[:200], "damaged gzip"),
        ("a.json", gzip.compress(b"x", mtime=0)[:12], "damaged gzip"),
        ("a.json", small_trace().text()[:500], "not whole JSON"),
        ("a.json", b"\xff\xfe\x00", "is UTF-16 text"),
        ("a.json", b"[1, 2, 3]", "not a profiler trace"),
        ("plan.toml", b"verdict = 'GAIN'", "not a profiler trace: no format"),
        ("a.json", b'{"hello": 1}', "not a profiler trace"),
        ("a.json", b'{"traceEvents": 7}', "not a profiler trace"),
        ("a.json", b'{"traceEvents": []}', "no GPU activity"),
        ("a.json", b'{"other": ' + b"[" * 100_000, "nested too deeply"),
        ("a.json", b'{"traceEvents": [{"cat": "kernel", "ts": NaN}]}', "not whole JSON"),
        ("a.json", b'{"traceEvents": [{"cat": "kernel", "ts": 1e999}]}', "a.json"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert says in failure(tmp_path / name)


@pytest.mark.parametrize("name", ['Library("x")', "a\n(1): b", "torch\\cuda"])
def test_text_that_torch_did_not_escape_is_said_to_come_from_stacks(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.json"
    event = f'{{"ph": "X", "cat": "python_function", "name": "{name}", "ts": 1, "dur": 1}}, '
    path.write_text(small_trace().text().decode().replace('"traceEvents": [', '"traceEvents": [' + event))
    assert "with_stack=True" in failure(path)


def test_operations_whose_times_the_profiler_lost_are_refused(tmp_path: Path) -> None:
    trace = small_trace()
    kernels = [event for event in trace.events if event["cat"] == "kernel"]
    for event in kernels[-2:]:
        event["ts"] = event["dur"] = 0.0
    assert "2 GPU operations and host calls begin at 0 and take 0 us" in failure(trace.write(tmp_path))


def test_a_step_that_takes_no_time_is_refused(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.step(0, 100)
    trace.kernel(MATMUL, 50, 0)
    assert "takes no time on the GPU" in failure(trace.write(tmp_path))


@pytest.mark.parametrize(
    ("world_size", "rank", "says"),
    [
        (10**12, 0, "states 1000000000000 ranks; there must be from 1 to 1,048,576"),
        (0, 0, "states 0 ranks"),
        (2, 5, "states that it is of rank 5; ranks are from 0 to 1"),
        (None, -1, "states that it is of rank -1"),
    ],
)
def test_ranks_that_cannot_be_are_refused(tmp_path: Path, world_size: int | None, rank: int, says: str) -> None:
    trace = small_trace()
    trace.document["distributedInfo"] = {"rank": rank, "world_size": world_size}
    (tmp_path / "a.json").write_bytes(trace.text())
    assert says in failure(tmp_path / "a.json")


def test_what_to_do_with_a_damaged_file_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(small_trace().text(), mtime=0)[:-400])
    assert failure(tmp_path / "a.json.gz").count("record it again") == 1


def test_a_directory_and_a_missing_file_cannot_be_read(tmp_path: Path) -> None:
    assert "Is a directory" in failure(tmp_path)
    assert "No such file" in failure(tmp_path / "none.json")
    assert "null" in failure("bad\0name.json")


def broken(change: Callable[[TraceBuilder], object]) -> TraceBuilder:
    trace = small_trace()
    change(trace)
    return trace


def last_kernel(trace: TraceBuilder) -> dict[str, Any]:
    return trace.events[-1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda trace: last_kernel(trace).pop("ts"), ">' has no 'ts'; record the trace again"),
        (lambda trace: last_kernel(trace).pop("dur"), ">' at 20512 us has no 'dur'; record the trace again"),
        (lambda trace: last_kernel(trace).update(ts=-5), "times must be from 0"),
        (lambda trace: last_kernel(trace).update(dur=-5), "times must be from 0"),
        (lambda trace: last_kernel(trace).update(ts=1e18), "times must be from 0"),
        (lambda trace: last_kernel(trace)["args"].pop("stream"), "args lacks 'stream', a whole number; record the trace"),
        (lambda trace: last_kernel(trace)["args"].update(stream="seven"), "args.stream must be a whole number; found text"),
        (lambda trace: last_kernel(trace)["args"].update(grid=[0, 1, 1]), "positive grid"),
        (lambda trace: last_kernel(trace)["args"].update({"shared memory": -1}), "sizes from 0"),
        (lambda trace: last_kernel(trace).update(ts=20_300.0), "overlap their predecessor"),
        (lambda trace: trace.events.append(last_kernel(trace)), "names two GPU operations"),
        (lambda trace: trace.events.append(trace.events[1]), "names two host calls"),
        (lambda trace: trace.document["distributedInfo"].update(world_size=0), "there must be from 1"),
        (
            lambda trace: trace.document["distributedInfo"].update(world_size="many"),
            "distributedInfo.world_size must be a whole number; found text",
        ),
    ],
)
def test_a_trace_that_contradicts_itself_is_refused(
    tmp_path: Path, change: Callable[[TraceBuilder], object], says: str
) -> None:
    assert says in failure(broken(change).write(tmp_path))


def test_steps_that_launch_nothing_are_refused(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.step(0, 10)
    trace.kernel(MATMUL, 600, 10, host=500)
    assert "no GPU operation was launched inside a profiled step" in failure(trace.write(tmp_path))


def test_a_name_of_several_lines_still_gives_one_line(tmp_path: Path) -> None:
    trace = small_trace()
    trace.kernel("two\nlines", -5, 1, host=1)
    failure(trace.write(tmp_path))


ODD_VALUES: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from(["", "kernel", "ncclDevKernel_AllReduce", "[1]", "é"]),
    st.lists(st.integers(-2, 2**33), max_size=4),
    st.just({}),
)
SMALL = json.loads(small_trace().text())


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON document, by the keys that lead there."""
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [path, *(place for key, child in children for place in places(child, (*path, key)))]


PLACES = [place for place in places(SMALL) if place]


def apply(document: Any, place: tuple[Any, ...], value: Any, *, delete: bool) -> None:
    """Change or delete what is at `place`, if an earlier change has left it there."""
    node = document
    for key in place[:-1]:
        if isinstance(node, list):
            node = node[key] if isinstance(key, int) and key < len(node) else None
        else:
            node = node.get(key) if isinstance(node, dict) else None
    key = place[-1]
    if (isinstance(node, dict) and key in node) or (isinstance(node, list) and isinstance(key, int) and key < len(node)):
        if delete:
            del node[key]
        else:
            node[key] = value


@settings(deadline=None, max_examples=300)
@given(
    changes=st.lists(st.tuples(st.sampled_from(PLACES), ODD_VALUES, st.booleans()), min_size=1, max_size=4),
    cut=st.one_of(st.none(), st.integers(0, 5000)),
)
def test_a_mutated_trace_reads_or_is_refused(changes: list[tuple[tuple[Any, ...], Any, bool]], cut: int | None) -> None:
    document = copy.deepcopy(SMALL)
    for place, value, delete in changes:
        apply(document, place, value, delete=delete)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mutated.json"
        path.write_bytes(json.dumps(document).encode()[:cut])
        outcome: object = None
        try:
            outcome = read_trace(path)
        except CounterpointError as problem:
            outcome = str(problem)
        assert isinstance(outcome, TracedStep) or (isinstance(outcome, str) and "\n" not in outcome)


def test_a_grid_that_no_gpu_could_work_through_is_refused_in_one_line(tmp_path: Path) -> None:
    trace = small_trace()
    for event in trace.events:
        if event["cat"] == "kernel":
            event["args"]["grid"] = [2147483647, 65535, 65535]
    (tmp_path / "huge.json").write_bytes(trace.text())
    assert "num_ctas of a kernel must be from 1 to 1,125,899,906,842,624; found 9,223," in failure(tmp_path / "huge.json")
