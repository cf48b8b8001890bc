"""Tuning while the job runs: one course of steps, the same on every rank, that tries tables of rules and keeps the best.

The course is a generator: each `yield` is one step of the job. All ranks count steps alike, so a turn begins on all of them
at the end of the same step.

    warm up -> candidates -> turns, as the judge gives them -> the plan, or nothing -> guard -> (again, where the job has
    changed)

What all ranks do is in `follower.py`, what rank 0 does beside in `conductor.py`.
"""

from collections.abc import Sequence
from typing import final

import msgspec
from msgspec.structs import replace

from counterpoint.measurement.values import Comparison, Measurement, Order, Verdict
from counterpoint.plan import Plan
from counterpoint.supervised.conductor import GuardConductor, Lead, TuningConductor
from counterpoint.supervised.decisions import Reference, decide, labels_of, propose, why_another_job, why_removed
from counterpoint.supervised.follower import Follower, LiveJob, Steps, TuningStopped, Waited
from counterpoint.supervised.messages import Announcement, Census, Decision, Look, Trials
from counterpoint.supervised.settings import UNDECIDED, LiveRecord, LiveSettings, Stage
from counterpoint.units import format_count

WARM_UP_STEPS = 10
MOST_REOPENED = 2


@final
class LiveTuner:
    """One rank's part of the course. Call `step_ended` after each step; it never waits.

    `earlier` is what was decided before a launcher started the job again: its plan stays on record until there is another.
    """

    def __init__(self, job: LiveJob, settings: LiveSettings, earlier: Decision | None = None) -> None:
        self._job, self._settings = job, settings
        self._follower = Follower(job, settings.rules)
        self._lead = Lead(job.exchange)
        self._decision = earlier
        self._stage: Stage = "warming up"
        self._num_steps_needed = settings.budget_steps
        self._reference = Reference(grids={})
        self._num_reopened = 0
        self._guard: GuardConductor | None = None  # on rank 0
        self._course = self._run()

    def step_ended(self) -> bool:
        """A step has ended. False once there is nothing more to do."""
        self._follower.step += 1
        try:
            next(self._course)
        except StopIteration:
            return False
        if self._settings.is_tuning and self._stage in UNDECIDED:
            self._record(self._stage)  # a job may end at any step, and then it is told how many it had
        return True

    def revert(self) -> None:
        """Back to the job as it was."""
        self._follower.use(())

    def _run(self) -> Steps[None]:
        try:
            if not self._settings.is_tuning:
                yield from self._follower.until(WARM_UP_STEPS)
                yield from self._watch_given()
                return
            begun: int | None = 0
            while begun is not None:
                decided = yield from self._tune(begun)
                begun = yield from self._watch(decided)
                self._num_reopened += 1
        except TuningStopped as problem:
            self.revert()
            self._tell("stopped", f"live tuning stopped after {self._steps()}: {problem}; the job runs as it was")

    # --- tuning ---

    def _tune(self, begun: int) -> Steps[Announcement]:
        """Find the best table on live steps; the decision, from the step on that it holds from."""
        follower, topic = self._follower, f"tuning {self._num_reopened}"
        self.revert()
        follower.forget_proofs()
        self._num_steps_needed = begun + self._settings.budget_steps
        lag = yield from follower.warm_up(begun + WARM_UP_STEPS)
        last_step = begun + self._settings.budget_steps
        conductor = TuningConductor(self._job.exchange, topic, self._lead, last_step=last_step, lag=lag)
        given = yield from self._agree_on_trials(topic, conductor)
        trials = given.trials
        assert trials is not None, "the first answer names what is tried"
        tables = [(), *(candidate.rules for candidate in trials.candidates)]
        while given.decision is None:
            waited = Waited(conduct=lambda: self._conduct(conductor, trials), missing=conductor.missing)
            given = yield from follower.take_turns(topic, given, tables, waited, at_rest=())
        follower.count_for(given.decision.rules)
        follower.use(given.decision.rules)
        self._settle(given.decision, begun)
        return given

    def _agree_on_trials(self, topic: str, conductor: TuningConductor) -> Steps[Announcement]:
        """Every rank says which kernels it has launched; rank 0 says what is tried, and who takes turns first."""
        exchange, offered_at = self._job.exchange, self._follower.step
        census = Census(functions=self._job.table.state().functions)
        self._follower.see_launches()
        exchange.offer(f"{topic}/census", msgspec.json.encode(census).decode())

        def conduct() -> Announcement | None:
            texts = exchange.gathered(f"{topic}/census")
            if texts is None:
                return None
            start = self._lead.start(self._follower.step)
            everyone = [msgspec.json.decode(text, type=Census) for text in texts]
            num_turns = conductor.num_turns(start, offered_at)
            trials = propose(everyone, self._job.gpu, self._settings, num_turns, conductor.answer_turns())
            if trials.candidates:
                self._tell_trials(trials)
            first = conductor.begin(1 + len(trials.candidates), self._job.draw_seed(), start, offered_at)
            return self._announced(start, first, trials, conductor)

        return (
            yield from self._follower.answer(
                Waited(conduct=conduct, missing=lambda: exchange.missing(f"{topic}/census")), ()
            )
        )

    def _conduct(self, conductor: TuningConductor, trials: Trials) -> Announcement | None:
        """On rank 0: what follows from the turns so far."""
        found = conductor.conduct(self._follower.step)
        return None if found is None else self._announced(*found, trials, conductor)

    def _announced(self, start: int, answer: Order | Verdict, trials: Trials, conductor: TuningConductor) -> Announcement:
        """On rank 0: an order or a verdict of the judge in words for all ranks."""
        if isinstance(answer, Order):
            return Announcement(start_step=start, trials=trials, order=answer, order_step=start)
        comparison = Comparison(measurements=conductor.measurements(labels_of(trials.candidates)), verdict=answer)
        latest = conductor.reports.latest if conductor.reports is not None else []
        decision = decide(trials, comparison, latest, self._job.gpu)
        return self._with_first_look(
            Announcement(start_step=start, trials=trials, decision=decision),
            start + self._settings.guard_every_steps,
            has_plan=bool(decision.rules),
        )

    def _settle(self, decision: Decision, begun: int) -> None:
        """Remember the job as it is now, and tell what was decided."""
        grids, _ = self._follower.see_launches()
        baseline_us = decision.measurements[0].median_us if decision.measurements else 0.0
        self._reference = Reference(grids=grids, baseline_us=baseline_us)
        self._decision = decision
        took = f"{self._follower.step - begun} of {self._settings.budget_steps} steps"
        self._tell("decided", f"{decision.plan.verdict} after {took}: {decision.plan.summary}")

    # --- the guard ---

    def _watch_given(self) -> Steps[None]:
        """Guard a plan that was given from the start."""
        decision = Decision(plan=self._settings.plan, rules=self._settings.rules)

        def conduct() -> Announcement:
            start = self._lead.start(self._follower.step)
            return self._with_first_look(Announcement(start_step=start, decision=decision), start, has_plan=True)

        if self._settings.guard_every_steps and decision.rules:
            waited = Waited(conduct=conduct, missing=list)
            yield from self._watch((yield from self._follower.answer(waited, decision.rules)))

    def _with_first_look(self, announcement: Announcement, order_step: int, *, has_plan: bool) -> Announcement:
        """On rank 0: the announcement with the turns of the guard's first look, if there is one."""
        if not self._settings.guard_every_steps:
            return announcement
        topic, seed = f"guard {self._num_reopened}", self._job.draw_seed()
        self._guard = GuardConductor(self._job.exchange, topic, self._lead, seed=seed, has_plan=has_plan)
        return replace(announcement, order=self._guard.look(order_step), order_step=order_step)

    def _watch(self, given: Announcement) -> Steps[int | None]:
        """Guard the decision for as long as the job runs; the step from which the question is open again, or None."""
        decision, follower = given.decision, self._follower
        assert decision is not None, "only a decision is guarded"
        topic, tables, in_force = f"guard {self._num_reopened}", [(), decision.rules], decision.rules
        waited = Waited(conduct=self._conduct_guard, missing=lambda: self._guard.missing() if self._guard else ())
        while given.order is not None:
            given = yield from follower.take_turns(topic, given, tables, waited, in_force)
            look = given.look
            assert look is not None, "an answer to a look is a look"
            if look.verdict == "reopen":
                self._tell("warming up", f"{look.reason}; tuning again")
                return given.start_step
            if look.verdict == "remove":
                in_force = ()
                self._decision = Decision(plan=Plan(machine=decision.plan.machine, summary=look.reason))
                self._tell("reverted", f"{look.reason}; taken out after {self._steps()}, and tried again much later")
            if look.verdict == "put back":
                in_force, self._decision = decision.rules, decision
                self._tell("decided", f"the plan is faster again, and back in force after {self._steps()}")
            follower.use(in_force)
        return None

    def _conduct_guard(self) -> Announcement | None:
        """On rank 0: what a look comes to, and the turns of the next one."""
        guard = self._guard
        assert guard is not None, "a look was announced"
        found = guard.conduct(self._follower.step)
        if found is None:
            return None
        start, outcome = found
        times = guard.measurements()
        if outcome == "go on":
            look = Look(verdict="go on")
            return Announcement(start_step=start, look=look, order=guard.go_on(start), order_step=start)
        if outcome == "remove":
            look = Look(verdict="remove", reason=why_removed(times))
        else:
            changed = self._why_reopened(times)
            look = Look(verdict="reopen", reason=changed) if changed else Look(verdict=outcome)
        if look.verdict == "reopen":
            return Announcement(start_step=start, look=look)
        order_step = start + self._settings.guard_every_steps * guard.looks_until_next
        return Announcement(start_step=start, look=look, order=guard.look(order_step), order_step=order_step)

    def _why_reopened(self, times: Sequence[Measurement]) -> str:
        """On rank 0: why the job has to be tuned again, or nothing."""
        grids, launches = self._follower.see_launches()
        if not self._reference.grids:  # a plan that was given: the first look is what later ones are compared with
            self._reference = Reference(grids=grids, baseline_us=times[0].median_us if times else 0.0)
        can_reopen = self._settings.is_tuning and self._num_reopened < MOST_REOPENED
        return why_another_job(times, self._reference, grids, launches) if can_reopen else ""

    # --- what is said ---

    def _tell_trials(self, trials: Trials) -> None:
        number = format_count(len(trials.candidates), "candidate")
        steps = format_count(self._settings.budget_steps, "step")
        self._tell("trying candidates", f"tuning on live steps: {number} within {steps}; the job's results do not change")

    def _steps(self) -> str:
        return format_count(self._follower.step, "step")

    def _tell(self, stage: Stage, line: str) -> None:
        """One line, and the record of it; rank 0 speaks for all."""
        if self._follower.is_first:
            self._job.say(line)
        self._record(stage, line)

    def _record(self, stage: Stage, line: str = "") -> None:
        self._stage = stage
        if not self._follower.is_first:
            return
        found = self._decision
        self._job.record(
            LiveRecord(
                stage=stage,
                num_steps=self._follower.step,
                num_steps_needed=self._num_steps_needed,
                plan=found.plan if found else None,
                rules=found.rules if found else (),
                measurements=found.measurements if found else (),
                notes=(line,) if line else (),
            )
        )
