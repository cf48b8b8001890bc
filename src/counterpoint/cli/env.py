"""The command `env`: prints the lines with which a launcher starts a job under Counterpoint."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from counterpoint.cli.options import COMMAND_FOLLOWS, Command, argument, file_option
from counterpoint.errors import CounterpointError, shown

if TYPE_CHECKING:
    from counterpoint.supervised.launchers import Launcher


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
@file_option(
    "--folder",
    metavar="FOLDER",
    help="With --for container or kubernetes: fill a folder for an image without Counterpoint.  [default: none]",
)
@file_option("--proof", metavar="FOLDER", help="Print what took effect in jobs that used such a folder.  [default: none]")
def env(command: tuple[str, ...], launcher: str | None, plan: Path | None, folder: Path | None, proof: Path | None) -> None:
    """Print how Slurm, Kubernetes, Ray, MPI or a container starts a job.

    The commands, variables, mounts or patch that are printed start COMMAND under `counterpoint run`.
    """
    if proof is not None:
        _prove(proof)
        return
    chosen = _launcher(launcher)
    if folder is not None:
        _fill(folder, chosen, plan)
        return
    from counterpoint.plan import load_plan  # noqa: PLC0415  a fast --help
    from counterpoint.supervised.launchers import JOB, LaunchRequest, describe_launch  # noqa: PLC0415

    if plan is not None:
        load_plan(plan)
    request = LaunchRequest(command=command or JOB, plan=plan.absolute() if plan is not None else None)
    print(describe_launch(chosen, request))


def _launcher(name: str | None) -> "Launcher":
    from counterpoint.supervised.launchers import LAUNCHERS  # noqa: PLC0415

    known = ", ".join(LAUNCHERS)
    if name is None:
        raise CounterpointError(f"Which launcher starts the job? Give --for with one of {known}.")
    for each in LAUNCHERS:
        if each == name:
            return each
    raise CounterpointError(f"'{shown(name)}' is no launcher that is known here. Give --for with one of {known}.")


def _fill(folder: Path, launcher: "Launcher", plan: Path | None) -> None:
    from counterpoint.plan import load_plan  # noqa: PLC0415
    from counterpoint.supervised.filled_folder import fill_folder  # noqa: PLC0415
    from counterpoint.supervised.launchers import describe_folder  # noqa: PLC0415
    from counterpoint.supervised.run import RunRequest  # noqa: PLC0415

    if launcher not in ("container", "kubernetes"):
        raise CounterpointError(f"--folder is for images without Counterpoint, and {launcher} needs none. Leave it out.")
    if plan is None:
        raise CounterpointError("--folder needs a plan: nothing is tuned without `counterpoint run`. Add --plan FILE.")
    folder = folder.absolute()
    library = fill_folder(folder, RunRequest(command=(), plan=load_plan(plan)))
    print(describe_folder(folder, library))


def _prove(folder: Path) -> None:
    from counterpoint.report.run import print_outcome  # noqa: PLC0415
    from counterpoint.report.text import new_console  # noqa: PLC0415
    from counterpoint.supervised.filled_folder import prove_folder  # noqa: PLC0415

    print_outcome(new_console(), prove_folder(folder))
