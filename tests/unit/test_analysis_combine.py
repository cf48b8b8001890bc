"""Ranks together: waits, causes, sizes, means and the headline, on traces whose answer is known by construction."""

from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from counterpoint.analysis.combine import combine
from counterpoint.analysis.gate import parse_condition, violations
from counterpoint.analysis.headline import with_recoverable
from counterpoint.analysis.values import Analysis, Cause, ExposedInterval, RankAnalysis, Recoverable, TracedCollective
from counterpoint.errors import AnalysisError
from counterpoint.step import CollectiveKind
from helpers.rank_builder import MIB, rank_of, rank_of_raw_trace, step_of, traced

TRACES = Path(__file__).parents[2] / "examples" / "traces"


def pair(**second: object) -> list[RankAnalysis]:
    """Rank 1 comes 100 us late to the second of three all-reduces; its clock is 5000 us ahead."""
    first = [traced(0, 0, 0, 50), traced(0, 1, 200, 350), traced(0, 2, 500, 550)]
    ahead = [traced(1, 0, 5000, 5050), traced(1, 1, 5300, 5350, before="ran a matmul"), traced(1, 2, 5500, 5550)]
    return [rank_of(0, first), rank_of(1, ahead, **second)]  # type: ignore[arg-type]


def exposed_by_cause(analysis: Analysis, rank: int) -> dict[Cause, float]:
    sums: dict[Cause, float] = {}
    for interval in analysis.exposed:
        if interval.rank == rank:
            sums[interval.cause] = sums.get(interval.cause, 0.0) + interval.duration_us
    return sums


def test_waits_are_those_of_tracelens_on_real_ranks() -> None:
    # TraceLens 171dd74 on the same files: 8003.5 and 9042.5 us, and 38 and 19 last arrivals, on the host's one clock
    waits = combine([rank_of_raw_trace(TRACES / f"ddp.rank{rank}.json.gz", rank) for rank in (0, 1)]).waits

    assert [w.waited_us for w in waits] == pytest.approx([8003.5, 9042.5], rel=2e-3)
    assert [(w.times_last, w.times_first, w.num_collectives) for w in waits] == [(38, 19, 57), (19, 38, 57)]


def test_the_wait_for_a_later_rank_is_that_ranks() -> None:
    analysis = combine(pair())

    assert exposed_by_cause(analysis, 0) == pytest.approx({"dependent": 150.0, "slow_rank": 100.0})
    assert exposed_by_cause(analysis, 1) == pytest.approx({"dependent": 150.0})
    wait = next(interval for interval in analysis.exposed if interval.cause == "slow_rank")
    assert (wait.start_us, wait.end_us, wait.other_rank) == (200.0, 300.0, 1)
    assert "Rank 1 reached all_reduce of 1 MiB 100 us later than rank 0" in wait.evidence
    assert "ran a matmul" in wait.evidence
    skew = analysis.skews[1]
    assert (skew.first_rank, skew.last_rank, skew.skew_us, skew.latency_us) == (0, 1, 100.0, 50.0)
    assert dict(skew.waits_us) == {0: 100.0, 1: 0.0}
    assert [total.share for total in analysis.causes] == pytest.approx([0.75, 0.25])


def test_of_an_uneven_split_only_what_is_above_the_mean_is_uneven() -> None:
    def spans(rank: int) -> list[TracedCollective]:
        start = (0.0, 60.0)[rank]
        uneven = traced(
            rank, 0, start, 260, collective="all_to_all", imbalance=(1.6, 1.2)[rank], num_bytes=(3, 1)[rank] * MIB
        )
        return [uneven, traced(rank, 1, 300, 310, collective="all_to_all", imbalance=1.0)]

    analysis = combine([rank_of(rank, spans(rank)) for rank in (0, 1)])

    assert exposed_by_cause(analysis, 0) == pytest.approx({"slow_rank": 60.0, "uneven": 75.0, "dependent": 135.0})
    assert exposed_by_cause(analysis, 1) == pytest.approx({"uneven": 75.0, "dependent": 135.0})
    assert analysis.sizes[0].imbalance == 1.6
    assert analysis.sizes[0].num_bytes == 2 * MIB


