"""A rendezvous of ranks on the CPU: ranks start together, agree, and detect that one of them is gone.

Every wait has a limit. If a rank does not answer within it, or a replay does not end, the wait raises `DeviceError` instead
of hanging.
"""

import os
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist

from counterpoint.errors import DeviceError, PlanError
from counterpoint.ranks import Exchange, LocalStore


def num_ranks() -> int:
    """Return how many ranks the job has; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def open_exchange(purpose: str, limit_s: float) -> Exchange:
    """Open an exchange among all ranks of the job, through the store of their process group; a lone process exchanges alone.

    All ranks must open it for the same purpose, equally often and in the same order. It has a connection of its own, so its
    limit is not the job's, and other threads may use the job's connection meanwhile.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return Exchange(LocalStore(), rank=0, num_ranks=1, limit_s=limit_s)
    own = dist.distributed_c10d._get_default_store().clone()  # torch has no public name for it
    own.set_timeout(timedelta(seconds=limit_s))
    # torchrun's agents on different nodes may count restarts differently (torch 2.13, elastic/agent/server/api.py)
    is_one_node = os.environ.get("LOCAL_WORLD_SIZE", "") in ("", str(dist.get_world_size()))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_one_node else "0"
    whole = dist.PrefixStore(f"counterpoint/{purpose}/{attempt}", own)
    rank = dist.get_rank()
    number = whole.add(f"opened by {rank}", 1)
    return Exchange(dist.PrefixStore(f"{number}", whole), rank=rank, num_ranks=dist.get_world_size(), limit_s=limit_s)


class Rendezvous:
    """The meeting point of all ranks of the job, or of this process alone without a process group."""

    def __init__(self, limit_s: float) -> None:
        self._exchange = open_exchange("rendezvous", limit_s)
        self.num_ranks, self.rank = self._exchange.num_ranks, self._exchange.rank
        self.is_first_rank = self.rank == 0

    def meet(self) -> None:
        """Wait for all ranks."""
        self._exchange.round(b"", "the common start")

    def slowest(self, value: float) -> float:
        """Return the largest of all ranks' values, on every rank."""
        return self.slowest_of([value])[0]

    def each(self, value: float) -> list[float]:
        """Return every rank's value, by rank, on every rank."""
        texts = self._exchange.round(msgspec.json.encode(value), "the comparison")
        return [msgspec.json.decode(text, type=float) for text in texts]

    def slowest_of(self, values: Sequence[float]) -> list[float]:
        """Return the largest of all ranks' values at each position, on every rank; all ranks pass equally many."""
        return [max(each) for each in self._compare(values)]

    def least_of(self, values: Sequence[float]) -> list[float]:
        """Return the smallest of all ranks' values at each position, on every rank; all ranks pass equally many."""
        return [min(each) for each in self._compare(values)]

    def _compare(self, values: Sequence[float]) -> Iterator[tuple[float, ...]]:
        """Return all ranks' values at each position. Raises `DeviceError` if their numbers of values differ."""
        texts = self._exchange.round(msgspec.json.encode(values), "the comparison of times")
        everyone = [msgspec.json.decode(text, type=list[float]) for text in texts]
        if len({len(each) for each in everyone}) > 1:
            raise DeviceError(
                "The ranks captured different steps, so their times cannot be compared. Capture the same step."
            )
        return zip(*everyone, strict=True)

    def agree(self, fingerprint: str, text: str) -> str:
        """Return rank 0's text on every rank. Raises `PlanError` on all ranks if their fingerprints differ."""
        own = msgspec.json.encode((fingerprint, text))
        texts = self._exchange.round(own, "the choice of a plan")
        everyone = [msgspec.json.decode(each, type=tuple[str, str]) for each in texts]
        found = [entry for entry, _ in everyone]
        if len(set(found)) > 1:
            raise PlanError(
                f"The ranks captured different steps ({', '.join(found)}), so one plan cannot fit them. Capture the same "
                "operations with the same shapes on every rank."
            )
        return everyone[0][1]

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Wait until the GPU has passed `event`, at most the limit: a collective whose peer is gone never ends by itself."""
        deadline = time.monotonic() + self._exchange.limit_s
        while not event.query():
            if time.monotonic() > deadline:
                raise DeviceError(
                    f"A replay did not end within {self._exchange.limit_s:g} s: a collective waits for a rank "
                    "that is gone or runs another step. Look at the other ranks' output, and start all ranks "
                    "again."
                )
