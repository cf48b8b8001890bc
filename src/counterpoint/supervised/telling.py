"""Messages to the user of a tuned job, and its record: rank 0 speaks for all ranks."""

from collections.abc import Sequence
from contextlib import suppress
from typing import final

from counterpoint.integrations.paths import PathOffer, path_problems
from counterpoint.supervised.follower import Follower
from counterpoint.supervised.messages import Decision, Trials
from counterpoint.supervised.running_job import LiveJob
from counterpoint.supervised.settings import UNCHANGED, LiveRecord, LiveSettings, Stage
from counterpoint.units import format_count

IN_TIME = "to have them switched, parallelize it before the first optimizer is created, and do not wrap it again"


@final
class Teller:
    """The stage that one rank has reached, and its decision so far, with the lines about them."""

    def __init__(self, job: LiveJob, settings: LiveSettings, follower: Follower, earlier: Decision | None) -> None:
        self._job, self._settings, self._follower = job, settings, follower
        self.decision = earlier
        self.stage: Stage = "warming up"
        self.num_steps_needed = settings.budget_steps

    def tell_trials(self, trials: Trials) -> None:
        """Print what is tried, and whether results may change meanwhile."""
        number = format_count(len(trials.candidates), "candidate")
        steps = format_count(self._settings.budget_steps, "step")
        keep_bits = all(candidate.setting.paths.keeps_bits for candidate in trials.candidates)
        results = "the job's results do not change" if keep_bits else "the job's results may change within rounding"
        self.tell("trying candidates", f"tuning on live steps: {number} within {steps}; {results}")

    def tell_refused(self, offers: Sequence[PathOffer]) -> None:
        """Print which parts of a given plan no rank can apply, at once, because the job may run for days."""
        if self._follower.is_first:
            for target, reason in path_problems(self._settings.given.paths, offers).items():
                self._job.say(f"{target} stay unchanged: {reason}")

    def tell_late_models(self) -> None:
        """Print models that were created too late to be switched, once each. The check walks over all objects, so it is
        rare.
        """
        if not (self._follower.is_first and self._settings.may_switch_paths and self._job.exchange.num_ranks > 1):
            return
        with suppress(Exception):  # the job goes on with its current setting
            for what in self._job.paths.late_models():
                self._job.say(f"{what} was created after the first step, so its collectives are not changed; {IN_TIME}")

    def steps(self) -> str:
        """Describe how many steps have ended."""
        return format_count(self._follower.step, "step")

    def tell(self, stage: Stage, line: str) -> None:
        """Print one line and record it; rank 0 speaks for all."""
        if self._follower.is_first:
            self._job.say(line)
        self.record(stage, line)

    def record(self, stage: Stage, line: str = "") -> None:
        """On rank 0: record how far tuning or the guard has got, for the end of the job or its restart."""
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
