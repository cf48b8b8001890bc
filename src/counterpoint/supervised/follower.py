"""What every rank of a tuned job does alike, step by step: put tables in force, take turns, report them, hear what follows.

Nobody waits for the GPU, nor for another rank unless paths are switched (`lockstep.py`). A rank that has taken its turns
goes back to the setting at rest and looks each step whether rank 0 has announced what follows; on rank 0 the same loop asks
whoever conducts. It knows nothing of torch or of the driver: clock, exchange, table and paths are handed in.
"""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol, TypeVar, final

import msgspec
from msgspec.structs import replace

from counterpoint.integrations.paths import LIBRARY, AbstractJobPaths, NoPaths, PathCounts, PathOffer, Paths, path_problems
from counterpoint.launch_filter.control_block import FilterRule, FilterState, RuleCounters
from counterpoint.measurement.orders import draw_seed
from counterpoint.plan import Refusal
from counterpoint.ranks import Exchange, describe_gone
from counterpoint.supervised.conductor import STEPS_TOPIC
from counterpoint.supervised.decisions import Grid
from counterpoint.supervised.lockstep import FOREVER, Lockstep
from counterpoint.supervised.messages import Announcement, ControlTarget, RoundReport, report_topic
from counterpoint.supervised.proof import prove_rule, why_no_copies
from counterpoint.supervised.running_job import AbstractStepClock, JobGpu
from counterpoint.supervised.settings import UNCHANGED, LiveRecord, Setting, Totals, add_counters
from counterpoint.supervised.turns import Turns

HOLD_S = 0.0005  # between two looks of a rank that is held
PATIENCE_STEPS = 100  # how long rank 0 waits for another rank; the others wait for rank 0 twice as long

NOTHING_LAUNCHED = "this process has launched nothing on a GPU, so nothing can be tuned or guarded"
NO_ANSWER = "rank 0 gave no answer"

T = TypeVar("T")
BEGUN, HELD = False, True  # yielded where the job's next step may begin, and where it has to wait before it
Steps = Generator[bool, None, T]


class SwappableTable(Protocol):
    """The filter's table in this process: `ControlBlock`, or a double."""

    def swap(self, rules: Sequence[FilterRule]) -> int:
        """Put another table in force."""

    def state(self) -> FilterState:
        """Counters of the table in force, and the kernels seen."""


@final
class NoTable:
    """The table of a process without launches: what is put in force changes nothing."""

    def __init__(self, pid: int) -> None:
        self._state = FilterState(
            pid=pid,
            rank=-1,
            generation=0,
            num_launches=0,
            num_launches_ex=0,
            driver="",
            rules=(),
            counters=(),
            functions=(),
            problem="",
        )

    def swap(self, rules: Sequence[FilterRule]) -> int:
        """See `SwappableTable.swap`."""
        return 0

    def state(self) -> FilterState:
        """See `SwappableTable.state`."""
        return self._state


class LiveJob(msgspec.Struct, frozen=True, kw_only=True):
    """What a tuner is given of the job that it runs in."""

    clock: AbstractStepClock
    exchange: Exchange
    table: SwappableTable
    gpu: JobGpu | None
    say: Callable[[str], None]
    record: Callable[[LiveRecord], None]
    keep: Callable[[Totals], None]
    paths: AbstractJobPaths = NoPaths()
    hold: Callable[[], None] = partial(time.sleep, HOLD_S)
    hold_limit_s: float = 120.0
    draw_seed: Callable[[], int] = draw_seed


@final
class Patience:
    """How long this rank's job has been held before a step, and whether that is longer than the limit."""

    def __init__(self, job: LiveJob, limit_s: float) -> None:
        self._job, self._limit_s = job, limit_s
        self._since_s: float | None = None

    def wait(self) -> bool:
        """Wait a little; False once that was too long."""
        now_s = time.monotonic()
        self._since_s = now_s if self._since_s is None else self._since_s
        if now_s - self._since_s > self._limit_s:
            return False
        self._job.hold()
        return True


class TuningStopped(Exception):  # noqa: N818  an outcome, not a mistake
    """The ranks cannot go on tuning together; the message says why."""


