"""Properties of `analyze_rank` on random timelines: causes partition what is exposed, order and clock do not matter."""

import random
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.analysis.rank import analyze_rank
from counterpoint.analysis.values import RankAnalysis
from counterpoint.spans import length, union, within, without
from counterpoint.traces.formats import read_activity
from helpers.trace_builder import ELEMENTWISE, MATMUL, TraceBuilder

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)
# stream, kind, gap before it, duration, how long before its start the host launched it
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from([7, 19, 23]),
        st.sampled_from(["matmul", "elementwise", "collective", "peer", "local", "fill"]),
        st.integers(0, 40),
        st.integers(1, 120),
        st.integers(-3, 200),
    ),
    min_size=1,
    max_size=40,
)
Drawn = list[tuple[int, str, int, int, int]]


def build(operations: Drawn, shift: float = 0.0, seed: int | None = None) -> RankAnalysis:
    trace = TraceBuilder()
    reached = {7: 1000.0 + shift, 19: 1000.0 + shift, 23: 1000.0 + shift}
    trace.step(shift, shift + 1e6)
    for number, (stream, kind, gap, duration, lead) in enumerate(operations):
        start = reached[stream] + gap
        reached[stream] = start + duration
        host = start - lead + number / 1000  # launches of one moment have no order but that of the file
        if kind == "collective":
            trace.collective(start, duration, stream=stream, host=host)
        elif kind in ("matmul", "elementwise"):
            trace.kernel(MATMUL if kind == "matmul" else ELEMENTWISE, start, duration, stream=stream, host=host)
        else:
            names = {"peer": "Memcpy PtoP (Device -> Device)", "local": "Memcpy DtoD (Device -> Device)"}
            trace.copy(names.get(kind, "Memset (Device)"), start, duration, num_bytes=64, stream=stream, host=host)
    if seed is not None:
        random.Random(seed).shuffle(trace.events)
    with tempfile.TemporaryDirectory() as folder:
        return analyze_rank(read_activity(trace.write(Path(folder), "trace.json")))


@given(OPERATIONS)
@settings(max_examples=150, deadline=None)
def test_causes_partition_the_exposed_time(operations: Drawn) -> None:
    analysis = build(operations)
    for step in analysis.steps:
        spans = [
            (round(interval.start_us * 1000), round(interval.end_us * 1000))
            for interval in analysis.exposed
            if interval.step == step.step
        ]
        assert all(start < end for start, end in spans)
        assert length(spans) == length(union(spans)) == round(step.exposed_us * 1000)
        parts = step.exposed_us + step.overlapped_us
        assert abs(parts - step.communication_us) < 1e-6
        assert max(step.computation_us, step.communication_us) <= step.makespan_us - step.idle_us + 1e-6
    assert sum(row.time_us for row in analysis.critical_path) <= analysis.steps[0].makespan_us + 1e-6


@given(OPERATIONS, st.integers(1, 10**6), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_neither_the_order_of_events_nor_the_clock_matters(operations: Drawn, shift: int, seed: int) -> None:
    plain, moved = build(operations), build(operations, shift=1000.0 * shift, seed=seed)
    assert plain.steps == moved.steps
    assert plain.exposed == moved.exposed
    assert plain.collectives == moved.collectives
    assert (plain.idle, plain.critical_path, plain.slowdowns) == (moved.idle, moved.critical_path, moved.slowdowns)


@given(SPANS, SPANS, st.tuples(st.integers(0, 60), st.integers(0, 60)))
def test_unions_are_sets_of_moments(
    first: list[tuple[int, int]], second: list[tuple[int, int]], window: tuple[int, int]
) -> None:
    def moments(spans: list[tuple[int, int]]) -> set[int]:
        return {time for start, end in spans for time in range(start, end)}

    left, right = union(first), union(second)
    assert moments(left) == moments(first)
    assert length(left) == len(moments(first))
    assert moments(without(left, right)) == moments(first) - moments(second)
    assert moments(within(left, window)) == moments(first) & set(range(*window))
