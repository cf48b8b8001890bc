"""Prints `counterpoint machines` and `counterpoint workloads`: lists of what ships, one machine, and the probed one."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from counterpoint.cuda.probing import Probed
from counterpoint.errors import MachineError
from counterpoint.footprints import known_on
from counterpoint.machine import Gpu, Machine
from counterpoint.report.text import new_table
from counterpoint.units import format_bytes, format_count, format_rate
from counterpoint.workloads.description import Description

WHOLE_WIDTH = 76  # from this width on, names in tables of machines are not folded


def print_machines(console: Console, machines: Sequence[Machine]) -> None:
    """Print one line per machine; if that leaves no room for the node's title, print the titles below."""
    is_wide = console.width >= WHOLE_WIDTH
    table = new_table("name", "SMs", "shared/SM", "HBM", "link, one way", *(["node"] if is_wide else []))
    if is_wide:
        table.columns[-1].justify = "left"
        for column in table.columns[:-1]:
            column.no_wrap = True
    for machine in machines:
        gpu = machine.gpu
        table.add_row(
            machine.name,
            str(gpu.num_sms),
            format_bytes(gpu.shared_bytes_per_sm),
            format_rate(gpu.hbm_bytes_per_s),
            f"{machine.link.kind} {format_rate(machine.link.bytes_per_s)}",
            *([machine.title] if is_wide else []),
        )
    console.print(table)
    if not is_wide:
        console.print(_labelled((machine.name, machine.title) for machine in machines))


def print_workloads(console: Console, workloads: Sequence[Description]) -> None:
    """Print one line for each workload."""
    table = new_table("name", "ranks", "iterations", "kernels", "communication")
    for each in workloads:
        moved = [f"{entry.collective} {entry.bytes}" for entry in each.collectives]
        moved += [format_count(len(each.copies), "copy", "copies")] if each.copies else []
        kernels = len(each.gemms) + len(each.kernels)
        table.add_row(each.name, str(each.num_ranks), str(each.iterations), str(kernels), ", ".join(moved))
    table.columns[0].no_wrap = True
    table.columns[-1].justify = "left"
    console.print(table)


def format_figure(value: object) -> str:
    """Format a machine's figure: numbers with thousands separators, lists without brackets, anything else as a word."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return " ".join(format_figure(each) for each in value)
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() else f"{value:,.15g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def print_machine(console: Console, machine: Machine) -> None:
    """Print every figure of one machine with the number of its source; each source is printed once, below."""
    console.print(Text.assemble((machine.name, "bold"), f": {machine.title}"))
    table = new_table("figure", "value", "source")
    table.columns[0].no_wrap, table.columns[-1].no_wrap = console.width >= WHOLE_WIDTH, True
    figures = {
        f"{prefix}.{name}": getattr(part, name)
        for prefix, part in (("gpu", machine.gpu), ("link", machine.link), ("network", machine.network))
        for name in (part.__struct_fields__ if part is not None else ())
        if name != "pairs" or getattr(part, name)
    }
    numbers: dict[str, int] = {}
    for name, figure in (figures | {"num_gpus": machine.num_gpus}).items():
        source = machine.sources.get(name)
        number = "" if source is None else f"[{numbers.setdefault(source, len(numbers) + 1)}]"
        table.add_row(name, format_figure(figure), number)
    console.print(table)
    console.print(_labelled((f"[{count}]", source) for source, count in numbers.items()))
    _print_collectives(console, machine.gpu)


def _print_collectives(console: Console, gpu: Gpu) -> None:
    """Print the launch that is assumed for a collective that states none, and whether it was measured."""
    console.print()
    try:
        known = known_on(gpu, "nccl")
    except MachineError as problem:
        console.print(f"A collective must state its launch. {problem}")
        return
    console.print(f"A collective that states no launch is assumed to be {known.describe()}.")
    console.print(_labelled([(known.status, known.source)]))


def _labelled(lines: Iterable[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 1, 0, 0))
    for label, line in lines:
        grid.add_row(Text(label, style="dim"), line)
    return grid


def print_probed(console: Console, probed: Probed) -> None:
    """Print the probed machine with the source of each figure, the measured rates, and where the shipped file differs."""
    print_machine(console, probed.machine)
    console.print()
    table = new_table("measured: copies of 256 MiB", "rate", "peer access")
    table.columns[-1].justify = "left"
    table.add_row("within GPU 0, read and written", format_rate(probed.measured.hbm_copy_bytes_per_s), "")
    for peer in probed.measured.peers:
        access = "no: through the host" if not peer.has_access else "with atomics" if peer.has_native_atomics else "yes"
        table.add_row(f"GPU {peer.source} to {peer.destination}", format_rate(peer.copy_bytes_per_s), access)
    if probed.measured.all_peers_bytes_per_s is not None:
        table.add_row("GPU 0 to all others at once", format_rate(probed.measured.all_peers_bytes_per_s), "")
    console.print(table)
    console.print()
    if not probed.differences:
        console.print(f"No figure differs from machine '{probed.shipped}'.")
        return
    table = new_table(f"differs from '{probed.shipped}'", "shipped", "found")
    for entry in probed.differences:
        table.add_row(entry.figure, format_figure(entry.shipped), format_figure(entry.found))
    console.print(table)
