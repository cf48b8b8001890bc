"""Tuning while the job runs: one course of steps, the same on every rank, that tries tables of rules and keeps the best.

The course is a generator: each `yield` is one step of the job. All ranks count steps alike, so a turn begins on all of
them at the end of the same step. What has to be agreed goes through the exchange: each rank offers what it saw, rank 0
decides, and its answer says from which step on it holds. Nobody waits: who has no answer yet runs on as the job was and
looks again a step later; who gets none within a number of steps goes back to the job as it was.

    warm up -> candidates -> heat -> final -> the best, or nothing -> guard -> (again, where the job has changed)

It knows nothing of torch or of the driver: clock, exchange and table are handed in. What rank 0 decides:
`live_decisions.py`.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Protocol, TypeVar

import msgspec

from counterpoint.cuda.running_job import AbstractExchange, AbstractStepClock, JobGpu
from counterpoint.cuda.timing import order_of_round
from counterpoint.launch_filter.control_block import FilterRule, FilterState, RuleCounters
from counterpoint.launch_filter.live_candidates import LiveCandidate
from counterpoint.launch_filter.live_decisions import (
    AS_IT_IS,
    Reference,
    decide,
    look_at,
    pick_finalists,
    propose,
)
from counterpoint.launch_filter.live_messages import (
    Announcement,
    Census,
    Control,
    Decision,
    Finalists,
    Look,
    RaceResult,
    Trials,
)
from counterpoint.launch_filter.live_rounds import AGREEING_STEPS, HEAT_ROUNDS, TURN_STEPS, judge, lay_out, num_final_rounds
from counterpoint.launch_filter.proof import prove_rule
from counterpoint.launch_filter.settings import (
    UNDECIDED,
    LiveRecord,
    LiveSettings,
    Stage,
    TableTotals,
    add_counters,
)
from counterpoint.plan import Plan, Refusal
from counterpoint.units import format_count
from counterpoint.value import Value

WARM_UP_STEPS = 10
LEAD_STEPS = 12  # from rank 0's answer to the step it holds from, so that every rank has heard it
PATIENCE_STEPS = 100  # how long rank 0 waits for the others; they wait for it twice as long
GUARD_ROUNDS = 5
MOST_REOPENED = 2

T = TypeVar("T")
Steps = Generator[None, None, T]
Answer = TypeVar("Answer", bound=Value)


class SwappableTable(Protocol):
    """The filter's table in this process: `ControlBlock`, or a double."""

    def swap(self, rules: Sequence[FilterRule]) -> int:
        """Put another table in force."""

    def state(self) -> FilterState:
        """Counters of the table in force, and the kernels seen."""


class LiveJob(msgspec.Struct, frozen=True, kw_only=True):
    """What a tuner is given of the job that it runs in."""

    clock: AbstractStepClock
    exchange: AbstractExchange
    table: SwappableTable
    gpu: JobGpu | None
    say: Callable[[str], None]
    record: Callable[[LiveRecord], None]
    keep: Callable[[TableTotals], None]


class TuningStopped(Exception):  # noqa: N818  an outcome, not a mistake
    """The ranks cannot go on tuning together; the message says why."""


