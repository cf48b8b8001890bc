"""The commands that plan a step or simulate it: `tune`, `simulate` and `demo`.

`tune module:function` measures on GPUs and imports torch only when it runs. Under torchrun every rank runs it, and only rank
0 prints. A rank that fails prints its one line and exits at once, so that no other rank waits for it forever.
"""

import itertools
import sys
from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import click

from counterpoint.cli.cluster import check_cluster, cluster_option, extended_job, ranks_option, simulate_model
from counterpoint.cli.options import (
    Command,
    argument,
    complete_shipped,
    file_option,
    json_option,
    machine_option,
    output_option,
)
from counterpoint.errors import CounterpointError, StepError
from counterpoint.mismatch import nearest
from counterpoint.units import format_count
from counterpoint.value import PACKAGE, check_outputs, write_json

if TYPE_CHECKING:
    from counterpoint.job import Job
    from counterpoint.machine import Machine
    from counterpoint.planner import Trial
    from counterpoint.planner.measured import MeasuredTuning
    from counterpoint.report.summary import Summary
    from counterpoint.report.to_apply import PlanOrigin
    from counterpoint.step import Step
    from counterpoint.timeline import Timeline

STEP = "A profiler trace (.json, .json.gz, .sqlite), a workload file (.toml) or the name of a workload"
SEVERAL = "Give one; `counterpoint tune` and `counterpoint analyze` take the traces of several ranks."

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


@click.command(
    cls=Command,
    examples=(
        "counterpoint tune traces/*.json.gz -o plan.toml",
        "counterpoint tune cb_ar_opt2 --machine h100",
        "torchrun --nproc-per-node 2 -m counterpoint tune train:make_step",
    ),
)
@argument(
    "steps",
    metavar="STEP...",
    nargs=-1,
    required=True,
    type=click.Path(),
    shell_complete=complete_shipped("workloads"),
    help=f"{STEP}; or module:function. Several traces are of the ranks of one job.",
)
@machine_of_step_option
@output_option("Save the plan (.toml).")
@calibration_option
@timeline_option
@json_option
def tune(
    steps: tuple[str, ...],
    *,
    machine: str | None,
    output: Path | None,
    calibration: Path | None,
    timeline: Path | None,
    is_json: bool,
) -> None:
    """Find the plan that hides the most communication of a step, or say that none pays.

    Traces and workloads are simulated, and no GPU is used. Given the traces of several ranks, tune simulates the rank that
    waits least for the others. module:function is called once and must return a step function. This function is captured
    and measured on the GPUs of this machine; torchrun starts it on several.
    """
    from counterpoint import planner  # noqa: PLC0415  a fast --help
    from counterpoint.cli.ranks_of_job import job_of_steps  # noqa: PLC0415
    from counterpoint.job import names_function  # noqa: PLC0415
    from counterpoint.plan import PLAN, save_plan  # noqa: PLC0415
    from counterpoint.report.summary import summarize_tuning  # noqa: PLC0415
    from counterpoint.report.text import ProgressLine  # noqa: PLC0415
    from counterpoint.report.timeline_picture import TIMELINE  # noqa: PLC0415
    from counterpoint.report.to_apply import PlanOrigin  # noqa: PLC0415
    from counterpoint.sim import Simulator  # noqa: PLC0415
    from counterpoint.workers import num_cores  # noqa: PLC0415

    check_outputs(((output, PLAN), (timeline, TIMELINE)), inputs=(*steps, machine, calibration))
    step, *others = steps
    if not others and names_function(step):
        for option, given in (("--timeline", timeline), ("--calibration", calibration)):
            if given is not None:
                raise CounterpointError(f"{option} is for what is simulated, and '{step}' is measured. Leave it out.")
        from counterpoint.cuda.ranks import run_and_leave  # noqa: PLC0415

        run_and_leave(lambda: _tune_function(step, machine, output, is_json))
    count = itertools.count(1)
    with ProgressLine(is_shown=not is_json) as show:
        job, step = job_of_steps(steps, machine, show)

        def on_trial(trial: "Trial") -> None:
            show(f"simulated {format_count(next(count), 'candidate')}; now: {trial.label[:60]}")

        job = job.to_simulate(calibration)
        traced = None if job.traced is None else job.traced.timeline
        tuning = planner.tune(job.step, job.machine, Simulator(), on_trial, traced=traced, num_workers=num_cores())
    if output is not None:
        save_plan(tuning.plan, output)
    timelines = {"before": tuning.baseline, "after": tuning.planned}
    _write_timelines(timeline, timelines)
    shown = [*timelines.items()] if tuning.plan.directives else [("as it is", tuning.baseline)]
    origin = PlanOrigin(
        file=None if output is None else str(output),
        finding=("counterpoint", "tune", *steps, *_option("--machine", machine), *_option("--calibration", calibration)),
        step=step,
        is_described=job.traced is None,
    )
    _print_summary(job, summarize_tuning(job, tuning, origin), shown, is_json)
    for what, saved in (("Plan", output), ("Timelines", timeline)):
        if saved is not None and not is_json:
            print(f"{what} saved to {saved}.")