class Waited(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 waits for: `conduct` says what follows once it can, `missing` who has not reported yet."""

    conduct: Callable[[], Announcement | None]
    missing: Callable[[], Sequence[int]]


@final
class Follower:
    """One rank: how many steps have ended here, and what is in force."""

    def __init__(self, job: LiveJob, in_force: Setting) -> None:
        self.step = 0
        self.is_first = job.exchange.rank == 0
        self.lockstep = Lockstep(job.exchange)
        self._job = job
        self._in_force = in_force
        self._totals = Totals(setting=in_force, rank=job.exchange.rank)
        self._latest: Announcement | None = None  # that holds
        self.offers: Sequence[PathOffer] = ()  # of paths, as all ranks agreed
        self._launches: dict[str, int] = {}
        self._proofs: dict[ControlTarget, Refusal | None] = {}  # why a control had no effect here; None if it had
        self._num_heard = 0
        self._late_steps = 0
        self._listens_from = 0  # the step before which no rank asks for answers

    # --- answers of rank 0 ---

    def announce(self, answer: Announcement) -> None:
        """On rank 0: tell all ranks. Whoever reported under the answer before has heard the one before that."""
        number = self._num_heard + (self._next_answer() is not None)  # what was announced is never another answer later
        self._job.exchange.announce(f"answer/{number}", msgspec.json.encode(answer).decode())
        self._job.exchange.forget(f"answer/{number - 2}")
        self.lockstep.extend(answer.order_step)

    def everyone(self, topic: str, text: str) -> Steps[list[str]]:
        """Every rank's text, by rank; the job waits for it, so all ranks come here after the same step."""
        self._job.exchange.offer(topic, text)
        while (texts := self._job.exchange.offered(topic)) is None:
            yield HELD
        return texts

    def answer(self, waited: Waited, at_rest: Setting) -> Steps[Announcement]:
        """The next answer, from the step on that it holds from."""
        return (yield from self._follow(waited, None, (), at_rest))

    def take_turns(
        self, topic: str, given: Announcement, settings: Sequence[Setting], waited: Waited, at_rest: Setting
    ) -> Steps[Announcement]:
        """Take the turns of an order, whose entrants are places in `settings`, until the next answer holds."""
        order = given.order
        assert order is not None, "turns were announced"
        yield from self.until(given.order_step)
        turns = Turns(order, given.order_step, self._job.clock)
        entrants = [settings[variant] for variant in order.entrants]
        return (yield from self._follow(waited, (report_topic(topic, order), turns), entrants, at_rest))

    def follow_blindly(self, reason: str) -> Steps[None]:
        """After a failure here: take the paths that the others take and measure nothing, until rank 0 ends the tuning.

        The table is a rank's own matter, and is empty from the start.
        """
        with suppress(Exception):  # it may be what failed
            self._empty_table()
        if self.is_first:
            pending = self._next_answer()
            if pending is None or not pending.is_last:
                self.announce(self._end(f"rank 0 can no longer measure: {reason}"))
            self.lockstep.extend(FOREVER)
        else:
            self.lockstep.tell_failure(reason)
        while True:
            while (answer := self._next_answer()) is not None and self.step >= answer.start_step:
                self._num_heard += 1
                self._latest = answer
                if answer.is_last:
                    self._job.paths.use(answer.rest_paths)
                    return
            self._job.paths.use(self._paths_announced())
            yield BEGUN

    def _empty_table(self) -> None:
        if self._in_force == self._totals.setting:
            self.keep_totals()
        if self._in_force.rules:
            self._job.table.swap(())
            self._in_force = replace(self._in_force, rules=())

    def _paths_announced(self) -> Paths:
        """The paths of the step that begins, as the latest answer says."""
        latest = self._latest
        if latest is None or latest.order is None:
            return latest.rest_paths if latest is not None else self._in_force.paths
        entrant = Turns(latest.order, latest.order_step, self._job.clock).entrant_at(self.step)
        return latest.rest_paths if entrant is None else latest.variant_paths[latest.order.entrants[entrant]]

    def _follow(
        self, waited: Waited, taken: tuple[str, Turns] | None, settings: Sequence[Setting], at_rest: Setting
    ) -> Steps[Announcement]:
        is_announced, num_waited = False, 0
        while True:
            if self.is_first and not is_announced:
                is_announced = self._conduct(waited, num_waited)
            answer = self._next_answer()
            if answer is not None and self.step >= answer.start_step:
                self._num_heard += 1
                self._late_steps = self.step - answer.start_step
                self._latest = answer
                if answer.problem:
                    raise TuningStopped(answer.problem)
                return answer
            entrant = taken[1].entrant_at(self.step) if taken else None
            self.use(at_rest if entrant is None else settings[entrant])
            if entrant is None:
                self._job.exchange.note(STEPS_TOPIC, self.step)
            yield BEGUN
            is_waiting = taken is None or self._report(*taken)
            num_waited += is_waiting and answer is None
            if num_waited > 2 * PATIENCE_STEPS and not self.lockstep.is_on:  # else who leaves alone parts from the others
                raise TuningStopped(NO_ANSWER)

    def _conduct(self, waited: Waited, num_waited: int) -> bool:
        """On rank 0: announce what follows, if that is known; give up, for all ranks, when patience is at its end."""
        failure = self.lockstep.failure()
        answer = self._end(f"{failure}; it can no longer measure") if failure else waited.conduct()
        if answer is None and num_waited >= PATIENCE_STEPS:
            gone = describe_gone(waited.missing(), "the same step", f"{PATIENCE_STEPS} steps")
            answer = self._end(gone.rstrip("."))
        if answer is not None:
            self.announce(answer)
        return answer is not None

    def _end(self, problem: str) -> Announcement:
        """On rank 0: that all ranks go back to the job as it was."""
        pending = self._next_answer()
        start = max(self.step, self.lockstep.earliest_start, self._listens_from)
        if pending is not None:
            start = max(start, pending.start_step, pending.order_step)
        return Announcement(start_step=start, problem=problem)

    def _next_answer(self) -> Announcement | None:
        """The answer that is not in force yet, if it was announced."""
        text = self._job.exchange.heard(f"answer/{self._num_heard}")
        return None if text is None else msgspec.json.decode(text, type=Announcement)

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
        self._listens_from = step
        while self.step < step:
            yield BEGUN

    def warm_up(self, step: int) -> Steps[int]:
        """Run on until so many steps have ended; by how many steps the GPU is behind then, as far as it can be seen."""
        marks = []
        self._listens_from = step
        while self.step < step:
            marks.append(self._job.clock.mark())
            yield BEGUN
        now = self._job.clock.mark() if marks else None
        return sum(self._job.clock.elapsed_us(marks[0], mark) is None for mark in (*marks, now)) if marks else 0

    # --- what is in force ---

    def use(self, setting: Setting) -> None:
        """Put a setting in force, unless it is already."""
        if setting == self._in_force:
            return
        if self._in_force != UNCHANGED and self._in_force == self._totals.setting:
            self.keep_totals()
        if setting.rules or self._in_force.rules:  # a swap of a table for itself sets its counters to 0
            self._job.table.swap(setting.rules)
        self._job.paths.use(setting.paths)
        self._in_force = setting

    def count_for(self, setting: Setting) -> None:
        """Count for this plan from now on, whenever it is in force; that this is kept proves that it was."""
        self._totals = Totals(setting=setting, rank=self._job.exchange.rank)
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

    def keep_totals(self) -> None:
        """The plan leaves force for a while: keep what was counted, for the proof at the end."""
        counted = self._job.table.state().counters
        before = self._totals.counters or tuple(RuleCounters() for _ in counted)
        counters = tuple(add_counters(*pair) for pair in zip(before, counted, strict=True))
        self._totals = replace(self._totals, counters=counters, paths=self._counts_of(self._totals.setting.paths))
        self._job.keep(self._totals)

    def keep_paths(self) -> None:
        """Keep what was counted of the plan's paths so far; the filter's own counters are in its block until a swap."""
        if self._totals.setting.paths != LIBRARY:
            self._job.keep(replace(self._totals, paths=self._counts_of(self._totals.setting.paths)))

    def _counts_of(self, paths: Paths) -> tuple[PathCounts, ...]:
        """What was counted under these paths; of what nobody could take, why."""
        problems = path_problems(paths, self.offers)
        return tuple(replace(each, problem=problems.get(each.target, "")) for each in self._job.paths.counts(paths))

    def _prove(self) -> None:
        """What became of the table's controls in the turn that ends; an effect in any turn counts."""
        for counts in self._counts_of(self._in_force.paths):
            key = (counts.control, counts.target)
            if counts.num_by_copies:
                self._proofs[key] = None
            elif self._proofs.get(key, counts) is not None:
                self._proofs[key] = Refusal(control=counts.control, target=counts.target, reason=why_no_copies(counts))
        state = self._job.table.state()
        for rule, counters in zip(state.rules, state.counters, strict=True):
            for proven in prove_rule(rule, counters):
                entry = proven.engagement
                key = (entry.control, entry.target)
                if entry.state == "verified":
                    self._proofs[key] = None
                elif self._proofs.get(key, entry) is not None:
                    self._proofs[key] = Refusal(control=entry.control, target=entry.target, reason=entry.reason)