@pytest.mark.parametrize(
    ("kind", "factor"),
    [("all_reduce", 1.5), ("all_gather", 0.75), ("reduce_scatter", 0.75), ("all_to_all", 0.75), ("broadcast", 1.0)],
)
def test_bus_bandwidth_is_that_of_nccl_tests_once_all_had_come(kind: str, factor: float) -> None:
    spans = ((0.0, 200.0), (100.0, 200.0), (30.0, 200.0), (90.0, 200.0))
    timer = [(900.0, 910.0)] * 4
    ranks = [
        rank_of(
            rank,
            [
                traced(rank, n, *s[rank], collective=(kind, "all_reduce")[n], num_bytes=(MIB, 64)[n], group_size=4)
                for n, s in enumerate((spans, timer))
            ],
            world_size=4,
        )
        for rank in range(4)
    ]
    size = next(size for size in combine(ranks).sizes if size.most_us == 100.0)

    assert size.bus_bytes_per_s == pytest.approx(factor * MIB / 100e-6)
    alone = next(size for size in combine(ranks[:1]).sizes if size.most_us == 200.0)
    assert alone.bus_bytes_per_s == pytest.approx(factor * MIB / 200e-6)


def random_job(seed: int) -> list[RankAnalysis]:
    """Three ranks, collectives of several kinds and groups, exposed in pieces with causes."""
    random = Random(seed)
    causes: list[Cause] = ["dependent", "starved", "own_stream", "queued", "launched_late", "tail"]
    held: list[list[TracedCollective]] = [[], [], []]
    exposed: list[list[ExposedInterval]] = [[], [], []]
    now = 0.0
    for number in range(random.randint(3, 20)):
        kind = random.choice(["all_reduce", "all_to_all", "all_gather"])
        last = now + random.uniform(1, 300)
        end = last + random.uniform(20, 200)
        for rank in range(3):
            start = random.uniform(now, last)
            more = {"collective": kind, "group_size": 3, "step": 1 + number // 4, "module": random.choice(["", "layers.0"])}
            imbalance = random.uniform(1, 2) if kind == "all_to_all" else 0.0
            held[rank].append(traced(rank, number, start, end + random.random(), imbalance=imbalance, **more))
            begin = random.uniform(start, end)
            exposed[rank].append(
                ExposedInterval(
                    rank=rank,
                    step=1 + number // 4,
                    start_us=begin,
                    end_us=random.uniform(begin, end),
                    collective=number,
                    cause=random.choice(causes),
                    evidence="As drawn.",
                )
            )
        now = end + 1
    return [rank_of(r, held[r], exposed=exposed[r], world_size=3) for r in range(3)]


@given(st.integers(0, 2**32), st.permutations([0, 1, 2]))
def test_causes_and_breakdowns_add_up_and_no_order_of_ranks_matters(seed: int, order: list[int]) -> None:
    ranks = random_job(seed)
    analysis = combine(ranks)
    num_steps = sum(len(rank.steps) for rank in ranks)

    assert combine([ranks[place] for place in order]) == analysis
    assert sum(total.exposed_us for total in analysis.causes) == pytest.approx(analysis.exposed_us, abs=1e-6)
    assert sum(total.share for total in analysis.causes) == pytest.approx(1.0)
    for aspect in ("collective", "process_group", "stream", "module", "phase", "transport"):
        rows = [row for row in analysis.breakdowns if row.aspect == aspect]
        assert sum(row.exposed_us for row in rows) == pytest.approx(analysis.exposed_us, abs=1e-6)
        assert num_steps * sum(row.num_collectives for row in rows) == pytest.approx(sum(len(r.collectives) for r in ranks))
    for rank in ranks:
        traced_us = sum(interval.duration_us for interval in rank.exposed)
        found_us = sum(interval.duration_us for interval in analysis.exposed if interval.rank == rank.rank)
        assert found_us == pytest.approx(traced_us, abs=1e-6)
    assert all(wait_us >= 0 for skew in analysis.skews for _, wait_us in skew.waits_us)


@given(st.integers(0, 2**32), st.floats(-1e6, 1e6))
def test_no_shift_of_a_ranks_clock_matters(seed: int, shift_us: float) -> None:
    ranks = random_job(seed)
    moved = [{"start_us": c.start_us + shift_us, "end_us": c.end_us + shift_us} for c in ranks[1].collectives]
    collectives = [replace(c, **times) for c, times in zip(ranks[1].collectives, moved, strict=True)]
    exposed = [replace(i, start_us=i.start_us + shift_us, end_us=i.end_us + shift_us) for i in ranks[1].exposed]
    before, after = combine(ranks), combine([ranks[0], rank_of(1, collectives, exposed=exposed, world_size=3), ranks[2]])

    assert [w.waited_us for w in after.waits] == pytest.approx([w.waited_us for w in before.waits], abs=1e-3)
    assert [(t.cause, t.num_intervals) for t in after.causes] == [(t.cause, t.num_intervals) for t in before.causes]
    assert [i.start_us for i in after.exposed] == pytest.approx([i.start_us for i in before.exposed], abs=1e-3)


def test_a_gap_that_needs_nothing_of_a_late_collective_stays_a_gap() -> None:
    first, second = pair()
    gaps = [replace(interval, cause="gap") for interval in first.exposed]

    assert exposed_by_cause(combine([replace(first, exposed=tuple(gaps)), second]), 0) == pytest.approx({"gap": 250.0})


def test_means_are_over_steady_steps() -> None:
    times = ((0, 900, 1), (1000, 1100, 2), (2000, 2150, 3), (2200, 2250, 3))
    collectives = [traced(0, number, start, end, step=step) for number, (start, end, step) in enumerate(times)]
    analysis = combine([rank_of(0, collectives, steady=(2, 3))])

    assert (analysis.exposed_us, analysis.step_us) == (150.0, 1000.0)
    assert analysis.causes[0].exposed_us == 150.0
    row = analysis.breakdowns[0]
    assert (row.num_collectives, row.num_bytes, row.communication_us) == (1.5, 1.5 * MIB, 150.0)


def test_ranks_that_do_not_belong_are_named_and_left_out() -> None:
    other_job = rank_of(1, [], world_size=8, path="other.json")
    again = rank_of(0, [], path="again.json")
    analysis = combine([*pair(), other_job, again])

    assert [rank.path for rank in analysis.ranks] == ["rank0.json", "rank1.json"]
    assert any("other.json comes from a job of 8 ranks" in problem for problem in analysis.problems)
    assert any("rank0.json and again.json are both of rank 0" in problem for problem in analysis.problems)


def test_traces_of_different_jobs_have_no_common_verdict() -> None:
    def job(rank: int, kind: CollectiveKind, members: tuple[int, ...] = (0, 1)) -> RankAnalysis:
        calls = [traced(rank, n, 200 * n, 200 * n + 50, collective=kind, group_ranks=members) for n in range(4)]
        return rank_of(rank, calls)

    mixed, of_one = (combine([job(0, "all_reduce"), job(1, kind)]) for kind in ("all_gather", "all_reduce"))
    stages = combine([job(0, "all_reduce", (0, 2)), job(1, "all_gather", (1, 3))])
    assert (of_one.untrusted, stages.untrusted) == ("", "")
    assert "rank0.json and rank1.json are of ranks 0 and 1, which ran different collectives" in mixed.untrusted
    assert mixed.headline.verdict == f"UNKNOWN: {mixed.untrusted}"
    for compared in ((mixed, of_one), (of_one, mixed)):
        with pytest.raises(AnalysisError, match=r"cannot judge these traces: rank0\.json"):
            violations(compared[0], [parse_condition("step > baseline")], compared[1])


def test_a_rank_that_got_its_number_later_has_it_everywhere() -> None:
    first, second = pair()
    nameless = rank_of(-1, [replace(c, rank=-1) for c in second.collectives], world_size=2)

    assert exposed_by_cause(combine([first, replace(nameless, rank=1)]), 1) == exposed_by_cause(combine(pair()), 1)


def test_missing_ranks_are_named_wherever_figures_depend_on_them() -> None:
    ranks = [rank_of(r, [traced(r, 0, 0, 50, group_size=4)], world_size=4) for r in (0, 2)]
    analysis = combine(ranks)

    assert analysis.missing_ranks == (1, 3)
    assert "2 of 4 ranks" in analysis.headline.verdict
    assert "of the 2 of 4 ranks that were given. Time spent waiting for ranks 1, 3" in analysis.problems[0]
    assert any("Add the traces of ranks 1, 3" in line for line in analysis.headline.next)


def test_the_verdict_says_what_is_exposed_and_mainly_why() -> None:
    headline = combine(pair()).headline

    assert headline.verdict == (
        "20.0 % of the step is exposed communication (200 us of 1 ms, 2 ranks), "
        "mainly because the next kernel needs the result."
    )
    assert headline.why[1].startswith("Ranks wait for slower ones: 50 us (25.0 %) of the exposed time, mostly in all_reduce")


@pytest.mark.parametrize(
    ("collectives", "exposed", "begins"),
    [
        ([], [], "No communication in rank 0"),
        ([traced(0, 0, 0, 100)], [], "Nothing is exposed: computation hides all 100 us of communication"),
    ],
)
def test_the_verdict_where_nothing_is_exposed(
    collectives: list[TracedCollective], exposed: list[ExposedInterval], begins: str
) -> None:
    analysis = combine([rank_of(0, collectives, exposed=exposed, world_size=1)])

    assert analysis.headline.verdict.startswith(begins)
    assert analysis.causes == ()


def test_a_trace_without_communication_may_have_kernels_that_no_rule_knows() -> None:
    (line,) = combine([rank_of(0, [], world_size=1)]).headline.next
    assert "--rules" in line


def test_communication_of_steps_that_were_left_out_is_in_the_verdict() -> None:
    rank = rank_of(0, [traced(0, 0, 0, 100)], world_size=1)
    silent = step_of(0, 2, [], [], is_steady=True)
    headline = combine([replace(rank, steps=(replace(rank.steps[0], is_steady=False), silent))]).headline
    assert headline.verdict == (
        "UNKNOWN: the steady steps of rank 0 do not communicate, but 1 of all 2 steps do, for 100 us, and were left out."
    )
    assert headline.next == ("If the job accumulates gradients, call profiler.step() once per optimizer step.",)


def test_communication_that_nothing_hides_is_exposed_however_long_the_step_is() -> None:
    rank = rank_of(0, [traced(0, 0, 0, 15)], world_size=1)
    long = replace(rank, steps=(replace(rank.steps[0], end_us=46_150.0),))

    assert combine([long]).headline.verdict == (
        "Less than 0.1 % of the step is exposed communication (15 us of 46.15 ms, rank 0), "
        "mainly because the next kernel needs the result."
    )


def test_what_cannot_be_known_is_unknown() -> None:
    ranks = [rank_of(0, [traced(0, 0, 0, 100)], world_size=1)]
    wrong = combine([RankAnalysis(path="a", rank=0, steps=ranks[0].steps, collectives=ranks[0].collectives)])
    assert wrong.headline.verdict.startswith("UNKNOWN: 10.0 % of the step is exposed")
    assert "add up to 0.000 us, but 100.000 us are exposed" in wrong.headline.verdict

    empty = combine([RankAnalysis(path="a", rank=0, problems=("No GPU operation.",))])
    assert empty.headline.verdict.startswith("UNKNOWN: the traces hold no step")
    assert empty.headline.why == ("No GPU operation.",)

    with pytest.raises(AnalysisError, match="There is no trace to analyze"):
        combine([])


def test_recoverable_time_counts_each_cause_once() -> None:
    entries = [
        Recoverable(causes=("dependent",), what="Prefetch one layer earlier", recovers_us=60.0),
        Recoverable(causes=("dependent", "slow_rank"), what="Use copy engines", recovers_us=120.0),
        Recoverable(causes=("slow_rank",), what="Balance the ranks", recovers_us=40.0, is_within_replay_error=True),
    ]
    analysis = with_recoverable(combine(pair()), entries)

    assert [entry.recovers_us for entry in analysis.recoverable] == [120.0, 60.0, 40.0]
    assert analysis.unrecoverable_us == pytest.approx(80.0)  # of 150 us dependent 120 are recovered, of 50 slow_rank none
    assert analysis.headline.next == (
        "Use copy engines: recovers 120 us per step (12.0 % of the step), simulated.",
        "Prefetch one layer earlier: recovers 60 us per step (6.0 % of the step), simulated.",
    )
