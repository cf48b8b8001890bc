"""Compares the calls that a group's ranks are about to make, through the group's store, before a schedule runs for the
first time.

It costs a few store requests, once per shape. If ranks make different calls, or a rank does not answer, every rank that
waits gets the same one-line error. The limit is the store's time-out, which `init_process_group(timeout=...)` sets.

A rank that cannot make a call reports that and waits for no rank. Ranks that compare read it in their round. Ranks that
run the call, because its shape was compared before, wait for rows: their watchdog asks here (`overheard`) and ends that
wait. Calls are counted, so that a rank that is still at an earlier call continues.

Rounds are counted, so after one rank gave up, ranks would compare different calls. The rank tells the others through the
store: every later comparison of the group is refused at once, and waiting ranks are woken. `release()` on every rank
starts anew, under new keys. Whether the group's messages still arrive after a time-out depends on its backend (gloo's do
not).
"""

from contextlib import suppress
from typing import NoReturn, TypeVar, final

import msgspec
import torch.distributed as dist
from torch.distributed import distributed_c10d

from counterpoint.errors import OperatorError, RefusedTogetherError
from counterpoint.ranks import NO_STORE, Exchange, RankLostError, describe_lost
from counterpoint.value import Value

OUT_OF_STEP = "out of step"  # key of the reason
REFUSED = "refused"  # key of the number of refusals; followed by a rank's number, key of that rank's refusals
MAX_REFUSED = 64  # a rank's latest refusals, kept for ranks that have not reached those calls
Content = TypeVar("Content")
GAVE_UP = b"\0gave up"  # content of a round that will not complete; no other content begins like it


class CallNotice(Value, frozen=True, kw_only=True):
    """The call that a rank is about to make, in words that must be equal on all ranks, or why it cannot make it."""

    request: str = ""
    problem: str = ""
    plan: str = ""  # fingerprint of the plan that it uses
    refused_call: int = 0  # its number, if the rank does not wait for the others


class RefusedCall(Value, frozen=True, kw_only=True):
    """The number of a call that a rank refused, and of the round in which the rank reported it."""

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
        self.num_calls = 0  # calls that this rank has begun or refused
        self._refused: list[RefusedCall] = []  # by this rank, since all ranks last came to a round
        self._known_refused: list[RefusedCall] = []  # by any rank, when `_num_known` refusals were counted
        self._num_known = 0
        self._why_out_of_step = ""
        self._never_ends = ""  # why this rank's present call will not end

    @property
    def limit_s(self) -> float:
        """How long a rank waits for the others, in seconds."""
        return self._exchange.limit_s

    def compare(self, proposal: CallNotice) -> None:
        """Raise `OperatorError` on every rank unless all of them propose the same and none has a problem.

        If a rank has a problem with what all propose, this raises `RefusedTogetherError`, and the ranks stay in step.
        """
        notice = msgspec.structs.replace(proposal, problem=self.named(proposal.problem))
        proposals = exchange_values(self, notice, CallNotice)
        for other in proposals:
            if 0 < other.refused_call < self.num_calls:  # the host is ahead of the GPU, which waits in the refused call
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
                    f"The ranks use different plans in {first}: rank 0 uses {proposals[0].plan or 'none'}, rank "
                    f"{rank} uses {other.plan or 'none'}. Pass the same plan to ops.use_plan on every rank."
                )

    def named(self, problem: str) -> str:
        """Return a problem of this rank in the words that every rank prints; nothing if there is none."""
        return f"Rank {self._rank} of the group: {problem}" if problem else ""

    def refuse(self, problem: str) -> NoReturn:
        """Refuse the latest call without waiting for any rank: raises `OperatorError`, also on the others."""
        self._require_in_step()
        problem = self.named(problem)
        with suppress(RankLostError, RuntimeError):  # the problem with this call is known in any case
            notice = CallNotice(problem=problem, refused_call=self.num_calls)
            self._exchange.come_alone(msgspec.json.encode(notice))
            refused = RefusedCall(call=self.num_calls, round=self._exchange.num_rounds, problem=problem)
            self._refused = [*self._refused, refused][-MAX_REFUSED:]
            self._store.set(f"{REFUSED} {self._rank}", msgspec.json.encode(self._refused))
            self._store.add(REFUSED, 1)
        raise OperatorError(problem)

    def overheard(self) -> str:
        """Return why this rank's present call will not end because another rank refused it; nothing if none did.

        From then on the group is out of step.
        """
        with suppress(RuntimeError):  # the store has ended: the next round reports that
            for refused in [] if self._never_ends else self._all_refused():
                if refused.call <= self.num_calls and refused.round > self._exchange.num_rounds:
                    self._hear_of(refused.problem, refused.round)
                    break
        return self._never_ends

    def _all_refused(self) -> list[RefusedCall]:
        """Return the refused calls that some rank may not have reached, in the order of calls."""
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
        """Return every rank's content, in the order of ranks. Raises `OperatorError` if the ranks are out of step."""
        self._require_in_step()
        try:
            found = self._exchange.round(content)
        except RankLostError as problem:
            raise self.give_up(problem.what, problem.whose) from problem
        if GAVE_UP in found:
            self._require_in_step()
            raise self.give_up("another rank gave up")
        self._refused.clear()  # all ranks have reached this round
        return found

    def give_up(self, what: str, whose: str = "the other ranks'") -> OperatorError:
        """Return the error of a rank whose wait failed: another rank's error if that rank refused the call; otherwise
        `what` happened, and `whose` output tells more. The group is then out of step on all ranks.
        """
        refused = self.overheard()
        if refused:
            return OperatorError(refused)
        self._fall_out_of_step(f"rank {self._rank} gave up: {what}")
        return OperatorError(describe_lost(what, whose))

    def _fall_out_of_step(self, why: str, last_round: int = 0) -> None:
        """Publish why the group is out of step, unless another rank has, and wake ranks that wait in a round. No rank is
        beyond the next round, or beyond the one after `last_round` if some rank went ahead.
        """
        if self._why_out_of_step:
            return
        self._why_out_of_step = why
        with suppress(RuntimeError):  # the store may have ended with the missing rank
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
            with suppress(RuntimeError):  # if the store has ended, the following round reports it
                if self._store.check([OUT_OF_STEP]):
                    self._why_out_of_step = self._store.get(OUT_OF_STEP).decode()
        if self._why_out_of_step:
            raise OperatorError(
                f"The ranks of the group are out of step since {self._why_out_of_step.rstrip('.')}. Start all ranks again."
            )


def exchange_values(agreement: Agreement, own: Content, kind: type[Content]) -> list[Content]:
    """Return every rank's value of this kind, in the order of ranks; values travel as JSON."""
    return [msgspec.json.decode(text, type=kind) for text in agreement.exchange(msgspec.json.encode(own))]
