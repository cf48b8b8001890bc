"""The command `check`: reads the settings of this environment or of a file, and prints what was found."""

from pathlib import Path

import click

from counterpoint.cli.options import COMMAND_FOLLOWS, Command, argument, file_option, json_option, output_option
from counterpoint.errors import CounterpointError
from counterpoint.value import check_outputs, save_toml, write_json


@click.command(
    cls=Command,
    context_settings=COMMAND_FOLLOWS,
    examples=(
        "counterpoint check",
        "counterpoint check -- torchrun --nproc-per-node 8 train.py",
    ),
)
@argument(
    "command",
    metavar="[-- COMMAND...]",
    nargs=-1,
    help="The command that starts the job. It is read, not run.  [default: none]",
)
@file_option(
    "--context",
    help="Check for the machine that this file describes (.toml, saved by -o elsewhere).  [default: this machine]",
)
@output_option("Save what was seen of this machine (.toml), for --context on another.")
@json_option
def check(command: tuple[str, ...], context: Path | None, output: Path | None, is_json: bool) -> None:
    """Name settings that are known to defeat overlap, before a run.

    Each one is printed with the fact behind it and what to do. Nothing is run.

    Exit code: 0 if nothing defeats overlap, 1 if something does, 2 for bad input.
    """
    from counterpoint.doctor.environment import at_command, gather  # noqa: PLC0415  a fast --help
    from counterpoint.doctor.job_context import CONTEXT, load_context  # noqa: PLC0415
    from counterpoint.doctor.rules import find  # noqa: PLC0415
    from counterpoint.report.check import print_check, summarize_check  # noqa: PLC0415
    from counterpoint.report.text import new_console  # noqa: PLC0415

    check_outputs(((output, CONTEXT),), inputs=(context,))
    if output is not None and (command or context is not None):
        raise CounterpointError("-o saves this machine alone. Leave out the command and --context, or leave out -o.")
    words = list(command)
    if context is None:
        seen = gather(words)
    else:
        seen = load_context(context)
        seen = at_command(seen, words) if words else seen
    findings = find(seen)
    if output is not None:
        save_toml(output, seen, CONTEXT, CounterpointError)
    checked = summarize_check(seen, findings)
    if is_json:
        print(write_json(checked))
    else:
        print_check(new_console(), checked)
        if output is not None:
            print(f"Saved to {output}. Use it elsewhere: counterpoint check --context {output} -- COMMAND")
    if any(finding.severity == "defeats overlap" for finding in findings):
        raise click.exceptions.Exit(1)
