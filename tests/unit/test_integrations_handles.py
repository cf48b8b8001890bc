"""What the handle of an asynchronous collective by copies answers while a GPU is at it, on a double of its event."""

from datetime import timedelta

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from counterpoint.integrations.piecewise import CopiesWork


class Event:
    """An event that has ended when it was asked so many times."""

    def __init__(self, num_asked: int) -> None:
        self.num_left = num_asked

    def query(self) -> bool:
        self.num_left -= 1
        return self.num_left < 0


def handle_of(num_asked: int) -> CopiesWork:
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result([torch.ones(2)])
    return CopiesWork(future, Event(num_asked))


def test_a_collective_is_complete_when_the_gpu_has_ended_it() -> None:
    assert [handle_of(1).is_completed(), handle_of(0).is_completed()] == [False, True]


def test_the_host_waits_only_with_a_time_out_and_no_longer_than_that() -> None:
    unlimited = handle_of(3)
    assert unlimited.wait()
    assert not unlimited.is_completed(), "the stream waits"
    limited = handle_of(3)
    assert limited.wait(timedelta(seconds=30))
    assert limited.is_completed()
    with pytest.raises(dist.DistBackendError, match=r"has not ended within 0:00:00\.01"):
        handle_of(1 << 30).wait(timedelta(seconds=0.01))
