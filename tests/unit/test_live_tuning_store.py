"""Texts between ranks through a real store of torch.distributed, and the clocks: nothing waits for what is not there."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from counterpoint.cuda.running_job import HostClock, LoneExchange
from counterpoint.cuda.torch_job import STORE_LIMIT, StoreExchange, is_rank_of_job, job_clock, job_exchange, job_gpu
from counterpoint.errors import DeviceError

JOB_LIMIT = timedelta(seconds=77)


@pytest.fixture
def store() -> dist.TCPStore:
    """A store as a process group has one, on a port of the system's choice."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=JOB_LIMIT, wait_for_workers=False)


def test_texts_are_gathered_by_rank_once_all_are_there_and_announced_to_all(store: dist.TCPStore) -> None:
    ranks = [StoreExchange(dist.PrefixStore("job", store), rank, 3) for rank in range(3)]
    for rank in (2, 0):
        ranks[rank].offer("census", f"from {rank}")
    assert ranks[0].gathered("census") is None
    assert ranks[1].heard("census") is None
    ranks[1].offer("census", "from 1")
    assert ranks[0].gathered("census") == ["from 0", "from 1", "from 2"]
    ranks[0].announce("census", "decided")
    assert [rank.heard("census") for rank in ranks] == ["decided"] * 3
    assert ranks[0].heard("other") is None


def test_the_jobs_own_store_keeps_its_limit_and_its_keys(store: dist.TCPStore) -> None:
    exchange = StoreExchange(store, 0, 1)
    exchange.offer("topic", "text")
    assert store.timeout == JOB_LIMIT != STORE_LIMIT
    assert not store.check(["topic", "topic/0"])


def test_a_restarted_job_does_not_hear_what_the_one_before_announced(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    StoreExchange(store, 0, 1).announce("topic", "old")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert StoreExchange(store, 0, 1).heard("topic") is None


def test_several_ranks_without_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(DeviceError, match="cannot agree"):
        job_exchange()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert isinstance(job_exchange(), LoneExchange)


def test_a_process_is_a_rank_if_a_launcher_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert not is_rank_of_job()
    monkeypatch.setenv("RANK", "0")
    assert is_rank_of_job()


def test_alone_what_is_offered_is_all_there_is() -> None:
    alone = LoneExchange()
    assert alone.rank == 0
    assert alone.gathered("topic") is alone.heard("topic") is None
    alone.offer("topic", "mine")
    alone.announce("topic", "decided")
    assert (alone.gathered("topic"), alone.heard("topic")) == (["mine"], "decided")


@pytest.mark.skipif(job_gpu() is not None, reason="this process computes on a GPU")
def test_without_a_gpu_the_hosts_time_counts() -> None:
    clock = job_clock()
    assert isinstance(clock, HostClock)
    start = clock.mark()
    assert clock.elapsed_us(start, start + 0.25) == pytest.approx(250_000)
