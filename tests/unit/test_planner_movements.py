"""Collectives by copies and sums, beside their matmuls, and on streams of their own: what is seen, refused and predicted."""

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from tests.helpers.trace_builder import MATMUL, TraceBuilder

from counterpoint import Simulator, load_machine, measure
from counterpoint.controls import COPIES_TAKE_NO_SIZES, OverlapMatmul, OwnStream, Transport
from counterpoint.errors import PlanError
from counterpoint.integrations.paths import COPIES
from counterpoint.integrations.planned_paths import applied_in_job
from counterpoint.job import load_job
from counterpoint.metrics import ideal_in_pieces_us, ideal_us
from counterpoint.plan import LEAVE_IT, Directive, Match, Plan
from counterpoint.planner import tune
from counterpoint.planner.ideal import scale_of
from counterpoint.planner.idle_controls import review_plan
from counterpoint.planner.movements import propose_overlaps, propose_own_streams, propose_transports
from counterpoint.sim.matmul_pairs import MatmulPairs
from counterpoint.step import Collective, Copy, Dependency, Footprint, Kernel, Operation, Step, UnevenParts
from counterpoint.timeline import Interval
from counterpoint.traces import read_trace

H200 = load_machine("h200")
TRACES = Path(__file__).parents[2] / "examples" / "traces"
CUBLAS = Footprint(
    num_ctas=132, threads_per_cta=384, registers_per_thread=168, dynamic_shared_bytes=213_000, ctas_per_cluster=2
)
PLAIN = Footprint(num_ctas=132 * 16, threads_per_cta=128, registers_per_thread=32)
SIZES = (8192, 4096, 7168)


def matmul(*after: int, sizes: tuple[int, int, int] | None = SIZES, stream: int = 0, lone_us: float = 600.0) -> Kernel:
    return Kernel(
        name="matmul",
        stream=stream,
        footprint=CUBLAS,
        character="matmul",
        lone_us=lone_us,
        matmul_sizes=sizes,
        waits_for=waits(*after),
    )


def plain(*after: int) -> Kernel:
    return Kernel(name="norm", stream=0, footprint=PLAIN, character="streaming", lone_us=20.0, waits_for=waits(*after))


def collective(kind: str, *after: int, num_bytes: int = 64 << 20, stream: int = 1, **more: object) -> Collective:
    return Collective(
        name=kind,
        stream=stream,
        collective=kind,  # type: ignore[arg-type]
        num_bytes=num_bytes,
        group_size=2,
        lone_us=165.0,
        waits_for=waits(*after),
        **more,  # type: ignore[arg-type]
    )


def waits(*after: int) -> tuple[Dependency, ...]:
    return tuple(Dependency(operation=number) for number in after)


def step_of(*operations: Operation, device_name: str | None = None) -> Step:
    return Step(name="made up", num_ranks=2, operations=operations, device_name=device_name)


def plan_of(*operations: int, control: OverlapMatmul | OwnStream | Transport) -> Plan:
    match = Match(kind="communication", operations=operations)
    return Plan(directives=(Directive(match=match, controls=(control,), reason="test"),))


def gathering() -> Step:
    return step_of(plain(), collective("all_gather", 0), matmul(1), plain())


def scattering() -> Step:
    return step_of(matmul(sizes=(8192, 7168, 4096)), plain(), collective("reduce_scatter", 1), plain(2))


def makespan_us(step: Step, plan: Plan = LEAVE_IT) -> float:
    return measure(Simulator().run(step, H200, plan)).makespan_us


def spans_of(step: Step, plan: Plan) -> dict[int, Interval]:
    return {each.operation: each for each in Simulator().run(step, H200, plan).intervals}


# Which collective belongs to which matmul


def test_an_all_gather_goes_with_all_matmuls_that_read_it() -> None:
    memset = Copy(name="Memset", stream=0, direction="set", num_bytes=4, lone_us=1.0)
    step = step_of(
        plain(), collective("all_gather", 0), msgspec.structs.replace(memset, waits_for=waits(1)), matmul(), matmul()
    )
    pair = MatmulPairs(step).found[1]
    assert (pair.matmuls, pair.follower) == ((3, 4), None)


