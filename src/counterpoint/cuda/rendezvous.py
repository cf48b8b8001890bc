"""Ranks meeting on the CPU: to start together, to agree, and to notice that one of them is gone.

Every wait has a limit. A rank that does not answer within it, or a replay that does not end, becomes one `DeviceError`
instead of a hang.
"""

import time
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from counterpoint.errors import DeviceError, PlanError, cause_of

T = TypeVar("T")


class Rendezvous:
    """All ranks of the job, or this process alone where there is no process group."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        is_joined = dist.is_initialized()
        self.num_ranks = dist.get_world_size() if is_joined else 1
        self.is_first_rank = not is_joined or dist.get_rank() == 0
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=limit_s)) if is_joined else None

    def meet(self) -> None:
        """Wait for all ranks."""
        self.slowest(0.0)

    def slowest(self, value: float) -> float:
        """The largest value of all ranks, on every rank."""
        if self._group is None:
            return value
        shared = torch.tensor([value], dtype=torch.float64)
        try:
            dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as problem:
            raise self._lost(problem) from problem
        return float(shared.item())

    def agree(self, fingerprint: str, value: T) -> T:
        """Rank 0's value on every rank. Raises `PlanError` on all of them if their fingerprints differ."""
        if self._group is None:
            return value
        everyone: list[tuple[str, T]] = [(fingerprint, value)] * self.num_ranks
        try:
            dist.all_gather_object(everyone, (fingerprint, value), group=self._group)
        except RuntimeError as problem:
            raise self._lost(problem) from problem
        found = [entry for entry, _ in everyone]
        if len(set(found)) > 1:
            raise PlanError(
                f"The ranks captured different steps ({', '.join(found)}), so one plan cannot fit them. Capture the same "
                "operations with the same shapes on every rank."
            )
        return everyone[0][1]

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Wait until the GPU has passed `event`; a collective whose peer is gone never ends by itself."""
        deadline = time.monotonic() + self._limit_s
        while not event.query():
            if time.monotonic() > deadline:
                raise DeviceError(
                    f"A replay did not end within {self._limit_s:g} s: a collective waits for a rank that is gone or runs "
                    "another step. Look at the other ranks' output, and start all of them again."
                )

    def _lost(self, problem: RuntimeError) -> DeviceError:
        cause = cause_of(problem, 160)
        return DeviceError(
            f"Another rank did not answer within {self._limit_s:g} s, or ended ({cause}). Look at its output, and start all "
            "ranks again."
        )