class LiveTuner:
    """One rank's part of the course. Call `step_ended` after each step; it never waits.

    `earlier` is what was decided before a launcher started the job again: its plan stays on record until there is another.
    """

    def __init__(self, job: LiveJob, settings: LiveSettings, earlier: Decision | None = None) -> None:
        self._job = job
        self._settings = settings
        self._is_first = job.exchange.rank == 0
        self._step = 0
        self._in_force: tuple[FilterRule, ...] = settings.rules
        self._decision = earlier
        self._stage: Stage = "warming up"
        self._num_steps_needed = settings.budget_steps
        self._totals = TableTotals(rules=settings.rules)
        self._launches: dict[str, int] = {}
        self._reference = Reference(grids={})
        self._num_reopened = 0
        self._course = self._run()

    def step_ended(self) -> bool:
        """A step has ended. False once there is nothing more to do."""
        self._step += 1
        try:
            next(self._course)
        except StopIteration:
            return False
        if self._settings.is_tuning and self._stage in UNDECIDED:
            self._record(self._stage)  # a job may end at any step, and then it is told how many it had
        return True

    def revert(self) -> None:
        """Back to the job as it was."""
        self._use(())

    def _run(self) -> Steps[None]:
        try:
            yield from self._until(WARM_UP_STEPS)
            if not self._settings.is_tuning:
                given = Decision(plan=self._settings.plan, rules=self._settings.rules)
                yield from self._watch("given", given, WARM_UP_STEPS)
                return
            begun: int | None = 0
            while begun is not None:
                attempt = self._num_reopened
                start, decision = yield from self._tune(f"tuning/{attempt}", begun)
                begun = yield from self._watch(f"guard/{attempt}", decision, start)
                self._num_reopened += 1
        except TuningStopped as problem:
            self.revert()
            self._tell("stopped", f"live tuning stopped after {self._steps()}: {problem}; the job runs as it was")

    def _tune(self, topic: str, begun: int) -> Steps[tuple[int, Decision]]:
        """Find the best table on live steps; returns the step from which it holds."""
        self.revert()
        budget, gpu = self._settings.budget_steps, self._job.gpu
        self._num_steps_needed = begun + budget
        census = Census(functions=self._job.table.state().functions)
        self._see_launches()
        start, trials = yield from self._agree(
            f"{topic}/candidates",
            census,
            lambda all_: propose(all_, gpu, self._settings, budget - (self._step - begun) - LEAD_STEPS),
            Trials,
        )
        candidates = trials.candidates
        if self._is_first and candidates:
            self._tell(
                "trying candidates",
                f"tuning on live steps: {format_count(len(candidates), 'candidate')} within {budget} steps; "
                "the job's results do not change",
            )
        if candidates and lay_out(len(candidates), budget - (start - begun)).has_heat:
            labels = [AS_IT_IS, *(candidate.label for candidate in candidates)]
            result = yield from self._race(candidates, HEAT_ROUNDS, start)
            start, finalists = yield from self._agree(
                f"{topic}/heat", result, lambda all_: pick_finalists(labels, all_), Finalists
            )
            candidates = tuple(candidates[number - 1] for number in finalists.numbers)
        rounds = num_final_rounds(len(candidates), budget - (start - begun) - AGREEING_STEPS) if candidates else 0
        result = yield from self._race(candidates, rounds, start)
        start, decision = yield from self._agree(
            f"{topic}/final", result, lambda all_: decide(candidates, all_, trials.refusals, gpu), Decision
        )
        self._totals = TableTotals(rules=decision.rules)
        self._use(decision.rules)
        self._decision = decision
        self._settle(decision, begun)
        return start, decision

    def _settle(self, decision: Decision, begun: int) -> None:
        """Remember the job as it is now, and tell what was decided."""
        grids, _ = self._see_launches()
        self._reference = Reference(
            grids=grids, baseline_us=decision.measurements[0].median_us if decision.measurements else 0.0
        )
        took = f"{self._step - begun} of {self._settings.budget_steps} steps"
        self._tell("decided", f"{decision.plan.verdict} after {took}: {decision.plan.summary}")

    def _watch(self, topic: str, decision: Decision, start: int) -> Steps[int | None]:
        """Guard the plan in force for as long as the job runs; the step from which the question is open again, or None."""
        every, rules = self._settings.guard_every_steps, decision.rules
        if not every or (not rules and not self._settings.is_tuning):
            return None
        entrants = [LiveCandidate(label="the plan", directives=(), rules=rules)] if rules else []
        labels = [AS_IT_IS, *(entrant.label for entrant in entrants)]
        point, number = start + (every if self._settings.is_tuning else 0), 0
        while True:
            yield from self._until(point)
            result = yield from self._race(entrants, GUARD_ROUNDS, point)
            self._use(rules)
            opened, look = yield from self._agree(f"{topic}/{number}", result, lambda all_: self._look(labels, all_), Look)
            if look.verdict == "revert":
                self.revert()
                self._decision = Decision(plan=Plan(machine=decision.plan.machine, summary=look.reason))
                self._tell("reverted", f"{look.reason}; reverted for good after {self._steps()}")
                return None
            if look.verdict == "reopen":
                self._tell("warming up", f"{look.reason}; tuning again")
                return opened
            point, number = point + every, number + 1

    def _look(self, labels: Sequence[str], results: Sequence[RaceResult]) -> Look:
        """On rank 0: what its guard's rounds and launches say."""
        times = judge(labels, [result.times for result in results], least_rounds=2)
        grids, launches = self._see_launches()
        if not self._reference.grids:  # a plan that was given: the first look is what later ones are compared with
            self._reference = Reference(grids=grids, baseline_us=times[0].median_us if times else 0.0)
        look = look_at(times, self._reference, grids, launches)
        can_reopen = self._settings.is_tuning and self._num_reopened < MOST_REOPENED
        return look if look.verdict != "reopen" or can_reopen else Look(verdict="keep")

    def _race(self, candidates: Sequence[LiveCandidate], num_rounds: int, first_step: int) -> Steps[RaceResult]:
        """Give the job as it is and each candidate their turns, from the end of step `first_step` on."""
        tables: list[tuple[FilterRule, ...]] = [(), *(candidate.rules for candidate in candidates)]
        marks: list[list[tuple[object, object] | None]] = []
        proofs: dict[Control, Refusal | None] = {}
        for number in range(num_rounds):
            marks.append([None] * len(tables))
            for place, entrant in enumerate(order_of_round(number, len(tables))):
                turn = first_step + (number * len(tables) + place) * TURN_STEPS
                yield from self._until(turn)
                if self._step > turn:
                    continue  # this rank heard of the race too late; the others leave the round out, too
                self._use(tables[entrant])
                yield
                start = self._job.clock.mark()
                yield from self._until(turn + TURN_STEPS)
                marks[number][entrant] = (start, self._job.clock.mark())
                self._prove(proofs)
        self._use(())
        times = yield from self._read_times(marks)
        return RaceResult(
            times=times,
            engaged=tuple(control for control, refusal in proofs.items() if refusal is None),
            unengaged=tuple(refusal for refusal in proofs.values() if refusal is not None),
        )

    def _prove(self, proofs: dict[Control, Refusal | None]) -> None:
        """What became of the table's controls in the turn that ends; an effect in any turn counts."""
        state = self._job.table.state()
        for rule, counters in zip(state.rules, state.counters, strict=True):
            for applied in prove_rule(rule, counters):
                entry = applied.engagement
                key = (entry.control, entry.target)
                if entry.state == "verified":
                    proofs[key] = None
                elif proofs.get(key, entry) is not None:
                    proofs[key] = Refusal(control=entry.control, target=entry.target, reason=entry.reason)

    def _read_times(
        self, marks: Sequence[Sequence[tuple[object, object] | None]]
    ) -> Steps[tuple[tuple[float | None, ...], ...]]:
        """Times of a timed step, once the GPU has come past the last mark; marks are only looked at, never waited for."""
        pairs = [pair for row in marks for pair in row if pair is not None]
        for _ in range(PATIENCE_STEPS):
            # the order of turns differs from round to round, so the last pair in time may be any of them
            while pairs and self._job.clock.elapsed_us(*pairs[-1]) is not None:
                pairs.pop()
            if not pairs:
                return tuple(tuple(self._time_us(pair) for pair in row) for row in marks)
            yield
        raise TuningStopped(f"the GPU is more than {PATIENCE_STEPS} steps behind")

    def _time_us(self, pair: tuple[object, object] | None) -> float | None:
        elapsed_us = self._job.clock.elapsed_us(*pair) if pair is not None else None
        return None if elapsed_us is None else elapsed_us / (TURN_STEPS - 1)

    def _agree(
        self, topic: str, own: T, decision: Callable[[list[T]], Answer], kind: type[Answer]
    ) -> Steps[tuple[int, Answer]]:
        """Rank 0's decision on what all ranks offer, and the step from which it holds; goes on at that step."""
        exchange = self._job.exchange
        exchange.offer(f"{topic}/offer", msgspec.json.encode(own).decode())
        is_announced = False
        for waited in range(PATIENCE_STEPS * (1 if self._is_first else 2)):
            if self._is_first and not is_announced:
                is_announced = self._answer(topic, type(own), decision, is_last=waited == PATIENCE_STEPS - 1)
            text = exchange.heard(topic)
            if text is not None:
                heard = msgspec.json.decode(text, type=Announcement)
                if heard.problem:
                    raise TuningStopped(heard.problem)
                yield from self._until(heard.start_step)
                return heard.start_step, msgspec.json.decode(heard.text, type=kind)
            yield
        raise TuningStopped("rank 0 gave no answer")

    def _answer(self, topic: str, kind: type[T], decision: Callable[[list[T]], Answer], is_last: bool) -> bool:
        """On rank 0: announce the decision if all have offered; give up, for all ranks, when patience is at its end."""
        texts = self._job.exchange.gathered(f"{topic}/offer")
        if texts is None and not is_last:
            return False
        if texts is None:
            announced = Announcement(start_step=0, problem=f"a rank did not answer within {PATIENCE_STEPS} steps")
        else:
            found = decision([msgspec.json.decode(text, type=kind) for text in texts])
            announced = Announcement(start_step=self._step + LEAD_STEPS, text=msgspec.json.encode(found).decode())
        self._job.exchange.announce(topic, msgspec.json.encode(announced).decode())
        return True

    def _until(self, step: int) -> Steps[None]:
        while self._step < step:
            yield

    def _use(self, rules: tuple[FilterRule, ...]) -> None:
        """Put a table in force, unless it is already."""
        if rules == self._in_force:
            return
        if self._in_force and self._in_force == self._totals.rules:
            self._keep_totals()
        self._job.table.swap(rules)
        self._in_force = rules

    def _keep_totals(self) -> None:
        """The plan in force leaves it for a while: keep what was counted, for the proof at the end."""
        counted = self._job.table.state().counters
        before = self._totals.counters or tuple(RuleCounters() for _ in counted)
        counters = tuple(add_counters(*pair) for pair in zip(before, counted, strict=True))
        self._totals = TableTotals(rules=self._totals.rules, counters=counters)
        self._job.keep(self._totals)

    def _see_launches(self) -> tuple[dict[str, tuple[int, int, int]], dict[str, int]]:
        """Grids, and numbers of launches, of the kernels launched since the last call."""
        grids: dict[str, tuple[int, int, int]] = {}
        launches: dict[str, int] = {}
        totals: dict[str, int] = {}
        for function in self._job.table.state().functions:
            totals[function.name] = totals.get(function.name, 0) + function.num_launches
            grids[function.name] = function.grid
        for name, total in totals.items():
            launches[name] = total - self._launches.get(name, 0)
        self._launches = totals
        active = {name for name, number in launches.items() if number > 0}
        return {name: grids[name] for name in active}, {name: launches[name] for name in active}

    def _steps(self) -> str:
        return format_count(self._step, "step")

    def _tell(self, stage: Stage, line: str) -> None:
        """One line, and the record of it; rank 0 speaks for all."""
        if self._is_first:
            self._job.say(line)
        self._record(stage, line)

    def _record(self, stage: Stage, line: str = "") -> None:
        self._stage = stage
        if not self._is_first:
            return
        found = self._decision
        self._job.record(
            LiveRecord(
                stage=stage,
                num_steps=self._step,
                num_steps_needed=self._num_steps_needed,
                plan=found.plan if found else None,
                rules=found.rules if found else (),
                measurements=found.measurements if found else (),
                notes=(line,) if line else (),
            )
        )
