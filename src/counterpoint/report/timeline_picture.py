"""Timelines as a picture (SVG): of each one, what a rank computes above what it communicates, all on one scale of time.

Communication is drawn in two colors: hidden behind computation, and exposed. The picture has no background. A file named
`*.dark.svg` is for a dark page, any other for a light one. Nothing is computed here but places on the page.
"""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from counterpoint.errors import TraceError, printable
from counterpoint.metrics import measure
from counterpoint.spans import Span, union, without
from counterpoint.timeline import Timeline
from counterpoint.traces.chrome import CHROME_SUFFIXES, is_written_here, write_chrome_trace
from counterpoint.units import format_change, format_us, us_to_ps
from counterpoint.value import OutputKind, Value, save_text

SUFFIX, DARK_SUFFIX = ".svg", ".dark.svg"
WIDTH, LEFT, RIGHT = 880, 116, 8
ROW, GAP, TITLE, HEAD, FOOT = 30, 4, 28, 30, 34  # heights
LEAST_WIDTH = 0.05  # narrower gaps are drawn as none, in units of the page
MOST_TICKS = 8

SVG_HEAD = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH}'
TIMELINE = OutputKind(
    "timeline",
    (SUFFIX, *CHROME_SUFFIXES),
    lambda content: content.startswith(SVG_HEAD.encode()) or is_written_here(content),
)


class Colors(Value, frozen=True, kw_only=True):
    """Of one theme: Okabe and Ito's, which people with color blindness can tell apart."""

    text: str
    faint: str
    computation: str
    hidden: str
    exposed: str


LIGHT = Colors(text="#1f2328", faint="#8c959f", computation="#56a0d3", hidden="#009e73", exposed="#d55e00")
DARK = Colors(text="#e6edf3", faint="#7d8590", computation="#3a7ca5", hidden="#2bc598", exposed="#ff7b3a")


def write_timelines(path: Path, timelines: Mapping[str, Timeline]) -> None:
    """Write timelines to a file, each labeled by its key: an SVG as a picture, a JSON file as a Chrome trace.

    Raises `TraceError` for another suffix, and if the file cannot be written.
    """
    name = path.name.lower()
    if name.endswith(CHROME_SUFFIXES):
        write_chrome_trace(path, timelines)
        return
    picture = draw_timelines(timelines, DARK if name.endswith(DARK_SUFFIX) else LIGHT)
    save_text(path, picture, TIMELINE, TraceError)


def draw_timelines(timelines: Mapping[str, Timeline], colors: Colors = LIGHT) -> str:
    """Return the picture as SVG text: the first rank of each timeline, from its first operation on."""
    makespans_us = [measure(timeline).makespan_us for timeline in timelines.values()]
    scale = (WIDTH - LEFT - RIGHT) / max(makespans_us)
    height = HEAD + len(timelines) * (TITLE + 2 * ROW + 2 * GAP) + FOOT
    parts = [_legend(colors)]
    top, first_us = HEAD, makespans_us[0]
    for (label, timeline), makespan_us in zip(timelines.items(), makespans_us, strict=True):
        change = "" if label == next(iter(timelines)) else f", {format_change(makespan_us / first_us - 1)}"
        parts.append(_text(0, top + 18, f"{label}: {format_us(makespan_us)}{change}", colors.text, bold=True))
        parts.append(_rows(timeline, top + TITLE, scale, colors))
        top += TITLE + 2 * ROW + 2 * GAP
    parts.append(_axis(top, max(makespans_us), scale, colors))
    origin = " and ".join(sorted({timeline.origin for timeline in timelines.values()}))
    name = printable(next(iter(timelines.values())).step_name)
    words = "; ".join(f"{label} {format_us(us)}" for label, us in zip(timelines, makespans_us, strict=True))
    return (
        f'{SVG_HEAD} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" font-family="system-ui, sans-serif" font-size="13">\n'
        f"<title>{escape(f'{name}: {words} ({origin})')}</title>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _rows(timeline: Timeline, top: float, scale: float, colors: Colors) -> str:
    """Draw computation, and communication below it."""
    intervals = timeline.of_rank(timeline.ranks()[0])
    start_us = min(interval.start_us for interval in intervals)
    computation, communication = (
        union(
            (us_to_ps(each.start_us - start_us), us_to_ps(each.end_us - start_us)) for each in intervals if each.kind == kind
        )
        for kind in ("computation", "communication")
    )
    exposed = without(communication, computation)
    below = top + ROW + GAP
    return "\n".join(
        (
            _text(LEFT - 8, top + 20, "computation", colors.text, anchor="end"),
            _bars(computation, top, scale, colors.computation),
            _text(LEFT - 8, below + 20, "communication", colors.text, anchor="end"),
            _bars(without(communication, exposed), below, scale, colors.hidden),
            _bars(exposed, below, scale, colors.exposed),
        )
    )


def _bars(spans: Sequence[Span], top: float, scale: float, color: str) -> str:
    """Return one path for all spans of a row; spans that lie closer than the eye can see are one."""
    drawn: list[tuple[float, float]] = []
    for start_ps, end_ps in spans:
        start, end = (LEFT + ps * scale / 1e6 for ps in (start_ps, end_ps))
        if drawn and start - drawn[-1][1] < LEAST_WIDTH:
            drawn[-1] = (drawn[-1][0], end)
        else:
            drawn.append((start, end))
    path = "".join(f"M{start:.2f} {top}h{end - start:.2f}v{ROW}h-{end - start:.2f}z" for start, end in drawn)
    return f'<path fill="{color}" d="{path}"/>'


def _legend(colors: Colors) -> str:
    """Return the legend of the colors, which stands above all rows."""
    parts, left = [], LEFT
    for color, words, width in (
        (colors.computation, "computation", 124),
        (colors.hidden, "communication, hidden", 188),
        (colors.exposed, "communication, exposed: the GPU computes nothing", 0),
    ):
        parts.append(f'<rect x="{left}" y="4" width="12" height="12" fill="{color}"/>')
        parts.append(_text(left + 18, 15, words, colors.text))
        left += width
    return "\n".join(parts)


def _axis(top: float, longest_us: float, scale: float, colors: Colors) -> str:
    """Draw ticks at round times."""
    step_us = next(
        times * 10.0**power
        for power in range(-3, 12)
        for times in (1, 2, 5)
        if longest_us <= MOST_TICKS * times * 10.0**power
    )
    parts = [f'<path stroke="{colors.faint}" d="M{LEFT} {top + 4}h{WIDTH - LEFT - RIGHT}"/>']
    for tick in range(int(longest_us / step_us) + 1):
        place = LEFT + tick * step_us * scale
        anchor = "start" if not tick else "middle" if place < WIDTH - 40 else "end"
        parts.append(f'<path stroke="{colors.faint}" d="M{place:.2f} {top + 4}v5"/>')
        parts.append(_text(place, top + 24, format_us(tick * step_us) if tick else "0", colors.faint, anchor=anchor))
    return "\n".join(parts)


def _text(x: float, y: float, words: str, color: str, *, bold: bool = False, anchor: str = "start") -> str:
    weight = 600 if bold else 400
    return f'<text x="{x:g}" y="{y:g}" fill="{color}" font-weight="{weight}" text-anchor="{anchor}">{escape(words)}</text>'
