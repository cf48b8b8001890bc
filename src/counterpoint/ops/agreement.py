"""Ranks of a group comparing what they are about to do, through the group's store, before a schedule is run for the
first time.

It costs a few store requests, once per shape. Ranks that ask for different things, and a rank that does not come,
become the same one-line error on every rank that waits. The limit is the store's time-out, which
`init_process_group(timeout=...)` sets.

Rounds are counted, so ranks of which one gave up would compare different calls from then on. It tells the others by the
store: every later comparison of the group is refused at once, and those that wait are woken. `release()` on every rank
begins anew, under new keys; whether the group's messages still come through after a time-out is up to its backend
(gloo's do not).
"""

from contextlib import suppress
from typing import final

import msgspec
import torch.distributed as dist
from torch.distributed import distributed_c10d

from counterpoint.errors import OperatorError
from counterpoint.value import Value

OUT_OF_STEP = "out of step"  # the key of why
GAVE_UP = b"\0gave up"  # what stands in a round of which nothing comes any more; no content begins like it
NO_STORE = "the group's store does not answer, as a rule because rank 0, which holds it, has ended"


class CallNotice(Value, frozen=True, kw_only=True):
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
        try:
            number = whole.add(f"opened by {self._rank}", 1)  # after release() the rounds begin again, under new keys
        except RuntimeError as problem:
            raise OperatorError(f"T{NO_STORE[1:]}. Look at the other ranks' output, and start all ranks again.") from problem
        self._store = dist.PrefixStore(f"{number}", whole)
        self._round = 0
        self._why_out_of_step = ""

    @property
    def limit_s(self) -> float:
        """How long a rank waits for the others, in seconds."""
        return float(self._store.timeout.total_seconds())

    def compare(self, proposal: CallNotice) -> None:
        """Raise `OperatorError` on every rank unless all of them propose the same and none has a problem."""
        proposals = [msgspec.json.decode(text, type=CallNotice) for text in self.exchange(msgspec.json.encode(proposal))]
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
        """Every rank's content, in the order of ranks. Raises `OperatorError` where the ranks are out of step."""
        self._require_in_step()
        self._round += 1
        keys = self._keys(self._round)
        try:
            self._store.set(keys[self._rank], content)
            found = [self._store.get(key) for key in keys]
        except RuntimeError as problem:
            raise self._missed(keys) from problem
        if GAVE_UP in found:
            self._require_in_step()
            raise self.give_up("another rank gave up")
        return found

    def give_up(self, what: str, whose: str = "the other ranks'") -> OperatorError:
        """The error of a rank that waited in vain: `what` happened, and `whose` output tells more. The group is out of step
        from here on, on all ranks."""
        if not self._why_out_of_step:
            self._why_out_of_step = f"rank {self._rank} gave up: {what}"
            with suppress(RuntimeError):  # the store may have ended with the rank that is missed
                self._tell_others()
        return OperatorError(f"{what[0].upper()}{what[1:]}. Look at {whose} output, and start all ranks again.")

    def _tell_others(self) -> None:
        """Say why the group is out of step, unless another rank has, and wake whoever waits in a round."""
        if self._store.check([OUT_OF_STEP]):
            self._why_out_of_step = self._store.get(OUT_OF_STEP).decode()
            return
        self._store.set(OUT_OF_STEP, self._why_out_of_step)
        for key in self._keys(self._round) + self._keys(self._round + 1):  # nobody can be further
            self._store.set(key, GAVE_UP)

    def _keys(self, number: int) -> list[str]:
        return [f"{number}/{rank}" for rank in range(self._num_ranks)]

    def _require_in_step(self) -> None:
        if not self._why_out_of_step:
            with suppress(RuntimeError):  # where the store has ended, the round that follows says so
                if self._store.check([OUT_OF_STEP]):
                    self._why_out_of_step = self._store.get(OUT_OF_STEP).decode()
        if self._why_out_of_step:
            raise OperatorError(
                f"The ranks of the group are out of step since {self._why_out_of_step}. Start all ranks again."
            )

    def _missed(self, keys: list[str]) -> OperatorError:
        try:
            missing = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
        except RuntimeError:
            return self.give_up(NO_STORE)
        names = f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(missing)}" if missing else "a rank"
        whose = "its" if len(missing) == 1 else "their" if missing else "the other ranks'"
        return self.give_up(f"{names} did not come to the same call within {self.limit_s:g} s, or ended", whose)
