"""Exchanges texts between ranks through a key-value store, either blocking (all ranks wait for each other) or polled.

The store is that of the process group (torch's `Store`), or a dictionary for a single process. A *round* is a
rendezvous: every rank gives a text and waits for all others, up to a time-out. *Topics* are polled: each rank offers a
text, rank 0 gathers the texts of all ranks once they are there and announces an answer, and a rank that finds no answer
yet asks again later. Keys are deleted when no rank can need them any more. This module knows nothing of torch or of what
the texts mean.
"""

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol, final

from counterpoint.errors import DeviceError
from counterpoint.units import format_numbered

# The variables that launchers set in each process: torchrun and Ray Train, Open MPI, PMIx, MPICH and Intel MPI, MVAPICH,
# Slurm. The launch filter (block.c) reads the same names. Slurm's are last, because under `srun torchrun` they count
# nodes.
RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
SIZE_VARIABLES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
NO_STORE = "the store of the process group does not answer, most likely because rank 0, which holds it, has ended"


class KeyValueStore(Protocol):
    """The store interface needed here, as in `torch.distributed.Store`. Calls raise `RuntimeError` if the store is gone."""

    def set(self, key: str, value: str | bytes, /) -> None:
        """Store a value."""

    def get(self, key: str, /) -> bytes:
        """Return the value of a key; wait for it, up to the store's time-out."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys exist; never waits for a key."""

    def delete_key(self, key: str, /) -> bool:
        """Delete a key; return whether it existed."""


@final
class LocalStore:
    """A store within one process: for a job of one process, and for tests with a thread per rank."""

    def __init__(self, limit_s: float = 0.0) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._limit_s = limit_s

    def set(self, key: str, value: str | bytes, /) -> None:
        """See `KeyValueStore.set`."""
        with self._changed:
            self._values[key] = value.encode() if isinstance(value, str) else value
            self._changed.notify_all()

    def get(self, key: str, /) -> bytes:
        """See `KeyValueStore.get`."""
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, self._limit_s):
                raise RuntimeError(f"nobody set the key '{key}' within {self._limit_s:g} s")
            return self._values[key]

    def check(self, keys: list[str], /) -> bool:
        """See `KeyValueStore.check`."""
        return all(key in self._values for key in keys)

    def delete_key(self, key: str, /) -> bool:
        """See `KeyValueStore.delete_key`."""
        with self._changed:
            return self._values.pop(key, None) is not None


class RankLostError(DeviceError):
    """A rank did not reach a round in time, or the store has ended: `what` happened, and `whose` output tells more."""

    def __init__(self, what: str, whose: str = "the other ranks'") -> None:
        super().__init__(describe_lost(what, whose))
        self.what, self.whose = what, whose


