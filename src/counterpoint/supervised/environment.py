"""The environment of a supervised job: the filter to preload, the agent's folder, and the settings that a plan needs.

Priority is given launch by launch by the filter, so no variable asks for it: torch's own switch
(TORCH_NCCL_HIGH_PRIORITY) does not reach collectives that run on the current stream, and the guard could not take it
back. Limits on a collective's CTAs are NCCL's (NCCL_MAX_CTAS, NCCL_NTHREADS), hold for the whole process, and are read
once.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from counterpoint.controls import CommunicationCtas
from counterpoint.errors import LaunchFilterError, PlanError
from counterpoint.plan import Plan
from counterpoint.supervised.settings import DIRECTORY_VARIABLE

IN_JOB = Path(__file__).with_name("in_job")
RECORDINGS_VARIABLE = "COUNTERPOINT_RECORDINGS"  # of `ops`: of calls replayed as graphs the filter would see the first only


def job_environment(
    inherited: Mapping[str, str], directory: Path, library: Path, plan: Plan, *, has_agent: bool
) -> dict[str, str]:
    """The inherited environment with what the job needs in front of what is there already.

    Raises `LaunchFilterError` for a library whose path cannot be preloaded, `PlanError` where the user has set something
    else than the plan asks for.
    """
    environment = dict(inherited)
    if any(letter in str(library) for letter in " :"):
        raise LaunchFilterError(
            f"The launch filter lies in '{library.parent}', and a preloaded path holds no space and no colon. "
            "Set COUNTERPOINT_CACHE_DIR to a folder without."
        )
    environment["LD_PRELOAD"] = _in_front(str(library), inherited.get("LD_PRELOAD"))
    environment[DIRECTORY_VARIABLE] = str(directory)
    environment[RECORDINGS_VARIABLE] = "0"
    if has_agent:
        environment["PYTHONPATH"] = _in_front(str(IN_JOB), inherited.get("PYTHONPATH"))
    for name, wanted in plan_variables(plan).items():
        found = inherited.get(name, wanted)
        if found != wanted:
            raise PlanError(f"The plan asks for {name}={wanted}, but it is set to {found}. Unset it, or change the plan.")
        environment[name] = wanted
    return environment


def plan_variables(plan: Plan) -> dict[str, str]:
    """What a plan's process-group controls ask of NCCL. Raises `PlanError` where it asks for two things at once."""
    variables: dict[str, str] = {}
    for directive in plan.directives:
        for control in directive.controls:
            if not isinstance(control, CommunicationCtas):
                continue
            wanted = {"NCCL_MAX_CTAS": str(control.max_ctas)}
            if control.num_threads is not None:
                wanted["NCCL_NTHREADS"] = str(control.num_threads)
            for name, value in wanted.items():
                if variables.setdefault(name, value) != value:
                    raise PlanError(
                        f"The plan asks for {name} {variables[name]} and {value}, and NCCL takes one for the whole process. "
                        "Keep one of the two."
                    )
    return variables


def variable_remarks(plan: Plan) -> list[str]:
    """Where a setting reaches more collectives than the plan means."""
    return [
        f"communication_ctas: the plan means some collectives, and NCCL takes one limit for all of them ({names})"
        for directive in plan.directives
        if directive.match.operations is not None or directive.match.name != "*"
        if (names := ", ".join(plan_variables(Plan(directives=(directive,)))))
    ]


def _in_front(entry: str, others: str | None) -> str:
    return f"{entry}{os.pathsep}{others}" if others else entry
