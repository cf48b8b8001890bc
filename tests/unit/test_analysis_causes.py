"""Exposed time of tiny traces whose answer is known by construction: three like steps of 2 ms each, one cause per trace."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from counterpoint.analysis.rank import analyze_rank
from counterpoint.analysis.values import RankAnalysis
from counterpoint.traces.formats import read_activity
from helpers.trace_builder import ELEMENTWISE, MATMUL, TraceBuilder

FILLS_ALL_SMS = {"grid": [2, 66, 1], "block": [384, 1, 1], "registers per thread": 168, "shared memory": 200_000}
FEW_CTAS = {"grid": [8, 1, 1]}
PEER = "Memcpy PtoP (Device -> Device)"
SIDE, MAIN = 19, 7


def analyze(trace: TraceBuilder, folder: Path) -> RankAnalysis:
    return analyze_rank(read_activity(trace.write(folder)))


def in_steps(build: Callable[[TraceBuilder, float], None]) -> TraceBuilder:
    trace = TraceBuilder()
    for number in range(3):
        begin = 2000.0 * number
        trace.step(begin, begin + 1990)
        build(trace, begin)
    return trace


def start_side(trace: TraceBuilder, begin: float) -> None:
    """A first kernel until 90 us, and the side stream waits for it."""
    trace.kernel(ELEMENTWISE, begin + 50, 40, host=begin + 1)
    trace.record(begin + 2)
    trace.wait(begin + 3, stream=SIDE, event=55)


def wait_for_side(trace: TraceBuilder, host: float) -> None:
    trace.wait(host + 1, stream=MAIN, event=700 + trace.record(host))


def dependent(trace: TraceBuilder, begin: float) -> None:
    start_side(trace, begin)
    trace.collective(begin + 92, 200, host=begin + 5)
    wait_for_side(trace, begin + 6)
    trace.kernel(MATMUL, begin + 294, 100, host=begin + 9)


def own_stream(trace: TraceBuilder, begin: float) -> None:
    trace.kernel(MATMUL, begin + 50, 100, host=begin + 1)
    trace.collective(begin + 152, 200, host=begin + 2, stream=MAIN)
    trace.kernel(MATMUL, begin + 354, 100, host=begin + 3)


def starved(trace: TraceBuilder, begin: float) -> None:
    start_side(trace, begin)
    trace.kernel(MATMUL, begin + 92, 1000, host=begin + 4, args=FILLS_ALL_SMS)
    trace.collective(begin + 1093, 200, host=begin + 5)
    wait_for_side(trace, begin + 6)
    trace.kernel(ELEMENTWISE, begin + 1295, 100, host=begin + 9)


def queued(trace: TraceBuilder, begin: float) -> None:
    """Only the second, small collective is waited for."""
    start_side(trace, begin)
    trace.collective(begin + 92, 600, host=begin + 5, elements=1 << 20)
    trace.collective(begin + 694, 50, host=begin + 6)
    wait_for_side(trace, begin + 7)
    trace.kernel(MATMUL, begin + 746, 100, host=begin + 10)


def starved_queue(trace: TraceBuilder, begin: float) -> None:
    """Both collectives could be over if the first had found SMs; both are needed."""
    start_side(trace, begin)
    trace.kernel(MATMUL, begin + 92, 1000, host=begin + 4, args=FILLS_ALL_SMS)
    trace.collective(begin + 1093, 200, host=begin + 5)
    wait_for_side(trace, begin + 6)
    trace.collective(begin + 1295, 200, host=begin + 9)
    wait_for_side(trace, begin + 10)
    trace.kernel(ELEMENTWISE, begin + 1497, 100, host=begin + 13)


def hardware_queue(trace: TraceBuilder, begin: float) -> None:
    """Kernels of few CTAs leave SMs free, but the collective starts only once the kernel issued before it has."""
    start_side(trace, begin)
    trace.kernel(MATMUL, begin + 92, 500, host=begin + 4, args=FEW_CTAS)
    trace.kernel(MATMUL, begin + 594, 20, host=begin + 5, args=FEW_CTAS)
    trace.collective(begin + 614, 200, host=begin + 6)
    wait_for_side(trace, begin + 7)
    trace.kernel(ELEMENTWISE, begin + 816, 100, host=begin + 10)


def launched_late(trace: TraceBuilder, begin: float) -> None:
    start_side(trace, begin)
    trace.collective(begin + 1092, 200, host=begin + 1085)
    wait_for_side(trace, begin + 1086)
    trace.kernel(MATMUL, begin + 1294, 100, host=begin + 1089)


def computation_launched_late(trace: TraceBuilder, begin: float) -> None:
    """The next kernel needs nothing, but is issued 200 us into the collective, and runs at once."""
    start_side(trace, begin)
    trace.collective(begin + 92, 500, host=begin + 5)
    trace.kernel(MATMUL, begin + 292, 600, host=begin + 292)


def tail(trace: TraceBuilder, begin: float) -> None:
    start_side(trace, begin)
    trace.collective(begin + 92, 200, host=begin + 5)


def needed_is_launched_late(trace: TraceBuilder, begin: float) -> None:
    """The next kernel needs a second collective, which the host issues long after the first has ended."""
    start_side(trace, begin)
    trace.collective(begin + 92, 200, host=begin + 5)
    trace.collective(begin + 1100, 4, host=begin + 1090, stream=SIDE + 1)
    wait_for_side(trace, begin + 1091)
    trace.wait(begin + 1093, stream=MAIN, event=900 + trace.record(begin + 1092), on_stream=SIDE + 1)
    trace.kernel(MATMUL, begin + 1108, 100, host=begin + 1094)


def gap(trace: TraceBuilder, begin: float) -> None:
    """Two kernels 4 us apart beside a collective that runs through."""
    start_side(trace, begin)
    trace.kernel(MATMUL, begin + 92, 100, host=begin + 4)
    trace.collective(begin + 94, 202, host=begin + 5)
    trace.kernel(MATMUL, begin + 196, 100, host=begin + 6)


def host_waits(trace: TraceBuilder, begin: float) -> None:
    """No event, but the host stands still until the collective has ended before it issues the next kernel."""
    start_side(trace, begin)
    trace.collective(begin + 92, 200, host=begin + 5)
    trace._add("cuda_runtime", "cudaStreamSynchronize", begin + 10, 290, tid=1, args={})
    trace.kernel(MATMUL, begin + 330, 100, host=begin + 310)


def in_a_graph(trace: TraceBuilder, begin: float) -> None:
    """One launch for all, and no event: a short collective between two kernels."""
    correlation = trace.call("cudaGraphLaunch", begin + 1)
    trace.kernel(MATMUL, begin + 50, 100, host=begin + 1, args={"correlation": correlation})
    trace.collective(begin + 152, 6, host=begin + 1, args={"correlation": correlation})
    trace.kernel(MATMUL, begin + 160, 100, host=begin + 1, args={"correlation": correlation})


def pushed_in_a_graph(trace: TraceBuilder, begin: float) -> None:
    """An all-gather + matmul: its rows go out on the stream that computes most, the peer's come a little later."""
    trace.kernel(MATMUL, begin + 20, 400, host=begin + 1)
    graph = {"correlation": trace.call("cudaGraphLaunch", begin + 2)}
    trace.kernel(MATMUL, begin + 422, 90, host=begin + 2, stream=SIDE, args=graph)
    trace.copy(PEER, begin + 422, 290, num_bytes=1 << 20, host=begin + 2, args=graph)
    trace.kernel(MATMUL, begin + 740, 90, host=begin + 2, stream=SIDE, args=graph)


