"""Dispatch and combine by copies, on a double of the driver where everything ends at once: every row reaches its place and
comes back. In a second double streams run in any order that the driver allows: no rank writes what another still reads.
GPUs run them in tests/multigpu."""

import ctypes
import importlib
import itertools
import random
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest

from counterpoint.errors import RefusedTogetherError
from helpers.driver_double import forget_modules_on_the_driver
from helpers.expert_streams_double import ModelledRank, Streams

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
WIDTH = 36  # numbers in a row


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module on a double of the driver; it is forgotten afterwards."""
    importlib.import_module("counterpoint.ops")  # registers operators, which happens once
    forget_modules_on_the_driver(monkeypatch)
    bindings = ModuleType("cuda.bindings")
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    for name in ("driver", "nvrtc"):
        setattr(bindings, name, MagicMock())
        monkeypatch.setitem(sys.modules, f"cuda.bindings.{name}", getattr(bindings, name))
    before = dict(sys.modules)
    module = importlib.import_module("counterpoint.ops.expert_copies")
    results = importlib.import_module("counterpoint.ops.expert_results")
    monkeypatch.setattr(module, "OnStream", nullcontext)
    for part in (module, results):
        monkeypatch.setattr(part, "has_triton", lambda: False)
        monkeypatch.setattr(part, "check", lambda *_: None)
        monkeypatch.setattr(part, "new_event", lambda: [None])
        monkeypatch.setattr(part, "copy_bytes", lambda target, source, size, _: ctypes.memmove(target, source, size))
    monkeypatch.setattr(module, "results_module", results, raising=False)
    yield module
    for name in set(sys.modules) - set(before):
        del sys.modules[name]


class Group:
    """What the ranks of a group share: memory, flags, and the number of the call."""

    def __init__(self, num_ranks: int, num_flags: int, most_rows: int) -> None:
        self.flags, self.number = np.zeros((num_ranks, num_flags, num_ranks), dtype=int), 0
        self.memory = [torch.empty(3, most_rows + 16, WIDTH) for _ in range(num_ranks)]  # with room for rounded results


class Exchange:
    """One rank's `ExpertCopies`, and its streams. Only what fetches results waits, until it is joined."""

    ready, counted, awaits_peers = "ready", "counted", False

    def __init__(self, group: Group, rank: int) -> None:
        self._group, self._rank, self.rank = group, rank, rank
        self.peers = tuple(peer for peer in range(len(group.memory)) if peer != rank)
        self._order, self._num_ranks, self.device = MagicMock(), len(group.memory), "cpu"
        self._placed, self._vectors, self.ends = None, {}, {"by kernel": None}
        self.signals = self.blocks = self.streams = self
        self._fetches: list[Callable[[], None]] = []
        self.addresses = [torch.tensor([each[region].data_ptr() for each in group.memory]) for region in range(3)]

    def wait(self, flag: int, peers: tuple[int, ...], stream: str | None) -> None:
        if stream and stream == "fetching":
            self._fetches.append(lambda: self.wait(flag, peers, None))
            return
        for peer in peers:
            assert self._group.flags[self._rank, flag, peer] >= self._group.number, "on a GPU the stream would wait for ever"

    def raise_to(self, flag: int, peers: tuple[int, ...], _stream: object) -> None:
        for peer in peers:
            self._group.flags[peer, flag, self._rank] = self._group.number

    def address(self, region: int, peer: int) -> int:
        return int(self._group.memory[peer][region].data_ptr())

    def region(self, region: int, _rows: object, num_rows: int) -> Any:
        return self._group.memory[self._rank][region, :num_rows]

    def copy(self, blocks: Any, stream: str) -> None:
        if stream == "fetching":
            self._fetches.append(lambda: self.copy(blocks, ""))
            return
        for target, source, num_bytes in zip(*(each.tolist() for each in blocks), strict=True):
            ctypes.memmove(target, source, num_bytes)

    def current(self) -> None: ...
    def as_torch(self, _name: str) -> None: ...
    def placed_rows(self, _rows: object) -> None: ...
    def follow(self, name: str, event: object) -> None:
        importlib.import_module("counterpoint.ops.expert_streams").cu.cuStreamWaitEvent(name, event, 0)

    def named(self, name: str) -> str:
        return name

    def join(self, _names: object) -> None:
        for act in self._fetches:
            act()
        self._fetches.clear()


