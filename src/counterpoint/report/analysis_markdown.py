"""Writes an `Analysis` as Markdown for a comment on a pull request: short, and safe with untrusted names."""

import re
from collections.abc import Iterable, Iterator
from html import escape

from counterpoint.analysis.values import Analysis
from counterpoint.display import cut
from counterpoint.errors import printable
from counterpoint.report.analysis_tables import tables_of
from counterpoint.report.analysis_words import applicable, key_figures, notes_of, problems_of, subject
from counterpoint.report.figure_tables import FigureTable, format_cell
from counterpoint.units import format_count, format_us
from counterpoint.value import OutputKind

SHOWN_TABLES = ("changes", "causes", "recoverable", "ranks", "logged-groups")  # in this order; the HTML page has the others
MOST_ROWS = 10
MOST_CELL = 160  # letters
MOST_SENTENCE = 1_000
PARTED_AT = "@\u200b"  # a mention cannot be escaped; it can only be broken up
_HEAD = re.compile(rb"(- \*\*fails\*\*: .*\n)*### .*\n\n(rank|\d+ ranks|NCCL)")  # verdict, then what was read
SUMMARY = OutputKind("summary", (".md",), lambda content: _HEAD.match(content) is not None)
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~$!&])")


def markdown_summary(analysis: Analysis) -> str:
    """Return the verdict, why, next, the tables that matter for a review, and what is unknown."""
    lines = [f"### {_plain(analysis.headline.verdict)}", "", f"{_plain(subject(analysis))}", ""]
    for title, sentences in (("Why", analysis.headline.why), ("Next", analysis.headline.next)):
        lines += _list(title, sentences)
    if figures := key_figures(analysis):
        lines += _grid(("figure", "mean per steady step"), ("left", "right"), figures)
    tables = {table.key: table for table in tables_of(analysis)}
    for key in SHOWN_TABLES:
        if key in tables:
            lines += _table(tables[key])
    lines += _applications(analysis)
    lines += _list("Notes", notes_of(analysis))
    lines += _list("Unknown", problems_of(analysis))
    return "\n".join(lines).rstrip() + "\n"


def _plain(text: str, most: int = MOST_SENTENCE) -> str:
    """Escape text so that Markdown shows it verbatim: no link, mention, formatting or HTML element."""
    return _SPECIAL.sub(r"\\\1", cut(printable(text), most)).replace("@", PARTED_AT)


def _list(title: str, sentences: Iterable[str]) -> list[str]:
    shown = [f"- {_plain(sentence)}" for sentence in sentences]
    return [f"**{title}**", "", *shown, ""] if shown else []


def _table(table: FigureTable) -> Iterator[str]:
    yield f"#### {table.title}"
    yield ""
    sides = ["left" if column.kind == "text" else "right" for column in table.columns]
    rows = (
        [format_cell(column.kind, cell) for column, cell in zip(table.columns, row, strict=True)]
        for row in table.rows[:MOST_ROWS]
    )
    yield from _grid([column.name for column in table.columns], sides, rows)
    if len(table.rows) > MOST_ROWS:
        yield f"and {format_count(len(table.rows) - MOST_ROWS, 'more row')}"
        yield ""


def _grid(headers: Iterable[str], sides: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    yield f"| {' | '.join(headers)} |"
    yield f"| {' | '.join('--:' if side == 'right' else '---' for side in sides)} |"
    for row in rows:
        yield f"| {' | '.join(_plain(cell, MOST_CELL) for cell in row)} |"
    yield ""


def _applications(analysis: Analysis) -> Iterator[str]:
    """Yield the lines to paste, in a collapsible block."""
    for each in applicable(analysis):
        block = "\n".join(printable(line) for line in each.apply)
        fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", block)), default=0))
        title = escape(printable(each.what)).replace("@", PARTED_AT)  # Markdown escapes have no effect inside HTML elements
        yield f"<details><summary>To apply: {title}, {format_us(each.recovers_us)} per step</summary>"
        yield from ("", fence, block, fence, "", "</details>", "")
