"""What `run` and the agent inside the job tell each other: files in one folder, and a variable with its name.

The folder lives as long as the job. `run` writes the settings before the job starts; the agent of rank 0 writes its
record as it goes, so that what it found is there even if the job is killed. The variable is internal: users set nothing.
"""

import os
from pathlib import Path
from typing import Literal

import msgspec

from counterpoint.errors import PlanError
from counterpoint.integrations.paths import LIBRARY, PathCounts, Paths
from counterpoint.integrations.planned_paths import paths_of
from counterpoint.launch_filter.control_block import FilterRule, RuleCounters, rules_of
from counterpoint.measurement.values import Measurement
from counterpoint.plan import Plan
from counterpoint.step import Step
from counterpoint.value import Value, require, write_json, write_whole

DIRECTORY_VARIABLE = "COUNTERPOINT_FILTER_DIRECTORY"
SETTINGS_FILE = "settings.json"
RECORD_FILE = "record.json"
LEAST_BUDGET_STEPS = 100
MOST_BUDGET_STEPS = 1_000_000

Stage = Literal["warming up", "trying candidates", "decided", "reverted", "stopped"]
UNDECIDED: tuple[Stage, ...] = ("warming up", "trying candidates")


class Setting(Value, frozen=True, kw_only=True):
    """What is in force in a job: the launch filter's table, and the paths of its collectives."""

    rules: tuple[FilterRule, ...] = ()
    paths: Paths = LIBRARY


UNCHANGED = Setting()


def setting_of(plan: Plan, step: Step | None = None) -> Setting:
    """What a plan puts in force in a job; `step` says what its operation numbers mean. Raises `PlanError` as `translate`."""
    return Setting(rules=rules_of(plan, step), paths=paths_of(plan.directives, step))


class LiveSettings(Value, frozen=True, kw_only=True):
    """What the agent is to do: tune within a budget of steps, or only guard the plan that is in force from the start.

    `given` is what `plan` puts in force. Every `guard_every_steps` steps the plan is compared with the job as it is; 0 for
    never. `keeps_bits`: only what leaves every bit of the job's results is tried.
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
        """Whether ranks only have to say that they have the filter: a plan of launches that nobody guards."""
        return not self.may_switch_paths and self.guard_every_steps == 0

    def __post_init__(self) -> None:
        require(
            LEAST_BUDGET_STEPS <= self.budget_steps <= MOST_BUDGET_STEPS,
            PlanError,
            f"A budget must be from {LEAST_BUDGET_STEPS} to {MOST_BUDGET_STEPS:,} steps; found {self.budget_steps:,}. "
            "Fewer could not tell a gain from noise.",
        )
        require(
            self.guard_every_steps == 0 or self.guard_every_steps >= LEAST_BUDGET_STEPS,
            PlanError,
            f"The guard must look every {LEAST_BUDGET_STEPS} steps or less often, or never (0); found "
            f"{self.guard_every_steps}.",
        )


class LiveRecord(Value, frozen=True, kw_only=True):
    """How far the agent of rank 0 came: its stage, the steps it has seen, its plan with what it puts in force, times, words.

    `num_steps_needed` is the step by which a decision is due. A plan that is there before is that of an earlier decision.
    """

    stage: Stage
    num_steps: int = 0
    num_steps_needed: int = 0
    plan: Plan | None = None
    setting: Setting = UNCHANGED
    measurements: tuple[Measurement, ...] = ()
    notes: tuple[str, ...] = ()


class Totals(Value, frozen=True, kw_only=True):
    """What one rank counted for a setting while it was in force; a swap starts the filter's own counters anew.

    `paths` are the counts of its paths, control by control.
    """

    setting: Setting = UNCHANGED
    counters: tuple[RuleCounters, ...] = ()
    paths: tuple[PathCounts, ...] = ()
    rank: int = -1


def add_counters(first: RuleCounters, second: RuleCounters) -> RuleCounters:
    """Counters of the same rule from two times in force."""
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
    """Write the settings where the agent looks. Raises `OSError`."""
    write_whole(directory / SETTINGS_FILE, write_json(settings).encode())


def read_settings(directory: Path) -> LiveSettings:
    """The settings of this job. Raises `OSError` or `msgspec.DecodeError` where the folder is not ours."""
    return msgspec.json.decode((directory / SETTINGS_FILE).read_bytes(), type=LiveSettings)


def write_record(directory: Path, record: LiveRecord) -> None:
    """Write what the agent has come to, as a whole. Raises `OSError`."""
    write_whole(directory / RECORD_FILE, write_json(record).encode())


def read_record(directory: Path) -> LiveRecord | None:
    """What the agent of rank 0 came to, or None if it never began here."""
    path = directory / RECORD_FILE
    return msgspec.json.decode(path.read_bytes(), type=LiveRecord) if path.exists() else None


def write_totals(directory: Path, totals: Totals) -> None:
    """Keep this process's counts. Raises `OSError`."""
    write_whole(directory / f"{os.getpid()}.totals.json", write_json(totals).encode())


def read_totals(directory: Path, pid: int) -> Totals:
    """What a process kept; of the job as it is if it never kept anything."""
    path = directory / f"{pid}.totals.json"
    return msgspec.json.decode(path.read_bytes(), type=Totals) if path.exists() else Totals()


def totals_paths(directory: Path) -> list[Path]:
    """The files of the processes that kept counts, by name."""
    return sorted(directory.glob("*.totals.json"))