def test_a_reduce_scatter_goes_with_the_last_matmul_before_it_over_small_kernels() -> None:
    step = step_of(matmul(), matmul(sizes=(8192, 7168, 4096)), plain(), plain(), collective("reduce_scatter", 3), plain(4))
    assert MatmulPairs(step).found[4].matmuls == (1,)


def test_a_collective_on_the_computations_own_stream_has_its_pair_too() -> None:
    step = step_of(plain(), collective("all_to_all", stream=0), matmul(), plain())
    assert MatmulPairs(step).found[1].matmuls == (2,)


@pytest.mark.parametrize(
    ("operations", "reason"),
    [
        ((plain(), collective("all_gather", 0), plain(), matmul(1)), "computation continues beside it"),
        ((plain(), collective("all_gather", 0)), "nothing in the step waits for it"),
        (
            (plain(), collective("all_gather", 0), plain(1), plain(), plain(), plain(), matmul()),
            "no matmul comes directly after",
        ),
        ((plain(), collective("reduce_scatter", 0), plain(1)), "no matmul comes directly before it"),
        ((plain(), collective("all_gather", 0), matmul(1, sizes=(8192, 1000, 512))), "no matmul comes directly after it"),
        ((plain(), collective("all_gather", 0, num_bytes=0), matmul(1)), "its size is unknown"),
        ((plain(), collective("broadcast", 0), matmul(1)), "no operator joins it"),
        ((plain(), collective("all_gather", 0, transport="copy_engine"), matmul(1)), "copy engines already move it"),
        (
            (plain(), collective("all_gather", 0), matmul(1, sizes=None), collective("reduce_scatter", 2), plain(3)),
            "its matmul is already joined with another collective",
        ),
    ],
)
def test_what_stands_in_the_way_of_a_pair_is_said(operations: tuple[Operation, ...], reason: str) -> None:
    (found,) = MatmulPairs(step_of(*operations)).obstacles.values()
    assert reason in found


# A collective beside its matmul


@pytest.mark.parametrize("make", [gathering, scattering])
def test_all_but_what_was_measured_to_stay_exposed_is_hidden(make: object) -> None:
    step = make()  # type: ignore[operator]
    (index,) = MatmulPairs(step).found
    saved_us = makespan_us(step) - makespan_us(step, plan_of(index, control=OverlapMatmul()))
    exposed_us = 21.0 if index == 1 else 33.0
    assert 165 - exposed_us - 15 <= saved_us <= 165 - exposed_us + 15


def test_the_copies_run_beside_the_matmul_and_end_before_what_needs_all_of_it() -> None:
    spans = {
        each.operation: each for each in Simulator().run(scattering(), H200, plan_of(2, control=OverlapMatmul())).intervals
    }
    assert spans[2].start_us < spans[0].end_us < spans[2].end_us <= spans[3].start_us
    spans = {
        each.operation: each for each in Simulator().run(gathering(), H200, plan_of(1, control=OverlapMatmul())).intervals
    }
    assert spans[1].start_us < spans[2].start_us < spans[1].end_us <= spans[3].start_us


def test_inferred_sizes_come_to_about_the_same_as_known_ones() -> None:
    plan = plan_of(1, control=OverlapMatmul())
    unknown = step_of(plain(), collective("all_gather", 0), matmul(1, sizes=None), plain())
    assert makespan_us(unknown, plan) == pytest.approx(makespan_us(gathering(), plan), rel=0.02)


