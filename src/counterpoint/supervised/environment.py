"""The environment of a supervised job: the filter to preload, the agent's folder, and the settings that a plan needs."""

import os
from collections.abc import Mapping
from pathlib import Path

from counterpoint.errors import LaunchFilterError, PlanError
from counterpoint.plan import Plan
from counterpoint.supervised.applicable import plan_variables
from counterpoint.supervised.settings import DIRECTORY_VARIABLE

IN_JOB = Path(__file__).with_name("in_job")
# a variable of `ops`: of calls replayed as graphs, the filter would see only the first
RECORDINGS_VARIABLE = "COUNTERPOINT_RECORDINGS"
QUEUES_VARIABLE = "COUNTERPOINT_QUEUES"  # which `in_job/sitecustomize.py` reads


def job_environment(
    inherited: Mapping[str, str],
    directory: Path,
    library: Path,
    plan: Plan,
    *,
    keeps_recordings: bool,
    num_queues: int | None = None,
) -> dict[str, str]:
    """Return the inherited environment with the job's settings in front of existing ones. `num_queues`: the hardware
    queues of each rank, whatever the job's own variable says.

    Raises `LaunchFilterError` for a library whose path cannot be preloaded, `PlanError` if the user has set a variable
    to something else than the plan asks for.
    """
    environment = dict(inherited)
    if any(letter in str(library) for letter in " :"):
        raise LaunchFilterError(
            f"The launch filter is in '{library.parent}', but a preloaded path must not contain a space or a "
            "colon. Set COUNTERPOINT_CACHE_DIR to a folder without them."
        )
    environment["LD_PRELOAD"] = _in_front(str(library), inherited.get("LD_PRELOAD"))
    environment[DIRECTORY_VARIABLE] = str(directory)
    if not keeps_recordings:
        environment[RECORDINGS_VARIABLE] = "0"
    if num_queues is not None:
        environment[QUEUES_VARIABLE] = str(num_queues)
    environment["PYTHONPATH"] = _in_front(str(IN_JOB), inherited.get("PYTHONPATH"))
    for name, wanted in plan_variables(plan).items():
        found = inherited.get(name, wanted)
        if found != wanted:
            raise PlanError(f"The plan asks for {name}={wanted}, but it is set to {found}. Unset it, or change the plan.")
        environment[name] = wanted
    return environment


def _in_front(entry: str, others: str | None) -> str:
    return f"{entry}{os.pathsep}{others}" if others else entry
