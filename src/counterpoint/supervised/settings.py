"""Messages between `run` and the agent inside the job: files in one folder, and a variable with its name.

The folder exists as long as the job. `run` writes the settings before the job starts. The agent of rank 0 updates its
record as it goes, so that its findings survive even if the job is killed. The variable is internal: users do not set it.
"""

from pathlib import Path
from typing import Literal

import msgspec

from counterpoint.errors import PlanError
from counterpoint.integrations.paths import LIBRARY, PathCounts, Paths
from counterpoint.integrations.planned_paths import paths_of
from counterpoint.launch_filter.control_block import RuleCounters
from counterpoint.launch_filter.rules import FilterRule, translate
from counterpoint.measurement.values import Measurement
from counterpoint.plan import Plan
from counterpoint.value import Value, require, write_json, write_whole

DIRECTORY_VARIABLE = "COUNTERPOINT_FILTER_DIRECTORY"
SETTINGS_FILE = "settings.json"
RECORD_FILE = "record.json"
LEAST_BUDGET_STEPS = 100
MOST_BUDGET_STEPS = 1_000_000
CANDIDATE = "candidate"  # target of refusals that concern the trial of several controls, not one control
UNTRIED = "not tried for want of steps"  # how the reason of such a refusal begins; what to do follows behind a colon

Stage = Literal["warming up", "trying candidates", "decided", "reverted", "stopped"]
UNDECIDED: tuple[Stage, ...] = ("warming up", "trying candidates")


class Setting(Value, frozen=True, kw_only=True):
    """A setting of a job: the launch filter's table, and the paths of its collectives."""

    rules: tuple[FilterRule, ...] = ()
    paths: Paths = LIBRARY


UNCHANGED = Setting()


def setting_of(plan: Plan) -> Setting:
    """Return the setting of a plan in a job. Raises `PlanError` as `translate` does."""
    return Setting(rules=translate(plan).rules, paths=paths_of(plan.directives))


class LiveSettings(Value, frozen=True, kw_only=True):
    """The agent's task: tune within a budget of steps, or only guard the plan that is applied from the start.

    `given` is the setting of `plan`. Every `guard_every_steps` steps the plan is compared with the unmodified job; 0
    means never. `keeps_bits`: only candidates that leave every bit of the job's results unchanged are tried.
    """

    is_tuning: bool
    plan: Plan = Plan()
    given: Setting = UNCHANGED
    keeps_bits: bool = False
    budget_steps: int = 200
    guard_every_steps: int = 500

    @property
    def may_switch_paths(self) -> bool:
        """Whether collectives may take other paths than the library's."""
        return self.is_tuning or self.given.paths != LIBRARY

    @property
    def only_reports(self) -> bool:
        """Whether ranks only have to report that they have the filter: a plan of launches without a guard."""
        return not self.may_switch_paths and self.guard_every_steps == 0

    def __post_init__(self) -> None:
        is_few = self.budget_steps < LEAST_BUDGET_STEPS
        require(
            LEAST_BUDGET_STEPS <= self.budget_steps <= MOST_BUDGET_STEPS,
            PlanError,
            f"A budget must be from {LEAST_BUDGET_STEPS} to {MOST_BUDGET_STEPS:,} steps; found "
            f"{self.budget_steps:,}. Give one of these{': fewer steps cannot tell a gain from noise' if is_few else ''}.",
        )
        require(
            self.guard_every_steps == 0 or self.guard_every_steps >= LEAST_BUDGET_STEPS,
            PlanError,
            f"The guard must check every {LEAST_BUDGET_STEPS} steps or less often, or never (0); found "
            f"{self.guard_every_steps}.",
        )


class LiveRecord(Value, frozen=True, kw_only=True):
    """How far the agent of rank 0 got: its stage, the steps it has seen, its plan with its setting, times, words.

    `num_steps_needed` is the step by which a decision is due. A plan that exists before then comes from an earlier
    decision.
    """

    stage: Stage
    num_steps: int = 0
    num_steps_needed: int = 0
    plan: Plan | None = None
    setting: Setting = UNCHANGED
    measurements: tuple[Measurement, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_untried(self) -> bool:
        """Whether there were candidates, and the budget had no room for any."""
        refusals = () if self.plan is None else self.plan.refusals
        return len(self.measurements) < 2 and any(refusal.control == CANDIDATE for refusal in refusals)


class Totals(Value, frozen=True, kw_only=True):
    """One rank's counts for a setting while it was applied; a swap resets the filter's own counters.

    `paths` are the counts of its paths, control by control.
    """

    setting: Setting = UNCHANGED
    counters: tuple[RuleCounters, ...] = ()
    paths: tuple[PathCounts, ...] = ()
    rank: int = -1


def add_counters(first: RuleCounters, second: RuleCounters) -> RuleCounters:
    """Add counters of the same rule from two periods."""
    found = [each.residency_found for each in (first, second) if each.residency_found is not None]
    return RuleCounters(
        num_matched=first.num_matched + second.num_matched,
        num_capped=first.num_capped + second.num_capped,
        num_prioritized=first.num_prioritized + second.num_prioritized,
        num_held=first.num_held + second.num_held,
        num_refused=first.num_refused + second.num_refused,
        num_retried=first.num_retried + second.num_retried,
        residency_found=max(found, default=None),
        refusal=first.refusal or second.refusal,
    )


def write_settings(directory: Path, settings: LiveSettings) -> None:
    """Write the settings to the place where the agent reads them. Raises `OSError`."""
    write_whole(directory / SETTINGS_FILE, write_json(settings).encode())


def read_settings(directory: Path) -> LiveSettings:
    """Read the settings of this job. Raises `OSError` or `msgspec.DecodeError` for a folder that is not Counterpoint's."""
    return msgspec.json.decode((directory / SETTINGS_FILE).read_bytes(), type=LiveSettings)


def write_record(directory: Path, record: LiveRecord) -> None:
    """Write the agent's record atomically. Raises `OSError`."""
    write_whole(directory / RECORD_FILE, write_json(record).encode())


def read_record(directory: Path) -> LiveRecord | None:
    """Read the record of rank 0's agent, or None if it never began here."""
    path = directory / RECORD_FILE
    return msgspec.json.decode(path.read_bytes(), type=LiveRecord) if path.exists() else None


def write_totals(directory: Path, name: str, totals: Totals) -> None:
    """Write a process's counts under the name of its block, or its number if it has no block. Raises `OSError`."""
    write_whole(directory / f"{name}.totals.json", write_json(totals).encode())


def read_totals(directory: Path, name: str) -> Totals:
    """Read a process's counts; those of the unmodified job if it never wrote any."""
    path = directory / f"{name}.totals.json"
    return msgspec.json.decode(path.read_bytes(), type=Totals) if path.exists() else Totals()


def totals_paths(directory: Path) -> list[Path]:
    """Return the files of the processes that wrote counts, by name."""
    return sorted(directory.glob("*.totals.json"))
