"""Tables of figures as values, shared by the terminal, Markdown and the page.

A table holds figures, not text, so that each output can sort and shorten it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from counterpoint.errors import printable
from counterpoint.units import format_bytes, format_percent, format_rate, format_us
from counterpoint.value import Value

Cell = str | float | int | None
Kind = Literal["text", "us", "share", "bytes", "rate", "number"]


class FigureColumn(Value, frozen=True, kw_only=True):
    """One column. If `is_detail` is true, it is left out on narrow outputs."""

    name: str
    kind: Kind = "text"
    is_detail: bool = False


class FigureTable(Value, frozen=True, kw_only=True):
    """A table of rows; `key` names the table in links, `caption` is one line on what its figures are."""

    key: str
    title: str
    caption: str
    columns: tuple[FigureColumn, ...]
    rows: tuple[tuple[Cell, ...], ...]

    @property
    def is_breakdown(self) -> bool:
        """Whether the rows are parts of all communication."""
        return self.key.startswith("by-")


def format_cell(kind: Kind, cell: Cell) -> str:
    """Format a figure for people; an empty string for None."""
    if cell is None:
        return ""
    if isinstance(cell, str):
        return printable(cell)
    formats: dict[Kind, Callable[[float], str]] = {
        "us": format_us,
        "share": format_percent,
        "bytes": format_bytes,
        "rate": format_rate,
    }
    return formats.get(kind, _format_number)(cell)


def _format_number(number: float) -> str:
    """Format a count or a mean with four significant digits at least, and whole where it has more."""
    return f"{number:,.4g}" if isinstance(number, float) and abs(number) < 999.95 else f"{number:,.0f}"


def text_column(name: str, *, is_detail: bool = False) -> FigureColumn:
    """Return a column of text."""
    return FigureColumn(name=name, is_detail=is_detail)


def figure_columns(kind: Kind, *names: str, is_detail: bool = False) -> tuple[FigureColumn, ...]:
    """Return columns of one kind of figure."""
    return tuple(FigureColumn(name=name, kind=kind, is_detail=is_detail) for name in names)


def new_figures(
    key: str, title: str, caption: str, columns: Sequence[FigureColumn], rows: Iterable[tuple[Cell, ...]]
) -> FigureTable:
    """Return a table with these rows, in their order."""
    return FigureTable(key=key, title=title, caption=caption, columns=tuple(columns), rows=tuple(rows))
