"""Where the rows of experts lie: every row once, in the order of experts and sources, and the table that picks copies."""

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
SEQUENTIAL = pytest.importorskip("counterpoint.schedule").SEQUENTIAL
layouts = pytest.importorskip("counterpoint.schedule.expert_layout")
expert_routing = pytest.importorskip("counterpoint.ops.expert_routing")
expert_choice = pytest.importorskip("counterpoint.schedule.expert_choice")
FirstRows = pytest.importorskip("counterpoint.ops.expert_exchange").FirstRows
expert_ahead = pytest.importorskip("counterpoint.ops.expert_ahead")
MIB = 1 << 20


@st.composite
def matrices(draw: st.DrawFn) -> object:
    """Counts by source, destination and local expert; many are zero."""
    num_ranks, num_experts = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    number = num_ranks * num_ranks * num_experts
    counts = draw(st.lists(st.sampled_from([0, 0, 1, 2, 7]), min_size=number, max_size=number))
    return np.array(counts).reshape(num_ranks, num_ranks, num_experts)


@contextmanager
def cutting(least_rows: int) -> Iterator[None]:
    """Experts of so many rows may be cut, at any row."""
    with patch.multiple(layouts, LEAST_CUT_ROWS=least_rows, CUT_MULTIPLE=1):
        yield


CUT_FROM = st.sampled_from([1, 3, layouts.LEAST_CUT_ROWS])


def layouts_of(counts: object, num_groups: int, chance: int) -> list[object]:
    """Every rank's layout; first groups are given in two of three."""
    num_ranks = len(counts)  # type: ignore[arg-type]
    firsts = [1 + (chance + rank) % 9 for rank in range(num_ranks)] if chance % 3 else ()
    return [layouts.ExpertLayout(counts, rank, num_groups, firsts=firsts) for rank in range(num_ranks)]


@settings(deadline=None, max_examples=150)
@given(counts=matrices(), num_groups=st.integers(1, 6), cut_from=CUT_FROM, chance=st.integers(0, 30))
def test_every_row_has_one_place_by_expert_and_source(counts: object, num_groups: int, cut_from: int, chance: int) -> None:
    with cutting(cut_from):
        check_places(counts, num_groups, chance)


def check_places(counts: object, num_groups: int, chance: int) -> None:
    num_ranks, _, num_experts = counts.shape  # type: ignore[attr-defined]
    every = layouts_of(counts, num_groups, chance)
    for destination, layout in enumerate(every):
        placed: dict[int, tuple[int, int]] = {}
        for source in range(num_ranks):
            for number in range(len(layout.ranges[destination])):
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
        of_experts = np.zeros(num_experts, dtype=int)
        for group in layout.groups:
            of_group = np.diff(layout.group_ends[group.number], prepend=0)
            assert of_group.min() >= 0
            assert of_group.sum() == group.rows.stop - group.rows.start
            of_experts[group.experts] += of_group
        assert (of_experts == counts[:, destination].sum(0)).all()  # type: ignore[index]
        # by expert, and within an expert by source and then the source's own order
        experts = np.repeat(np.arange(num_experts), counts[:, destination].sum(0)).tolist()  # type: ignore[index]
        keys = [(experts[place], *placed[place]) for place in range(layout.num_rows)]
        assert keys == sorted(keys)
    assert sum(layout.num_rows for layout in every) == counts.sum()  # type: ignore[attr-defined]


@settings(deadline=None, max_examples=100)
@given(counts=matrices(), num_groups=st.integers(1, 6), cut_from=CUT_FROM, chance=st.integers(0, 30))
def test_what_one_rank_sends_another_waits_for_and_results_come_back_side_by_side(
    counts: object, num_groups: int, cut_from: int, chance: int
) -> None:
    with cutting(cut_from):
        check_exchange(counts, num_groups, chance)


def check_exchange(counts: object, num_groups: int, chance: int) -> None:
    every = layouts_of(counts, num_groups, chance)
    for layout in every:
        sent = list(layout.outgoing())
        assert len(set(sent)) == len(sent)
        for peer, number in sent:
            assert layout.rank in every[peer].sources(number)
        awaited = sum(len(layout.sources(group.number)) for group in layout.groups)
        assert awaited == sum(peer == layout.rank for other in every for peer, _ in other.outgoing())
        lengths = [rows.stop - rows.start for rows in (layout.sent(layout.rank, peer, number) for peer, number in sent)]
        assert sum(lengths) == layout.num_tokens - layout.num_own


