"""The reference of commands: what `counterpoint COMMAND --help` prints of each, asked of the command line itself."""

import contextlib
import io
import re
import sys
from collections.abc import Iterator
from unittest.mock import patch

from counterpoint.cli.main import main

MARK = "<!-- the commands -->"
COLUMNS = "100"
# a title at the margin, then what is indented below it
SECTION = re.compile(r"^(\S[^\n]*):\n((?:(?:  [^\n]*)?\n?)+)", re.MULTILINE)
NAME = re.compile(r"^  ([a-z][a-z-]*)(?:  |$)", re.MULTILINE)
NO_COMMANDS = ("Arguments", "Options", "Examples")


def reference() -> str:
    """One section of Markdown for each command and subcommand."""
    return "\n\n".join(_section(path, printed) for path, printed in commands())


def commands(path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every command, as the words behind `counterpoint`, with what `--help` prints of it; `counterpoint` itself is first."""
    printed = help_of(path)
    yield path, printed
    for title, lines in SECTION.findall(printed):
        if title not in NO_COMMANDS:
            for name in NAME.findall(lines):
                yield from commands((*path, name))


def _section(path: tuple[str, ...], printed: str) -> str:
    words = " ".join(("counterpoint", *path))
    return f"{'##' if len(path) < 2 else '###'} {words}\n\n```text\n{printed}\n```"


def help_of(path: tuple[str, ...]) -> str:
    """What the command prints for `--help`."""
    printed = io.StringIO()
    arguments = ["counterpoint", *path, "--help"]
    with (
        patch.object(sys, "argv", arguments),
        patch.dict("os.environ", {"COLUMNS": COLUMNS, "NO_COLOR": "1"}),
        contextlib.redirect_stdout(printed),
        contextlib.suppress(SystemExit),
    ):
        main()
    return printed.getvalue().strip()