@final
class Exchange:
    """Exchanges texts between the ranks of one group. `limit_s` is the store's time-out: how long a round waits."""

    def __init__(self, store: KeyValueStore, rank: int, num_ranks: int, limit_s: float) -> None:
        self.rank, self.num_ranks, self.limit_s = rank, num_ranks, limit_s
        self._store = store
        self._num_rounds = 0
        self._num_deleted = 0  # rounds whose text by this rank was deleted from the store

    @property
    def num_rounds(self) -> int:
        """The number of rounds that this rank has reached."""
        return self._num_rounds

    # --- rounds: every rank waits for all others ---

    def round(self, text: bytes, what: str = "the same call") -> list[bytes]:
        """Exchange texts and return every rank's, by rank. Raises `RankLostError`, which names the ranks that did not
        reach `what`.
        """
        self._num_rounds += 1
        keys = self.keys_of_round(self._num_rounds)
        try:
            self._store.set(keys[self.rank], text)
            found = [self._store.get(key) for key in keys]
        except RuntimeError as problem:
            raise self._who_is_gone(keys, what) from problem
        with suppress(RuntimeError):  # a rank in this round has read all of the round before
            while self._num_deleted < self._num_rounds - 2:
                self._num_deleted += 1
                self._store.delete_key(self.keys_of_round(self._num_deleted)[self.rank])
        return found

    def come_alone(self, text: bytes) -> None:
        """Join a round without waiting: the others read this rank's text when they arrive. Raises `RankLostError`."""
        self._num_rounds += 1
        try:
            self._store.set(self.keys_of_round(self._num_rounds)[self.rank], text)
        except RuntimeError as problem:
            raise RankLostError(NO_STORE) from problem

    def keys_of_round(self, number: int) -> list[str]:
        """Return the keys of a round, by rank."""
        return [f"{number}/{rank}" for rank in range(self.num_ranks)]

    def _who_is_gone(self, keys: Sequence[str], what: str) -> RankLostError:
        try:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        except RuntimeError:
            return RankLostError(NO_STORE)
        return RankLostError(*_gone(missing, what, f"{self.limit_s:g} s"))

    # --- topics: nobody waits ---

    def offer(self, topic: str, text: str) -> None:
        """Offer rank 0 a text of this rank. A topic is used once."""
        self._store.set(f"{topic}/{self.rank}", text)

    def gathered(self, topic: str) -> list[str] | None:
        """On rank 0: return every rank's text by rank, or None while one is missing. Gathering deletes them."""
        keys = [f"{topic}/{rank}" for rank in range(self.num_ranks)]
        if not self._store.check(keys):
            return None
        texts = [self._store.get(key).decode() for key in keys]
        for key in keys:
            self._store.delete_key(key)
        return texts

    def missing(self, topic: str) -> list[int]:
        """On rank 0: return the ranks that have offered nothing under a topic."""
        return [rank for rank in range(self.num_ranks) if not self._store.check([f"{topic}/{rank}"])]

    def announce(self, topic: str, text: str) -> None:
        """On rank 0: announce an answer to all ranks."""
        self._store.set(topic, text)

    def heard(self, topic: str) -> str | None:
        """Return what rank 0 announced, or None."""
        return self._store.get(topic).decode() if self._store.check([topic]) else None

    def note(self, topic: str, number: int) -> None:
        """Publish a number of this rank; a later one replaces it."""
        self._store.set(f"{topic}/{self.rank}", str(number))

    def noted(self, topic: str) -> list[int]:
        """On rank 0: return the numbers that ranks have published so far."""
        return list(self.noted_by_rank(topic).values())

    def noted_by_rank(self, topic: str) -> dict[int, int]:
        """On any rank: return the latest number of each rank that has published one."""
        keys = {rank: f"{topic}/{rank}" for rank in range(self.num_ranks)}
        return {rank: int(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}

    def forget(self, topic: str) -> None:
        """On rank 0: delete an announcement that every rank has read."""
        self._store.delete_key(topic)


def launched_rank(environment: Mapping[str, str]) -> int | None:
    """Return the rank that a launcher gave this process, or None."""
    return _first_number(environment, RANK_VARIABLES)


def launched_size(environment: Mapping[str, str]) -> int:
    """Return how many ranks a launcher started; 1 without a launcher."""
    return _first_number(environment, SIZE_VARIABLES) or 1


def _first_number(environment: Mapping[str, str], names: Sequence[str]) -> int | None:
    return next((int(text) for name in names if (text := environment.get(name, "")).isdecimal()), None)


def describe_gone(missing: Sequence[int], what: str, limit: str) -> str:
    """Describe ranks that are gone; `what` is what they did not reach, within which `limit`."""
    return describe_lost(*_gone(missing, what, limit))


def _gone(missing: Sequence[int], what: str, limit: str) -> tuple[str, str]:
    """Return what happened, and whose output tells more."""
    names = format_numbered("rank", missing) if missing else "a rank"
    whose = "its" if len(missing) == 1 else "their" if missing else "the other ranks'"
    return f"{names} did not reach {what} within {limit}, or ended", whose


def describe_lost(what: str, whose: str = "the other ranks'") -> str:
    """Describe what happened and what to do: `whose` output tells more."""
    return f"{what[0].upper()}{what[1:]}. Look at {whose} output, and start all ranks again."
