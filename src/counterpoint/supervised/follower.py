"""What every rank of a tuned job does alike, step by step: put tables in force, take turns, report them, hear what follows.

Nobody waits for another rank, nor for the GPU. A rank that has taken its turns goes back to the table at rest and looks each
step whether rank 0 has announced what follows; on rank 0 the same loop asks whoever conducts. It knows nothing of torch or
of the driver: clock, exchange and table are handed in.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Protocol, TypeVar, final

import msgspec

from counterpoint.launch_filter.control_block import FilterRule, FilterState, RuleCounters
from counterpoint.measurement.orders import draw_seed
from counterpoint.plan import Refusal
from counterpoint.ranks import Exchange, describe_gone
from counterpoint.supervised.conductor import STEPS_TOPIC
from counterpoint.supervised.decisions import Grid
from counterpoint.supervised.messages import Announcement, ControlTarget, RoundReport, report_topic
from counterpoint.supervised.proof import prove_rule
from counterpoint.supervised.running_job import AbstractStepClock, JobGpu
from counterpoint.supervised.settings import LiveRecord, TableTotals, add_counters
from counterpoint.supervised.turns import Turns

PATIENCE_STEPS = 100  # how long rank 0 waits for another rank; the others wait for rank 0 twice as long

T = TypeVar("T")
Steps = Generator[None, None, T]
Rules = tuple[FilterRule, ...]


class SwappableTable(Protocol):
    """The filter's table in this process: `ControlBlock`, or a double."""

    def swap(self, rules: Sequence[FilterRule]) -> int:
        """Put another table in force."""

    def state(self) -> FilterState:
        """Counters of the table in force, and the kernels seen."""


class LiveJob(msgspec.Struct, frozen=True, kw_only=True):
    """What a tuner is given of the job that it runs in."""

    clock: AbstractStepClock
    exchange: Exchange
    table: SwappableTable
    gpu: JobGpu | None
    say: Callable[[str], None]
    record: Callable[[LiveRecord], None]
    keep: Callable[[TableTotals], None]
    draw_seed: Callable[[], int] = draw_seed


class TuningStopped(Exception):  # noqa: N818  an outcome, not a mistake
    """The ranks cannot go on tuning together; the message says why."""