def combine_of(copies: Any, exchange: Exchange, rows: Any, *, is_lent: bool = True) -> Any:
    """Return a combine and its memory for results."""
    pool = MagicMock()
    pool.memory.is_lent_here, pool.memory.is_lent = lambda: is_lent, True
    pool.memory.addresses = exchange.addresses[2].tolist()
    results = copies.results_module.ExpertResults(pool, exchange, exchange, exchange.peers)
    results.blocks = exchange
    return copies.CopyCombine(results, rows, exchange.region(2, rows.format, rows.layout.num_rows))


def send_rows(sending: Any, gathered: Any, ends: Any, firsts: Any = None, part: str = "all") -> None:
    """What the kernel of that name does, block by block."""
    size, num_ranks = WIDTH * sending.rows.itemsize, len(gathered)
    counts = gathered[:, :-1].reshape(num_ranks, num_ranks, -1).numpy()
    layout = importlib.import_module("counterpoint.schedule.expert_layout").ExpertLayout(counts, sending.rank, 1)
    has_room = counts.sum((0, 2)) <= len(sending.landed)
    numbers = [1 << 40] * num_ranks if firsts is None else firsts.tolist()
    for peer in [sending.rank] if part == "own" else range(num_ranks):
        target = sending.landed.data_ptr() if peer == sending.rank else int(sending.addresses[peer])
        for sent, placed, num_rows in layout.blocks(sending.rank, peer, 0):
            number = num_rows if peer == sending.rank else min(num_rows, max(numbers[peer] - placed, 0))
            start, stop = (number, num_rows) if part == "rest" else (0, number)
            if has_room[peer]:
                source = sending.rows.data_ptr() + (sent + start) * size
                ctypes.memmove(target + (placed + start) * size, source, (stop - start) * size)
    ends.copy_(torch.from_numpy(counts[:, sending.rank].sum(0).cumsum()) * bool(has_room[sending.rank]))


@pytest.mark.parametrize("were_ready", [False, True])
def test_rows_that_were_ready_before_the_counts_do_not_wait_for_what_was_issued_since(copies: Any, were_ready: bool) -> None:
    exchanges, layouts = (
        importlib.import_module(f"counterpoint.{name}") for name in ("ops.expert_exchange", "schedule.expert_layout")
    )
    layout = layouts.ExpertLayout(np.array([[[0], [1]], [[0], [0]]]), 0, 1)  # one row, to the other rank
    rows = exchanges.Rows(layout, exchanges.RowFormat(WIDTH, torch.float32, torch.device("cpu")), MagicMock())
    exchange, tokens = Exchange(Group(2, copies.NUM_FLAGS, 1), 0), torch.zeros(1, WIDTH)
    copies.CopyDispatch(exchange, copies.ExpertRegion.DISPATCH, rows, tokens, were_ready=were_ready)
    (waited,) = copies.cu.cuStreamWaitEvent.call_args_list
    assert waited.args[1] == ("counted" if were_ready else "ready")
    assert copies.cu.cuEventRecord.called != were_ready


