"""The command for supervised jobs: `counterpoint run -- command`. It prints on standard error."""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from counterpoint.cli.options import COMMAND_FOLLOWS, Command, argument, file_option, output_option
from counterpoint.errors import CounterpointError, reason_of, say
from counterpoint.kernel_names import readable
from counterpoint.value import check_outputs

if TYPE_CHECKING:
    from counterpoint.step import Step
    from counterpoint.supervised.run import RunOutcome, RunRequest

NOT_ENGAGED = 3
NO_CONTROL_PAYS = (
    "no control pays. To see what to change in the job itself, run `counterpoint tune` on a profiler trace of it"
)


@click.command(
    cls=Command,
    context_settings=COMMAND_FOLLOWS,
    examples=(
        "counterpoint run --tune -o plan.toml -- torchrun train.py",
        "counterpoint run --plan plan.toml -- torchrun train.py",
    ),
)
@argument("command", metavar="-- COMMAND...", nargs=-1, required=True, help="The command that starts the job.")
@file_option("--plan", help="A plan that `tune` or `run` saved (.toml).")
@click.option(
    "--step",
    metavar="STEP",
    help="The trace that the plan was made from. A plan needs it if it names operations by number, or collectives by "
    "process group or size.",
)
@click.option(
    "--tune", is_flag=True, help="Try controls on live steps, those of a --plan first, and keep what is proven faster."
)
@output_option("With --tune: save the plan that was found (.toml).")
@click.option(
    "--budget",
    type=int,
    metavar="STEPS",
    default=200,
    show_default=True,
    help="The number of steps that --tune may use; 100 or more, and some jobs need more.",
)
@click.option(
    "--guard",
    type=int,
    metavar="STEPS",
    default=500,
    show_default=True,
    help="Compare the plan with the unchanged job every STEPS steps; 0: never.",
)
@click.option(
    "--bitwise", is_flag=True, help="Use only what keeps results bit-identical: no control that changes the order of a sum."
)
@click.option(
    "--queues",
    type=int,
    metavar="NUMBER",
    show_default="as the job asks",
    help="Give each rank NUMBER hardware queues, 1 to 32. The job itself still finds its own CUDA_DEVICE_MAX_CONNECTIONS.",
)
@click.option("--strict", is_flag=True, help="Exit with code 3 if a control of the plan did not take effect.")
def run(
    command: tuple[str, ...],
    *,
    plan: Path | None,
    step: str | None,
    tune: bool,
    output: Path | None,
    budget: int,
    guard: int,
    bitwise: bool,
    queues: int | None,
    strict: bool,
) -> None:
    """Run an unmodified job with a plan, or tune it while it runs.

    What took effect is printed on standard error at the end. Output, signals and exit status are the job's own. Without
    --plan and --tune, the job runs unchanged.
    """
    from counterpoint.doctor.rules.queues import MOST_QUEUES  # noqa: PLC0415
    from counterpoint.plan import LEAVE_IT, load_plan  # noqa: PLC0415
    from counterpoint.supervised.run import RunRequest, run_job  # noqa: PLC0415  a fast --help
    from counterpoint.supervised.settings import LiveSettings  # noqa: PLC0415
    from counterpoint.supervised.signals import HeldSignals  # noqa: PLC0415

    _check_options(plan, step, output, is_tuning=tune)
    if queues is not None and not 1 <= queues <= MOST_QUEUES:
        raise CounterpointError(
            f"--queues must be from 1 to {MOST_QUEUES}, CUDA's limit; found {queues}. CUDA's default is 8."
        )
    LiveSettings(is_tuning=tune, budget_steps=budget, guard_every_steps=guard)  # refused before anything starts
    request = RunRequest(
        command=command,
        plan=load_plan(plan) if plan is not None else LEAVE_IT,
        is_tuning=tune,
        budget_steps=budget,
        guard_every_steps=guard,
        step=_load_step(step) if step is not None else None,
        keeps_bits=bitwise,
        num_queues=queues,
    )
    with HeldSignals() as signals:  # a second signal must not lose the plan found or the exit status
        outcome = run_job(request, signals)
        status = outcome.ended.exit_status
        unproven = _report(outcome, request, has_plan=plan is not None, output=output)
        if strict and unproven and status == 0:
            say(unproven)
            status = NOT_ENGAGED
        _finish_streams()
        raise click.exceptions.Exit(status)


def _check_options(plan: Path | None, step: str | None, output: Path | None, *, is_tuning: bool) -> None:
    """Raise `CounterpointError` for options that cannot be combined, and for a file that cannot be written."""
    from counterpoint.plan import PLAN  # noqa: PLC0415

    if output is not None and not is_tuning:
        raise CounterpointError(f"'{output}' is for the plan that --tune finds. Add --tune, or leave out -o.")
    if step is not None and plan is None:
        raise CounterpointError(f"'{step}' says what the operation numbers of a plan mean. Add --plan, or leave out --step.")
    if _is_given("budget") and not is_tuning:
        raise CounterpointError("--budget is for the steps that --tune may use. Add --tune, or leave out --budget.")
    for name in ("guard", "bitwise", "queues", "strict") if not is_tuning and plan is None else ():
        if _is_given(name):
            raise CounterpointError(
                f"--{name} is for the controls of --plan and --tune. Add one of them, or leave out --{name}."
            )
    check_outputs(((output, PLAN),), (plan, step))