CASES = {
    dependent: ("dependent", 200, "needs its result"),
    own_stream: ("own_stream", 200, "stream 7"),
    starved: ("starved", 200, "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT (132 CTAs)"),
    queued: ("queued", 650, "queued"),
    starved_queue: ("starved", 400, "The queue had waited 1.003 ms for SMs"),
    hardware_queue: ("hardware_queue", 200, "CUDA_DEVICE_MAX_CONNECTIONS"),
    launched_late: ("launched_late", 200, "The host issued it 995 us"),
    computation_launched_late: ("launched_late", 200, "The host issued the next computation"),
    needed_is_launched_late: ("launched_late", 204, "The host issued the next computation"),
    tail: ("tail", 200, "has no computation left"),
    gap: ("gap", 4, "needs no collective"),
    in_a_graph: ("dependent", 6, "had been launched and starts 2 us after"),
    pushed_in_a_graph: ("dependent", 200, "in one graph"),
    host_waits: ("dependent", 200, "The host waited for the GPU"),
}


@pytest.mark.parametrize(("build", "expected"), CASES.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_the_cause_is_named_with_its_time_and_evidence(
    build: Callable[[TraceBuilder, float], None], expected: tuple[str, float, str], tmp_path: Path
) -> None:
    cause, exposed_us, words = expected
    analysis = analyze(in_steps(build), tmp_path)
    for step in analysis.steps:
        intervals = [interval for interval in analysis.exposed if interval.step == step.step]
        assert step.exposed_us == pytest.approx(exposed_us, abs=2.1)
        assert sum(interval.duration_us for interval in intervals) == pytest.approx(step.exposed_us, abs=1e-6)
        of_cause = sum(interval.duration_us for interval in intervals if interval.cause == cause)
        assert of_cause >= 0.9 * step.exposed_us, intervals
    assert any(words in interval.evidence for interval in analysis.exposed)


def test_what_is_needed_is_queued_only_for_what_its_time_in_the_queue_exposes(tmp_path: Path) -> None:
    analysis = analyze(in_steps(queued), tmp_path)
    by_cause = Counter({interval.cause: 0.0 for interval in analysis.exposed})
    for interval in analysis.exposed:
        by_cause[interval.cause] += interval.duration_us / 3
    assert by_cause == {"queued": pytest.approx(602), "dependent": pytest.approx(48)}


def test_calls_between_which_only_matmuls_run_are_collectives_of_their_own(tmp_path: Path) -> None:
    analysis = analyze(in_steps(pushed_in_a_graph), tmp_path)
    assert [(each.step, each.name) for each in analysis.collectives] == [(step, "all_gather by copies") for step in range(3)]


@pytest.mark.parametrize(
    "reduce",
    [
        "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<c10::BFloat16, at::native::MeanOps<float>>>(int)",
        "counterpoint_add_blocks",
    ],
)
def test_a_sum_that_takes_all_sms_starves_the_computation_beside_it(reduce: str, tmp_path: Path) -> None:
    def build(trace: TraceBuilder, begin: float) -> None:
        trace.kernel(MATMUL, begin + 50, 100, host=begin + 1)
        trace.copy("Memcpy DtoD (Device -> Device)", begin + 60, 10, num_bytes=1 << 20, host=begin + 2, stream=SIDE)
        trace.copy(PEER, begin + 72, 60, num_bytes=1 << 20, host=begin + 3, stream=SIDE)
        trace.kernel(reduce, begin + 150, 80, host=begin + 4, stream=SIDE, args={"grid": [32768, 1, 1]})
        trace.copy(PEER, begin + 232, 60, num_bytes=1 << 20, host=begin + 5, stream=SIDE)
        trace.kernel(MATMUL, begin + 231, 100, host=begin + 6)

    analysis = analyze(in_steps(build), tmp_path)
    assert {(each.collective, each.transport) for each in analysis.collectives} == {("all_reduce", "copy_engine")}
    assert len(analysis.collectives) == 3
    assert {interval.cause for interval in analysis.exposed} == {"starved"}
    assert all(interval.duration_us == 80 for interval in analysis.exposed)
