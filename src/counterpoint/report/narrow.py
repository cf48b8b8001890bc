"""Tables that a narrow terminal shows in whole words: columns shrink to their longest word, then rows become blocks."""

import re
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

LONGEST_WHOLE = 24  # letters: a longer word, such as a kernel's name, is broken where there is no room
FIGURE = re.compile(r"[-+]?\d")  # what such a cell begins with
BETWEEN = 3  # columns that rich puts between two of a table: a blank, the divider and a blank


class WholeWordTable(Table):
    """A table that breaks no word. Where the longest words do not fit beside each other, each row is a block of lines."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_width - BETWEEN * len(self.columns) + 1
        measured = [_measure(console, options, column) for column in self.columns]
        if sum(each.maximum for each in measured) <= room:
            yield from super().__rich_console__(console, options)
        elif sum(each.minimum for each in measured) > room:
            yield from self._blocks()
        else:
            widths = _shrunk(measured, room)
            for column, width in zip(self.columns, widths, strict=True):
                column.width = width
            try:
                yield from super().__rich_console__(console, options)
            finally:
                for column in self.columns:
                    column.width = None

    def _blocks(self) -> Iterable[RenderableType]:
        """Yield each row's first cell on a line of its own, and below it the others, each behind the name of its column."""
        headers = [column.header for column in self.columns[1:]]
        for first, *others in zip(*(list(column.cells) for column in self.columns), strict=True):
            named = Table.grid(padding=(0, 2, 0, 0))
            for header, cell in zip(headers, others, strict=True):
                if str(cell):
                    named.add_row(header, cell)
            yield Text(str(first)) if isinstance(first, str) else first
            yield Padding(named, (0, 0, 0, 2))


def _measure(console: Console, options: ConsoleOptions, column: Column) -> Measurement:
    """Return the widths of the column's longest word and of its longest cell. A figure and its unit are one word."""
    header, *cells = (Measurement.get(console, options, cell) for cell in (column.header, *column.cells))
    longest = max(each.maximum for each in (header, *cells))
    words = [header.minimum]
    for cell, each in zip(column.cells, cells, strict=True):
        is_figure = column.justify == "right" and FIGURE.match(str(cell)) is not None
        words.append(each.maximum if is_figure else each.minimum)
    return Measurement(longest if column.no_wrap else min(max(words), LONGEST_WHOLE), longest)


def _shrunk(measured: list[Measurement], room: int) -> list[int]:
    """Return widths that fit: the widest column gives way first, and none beyond its longest word."""
    widths = [min(each.maximum, max(room, each.minimum)) for each in measured]
    while sum(widths) > room:
        widest = max((place for place, each in enumerate(measured) if widths[place] > each.minimum), key=widths.__getitem__)
        widths[widest] -= 1
    return widths
