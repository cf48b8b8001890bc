"""Ranks of a group comparing what they are about to do, through the group's store, before a schedule is run for the
first time.

It costs a few store requests, once per shape. Ranks that ask for different things, and a rank that does not come,
become the same one-line error on every rank that waits. The limit is the store's time-out, which
`init_process_group(timeout=...)` sets.
"""

from typing import final

import msgspec
import torch.distributed as dist
from torch.distributed import distributed_c10d

from counterpoint.errors import OperatorError, cause_of
from counterpoint.value import Value


class Proposal(Value, frozen=True, kw_only=True):
    """What a rank is about to do, in words that must be equal on all ranks, or why it cannot."""

    request: str = ""
    problem: str = ""
    plan: str = ""  # fingerprint of the plan that it goes by


@final
class Agreement:
    """Numbered rounds of all ranks of one group."""

    def __init__(self, group: dist.ProcessGroup, purpose: str) -> None:
        self._rank, self._num_ranks = group.rank(), group.size()
        whole = dist.PrefixStore(f"counterpoint/{purpose}", distributed_c10d._get_process_group_store(group))
        number = whole.add(f"opened by {self._rank}", 1)  # after release() the rounds begin again, under new keys
        self._store = dist.PrefixStore(f"{number}", whole)
        self._round = 0

    @property
    def limit_s(self) -> float:
        """How long a rank waits for the others, in seconds."""
        return float(self._store.timeout.total_seconds())

    def compare(self, proposal: Proposal) -> None:
        """Raise `OperatorError` on every rank unless all of them propose the same and none has a problem."""
        proposals = [msgspec.json.decode(text, type=Proposal) for text in self.exchange(msgspec.json.encode(proposal))]
        for rank, other in enumerate(proposals):
            if other.problem:
                raise OperatorError(f"Rank {rank} of the group: {other.problem}")
        first = proposals[0].request
        for rank, other in enumerate(proposals):
            if other.request != first:
                raise OperatorError(
                    f"The ranks disagree: rank 0 calls {first}, rank {rank} calls {other.request}. Call the same operator "
                    "with the same shapes on every rank."
                )
            if other.plan != proposals[0].plan:
                raise OperatorError(
                    f"The ranks go by different plans in {first}: rank 0 by {proposals[0].plan or 'none'}, rank {rank} by "
                    f"{other.plan or 'none'}. Give ops.use_plan the same plan on every rank."
                )

    def exchange(self, content: bytes) -> list[bytes]:
        """Every rank's content, in the order of ranks."""
        self._round += 1
        keys = [f"{self._round}/{rank}" for rank in range(self._num_ranks)]
        try:
            self._store.set(keys[self._rank], content)
            return [self._store.get(key) for key in keys]
        except RuntimeError as problem:
            raise OperatorError(self._lost(keys, problem)) from problem

    def _lost(self, keys: list[str], problem: RuntimeError) -> str:
        try:
            missing = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
        except RuntimeError:
            missing = []
        names = f"rank {', '.join(missing)}" if missing else "a rank"
        cause = cause_of(problem, 120)
        return (
            f"{names.capitalize()} did not come to the same call within {self.limit_s:g} s, or ended ({cause}). "
            "Look at its output, and start all ranks again."
        )
