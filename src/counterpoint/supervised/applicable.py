"""What of a plan `run` can apply, said before the job starts: it may run for days before anybody reads a table.

The launch filter takes rules by name; limits on a collective's CTAs are NCCL's variables (NCCL_MAX_CTAS, NCCL_NTHREADS),
which hold for the whole process and are read once. Priority is given launch by launch by the filter, so no variable asks for
it: torch's own switch (TORCH_NCCL_HIGH_PRIORITY) does not reach collectives that run on the current stream, and the guard
could not take it back.
"""

from counterpoint.controls import CommunicationCtas
from counterpoint.errors import PlanError
from counterpoint.integrations.paths import LIBRARY, Paths
from counterpoint.launch_filter.control_block import Translation
from counterpoint.plan import Match, Plan

NUM_SHOWN = 3


def check_applicable(plan: Plan, translation: Translation, paths: Paths, *, keeps_bits: bool) -> str:
    """One line on what of the plan is not applied and how to get it; empty where all of it is.

    Raises `PlanError` for a plan of which nothing can be applied.
    """
    if keeps_bits and not paths.keeps_bits:
        names = ", ".join(f"{tag} on {target}" for tag, target in paths.targets)
        raise PlanError(f"--bitwise excludes what sums in another order, and the plan holds {names}. Leave one of them out.")
    left_out = _not_applied(plan, translation)
    if not left_out:
        return ""
    shown = "; ".join(left_out[:NUM_SHOWN])
    more = f"; and {len(left_out) - NUM_SHOWN} more" if len(left_out) > NUM_SHOWN else ""
    if not plan_variables(plan) and paths == LIBRARY and all(rule.is_collective for rule in translation.rules):
        raise PlanError(f"`run` can apply nothing of this plan: {shown}{more}. Start the job without it, or use --tune.")
    return f"of the plan `run` does not apply everything: {shown}{more}"


def _not_applied(plan: Plan, translation: Translation) -> list[str]:
    """Each control that is not applied, on what, and why or what to do instead."""
    controls = [control for directive in plan.directives for control in directive.controls]
    found = [f"{control.tag}: {control.refused_by['job']}" for control in controls if "job" in control.refused_by]
    found += [f"{refusal.control} on '{refusal.target[:60]}': {refusal.reason}" for refusal in translation.refusals]
    return list(dict.fromkeys(found))


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
        if directive.match not in (Match(), Match(kind="communication"))
        if (names := ", ".join(plan_variables(Plan(directives=(directive,)))))
    ]
