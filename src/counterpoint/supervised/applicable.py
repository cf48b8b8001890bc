"""Checks, before the job starts, what `run` can apply of a plan: the job may run for days before anybody reads a table.

The launch filter takes rules by kernel name. Limits on a collective's CTAs are NCCL's variables (NCCL_MAX_CTAS,
NCCL_NTHREADS), which apply to the whole process and are read once. The filter sets priority launch by launch, so no
variable requests it: torch's own switch (TORCH_NCCL_HIGH_PRIORITY) does not reach collectives that run on the current
stream, and the guard could not undo it.
"""

from counterpoint.controls import CommunicationCtas
from counterpoint.errors import PlanError
from counterpoint.integrations.paths import LIBRARY, Paths
from counterpoint.kernel_names import readable
from counterpoint.launch_filter.rules import Translation
from counterpoint.plan import Match, Plan

NUM_SHOWN = 3


def check_applicable(plan: Plan, translation: Translation, paths: Paths, *, keeps_bits: bool) -> str:
    """Return one line on what is not applied of the plan and how to get it; empty if all of it is.

    Raises `PlanError` for a plan of which nothing can be applied.
    """
    if keeps_bits and not paths.keeps_bits:
        names = ", ".join(f"{tag} on {target}" for tag, target in paths.targets)
        raise PlanError(
            f"--bitwise excludes controls that sum in another order, but the plan holds {names}. Leave one of them out."
        )
    left_out = _not_applied(plan, translation)
    if not left_out:
        return ""
    shown = "; ".join(left_out[:NUM_SHOWN])
    more = f"; and {len(left_out) - NUM_SHOWN} more" if len(left_out) > NUM_SHOWN else ""
    if not plan_variables(plan) and paths == LIBRARY and all(rule.is_collective for rule in translation.rules):
        raise PlanError(
            f"A job can get no control of this plan: {shown}{more}. Otherwise start it without the plan, or `run --tune`."
        )
    return f"A job does not get all of this plan: {shown}{more}"


def _not_applied(plan: Plan, translation: Translation) -> list[str]:
    """Return each control that is not applied, its targets, and why or what to do instead; each reason once."""
    controls = [control for directive in plan.directives for control in directive.controls]
    found = [f"{control.tag}: {control.refused_by['job']}" for control in controls if "job" in control.refused_by]
    targets: dict[tuple[str, str], list[str]] = {}
    for refusal in translation.refusals:
        targets.setdefault((refusal.control, refusal.reason), []).append(readable(refusal.target))
    for (control, reason), (first, *others) in targets.items():
        found.append(f"{control} on '{first}'{f' and {len(others)} more' if others else ''}: {reason}")
    return list(dict.fromkeys(found))


def plan_variables(plan: Plan) -> dict[str, str]:
    """Return what a plan's process-group controls ask of NCCL. Raises `PlanError` if two of them conflict."""
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
                        f"The plan asks for {name} {variables[name]} and for {value}, but NCCL takes one value "
                        "for the whole process. Keep one of them."
                    )
    return variables


def variable_remarks(plan: Plan) -> list[str]:
    """Return remarks on settings that affect more collectives than the plan matches."""
    return [
        f"communication_ctas: the plan matches some collectives, but NCCL applies one limit to all of them ({names})"
        for directive in plan.directives
        if directive.match not in (Match(), Match(kind="communication"))
        if (names := ", ".join(plan_variables(Plan(directives=(directive,)))))
    ]
