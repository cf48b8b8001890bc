"""Prints `analyze` for people: one screen with the verdict in a box, then tables that fit the terminal."""

from collections.abc import Iterable

from rich import box
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from counterpoint.analysis.values import Analysis
from counterpoint.display import cut
from counterpoint.errors import printable
from counterpoint.report.analysis_tables import tables_of
from counterpoint.report.analysis_words import applicable, key_figures, notes_of, problems_of, subject
from counterpoint.report.figure_tables import Cell, FigureColumn, FigureTable, format_cell
from counterpoint.report.text import bullets, new_table
from counterpoint.units import format_count, format_us

MOST_ROWS = 10
MOST_APPLIED = 3
LEAST_COLUMNS = 2
TEXT_WIDTH = 28  # least width of longer texts, which are folded
MOST_LETTERS = 80  # width of a cell
GAP = 3  # between columns
FORMS = "--html has all rows, --json all figures"


def print_analysis(console: Console, analysis: Analysis) -> None:
    """Print the box, the tables, the lines to paste, then what is unknown."""
    console.print(headline_box(console, analysis))
    console.print()
    for table in tables_of(analysis):
        if len(table.rows) > 1 or not table.is_breakdown:  # one row repeats the totals
            _print_table(console, table)
    _print_applications(console, analysis)
    _print_lines(console, "notes", notes_of(analysis))
    _print_lines(console, "unknown", problems_of(analysis))


def headline_box(console: Console, analysis: Analysis) -> Panel:
    """Return the verdict, why and next, with the figures of a mean step, in a frame."""
    headline = analysis.headline
    parts: list[Text | Table] = [Text(printable(headline.verdict), style="bold")]
    if figures := key_figures(analysis):
        parts.append(Text(", ".join(f"{name} {figure}" for name, figure in figures), style="dim"))
    for title, lines in (("why", headline.why), ("next", headline.next)):
        if lines:
            parts += [Text(title, style="bold cyan"), bullets(Text(printable(line)) for line in lines)]
    frame = box.ASCII if console.options.ascii_only else box.ROUNDED
    return Panel(
        Group(*parts), box=frame, title=Text(f" {subject(analysis)} ", style="bold"), title_align="left", padding=(0, 1)
    )


def _print_table(console: Console, table: FigureTable) -> None:
    """Print as many columns as fit the terminal, the first rows, and how many more there are."""
    places = _fitting(table, console.width)
    shown = new_table(*(table.columns[place].name for place in places))
    for column, place in zip(shown.columns, places, strict=True):
        is_text = table.columns[place].kind == "text"
        column.justify = "left" if is_text else "right"
        column.no_wrap = not is_text
    for row in table.rows[:MOST_ROWS]:
        shown.add_row(*(_cell(table.columns[place], row[place]) for place in places))
    console.print(Text(table.title, style="bold"))
    console.print(shown)
    if len(table.rows) > MOST_ROWS:
        console.print(Text(f"and {format_count(len(table.rows) - MOST_ROWS, 'more row')}; {FORMS}", style="dim"))
    console.print()


def _cell(column: FigureColumn, cell: Cell) -> str:
    return cut(format_cell(column.kind, cell), MOST_LETTERS)


def _fitting(table: FigureTable, width: int) -> list[int]:
    """Return the columns to show: as many as fit, first those that are no detail, then the others, in order.

    A column that is empty in the rows shown is left out, and so are all details where not even the others fit.
    """
    filled = [
        place for place in range(len(table.columns)) if any(row[place] not in (None, "") for row in table.rows[:MOST_ROWS])
    ]
    needs = {place: _needed(table, place) + GAP for place in filled}
    main = [place for place in filled if not table.columns[place].is_detail]
    chosen = list(main)
    while len(chosen) > LEAST_COLUMNS and sum(needs[place] for place in chosen) > width + GAP:
        chosen.pop()
    room = width + GAP - sum(needs[place] for place in chosen)
    for place in filled:
        if len(chosen) >= len(main) and place not in main and needs[place] <= room:
            chosen.append(place)
            room -= needs[place]
    return sorted(chosen)


def _needed(table: FigureTable, place: int) -> int:
    column = table.columns[place]
    longest = max(len(_cell(column, row[place])) for row in table.rows[:MOST_ROWS])
    return max(len(column.name), min(longest, TEXT_WIDTH) if column.kind == "text" else longest)


def _print_applications(console: Console, analysis: Analysis) -> None:
    """Print the *To apply* block of the changes that recover most."""
    worth = applicable(analysis)
    if not worth:
        return
    console.print(Text("To apply", style="bold"))
    for each in worth[:MOST_APPLIED]:
        console.print(Text(f"# {printable(each.what)}: {format_us(each.recovers_us)} per step", style="dim"))
        for line in each.apply:
            console.print(Text(printable(line)), soft_wrap=True)
    if len(worth) > MOST_APPLIED:
        more = format_count(len(worth) - MOST_APPLIED, "further change")
        console.print(Text(f"and {more}; {FORMS}", style="dim"))
    console.print()


def _print_lines(console: Console, title: str, lines: Iterable[str]) -> None:
    shown = [Text(line, style="dim") for line in lines]
    if shown:
        console.print(Text(title, style="bold"))
        console.print(bullets(shown))
        console.print()
