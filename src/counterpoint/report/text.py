"""Prints reports for people: the console, tables, and what reports of a step have in common.

Nothing is computed here but widths and wording.
"""

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TextIO, cast

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from counterpoint.controls import Control
from counterpoint.errors import READER_LEFT, printable, shown, shown_path
from counterpoint.kernel_names import readable
from counterpoint.machine import Machine
from counterpoint.plan import NUM_SHOWN, Directive, Match, Plan
from counterpoint.planner import Trial
from counterpoint.report.lanes import ASCII_BLOCKS, BLOCKS, draw_lanes
from counterpoint.report.narrow import WholeWordTable
from counterpoint.report.summary import ReportRow
from counterpoint.step import Copy, Step
from counterpoint.timeline import Timeline
from counterpoint.units import format_bytes, format_change, format_count, format_percent, format_span, format_us
from counterpoint.validation.bounds import ErrorBounds

SHOWN_TRIALS = 12
MIN_WIDTH = 40
LABEL_WIDTH = 15
VISIBLE = 0.0005
HALF = 0.5
HIDDEN_BY, HIDDEN, EXPOSED = "blue", "green", "red"


class ProgressLine:
    """A progress line on standard error; silent if standard error is no terminal."""

    def __init__(self, is_shown: bool = True) -> None:
        self._is_shown = is_shown and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def __enter__(self) -> Callable[[str], None]:
        return self._show

    def __exit__(self, *_: object) -> None:
        self._show("")

    def _show(self, text: str) -> None:
        if self._is_shown:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()


def reading(show: Callable[[str], None], source: Path | str) -> Callable[[int, int], None]:
    """Return a listener that tells `show` how much of a file is read, given the bytes read and the size (0 for a pipe)."""
    name = shown(os.path.basename(source))
    return lambda done, size: show(f"reading {name}" + (f": {format_percent(done / size)}" if size else ""))


def new_console(*, stderr: bool = False) -> Console:
    """Return the console for reports, on standard output or `stderr`, never narrower than `MIN_WIDTH` columns."""
    file = None if stderr or sys.stdout.isatty() else cast(IO[str], _Trimmed(sys.stdout))
    # no markup, no emoji: names of kernels and files hold brackets and colons
    console = _Console(file=file, stderr=stderr, soft_wrap=False, markup=False, emoji=False)
    console.width = max(MIN_WIDTH, console.width)
    return console


class _Console(Console):
    """A console that ends the command with `READER_LEFT` when nobody reads the output any more; rich ends it with 1."""

    def on_broken_pipe(self) -> None:
        with suppress(SystemExit):
            super().on_broken_pipe()
        raise SystemExit(READER_LEFT)


class _Trimmed:
    """Writes to a file or a pipe without the trailing blanks of tables."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.encoding = file.encoding

    def write(self, text: str) -> int:
        """Write text; a console passes whole lines."""
        return self._file.write(re.sub(r" +(?=\n)", "", text))

    def flush(self) -> None:
        """Flush the file."""
        self._file.flush()

    def isatty(self) -> bool:
        """Return False: what a terminal shows is left as it is."""
        return False


def new_table(*headers: str) -> Table:
    """Return a table in the style of all reports: first column left-aligned, figures right-aligned."""
    table = WholeWordTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for position, header in enumerate(headers):
        table.add_column(header, justify="left" if position == 0 else "right", overflow="fold")
    return table


def print_step(console: Console, step: Step, machine: Machine, notes: Iterable[str] = ()) -> None:
    """Print what the step holds, where it runs, and notes on how it was read."""
    collectives = step.collectives().values()
    found = [operation for operation in step.operations if isinstance(operation, Copy)]
    remote = [copy for copy in found if copy.direction == "peer_to_peer"]
    kernels, copies = len(step.operations) - len(collectives) - len(found), len(found) - len(remote)
    num_bytes = sum(collective.num_bytes for collective in collectives)
    sizes = f" of {format_bytes(num_bytes)} in all" if num_bytes else " of unknown size" if collectives else ""
    parts = [format_count(kernels, "kernel"), f"{format_count(len(collectives), 'collective')}{sizes}"]
    if remote:
        size = format_bytes(sum(copy.num_bytes for copy in remote))
        parts.append(f"{format_count(len(remote), 'peer-to-peer copy', 'peer-to-peer copies')} of {size}")
    if copies:
        parts.append(format_count(copies, "copy or fill", "copies and fills"))
    console.print(
        Text.assemble((shown_path(step.name), "bold"), f": {', '.join(parts)}; {format_count(step.num_ranks, 'rank')}")
    )
    num_nodes = -(-step.num_ranks // machine.num_gpus)
    console.print(Text(f"on {f'{num_nodes} nodes of ' if num_nodes > 1 else ''}{machine.title}"))
    lines = [Text(printable(note), style="dim") for note in notes]
    if lines:
        console.print(bullets(lines))
    console.print()


def print_metrics(console: Console, rows: Sequence[ReportRow]) -> None:
    """Print a table of the step's times, sequential to ideal."""
    is_bounded = any(row.between_us for row in rows)
    table = new_table("step", "makespan", *(["expected"] if is_bounded else []), "exposed", "overlap", "")
    table.columns[-1].justify = "left"
    for row in rows:
        between = [format_span(*row.between_us) if row.between_us else ""] if is_bounded else []
        exposed = format_us(row.metrics.exposed_us) if row.metrics else ""
        ratio = format_percent(row.metrics.overlap_ratio) if row.metrics and row.metrics.overlap_ratio is not None else ""
        table.add_row(row.name, format_us(row.makespan_us), *between, exposed, ratio, Text(row.remark, style="dim"))
    console.print(table)
    console.print()