def test_an_overlap_is_proposed_where_it_pays_and_refused_where_the_matmul_is_too_short_or_blocks_too_small() -> None:
    (candidate,) = propose_overlaps(gathering(), H200).candidates
    assert candidate.directives[0].match.operations == (1,)
    short = step_of(plain(), collective("all_gather", 0), matmul(1, sizes=(8192, 4096, 64), lone_us=8.0))
    (refused,) = propose_overlaps(short, H200).refusals
    assert not propose_overlaps(short, H200).candidates
    assert "much shorter than its data's 165 us" in refused.reason
    small = step_of(plain(), collective("all_gather", 0, num_bytes=1 << 20), matmul(1, sizes=(1024, 512, 512)))
    (refused,) = propose_overlaps(small, H200).refusals
    assert "below 2 MiB" in refused.reason


def test_an_overlap_without_a_matmul_is_refused_in_one_line() -> None:
    step = step_of(plain(), collective("reduce_scatter", 0), plain(1))
    with pytest.raises(PlanError, match=r"cannot apply to operation 1 .*no matmul comes directly before"):
        Simulator().run(step, H200, plan_of(1, control=OverlapMatmul()))


def test_what_is_overlapped_is_not_offered_to_copy_engines_and_a_transport_beside_it_is_idle() -> None:
    overlap = plan_of(1, control=OverlapMatmul())
    both = Plan(directives=(*overlap.directives, *plan_of(1, control=Transport(transport="copy_engine")).directives))
    assert any("has no effect" in note for note in review_plan(gathering(), H200, both))
    assert makespan_us(gathering(), both) == makespan_us(gathering(), overlap)


def test_where_copies_are_best_alone_operators_still_take_what_has_a_matmul() -> None:
    """One gather runs beside a matmul that leaves it no SM; another one stands alone before its matmul."""
    beside = collective("all_gather", 0, num_bytes=256 << 20), matmul(sizes=None), matmul(1, sizes=None)
    step = step_of(matmul(), *beside, plain(), collective("all_gather", 4), matmul(5))
    tuning = tune(step, H200, Simulator())
    times_us = {trial.label: trial.makespan_us for trial in tuning.trials}
    both = times_us["copy engines + overlap with matmuls"]
    assert both < times_us["copy engines"] < times_us["overlap with matmuls"]
    assert [control.tag for each in tuning.plan.directives for control in each.controls] == ["transport", "overlap_matmul"]


# Copies and a sum


def test_a_sum_waits_for_an_sm_and_the_copies_do_not() -> None:
    """A matmul holds every SM from the start; the blocks arrive beside it, and the sum comes when its CTAs retire."""
    alone = step_of(collective("reduce_scatter", stream=1))
    beside = step_of(matmul(lone_us=2000.0), collective("reduce_scatter", stream=1))
    plan = plan_of(0, control=Transport(transport="copy_engine"))
    alone_us = makespan_us(alone, plan)
    spans = spans_of(beside, plan_of(1, control=Transport(transport="copy_engine")))
    assert alone_us < 300
    assert spans[1].start_us < alone_us
    assert spans[1].end_us >= spans[0].end_us
    # the copies draw on memory and take no SM, so the matmul hardly notices
    assert spans[0].duration_us == pytest.approx(2000.0, rel=0.02)


def test_three_all_reduces_are_in_flight_and_reduce_scatters_follow_each_other() -> None:
    def starts_us(kind: str) -> list[float]:
        step = step_of(matmul(lone_us=5000.0), *(collective(kind) for _ in range(4)))
        found = Simulator().run(step, H200, plan_of(1, 2, 3, 4, control=Transport(transport="copy_engine")))
        return [each.start_us for each in sorted(found.intervals, key=lambda each: each.operation)][1:]

    assert [start_us < 1000 for start_us in starts_us("all_reduce")] == [True, True, True, False]
    assert [start_us < 1000 for start_us in starts_us("reduce_scatter")] == [True, False, False, False]


# A stream of its own


def own_stream_step(*, is_needed: bool = True, device_name: str | None = None) -> Step:
    needing = matmul(1) if is_needed else matmul()
    attention = msgspec.structs.replace(plain(), name="attention", character="attention", lone_us=600.0)
    return step_of(matmul(), collective("all_reduce", stream=0), attention, needing, device_name=device_name)


