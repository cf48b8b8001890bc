"""Rank 0's part of tuning and of the guard: gather the reports of all ranks, ask the judge, and announce from which step
on the next order holds.

Nothing here waits. Reports arrive late if the GPU is behind the host or ranks are apart. An answer takes effect some
steps later, so that every rank has read it by then. Steps that pass while the GPU or a rank is far behind do not count
against a budget.
"""

from collections.abc import Sequence
from typing import final

import msgspec

from counterpoint.measurement.evidence import Turn, is_timed
from counterpoint.measurement.guard import Guard, Outcome
from counterpoint.measurement.tournament import Tournament
from counterpoint.measurement.values import Measurement, Order, Verdict, summarize_turns
from counterpoint.ranks import Exchange
from counterpoint.supervised.lockstep import LEAD_STEPS, Lockstep
from counterpoint.supervised.messages import RoundReport, report_topic
from counterpoint.supervised.turns import PATH_WARM_UP_TURNS, TURN_STEPS, TurnTimes, slowest_rank

STEPS_TOPIC = "at step"  # key under which waiting ranks publish their progress
WAITING_STEPS = 22  # most steps of the budget that one wait may cost
SLACK_STEPS = 6  # steps by which a wait may exceed the lag and the lead
JOB_ROUNDS = 2  # for a check of a job without a plan: have its steps become longer?
LOOK_LABELS = ("as it is", "the plan")


@final
class AnnouncementLead:
    """The step from which an answer can hold on all ranks: ahead of the foremost rank, and further ahead once a rank was
    late.
    """

    def __init__(self, exchange: Exchange, lockstep: Lockstep) -> None:
        self._exchange, self._lockstep = exchange, lockstep
        self._most_late = self._distance = 0

    def learn(self, reports: Sequence[RoundReport]) -> None:
        """Record how late ranks read the last answer."""
        self._most_late = max([self._most_late, *(report.late_steps for report in reports)])

    @property
    def steps(self) -> int:
        """Return about how many steps ahead an answer will be."""
        return self._distance + LEAD_STEPS + 2 * self._most_late

    def start(self, step: int) -> int:
        """Return the step from which an answer announced now holds."""
        self._distance = max([0, *(at - step for at in self._exchange.noted(STEPS_TOPIC))])
        return max(step + self.steps, self._lockstep.earliest_start)


@final
class Reports:
    """The rounds of one order as all ranks report them, in order."""

    def __init__(self, exchange: Exchange, topic: str, order: Order, order_step: int) -> None:
        self._exchange, self._order, self._order_step = exchange, order, order_step
        self._topic = report_topic(topic, order)
        self._num_gathered = 0
        self.latest: list[RoundReport] = []  # of every rank
        self.last_end = order_step  # steps that had ended when the last gathered round was over

    def gather(self, step: int) -> list[tuple[int, list[TurnTimes]]]:
        """Return the rounds that all ranks have reported since the last call, each with the slowest rank's turns."""
        found = []
        while not self.are_complete() and step >= self._end_of_round(self._num_gathered + 1):
            texts = self._exchange.gathered(self._next_topic())
            if texts is None:
                break
            number = self._order.first_round + self._num_gathered
            self._num_gathered += 1
            self.latest = [msgspec.json.decode(text, type=RoundReport) for text in texts]
            self.last_end = self._end_of_round(self._num_gathered)
            found.append((number, slowest_rank([report.turns for report in self.latest])))
        return found

    def are_complete(self) -> bool:
        """Return whether all ranks have reported all rounds."""
        return self._num_gathered == self._order.num_rounds

    def missing(self) -> list[int]:
        """Return the ranks that have not reported the next round."""
        return self._exchange.missing(self._next_topic())

    def _next_topic(self) -> str:
        return f"{self._topic}/{self._order.first_round + self._num_gathered}"

    def _end_of_round(self, number: int) -> int:
        return self._order_step + number * len(self._order.entrants) * TURN_STEPS