def test_an_expert_with_very_many_rows_is_cut_and_the_first_and_last_groups_are_half_as_large() -> None:
    counts = np.array([[[0, 0], [12_000, 0]], [[0, 0], [0, 12_000]]])  # rank 1 computes 12,000 rows for each of two experts
    for own in (0, 1):
        counts[:, 1] = [[0, 0], [0, 12_000 * own]]
        counts[0, 1, own] = 12_000
        layout = layouts.ExpertLayout(counts, 1, 4)
        edges = [group.rows.stop for group in layout.groups]
        num_rows = 12_000 * (1 + own)
        assert all(0 <= share * num_rows / 6 - edge < 256 for share, edge in zip((1, 3, 5), edges, strict=False)), edges
        assert edges[-1] == num_rows
        assert all(edge % layouts.CUT_MULTIPLE == 0 for edge in edges[:-1])
    even = layouts.ExpertLayout(np.full((2, 2, 12), 1000), 0, 4)
    assert [(each.experts.start, each.experts.stop) for each in even.groups] == [(0, 2), (2, 6), (6, 10), (10, 12)]
    assert even.grouped_rows == [24_000, 24_000]
    given = layouts.ExpertLayout(np.full((2, 2, 12), 1000), 0, 4, firsts=(5000, 1))
    assert [(each.experts.start, each.experts.stop) for each in given.groups] == [(0, 3), (2, 7), (7, 11), (11, 12)]
    assert [each.is_cut for each in given.groups] == [True, True, False, False]
    all_in_one = layouts.ExpertLayout(np.full((2, 2, 12), 1000), 0, 4, firsts=(24_000, 24_000))
    assert len(all_in_one.groups) == 1


@pytest.mark.parametrize("counts", [[[1, 2, 0, 0]], [[0, 0, 1, 2]], [[1, 2, 3, 4]], [[0, 0, 0, 0]], [[9, 1, 1, 1]]])
@pytest.mark.parametrize("num_first", [0, 1, 2, 3, 4, 12])
@pytest.mark.parametrize("cut_from", [2, layouts.LEAST_CUT_ROWS])
def test_rows_of_a_group_are_those_of_its_experts_in_either_memory(
    counts: list[list[int]], num_first: int, cut_from: int
) -> None:
    counted, runtime = np.array([counts]), SimpleNamespace(group=SimpleNamespace(rank=lambda: 0))
    found, pieces = np.array([[*counts[0], 0]]), expert_routing.Pieces(3, (num_first,) * bool(num_first))
    with cutting(cut_from):
        exchanged = expert_routing.Counted(found, layouts.pair_rows(counted), 0, has_gradients=False)
        routing = expert_routing.ExpertRouting(runtime, exchanged, torch.tensor(counted[0]), pieces)
        groups = list(routing.groups())
        for (group, rows), ends in zip(groups, routing.layout.group_ends, strict=True):
            assert rows.ends.tolist() == ends
            assert len(rows.counts) == len(ends) == group.experts.stop - group.experts.start
            assert rows.ends.tolist() == list(itertools.accumulate(rows.counts))
            assert sum(rows.counts) == group.rows.stop - group.rows.start
        assert sum(sum(rows.counts) for _, rows in groups) == counted.sum()


