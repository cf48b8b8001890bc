"""Collectives are matched and clocks aligned across ranks, whatever the clocks say and wherever a profile begins."""

from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from counterpoint.analysis.alignment import align_clocks, describe_drifts
from counterpoint.analysis.combine import combine
from counterpoint.analysis.matching import match_collectives, match_sequences
from counterpoint.analysis.rank import analyze_rank
from counterpoint.analysis.values import RankAnalysis, TracedCollective
from counterpoint.traces.formats import read_activity
from helpers.rank_builder import MIB, rank_of, rank_of_raw_trace, traced

TRACES = Path(__file__).parents[2] / "examples" / "traces"
JITTER_US = 5.0


def job(num_ranks: int, num_collectives: int, seed: int, drift: float = 0.0) -> tuple[list[RankAnalysis], list[float]]:
    """Ranks that come to each collective at random times and end within the jitter; and each clock's true offset."""
    random = Random(seed)
    offsets = [0.0, *(random.uniform(-1e6, 1e6) for _ in range(num_ranks - 1))]
    collectives: list[list[TracedCollective]] = [[] for _ in range(num_ranks)]
    now = 0.0
    for number in range(num_collectives):
        arrivals = [now + random.uniform(10, 400) for _ in range(num_ranks)]
        end = max(arrivals) + random.uniform(100, 200)
        for rank, arrival in enumerate(arrivals):
            scale = 1 + (drift if rank else 0.0)
            own_end = end + random.uniform(0, JITTER_US)
            start_us, end_us = (scale * time - offsets[rank] for time in (arrival, own_end))
            size = MIB * random.choice([1, 1, 1, 4]) if rank == 0 else collectives[0][number].num_bytes
            collectives[rank].append(traced(rank, number, start_us, end_us, num_bytes=size, group_size=num_ranks))
        now = end
    return [rank_of(rank, held, world_size=num_ranks) for rank, held in enumerate(collectives)], offsets


def without(analysis: RankAnalysis, places: Sequence[int]) -> RankAnalysis:
    """The rank as a profile that lacks some collectives has it; what is left is numbered anew."""
    kept = [c for place, c in enumerate(analysis.collectives) if place not in places]
    kept = [
        traced(c.rank, n, c.start_us, c.end_us, num_bytes=c.num_bytes, group_size=c.group_size) for n, c in enumerate(kept)
    ]
    return rank_of(analysis.rank, kept, world_size=analysis.world_size)


@given(st.integers(2, 5), st.integers(1, 40), st.integers(0, 2**32))
def test_clocks_are_found_whatever_they_are(num_ranks: int, num_collectives: int, seed: int) -> None:
    ranks, offsets = job(num_ranks, num_collectives, seed)
    shared, problems = match_collectives(ranks)
    clocks, drifts = align_clocks(ranks, shared)

    assert len(shared) == num_collectives
    assert problems == drifts == ()
    for rank, offset in enumerate(offsets):
        assert clocks[rank].offset_us == pytest.approx(offset, abs=JITTER_US + 1e-6)


def test_small_collectives_set_the_clock_where_large_ones_end_apart() -> None:
    large = [(1000.0 * n, 1000.0 * n + 700) for n in range(20)]
    first = [traced(0, n, start, end) for n, (start, end) in enumerate(large)]
    second = [traced(1, n, start, end + 40) for n, (start, end) in enumerate(large)]
    first.append(traced(0, 20, 30_000, 30_010, num_bytes=64))
    second.append(traced(1, 20, 30_000, 30_010, num_bytes=64))

    ranks = [rank_of(0, first), rank_of(1, second)]
    clocks, _ = align_clocks(ranks, match_collectives(ranks)[0])

    assert clocks[1].offset_us == pytest.approx(0.0, abs=1.0)


