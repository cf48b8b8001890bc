"""The command line: parse, call the library, print. Bad input is one line on standard error and exit code 2."""

import io
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.exceptions import Abort, TyperException

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
    cli_validate,
)
from counterpoint.errors import MAX_LINE, CounterpointError, say, shown
from counterpoint.units import format_count
from counterpoint.value import check_outputs

if TYPE_CHECKING:
    from counterpoint.job import Job
    from counterpoint.planner import Trial
    from counterpoint.report.summary import Summary
    from counterpoint.timeline import Timeline

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="Plan how the communication of a multi-GPU PyTorch job hides behind its computation.",
)

STEP = "A profiler trace (.json, .json.gz), a workload file (.toml) or a workload's name"
OptionalStepArgument = Annotated[str | None, typer.Argument(metavar="[STEP]", help=f"{STEP}; optional with --cluster.")]
StepOrFunctionArgument = Annotated[
    str, typer.Argument(metavar="STEP", help=f"{STEP}; or module:function, to measure on the GPUs at hand.")
]
MachineOption = Annotated[
    str | None,
    typer.Option(
        "--machine",
        metavar="NAME",
        help="A machine's name, or the path of a machine file (.toml).  [default: that of STEP; h200 for a workload]",
    ),
]
CalibrationOption = Annotated[
    Path | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        help="The simulator's constants, which `calibrate` saved (.toml).  [default: those of the machine's GPU]",
    ),
]
TimelineOption = Annotated[
    Path | None,
    typer.Option(
        "--timeline",
        metavar="FILE",
        help="Write the timelines as a Chrome trace (.json, .json.gz) for Perfetto, or draw them (.svg; *.dark.svg for a "
        "dark page).",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]
PARSERS_WORDS = {  # which are for programmers, and ours for them
    "Value error, ": "",
    "Input should be a valid integer, unable to parse string as an integer": "it must be a whole number in digits",
    "Unable to parse input string as an integer, exceeded maximum size": "it must be a whole number of fewer digits",
}


def main() -> None:
    """Entry point of the `counterpoint` command."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 shows '?' instead of ending the command
    try:
        status = app(standalone_mode=False)  # typer turns Ctrl-C into the status 130
        print(end="", flush=True)
    except CounterpointError as problem:
        _fail(str(problem))
    except TyperException as problem:
        _fail(_misuse(problem))
    except (Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:  # whoever read our output, `head` say, has seen enough
        _drop_output()
        sys.exit(1)
    except OSError as problem:
        _drop_output()
        _fail(f"Cannot use {problem.filename or 'standard output'}: {problem.strerror}.")
    sys.exit(status)


def _misuse(problem: TyperException) -> str:
    """What the parser says, with the value that it found and the help of the command that was meant."""
    message = problem.format_message()
    for words, ours in PARSERS_WORDS.items():
        message = message.replace(words, ours)
    find_errors = getattr(problem.__cause__, "errors", None)  # where a value was refused: what pydantic says of it
    for error in find_errors() if callable(find_errors) else ():
        found = f"'{shown(error['input'])}'"
        if found not in message:
            message = f"{message.rstrip('.')}; found {found}"
    context = getattr(problem, "ctx", None)  # all errors of usage have one
    command = context.command_path if context is not None else "counterpoint"
    return f"{message.rstrip('.')}{'' if message.endswith('?') else '.'} Try '{command} --help'."


def _fail(message: str) -> None:
    say(shown(" ".join(message.split()), MAX_LINE))  # a file's name may hold line breaks
    sys.exit(2)


def _drop_output() -> None:
    """Let what is still buffered go nowhere; the interpreter would fail on it once more when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@app.callback(invoke_without_command=True)
def show_help(
    context: typer.Context,
    is_version: Annotated[bool, typer.Option("--version", help="Print the version and end.", is_eager=True)] = False,
) -> None:
    """Print the version, or the help where no command is named."""
    if is_version:
        from importlib.metadata import version  # noqa: PLC0415

        print(f"counterpoint {version('counterpoint')}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command(short_help="Find the plan that hides the most communication of a step.")
def tune(
    step: StepOrFunctionArgument,
    machine: MachineOption = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Save the plan (.toml).")] = None,
    calibration: CalibrationOption = None,
    *,
    timeline: TimelineOption = None,
    json: JsonOption = False,
) -> None:
    """Find the plan that hides the most communication of STEP, or say that none pays.

    A trace or a workload is simulated and needs no GPU. module:function is called once and returns a step function, which is
    captured and measured on the GPUs at hand; start it with torchrun --no-python for several.
    """
    from counterpoint import planner  # noqa: PLC0415  a fast --help
    from counterpoint.job import load_job, names_function  # noqa: PLC0415
    from counterpoint.plan import check_plan_name, save_plan  # noqa: PLC0415
    from counterpoint.report.summary import summarize_tuning  # noqa: PLC0415
    from counterpoint.report.text import ProgressLine  # noqa: PLC0415
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
        cli_gpu.tune_function(step, machine, output, json)
    job = load_job(step, machine).calibrated(calibration)
    count = itertools.count(1)
    with ProgressLine(is_shown=not json) as show:

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
        file=None if output is None else str(output), finding=("counterpoint", "tune", step, *_option(machine)), step=step
    )
    _print_summary(job, summarize_tuning(job, tuning, origin), shown, json)
    if output is not None and not json:
        print(f"Plan saved to {output}.")
    if timeline is not None and not json:
        print(f"Timelines saved to {timeline}.")


@app.command(short_help="Simulate a step, with a plan or as it is.")
def simulate(
    step: OptionalStepArgument = None,
    machine: MachineOption = None,
    plan: Annotated[
        Path | None,
        typer.Option("--plan", metavar="FILE", help="A plan (.toml) that `tune` saved.  [default: the step as it is]"),
    ] = None,
    calibration: CalibrationOption = None,
    *,
    cluster: cli_cluster.ClusterOption = None,
    ranks: cli_cluster.RanksOption = None,
    timeline: TimelineOption = None,
    json: JsonOption = False,
) -> None:
    """Simulate STEP, with a plan or as it is, and print its metrics.

    With --cluster and no STEP, the training step is simulated that the cluster file describes.
    """
    from counterpoint.job import load_job  # noqa: PLC0415
    from counterpoint.plan import LEAVE_IT, load_plan  # noqa: PLC0415
    from counterpoint.planner.idle import review_plan  # noqa: PLC0415
    from counterpoint.report.summary import summarize_simulation  # noqa: PLC0415
    from counterpoint.sim import Simulator  # noqa: PLC0415

    cli_cluster.check_cluster(step, cluster, machine, ranks)
    check_outputs(outputs=(timeline,), inputs=(step, machine, plan, calibration, cluster))
    _check_timeline(timeline)
    if step is None:
        assert cluster is not None, "check_cluster lets nothing else pass"
        cli_cluster.simulate_model(cluster, (plan, calibration, timeline), json)
        return
    chosen = load_plan(plan) if plan is not None else LEAVE_IT
    assumed: tuple[str, ...] = ()
    if cluster is None:
        job = load_job(step, machine).calibrated(calibration)
    else:
        job, assumed = cli_cluster.extended_job(step, cluster, ranks)
        job = job.calibrated(calibration)
    simulated = Simulator().run(job.step, job.machine, chosen)
    remarks = (*assumed, *review_plan(job.step, job.machine, chosen))
    if chosen.directives and Simulator().run(job.step, job.machine, LEAVE_IT).intervals == simulated.intervals:
        remarks = (*remarks, "With the plan, no operation starts or ends at another time than without it.")
    _write_timelines(timeline, {"simulated": simulated})
    _print_summary(job, summarize_simulation(job, simulated, chosen, remarks), [("simulated", simulated)], json)
    if timeline is not None and not json:
        print(f"Timeline saved to {timeline}.")


@app.command(short_help="List the machines that can be planned for, or show one.")
def machines(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="A machine's name, or the path of a machine file (.toml).  [default: list them all]"
        ),
    ] = None,
    probe: Annotated[bool, typer.Option("--probe", help="Ask and measure the GPUs of this machine instead.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Save the machine file (.toml), to change it or to keep what --probe found.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """List the machines that can be planned for, or show every figure of one, or of this one, with its source."""
    from counterpoint.machine import load_machine, machine_names, save_template  # noqa: PLC0415
    from counterpoint.report import text  # noqa: PLC0415
    from counterpoint.value import write_json  # noqa: PLC0415

    if probe:
        _probe_machine(name, output, json)
        return
    if output is not None:
        if name is None:
            raise CounterpointError(f"Which machine should '{shown(output)}' hold? Name one, or add --probe for this one.")
        check_outputs((output,), (name,))
        save_template(name, output)
    found = [load_machine(each) for each in ([name] if name is not None else machine_names())]
    if json:
        print(write_json(found[0] if name is not None else found))
    elif name is not None:
        text.print_machine(text.new_console(), found[0])
        if output is not None:
            print(f"Machine saved to {output}. Change its name and figures, then use it: --machine {output}")
    else:
        text.print_machines(text.new_console(), found)


def _probe_machine(name: str | None, output: Path | None, is_json: bool) -> None:
    from counterpoint.cuda.probing import probe  # noqa: PLC0415
    from counterpoint.machine import check_machine_path, save_machine  # noqa: PLC0415
    from counterpoint.report import text  # noqa: PLC0415
    from counterpoint.value import write_json  # noqa: PLC0415

    if name is not None:
        raise CounterpointError(f"--probe looks at the GPUs of this machine, not at '{name}'. Leave out one of the two.")
    check_outputs((output,))
    if output is not None:
        check_machine_path(output)
    probed = probe()
    if output is not None:
        save_machine(probed.machine, output)
    if is_json:
        print(write_json(probed))
        return
    text.print_probed(text.new_console(), probed)
    if output is not None:
        print(f"Machine saved to {output}. Use it: --machine {output}")


app.command(short_help="Say what communication is exposed in traces, why, and what can be recovered.")(cli_analyze.analyze)
app.command(context_settings=cli_check.CONTEXT, short_help="Name settings known to defeat overlap, before a run.")(
    cli_check.check
)
app.command(
    context_settings=cli_env.CONTEXT, short_help="Print how Slurm, Kubernetes, Ray, MPI or a container starts a job."
)(cli_env.env)
app.command(context_settings=cli_run.CONTEXT, short_help="Run a job that nobody edits with a plan, or tune it meanwhile.")(
    cli_run.run
)
app.command(short_help="Measure the simulator's constants on the GPUs at hand.")(cli_calibrate.calibrate)
app.command(short_help="Compare predictions with measurements of a fixed set of cases.")(cli_validate.validate)
app.command(short_help="Estimate many parallel sizes and controls on described clusters.")(cli_cluster.sweep)
app.add_typer(cli_plan.plan, name="plan", short_help="Print plan files in words, or compare two.")
app.add_typer(cli_schedule.schedule, name="schedule", short_help="Draw copy schedules, or choose them by measurement.")
app.add_typer(cli_gpu.bench, name="bench")


def _option(machine: str | None) -> tuple[str, ...]:
    """The option that named the machine, as it was typed."""
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
    """What a command found: JSON for programs; for people the step, the trials and the plan if any were made, and lanes."""
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
        text.print_plan(console, found.plan)
        print_to_apply(console, found.to_apply)
        if found.job_changes is not None:
            print_job_changes(console, found.job_changes)
    text.print_lanes(console, timelines)
