"""The command line: parse, call the library, print. Bad input is one line on standard error and exit code 2."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.exceptions import Abort, Exit, TyperException

from counterpoint.errors import CounterpointError

if TYPE_CHECKING:
    from rich.console import Console

    from counterpoint.job import Job
    from counterpoint.planner import Trial, Tuning
    from counterpoint.timeline import Timeline

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Plan how the communication of a multi-GPU PyTorch job hides behind its computation.",
)

StepArgument = Annotated[
    str,
    typer.Argument(metavar="STEP", help="A profiler trace (.json, .json.gz), a workload file (.toml) or a workload's name."),
]
MachineOption = Annotated[
    str | None, typer.Option("--machine", metavar="NAME", help="A machine's name, or the path of a machine file (.toml).")
]
TimelineOption = Annotated[
    Path | None,
    typer.Option("--timeline", metavar="FILE", help="Write the timelines as a Chrome trace (.json, .json.gz) for Perfetto."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]


def main() -> None:
    """Entry point of the `counterpoint` command."""
    try:
        app(standalone_mode=False)
    except CounterpointError as problem:
        _fail(str(problem))
    except TyperException as problem:
        _fail(f"{problem.format_message()} Try 'counterpoint --help'.")
    except Exit as ending:
        sys.exit(ending.exit_code)
    except (Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:
        # whoever read our output, `head` say, has seen enough
        sys.stderr.close()


def _fail(message: str) -> None:
    print(f"counterpoint: {message}", file=sys.stderr)
    sys.exit(2)


@app.command()
def tune(
    step: StepArgument,
    machine: MachineOption = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Save the plan as TOML.")] = None,
    timeline: TimelineOption = None,
    json: JsonOption = False,
) -> None:
    """Find the plan that hides the most communication of STEP, or say that none pays. Needs no GPU: it simulates."""
    from counterpoint import planner  # noqa: PLC0415  a fast --help
    from counterpoint.job import load_job  # noqa: PLC0415
    from counterpoint.plan import save_plan  # noqa: PLC0415
    from counterpoint.sim import Simulator  # noqa: PLC0415

    for path in (output, timeline):
        _check_writable(path)
    job = load_job(step, machine)
    with _Progress(is_shown=not json) as on_trial:
        tuning = planner.tune(job.step, job.machine, Simulator(), on_trial)
    if output is not None:
        save_plan(tuning.plan, output)
    _write_timelines(timeline, {"before": tuning.baseline, "after": tuning.planned})
    _print_tuning(job, tuning, json)
    if output is not None and not json:
        print(f"Plan saved to {output}.")


@app.command()
def simulate(
    step: StepArgument,
    machine: MachineOption = None,
    plan: Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="A plan that `tune` saved.")] = None,
    timeline: TimelineOption = None,
    json: JsonOption = False,
) -> None:
    """Simulate STEP, with a plan or as it is, and print its metrics."""
    from counterpoint.job import load_job  # noqa: PLC0415
    from counterpoint.plan import LEAVE_IT, load_plan  # noqa: PLC0415
    from counterpoint.sim import Simulator  # noqa: PLC0415

    _check_writable(timeline)
    chosen = load_plan(plan) if plan is not None else LEAVE_IT
    job = load_job(step, machine)
    simulated = Simulator().run(job.step, job.machine, chosen)
    _write_timelines(timeline, {"simulated": simulated})
    _print_simulation(job, simulated, json)


@app.command()
def machines(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A machine's name, or the path of a machine file.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """List the machines that can be planned for, or show every figure of one with its source."""
    from counterpoint.machine import load_machine, machine_names  # noqa: PLC0415
    from counterpoint.report import text  # noqa: PLC0415
    from counterpoint.value import write_json  # noqa: PLC0415

    found = [load_machine(each) for each in ([name] if name is not None else machine_names())]
    if json:
        print(write_json(found[0] if name is not None else found))
    elif name is not None:
        text.print_machine(_console(), found[0])
    else:
        text.print_machines(_console(), found)


class _Progress:
    """A line on standard error that counts trials while a person waits; silent where nobody looks."""

    def __init__(self, is_shown: bool) -> None:
        self._is_shown = is_shown and sys.stderr.isatty()
        self._count = 0

    def __enter__(self) -> Callable[["Trial"], None] | None:
        return self._show if self._is_shown else None

    def __exit__(self, *_: object) -> None:
        if self._is_shown:
            sys.stderr.write("\r\x1b[K")

    def _show(self, trial: "Trial") -> None:
        self._count += 1
        sys.stderr.write(f"\r\x1b[Ksimulated {self._count} candidates; now: {trial.label[:60]}")
        sys.stderr.flush()


def _check_writable(path: Path | None) -> None:
    """Refuse an output that cannot be written before any work is done."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        what = "is a folder" if path.is_dir() else f"needs the folder '{path.absolute().parent}', which does not exist"
        raise CounterpointError(f"Cannot write '{path}': it {what}. Name a file in an existing folder.")


def _write_timelines(path: Path | None, timelines: dict[str, "Timeline"]) -> None:
    if path is not None:
        from counterpoint.traces.chrome import write_chrome_trace  # noqa: PLC0415

        write_chrome_trace(path, timelines)


def _console() -> "Console":
    from rich.console import Console  # noqa: PLC0415

    return Console(soft_wrap=False)


def _print_tuning(job: "Job", tuning: "Tuning", is_json: bool) -> None:
    from counterpoint.report import summary, text  # noqa: PLC0415
    from counterpoint.value import write_json  # noqa: PLC0415

    found = summary.summarize_tuning(job, tuning)
    if is_json:
        print(write_json(found))
        return
    console = _console()
    text.print_step(console, job.step, job.machine, found.notes)
    text.print_metrics(console, found.step)
    text.print_trials(console, tuning.trials)
    text.print_plan(console, tuning.plan)
    timelines = [("before", tuning.baseline), ("after", tuning.planned)]
    text.print_lanes(console, timelines if tuning.plan.directives else [("as it is", tuning.baseline)])


def _print_simulation(job: "Job", simulated: "Timeline", is_json: bool) -> None:
    from counterpoint.report import summary, text  # noqa: PLC0415
    from counterpoint.value import write_json  # noqa: PLC0415

    found = summary.summarize_simulation(job, simulated)
    if is_json:
        print(write_json(found))
        return
    console = _console()
    text.print_step(console, job.step, job.machine, found.notes)
    text.print_metrics(console, found.step)
    text.print_lanes(console, [("simulated", simulated)])
