"""What a tuned job is told and what is recorded of it: rank 0 speaks for all ranks."""

from collections.abc import Sequence
from contextlib import suppress
from typing import final

from counterpoint.integrations.paths import PathOffer, path_problems
from counterpoint.supervised.follower import Follower
from counterpoint.supervised.messages import Decision, Trials
from counterpoint.supervised.running_job import LiveJob
from counterpoint.supervised.settings import UNCHANGED, LiveRecord, LiveSettings, Stage
from counterpoint.units import format_count

IN_TIME = "to have them switched, make it parallel before the first optimizer steps, and do not wrap it again"


@final
class Teller:
    """The stage that one rank has come to, and its decision so far, with the lines about them."""

    def __init__(self, job: LiveJob, settings: LiveSettings, follower: Follower, earlier: Decision | None) -> None:
        self._job, self._settings, self._follower = job, settings, follower
        self.decision = earlier
        self.stage: Stage = "warming up"
        self.num_steps_needed = settings.budget_steps

    def tell_trials(self, trials: Trials) -> None:
        """What is tried, and whether results may change meanwhile."""
        number = format_count(len(trials.candidates), "candidate")
        steps = format_count(self._settings.budget_steps, "step")
        keep_bits = all(candidate.setting.paths.keeps_bits for candidate in trials.candidates)
        results = "the job's results do not change" if keep_bits else "the job's results may change within rounding"
        self.tell("trying candidates", f"tuning on live steps: {number} within {steps}; {results}")

    def tell_refused(self, offers: Sequence[PathOffer]) -> None:
        """What of a plan that was given nobody can have: said at once, because the job may run for days."""
        if self._follower.is_first:
            for target, reason in path_problems(self._settings.given.paths, offers).items():
                self._job.say(f"{target} stay as they are: {reason}")

    def tell_late_models(self) -> None:
        """Models that came too late to be switched, once each. Looking takes a walk through all objects, so it is rare."""
        if not (self._follower.is_first and self._settings.may_switch_paths and self._job.exchange.num_ranks > 1):
            return
        with suppress(Exception):  # the job, and what is in force, go on as they are
            for what in self._job.paths.late_models():
                self._job.say(f"{what} came after the first step, so its collectives stay as they are; {IN_TIME}")

    def steps(self) -> str:
        """How many steps have ended, in words."""
        return format_count(self._follower.step, "step")

    def tell(self, stage: Stage, line: str) -> None:
        """One line, and the record of it; rank 0 speaks for all."""
        if self._follower.is_first:
            self._job.say(line)
        self.record(stage, line)

    def record(self, stage: Stage, line: str = "") -> None:
        """On rank 0: keep how far tuning or the guard has come, for the end of the job or its next start."""
        self.stage = stage
        if not self._follower.is_first:
            return
        found = self.decision
        self._job.record(
            LiveRecord(
                stage=stage,
                num_steps=self._follower.step,
                num_steps_needed=self.num_steps_needed,
                plan=found.plan if found else None,
                setting=found.setting if found else UNCHANGED,
                measurements=found.measurements if found else (),
                notes=(line,) if line else (),
            )
        )
