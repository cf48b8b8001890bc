"""Writes an `Analysis` as one HTML file that needs no network: verdict, timeline, tables, and lines to paste.

Names in traces are not trusted. Text is escaped, control characters are written out, and the page's content security
policy allows its own script only and blocks all loads. Tables are plain HTML; the script adds the timeline, sorting and
filters.
"""

import base64
import hashlib
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path

import msgspec

from counterpoint.analysis.values import SCHEMA, Analysis, Cause
from counterpoint.errors import CounterpointError, package_version, printable
from counterpoint.report.analysis_tables import tables_of
from counterpoint.report.analysis_timeline import ROLES, Limits, describe_timeline, is_one_clock, safe_text, timeline_data
from counterpoint.report.analysis_words import CAUSES, applicable, key_figures, notes_of, problems_of, subject
from counterpoint.report.figure_tables import Cell, FigureColumn, FigureTable, format_cell
from counterpoint.units import MIB, format_bytes, format_count, format_us
from counterpoint.value import save_text, shipped_text, text_output

TEMPLATE = "report/analysis_page.html"
PAGE = text_output("page", (".html", ".htm"), shipped_text(TEMPLATE).partition("[[")[0])
MAX_PAGE_BYTES = 8 * MIB
SHORT_TEXT = 18  # cells up to this many letters are never folded
LONG_TEXT = 60  # cells of this many letters or more get a wider column, and are cut to three lines until they are clicked
FRAME_HEIGHT = 900  # height of the page in a notebook, in pixels
NOT_ONE_CLOCK = "The clocks of the ranks could not be aligned for one step, so each rank starts at zero."


class AnalysisReport:
    """Shows an analysis in a notebook: the HTML page in an iframe."""

    def __init__(self, analysis: Analysis) -> None:
        self.analysis = analysis

    def _repr_html_(self) -> str:
        """Return HTML for Jupyter; the iframe may run the page's script and do nothing else."""
        page = escape(render_page(self.analysis))
        return (
            f'<iframe title="Counterpoint analysis" sandbox="allow-scripts" '
            f'style="width:100%;height:{FRAME_HEIGHT}px;border:0" srcdoc="{page}"></iframe>'
        )


def write_page(path: Path | str, analysis: Analysis) -> None:
    """Write the page to a file. Raises `CounterpointError` if that is impossible."""
    save_text(path, render_page(analysis), PAGE, CounterpointError)


def render_page(analysis: Analysis) -> str:
    """Return the page as text, below `MAX_PAGE_BYTES`: if it would be larger, it draws fewer operations and lists fewer
    rows.
    """
    limits = Limits()
    page = _render(analysis, limits)
    while len(page.encode()) > MAX_PAGE_BYTES:
        if limits.num_operations == 0:
            raise CounterpointError(
                f"The page would have {format_bytes(len(page.encode()))}; the limit is "
                f"{format_bytes(MAX_PAGE_BYTES)}. Give fewer traces, or use --json."
            )
        limits = limits.halved()
        page = _render(analysis, limits)
    return page


def _render(analysis: Analysis, limits: Limits) -> str:
    tables = tables_of(analysis)
    style, script = shipped_text("report/analysis_page.css"), shipped_text("report/analysis_page.js")
    problems = problems_of(analysis)
    parts = {
        "policy": f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}",
        "title": _safe(f"Counterpoint: {subject(analysis)}"),
        "style": style,
        "script": script,
        "subject": _safe(subject(analysis)),
        "verdict": _safe(analysis.headline.verdict),
        "bar": _bar(analysis),
        "figures": "".join(
            f"<div><dt>{_safe(name)}</dt><dd>{_safe(text)}</dd></div>" for name, text in key_figures(analysis)
        ),
        "why": _titled_list("Why", analysis.headline.why),
        "next": _titled_list("Next", analysis.headline.next),
        "unknown": _pointer(len(problems)),
        "legends": _legend("operations", "role", ROLES) + _legend("exposed", "cause", [name for name, _ in CAUSES.values()]),
        "words": _items([*describe_timeline(analysis), *([] if is_one_clock(analysis) else [NOT_ONE_CLOCK])]),
        "links": _links(tables),
        "tables": "".join(_table(table, limits.num_rows) for table in tables),
        "apply": _apply(analysis),
        "remarks": _remarks("notes", "Notes", notes_of(analysis)) + _remarks("unknown", "Unknown", problems),
        "version": _safe(package_version()),
        "schema": SCHEMA,
        "data": _json(timeline_data(analysis, limits)),
    }
    pieces = shipped_text(TEMPLATE).split("[[")
    return pieces[0] + "".join(_filled(piece, parts) for piece in pieces[1:])


def _filled(piece: str, parts: dict[str, str]) -> str:
    """Fill in one piece of the template, from a part's name on; parts are never searched for names themselves."""
    name, rest = piece.split("]]", maxsplit=1)
    return parts[name] + rest