def grid_job(offsets: Sequence[float], lacking: int | None) -> list[RankAnalysis]:
    """Four ranks in pairs, by two dimensions; six steps alike to 5 us; rank `lacking` was not profiled in the first."""
    random = Random(3)
    collectives: list[list[TracedCollective]] = [[] for _ in offsets]
    now = 0.0
    for step in range(6):
        for _ in range(6):
            for name, pairs in (("tp", ((0, 1), (2, 3))), ("dp", ((0, 2), (1, 3)))):
                arrivals = [now + 300 + random.uniform(0, 5) for _ in offsets]
                now += 600
                for pair in pairs:
                    for rank in pair:
                        start, end = arrivals[rank] + offsets[rank], now + random.uniform(0, 0.5) + offsets[rank]
                        if rank != lacking or step:
                            more = {"process_group": name, "group_ranks": pair, "step": step}
                            collectives[rank].append(traced(rank, len(collectives[rank]), start, end, **more))
    return [rank_of(rank, held, world_size=4) for rank, held in enumerate(collectives)]


@pytest.mark.parametrize("lacking", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("offsets", [(0.0, 0.0, 0.0, 0.0), (0.0, 5e6, 3e6, 1e6)])
def test_groups_of_a_regular_job_are_matched_with_the_clocks_that_other_groups_show(
    offsets: Sequence[float], lacking: int | None
) -> None:
    ranks = grid_job(offsets, lacking)
    shared, _ = match_collectives(ranks)
    clocks, _ = align_clocks(ranks, shared)
    for each in shared:
        ends = [clocks[member.rank].shared_us(member.end_us) for member in each.members]
        assert max(ends) - min(ends) < JITTER_US  # not a step apart
    if lacking is None or not any(offsets):  # else nothing tells which step a rank's profile begins with
        assert all(len({member.step for member in each.members}) == 1 for each in shared)


def test_a_group_of_listed_ranks_is_one_whatever_each_rank_calls_it() -> None:
    ranks, _ = job(2, 20, seed=2)

    def named(place: int, *names: str) -> RankAnalysis:
        held = ranks[place].collectives
        more = [replace(each, process_group=names[n % len(names)], group_ranks=(0, 1)) for n, each in enumerate(held)]
        return replace(ranks[place], collectives=tuple(more))

    assert len(match_collectives([named(0, "5"), named(1, "dp")])[0]) == 20
    assert len(match_collectives([named(0, "dp", "cp"), named(1, "dp", "cp")])[0]) == 20
    assert not match_collectives([named(0, "dp", "cp"), named(1, "tp", "ep")])[0]


def test_exposed_time_is_on_the_clock_that_ranks_share_whatever_their_clocks_drift_by() -> None:
    ranks, _ = job(2, 200, seed=1, drift=1e-3)
    ends = [[each.end_us for each in combine(ranks).exposed if each.rank == rank] for rank in (0, 1)]
    assert max(ends[0]) == pytest.approx(max(ends[1]), abs=2 * JITTER_US)
    assert min(ends[0]) != pytest.approx(max(ends[0]), abs=4e4)  # the drift over that time is 40 us


def test_a_drift_is_taken_out_and_named() -> None:
    ranks, _ = job(2, 200, seed=1, drift=1e-3)
    shared, _ = match_collectives(ranks)
    clocks, _ = align_clocks(ranks, shared)

    apart = [abs(clocks[1].shared_us(c.members[1].end_us) - c.members[0].end_us) for c in shared]
    assert len(shared) == 200
    assert max(apart) < 3 * JITTER_US
    assert clocks[1].drift == pytest.approx(-1e-3, rel=0.02)
    assert "The clock of rank 1 drifts by" in describe_drifts(clocks)[0]


@given(st.integers(24, 60), st.integers(0, 5), st.integers(0, 5), st.integers(0, 2**32))
def test_profiles_that_begin_at_different_calls_are_matched_by_their_ends(
    num_collectives: int, num_first: int, num_last: int, seed: int
) -> None:
    ranks, _ = job(2, num_collectives, seed)
    late, early = without(ranks[0], range(num_first)), without(ranks[1], range(num_collectives - num_last, num_collectives))
    shared, problems = match_collectives([late, early])

    assert len(shared) == num_collectives - num_first - num_last
    pairs = [(c.members[0].group_number + num_first, c.members[1].group_number) for c in shared]
    assert all(one == other for one, other in pairs)
    assert len(problems) == (1 if num_first or num_last else 0)


def test_matching_goes_on_after_lost_events() -> None:
    ranks, _ = job(2, 40, seed=3)
    shared, problems = match_collectives([ranks[0], without(ranks[1], [20, 21])])

    assert len(shared) == 38
    assert "are in the traces of all its ranks that were given. Up to 2 more (of rank 0)" in problems[0]


@pytest.mark.parametrize(
    ("num_first", "num_last", "lost"),
    [(0, 0, ()), (12, 5, ()), (5, 19, ()), (33, 10, ()), (0, 0, (13, 14)), (0, 0, (41, 42))],
)
def test_real_ranks_of_a_regular_job_are_matched_whatever_is_missing(
    num_first: int, num_last: int, lost: Sequence[int]
) -> None:
    """Steps have 19 collectives each, and last the same within a tenth of a millisecond: a shift by a step looks alike."""
    first, second = (rank_of_raw_trace(TRACES / f"ddp.rank{rank}.json.gz", rank).collectives for rank in (0, 1))
    kept = [place for place in range(len(second) - num_last) if place not in lost]
    pairs = match_sequences(first[num_first:], [second[place] for place in kept])

    assert [(i + num_first, kept[j]) for i, j in pairs] == [(place, place) for place in kept if place >= num_first]


@pytest.mark.parametrize("lacking", [0, 3, 7])
def test_uneven_all_to_alls_are_matched_by_the_clocks_that_other_collectives_show(lacking: int) -> None:
    """The ends of one lie up to 330 us apart on the two ranks of this trace of Megatron-LM's script."""
    folder = Path(__file__).parents[1] / "data" / "traces"
    first, second = (analyze_rank(read_activity(folder / f"megatron_moe.rank{rank}.json.gz")) for rank in (0, 1))
    exchanges = [place for place, each in enumerate(second.collectives) if each.collective == "all_to_all"]
    kept = replace(second, collectives=tuple(c for n, c in enumerate(second.collectives) if n not in exchanges[:lacking]))
    shared, problems = match_collectives([first, kept])
    matched = [each.members for each in shared if each.members[0].collective == "all_to_all"]
    assert len(matched) == len(exchanges) - lacking == 72 - lacking
    assert [(one.group_number - other.group_number) for one, other in matched] == [0] * len(matched)
    assert len(problems) == (lacking > 0)


def test_ranks_of_different_runs_are_not_matched() -> None:
    first, _ = job(2, 30, seed=1)
    second, _ = job(2, 30, seed=2)
    analysis = combine([first[0], second[1]])

    assert analysis.waits == ()
    assert "nothing is matched" in " ".join(analysis.problems)


@pytest.mark.parametrize("stranger", [0, 2])
def test_a_rank_of_another_run_is_left_out_and_the_others_are_matched(stranger: int) -> None:
    ranks, _ = job(4, 30, seed=1)
    ranks[stranger] = job(4, 30, seed=2)[0][stranger]
    analysis = combine(ranks)

    assert [(waits.rank, waits.num_collectives) for waits in analysis.waits] == [(r, 30) for r in range(4) if r != stranger]
    assert stranger not in dict(analysis.clock_offsets_us)
    assert f"rank {stranger} ran other collectives than rank" in analysis.problems[0]


def test_groups_that_share_a_name_are_told_apart_by_their_ranks_or_not_matched() -> None:
    def of_pairs(**more: object) -> list[RankAnalysis]:
        spans = [(100.0 * n, 100.0 * n + 50) for n in range(5)]
        own = [{**more, "group_ranks": pair} if "group_ranks" in more else more for pair in ((0, 1), (0, 1), (2, 3), (2, 3))]
        return [rank_of(r, [traced(r, n, *s, **own[r]) for n, s in enumerate(spans)], world_size=4) for r in range(4)]

    named, problems = match_collectives(of_pairs(group_ranks=()))
    assert {tuple(m.rank for m in c.members) for c in named} == {(0, 1), (2, 3)}
    assert problems == ()

    unnamed, problems = match_collectives(of_pairs())
    assert unnamed == ()
    assert "Several groups share the name" in problems[0]


def test_ranks_are_aligned_through_others() -> None:
    def spans(offset: float) -> list[tuple[float, float]]:
        return [(100.0 * n - offset, 100.0 * n + 50 - offset) for n in range(5)]

    first = [traced(0, n, *s, process_group="a") for n, s in enumerate(spans(0))]
    middle = [traced(1, n, *s, process_group="a") for n, s in enumerate(spans(70))]
    middle += [traced(1, n + 5, *s, process_group="b", group_number=n) for n, s in enumerate(spans(70))]
    last = [traced(2, n, *s, process_group="b") for n, s in enumerate(spans(-30))]
    stranger = [traced(3, n, *s, process_group="c") for n, s in enumerate(spans(5))]

    analysis = combine([rank_of(r, c, world_size=4) for r, c in enumerate((first, middle, last, stranger))])

    assert dict(analysis.clock_offsets_us) == pytest.approx({0: 0.0, 1: 70.0, 2: -30.0})
    assert any("Rank 3 shares no collective with rank 0" in problem for problem in analysis.problems)


def test_steps_of_a_regular_job_are_told_apart_by_the_profilers_clock() -> None:
    random = Random(5)

    def rank(number: int, first_step: int, origin_us: float) -> RankAnalysis:
        ends = [1000.0 * step + 100 * place for step in range(first_step, 12) for place in range(4)]
        own = [traced(number, n, end - 60 - origin_us, end + jitter[end] * number - origin_us) for n, end in enumerate(ends)]
        return rank_of(number, own, origin_us=origin_us)

    jitter = {1000.0 * step + 100 * place: random.uniform(0, 12) for step in range(12) for place in range(4)}
    shared, _ = match_collectives([rank(0, 0, 0.0), rank(1, 5, 5000.0)])
    assert {other.group_number - one.group_number for one, other in (each.members for each in shared)} == {-20}
    assert len(shared) == 28


def test_broadcasts_that_end_far_apart_do_not_hide_the_other_collectives() -> None:
    ends = [1000.0 * n + Random(n).uniform(0, 300) for n in range(60)]
    kinds = ["broadcast"] * 25 + ["all_reduce"] * 35
    root = [traced(0, n, end - 90, end, collective=kind) for n, (end, kind) in enumerate(zip(ends, kinds, strict=True))]
    apart = [Random(n).uniform(200, 900) if kind == "broadcast" else 3.0 for n, kind in enumerate(kinds)]
    other = [traced(1, n, c.start_us, c.end_us + apart[n], collective=c.collective) for n, c in enumerate(root)]
    shared, problems = match_collectives([rank_of(0, root), rank_of(1, other)])
    assert (len(shared), problems) == (60, ())


def test_ranks_on_different_gpus_that_share_nothing_are_of_different_jobs() -> None:
    first, second = job(2, 30, seed=1)[0][0], job(2, 30, seed=2)[0][1]
    mixed = [replace(first, device_name="NVIDIA H100"), replace(second, device_name="NVIDIA A100")]
    assert "rank0.json is from 'NVIDIA H100' and rank1.json from 'NVIDIA A100'" in combine(mixed).untrusted
    assert combine([first, second]).untrusted == ""
