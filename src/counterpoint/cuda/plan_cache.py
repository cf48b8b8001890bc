"""Plans kept between runs: one file for each step, GPU, driver, NCCL, torch and number of ranks.

The folder is $COUNTERPOINT_CACHE_DIR, else `counterpoint` in the user's cache folder. A plan whose conditions changed has
another name and is simply not found.
"""

import hashlib
import os
from pathlib import Path

import msgspec

from counterpoint.plan import Plan, load_plan, save_plan
from counterpoint.step import Step
from counterpoint.value import Value


class Conditions(Value, frozen=True, kw_only=True):
    """What a measured plan depends on beside the step."""

    device_name: str
    driver_version: str
    nccl_version: str
    torch_version: str
    num_ranks: int


def cache_folder() -> Path:
    """Where plans are kept."""
    chosen = os.environ.get("COUNTERPOINT_CACHE_DIR")
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "counterpoint"


def plan_path(step: Step, conditions: Conditions) -> Path:
    """The file of the plan for `step`."""
    facts = msgspec.json.encode((step.fingerprint(), conditions))
    return cache_folder() / f"plan-{hashlib.sha256(facts).hexdigest()[:16]}.toml"


def find_plan(step: Step, conditions: Conditions) -> Plan | None:
    """The kept plan, or None. Raises `PlanError` for a file that cannot be read as a plan."""
    path = plan_path(step, conditions)
    return load_plan(path) if path.exists() else None


def keep_plan(plan: Plan, step: Step, conditions: Conditions) -> Path:
    """Write the plan where `find_plan` looks. Raises `PlanError` if that is impossible."""
    path = plan_path(step, conditions)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_plan(plan, path)
    return path