def _hash(text: str) -> str:
    """Return the source expression of a content security policy for an element with this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _safe(text: str) -> str:
    return escape(safe_text(text, 2_000))


def _json(value: object) -> str:
    """Write JSON that no HTML parser takes for the end of a script."""
    return msgspec.json.encode(value).decode().replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _items(lines: Iterable[str]) -> str:
    return "".join(f"<li>{_safe(line)}</li>" for line in lines)


def _titled_list(title: str, lines: tuple[str, ...]) -> str:
    return f"<div><h3>{title}</h3><ul>{_items(lines)}</ul></div>" if lines else ""


def _links(tables: Iterable[FigureTable]) -> str:
    links = "".join(f'<li><a href="#{table.key}">{_safe(table.title)}</a></li>' for table in tables)
    return f'<nav aria-label="Tables"><ul>{links}</ul></nav>' if links else ""


def _pointer(num_problems: int) -> str:
    if not num_problems:
        return ""
    return f'<p class="hint"><a href="#unknown">{format_count(num_problems, "thing")} could not be determined.</a></p>'


def _legend(title: str, kind: str, names: Iterable[str]) -> str:
    keys = "".join(
        f'<li><span class="key {kind}-{place}" aria-hidden="true"></span>{escape(name)}</li>'
        for place, name in enumerate(names)
    )
    return f'<ul class="legend"><li>{title}:</li>{keys}</ul>'


def _bar(analysis: Analysis) -> str:
    """Draw a mean step as one bar: computation, hidden communication, each cause of exposed communication, idle time."""
    if analysis.step_us <= 0:
        return ""
    hidden_us = max(0.0, analysis.communication_us - analysis.exposed_us)
    alone_us = max(0.0, analysis.step_us - analysis.communication_us - analysis.idle_us)
    causes = sorted(analysis.causes, key=lambda each: -each.exposed_us)
    parts = [
        ("computation and copies alone", "role-0", alone_us),
        ("computation that hides communication", "hidden-part", hidden_us),
        *((f"exposed: {CAUSES[each.cause][0]}", f"cause-{_place(each.cause)}", each.exposed_us) for each in causes),
        ("idle", "idle", analysis.idle_us),
    ]
    return _drawn_bar([part for part in parts if part[2] > 0])


def _place(cause: Cause) -> int:
    return list(CAUSES).index(cause)


def _drawn_bar(parts: list[tuple[str, str, float]]) -> str:
    total_us, at, drawn = sum(us for _, _, us in parts), 0.0, ""
    for name, style, us in parts:
        size = 1000 * us / total_us
        title = f"<title>{_safe(name)}: {format_us(us)}</title>"
        drawn += f'<rect class="{style}" x="{at:.2f}" y="0" width="{size:.2f}" height="26">{title}</rect>'
        at += size
    words = _safe("A mean step: " + ", ".join(f"{name} {format_us(us)}" for name, _, us in parts))
    keys = "".join(
        f'<li><span class="key {style}" aria-hidden="true"></span>{_safe(name)} {format_us(us)}</li>'
        for name, style, us in parts
    )
    bar = f'<svg class="bar" viewBox="0 0 1000 26" preserveAspectRatio="none" role="img" aria-label="{words}">{drawn}</svg>'
    return f'{bar}<ul class="legend"><li>mean step:</li>{keys}</ul>'


def _table(table: FigureTable, most_rows: int) -> str:
    headers = "".join(
        f'<th scope="col"{"" if column.kind == "text" else _FIGURE}>{_safe(column.name)}</th>' for column in table.columns
    )
    rows = "".join(f"<tr>{''.join(_cells(table.columns, row))}</tr>" for row in table.rows[:most_rows])
    left_out = len(table.rows) - most_rows
    caption = table.caption + (
        f" The first {most_rows} rows of {len(table.rows):,}; --json has all." if left_out > 0 else ""
    )
    return (
        f'<section id="{table.key}"><h2>{_safe(table.title)}</h2><div class="scroll" tabindex="0" role="region" '
        f'aria-label="{_safe(table.title)}"><table id="table-{table.key}"><caption><span>{_safe(caption)}</span></caption>'
        f"<thead><tr>{headers}</tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


_FIGURE = ' class="figure"'


def _cells(columns: Iterable[FigureColumn], row: tuple[Cell, ...]) -> Iterator[str]:
    """Yield cells that hold the figure beside its text, so that the page sorts by figures."""
    for column, cell in zip(columns, row, strict=True):
        shown = escape(safe_text(format_cell(column.kind, cell)))
        if column.kind == "text" and len(shown) > LONG_TEXT:
            yield f'<td class="text long"><div class="clamp">{shown}</div></td>'
        elif column.kind == "text":
            yield f'<td class="text{" short" if len(shown) <= SHORT_TEXT else ""}">{shown}</td>'
        else:
            yield f"<td{_FIGURE}{'' if cell is None else f' data-v={chr(34)}{cell:.10g}{chr(34)}'}>{shown}</td>"


def _apply(analysis: Analysis) -> str:
    """Return the lines of every change that has some, ready to paste."""
    worth = applicable(analysis)
    blocks = "".join(
        f"<h3>{_safe(each.what)}: {format_us(each.recovers_us)} per step</h3>"
        f"<pre>{escape(chr(10).join(printable(line) for line in each.apply))}</pre>"
        for each in worth
    )
    return f'<section id="apply" class="apply"><h2>To apply</h2>{blocks}</section>' if blocks else ""


def _remarks(key: str, title: str, lines: list[str]) -> str:
    return f'<section id="{key}" class="remarks"><h2>{title}</h2><ul>{_items(lines)}</ul></section>' if lines else ""
