"""The part of tuning that every rank does, step by step: apply tables, take turns, report them, read the next answer.

Unless paths are switched, no rank waits for another (`lockstep.py`), nor for its GPU (`_gpu_caught_up`). A rank that has
taken its turns returns to the resting setting and checks at each step whether rank 0 has announced what follows; on rank 0
the same loop asks the conductor. This module knows nothing of torch or of the driver: clock, exchange, table and paths
are passed in.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import TypeVar, final

import msgspec

from counterpoint.integrations.paths import Paths
from counterpoint.ranks import describe_gone
from counterpoint.supervised.conductor import STEPS_TOPIC
from counterpoint.supervised.in_force import InForce
from counterpoint.supervised.lockstep import FOREVER, Lockstep
from counterpoint.supervised.messages import Announcement, RoundReport, report_topic
from counterpoint.supervised.running_job import LiveJob
from counterpoint.supervised.settings import Setting
from counterpoint.supervised.turns import Turns

PATIENCE_STEPS = 100  # how long rank 0 waits for another rank; the others wait twice as long for rank 0

NO_ANSWER = "rank 0 gave no answer"

T = TypeVar("T")
BEGUN, HELD = False, True  # yielded when the job's next step may begin, and when it has to wait before it
Steps = Generator[bool, None, T]


class TuningStopped(Exception):  # noqa: N818  an outcome, not a mistake
    """The ranks cannot go on tuning together; the message says why."""


class Waited(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 waits for: `conduct` returns what follows once it can, `missing` the ranks that have not reported yet."""

    conduct: Callable[[], Announcement | None]
    missing: Callable[[], Sequence[int]]