@pytest.mark.parametrize(
    "kind",
    [
        "not lent, rounded",
        "not lent here, rounded",
        "lent, rounded",
        "lent, one matrix",
        "lent elsewhere, one matrix",
        "lent elsewhere, rounded",
    ],
)
@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_rows_reach_their_experts_and_come_back(
    copies: Any, monkeypatch: pytest.MonkeyPatch, num_ranks: int, num_groups: int, kind: str
) -> None:
    lent, multiple = kind.split(", ")
    for module in (copies.results_module, importlib.import_module("counterpoint.ops.expert_memory")):
        monkeypatch.setattr(module, "LENT_MULTIPLE", 16 if multiple == "one matrix" else 512)
    monkeypatch.setattr(copies.results_module, "can_be_lent", lambda *_: lent != "not lent")
    exchanges = importlib.import_module("counterpoint.ops.expert_exchange")
    layouts = importlib.import_module("counterpoint.schedule.expert_layout")
    num_experts = 3
    counts = np.random.default_rng(num_ranks).integers(0, 4, (num_ranks, num_ranks, num_experts))
    group = Group(num_ranks, copies.NUM_FLAGS, int(counts.sum()) + 1)
    ranks = []
    for rank in range(num_ranks):
        layout = layouts.ExpertLayout(counts, rank, num_groups)
        sorting = exchanges.Sorting(layout, torch.from_numpy(counts.reshape(num_ranks, -1)))
        rows = exchanges.Rows(layout, exchanges.RowFormat(WIDTH, torch.float32, torch.device("cpu")), sorting)
        ranks.append((Exchange(group, rank), rows, torch.randn(layout.num_tokens, WIDTH)))
    for joined_bytes in (0, 1 << 20):  # a request for each peer, and one for all
        monkeypatch.setattr(importlib.import_module("counterpoint.ops.block_copies"), "MOST_JOINED_BYTES", joined_bytes)
        group.number += 1
        sent = [
            copies.CopyDispatch(exchange, copies.ExpertRegion.DISPATCH, rows, tokens) for exchange, rows, tokens in ranks
        ]
        all_tokens = [tokens for _, _, tokens in ranks]
        arrived = [
            [check_group(rows.layout, part.number, each, all_tokens).clone() for part in rows.layout.groups]
            for each, (_, rows, _) in zip(sent, ranks, strict=True)
        ]
        for each in sent:
            each.join()
        for rank, (_, rows, _) in enumerate(ranks):
            assert sent[rank].num_sent_bytes == (rows.layout.num_tokens - rows.layout.num_own) * rows.format.num_bytes
        back = [combine_of(copies, exchange, rows, is_lent=lent != "not lent here") for exchange, rows, _ in ranks]
        for rank, (each, results) in enumerate(zip(back, arrived, strict=True)):
            for number, of_group in enumerate(results):
                made, starts = 2 * of_group, each._starts[rank]
                is_in_the_way = lent == "lent elsewhere" and number == 0 < len(starts) - 1  # where the last group's belong
                if lent == "lent" or is_in_the_way:
                    place = group.memory[rank][2].view(-1)[starts[-1 if is_in_the_way else number] // 4 :][: made.numel()]
                    made = place.view(made.shape).copy_(made)
                each.add(number, made)
                assert each._added[number] is made or lent == "lent elsewhere", "nothing is copied twice"
            assert each._is_lent == (lent == "lent" or (lent == "lent elsewhere" and not len(torch.cat(results))))
            if lent.startswith("lent"):
                assert each._memory.is_lent == each._is_lent, "the next call need not try again"
        for each, (_, _, tokens) in zip(back, ranks, strict=True):
            assert torch.equal(each.results(), 2 * tokens)
            each.join()


def test_results_of_ranks_with_far_more_rows_are_fetched_behind_others(copies: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("counterpoint.ops.block_copies"), "MOST_JOINED_BYTES", 0)
    exchanges = importlib.import_module("counterpoint.ops.expert_exchange")
    layouts = importlib.import_module("counterpoint.schedule.expert_layout")
    for most, order in ((3, [1, 0, 3]), (4, [1, 0, 3]), (5, [1, 3, 0])):
        counts = np.full((4, 4, 2), 3)
        counts[:, 0] = most
        layout = layouts.ExpertLayout(counts, 2, 1)
        sorting = exchanges.Sorting(layout, torch.from_numpy(counts.reshape(4, -1)))
        rows = exchanges.Rows(layout, exchanges.RowFormat(WIDTH, torch.float32, torch.device("cpu")), sorting)
        exchange = Exchange(Group(4, copies.NUM_FLAGS, int(counts.sum())), 2)
        asked: list[int] = []
        monkeypatch.setattr(exchange, "wait", lambda _flag, peers, _stream, asked=asked: asked.extend(peers))
        monkeypatch.setattr(exchange, "copy", lambda *_: None)
        combine_of(copies, exchange, rows)._fetch(0)
        assert asked == order, f"rank 0 has {most / 3:.2f} times the rows of others"


@pytest.mark.parametrize("sent_first", [(0, False), *itertools.product((1, 4, 1000), (False, True))], ids=str)
@pytest.mark.parametrize("is_large", [False, True], ids=["room for all", "room for some ranks"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_tokens_sent_ahead_arrive_or_are_given_up_by_all_ranks(
    copies: Any, monkeypatch: pytest.MonkeyPatch, num_ranks: int, is_large: bool, sent_first: tuple[int, bool]
) -> None:
    num_first, sends_rest = sent_first  # 0: all at once
    kernels = ModuleType("counterpoint.ops.expert_kernels")
    kernels.Sending = namedtuple("Sending", "rank rows landed addresses")  # type: ignore[attr-defined]
    kernels.send_rows = send_rows  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    for name in ("send_ahead", "await_ahead", "end_ahead", "dispatch", "_ends_of", "_on_gpu", "placed_rows"):
        monkeypatch.setattr(Exchange, name, getattr(copies.ExpertCopies, name), raising=False)
    exchanges, ahead, layouts = (
        importlib.import_module(f"counterpoint.{name}")
        for name in ("ops.expert_exchange", "ops.expert_ahead", "schedule.expert_layout")
    )
    counts = np.random.default_rng(num_ranks).integers(1, 5, (num_ranks, num_ranks, 3))
    counts[:, -1] += 1  # the last rank's rows are the most
    flat = torch.from_numpy(counts.reshape(num_ranks, -1))
    gathered = torch.cat([flat, flat.sum(1, keepdim=True)], 1)
    numbers, groups = ((num_first,) * num_ranks, 3) if num_first else ((), 1)
    every = [layouts.ExpertLayout(counts, rank, groups, firsts=numbers) for rank in range(num_ranks)]
    bound = every[0].most_grouped - is_large
    group = Group(num_ranks, copies.NUM_FLAGS, bound)
    tokens = [torch.randn(layout.num_tokens, WIDTH) for layout in every]
    for _ in range(2):
        group.number += 1
        expected = ahead.Expected(bound, exchanges.FirstRows(numbers, groups, sends_rest) if num_first else None)
        ranks = [Exchange(group, rank) for rank in range(num_ranks)]
        sent = [ahead.AheadDispatch(ranks[rank], tokens[rank], [], expected, rank) for rank in range(num_ranks)]
        for act in (lambda each: each.send(gathered), lambda each: each.multiply()):
            list(map(act, sent))
        rows = [exchanges.Rows(layout, sent[0].format, exchanges.Sorting(layout, gathered)) for layout in every]
        assert [each.settle(of_rank) for each, of_rank in zip(sent, rows, strict=True)] == [not is_large] * num_ranks
        if not is_large:
            group.number += 1
            for rank, each in enumerate(sent):
                each.send_others(ranks[rank])
            for number in range(groups):
                for rank, each in enumerate(sent):
                    assert rows[rank].sorting.ends.tolist() == counts[:, rank].sum(0).cumsum().tolist()
                    if number < len(every[rank].groups):
                        check_group(every[rank], number, each, tokens)
                for each in sent:
                    each.send_rest()
            for rank, each in enumerate(sent):
                assert len(each.all_rows()) == every[rank].num_rows
                each.join()
                assert each.num_sent_bytes == (every[rank].num_tokens - every[rank].num_own) * sent[0].format.num_bytes
                if not num_first:
                    check_products(each, every[rank].num_rows)
                check_parts(each, every[rank], num_first, sends_rest=sends_rest)


def test_the_rest_goes_beside_a_grouped_matmul_only(copies: Any) -> None:
    formats = importlib.import_module("counterpoint.ops.expert_exchange").RowFormat
    exchange = object.__new__(copies.ExpertCopies)
    for exchange._spare_sms in (True, False):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            found = exchange.can_send_rest(formats(8, dtype, torch.device("cpu")))
            assert found == (exchange._spare_sms and dtype == torch.bfloat16)


def check_group(layout: Any, number: int, dispatch: Any, tokens: list[Any]) -> Any:
    """Return a group's rows, which have arrived from all ranks."""
    arrived, start = dispatch.group(number), layout.groups[number].rows.start
    for source, of_source in enumerate(tokens):
        for sent, placed, num_rows in layout.blocks(source, layout.rank, number):
            assert torch.equal(arrived[placed - start : placed - start + num_rows], of_source[sent : sent + num_rows])
    return arrived


def check_products(each: Any, num_rows: int) -> None:
    """Products belong to the caller, and many spare rows are not kept."""
    for num_spare in (0, 1, num_rows):
        whole = torch.randn(num_rows + num_spare, 2)
        each._products = [[whole]]
        product = each.product(0, 0)
        assert torch.equal(product, whole[:num_rows])
        assert not product._is_view(), "the caller may change it in place"
        assert (product.data_ptr() == whole.data_ptr()) == (4 * num_spare <= num_rows)


def check_parts(each: Any, layout: Any, num_first: int, *, sends_rest: bool) -> None:
    """Products of first rows are those of the first group, and products of the rest those of the others."""
    product = torch.arange(2.0 * layout.num_rows).view(-1, 2)
    parts = [product[:num_first], product[num_first:]] if num_first else [product]
    each._products = [[part.clone()] for part in (parts if sends_rest else parts[:1])]
    for group in layout.groups:
        found = each.product(group.number, 0)
        if num_first and group.number and not sends_rest:
            assert found is None, "copies bring these rows"
        else:
            assert torch.equal(found, product[group.rows])


BATCH = ctypes.CFUNCTYPE(
    ctypes.c_int, *[ctypes.c_void_p] * 3, ctypes.c_size_t, *[ctypes.c_void_p] * 2, ctypes.c_size_t, ctypes.c_void_p
)


@pytest.mark.parametrize("status", [0, 801], ids=["batched", "refused"])
def test_many_blocks_are_one_request_and_single_copies_where_the_driver_refuses(
    copies: Any, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    module, asked, single = importlib.import_module("counterpoint.ops.block_copies"), [], []

    def request(*arguments: int) -> int:
        asked.append((arguments[3], arguments[6], arguments[7]))
        if not status:
            words = [ctypes.cast(each, ctypes.POINTER(ctypes.c_int64)) for each in arguments[:3]]
            for number in range(arguments[3]):
                ctypes.memmove(*(word[number] for word in words))
        return status

    driver = ModuleType("libcuda")
    driver.cuMemcpyBatchAsync_v2 = BATCH(request)  # type: ignore[attr-defined]
    monkeypatch.setattr(module.ctypes, "CDLL", lambda _: driver)
    monkeypatch.setattr(module, "copy_bytes", lambda *copied: single.append(copied) or ctypes.memmove(*copied[:3]))
    module.cu.CUmemcpyAttributes.return_value.getPtr.return_value = 8
    moved, source, target = module.BlockCopies(), torch.arange(24), torch.zeros(24, dtype=torch.int64)
    for _ in range(2):
        for count in (1, 6):
            first = np.arange(count) * 32
            moved.copy(module.BlockAddresses(first + target.data_ptr(), first + source.data_ptr(), np.full(count, 24)), 5)
    assert torch.equal(target, torch.where(source % 4 == 3, 0, source))
    assert asked == [(6, 1, 5)] * (1 if status else 2)
    assert len(single) == (2 + 2 * 6 if status else 2)


@pytest.mark.usefixtures("copies")
def test_small_blocks_of_all_peers_are_one_request_and_large_ones_a_request_for_each_peer() -> None:
    module = importlib.import_module("counterpoint.ops.block_copies")
    for most_bytes, asked in ((module.MOST_JOINED_BYTES - 1, [(3, 1)]), (module.MOST_JOINED_BYTES, [(3,), (1,)])):
        sizes = {3: [1, 2], 1: [most_bytes - 3]}
        blocks = {
            peer: module.BlockAddresses(*(np.arange(len(each)) + start for start in (10 * peer, 100 * peer)), np.array(each))
            for peer, each in sizes.items()
        }
        found = list(module.requests(blocks))
        assert [peers for peers, _ in found] == asked
        copied = [tuple(map(int, block)) for _, each in found for block in zip(*each, strict=True)]
        assert copied == [(30, 300, 1), (31, 301, 2), (10, 100, most_bytes - 3)]


class ReservedMemory:
    """Stands for a symmetric allocation. `most`: how many there can be; with one more, all ranks refuse."""

    is_expired: Callable[[], bool] = lambda: True  # whether the memory before is free
    can_end = staticmethod(lambda: True)

    def __init__(self, num_bytes: int, *_: object, is_lent: bool = False) -> None:
        assert ReservedMemory.is_expired(), "there is more memory before the former is free"
        if not ReservedMemory.most:
            raise RefusedTogetherError("rank 1 has no room")
        ReservedMemory.most -= 1
        self.local, self.addresses = torch.empty(num_bytes, dtype=torch.uint8), [0, 0]

    most = 0


@pytest.fixture
def reserving(copies: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An exchange that has no memory yet, on a double of it."""
    symmetric = importlib.import_module("counterpoint.ops.symmetric")
    monkeypatch.setattr(symmetric, "SymmetricMemory", ReservedMemory)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    made, device = object.__new__(copies.ExpertCopies), torch.device("cpu")
    pools = [symmetric.SymmetricPool(device, None, None, is_lent=is_lent) for is_lent in (False, True)]
    made._pool, made._results = pools[0], MagicMock(pool=pools[1])
    made._sizes, made.addresses, made._num_ranks = copies.RegionSizes(), {}, 2
    made.rank, made.device, made._placed, made._have_triton = 0, device, None, True
    return made


def test_memory_that_grows_is_free_before_there_is_more(
    copies: Any, reserving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    references = importlib.import_module("torch.multiprocessing.reductions").StorageWeakRef
    dispatch, _, combine = copies.ExpertRegion
    rows = copies.RowFormat(4, torch.float32, reserving.device)
    monkeypatch.setattr(ReservedMemory, "most", 4)
    for number in (100, 1000):
        reserving._placed = copies.Placed(number, None)
        reserving.reserve({dispatch: 16 * number, combine: 16 * number})
        assert reserving._placed is None, "own rows that were placed are gone with the memory"
        views = [reserving.region(region, rows, number) for region in (dispatch, combine)]
        assert [len(each) for each in views] == [number, number]
        storage = references(views[0].untyped_storage())
        monkeypatch.setattr(ReservedMemory, "is_expired", storage.expired)
        del views


def test_a_rank_without_room_for_results_leaves_no_rank_with_memory_for_rows(
    copies: Any, reserving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = ModuleType("counterpoint.ops.expert_kernels")
    kernels.Sending, kernels.send_rows = MagicMock(), MagicMock()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    dispatch, _, combine = copies.ExpertRegion
    monkeypatch.setattr(ReservedMemory, "most", 1)
    with pytest.raises(RefusedTogetherError):
        reserving.reserve({dispatch: 160, combine: 160})
    assert not reserving.holds({dispatch: 160})
    reserving.place_ahead(torch.zeros(10, 4), torch.zeros(2, 5, dtype=torch.int64))
    assert not kernels.send_rows.called, "the next call places no rows, because the library takes it"
    assert reserving._pool.num_bytes() + reserving._results.pool.num_bytes() == 0


@pytest.mark.parametrize("third", [0, *(pytest.param(each, marks=pytest.mark.slow) for each in (1, 2))])
@pytest.mark.parametrize("is_one_queue", [False, True], ids=["streams", "one queue"])
@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_no_rank_writes_what_another_still_reads_in_any_order_of_streams(
    copies: Any, monkeypatch: pytest.MonkeyPatch, num_ranks: int, is_one_queue: bool, third: int
) -> None:
    kernels = ModuleType("counterpoint.ops.expert_kernels")
    kernels.Sending = kernels.FirstExperts = MagicMock()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    layouts = importlib.import_module("counterpoint.schedule.expert_layout")
    block_copies = importlib.import_module("counterpoint.ops.block_copies")
    for seed in range(third, 360 // num_ranks, 3):
        chance = random.Random(seed)
        streams = Streams(num_ranks, is_one_queue=is_one_queue)
        ranks = [ModelledRank(copies, streams, rank) for rank in range(num_ranks)]
        for call in range(1, 9):
            is_gathered, num_groups = chance.random() < 0.6, chance.randint(1, 3)
            # first groups go ahead, and all others, or all again, follow; or all go ahead; or the library takes the pass
            kinds = ["none", "none", "first", "both", "dropped", "library", "placed"]
            ahead = chance.choice(kinds if is_gathered else ["none", "none", "library"])
            num_sent_parts = 1 + (ahead == "both" or (ahead != "first" and chance.random() < 0.5))
            has_firsts = ahead == "first" or num_sent_parts == 2
            places = range(ahead == "both", 3)
            regions = sorted(chance.sample(places, chance.randint(0, len(places))))
            counts = np.zeros((num_ranks, num_ranks, 3), dtype=int)
            for source, target in itertools.permutations(range(num_ranks), 2):  # ranks have different numbers of groups
                counts[source, target] = [chance.choice((0, 0, 1, 2)) for _ in range(3)]
            firsts = [chance.randint(1, 3) for _ in range(num_ranks)] if has_firsts else ()
            monkeypatch.setattr(block_copies, "MOST_JOINED_BYTES", chance.choice((0, 1 << 20)))
            for each in ranks:
                layout = layouts.ExpertLayout(counts, each.rank, max(num_groups, 1 + has_firsts), firsts=firsts)
                layout.num_sent_parts = num_sent_parts
                copies.cu.cuEventRecord = each.record
                copies.cu.cuStreamWaitEvent = lambda stream, event, _, each=each: each.await_event(stream, event)
                monkeypatch.setattr(copies, "copy_bytes", each.copy_counts)
                monkeypatch.setattr(copies.results_module, "copy_bytes", each.copy_results)
                kernels.send_rows = each.send_rows  # type: ignore[attr-defined]
                if is_gathered:
                    each.gather(call, layout, is_ahead=ahead not in ("none", "placed"))
                if is_gathered and ahead in ("dropped", "library"):
                    each.copier.end_ahead()
                elif ahead == "placed":
                    each.place()
                elif ahead == "library":
                    each.copier.drop_placed()
                if ahead not in ("library", "placed"):
                    each.run_pass(call, layout, regions, ahead)
        streams.run(chance)