@click.command(
    cls=Command,
    examples=(
        "counterpoint simulate trace.json.gz --plan plan.toml",
        "counterpoint simulate --cluster cluster.toml",
    ),
    if_more=SEVERAL,
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
@cluster_option
@ranks_option
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
    from counterpoint.planner.idle_controls import review_plan  # noqa: PLC0415
    from counterpoint.report.summary import summarize_simulation  # noqa: PLC0415
    from counterpoint.report.text import ProgressLine, reading  # noqa: PLC0415
    from counterpoint.report.timeline_picture import TIMELINE  # noqa: PLC0415
    from counterpoint.sim import Simulator  # noqa: PLC0415

    check_cluster(step, cluster, machine, ranks)
    check_outputs(((timeline, TIMELINE),), inputs=(step, machine, plan, calibration, cluster))
    if step is None:
        assert cluster is not None, "check_cluster lets nothing else pass"
        simulate_model(cluster, (plan, calibration, timeline), is_json)
        return
    chosen = load_plan(plan) if plan is not None else LEAVE_IT
    assumed: tuple[str, ...] = ()
    if cluster is None:
        with ProgressLine(is_shown=not is_json) as show:
            job = load_job(step, machine, reading(show, step)).to_simulate(calibration)
    else:
        job, assumed = extended_job(step, cluster, ranks, calibration)
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


@click.command(cls=Command, examples=("counterpoint demo",))
@click.pass_context
def demo(context: click.Context) -> None:
    """Tune a trace that ships with Counterpoint, in seconds and without a GPU.

    The trace is of an FSDP2 job on four H200s. The report is that of `tune`. Below it stand the commands to try next.
    """
    trace = PACKAGE / "demo" / "fsdp2.rank0.json.gz"
    print(f"$ counterpoint tune {trace.name}\n", flush=True)
    context.invoke(tune, steps=(str(trace),))
    print(NEXT)


def _option(name: str, value: str | Path | None) -> tuple[str, ...]:
    """Return an option as it was typed."""
    return () if value is None else (name, str(value))


def _write_timelines(path: Path | None, timelines: dict[str, "Timeline"]) -> None:
    if path is not None:
        from counterpoint.report.timeline_picture import write_timelines  # noqa: PLC0415

        write_timelines(path, timelines)


def _print_summary(job: "Job", found: "Summary", timelines: "Sequence[tuple[str, Timeline]]", is_json: bool) -> None:
    """Print a command's result: JSON for programs; for people the step, any trials and plan, and the lanes."""
    from counterpoint.report import text  # noqa: PLC0415
    from counterpoint.report.plan import print_job_changes, print_to_apply  # noqa: PLC0415
    from counterpoint.report.refusals import print_left_out  # noqa: PLC0415

    if is_json:
        print(write_json(found))
        return
    console = text.new_console()
    text.print_step(console, job.step, job.machine, found.notes)
    text.print_metrics(console, found.step)
    if found.trials and found.plan is not None:
        text.print_plan(console, found.plan, found.bounds)
        text.print_trials(console, found.trials, None if found.bounds.is_compared else found.bounds)
        print_to_apply(console, found.to_apply)
        if found.job_changes is not None:
            print_job_changes(console, found.job_changes)
        print_left_out(console, found.plan)
    text.print_lanes(console, timelines)


def _tune_function(step: str, machine_name: str | None, output: Path | None, is_json: bool) -> None:
    """Tune a step function on the GPUs of this machine, and print the result from rank 0."""
    from counterpoint.cuda.ranks import join_ranks  # noqa: PLC0415
    from counterpoint.machine import load_machine  # noqa: PLC0415
    from counterpoint.plan import save_plan  # noqa: PLC0415

    rank = join_ranks()
    step_fn = _load_function(step)()
    if not callable(step_fn):
        raise StepError(
            f"{step}() must return the step as a function without arguments; it returned {type(step_fn).__name__}."
        )
    from counterpoint.cuda.capture import capture  # noqa: PLC0415
    from counterpoint.planner.on_gpu import machine_of, tune_captured  # noqa: PLC0415
    from counterpoint.report.to_apply import PlanOrigin  # noqa: PLC0415

    captured = capture(step_fn, step)
    machine = load_machine(machine_name) if machine_name else machine_of(captured)
    tuning = tune_captured(captured, machine)
    if rank != 0:
        return
    if output is not None:
        save_plan(tuning.plan, output)
    finding = ("counterpoint", "tune", step, *_option("--machine", machine_name))
    origin = PlanOrigin(file=None if output is None else str(output), finding=finding, is_captured=True)
    _print_measured(captured.read.step, machine, tuning, origin, is_json)
    if output is not None and not is_json:
        print(f"Plan saved to {output}.")


def _print_measured(step: "Step", machine: "Machine", tuning: "MeasuredTuning", origin: "PlanOrigin", is_json: bool) -> None:
    """Print what was measured of a captured step, as `_print_summary` does what was simulated."""
    from counterpoint.planner.job_changes import find_job_changes  # noqa: PLC0415
    from counterpoint.report import gpu, text  # noqa: PLC0415
    from counterpoint.report.plan import print_job_changes, print_to_apply  # noqa: PLC0415
    from counterpoint.report.refusals import print_left_out  # noqa: PLC0415
    from counterpoint.report.to_apply import ways_to_apply  # noqa: PLC0415
    from counterpoint.sim import Simulator  # noqa: PLC0415

    to_apply = ways_to_apply(tuning.plan, origin)
    job_changes = None if to_apply else find_job_changes(step, machine, Simulator())
    if is_json:
        print(
            write_json(
                {
                    "plan": tuning.plan,
                    "measurements": tuning.comparison.measurements,
                    "engagements": tuning.engagements,
                    "to_apply": to_apply,
                    "job_changes": job_changes,
                }
            )
        )
        return
    console = text.new_console()
    text.print_step(console, step, machine)
    text.print_plan(console, tuning.plan)
    gpu.print_measurements(console, tuning.comparison.measurements)
    gpu.print_engagements(console, tuning.engagements)
    print_to_apply(console, to_apply)
    if job_changes is not None:
        print_job_changes(console, job_changes)
    print_left_out(console, tuning.plan)


def _did_you_mean(name: str, names: Collection[str]) -> str:
    close = nearest(name, names)
    return f"Did you mean '{close}'? " if close else ""


def _load_function(step: str) -> Callable[[], object]:
    module_name, _, function_name = step.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as problem:
        here = {path.stem for path in Path.cwd().glob("*.py")} if problem.name == module_name else set()
        raise StepError(
            f"'{step}' needs the module '{problem.name}', which cannot be found. {_did_you_mean(module_name, here)}Run the "
            "command where it can be imported."
        ) from problem
    found = getattr(module, function_name, None)
    if not callable(found):
        functions = {name for name, value in vars(module).items() if callable(value)}
        raise StepError(
            f"Module '{module_name}' has no function '{function_name}'. {_did_you_mean(function_name, functions)}Name one "
            "that returns the step function."
        )
    function: Callable[[], object] = found
    return function