@final
class Follower:
    """One rank: how many steps have ended here, and the setting in force."""

    def __init__(self, job: LiveJob, in_force: Setting) -> None:
        self.step = 0
        self.is_first = job.exchange.rank == 0
        self.lockstep = Lockstep(job.exchange)
        self._job = job
        self.in_force = InForce(job, in_force)
        self._latest: Announcement | None = None  # that holds
        self._num_heard = 0
        self._late_steps = 0
        self._listens_from = 0  # no rank asks for answers before this step

    # --- answers of rank 0 ---

    def announce(self, answer: Announcement) -> None:
        """On rank 0: tell all ranks.

        A rank that reported under an answer has read it. Of the last three answers, one or two may have no reports:
        warm-up turns of paths have none, and a failure can follow any answer at once.
        """
        number = self._num_heard + (self._next_answer() is not None)  # a later answer never replaces what was announced
        self._job.exchange.announce(f"answer/{number}", msgspec.json.encode(answer).decode())
        self._job.exchange.forget(f"answer/{number - 3}")
        self.lockstep.extend(answer.order_step)

    def everyone(self, topic: str, text: str) -> Steps[list[str]]:
        """Return every rank's text, by rank. The job waits for it, so all ranks get here after the same step.

        Rank 0 reads them and passes them on in one text: if every rank read every other's, the store of a job with
        thousands of ranks would answer millions of requests.
        """
        exchange = self._job.exchange
        exchange.offer(topic, text)
        while True:
            if self.is_first and (texts := exchange.gathered(topic)) is not None:
                exchange.announce(f"{topic}/all", msgspec.json.encode(texts).decode())
                return texts
            if not self.is_first and (all_texts := exchange.heard(f"{topic}/all")) is not None:
                return msgspec.json.decode(all_texts, type=list[str])
            yield HELD

    def answer(self, waited: Waited, at_rest: Setting) -> Steps[Announcement]:
        """Wait for the next answer, until the step from which it holds."""
        return (yield from self._follow(waited, None, (), at_rest))

    def take_turns(
        self, topic: str, given: Announcement, settings: Sequence[Setting], waited: Waited, at_rest: Setting
    ) -> Steps[Announcement]:
        """Take the turns of an order, whose entrants are indexes into `settings`, until the next answer holds."""
        order = given.order
        assert order is not None, "turns were announced"
        yield from self.until(given.order_step)
        turns = Turns(order, given.order_step, self._job.clock)
        entrants = [settings[variant] for variant in order.entrants]
        return (yield from self._follow(waited, (report_topic(topic, order), turns), entrants, at_rest))

    def follow_blindly(self, reason: str) -> Steps[None]:
        """After a failure on this rank: take the same paths as the others and measure nothing, until rank 0 ends the
        tuning.

        The filter's table concerns only this rank, and is empty from the start.
        """
        with suppress(Exception):  # this may be what failed
            self.in_force.empty_table()
        if self.is_first:
            self.end_for_all(f"rank 0 can no longer measure: {reason}")
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

    def _paths_announced(self) -> Paths:
        """Return the paths of the step that begins, according to the latest answer."""
        latest = self._latest
        if latest is None or latest.order is None:
            return latest.rest_paths if latest is not None else self.in_force.setting.paths
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
            self.in_force.use(at_rest if entrant is None else settings[entrant])
            if entrant is None:
                self._job.exchange.note(STEPS_TOPIC, self.step)
            elif taken and self.lockstep.is_on and taken[1].is_first_of_turn(self.step):
                yield from self._gpu_caught_up()
            yield BEGUN
            is_waiting = taken is None or self._report(*taken)
            num_waited += is_waiting and answer is None
            # otherwise a rank that leaves alone diverges from the others
            if num_waited > 2 * PATIENCE_STEPS and not self.lockstep.is_on:
                raise TuningStopped(NO_ANSWER)

    def _gpu_caught_up(self) -> Steps[None]:
        """Hold the job until the GPU has done all its work so far.

        The host issues a step by copies more slowly than one by the library. A host that is ahead from turns of the
        library hides that: a path whose steps wait for the host would be measured without the wait, and win. (2 H100s, 96
        all-reduces a step: 22 ms by copies in such turns, 33 ms by copies for good, 28 ms by the library.) A turn's first
        step, which is not timed, gives the host the lead that the path itself allows.
        """
        mark = self._job.clock.mark()
        while self._job.clock.elapsed_us(mark, mark) is None:
            yield HELD

    def _conduct(self, waited: Waited, num_waited: int) -> bool:
        """On rank 0: announce what follows, if that is known; give up for all ranks at the time-out."""
        failure = self.lockstep.failure()
        answer = self._end(f"{failure}; it can no longer measure") if failure else waited.conduct()
        if answer is None and num_waited >= PATIENCE_STEPS:
            gone = describe_gone(waited.missing(), "the same step", f"{PATIENCE_STEPS} steps")
            answer = self._end(gone.rstrip("."))
        if answer is not None:
            self.announce(answer)
        return answer is not None

    def end_for_all(self, problem: str) -> None:
        """On rank 0: tell all ranks that nothing follows but the return to the unmodified job."""
        pending = self._next_answer()
        if pending is None or not pending.is_last:
            self.announce(self._end(problem))
        self.lockstep.extend(FOREVER)

    def _end(self, problem: str) -> Announcement:
        """Return the answer that sends all ranks back to the unmodified job, for good."""
        pending = self._next_answer()
        start = max(self.step, self.lockstep.earliest_start, self._listens_from)
        if pending is not None:
            start = max(start, pending.start_step, pending.order_step)
        return Announcement(start_step=start, problem=problem)

    def _next_answer(self) -> Announcement | None:
        """Return the answer that does not hold yet, if it was announced."""
        text = self._job.exchange.heard(f"answer/{self._num_heard}")
        return None if text is None else msgspec.json.decode(text, type=Announcement)

    def _report(self, topic: str, turns: Turns) -> bool:
        """Mark the end of a step, and report the rounds that the GPU has finished. Return whether all are reported."""
        if turns.step_ended(self.step):
            self.in_force.prove()
        for number, times in turns.read(self.step):
            report = RoundReport(
                turns=times,
                late_steps=self._late_steps,
                engaged=self.in_force.engaged,
                unengaged=self.in_force.unengaged,
            )
            self._job.exchange.offer(f"{topic}/{number}", msgspec.json.encode(report).decode())
        return turns.is_read()

    def until(self, step: int) -> Steps[None]:
        """Run until this many steps have ended."""
        self._listens_from = step
        while self.step < step:
            yield BEGUN

    def warm_up(self, step: int) -> Steps[int]:
        """Run until this many steps have ended; return by how many steps the GPU is behind then, as far as it is
        visible.
        """
        marks = []
        self._listens_from = step
        while self.step < step:
            marks.append(self._job.clock.mark())
            yield BEGUN
        now = self._job.clock.mark() if marks else None
        return sum(self._job.clock.elapsed_us(marks[0], mark) is None for mark in (*marks, now)) if marks else 0
