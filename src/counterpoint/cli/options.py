"""Shared by the commands: the layout of their help, and the arguments and options that several of them take.

`Command` and `Group` add three features to click's: arguments are described like options, help ends in examples, and a group
lists its commands under headings.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from counterpoint.errors import shown
from counterpoint.mismatch import nearest

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

UNBROKEN = {"-": "\u2011", "default: ": "default:\u00a0"}  # characters at which lines do not break
EVERYTHING = 1000  # letters: summaries of commands are never cut
CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"]}
COMMAND_FOLLOWS = {"allow_interspersed_args": False}  # all words after the first word of a job's command belong to the job
FILE = click.Path(path_type=Path)
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class HelpFormatter(click.HelpFormatter):
    """Breaks lines between words only, so that an option stays whole."""

    def write_text(self, text: str) -> None:
        """Write a paragraph."""
        super().write_text(_unbroken(text))

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        """Write a list of names, each with its description."""
        super().write_dl([(name, _unbroken(text)) for name, text in rows], col_max, col_spacing)

    def getvalue(self) -> str:
        """Return the whole text, with ordinary hyphens and spaces."""
        text = super().getvalue()
        for usual, unbroken in UNBROKEN.items():
            text = text.replace(unbroken, usual)
        return text


def _unbroken(text: str) -> str:
    for usual, unbroken in UNBROKEN.items():
        text = text.replace(usual, unbroken)
    return text


class Context(click.Context):
    """The context of a call; `HelpFormatter` formats its help."""

    formatter_class = HelpFormatter


class Argument(click.Argument):
    """An argument that the help describes."""

    def __init__(self, *arguments: Any, help: str, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.description = help  # click has `help` from 8.5 on

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """Return the argument's name as usage shows it, and its description."""
        return self.human_readable_name.strip("[]"), self.description


class Command(click.Command):
    """A command. `examples` are command lines that the help ends with; `if_more` says what to do with more arguments."""

    context_class = Context

    def __init__(self, *arguments: Any, examples: Sequence[str] = (), if_more: str = "", **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.examples = examples
        self.if_more = if_more

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words. Raises `click.UsageError` that always knows its command; click's lacks it for a missing value."""
        ctx.allow_extra_args = True  # click's own error does not say what is wrong with them
        try:
            rest = super().parse_args(ctx, args)
        except click.UsageError as problem:
            problem.ctx = problem.ctx or ctx
            raise
        if rest and not ctx.resilient_parsing:
            ctx.fail(f"'{shown(rest[0])}' is one argument too many. {self.if_more}".rstrip())
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the arguments, then the options."""
        parameters = self.get_params(ctx)
        for heading, kind in (("Arguments", Argument), ("Options", click.Option)):
            records = [each.get_help_record(ctx) for each in parameters if isinstance(each, kind)]
            if described := [record for record in records if record is not None]:
                with formatter.section(heading):
                    formatter.write_dl(described)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples. Their lines are never wrapped, so that they can be copied."""
        if self.examples:
            with formatter.section("Examples"):
                indent = " " * formatter.current_indent
                formatter.write("".join(f"{indent}{line}\n" for example in self.examples for line in example.split("\n")))


class Group(click.Group):
    """A group of commands. `sections` lists their names under headings; by default they are listed under "Commands"."""

    context_class = Context
    command_class = Command

    def __init__(self, *arguments: Any, sections: Mapping[str, Sequence[str]] | None = None, **attributes: Any) -> None:
        attributes.setdefault("no_args_is_help", False)
        super().__init__(*arguments, **attributes)
        self.sections = sections

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands in the order in which they were added, which is the order of use."""
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands under their headings, each with its first sentence."""
        width = max(map(len, self.commands))  # aligns the descriptions of all sections
        for heading, names in (self.sections or {"Commands": tuple(self.commands)}).items():
            with formatter.section(heading):
                formatter.write_dl(
                    [(f"{name:<{width}}", self.commands[name].get_short_help_str(EVERYTHING)) for name in names]
                )

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first word names. Raises `click.UsageError` with the nearest name if there is none."""
        if args[0] not in self.commands and not ctx.resilient_parsing:
            close = nearest(args[0], self.commands)
            hint = f" Did you mean '{close}'?" if close else ""
            raise click.UsageError(f"No such command '{args[0]}'.{hint}", ctx)
        return super().resolve_command(ctx, args)


def argument(name: str, *, help: str, **attributes: Any) -> Decorator:
    """Declare an argument with its description."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:  # click 8.1 keeps the class for one use only
        return click.argument(name, cls=Argument, help=help, **attributes)(command)

    return decorate


def complete_shipped(folder: str) -> Callable[[click.Context, click.Parameter, str], "list[CompletionItem]"]:
    """Return a completion for shells: the names of what ships in `folder` of this package; if none matches, files."""

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> "list[CompletionItem]":
        from click.shell_completion import CompletionItem  # noqa: PLC0415  a fast --help

        from counterpoint.value import shipped_names  # noqa: PLC0415

        names = [name for name in shipped_names(folder) if name.startswith(incomplete)]
        return [CompletionItem(name) for name in names] or [CompletionItem(incomplete, type="file")]

    return complete


def file_option(*names: str, help: str, metavar: str = "FILE") -> Decorator:
    """Declare an option that takes the path of a file."""
    return click.option(*names, type=FILE, metavar=metavar, help=help)


def output_option(help: str) -> Decorator:
    """Declare `-o` and `--output`: the file in which a command saves its result."""
    return file_option("-o", "--output", help=help)


def machine_option(help: str, default: str | None = None) -> Decorator:
    """Declare `--machine`: a machine's name or file."""
    return click.option(
        "--machine",
        metavar="NAME",
        default=default,
        show_default=default is not None,
        shell_complete=complete_shipped("machines"),
        help=help,
    )


json_option = click.option("--json", "is_json", is_flag=True, help="Print JSON, for programs.")