def test_a_collective_that_only_a_later_kernel_needs_moves_off_the_computations_stream() -> None:
    step = own_stream_step()
    tuning = tune(step, H200, Simulator())
    assert ("own_stream",) in {trial.families for trial in tuning.trials}
    plan = plan_of(1, control=OwnStream())
    spans = spans_of(step, plan)
    assert spans[1].stream != 0
    assert spans[0].end_us <= spans[1].start_us
    assert spans[2].start_us < spans[1].end_us <= spans[3].start_us
    assert makespan_us(step, plan) < makespan_us(step)


def test_collectives_of_a_group_follow_each_other_on_its_separate_stream() -> None:
    first, second = (collective("all_reduce", stream=0) for _ in range(2))
    other = msgspec.structs.replace(collective("all_reduce", stream=0), process_group="other")
    step = step_of(matmul(), first, second, other, matmul(1, 2, 3))
    spans = spans_of(step, plan_of(1, 2, 3, control=OwnStream()))
    assert spans[1].end_us <= spans[2].start_us
    assert spans[3].start_us < spans[1].end_us, "the other group has a stream of its own"
    assert len({spans[number].stream for number in range(4)}) == 3


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (own_stream_step(device_name="NVIDIA H200"), "not which kernel needs the result"),
        (own_stream_step(is_needed=False), "the step does not say what needs the result"),
        (gathering(), "no collective runs on a computation stream"),
    ],
)
def test_where_nothing_says_what_needs_a_collective_it_stays_with_the_reason(step: Step, reason: str) -> None:
    found = propose_own_streams(step, H200)
    assert not found.candidates
    assert reason in found.refusals[0].reason


# The two ideals


def test_cut_into_pieces_a_chain_takes_the_longer_of_both_instead_of_their_sum() -> None:
    step, lone_us = gathering(), [20.0, 165.0, 600.0, 20.0]
    assert ideal_us(step, lone_us) == 805.0
    assert ideal_in_pieces_us(step, lone_us) == 640.0
    assert ideal_in_pieces_us(step, [20.0, 1650.0, 600.0, 20.0]) == 1650.0


def test_no_ideal_is_above_what_was_traced_and_an_overlap_may_pass_the_first_but_not_the_second() -> None:
    plan = plan_of(1, control=OverlapMatmul())
    scale = scale_of(gathering(), H200, [plan])
    planned_us = makespan_us(gathering(), plan)
    assert scale.in_pieces_us <= planned_us < scale.ideal_us
    assert scale.ideal_of(plan) == scale.in_pieces_us
    assert scale.ideal_of(LEAVE_IT) == scale.ideal_us
    traced = scale_of(gathering(), H200, traced_us=600.0)
    assert (traced.ideal_us, traced.in_pieces_us) == (600.0, 600.0)
    assert traced.inexact_us == pytest.approx(scale_of(gathering(), H200).ideal_us)


@pytest.mark.parametrize("kind", ["kernels", "all_to_all"])
def test_streams_that_share_the_gpu_or_the_link_are_not_below_the_ideal(kind: str) -> None:
    footprint = msgspec.structs.replace(PLAIN, num_ctas=66)
    small = Kernel(name="small", stream=0, footprint=footprint, character="matmul", flops=1e10)
    large = Collective(name="c", stream=0, collective="all_to_all", num_bytes=10**9, group_size=2)
    operation: Operation = small if kind == "kernels" else large
    step = step_of(operation, msgspec.structs.replace(operation, stream=1))
    lone_us = Simulator().lone_times_us(step, H200)
    scale = scale_of(step, H200)
    assert max(lone_us) <= scale.ideal_us <= makespan_us(step) < sum(lone_us)
    assert scale.in_pieces_us <= scale.ideal_us


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "moe", "tp"])
def test_no_ideal_of_a_shipped_trace_is_above_its_makespan(name: str) -> None:
    traced = read_trace(TRACES / f"{name}.rank0.json.gz")
    traced_us = measure(traced.timeline).makespan_us
    scale = scale_of(traced.step, H200, traced_us=traced_us)
    assert scale.in_pieces_us <= scale.ideal_us <= traced_us


