"""The command `env`: prints the lines with which a launcher starts a job under Counterpoint."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from counterpoint.cli.options import COMMAND_FOLLOWS, Command, argument, file_option
from counterpoint.errors import CounterpointError, shown

if TYPE_CHECKING:
    from counterpoint.supervised.launchers import Launcher
    from counterpoint.supervised.run import RunRequest


@click.command(
    cls=Command,
    context_settings=COMMAND_FOLLOWS,
    examples=(
        "counterpoint env --for slurm --plan plan.toml -- python train.py",
        "counterpoint env --for container --folder filled --plan plan.toml",
    ),
)
@argument("command", metavar="[-- COMMAND...]", nargs=-1, help="The command of the job.  [default: a placeholder]")
@click.option("--for", "launcher", metavar="LAUNCHER", help="slurm, kubernetes, ray, mpi or container.  [required]")
@file_option("--plan", help="The plan to apply (.toml).  [default: tune while the job runs]")
@click.option("--step", metavar="STEP", help="The trace that the plan was made from, as `run` takes it.  [default: none]")
@file_option(
    "--folder",
    metavar="FOLDER",
    help="With --for container or kubernetes: fill a folder for an image without Counterpoint.  [default: none]",
)
@file_option("--proof", metavar="FOLDER", help="Print what took effect in jobs that used such a folder.  [default: none]")
def env(
    command: tuple[str, ...],
    *,
    launcher: str | None,
    plan: Path | None,
    step: str | None,
    folder: Path | None,
    proof: Path | None,
) -> None:
    """Print what to write for Slurm, Kubernetes, Ray, MPI or a container.

    The printed commands, variables, mounts or patch start COMMAND under `counterpoint run`.
    """
    if proof is not None:
        others = {"--for": launcher, "--plan": plan, "--step": step, "--folder": folder, "COMMAND": command or None}
        given = next((name for name, value in others.items() if value is not None), None)
        if given is not None:
            raise CounterpointError(f"--proof prints what took effect, and {given} has no effect on that. Leave it out.")
        _prove(proof)
        return
    chosen = _launcher(launcher)
    if step is not None and plan is None:
        raise CounterpointError("--step goes with a plan. Add --plan FILE, or leave out --step.")
    if folder is not None:
        _fill(folder, chosen, plan, step)
        return
    from counterpoint.supervised.launchers import JOB, LaunchRequest, describe_launch  # noqa: PLC0415  a fast --help
    from counterpoint.supervised.run import check_plan  # noqa: PLC0415

    if plan is not None and (asked := _request(plan, step)).is_filtered:
        check_plan(asked)  # what `run` would refuse on every node is refused here
    is_file = step is not None and os.path.exists(step)
    named = os.path.abspath(step) if step is not None and is_file else step  # otherwise a workload's name
    print(describe_launch(chosen, LaunchRequest(command=command or JOB, plan=plan and plan.absolute(), step=named)))


def _request(plan: Path, step: str | None) -> "RunRequest":
    from counterpoint.job import load_job  # noqa: PLC0415
    from counterpoint.plan import load_plan  # noqa: PLC0415
    from counterpoint.supervised.run import RunRequest  # noqa: PLC0415

    return RunRequest(command=(), plan=load_plan(plan), step=load_job(step).step if step is not None else None)


def _launcher(name: str | None) -> "Launcher":
    from counterpoint.supervised.launchers import LAUNCHERS  # noqa: PLC0415

    known = ", ".join(LAUNCHERS)
    if name is None:
        raise CounterpointError(f"Which launcher starts the job? Give --for with one of {known}.")
    for each in LAUNCHERS:
        if each == name:
            return each
    raise CounterpointError(f"'{shown(name)}' is no launcher that is known here. Give --for with one of {known}.")


def _fill(folder: Path, launcher: "Launcher", plan: Path | None, step: str | None) -> None:
    from counterpoint.supervised.applicable import plan_variables  # noqa: PLC0415
    from counterpoint.supervised.filled_folder import fill_folder  # noqa: PLC0415
    from counterpoint.supervised.launchers import describe_folder  # noqa: PLC0415

    if launcher not in ("container", "kubernetes"):
        raise CounterpointError(f"--folder is for images without Counterpoint, and {launcher} needs none. Leave it out.")
    if plan is None:
        raise CounterpointError("--folder needs a plan: nothing is tuned without `counterpoint run`. Add --plan FILE.")
    folder = folder.absolute()
    request = _request(plan, step)
    library = fill_folder(folder, request)
    print(describe_folder(folder, library, plan_variables(request.plan)))


def _prove(folder: Path) -> None:
    from counterpoint.report.run import print_outcome  # noqa: PLC0415
    from counterpoint.report.text import new_console  # noqa: PLC0415
    from counterpoint.supervised.filled_folder import prove_folder  # noqa: PLC0415

    print_outcome(new_console(), prove_folder(folder))
