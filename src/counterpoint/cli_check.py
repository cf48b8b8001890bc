"""The command line's part for `check`: what to look at, from here or from a file, and how to print what was found."""

from pathlib import Path
from typing import Annotated

import typer

from counterpoint.errors import CounterpointError
from counterpoint.value import check_outputs, write_json, write_toml, write_whole

CONTEXT = {"allow_interspersed_args": False}  # what follows the first word of the command is the command's


def check(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="COMMAND", help="After --, the command that starts the job. It is read, not run."),
    ] = None,
    context_file: Annotated[
        Path | None,
        typer.Option(
            "--context",
            metavar="FILE",
            help="Check for the machine that this file (.toml, saved by -o) describes.  [default: this machine]",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Save what was seen of this machine (.toml), for --context elsewhere.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")] = False,
) -> None:
    """Name settings known to defeat overlap on this machine, each with the fact behind it and what to do. Runs nothing.

    Exit code: 0 if nothing defeats overlap, 1 if something does, 2 for bad input.
    """
    from counterpoint.doctor.environment import at_command, gather  # noqa: PLC0415  a fast --help
    from counterpoint.doctor.job_context import load_context  # noqa: PLC0415
    from counterpoint.doctor.rules import find  # noqa: PLC0415
    from counterpoint.report.check import print_check, summarize_check  # noqa: PLC0415
    from counterpoint.report.text import new_console  # noqa: PLC0415

    check_outputs((output,), inputs=(context_file,))
    if output is not None and (command or context_file is not None):
        raise CounterpointError("-o saves this machine alone. Leave out the command and --context, or leave out -o.")
    words = command or []
    if context_file is None:
        context = gather(words)
    else:
        context = load_context(context_file)
        context = at_command(context, words) if words else context
    findings = find(context)
    if output is not None:
        write_whole(output, write_toml(context).encode())
    checked = summarize_check(context, findings)
    if json:
        print(write_json(checked))
    else:
        print_check(new_console(), checked)
        if output is not None:
            print(f"Saved to {output}. Use it elsewhere: counterpoint check --context {output} -- COMMAND")
    if any(finding.severity == "defeats overlap" for finding in findings):
        raise typer.Exit(1)
