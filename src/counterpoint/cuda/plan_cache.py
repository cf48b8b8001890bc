"""Keeps plans between runs: one file for each combination of step, GPU, driver, NCCL, torch and number of ranks.

The file name depends on the conditions, so a plan is not found after its conditions changed.
"""

import hashlib
from pathlib import Path

import msgspec

from counterpoint.errors import PlanError
from counterpoint.files import cache_folder
from counterpoint.plan import Plan, load_plan, save_plan
from counterpoint.step import Step
from counterpoint.value import Value


class Conditions(Value, frozen=True, kw_only=True):
    """The conditions, besides the step, that a measured plan depends on."""

    device_name: str
    driver_version: str
    nccl_version: str
    torch_version: str
    num_ranks: int


def plan_path(step: Step, conditions: Conditions) -> Path:
    """Return the path of the plan for `step`."""
    facts = msgspec.json.encode((step.fingerprint(), conditions))
    return cache_folder() / f"plan-{hashlib.sha256(facts).hexdigest()[:16]}.toml"


def find_plan(step: Step, conditions: Conditions) -> Plan | None:
    """Return the plan in the cache, or None. Raises `PlanError` if the file cannot be read as a plan."""
    path = plan_path(step, conditions)
    return load_plan(path) if path.exists() else None


def keep_plan(plan: Plan, step: Step, conditions: Conditions) -> Path:
    """Write the plan where `find_plan` looks. Raises `PlanError` if it cannot be written."""
    path = plan_path(step, conditions)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise PlanError(f"Cannot create the folder {path.parent}: {problem.strerror}.") from problem
    save_plan(plan, path)
    return path