class Waited(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 waits for: `conduct` says what follows once it can, `missing` who has not reported yet."""

    conduct: Callable[[], Announcement | None]
    missing: Callable[[], Sequence[int]]


@final
class Follower:
    """One rank: how many steps have ended here, and which table is in force."""

    def __init__(self, job: LiveJob, in_force: Rules) -> None:
        self.step = 0
        self.is_first = job.exchange.rank == 0
        self._job = job
        self._in_force = in_force
        self._totals = TableTotals(rules=in_force)
        self._launches: dict[str, int] = {}
        self._proofs: dict[ControlTarget, Refusal | None] = {}  # why a control had no effect here; None if it had
        self._num_heard = 0
        self._late_steps = 0

    # --- answers of rank 0 ---

    def announce(self, answer: Announcement) -> None:
        """On rank 0: tell all ranks. Whoever reported under the answer before has heard the one before that."""
        self._job.exchange.announce(f"answer/{self._num_heard}", msgspec.json.encode(answer).decode())
        self._job.exchange.forget(f"answer/{self._num_heard - 2}")

    def answer(self, waited: Waited, at_rest: Rules) -> Steps[Announcement]:
        """The next answer, from the step on that it holds from."""
        return (yield from self._follow(waited, None, (), at_rest))

    def take_turns(
        self, topic: str, given: Announcement, tables: Sequence[Rules], waited: Waited, at_rest: Rules
    ) -> Steps[Announcement]:
        """Take the turns of an order, whose entrants are places in `tables`, until the next answer holds."""
        order = given.order
        assert order is not None, "turns were announced"
        yield from self.until(given.order_step)
        turns = Turns(order, given.order_step, self._job.clock)
        entrants = [tables[variant] for variant in order.entrants]
        return (yield from self._follow(waited, (report_topic(topic, order), turns), entrants, at_rest))

    def _follow(
        self, waited: Waited, taken: tuple[str, Turns] | None, tables: Sequence[Rules], at_rest: Rules
    ) -> Steps[Announcement]:
        is_announced, num_waited = False, 0
        while True:
            if self.is_first and not is_announced:
                is_announced = self._conduct(waited, num_waited)
            answer = self._heard()
            if answer is not None and self.step >= answer.start_step:
                self._num_heard += 1
                self._late_steps = self.step - answer.start_step
                return answer
            entrant = taken[1].entrant_at(self.step) if taken else None
            self.use(at_rest if entrant is None else tables[entrant])
            if entrant is None:
                self._job.exchange.note(STEPS_TOPIC, self.step)
            yield
            is_waiting = taken is None or self._report(*taken)
            num_waited += is_waiting and answer is None
            if num_waited > 2 * PATIENCE_STEPS:
                raise TuningStopped("rank 0 gave no answer")

    def _conduct(self, waited: Waited, num_waited: int) -> bool:
        """On rank 0: announce what follows, if that is known; give up, for all ranks, when patience is at its end."""
        answer = waited.conduct()
        if answer is None and num_waited >= PATIENCE_STEPS:
            gone = describe_gone(waited.missing(), "the same step", f"{PATIENCE_STEPS} steps")
            answer = Announcement(start_step=self.step, problem=gone.rstrip("."))
        if answer is not None:
            self.announce(answer)
        return answer is not None

    def _heard(self) -> Announcement | None:
        text = self._job.exchange.heard(f"answer/{self._num_heard}")
        if text is None:
            return None
        answer = msgspec.json.decode(text, type=Announcement)
        if answer.problem:
            raise TuningStopped(answer.problem)
        return answer

    def _report(self, topic: str, turns: Turns) -> bool:
        """A step has ended: mark it, and report the rounds that the GPU has come past. Whether all are reported."""
        if turns.step_ended(self.step):
            self._prove()
        for number, times in turns.read(self.step):
            report = RoundReport(
                turns=times,
                late_steps=self._late_steps,
                engaged=tuple(control for control, refusal in self._proofs.items() if refusal is None),
                unengaged=tuple(refusal for refusal in self._proofs.values() if refusal is not None),
            )
            self._job.exchange.offer(f"{topic}/{number}", msgspec.json.encode(report).decode())
        return turns.is_read()

    def until(self, step: int) -> Steps[None]:
        """Run on until so many steps have ended."""
        while self.step < step:
            yield

    def warm_up(self, step: int) -> Steps[int]:
        """Run on until so many steps have ended; by how many steps the GPU is behind then, as far as it can be seen."""
        marks = []
        while self.step < step:
            marks.append(self._job.clock.mark())
            yield
        now = self._job.clock.mark() if marks else None
        return sum(self._job.clock.elapsed_us(marks[0], mark) is None for mark in (*marks, now)) if marks else 0

    # --- the table ---

    def use(self, rules: Rules) -> None:
        """Put a table in force, unless it is already."""
        if rules == self._in_force:
            return
        if self._in_force and self._in_force == self._totals.rules:
            self._keep_totals()
        self._job.table.swap(rules)
        self._in_force = rules

    def count_for(self, rules: Rules) -> None:
        """Count launches for this plan from now on, whenever it is in force; that this is kept proves that it was."""
        self._totals = TableTotals(rules=rules)
        self._job.keep(self._totals)

    def forget_proofs(self) -> None:
        """A tuning begins: what took effect before does not count."""
        self._proofs.clear()

    def see_launches(self) -> tuple[dict[str, Grid], dict[str, int]]:
        """Grids, and numbers of launches, of the kernels launched since the last call."""
        grids: dict[str, Grid] = {}
        totals: dict[str, int] = {}
        for function in self._job.table.state().functions:
            totals[function.name] = totals.get(function.name, 0) + function.num_launches
            grids[function.name] = function.grid
        launches = {name: total - self._launches.get(name, 0) for name, total in totals.items()}
        self._launches = totals
        active = {name for name, number in launches.items() if number > 0}
        return {name: grids[name] for name in active}, {name: launches[name] for name in active}

    def _keep_totals(self) -> None:
        """The plan leaves force for a while: keep what was counted, for the proof at the end."""
        counted = self._job.table.state().counters
        before = self._totals.counters or tuple(RuleCounters() for _ in counted)
        counters = tuple(add_counters(*pair) for pair in zip(before, counted, strict=True))
        self._totals = TableTotals(rules=self._totals.rules, counters=counters)
        self._job.keep(self._totals)

    def _prove(self) -> None:
        """What became of the table's controls in the turn that ends; an effect in any turn counts."""
        state = self._job.table.state()
        for rule, counters in zip(state.rules, state.counters, strict=True):
            for proven in prove_rule(rule, counters):
                entry = proven.engagement
                key = (entry.control, entry.target)
                if entry.state == "verified":
                    self._proofs[key] = None
                elif self._proofs.get(key, entry) is not None:
                    self._proofs[key] = Refusal(control=entry.control, target=entry.target, reason=entry.reason)
