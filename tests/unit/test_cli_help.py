"""The help of every command: its width, words, options and examples, and the hint at it after a mistake."""

import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from unittest.mock import patch

import click
import pytest

from counterpoint.cli.main import app, main, run_command
from helpers.command import counterpoint
from helpers.readability import of_markdown


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("tune", ["--machine", "-o", "--output", "--timeline", "--json", "--help"]),
        ("simulate", ["--machine", "--plan", "--timeline", "--json", "--help"]),
        ("machines", ["--probe", "-o", "--output", "--json", "--help"]),
    ],
)
def test_the_options_are_there_and_stay(command: str, options: list[str]) -> None:
    done = counterpoint(command, "--help")
    assert done.returncode == 0
    found = re.findall(r"(?<![\w-])--?[a-z]+(?:-[a-z]+)*", done.stdout.split("Options:")[1])
    assert set(options) <= set(found)


def test_without_a_command_the_help_names_the_commands() -> None:
    bare = counterpoint()
    assert (bare.returncode, bare.stderr) == (0, "")
    assert bare.stdout == counterpoint("--help").stdout
    for command in ("tune", "simulate", "machines"):
        assert re.search(rf"^  {command} ", bare.stdout, re.MULTILINE)


def all_commands(group: click.Group, *above: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield above, group
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from all_commands(command, *above, name)
        else:
            yield (*above, name), command


COMMANDS = dict(all_commands(app))


def help_of(command: tuple[str, ...], columns: int) -> str:
    """The help as the command prints it on a terminal of this width, without a process for each."""
    printed = io.StringIO()
    with patch.dict(os.environ, COLUMNS=str(columns)), redirect_stdout(printed):
        assert run_command([*command, "-h"]) == 0
    return printed.getvalue()


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_fits_the_terminal_and_cuts_no_sentence_and_no_option(command: tuple[str, ...], columns: int) -> None:
    text, _, examples = help_of(command, columns).partition("\nExamples:\n")  # examples are never folded
    assert max(map(len, text.splitlines())) <= columns
    assert max(map(len, examples.splitlines()), default=0) <= 80
    assert "..." not in text.partition("Options:")[2]
    described = COMMANDS[command].help or ""
    assert " ".join(described.split()) in " ".join(text.split())
    for word in re.findall(r"--[a-z-]+", described):
        assert word in text


@pytest.mark.parametrize(
    "command", [each for each, found in COMMANDS.items() if isinstance(found, click.Group)], ids=" ".join
)
def test_the_help_of_a_group_lists_each_of_its_commands_once(command: tuple[str, ...]) -> None:
    group = COMMANDS[command]
    assert isinstance(group, click.Group)
    listed = re.findall(r"^  ([a-z]+)  +[A-Z]", help_of(command, 80).partition("Options:")[2], re.MULTILINE)
    assert sorted(listed) == sorted(group.commands)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_option_with_a_value_tells_its_default_unless_there_is_nothing_without_it(command: tuple[str, ...]) -> None:
    shown = help_of(command, 80).partition("Examples:")[0]
    options = [" ".join(option.split()) for option in re.split(r"\n  (?=-)", shown.partition("Options:")[2])[1:]]
    valued = [option for option in options if re.match(r"(-\w, )?--[a-z-]+ [A-Z]+ ", option)]
    for option in valued:
        if not re.search(r"^-o, |[Ss]ave |--plan FILE A plan that|--(step|compare|rules|fail-if|baseline|groups) ", option):
            assert re.search(r"\[default: .+\]|\[required\]", option), option


def test_the_help_is_easy_to_read() -> None:
    found = of_markdown("\n\n".join(command.help or "" for command in COMMANDS.values()))
    assert found.reading_ease > 50, found
    assert found.words_per_sentence < 20, found


def examples_of(command: click.Command) -> list[str]:
    return [each.replace("\\\n", " ") for each in getattr(command, "examples", ())]


@pytest.mark.parametrize("command", [each for each, found in COMMANDS.items() if examples_of(found)], ids=" ".join)
def test_the_examples_of_the_help_can_be_parsed(command: tuple[str, ...]) -> None:
    for example in examples_of(COMMANDS[command]):
        words = shlex.split(re.split(r" >>? ~", example)[0])
        typed = words[words.index("counterpoint") + 1 :]
        assert tuple(typed[: len(command)]) == command
        parent = click.Context(app, **app.context_settings)  # a command keeps the help option of its first context
        COMMANDS[command].make_context("counterpoint", typed[len(command) :], parent=parent)


def misuses(command: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every command with an option that it lacks, and with each of its options without the value."""
    yield words, "--nope"
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.is_flag:
            yield words, parameter.opts[-1]
    for name, each in getattr(command, "commands", {}).items():
        yield from misuses(each, (*words, name))


@pytest.mark.parametrize(("words", "option"), list(misuses(app)))
def test_a_hint_at_help_names_the_command_that_was_used(
    words: tuple[str, ...], option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["counterpoint", *words, option])
    with pytest.raises(SystemExit) as ending:
        main()
    said = capsys.readouterr().err
    assert (ending.value.code, said.count("\n")) == (2, 1)
    assert said.endswith(f" Try '{' '.join(('counterpoint', *words))} --help'.\n")


def test_help_loads_neither_numpy_nor_the_simulator() -> None:
    script = (
        "import sys\nfrom counterpoint.cli import main\nsys.argv = ['counterpoint', '--help']\n"
        "try:\n    main.main()\nexcept SystemExit as ending:\n    assert not ending.code\n"
        "print(sorted({'numpy', 'torch', 'multiprocessing', 'counterpoint.sim', 'counterpoint.traces'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
