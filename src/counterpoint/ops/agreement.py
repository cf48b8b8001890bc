"""Ranks of a group comparing what they are about to do, through the group's store, before a schedule is run for the
first time.

It costs a few store requests, once per shape. Ranks that ask for different things, and a rank that does not come,
become the same one-line error on every rank that waits. The limit is the store's time-out, which
`init_process_group(timeout=...)` sets.

A rank that cannot make a call says so and waits for nobody. Ranks that compare read it in their round. Ranks that run the
call, because its shape was compared before, wait for rows: their watchdog asks here (`overheard`) and ends that wait. Calls
are counted, so that a rank which is still at an earlier call goes on.

Rounds are counted, so ranks of which one gave up would compare different calls from then on. It tells the others by the
store: every later comparison of the group is refused at once, and those that wait are woken. `release()` on every rank
begins anew, under new keys; whether the group's messages still come through after a time-out is up to its backend
(gloo's do not).
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn, TypeVar, final

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from counterpoint.errors import OperatorError, RefusedTogetherError, cause_of
from counterpoint.ranks import NO_STORE, Exchange, RankLostError, describe_lost
from counterpoint.units import format_bytes
from counterpoint.value import Value

OUT_OF_STEP = "out of step"  # the key of why
REFUSED = "refused"  # the key of how many refusals there were, and with a rank's number, of its own
MAX_REFUSED = 64  # a rank's latest refusals that are kept for ranks that have not come to these calls
Made = TypeVar("Made")
GAVE_UP = b"\0gave up"  # what stands in a round of which nothing comes any more; no content begins like it


class CallNotice(Value, frozen=True, kw_only=True):
    """What a rank is about to do, in words that must be equal on all ranks, or why it cannot."""

    request: str = ""
    problem: str = ""
    plan: str = ""  # fingerprint of the plan that it goes by
    refused_call: int = 0  # its number, where the rank does not wait for the others


class RefusedCall(Value, frozen=True, kw_only=True):
    """The number of a call that a rank refused, and of the round in which it said so."""

    call: int
    round: int
    problem: str


@final
class Agreement:
    """Numbered rounds of all ranks of one group, and the count of its calls."""

    def __init__(self, group: dist.ProcessGroup, purpose: str) -> None:
        self._rank = int(group.rank())
        whole = dist.PrefixStore(f"counterpoint/{purpose}", distributed_c10d._get_process_group_store(group))
        try:
            number = whole.add(f"opened by {self._rank}", 1)  # after release() the rounds begin again, under new keys
        except RuntimeError as problem:
            raise OperatorError(describe_lost(NO_STORE)) from problem
        self._store = dist.PrefixStore(f"{number}", whole)
        self._exchange = Exchange(self._store, self._rank, int(group.size()), self._store.timeout.total_seconds())
        self.num_calls = 0  # that this rank has begun or refused
        self._refused: list[RefusedCall] = []  # by this rank, since all ranks last came to a round
        self._known_refused: list[RefusedCall] = []  # by any rank, when `_num_known` refusals were counted
        self._num_known = 0
        self._why_out_of_step = ""
        self._never_ends = ""  # why a call that this rank is in will not end

    @property
    def limit_s(self) -> float:
        """How long a rank waits for the others, in seconds."""
        return self._exchange.limit_s

    def compare(self, proposal: CallNotice) -> None:
        """Raise `OperatorError` on every rank unless all of them propose the same and none has a problem.

        Where one has a problem with what all propose, it is a `RefusedTogetherError`, and the ranks stay in step.
        """
        notice = msgspec.structs.replace(proposal, problem=self.named(proposal.problem))
        proposals = [msgspec.json.decode(text, type=CallNotice) for text in self.exchange(msgspec.json.encode(notice))]
        for other in proposals:
            if 0 < other.refused_call < self.num_calls:  # the host is ahead of the GPU, which waits in the call refused
                self._hear_of(other.problem, self._exchange.num_rounds)
            if other.problem:
                raise (OperatorError if other.refused_call else RefusedTogetherError)(other.problem)
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

    def named(self, problem: str) -> str:
        """A problem of this rank, as every rank says it; nothing where there is none."""
        return f"Rank {self._rank} of the group: {problem}" if problem else ""

    def refuse(self, problem: str) -> NoReturn:
        """Refuse the call that is counted last, without waiting for anybody: raises `OperatorError`, on the others, too."""
        self._require_in_step()
        problem = self.named(problem)
        with suppress(RankLostError, RuntimeError):  # what is wrong with this call is known in any case
            notice = CallNotice(problem=problem, refused_call=self.num_calls)
            self._exchange.come_alone(msgspec.json.encode(notice))
            refused = RefusedCall(call=self.num_calls, round=self._exchange.num_rounds, problem=problem)
            self._refused = [*self._refused, refused][-MAX_REFUSED:]
            self._store.set(f"{REFUSED} {self._rank}", msgspec.json.encode(self._refused))
            self._store.add(REFUSED, 1)
        raise OperatorError(problem)

    def overheard(self) -> str:
        """Why a call that this rank is in will not end, because another rank refused it; nothing where none did.

        From then on the group is out of step.
        """
        with suppress(RuntimeError):
            for refused in [] if self._never_ends else self._all_refused():
                if refused.call <= self.num_calls and refused.round > self._exchange.num_rounds:
                    self._hear_of(refused.problem, refused.round)
                    break
        return self._never_ends

    def _all_refused(self) -> list[RefusedCall]:
        """What ranks refused and others may not have come to, the first call first."""
        number = self._store.add(REFUSED, 0)
        if number != self._num_known:
            keys = [f"{REFUSED} {rank}" for rank in range(self._exchange.num_ranks)]
            texts = [self._store.get(key) for key in keys if self._store.check([key])]
            found = [each for text in texts for each in msgspec.json.decode(text, type=list[RefusedCall])]
            self._known_refused, self._num_known = sorted(found, key=lambda each: each.call), number
        return self._known_refused

    def _hear_of(self, problem: str, last_round: int) -> None:
        self._never_ends = problem
        self._fall_out_of_step(f"a call was refused. {problem}", last_round)

    def exchange(self, content: bytes) -> list[bytes]:
        """Every rank's content, in the order of ranks. Raises `OperatorError` where the ranks are out of step."""
        self._require_in_step()
        try:
            found = self._exchange.round(content)
        except RankLostError as problem:
            raise self.give_up(problem.what, problem.whose) from problem
        if GAVE_UP in found:
            self._require_in_step()
            raise self.give_up("another rank gave up")
        self._refused.clear()  # all have come this far
        return found

    def give_up(self, what: str, whose: str = "the other ranks'") -> OperatorError:
        """The error of a rank that waited in vain: another rank's, if that refused the call; or `what` happened, and `whose`
        output tells more. The group is out of step from here on, on all ranks."""
        refused = self.overheard()
        if refused:
            return OperatorError(refused)
        self._fall_out_of_step(f"rank {self._rank} gave up: {what}")
        return OperatorError(describe_lost(what, whose))

    def _fall_out_of_step(self, why: str, last_round: int = 0) -> None:
        """Say why the group is out of step, unless another rank has, and wake whoever waits in a round. Nobody is further
        than in the next one, or than one behind `last_round`, where somebody went ahead."""
        if self._why_out_of_step:
            return
        self._why_out_of_step = why
        with suppress(RuntimeError):  # the store may have ended with the rank that is missed
            if self._store.check([OUT_OF_STEP]):
                self._why_out_of_step = self._store.get(OUT_OF_STEP).decode()
                return
            self._store.set(OUT_OF_STEP, why)
            present = self._exchange.num_rounds
            for number in range(present, max(present, last_round) + 2):
                for key in self._exchange.keys_of_round(number):
                    self._store.set(key, GAVE_UP)

    def _require_in_step(self) -> None:
        if not self._why_out_of_step:
            with suppress(RuntimeError):  # where the store has ended, the round that follows says so
                if self._store.check([OUT_OF_STEP]):
                    self._why_out_of_step = self._store.get(OUT_OF_STEP).decode()
        if self._why_out_of_step:
            raise OperatorError(
                f"The ranks of the group are out of step since {self._why_out_of_step.rstrip('.')}. Start all ranks again."
            )


