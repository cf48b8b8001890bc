"""What the command line prints for people. Nothing is computed here but widths and wording."""

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from counterpoint.machine import Machine
from counterpoint.plan import (
    CommunicationCtas,
    Control,
    HeadStart,
    Plan,
    Priority,
    ResidencyCap,
    Transport,
)
from counterpoint.planner import Trial
from counterpoint.report.lanes import draw_lanes
from counterpoint.report.summary import Row
from counterpoint.step import Collective, Copy, Step
from counterpoint.timeline import Timeline
from counterpoint.units import format_bytes, format_percent, format_rate, format_us

SHOWN_TRIALS = 12
NAME_WIDTH = 60


def _table(*headers: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for position, header in enumerate(headers):
        table.add_column(header, justify="left" if position == 0 else "right", overflow="fold")
    return table


def print_step(console: Console, step: Step, machine: Machine, notes: Iterable[str] = ()) -> None:
    """One line of what the step holds, one of where it runs, then the notes."""
    collectives = [operation for operation in step.operations if isinstance(operation, Collective)]
    copies = sum(isinstance(operation, Copy) for operation in step.operations)
    kernels = len(step.operations) - len(collectives) - copies
    moved = format_bytes(sum(collective.num_bytes for collective in collectives))
    console.print(
        f"[bold]{step.name}[/bold]: {kernels} kernels, {len(collectives)} collectives of {moved} in all, {copies} copies, "
        f"{step.num_ranks} ranks",
        highlight=False,
    )
    console.print(f"on {machine.title}, {machine.num_gpus} GPUs per node", highlight=False)
    for note in notes:
        console.print(Padding(Text(f"- {note}", style="dim"), (0, 0, 0, 2)))


def print_metrics(console: Console, rows: Sequence[Row]) -> None:
    """A table of what the step takes, sequential to ideal."""
    table = _table("step", "makespan", "exposed comm.", "overlap ratio", "")
    table.columns[-1].justify = "left"
    for row in rows:
        exposed = format_us(row.metrics.exposed_us) if row.metrics else ""
        ratio = format_percent(row.metrics.overlap_ratio) if row.metrics and row.metrics.overlap_ratio is not None else ""
        table.add_row(row.name, format_us(row.makespan_us), exposed, ratio, Text(row.remark, style="dim"))
    console.print(table)


def print_trials(console: Console, trials: Sequence[Trial]) -> None:
    """The candidates that mattered: the baseline, every single control, and the best combinations."""
    baseline = trials[0]
    singles = [trial for trial in trials[1:] if len(trial.families) == 1]
    combined = [trial for trial in trials if len(trial.families) > 1]
    best: dict[str, Trial] = {}
    for trial in sorted(singles + combined, key=lambda entry: entry.makespan_us):
        best.setdefault(trial.label, trial)
    table = _table("candidate (simulated)", "makespan", "change", "exposed comm.")
    for trial in [baseline, *list(best.values())[:SHOWN_TRIALS]]:
        change = trial.makespan_us / baseline.makespan_us - 1
        style = "green" if change < -0.0005 else "red" if change > 0.0005 else ""
        shown = Text("" if trial is baseline else f"{100 * change:+.1f} %", style=style)
        table.add_row(trial.label, format_us(trial.makespan_us), shown, format_us(trial.exposed_us))
    console.print(table)
    if len(best) > SHOWN_TRIALS:
        console.print(f"[dim]and {len(best) - SHOWN_TRIALS} slower ones[/dim]", highlight=False)


def print_plan(console: Console, plan: Plan) -> None:
    """The verdict, each control with its reason, what is expected, and what was refused."""
    style = "bold green" if plan.verdict == "GAIN" else "bold yellow"
    console.print(Text.assemble((plan.verdict, style), " ", plan.summary))
    for directive in plan.directives:
        controls = ", ".join(describe_control(control) for control in directive.controls)
        target = directive.match.name if directive.match.name != "*" else f"{directive.match.kind or 'all'} operations"
        if directive.match.operations is not None:
            target += f" ({len(directive.match.operations)} of them)"
        line = Text.assemble("  ", (controls, "bold"), " on ", (_shorten(target), "cyan"), f": {directive.reason}")
        console.print(line)
    for refusal in plan.refusals:
        console.print(
            Text.assemble(
                ("  refused ", "dim"), (refusal.control, "dim bold"), (" on ", "dim"), (_shorten(refusal.target), "dim")
            ),
            Text(f": {refusal.reason}", style="dim"),
            sep="",
        )
    if plan.expectation is not None and plan.expectation.origin == "simulated":
        console.print("[dim]Simulated, not measured: no GPU was used.[/dim]", highlight=False)


def describe_control(control: Control) -> str:
    """A control in a few words."""
    match control:
        case ResidencyCap():
            return f"cap of {control.ctas_per_sm} CTAs per SM ({control.dynamic_shared_bytes:,} B, carveout {control.carveout_percent} %)"
        case Priority():
            return f"priority {control.priority}"
        case CommunicationCtas():
            threads = f" of {control.num_threads} threads" if control.num_threads else ""
            return f"at most {control.max_ctas} CTAs{threads}"
        case Transport():
            return f"transport {control.transport}"
        case HeadStart():
            return f"head start {control.hold_us:g} us"


def _shorten(name: str) -> str:
    return name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH - 1] + "…"


def print_lanes(console: Console, timelines: Sequence[tuple[str, Timeline]]) -> None:
    """Timelines one below the other on one scale; communication with nothing above it is what is exposed."""
    total_us = max(interval.end_us for _, timeline in timelines for interval in timeline.intervals)
    width = max(20, min(console.width - 16, 120))
    for title, timeline in timelines:
        console.print(f"[bold]{title}[/bold]", highlight=False)
        computation, communication = draw_lanes(timeline, width, total_us)
        console.print(Text("computation   ") + Text(computation.text(), style="blue"))
        row = Text("communication ")
        for block, share in zip(communication.text(), computation.busy, strict=True):
            row.append(block, style="green" if share > 0.5 else "red")
        console.print(row)
    console.print(f"{'':14}0{format_us(total_us):>{width - 1}}", highlight=False)


def print_machines(console: Console, machines: Sequence[Machine]) -> None:
    """One line per machine."""
    table = _table("name", "GPUs", "SMs", "registers/SM", "shared/SM", "HBM", "link (one direction)", "")
    table.columns[-1].justify = "left"
    for machine in machines:
        gpu = machine.gpu
        registers = gpu.registers_per_sub_partition * gpu.num_sub_partitions
        table.add_row(
            machine.name,
            str(machine.num_gpus),
            str(gpu.num_sms),
            f"{registers:,}",
            format_bytes(gpu.shared_bytes_per_sm),
            format_rate(gpu.hbm_bytes_per_s),
            f"{machine.link.kind} {format_rate(machine.link.bytes_per_s)}",
            machine.title,
        )
    console.print(table)


def print_machine(console: Console, machine: Machine) -> None:
    """Every figure of one machine with its source."""
    console.print(f"[bold]{machine.name}[/bold]: {machine.title}", highlight=False)
    table = _table("figure", "value", "source")
    table.columns[-1].justify = "left"
    for prefix, part in (("gpu", machine.gpu), ("link", machine.link), ("network", machine.network)):
        for name in part.__struct_fields__ if part is not None else ():
            value = getattr(part, name)
            shown = f"{value:,}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
            table.add_row(f"{prefix}.{name}", shown, machine.sources.get(f"{prefix}.{name}", ""))
    table.add_row("num_gpus", str(machine.num_gpus), machine.sources.get("num_gpus", ""))
    console.print(table)
