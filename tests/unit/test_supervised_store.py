"""Texts between ranks, over a real store of torch.distributed and over the local one; polling never waits."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from counterpoint.errors import DeviceError
from counterpoint.ranks import Exchange, LocalStore, RankLostError
from counterpoint.supervised.running_job import HostClock
from counterpoint.supervised.torch_job import is_rank_of_job, job_clock, job_exchange, job_gpu

Stores = Callable[[], object]


@pytest.fixture(params=["torch", "local"])
def stores(request: pytest.FixtureRequest) -> Stores:
    """A connection to one store for each call: torch's, as a process group has one, on a free port, or the local one."""
    if request.param == "local":
        local = LocalStore(limit_s=0.5)
        return lambda: local
    limit = timedelta(seconds=0.5)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=limit, wait_for_workers=False)

    def connect() -> dist.Store:
        own = store.clone()
        own.set_timeout(limit)
        return dist.PrefixStore("job", own)

    return connect


def exchanges(stores: Stores, num_ranks: int) -> list[Exchange]:
    return [Exchange(stores(), rank, num_ranks, limit_s=0.5) for rank in range(num_ranks)]


def test_texts_are_gathered_by_rank_once_all_are_there_and_announced_to_all(stores: Stores) -> None:
    ranks = exchanges(stores, 3)
    for rank in (2, 0):
        ranks[rank].offer("census", f"from {rank}")
    assert ranks[0].gathered("census") is None
    assert ranks[0].missing("census") == [1]
    assert ranks[1].heard("answer") is None
    ranks[1].offer("census", "from 1")
    assert ranks[0].gathered("census") == ["from 0", "from 1", "from 2"]
    assert ranks[0].missing("census") == [0, 1, 2], "what was gathered is deleted"
    ranks[0].announce("answer", "decided")
    assert [rank.heard("answer") for rank in ranks] == ["decided"] * 3
    ranks[0].forget("answer")
    assert ranks[2].heard("answer") is None


def test_numbers_that_ranks_note_take_the_place_of_earlier_ones(stores: Stores) -> None:
    ranks = exchanges(stores, 3)
    assert ranks[0].noted("at") == []
    for number in (1, 7):
        ranks[2].note("at", number)
    ranks[1].note("at", 3)
    assert sorted(ranks[0].noted("at")) == [3, 7]


def test_a_round_gives_every_text_to_every_rank_and_leaves_few_keys() -> None:
    store = LocalStore(limit_s=10)
    ranks = exchanges(lambda: store, 4)

    def rounds(exchange: Exchange) -> list[list[bytes]]:
        return [exchange.round(f"{number} of {exchange.rank}".encode()) for number in range(50)]

    with ThreadPoolExecutor(4) as pool:
        found = [each.result() for each in [pool.submit(rounds, exchange) for exchange in ranks]]
    assert all(each == found[0] for each in found)
    assert found[0][49] == [f"49 of {rank}".encode() for rank in range(4)]
    assert len(store._values) <= 3 * 4


def test_a_round_that_a_rank_does_not_come_to_names_it(stores: Stores) -> None:
    ranks = exchanges(stores, 3)
    ranks[0].offer("1", "as if it were there already")
    with pytest.raises(RankLostError, match=r"^Rank 1 did not reach the harbour within 0\.5 s, or ended\. Look at its"):
        ranks[2].round(b"", "the harbour")


def test_several_ranks_without_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(DeviceError, match="cannot agree"):
        job_exchange()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert job_exchange().num_ranks == 1


def test_a_restarted_job_does_not_hear_what_the_one_before_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    job_exchange().announce("topic", "old")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert job_exchange().heard("topic") is None


def test_a_process_is_a_rank_if_a_launcher_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert not is_rank_of_job()
    monkeypatch.setenv("RANK", "0")
    assert is_rank_of_job()


@pytest.mark.skipif(job_gpu() is not None, reason="this process computes on a GPU")
def test_without_a_gpu_the_hosts_time_counts() -> None:
    clock = job_clock()
    assert isinstance(clock, HostClock)
    start = clock.mark()
    assert clock.elapsed_us(start, start + 0.25) == pytest.approx(250_000)
