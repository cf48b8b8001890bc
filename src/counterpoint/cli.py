"""The command line: parses, calls the library, prints. Bad input gives one line on standard error and exit code 2."""

import io
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from counterpoint import (
    cli_analyze,
    cli_calibrate,
    cli_check,
    cli_cluster,
    cli_env,
    cli_gpu,
    cli_plan,
    cli_run,
    cli_schedule,
    cli_shipped,
    cli_validate,
)
from counterpoint.cli_options import (
    CONTEXT_SETTINGS,
    Group,
    argument,
    complete_shipped,
    file_option,
    json_option,
    machine_option,
    output_option,
)
from counterpoint.errors import MAX_LINE, CounterpointError, say, shown
from counterpoint.units import format_count
from counterpoint.value import PACKAGE, check_outputs

if TYPE_CHECKING:
    from counterpoint.job import Job
    from counterpoint.planner import Trial
    from counterpoint.report.summary import Summary
    from counterpoint.timeline import Timeline

STEP = "A profiler trace (.json, .json.gz), a workload file (.toml) or the name of a workload"
COMPLETION_VARIABLE = "_COUNTERPOINT_COMPLETE"  # set by a shell that requests completions
SECTIONS = {
    "Plan (needs no GPU)": ("demo", "tune", "simulate", "sweep", "schedule"),
    "Run": ("check", "run", "env"),
    "Measure": ("analyze", "calibrate", "validate", "bench"),
    "Files": ("plan", "machines", "workloads"),
    "Shell": ("completion",),
}
machine_of_step_option = machine_option(
    "A machine's name or file (.toml).  [default: the machine of STEP; h200 for a workload]"
)
calibration_option = file_option(
    "--calibration", help="Constants of the simulator that `calibrate` saved (.toml).  [default: those of the machine's GPU]"
)
timeline_option = file_option(
    "--timeline",
    help="Save the timelines as a Chrome trace for Perfetto (.json, .json.gz), or draw them (.svg; dark: .dark.svg).",
)


def main() -> None:
    """Entry point of the `counterpoint` command."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 shows '?' instead of ending the command
    try:
        asked = os.environ.get(COMPLETION_VARIABLE)
        status = run_command(sys.argv[1:]) if not asked else _complete(asked)
        print(end="", flush=True)
    except CounterpointError as problem:
        _fail(str(problem))
    except click.ClickException as problem:
        _fail(_misuse(problem))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of the output, such as `head`, has exited
        _drop_output()
        sys.exit(1)
    except OSError as problem:
        _drop_output()
        _fail(f"Cannot use {problem.filename or 'standard output'}: {problem.strerror}.")
    sys.exit(status)


def run_command(arguments: list[str]) -> int:
    """Run the command that `arguments` name, and return the exit status. Raises the errors that `main` reports.

    Click's own `main` would print an empty line at Ctrl-C.
    """
    try:
        with app.make_context("counterpoint", arguments) as context:
            app.invoke(context)
    except click.exceptions.Exit as ending:
        return ending.exit_code
    return 0


def _complete(asked: str) -> int:
    """Print the completions that a shell requests, and return the exit status."""
    from click.shell_completion import shell_complete  # noqa: PLC0415

    return shell_complete(app, {}, "counterpoint", COMPLETION_VARIABLE, asked)


def _misuse(problem: click.ClickException) -> str:
    """Return the parser's message, with the command whose help to read."""
    message = problem.format_message()
    context = getattr(problem, "ctx", None)  # all errors of usage have one
    command = context.command_path if context is not None else "counterpoint"
    if isinstance(problem, click.NoSuchOption) and not problem.possibilities:
        message = f"{message.rstrip('.')}{_who_has(problem.option_name)}"
    return f"{message.rstrip('.')}{'' if message.endswith('?') else '.'} Try '{command} --help'."


def _who_has(option: str) -> str:
    """Return which command has an option that another lacks, as in "; simulate has it"; nothing if none or several have."""
    found = [name for name, command in app.commands.items() if any(option in each.opts for each in command.params)]
    return f"; {found[0]} has it" if len(found) == 1 else ""


def _fail(message: str) -> None:
    say(shown(" ".join(message.split()), MAX_LINE))  # a file's name may hold line breaks
    sys.exit(2)