def host_memory(num_bytes: int, what: str, agreement: Agreement) -> torch.Tensor:
    """Bytes of ordinary memory, which stands for symmetric memory on CPUs: all ranks have it, or all raise
    `RefusedTogetherError`, as on GPUs. `what` it is for is the same on all ranks."""
    memory, problem = torch.empty(0, dtype=torch.uint8), ""
    try:
        memory = torch.empty(num_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        problem = f"{format_bytes(num_bytes)} for {what} cannot be had ({cause_of(error, 160)})"
    agreement.compare(CallNotice(request=f"{num_bytes} bytes for {what}", problem=problem))
    return memory


def share_obstacles(made: Sequence[Made | str], exchange: Callable[[object], list[bytes]]) -> list[Made | str]:
    """What this rank made. Where a rank has a text instead, which says why it made nothing, every rank gets that text.

    All ranks call it with as many entries; of several texts for one entry the first rank's counts. `exchange` gives what
    every rank hands it, as JSON, in the order of ranks.
    """
    own = [each if isinstance(each, str) else "" for each in made]
    everyone = [msgspec.json.decode(text, type=list[str]) for text in exchange(own)]
    return [
        next((obstacle for obstacle in found if obstacle), each)
        for each, found in zip(made, zip(*everyone, strict=True), strict=True)
    ]
