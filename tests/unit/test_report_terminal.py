"""Reports on terminals: tables in whole words, with every cell and no line too wide, and what is said meanwhile."""

import io
import os
import pty
import subprocess

import pytest
from rich.console import Console
from rich.text import Text

from counterpoint.report.narrow import LONGEST_WHOLE
from counterpoint.report.text import new_table, reading
from helpers.command import COUNTERPOINT, TRACES

ROWS = [
    ("sequential", "29.51 ms", "", "sum of stand-alone times"),
    ("ideal in pieces", "16.3 ms", "12.15 ms", "with collectives cut into pieces"),
]
HEADERS = ("step", "makespan", "exposed", "communication")


def printed(width: int, rows: list[tuple[str, ...]] = ROWS) -> str:
    table = new_table(*HEADERS)
    for row in rows:
        table.add_row(*row)
    console = Console(file=io.StringIO(), width=width, markup=False, emoji=False)
    console.print(table)
    console.print(table)  # the first print must not change the second
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    half = len(text) // 2
    assert text[:half] == text[half:]
    return text[:half]


@pytest.mark.parametrize("width", range(30, 90, 3))
def test_a_figure_stays_on_one_line_with_its_unit(width: int) -> None:
    rows = [(name, "0.49 to 1.02 s", "255.3 ms", remark) for name, _, _, remark in ROWS]
    assert "0.49 to 1.02 s" in printed(width, rows)
    assert "255.3 ms" in printed(width, rows)


@pytest.mark.parametrize("width", [40, 46, 50, 60, 80, 200])
def test_no_word_is_broken_and_none_is_lost(width: int) -> None:
    text = printed(width)
    assert max(map(len, text.splitlines())) <= width
    assert {word for row in (*ROWS, HEADERS[1:]) for cell in row for word in cell.split()} <= set(text.split())


def test_a_wide_terminal_shows_one_line_for_each_row_and_a_narrow_one_a_block() -> None:
    assert len(printed(80).splitlines()) == 2 + len(ROWS)
    block = [line.rstrip() for line in printed(40).splitlines()[:3]]
    assert block == ["sequential", "  makespan       29.51 ms", "  communication  sum of stand-alone"]


def test_a_kernel_name_is_broken_rather_than_the_whole_table() -> None:
    name = "Q" * (LONGEST_WHOLE + 40)
    text = printed(70, [(name, "1 us", "2 us", "x")])
    assert max(map(len, text.splitlines())) <= 70
    assert text.count("Q") == len(name)
    assert "makespan" in text.splitlines()[0]


def test_cells_may_be_styled_and_columns_unbroken() -> None:
    table = new_table("name", "what it is")
    table.columns[0].no_wrap = True
    table.add_row(Text("a name of several words", style="bold"), "found")
    console = Console(file=io.StringIO(), width=40)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    assert "a name of several words" in console.file.getvalue()


def test_the_line_for_a_file_that_is_read_says_how_far() -> None:
    said: list[str] = []
    tell = reading(said.append, "folder/trace.json.gz")
    tell(512, 1024)
    tell(512, 0)  # of a pipe nobody knows the size
    assert said == ["reading trace.json.gz: 50.0 %", "reading trace.json.gz"]


@pytest.mark.parametrize("command", [["simulate"], ["analyze", "--no-recover"]])
def test_progress_is_shown_on_a_terminal_and_cleared(command: list[str]) -> None:
    leader, follower = pty.openpty()
    trace = TRACES / "moe.rank0.json.gz"
    environment = os.environ | {"TERM": "xterm"}
    done = subprocess.run(
        [COUNTERPOINT, *command, trace], stdout=subprocess.PIPE, stderr=follower, env=environment, check=False
    )
    os.close(follower)
    said = os.read(leader, 100_000).decode()
    os.close(leader)
    assert done.returncode == 0
    assert "reading moe.rank0.json.gz: 100.0 %" in said
    assert said.endswith("\r\x1b[K")
    assert b"reading" not in done.stdout
