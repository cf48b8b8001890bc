"""The entry of the command line, and its list of commands. Bad input gives one line on standard error and exit code 2."""

import io
import os
import sys

import click

from counterpoint.cli.analyze import analyze
from counterpoint.cli.bench import bench
from counterpoint.cli.calibrate import calibrate
from counterpoint.cli.check import check
from counterpoint.cli.cluster import sweep
from counterpoint.cli.env import env
from counterpoint.cli.options import CONTEXT_SETTINGS, Group, argument
from counterpoint.cli.plan import plan
from counterpoint.cli.run import run
from counterpoint.cli.schedule import schedule
from counterpoint.cli.shipped import machines, workloads
from counterpoint.cli.tune import demo, simulate, tune
from counterpoint.cli.validate import validate
from counterpoint.errors import MAX_LINE, READER_LEFT, CounterpointError, say, shown

COMPLETION_VARIABLE = "_COUNTERPOINT_COMPLETE"  # set by a shell that requests completions
SECTIONS = {
    "Plan (needs no GPU)": ("demo", "tune", "simulate", "sweep", "schedule"),
    "Run": ("check", "run", "env"),
    "Measure": ("analyze", "calibrate", "validate", "bench"),
    "Files": ("plan", "machines", "workloads"),
    "Shell": ("completion",),
}


def main() -> None:
    """Entry point of the `counterpoint` command."""
    _open_closed_outputs()
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
    except BrokenPipeError:
        _drop_output()
        sys.exit(READER_LEFT)
    except OSError as problem:
        _drop_output()
        if not problem.filename and _is_folder_gone():
            _fail("The current folder no longer exists. Change to another one.")
        _fail(f"Cannot use {problem.filename or 'standard output'}: {problem.strerror}.")
    sys.exit(status)


def _is_folder_gone() -> bool:
    """Return whether the current folder was removed, so that relative paths lead nowhere."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _open_closed_outputs() -> None:
    """Discard what is written to an output that was closed when Python started, as if it were sent to /dev/null."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  open until the command ends


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


for command in (
    tune,
    simulate,
    demo,
    analyze,
    check,
    run,
    env,
    calibrate,
    validate,
    sweep,
    plan,
    schedule,
    bench,
    machines,
    workloads,
):
    app.add_command(command)


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
