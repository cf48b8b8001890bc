"""A trace read in pieces is the trace read whole, however it is written; what is cut off is named; operators are found."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.errors import TraceError
from counterpoint.traces import event_stream, kineto, read_trace
from counterpoint.traces.activity import ActivityTrace
from counterpoint.traces.event_stream import EventStream
from counterpoint.traces.formats import read_activity
from helpers.trace_builder import ELEMENTWISE, MATMUL, TraceBuilder, small_trace

SHIPPED = Path(__file__).parents[2] / "examples" / "traces"
TEXTS = st.sampled_from(
    ["a", '}, {"ph": "X"', "},{", '"', "\\", "]}", '{"traceEvents": [', "lambda()#1}, {é", '\\"}, {\\"ph\\"']
)
ARGUMENTS: st.SearchStrategy[Any] = st.recursive(
    TEXTS | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS | st.sampled_from(["ph", "name"]), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=200)
@given(
    events=st.lists(st.fixed_dictionaries({"name": TEXTS, "args": ARGUMENTS}), max_size=30),
    phase_first=st.booleans(),
    indent=st.sampled_from([None, 1]),
    behind=st.dictionaries(st.sampled_from(["x", "y"]), ARGUMENTS),
    sizes=st.tuples(st.integers(1, 400), st.integers(1, 400)),
)
def test_events_are_the_same_for_every_size_of_block(
    events: list[dict[str, Any]],
    phase_first: bool,
    indent: int | None,
    behind: dict[str, Any],
    sizes: tuple[int, int],
) -> None:
    written = [{"ph": "X"} | event if phase_first else event for event in events]
    text = json.dumps({"schemaVersion": 1, "traceEvents": written, **behind}, indent=indent).encode()
    piece, block = sizes
    pieces = iter([text[place : place + piece] for place in range(0, len(text), piece)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_stream, "BLOCK_BYTES", block)
        patch.setattr(event_stream, "WINDOW_BYTES", 1 + block // 2)
        stream = EventStream(Path("t.json"), pieces)
        found = [(event.name, json.loads(bytes(event.args))) for block in stream for event in block]
    assert stream.damage is None
    assert found == [(event["name"], event["args"]) for event in events]


@pytest.mark.parametrize("name", ["ddp.rank0", "moe.rank0"])
def test_a_real_trace_is_the_same_for_every_size_of_block(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = SHIPPED / f"{name}.json.gz"
    whole = kineto.read(path, iter([gzip.decompress(path.read_bytes())]))
    monkeypatch.setattr(event_stream, "BLOCK_BYTES", 50_000)
    assert read_activity(path) == whole
    assert len(whole.operators) > 10
    assert all(operation.operator is not None for operation in whole.operations)


@pytest.mark.parametrize("name", ["ddp.rank0", "fsdp2.rank0", "tp.rank0"])
def test_what_is_read_of_a_cut_trace_is_as_in_the_whole_one(tmp_path: Path, name: str) -> None:
    text = gzip.decompress((SHIPPED / f"{name}.json.gz").read_bytes())
    whole = read_activity(SHIPPED / f"{name}.json.gz")
    path, num_steps = tmp_path / "cut.json", []
    for share in (0.3, 0.6, 0.75, 0.8, 0.85, 0.9, 0.95, 0.999):
        path.write_bytes(text[: int(share * len(text))])
        try:
            cut = read_activity(path)
        except TraceError as problem:
            num_steps.append(0 if "not whole JSON" in str(problem) else -1)
            continue
        num_steps.append(len(cut.step_windows))
        assert "not whole JSON" in cut.notes[0]
        assert (cut.device_name, cut.world_size) == (whole.device_name, whole.world_size), "they stand before the events"
        end_us = cut.step_windows[-1][1]
        expected = [item for item in whole.operations if item.launched_us is not None and item.launched_us <= end_us]
        assert [item.arguments for item in cut.operations] == [item.arguments for item in expected]
    assert num_steps == sorted(num_steps)
    assert num_steps[0] == 0
    assert num_steps[-1] == 2


def test_a_packed_trace_that_is_cut_is_read_up_to_its_last_whole_step(tmp_path: Path) -> None:
    packed = (SHIPPED / "ddp.rank0.json.gz").read_bytes()
    (tmp_path / "cut.json.gz").write_bytes(packed[: 97 * len(packed) // 100])
    step = read_trace(tmp_path / "cut.json.gz")
    assert step.num_steps == 2
    assert any("damaged gzip" in note and "the first 2 can be known to be whole" in note for note in step.notes)


def with_operators() -> TraceBuilder:
    """A forward, backward and optimizer kernel, each launched by an operator of its own, inside modules."""
    trace = TraceBuilder()
    trace.step(0, 1000)

    def event(category: str, name: str, start: float, dur: float, thread: int, **args: Any) -> None:
        trace._add(category, name, start, dur, tid=thread, args=args)

    event("python_function", "nn.Module: Block_0", 5, 100, 1)
    event("python_function", "nn.Module: Linear_3", 10, 50, 1)
    shapes = {"Input Dims": [[4, 8], [8, 16]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
    event("cpu_op", "aten::linear", 11, 40, 1, **{"External id": 1, "Sequence number": 77, "Fwd thread id": 0})
    event("cpu_op", "aten::mm", 12, 30, 1, **{"External id": 2}, **shapes)
    trace.kernel(MATMUL, 100, 10, host=20, args={"External id": 2})
    evaluated = {"External id": 3, "Sequence number": 77, "Fwd thread id": 1}
    event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 200, 90, 9, **evaluated)
    event("cpu_op", "aten::mm", 210, 30, 9, **{"External id": 4}, **shapes)
    trace.kernel(MATMUL, 300, 10, host=220, thread=9, args={"External id": 4})
    event("cpu_op", "aten::_foreach_norm", 310, 30, 1, **{"External id": 7})
    trace.kernel(ELEMENTWISE, 350, 10, host=320, args={"External id": 7})
    event("user_annotation", "Optimizer.step#AdamW.step", 400, 100, 1, **{"External id": 5})
    event("cpu_op", "aten::_foreach_add_", 410, 30, 1, **{"External id": 6})
    trace.kernel(ELEMENTWISE, 500, 10, host=420, args={"External id": 6})
    trace.kernel(ELEMENTWISE, 600, 10, host=520)
    return trace


def test_an_operation_knows_its_operator_with_phase_and_module(tmp_path: Path) -> None:
    trace = read_activity(with_operators().write(tmp_path))
    found = [None if item.operator is None else trace.operators[item.operator] for item in trace.operations]
    said = [item and (item.name, item.phase, item.module, item.dtype, item.thread) for item in found]
    assert said == [
        ("aten::mm", "forward", "Linear_3", "c10::BFloat16", "1"),
        ("aten::mm", "backward", "Linear_3", "c10::BFloat16", "9"),
        ("aten::_foreach_norm", "optimizer", "", "", "1"),
        ("aten::_foreach_add_", "optimizer", "", "", "1"),
        None,
    ]
    assert found[0] is not None
    assert json.loads(found[0].shapes) == [[4, 8], [8, 16]]
    assert [item.matmul_sizes for item in trace.operations] == [(4, 8, 16), (4, 8, 16), None, None, None]


def test_kernels_of_a_replayed_graph_have_the_operator_that_launched_it(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder._add("cpu_op", "my::replay", 5, 20, tid=1, args={"External id": 8})
    graph = builder.kernel(MATMUL, 100, 10, host=10, call="cudaGraphLaunch", args={"External id": 8})
    builder.collective(110, 10, host=10, args={"External id": 8, "correlation": graph})
    trace = read_activity(builder.write(tmp_path))
    assert [trace.operators[item.operator or 0].name for item in trace.operations] == ["my::replay"] * 2


def early(trace: TraceBuilder) -> None:
    trace.kernel(ELEMENTWISE, 25_000, 10, host=25_450.5)


def lost(trace: TraceBuilder) -> None:
    kernels = [event for event in trace.events if event["name"] == ELEMENTWISE]
    for event in kernels:
        trace.events.remove(event)
    for number in range(10):
        trace.call("cudaLaunchKernel", 10_040 + number)


def unknown_launches(trace: TraceBuilder) -> None:
    trace.events[:] = [event for event in trace.events if event["cat"] != "cuda_runtime"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (early, "1 operations start before their launch, by up to 450.5 us. The clocks of host and GPU differ"),
        (lost, "kernel launches have no kernel in the trace"),
        (unknown_launches, "The trace holds the launch of no operation"),
    ],
)
def test_what_contradicts_itself_or_is_missing_is_named(tmp_path: Path, change: Any, says: str) -> None:
    trace = small_trace()
    change(trace)
    notes = read_trace(trace.write(tmp_path)).notes
    assert any(says in note for note in notes), notes


def test_whole_traces_have_no_such_notes() -> None:
    traces: list[ActivityTrace] = [read_activity(path) for path in sorted(SHIPPED.glob("*.json.gz"))]
    assert [trace.notes for trace in traces] == [()] * len(traces)


def test_progress_is_told_in_bytes_of_the_file(tmp_path: Path) -> None:
    path, told = small_trace().write(tmp_path, "a.json.gz"), []
    read_activity(path, on_progress=lambda done, size: told.append((done, size)))
    assert told[-1] == (path.stat().st_size, path.stat().st_size)