def _drop_output() -> None:
    """Discard buffered output, because the interpreter would fail to write it again when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@click.group(cls=Group, sections=SECTIONS, invoke_without_command=True, context_settings=CONTEXT_SETTINGS)
@click.version_option(package_name="counterpoint", message="counterpoint %(version)s")
@click.pass_context
def app(context: click.Context) -> None:
    """Plan how the communication of a multi-GPU PyTorch job hides behind its computation."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command(
    examples=(
        "counterpoint tune trace.json.gz -o plan.toml",
        "counterpoint tune cb_ar_opt2 --machine h100",
        "torchrun --nproc-per-node 2 -m counterpoint tune train:make_step",
    )
)
@argument("step", metavar="STEP", shell_complete=complete_shipped("workloads"), help=f"{STEP}; or module:function.")
@machine_of_step_option
@output_option("Save the plan (.toml).")
@calibration_option
@timeline_option
@json_option
def tune(
    step: str, *, machine: str | None, output: Path | None, calibration: Path | None, timeline: Path | None, is_json: bool
) -> None:
    """Find the plan that hides the most communication of a step, or say that none pays.

    A trace or a workload is simulated, and no GPU is used. module:function is called once and must return a step function.
    This function is captured and measured on the GPUs of this machine; torchrun starts it on several.
    """
    from counterpoint import planner  # noqa: PLC0415  a fast --help
    from counterpoint.job import load_job, names_function  # noqa: PLC0415
    from counterpoint.plan import check_plan_name, save_plan  # noqa: PLC0415
    from counterpoint.report.summary import summarize_tuning  # noqa: PLC0415
    from counterpoint.report.text import ProgressLine, reading  # noqa: PLC0415
    from counterpoint.report.to_apply import PlanOrigin  # noqa: PLC0415
    from counterpoint.sim import Simulator  # noqa: PLC0415

    check_outputs(outputs=(output, timeline), inputs=(step, machine, calibration))
    _check_timeline(timeline)
    if output is not None:
        check_plan_name(output)
    if names_function(step):
        if timeline is not None:
            raise CounterpointError(f"--timeline writes what was simulated, and '{step}' is measured. Leave --timeline out.")
        if calibration is not None:
            raise CounterpointError(f"--calibration is for what is simulated, and '{step}' is measured. Leave it out.")
        cli_gpu.tune_function(step, machine, output, is_json)
    count = itertools.count(1)
    with ProgressLine(is_shown=not is_json) as show:
        job = load_job(step, machine, reading(show, step)).calibrated(calibration)

        def on_trial(trial: "Trial") -> None:
            show(f"simulated {format_count(next(count), 'candidate')}; now: {trial.label[:60]}")

        tuning = planner.tune(
            job.step, job.machine, Simulator(), on_trial, traced=None if job.traced is None else job.traced.timeline
        )
    if output is not None:
        save_plan(tuning.plan, output)
    _write_timelines(timeline, {"before": tuning.baseline, "after": tuning.planned})
    timelines = [("before", tuning.baseline), ("after", tuning.planned)]
    shown = timelines if tuning.plan.directives else [("as it is", tuning.baseline)]
    origin = PlanOrigin(
        file=None if output is None else str(output),
        finding=("counterpoint", "tune", step, *_option(machine)),
        step=step,
        is_described=job.traced is None,
    )
    _print_summary(job, summarize_tuning(job, tuning, origin), shown, is_json)
    if output is not None and not is_json:
        print(f"Plan saved to {output}.")
    if timeline is not None and not is_json:
        print(f"Timelines saved to {timeline}.")


@app.command(
    examples=(
        "counterpoint simulate trace.json.gz --plan plan.toml",
        "counterpoint simulate --cluster cluster.toml",
    )
)
@argument(
    "step",
    metavar="[STEP]",
    required=False,
    shell_complete=complete_shipped("workloads"),
    help=f"{STEP}. With --cluster it may be left out.",
)
@machine_of_step_option
@file_option("--plan", help="A plan that `tune` saved (.toml).  [default: the step as it is]")
@calibration_option
@cli_cluster.cluster_option
@cli_cluster.ranks_option
@timeline_option
@json_option
def simulate(
    step: str | None,
    *,
    machine: str | None,
    plan: Path | None,
    calibration: Path | None,
    cluster: Path | None,
    ranks: int | None,
    timeline: Path | None,
    is_json: bool,
) -> None:
    """Simulate a step, with a plan or as it is, and print its metrics.

    With --cluster and no STEP, this simulates the training step that the cluster file describes.
    """
    from counterpoint.job import load_job  # noqa: PLC0415
    from counterpoint.plan import LEAVE_IT, load_plan  # noqa: PLC0415
    from counterpoint.planner.idle import review_plan  # noqa: PLC0415
    from counterpoint.report.summary import summarize_simulation  # noqa: PLC0415
    from counterpoint.report.text import ProgressLine, reading  # noqa: PLC0415
    from counterpoint.sim import Simulator  # noqa: PLC0415

    cli_cluster.check_cluster(step, cluster, machine, ranks)
    check_outputs(outputs=(timeline,), inputs=(step, machine, plan, calibration, cluster))
    _check_timeline(timeline)
    if step is None:
        assert cluster is not None, "check_cluster lets nothing else pass"
        cli_cluster.simulate_model(cluster, (plan, calibration, timeline), is_json)
        return
    chosen = load_plan(plan) if plan is not None else LEAVE_IT
    assumed: tuple[str, ...] = ()
    if cluster is None:
        with ProgressLine(is_shown=not is_json) as show:
            job = load_job(step, machine, reading(show, step)).calibrated(calibration)
    else:
        job, assumed = cli_cluster.extended_job(step, cluster, ranks)
        job = job.calibrated(calibration)
    simulated = Simulator().run(job.step, job.machine, chosen)
    remarks = (*assumed, *review_plan(job.step, job.machine, chosen))
    if chosen.directives and Simulator().run(job.step, job.machine, LEAVE_IT).intervals == simulated.intervals:
        remarks = (*remarks, "With the plan, no operation starts or ends at another time than without it.")
    _write_timelines(timeline, {"simulated": simulated})
    _print_summary(job, summarize_simulation(job, simulated, chosen, remarks), [("simulated", simulated)], is_json)
    if timeline is not None and not is_json:
        print(f"Timeline saved to {timeline}.")


