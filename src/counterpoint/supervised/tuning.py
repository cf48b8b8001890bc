"""Tunes while the job runs: one sequence of steps, the same on every rank, tries tables of rules and keeps the best.

The sequence is a generator: each `yield` is one step of the job. All ranks count steps alike, so a turn begins on all of
them at the end of the same step.

    paths that all ranks can take -> warm up -> candidates -> turns, as the judge gives them -> the plan, or nothing -> guard
    -> (again, where the job has changed)

`follower.py` holds what all ranks do, `conductor.py` what rank 0 does besides.
"""

from collections.abc import Sequence
from typing import final

import msgspec
from msgspec.structs import replace

from counterpoint.integrations.paths import LIBRARY
from counterpoint.measurement.values import Comparison, Measurement, Order, Verdict
from counterpoint.plan import Plan
from counterpoint.supervised.conductor import AnnouncementLead, GuardConductor, TuningConductor
from counterpoint.supervised.decisions import (
    Reference,
    Room,
    decide,
    labels_of,
    propose,
    settings_of,
    why_another_job,
    why_removed,
)
from counterpoint.supervised.follower import (
    HELD,
    NO_ANSWER,
    Follower,
    Steps,
    TuningStopped,
    Waited,
)
from counterpoint.supervised.messages import Announcement, Decision, GuardCheck, KernelReport, Trials
from counterpoint.supervised.path_agreement import agree_on_paths, everyones_surveys, make_ready
from counterpoint.supervised.running_job import NOTHING_LAUNCHED, LiveJob, NoTable, Patience
from counterpoint.supervised.settings import UNCHANGED, UNDECIDED, LiveSettings, Setting
from counterpoint.supervised.telling import Teller

WARM_UP_STEPS = 10
# Once ranks may switch paths, a rank that gives up alone leaves the others waiting in a collective. So the limit, half
# an hour, is longer than a process group's usual time-out, after which torch ends the job.
TIMES_AS_PATIENT = 15
KEPT_EVERY_STEPS = 50  # a killed job loses the counts since then
MOST_REOPENED = 2


def is_kept_after(step: int) -> bool:
    """Return whether counts are saved after this many steps: from time to time, and more often at the start, for short
    jobs.
    """
    return step % KEPT_EVERY_STEPS == 0 or (step < KEPT_EVERY_STEPS and step & (step - 1) == 0)


