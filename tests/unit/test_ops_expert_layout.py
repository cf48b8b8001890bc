"""Where the rows of experts lie: every row once, in the order of experts and sources, and the table that picks copies."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

np = pytest.importorskip("numpy")
pytest.importorskip("torch")
SEQUENTIAL = pytest.importorskip("counterpoint.schedule").SEQUENTIAL
layouts = pytest.importorskip("counterpoint.schedule.expert_layout")
expert_routing = pytest.importorskip("counterpoint.ops.expert_routing")
MIB = 1 << 20


@st.composite
def matrices(draw: st.DrawFn) -> object:
    """Counts by source, destination and local expert; many are zero."""
    num_ranks, num_experts = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    number = num_ranks * num_ranks * num_experts
    counts = draw(st.lists(st.sampled_from([0, 0, 1, 2, 7]), min_size=number, max_size=number))
    return np.array(counts).reshape(num_ranks, num_ranks, num_experts)


@settings(deadline=None, max_examples=150)
@given(counts=matrices(), num_groups=st.integers(1, 6))
def test_every_row_has_one_place_by_expert_and_source(counts: object, num_groups: int) -> None:
    num_ranks, _, num_experts = counts.shape  # type: ignore[attr-defined]
    every = [layouts.ExpertLayout(counts, rank, num_groups) for rank in range(num_ranks)]
    for destination, layout in enumerate(every):
        placed: dict[int, tuple[int, int]] = {}
        for source in range(num_ranks):
            for number in range(len(layout.bounds[destination])):
                sent = every[source].sent(source, destination, number)
                rows = [
                    (b.sent + n, b.placed + n)
                    for b in every[source].blocks(source, destination, number)
                    for n in range(b.num_rows)
                ]
                assert [row for row, _ in rows] == list(range(sent.start, sent.stop))
                arrays = every[source].block_arrays(source, destination, number)
                columns = zip(*(each.tolist() for each in arrays), strict=True)
                assert list(columns) == list(every[source].blocks(source, destination, number))
                inside = layout.groups[number].rows
                assert all(inside.start <= place < inside.stop for _, place in rows)
                placed.update({place: (source, row) for row, place in rows})
        assert sorted(placed) == list(range(layout.num_rows))
        # by expert, and within an expert by source and then the source's own order
        experts = np.repeat(np.arange(num_experts), counts[:, destination].sum(0)).tolist()  # type: ignore[index]
        keys = [(experts[place], *placed[place]) for place in range(layout.num_rows)]
        assert keys == sorted(keys)
    assert sum(layout.num_rows for layout in every) == counts.sum()  # type: ignore[attr-defined]


@settings(deadline=None, max_examples=100)
@given(counts=matrices(), num_groups=st.integers(1, 6))
def test_what_one_rank_sends_another_waits_for_and_results_come_back_side_by_side(counts: object, num_groups: int) -> None:
    num_ranks = counts.shape[0]  # type: ignore[attr-defined]
    every = [layouts.ExpertLayout(counts, rank, num_groups) for rank in range(num_ranks)]
    for layout in every:
        sent = list(layout.outgoing())
        assert len(set(sent)) == len(sent)
        for peer, number in sent:
            assert layout.rank in every[peer].sources(number)
        awaited = sum(len(layout.sources(group.number)) for group in layout.groups)
        assert awaited == sum(peer == layout.rank for other in every for peer, _ in other.outgoing())
        back = sorted(
            (layout.returned(layout.rank, peer, number), layout.sent(layout.rank, peer, number)) for peer, number in sent
        )
        starts = [start for start, _ in back]
        lengths = [rows.stop - rows.start for _, rows in back]
        assert starts == [sum(lengths[:place]) for place in range(len(back))]
        assert sum(lengths) == layout.num_tokens - layout.num_own


@pytest.mark.parametrize(("num_bytes", "pieces"), [(0, 0), (63 * MIB, 0), (64 * MIB, 1), (159 * MIB, 1), (160 * MIB, 4)])
def test_the_busiest_pair_of_ranks_picks_copies_and_pieces(num_bytes: int, pieces: int) -> None:
    row_bytes = MIB // 2
    pairs = [[500, num_bytes // row_bytes], [0, 900]]  # own rows do not count
    assert expert_routing.most_rows_of_pairs(pairs) * row_bytes == num_bytes
    assert expert_routing.pick_pieces(num_bytes, None) == pieces
    assert expert_routing.pick_pieces(num_bytes, SEQUENTIAL) == 0, "the caller's schedule decides"