@pytest.mark.parametrize(
    ("num_bytes", "pieces", "forward_pieces"),
    [
        (0, 0, 0),
        (15 * MIB, 0, 0),
        (16 * MIB, 0, 1),
        (63 * MIB, 0, 2),
        (64 * MIB, 1, 4),
        (159 * MIB, 1, 4),
        (160 * MIB, 4, 4),
    ],
)
def test_the_busiest_pair_of_ranks_picks_copies_and_pieces(num_bytes: int, pieces: int, forward_pieces: int) -> None:
    row_bytes = MIB // 2
    pairs = [[500, num_bytes // row_bytes], [0, 900]]  # own rows do not count
    size = expert_choice.size_of(pairs, row_bytes)
    assert size == (num_bytes, num_bytes), "two ranks have one pair each way"
    pick = expert_routing.pick_pieces
    assert pick(size, None, 64, has_gradients=True) == pieces
    assert pick(size, None, 64, has_gradients=False) == forward_pieces
    for few in (1, 2, 4):
        assert pick(size, None, few, has_gradients=False) == min(2, forward_pieces)
    assert pick(size, SEQUENTIAL, 64, has_gradients=False) == 0, "the caller's schedule decides"


@pytest.mark.parametrize(
    ("pairs", "size"),
    [
        ([[9, 1, 2, 4], [0, 9, 0, 0], [0, 0, 9, 0], [0, 0, 0, 9]], (4, 7)),  # one rank sends
        ([[9, 0, 5, 0], [0, 9, 6, 0], [0, 0, 9, 0], [0, 0, 3, 9]], (6, 14)),  # one rank receives
        ([[8]], (0, 0)),
    ],
)
def test_the_size_of_a_call_is_that_of_the_busiest_pair_and_the_busiest_port(
    pairs: list[list[int]], size: tuple[int, int]
) -> None:
    assert expert_choice.size_of(pairs, 10) == tuple(10 * each for each in size)


@pytest.mark.parametrize(
    ("pair_mib", "forward", "with_gradients", "ahead"),
    [
        (11, 0, 0, "all"),
        (16, 1, 0, "all"),
        (24, 2, 0, "parts"),
        (33, 2, 0, "parts"),
        (38, 4, 1, "parts"),
        (120, 4, 4, "first"),
    ],
)
def test_between_four_ranks_the_mean_of_pair_and_port_gives_the_groups_and_the_port_what_goes_ahead(
    pair_mib: int, forward: int, with_gradients: int, ahead: str
) -> None:
    size = expert_choice.CallSize(pair_bytes=pair_mib * MIB, port_bytes=3 * pair_mib * MIB)
    assert expert_routing.pick_pieces(size, None, 32, has_gradients=False) == forward
    assert expert_routing.pick_pieces(size, None, 32, has_gradients=True) == with_gradients
    assert expert_choice.sent_ahead(size, 4, 0.4, has_beside=False) == ahead
    in_one_group = expert_choice.sent_ahead(size, 1, 0.4, has_beside=False)
    assert in_one_group == ("all" if 3 * pair_mib < 320 else "nothing")


@pytest.mark.parametrize(
    ("num_mib", "num_groups", "sent", "without_rest"),
    [
        (63, 4, "all", "all"),
        (64, 1, "all", "all"),
        (64, 2, "parts", "all"),
        (160, 4, "parts", "first"),
        (319, 1, "all", "all"),
        (319, 2, "parts", "all"),
        (320, 2, "nothing", "nothing"),
        (320, 4, "first", "first"),
        (1535, 4, "first", "first"),
        (1536, 4, "nothing", "nothing"),
    ],
)
def test_the_size_of_calls_decides_which_tokens_are_sent_before_the_host_knows_the_counts(
    num_mib: int, num_groups: int, sent: str, without_rest: str
) -> None:
    size = expert_choice.CallSize(num_mib * MIB, num_mib * MIB)
    for share, wanted in ((0.4, sent), (0.09, without_rest), (0.0, without_rest)):
        assert expert_choice.sent_ahead(size, num_groups, share, has_beside=False) == wanted
    beside = expert_choice.sent_ahead(size, num_groups, 0.4, has_beside=True)
    assert beside == ("all" if num_mib < 64 else "nothing"), "copies cost nothing beside something else"


def test_so_many_rows_go_first_that_their_matmul_hides_the_rest() -> None:
    shares = [expert_choice.first_share(num_columns, 2) for num_columns in (1536, 5760, 28672)]
    assert shares == pytest.approx([0.43, 0.16, 0.04], abs=0.01)
    assert expert_choice.first_share(1536, 8) > shares[0], "more of a rank's rows come from others"


def test_ranks_say_their_rows_and_whether_their_call_has_gradients_in_one_number() -> None:
    row = np.array([[3, 4, 2 * 7], [0, 5, 2 * 5 + 1]])
    assert expert_routing.split_last(row) == ([7, 5], True)
    assert expert_routing.split_last(row[:1]) == ([7], False)


@pytest.mark.parametrize(
    ("num_mib", "has_gradients", "first"),
    [
        (400, True, FirstRows((3, 3), 4)),  # a sixth of 20 and of 18 rows
        (400, False, None),  # few experts are in two groups
        (100, True, None),
        (100, False, FirstRows((13, 12), 2, sends_rest=True)),  # as `first_share` says
    ],
)
def test_given_first_groups_do_not_decide_in_how_many_groups_later_calls_are_computed(
    num_mib: int, has_gradients: bool, first: FirstRows | None
) -> None:
    counts = np.array([[[1, 2, 3, 4], [2, 2, 2, 3]]] * 2)
    layout = layouts.ExpertLayout(counts, 0, 4, firsts=(3, 5))
    experts = SimpleNamespace(expected=expert_ahead.ExpectedRows(), copies=SimpleNamespace(can_send_rest=lambda _: True))
    called = SimpleNamespace(has_beside=False, is_checkpointed=False, tokens=torch.empty(1, 1))
    size = expert_choice.CallSize(num_mib * MIB, num_mib * MIB)
    found = SimpleNamespace(layout=layout, num_pieces=4, size=size, has_gradients=has_gradients)
    found.runtime = SimpleNamespace(experts=lambda: experts)
    expert_routing._learn("a layer", found, called, 512)
    expected = experts.expected.next("a layer")
    assert (expected and expected.first) == first


def test_a_product_without_memory_is_left_to_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    def multiply(rows: object, _weights: object, _ends: object) -> object:
        if len(rows) > 3:
            raise torch.OutOfMemoryError
        return rows

    monkeypatch.setattr(expert_ahead, "multiply_grouped", multiply)
    exchange = MagicMock(region=lambda _region, _format, num_rows: torch.zeros(num_rows, 4))
    expected = expert_ahead.Expected(8, FirstRows((3, 3), 2, sends_rest=True))
    sent = expert_ahead.AheadDispatch(exchange, torch.zeros(2, 4), [torch.zeros(1, 4, 4)], expected, 0)
    exchange.send_ahead.return_value = torch.tensor([6], dtype=torch.int32)
    sent.send(torch.zeros(2, 5, dtype=torch.int64))
    sent.multiply()
    counts = np.full((2, 2, 1), 3)
    sent.settle(SimpleNamespace(layout=layouts.ExpertLayout(counts, 0, 2, firsts=(3, 3)), sorting=SimpleNamespace()))
    assert sent.product(0, 0).shape == (3, 4)
    assert sent.product(1, 0) is None


def test_a_call_that_has_taught_what_it_can_is_freed_at_once() -> None:
    taught, routing = [], object.__new__(expert_routing.ExpertRouting)
    routing.ahead, routing.learn = None, partial(lambda found, tokens: taught.append((id(found), tokens)), routing, 3)
    known = weakref.ref(routing)
    with routing.forward():
        pass
    assert taught == [(id(routing), 3)]
    del routing
    assert known() is None, "its tokens would stay until Python looks for cycles"


def test_a_bound_follows_the_largest_of_recent_calls() -> None:
    expected = expert_ahead.ExpectedRows()
    assert expected.next("a layer") is None, "nothing is known yet"

    def learn(most_rows: int, firsts: tuple[int, ...] = (), num_groups: int = 4) -> None:
        expected.learn("a layer", most_rows, FirstRows(firsts, num_groups) if firsts else None)

    for most_rows in (100, 200, 60):
        learn(most_rows)
    assert (expected.next("a layer"), expected.next("another")) == (expert_ahead.Expected(225), None)
    for _ in range(2 * expert_ahead.WINDOW):
        learn(80)
    assert expected.next("a layer") == expert_ahead.Expected(90), "a call long ago is forgotten"
    learn(80, (30, 50))
    for rows in ((30, 50), (60, 25), (15, 100)):  # from half to twice as many as are given
        learn(80, rows)
        assert expected.next("a layer").first == ((30, 50), 4, False)
    learn(80, (30, 24))
    assert expected.next("a layer").first == ((30, 24), 4, False), "there were too many"
    learn(80, (61, 24))
    assert expected.next("a layer").first == ((61, 24), 4, False), "there were too few"
    learn(80, (61, 24), num_groups=3)
    assert expected.next("a layer").first == ((61, 24), 3, False)
    learn(64)
    assert expected.next("a layer").first is None, "all go ahead"
    expected.forget("a layer")
    assert expected.next("a layer") is None
    learn(0)
    assert expected.next("a layer") is None, "no rank may have memory for rows"