@final
class LiveTuner:
    """One rank's part of the sequence. Call `step_ended` after each step; it waits for other ranks if paths are
    switched.

    `earlier` is the decision before a launcher restarted the job: its plan stays on record until there is another.
    """

    def __init__(self, job: LiveJob, settings: LiveSettings, earlier: Decision | None) -> None:
        self._job, self._settings = job, settings
        self._follower = Follower(job, replace(settings.given, paths=LIBRARY))
        self._lead = AnnouncementLead(job.exchange, self._follower.lockstep)
        self._hold_limit_s = job.hold_limit_s
        self._teller = Teller(job, settings, self._follower, earlier)
        self._reference = Reference(grids={})
        self._num_reopened = 0
        self._guard: GuardConductor | None = None  # on rank 0
        self._guarded = self._at_rest = UNCHANGED
        self._looks_for_models = False
        self._course = self._run()

    def step_ended(self) -> bool:
        """Handle the end of a step. Return False once there is nothing more to do. A job that is ahead of the others is
        held here.
        """
        self._follower.step += 1
        if self._are_apart():
            return False
        held = Patience(self._job, self._hold_limit_s)
        try:
            while self._follower.lockstep.is_held(self._follower.step):
                if not held.wait():
                    self._course.throw(TuningStopped(f"{NO_ANSWER} within {self._hold_limit_s:g} s"))
            while next(self._course) is HELD:
                if not held.wait():
                    self._course.throw(
                        TuningStopped(f"a rank or its GPU did not reach this step within {self._hold_limit_s:g} s")
                    )
        except StopIteration:
            self._follower.lockstep.end()
            self._follower.in_force.keep_paths()
            return False
        if is_kept_after(self._follower.step):
            self._follower.in_force.keep_paths()
        if self._looks_for_models or self._follower.step == WARM_UP_STEPS:
            self._looks_for_models = False
            self._teller.tell_late_models()
        if self._settings.is_tuning and self._teller.stage in UNDECIDED:
            # a job may end at any step, and the report then needs the number of steps
            self._teller.record(self._teller.stage)
        return True

    def _are_apart(self) -> bool:
        """Return whether ranks may take different numbers of steps from now on; then this one has ended its part.

        All ranks find that after the same step, so they return to the library together without another word.
        """
        reason = self._job.paths.why_apart() if self._follower.lockstep.is_on else ""
        if reason:
            self._follower.in_force.keep_paths()
            self._follower.lockstep.end()
            self._stop(reason)
        return bool(reason)

    def is_step_of_job(self, optimizer: object, *, is_due: bool) -> bool:
        """Return whether a step of an optimizer that does not mark steps may do so: where paths are switched, ranks have to
        count alike. If it `is_due`, it marks the steps from then on.
        """
        return not self._follower.lockstep.is_on or self._job.paths.trains(optimizer, is_due=is_due)

    def optimizer_made(self) -> None:
        """Handle a new optimizer, perhaps for a model that was not seen yet."""
        self._looks_for_models = True

    def fail(self, reason: str) -> bool:
        """Record why this rank can no longer measure. Return True if it still has to take paths with the others; then
        keep calling `step_ended`.
        """
        if not self._follower.lockstep.is_on:
            return False
        self._settings = replace(self._settings, is_tuning=False)
        self._course = self._follower.follow_blindly(reason)
        next(self._course, None)  # other paths may take effect from the step that begins now
        return True

    def empty_table(self) -> None:
        """Return to the unmodified launches, and leave the paths as they are."""
        self._follower.in_force.empty_table()

    def revert(self) -> None:
        """Return to the unmodified job."""
        self._follower.in_force.use(UNCHANGED)

    def _stop(self, reason: str, *, is_said: bool = True) -> None:
        """Return to the unmodified job for good; record why, and print it if it is said now."""
        self.revert()
        put = self._teller.tell if is_said else self._teller.record
        put("stopped", f"stopped after {self._teller.steps()}: {reason}; the job runs unchanged")

    def job_ends(self) -> None:
        """Save the counts. Other ranks may go on for more steps, each on its own; then none waits for rank 0."""
        self._follower.in_force.keep_paths()
        if self._follower.is_first and self._follower.lockstep.is_on:
            self._follower.end_for_all("rank 0 has ended")

    def _run(self) -> Steps[None]:
        try:
            if self._settings.may_switch_paths and self._job.exchange.num_ranks > 1:
                yield from self._take_paths()
            if not self._settings.is_tuning:
                self._follower.in_force.count_for(self._settings.given)
                self._follower.in_force.keep_paths()  # also what no rank can apply, and why
            if isinstance(self._job.table, NoTable) and not self._follower.lockstep.is_on:
                self._stop(NOTHING_LAUNCHED, is_said=False)  # `run` says it at the end
                return
            if not self._settings.is_tuning:
                self._follower.in_force.use(self._settings.given)
                yield from self._follower.until(WARM_UP_STEPS)
                yield from self._watch_given()
                return
            begun: int | None = 0
            while begun is not None:
                decided = yield from self._tune(begun)
                begun = yield from self._watch(decided)
                self._num_reopened += 1
        except TuningStopped as problem:
            self._stop(str(problem))

    # --- paths ---

    def _take_paths(self) -> Steps[None]:
        """Prepare what all ranks can switch. All ranks get here after the same step, and wait for each other."""
        surveys = yield from everyones_surveys(self._follower, self._job.paths)
        self._hold_limit_s *= TIMES_AS_PATIENT
        offers = yield from make_ready(self._follower, self._job.paths, agree_on_paths(surveys))
        self._follower.in_force.offers = offers
        self._teller.tell_refused(offers)
        if any(not offer.refusal for offer in offers):
            self._follower.lockstep.begin(self._follower.step)

    # --- tuning ---

    def _tune(self, begun: int) -> Steps[Announcement]:
        """Find the best table on live steps; return the decision at the step from which it holds."""
        follower, topic = self._follower, f"tuning {self._num_reopened}"
        self.revert()
        follower.in_force.forget_proofs()
        self._teller.num_steps_needed = begun + self._settings.budget_steps
        lag = yield from follower.warm_up(begun + WARM_UP_STEPS)
        last_step = begun + self._settings.budget_steps
        conductor = TuningConductor(self._job.exchange, topic, self._lead, last_step=last_step, lag=lag)
        given = yield from self._agree_on_trials(topic, conductor)
        trials = given.trials
        assert trials is not None, "the first answer names what is tried"
        settings = settings_of(trials)
        while given.decision is None:
            waited = Waited(conduct=lambda: self._conduct(conductor, trials), missing=conductor.missing)
            given = yield from follower.take_turns(topic, given, settings, waited, at_rest=UNCHANGED)
        follower.in_force.count_for(given.decision.setting)
        follower.in_force.use(given.decision.setting)
        self._settle(given.decision, begun)
        return given

    def _agree_on_trials(self, topic: str, conductor: TuningConductor) -> Steps[Announcement]:
        """Let every rank report its launched kernels; let rank 0 announce what is tried, and the first turns."""
        exchange, offered_at = self._job.exchange, self._follower.step
        functions = self._job.table.state().functions
        report = KernelReport(functions=functions)
        self._follower.in_force.see_launches(functions)
        exchange.offer(f"{topic}/census", msgspec.json.encode(report).decode())

        def conduct() -> Announcement | None:
            texts = exchange.gathered(f"{topic}/census")
            if texts is None:
                return None
            start = self._lead.start(self._follower.step)
            everyone = [msgspec.json.decode(text, type=KernelReport) for text in texts]
            num_turns = conductor.num_turns(start, offered_at)
            room = Room(num_turns=num_turns, answer_turns=conductor.answer_turns())
            trials = propose(everyone, self._job.gpu, self._settings, room, self._follower.in_force.offers)
            if trials.candidates:
                self._teller.tell_trials(trials)
            switched = [number for number, each in enumerate(settings_of(trials)) if each.paths != LIBRARY]
            seed = self._job.draw_seed()
            first = conductor.begin(1 + len(trials.candidates), seed, start, offered_at, switched)
            return self._announced(start, first, trials, conductor)

        return (
            yield from self._follower.answer(
                Waited(conduct=conduct, missing=lambda: exchange.missing(f"{topic}/census")), UNCHANGED
            )
        )

    def _conduct(self, conductor: TuningConductor, trials: Trials) -> Announcement | None:
        """On rank 0: return what follows from the turns so far."""
        found = conductor.conduct(self._follower.step)
        return None if found is None else self._announced(*found, trials, conductor)

    def _announced(self, start: int, answer: Order | Verdict, trials: Trials, conductor: TuningConductor) -> Announcement:
        """On rank 0: return an order or a verdict of the judge as an announcement for all ranks."""
        if isinstance(answer, Order):
            paths = tuple(setting.paths for setting in settings_of(trials))
            return Announcement(start_step=start, trials=trials, order=answer, order_step=start, variant_paths=paths)
        comparison = Comparison(measurements=conductor.measurements(labels_of(trials.candidates)), verdict=answer)
        latest = conductor.reports.latest if conductor.reports is not None else []
        decision = decide(trials, comparison, latest, self._job.gpu)
        return self._with_first_look(
            Announcement(start_step=start, trials=trials, decision=decision),
            decision,
            start + self._settings.guard_every_steps,
        )

    def _settle(self, decision: Decision, begun: int) -> None:
        """Record the job as it is now, and print the decision."""
        grids, _ = self._follower.in_force.see_launches(self._job.table.state().functions)
        baseline_us = decision.measurements[0].median_us if decision.measurements else 0.0
        self._reference = Reference(grids=grids, baseline_us=baseline_us)
        self._teller.decision = decision
        took = f"{self._follower.step - begun} of {self._settings.budget_steps} steps"
        self._teller.tell("decided", f"{decision.plan.verdict} after {took}: {decision.plan.summary}")

    # --- the guard ---

    def _watch_given(self) -> Steps[None]:
        """Guard a plan that was given from the start."""
        decision = Decision(plan=self._settings.plan, setting=self._settings.given)

        def conduct() -> Announcement:
            start = self._lead.start(self._follower.step)
            return self._with_first_look(Announcement(start_step=start, decision=decision), decision, start)

        if self._settings.guard_every_steps and decision.setting != UNCHANGED:
            waited = Waited(conduct=conduct, missing=list)
            yield from self._watch((yield from self._follower.answer(waited, decision.setting)))

    def _with_first_look(self, announcement: Announcement, decision: Decision, order_step: int) -> Announcement:
        """On rank 0: return the announcement with the turns of the guard's first check, if there is one."""
        rest_paths = decision.setting.paths
        if not self._settings.guard_every_steps:
            return replace(announcement, rest_paths=rest_paths)
        topic, seed = f"guard {self._num_reopened}", self._job.draw_seed()
        has_plan = decision.setting != UNCHANGED
        self._guard = GuardConductor(self._job.exchange, topic, self._lead, seed=seed, has_plan=has_plan)
        return self._looking(
            replace(announcement, rest_paths=rest_paths), self._guard.look(order_step), order_step, decision.setting
        )

    def _looking(self, announcement: Announcement, order: Order, order_step: int, guarded: Setting) -> Announcement:
        """On rank 0: return an announcement with turns of the guard."""
        paths = (LIBRARY, guarded.paths)
        return replace(announcement, order=order, order_step=order_step, variant_paths=paths)

    def _watch(self, given: Announcement) -> Steps[int | None]:
        """Guard the decision for as long as the job runs; return the step from which it is open again, or None."""
        decision, follower = given.decision, self._follower
        assert decision is not None, "only a decision is guarded"
        topic, settings = f"guard {self._num_reopened}", [UNCHANGED, decision.setting]
        self._guarded = self._at_rest = decision.setting
        waited = Waited(conduct=self._conduct_guard, missing=lambda: self._guard.missing() if self._guard else ())
        while given.order is not None:
            given = yield from follower.take_turns(topic, given, settings, waited, self._at_rest)
            look = given.look
            assert look is not None, "an answer to a look is a look"
            if look.verdict == "reopen":
                self._teller.tell("warming up", f"{look.reason}; tuning again")
                return given.start_step
            if look.verdict == "remove":
                self._at_rest = UNCHANGED
                removed = Plan(machine=decision.plan.machine, verdict="NO_GAIN", summary=look.reason)
                self._teller.decision = Decision(plan=removed)
                self._teller.tell(
                    "reverted", f"{look.reason}; taken out after {self._teller.steps()}; it will be tried again much later"
                )
            if look.verdict == "put back":
                self._at_rest, self._teller.decision = decision.setting, decision
                self._teller.tell(
                    "decided", f"the plan is faster again, so it is applied again after {self._teller.steps()}"
                )
            follower.in_force.use(self._at_rest)
        return None

    def _conduct_guard(self) -> Announcement | None:
        """On rank 0: return the result of a check, and the turns of the next one."""
        guard = self._guard
        assert guard is not None, "a look was announced"
        found = guard.conduct(self._follower.step)
        if found is None:
            return None
        start, outcome = found
        times = guard.measurements()
        if outcome == "go on":
            look = GuardCheck(verdict="go on")
            answer = Announcement(start_step=start, look=look, rest_paths=self._at_rest.paths)
            return self._looking(answer, guard.go_on(start), start, self._guarded)
        if outcome == "remove":
            look = GuardCheck(verdict="remove", reason=why_removed(times))
        else:
            changed = self._why_reopened(times)
            look = GuardCheck(verdict="reopen", reason=changed) if changed else GuardCheck(verdict=outcome)
        if look.verdict == "reopen":
            return Announcement(start_step=start, look=look)
        order_step = start + self._settings.guard_every_steps * guard.looks_until_next
        rest = {"remove": UNCHANGED, "put back": self._guarded}.get(look.verdict, self._at_rest)
        answer = Announcement(start_step=start, look=look, rest_paths=rest.paths)
        return self._looking(answer, guard.look(order_step), order_step, self._guarded)

    def _why_reopened(self, times: Sequence[Measurement]) -> str:
        """On rank 0: return why the job has to be tuned again, or nothing."""
        if not self._settings.is_tuning or self._num_reopened >= MOST_REOPENED:
            return ""
        grids, launches = self._follower.in_force.see_launches(self._job.table.state().functions)
        if times and not self._reference.baseline_us:  # tuning had too few steps to measure it
            self._reference = Reference(grids=self._reference.grids, baseline_us=times[0].median_us)
        if self._guarded.paths != LIBRARY:  # a kernel has other grids on each path, and the last one counts
            grids = {name: self._reference.grids.get(name, grid) for name, grid in grids.items()}
        return why_another_job(times, self._reference, grids, launches)