def print_trials(console: Console, trials: Sequence[Trial], bounds: ErrorBounds | None = None) -> None:
    """Print the candidates that matter: the baseline, then the shortest of the others; with bounds if they are given."""
    baseline = trials[0]
    best: dict[str, Trial] = {}
    for trial in sorted(trials[1:], key=lambda entry: (entry.makespan_us, len(entry.families))):
        best.setdefault(trial.label, trial)
    table = new_table("candidate (simulated)", "makespan", *(["expected"] if bounds else []), "change", "exposed")
    for trial in [baseline, *list(best.values())[:SHOWN_TRIALS]]:
        change = trial.makespan_us / baseline.makespan_us - 1
        style = "green" if change < -VISIBLE else "red" if change > VISIBLE else ""
        shown = Text("" if trial is baseline else format_change(change), style=style)
        between = [format_span(*bounds.around(trial.makespan_us))] if bounds else []
        table.add_row(trial.label, format_us(trial.makespan_us), *between, shown, format_us(trial.exposed_us))
    console.print(table)
    if len(best) > SHOWN_TRIALS:
        console.print(Text(f"and {len(best) - SHOWN_TRIALS} slower", style="dim"))
    console.print()


def print_verdict(console: Console, plan: Plan) -> None:
    """Print the verdict, and the plan's own words for it."""
    style = "bold green" if plan.verdict == "GAIN" else "bold yellow"
    summary = plan.summary or ("the plan gives none" if plan.verdict == "NO_VERDICT" else "")
    console.print(Text.assemble((plan.verdict, style), "  ", printable(summary)))


def print_plan(console: Console, plan: Plan, bounds: ErrorBounds | None = None) -> None:
    """Print the verdict, and each control with its reason; `bounds` are those of a simulated plan."""
    print_verdict(console, plan)
    if plan.directives:
        console.print(bullets(describe_directives(plan.directives)))
    if plan.expectation is not None and plan.expectation.origin == "simulated":
        console.print(Text("Simulated, not measured: no GPU was used.", style="dim"))
        if plan.verdict == "GAIN" and bounds is not None and not bounds.is_compared:
            never = "Predictions for this many of these GPUs were never compared with hardware."
            console.print(Text(f"{never} Errors can exceed the gain: measure it first.", style="bold yellow"))
    console.print()


def bullets(lines: Iterable[Text]) -> Table:
    """Return the lines with a dash before each."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    for line in lines:
        grid.add_row(" -", line)
    return grid


def describe_directives(directives: Iterable[Directive], most_shown: int | None = NUM_SHOWN) -> Iterator[Text]:
    """Yield one line for each set of controls with its reason, naming at most `most_shown` of the matches that share it."""
    matches: dict[tuple[tuple[Control, ...], str], list[Match]] = {}
    for directive in directives:
        matches.setdefault((directive.controls, directive.reason), []).append(directive.match)
    for (controls, reason), found in matches.items():
        told = list(dict.fromkeys(match.shortened().describe(most_shown) for match in found[:most_shown]))
        others = len(found) - len(told)
        target = printable("; ".join(told)) + (f" and {format_count(others, 'other')}" if others else "")
        words = ", ".join(control.describe() for control in controls) or "no control"
        yield Text.assemble((words, "bold"), " on ", (target, "cyan"), f": {printable(reason)}")


def shorten(name: str) -> str:
    """Return a target for a line: a kernel by its short name, other words as they are; cut if too long."""
    return printable(readable(name))


def print_lanes(console: Console, timelines: Sequence[tuple[str, Timeline]]) -> None:
    """Print timelines one below the other on one scale: computation, communication, and the exposed part of it.

    Exposed communication has its own color; without colors it has its own row.
    """
    total_us = max(interval.end_us for _, timeline in timelines for interval in timeline.intervals)
    width = max(20, min(console.width - LABEL_WIDTH - 1, 120))
    blocks = ASCII_BLOCKS if console.options.ascii_only else BLOCKS
    for title, timeline in timelines:
        computation, communication = draw_lanes(timeline, width, total_us)
        top, bottom = (lane.text(blocks) for lane in (computation, communication))
        is_hidden = [share > HALF for share in computation.busy]
        console.print(Text.assemble((f"{title:{LABEL_WIDTH}}", "bold"), (top, HIDDEN_BY), overflow="crop"))
        row = Text(f"{'communication':>{LABEL_WIDTH - 1}} ", style="dim", overflow="crop")
        for block, hidden in zip(bottom, is_hidden, strict=True):
            row.append(block, style=HIDDEN if hidden else EXPOSED)
        console.print(row)
        if console.color_system is None:
            exposed = "".join(" " if hidden else block for block, hidden in zip(bottom, is_hidden, strict=True))
            console.print(Text(f"{'exposed':>{LABEL_WIDTH - 1}} {exposed.rstrip()}", overflow="crop"))
    console.print(Text(f"{'':{LABEL_WIDTH}}0{format_us(total_us):>{width - 1}}", style="dim"))
    if console.color_system is not None:
        legend = (("computation", HIDDEN_BY), "   communication ", ("hidden", HIDDEN), " or ", ("exposed", EXPOSED))
        console.print(Text.assemble(" " * LABEL_WIDTH, *legend))
