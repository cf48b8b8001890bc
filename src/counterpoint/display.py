"""How notebooks show values: a short line of text, and a plain HTML table or list that takes the notebook's own colors.

Each has at most `MOST_LETTERS` letters, whatever the value holds.
"""

from collections.abc import Iterable, Sequence
from html import escape

MOST_LETTERS = 1000
MOST_CELL = 90  # letters of a cell and of a field; the rest is cut
MOST_LINE = 160  # letters of a caption and of a line in a list
MOST_FIELDS = 600  # letters of all fields in one line


def shortened(text: str, most: int = MOST_CELL) -> str:
    """Return the text on one line, cut at `most` letters."""
    return cut(" ".join(text.split()), most)


def cut(text: str, most: int) -> str:
    """Return the text, cut at `most` letters."""
    return text if len(text) <= most else text[: most - 3] + "..."


def capped(text: str) -> str:
    """Return a text of one or more lines, cut where it exceeds the limit."""
    return cut(text, MOST_LETTERS)


def field_in_short(value: object) -> str:
    """Describe a field's value in a few words: a container by its number of items, a long value by its type."""
    if isinstance(value, (tuple, list, dict, frozenset, set)) and len(value) > 1:
        return f"({len(value):,} items)"
    text = repr(value)
    return text if len(text) <= MOST_CELL else f"{type(value).__name__}(...)"


def fields_in_short(fields: Iterable[tuple[str, object]]) -> str:
    """Describe fields by name, as in "name='h200', sources=(41 items)"."""
    return shortened(", ".join(f"{name}={field_in_short(value)}" for name, value in fields), MOST_FIELDS)


def html_table(caption: str, headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table of figures below a bold caption; rows that do not fit the limit are counted instead."""
    head = f"<tr>{''.join(f'<th>{escape(header)}</th>' for header in headers)}</tr>" if headers else ""
    drawn = [f"<tr>{''.join(f'<td>{escape(shortened(cell))}</td>' for cell in row)}</tr>" for row in rows]
    return _fitting(f"{_bold(caption)}<table>{head}", drawn, "</table>")


def html_list(caption: str, lines: Iterable[str]) -> str:
    """Return an HTML list of sentences below a bold caption; lines that do not fit the limit are counted instead."""
    drawn = [f"<li>{escape(shortened(line, MOST_LINE))}</li>" for line in lines]
    return _fitting(f"{_bold(caption)}<ul>", drawn, "</ul>")


def _bold(caption: str) -> str:
    return f"<b>{escape(shortened(caption, MOST_LINE))}</b>"


def _fitting(top: str, parts: Sequence[str], end: str) -> str:
    for shown in range(len(parts), -1, -1):
        html = top + "".join(parts[:shown]) + end + (f"and {len(parts) - shown} more" if shown < len(parts) else "")
        if len(html) <= MOST_LETTERS:
            break
    return html