def _is_given(option: str) -> bool:
    return click.get_current_context().get_parameter_source(option) is click.core.ParameterSource.COMMANDLINE


def _load_step(source: str) -> "Step":
    from counterpoint.job import load_job  # noqa: PLC0415

    return load_job(source).step


def _report(outcome: "RunOutcome", request: "RunRequest", *, has_plan: bool, output: Path | None) -> str:
    """Save the plan and print the outcome; return what `strict` would reject, or nothing.

    A failure here does not change the exit status, which is the command's.
    """
    from counterpoint.report.refusals import print_left_out  # noqa: PLC0415
    from counterpoint.report.run import print_line, print_outcome  # noqa: PLC0415
    from counterpoint.report.text import new_console  # noqa: PLC0415

    saved, unsaved = _save(outcome, output) if output is not None else ("", "")
    try:
        console = new_console(stderr=True)
        print_outcome(console, outcome)
        if saved:
            print_line(console, saved)
        if outcome.is_tuned:
            _print_to_apply(outcome, request, output)
        if outcome.plan_found is not None and outcome.has_acted:
            print_left_out(console, outcome.plan_found)
        if has_plan and not outcome.is_filtered:
            others = "" if request.num_queues is None else " and with the job's own hardware queues"
            print_line(console, f"the plan leaves everything as it is, so the command ran without the filter{others}")
    except (OSError, SystemExit):  # rich raises SystemExit when the reader has exited
        pass  # standard error is full, or nothing reads it any more
    except Exception as problem:
        say(f"the report cannot be printed ({reason_of(problem)})")
    return unsaved or _why_unproven(outcome)


def _print_to_apply(outcome: "RunOutcome", request: "RunRequest", output: Path | None) -> None:
    """Print how to start the job with the plan found; if none pays, what shows how to change the job itself."""
    from counterpoint.report.plan import print_to_apply  # noqa: PLC0415
    from counterpoint.report.run import print_line  # noqa: PLC0415
    from counterpoint.report.text import new_console  # noqa: PLC0415
    from counterpoint.report.to_apply import PlanOrigin, ways_to_apply  # noqa: PLC0415

    record, plan = outcome.record, outcome.plan_found
    if record is None or plan is None:
        return
    console = new_console(stderr=True)
    if plan.verdict == "NO_GAIN" and not record.is_untried:
        print_line(console, NO_CONTROL_PAYS)
    finding = ("counterpoint", "run", "--tune", "--budget", str(request.budget_steps), "--", *request.command)
    origin = PlanOrigin(file=None if output is None else str(output), finding=finding, job=request.command)
    print_to_apply(console, ways_to_apply(plan, origin))


def _why_unproven(outcome: "RunOutcome") -> str:
    """Return why it is not proven that every control took effect; empty if it is."""
    if not outcome.is_filtered:
        return ""
    if outcome.damaged:
        return f"strict: {outcome.damaged[0]}, so there is no proof of what took effect."
    if not outcome.processes:
        return "strict: no process loaded the filter, so no control took effect."
    entry = outcome.first_unproven()
    if entry is None:
        return f"strict: {outcome.why_stopped}." if outcome.why_stopped else ""
    return f"strict: {entry.control} on '{readable(entry.target)}' is {entry.state}: {entry.reason or 'no reason given'}."


def _save(outcome: "RunOutcome", output: Path) -> tuple[str, str]:
    """Save the plan found; return a message about it, and what `strict` would reject."""
    from counterpoint.plan import save_plan  # noqa: PLC0415

    found = outcome.record.plan if outcome.record is not None else None
    if found is None:
        elsewhere = bool(outcome.processes) and not outcome.has_rank_0
        reason = "rank 0, which has the plan, did not run here" if elsewhere else "no plan was found"
        return f"{reason}, so none was saved to {output}", ""
    try:
        save_plan(found, output)
    except CounterpointError as problem:
        return str(problem), f"strict: the plan found was not saved to {output}."
    return f"plan saved to {output}", ""


def _finish_streams() -> None:
    """Write the rest of standard error, and drop what cannot be written.

    Standard output was the command's. Python would flush both again, and exit with its own status if that fails.
    """
    is_written = True
    with suppress(OSError, ValueError):
        if sys.stderr is not None:
            is_written = False
            sys.stderr.flush()
            is_written = True
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, *(() if is_written else (sys.stderr,))):
            if stream is not None:
                os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