NEXT = """
Next
  a trace of your own       counterpoint tune trace.json.gz -o plan.toml
  why time is exposed       counterpoint analyze trace.json.gz --html page.html
  a job, as it runs         counterpoint run --tune -o plan.toml -- torchrun train.py
  a step that you describe  counterpoint workloads cb_ar_opt2 -o step.toml
Each command has examples: counterpoint tune --help"""


@app.command(examples=("counterpoint demo",))
@click.pass_context
def demo(context: click.Context) -> None:
    """Tune a trace that ships with Counterpoint, in seconds and without a GPU.

    The trace is of an FSDP2 job on four H200s. The report is that of `tune`. Below it stand the commands to try next.
    """
    trace = PACKAGE / "demo" / "fsdp2.rank0.json.gz"
    print(f"$ counterpoint tune {trace.name}\n", flush=True)
    context.invoke(tune, step=str(trace))
    print(NEXT)


@app.command(
    examples=(
        "counterpoint completion bash >> ~/.bashrc",
        "counterpoint completion zsh >> ~/.zshrc",
        "counterpoint completion fish > ~/.config/fish/completions/counterpoint.fish",
    )
)
@argument("shell", metavar="SHELL", type=click.Choice(("bash", "zsh", "fish")), help="bash, zsh or fish.")
def completion(shell: str) -> None:
    """Print the script that makes a shell complete the words of this command.

    Start a new shell afterwards. Tab then completes commands, options, files, and names of machines and workloads. bash must
    be 4.4 or later.
    """
    from click.shell_completion import get_completion_class  # noqa: PLC0415  a fast --help

    kind = get_completion_class(shell)
    assert kind is not None, "click completes each of the shells above"
    print(kind(app, {}, "counterpoint", COMPLETION_VARIABLE).source())


for command in (
    cli_analyze.analyze,
    cli_check.check,
    cli_run.run,
    cli_env.env,
    cli_calibrate.calibrate,
    cli_validate.validate,
    cli_cluster.sweep,
    cli_plan.plan,
    cli_schedule.schedule,
    cli_gpu.bench,
    cli_shipped.machines,
    cli_shipped.workloads,
):
    app.add_command(command)


def _option(machine: str | None) -> tuple[str, ...]:
    """Return the option that named the machine, as it was typed."""
    return () if machine is None else ("--machine", machine)


def _check_timeline(path: Path | None) -> None:
    if path is not None:
        from counterpoint.report.timeline_picture import check_timeline_path  # noqa: PLC0415

        check_timeline_path(path)


def _write_timelines(path: Path | None, timelines: dict[str, "Timeline"]) -> None:
    if path is not None:
        from counterpoint.report.timeline_picture import write_timelines  # noqa: PLC0415

        write_timelines(path, timelines)


def _print_summary(job: "Job", found: "Summary", timelines: "Sequence[tuple[str, Timeline]]", is_json: bool) -> None:
    """Print a command's result: JSON for programs; for people the step, any trials and plan, and the lanes."""
    from counterpoint.report import text  # noqa: PLC0415
    from counterpoint.report.plan import print_job_changes, print_to_apply  # noqa: PLC0415
    from counterpoint.value import write_json  # noqa: PLC0415

    if is_json:
        print(write_json(found))
        return
    console = text.new_console()
    text.print_step(console, job.step, job.machine, found.notes)
    text.print_metrics(console, found.step)
    if found.trials and found.plan is not None:
        text.print_trials(console, found.trials, None if found.bounds.is_compared else found.bounds)
        text.print_plan(console, found.plan, found.bounds)
        print_to_apply(console, found.to_apply)
        if found.job_changes is not None:
            print_job_changes(console, found.job_changes)
    text.print_lanes(console, timelines)
