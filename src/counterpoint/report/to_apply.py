"""How to apply a plan: for each control the command, the lines of Python or the variables, ready to type.

The printed lines can be pasted. Placeholders have the names that the documentation uses: `torchrun train.py` for the
job, `model` for its model, `step` for a function that runs one step.
"""

import shlex
from collections.abc import Iterable, Iterator, Sequence

from counterpoint.controls import Control
from counterpoint.integrations.planned_paths import applied_in_job, needs_step
from counterpoint.plan import PLAN_FILE, Directive, Plan
from counterpoint.step import CollectiveKind, Step
from counterpoint.value import Value

JOB = ("torchrun", "train.py")
TRACE = "TRACE"  # from which a plan was made whose file alone is known


class Application(Value, frozen=True, kw_only=True):
    """One way to apply `controls` (in words): `lines` of a shell or of Python, and `where` they belong.

    If there are no controls, the lines are for the whole plan.
    """

    controls: tuple[str, ...]
    where: str
    lines: tuple[str, ...]


class PlanOrigin(Value, frozen=True, kw_only=True):
    """Where a report's plan comes from.

    `file` is the saved plan, or None. `finding` is the command that found it, without an option to save it. `job` is the
    command of the job that it is for. `step` is the trace or workload that it was made from, if any, and `is_described`
    is true for a workload, whose kernels have names of its own. `is_captured` is true if the plan was found for a step
    function that the user captures.
    """

    file: str | None = None
    finding: tuple[str, ...] = ()
    job: tuple[str, ...] = JOB
    step: str | None = None
    is_described: bool = False
    is_captured: bool = False


NOWHERE = PlanOrigin()


def ways_to_apply(plan: Plan, origin: PlanOrigin, step: Step | None = None) -> tuple[Application, ...]:
    """Return every way to apply a plan, by its file first, since that needs no change to the job; none for an empty
    plan.

    `step` is the one that the plan was made from, if it is known: `run` applies no control that means only some of the
    collectives or launches that a job cannot distinguish.
    """
    if not plan.directives:
        return ()
    by_file = tuple(_by_file(plan, origin, step))
    if by_file and origin.file is None and origin.finding:
        lines = (_save_command(origin),)
        by_file = (Application(controls=(), where="first, save the plan", lines=lines), *by_file)
    return (*by_file, *_by_hand(plan.directives))


def _by_file(plan: Plan, origin: PlanOrigin, step: Step | None) -> Iterator[Application]:
    """Yield the uses of a plan file: in a job, in a captured step, for operators."""
    file = origin.file or PLAN_FILE
    loading = f"plan = load_plan({file!r})"
    for_jobs = _in_words(applied_in_job(plan, step))
    if for_jobs:
        named = origin.step or (None if origin.finding else TRACE)
        step_words = ("--step", named) if named is not None and needs_step(plan) else ()
        words: tuple[str, ...] = ("counterpoint", "run", "--plan", file, *step_words, "--", *origin.job)
        where = "to an unmodified job" + (" whose kernels have the workload's names" if origin.is_described else "")
        yield Application(controls=for_jobs, where=where, lines=(shlex.join(words),))
    for_graphs = _applied_by(plan, "graph")
    if for_graphs and origin.is_captured:
        lines: tuple[str, ...] = (
            "from counterpoint import apply, capture, load_plan",
            loading,
            "applied = apply(capture(step), plan)",
            "applied.replay()",
        )
        yield Application(controls=for_graphs, where="to a captured step, in Python", lines=lines)
    for_operators = _applied_by(plan, "operators")
    if for_operators:
        lines = ("from counterpoint import load_plan, ops", loading, "ops.use_plan(plan)")
        yield Application(controls=for_operators, where="to operators, in Python, on every rank", lines=lines)


def _by_hand(directives: Sequence[Directive]) -> Iterator[Application]:
    """Yield what a user can write without a plan file: each way once, with all controls that it applies."""
    found: dict[tuple[str, tuple[str, ...]], list[Control]] = {}
    for directive in directives:
        collective: CollectiveKind | None = directive.match.collective
        for control in directive.controls:
            for way in control.ways(collective):
                found.setdefault((way.where, way.lines), []).append(control)
    for (where, lines), controls in found.items():
        yield Application(controls=_in_words(controls), where=where, lines=lines)


def _save_command(origin: PlanOrigin) -> str:
    """Return the finding command with `-o` added, in front of `--`, where the job's command begins."""
    words = list(origin.finding)
    place = words.index("--") if "--" in words else len(words)
    return shlex.join([*words[:place], "-o", PLAN_FILE, *words[place:]])


def _applied_by(plan: Plan, applier: str) -> tuple[str, ...]:
    controls = (control for directive in plan.directives for control in directive.controls)
    return _in_words(control for control in controls if applier not in control.refused_by)


def _in_words(controls: Iterable[Control]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(control.describe() for control in controls))
