"""What of a plan `run` can apply, said before the job starts: it may run for days before anybody reads a table."""

from counterpoint.errors import PlanError
from counterpoint.launch_filter.control_block import Translation
from counterpoint.plan import CommunicationCtas, Plan, Transport, control_tag

INSTEAD = (
    "a collective is moved to copy engines by the job's own code: for FSDP2, call "
    "counterpoint.integrations.fsdp2.use_copy_engines(model) there (docs/integrations.md)"
)
NUM_SHOWN = 3


def check_applicable(plan: Plan, translation: Translation) -> str:
    """One line on what of the plan is not applied and how to get it; empty where all of it is.

    Raises `PlanError` for a plan of which nothing can be applied.
    """
    left_out = _not_applied(plan, translation)
    if not left_out:
        return ""
    shown = "; ".join(left_out[:NUM_SHOWN])
    more = f"; and {len(left_out) - NUM_SHOWN} more" if len(left_out) > NUM_SHOWN else ""
    is_any = any(not rule.is_collective for rule in translation.rules) or any(
        isinstance(control, CommunicationCtas) for directive in plan.directives for control in directive.controls
    )
    if not is_any:
        raise PlanError(f"`run` can apply nothing of this plan: {shown}{more}. Start the job without it, or use --tune.")
    return f"of the plan `run` does not apply everything: {shown}{more}"


def _not_applied(plan: Plan, translation: Translation) -> list[str]:
    """Each control that is not applied, on what, and why or what to do instead."""
    found = [f"{refusal.control} on '{refusal.target[:60]}': {refusal.reason}" for refusal in translation.refusals]
    has_transport = any(isinstance(control, Transport) for directive in plan.directives for control in directive.controls)
    if has_transport:
        found.insert(0, f"{control_tag(Transport(transport='copy_engine'))}: {INSTEAD}")
    return list(dict.fromkeys(found))