@final
class TuningConductor:
    """Rank 0's part of one tuning, from its first order to the verdict, within a budget that ends with step `last_step`.

    `lag`: the number of steps by which the GPU is behind the host.
    """

    def __init__(self, exchange: Exchange, topic: str, lead: AnnouncementLead, *, last_step: int, lag: int) -> None:
        self._exchange, self._topic, self._lead = exchange, topic, lead
        self._last_step = last_step
        # steps of the budget that an answer takes, from the end of a round to the step at which it takes effect
        self._answer_steps = min(WAITING_STEPS, lag + lead.steps + SLACK_STEPS)
        self._tournament = Tournament(1, 0)
        self._order = Order(number=-1, entrants=(0,), seed=0, num_rounds=0)
        self._after_warm_up: tuple[int, Order | Verdict] | None = None  # the first answer, until it is announced
        self.reports: Reports | None = None  # of the present order

    def num_turns(self, start_step: int, waited_since: int) -> int:
        """Return how many turns the budget has from a step on, less those of the last answer; `waited_since` is when a
        wait began.
        """
        last_step = self._last_step + self._excused(start_step, waited_since) - self._answer_steps
        return max(0, last_step - start_step) // TURN_STEPS

    def answer_turns(self) -> int:
        """Return how many turns a new order costs."""
        return -(-self._answer_steps // TURN_STEPS)

    def begin(
        self, num_variants: int, seed: int, start_step: int, waited_since: int, warmed: Sequence[int] = ()
    ) -> Order | Verdict:
        """Return the first order, from a step on, after a wait that began at another.

        Variants in `warmed` first take turns that do not count; then `conduct` returns the tournament's first order.
        """
        warm_up = Order(number=-1, entrants=tuple(warmed), seed=seed, num_rounds=PATH_WARM_UP_TURNS)
        num_steps = len(warmed) * PATH_WARM_UP_TURNS * TURN_STEPS
        begins, since = start_step + num_steps, waited_since + num_steps
        self._tournament = Tournament(num_variants, seed)
        answer = self._tournament.begin(self.num_turns(begins, since), self.answer_turns())
        self._take(answer, begins, since)
        if not warmed or isinstance(answer, Verdict):
            return answer
        self._after_warm_up = begins, answer
        return warm_up

    def conduct(self, step: int) -> tuple[int, Order | Verdict] | None:
        """Return what follows from the reports so far, and from which step on."""
        if self._after_warm_up is not None:
            first, self._after_warm_up = self._after_warm_up, None
            return first
        reports = self.reports
        assert reports is not None, "there is an order"
        found = reports.gather(step)
        if found:
            self._lead.learn(reports.latest)
            start = self._lead.start(step)
        for place, (number, turns) in enumerate(found):
            self._tournament.add(self._order.number, number, turns)
            is_over = reports.are_complete() and place == len(found) - 1
            answer = self._tournament.next(self.num_turns(start, reports.last_end), is_over=is_over)
            if answer is not None:
                self._take(answer, start, reports.last_end)
                return start, answer
        return None

    def _excused(self, start_step: int, waited_since: int) -> int:
        """Return the steps of a wait that do not count: those beyond the planned time."""
        return max(0, start_step - waited_since - self._answer_steps)

    def missing(self) -> list[int]:
        """Return the ranks that have not reported the next round."""
        return self.reports.missing() if self.reports is not None else []

    def measurements(self, labels: Sequence[str]) -> tuple[Measurement, ...]:
        """Return what was measured so far."""
        return self._tournament.measurements(labels)

    def _take(self, answer: Order | Verdict, start_step: int, waited_since: int) -> None:
        self._last_step += self._excused(start_step, waited_since)
        if isinstance(answer, Order):
            self._order, self.reports = answer, Reports(self._exchange, self._topic, answer, start_step)


@final
class GuardConductor:
    """Rank 0's part of the guard of one decision. It compares the plan with the unmodified job, or measures the job
    alone.
    """

    def __init__(self, exchange: Exchange, topic: str, lead: AnnouncementLead, *, seed: int, has_plan: bool) -> None:
        self._exchange, self._topic, self._lead = exchange, topic, lead
        self._guard = Guard(seed) if has_plan else None
        self._order = Order(number=-1, entrants=(0,), seed=seed, num_rounds=0)
        self._alone: list[Turn] = []  # for a job without a plan
        self.reports: Reports | None = None  # of the present order

    def look(self, order_step: int) -> Order:
        """Return the rounds of a new check, from a step on."""
        if self._guard is not None:
            return self._take(self._guard.look(), order_step)
        self._alone.clear()
        last = self._order
        first = last.first_round + last.num_rounds
        order = Order(number=last.number + 1, entrants=(0,), seed=last.seed, num_rounds=JOB_ROUNDS, first_round=first)
        return self._take(order, order_step)

    def go_on(self, order_step: int) -> Order:
        """Return more rounds of the same check."""
        assert self._guard is not None, "only a look at a plan goes on"
        return self._take(self._guard.go_on(), order_step)

    def conduct(self, step: int) -> tuple[int, Outcome] | None:
        """Return the result of a check, and from which step on it holds, once all ranks have reported its rounds."""
        reports = self.reports
        assert reports is not None, "there is an order"
        for number, turns in reports.gather(step):
            self._lead.learn(reports.latest)
            if self._guard is not None:
                self._guard.add(number, turns)
            elif turns[0] is not None and is_timed(turns[0]):
                self._alone.append(turns[0])
        if not reports.are_complete():
            return None
        return self._lead.start(step), self._guard.settle() if self._guard is not None else "keep"

    @property
    def looks_until_next(self) -> int:
        """Return the delay to the next check, as a multiple of the usual interval."""
        return self._guard.looks_until_next if self._guard is not None else 1

    def measurements(self) -> tuple[Measurement, ...]:
        """Return the turns of this check; the unmodified job comes first."""
        if self._guard is not None:
            return self._guard.measurements(LOOK_LABELS)
        return summarize_turns(LOOK_LABELS[:1], [{0: turn} for turn in self._alone])

    def missing(self) -> list[int]:
        """Return the ranks that have not reported the next round."""
        return self.reports.missing() if self.reports is not None else []

    def _take(self, order: Order, order_step: int) -> Order:
        self._order, self.reports = order, Reports(self._exchange, self._topic, order, order_step)
        return order