def test_all_to_alls_whose_call_gives_sizes_are_not_offered_to_copies_and_the_others_are() -> None:
    """No integration moves them, so a plan of them could not be applied to any job."""
    parts = UnevenParts(group_rank=0, sent_bytes=(1 << 20, 63 << 20), received_bytes=(1 << 20, 20 << 20))
    sized, even = collective("all_to_all", 0, parts=parts), collective("all_to_all", 0)
    found = propose_transports(step_of(matmul(), sized, even, matmul(1, 2)), H200)
    assert [each.match.operations for candidate in found.candidates for each in candidate.directives] == [(2,)]
    assert [each.reason for each in found.refusals] == [COPIES_TAKE_NO_SIZES]


LISTS = {"In split size": "[16384, 8192]", "Out split size": "[16384, 20480]"}


@pytest.mark.parametrize(
    ("name", "lists", "is_offered"),
    [
        ("all_to_allv", LISTS, False),
        ("all_to_all", LISTS, False),  # torch's all_to_all, which takes lists of tensors
        ("all_to_allv", dict.fromkeys(LISTS, "[16384, ...]"), False),
        ("all_to_allv", LISTS | {"In split size": "[]"}, False),
        ("all_to_allv", {}, False),
        ("all_to_allv", dict.fromkeys(LISTS, "[]"), True),  # torch 2.11 calls those without sizes so, too
        ("all_to_all", {}, True),
    ],
)
@pytest.mark.parametrize("world_size", [2, None])
def test_a_traced_all_to_all_that_gives_sizes_is_not_offered_even_if_the_sizes_are_unknown(
    name: str, lists: dict[str, str], is_offered: bool, world_size: int | None, tmp_path: Path
) -> None:
    trace = TraceBuilder(world_size=world_size)
    for number in range(3):
        begin = 10_000.0 * number
        trace.step(begin, begin + 9_000)
        trace.kernel(MATMUL, begin + 100, 100)
        trace.collective(begin + 300, 300, elements=32 << 20, args={"Collective name": name, "Group size": 2} | lists)
    step = read_trace(trace.write(tmp_path)).step
    found = propose_transports(step, H200)
    assert (bool(found.candidates), [each.reason for each in found.refusals]) == (
        is_offered,
        [] if is_offered else [COPIES_TAKE_NO_SIZES],
    )
    plan = Plan(directives=(Directive(match=Match(collective="all_to_all"), controls=(COPIES,), reason="test"),))
    assert applied_in_job(plan, step) == (COPIES,) * is_offered


@pytest.mark.parametrize(("lone_us", "is_refused"), [(None, False), (300.0, False), (5_000.0, True)])
def test_a_traced_collective_that_only_waits_for_a_late_rank_is_not_moved(lone_us: float | None, is_refused: bool) -> None:
    step = step_of(matmul(), replace(collective("all_gather", 0), lone_us=lone_us), matmul(1), device_name="NVIDIA H200")
    found = propose_transports(step, H200)
    assert bool(found.refusals) == is_refused
    assert all("far longer than its bytes need: 5 ms instead of " in each.reason for each in found.refusals)
    said = any("far longer" in each.reason for each in propose_overlaps(step, H200).refusals)
    assert said == is_refused
    described = replace(step, device_name=None)  # who states a time in a workload means it
    assert not propose_transports(described, H200).refusals


def test_the_rank_that_waits_for_another_in_every_step_is_promised_nothing() -> None:
    job = load_job(str(TRACES.parents[1] / "tests" / "data" / "known_causes" / "slow_rank.rank0.json.gz"))
    assert not tune(job.step, job.machine, Simulator()).plan.directives
