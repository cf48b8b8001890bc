"""Prints `counterpoint simulate --cluster` and `counterpoint sweep`. Nothing is computed here but shares."""

from rich.console import Console
from rich.text import Text

from counterpoint.cluster.description import Configuration
from counterpoint.cluster.estimate import ClusterEstimate
from counterpoint.errors import printable
from counterpoint.report.text import bullets, new_table
from counterpoint.sim.calibration import load_calibration
from counterpoint.units import format_bytes, format_percent, format_rate, format_us

NEVER_COMPARED = "Simulated; never compared with hardware by this project."
PARTS = (
    ("computation", "compute_us"),
    ("exposed in passes", "tensor_exposed_us"),
    ("pipeline bubble", "bubble_us"),
    ("exposed data-parallel", "data_exposed_us"),
    ("optimizer", "optimizer_us"),
    ("skew of ranks", "skew_us"),
)


def assumptions(configuration: Configuration) -> list[str]:
    """Return the assumptions of an estimate, one sentence each."""
    fabric, software, skew = configuration.fabric, configuration.software, configuration.skew
    device = load_calibration(fabric.machine).device_name
    found = [NEVER_COMPARED + " Its errors on published step times: benchmarks/results/cluster_accuracy.json."]
    if device not in fabric.machine.device_names:
        found.append(f"Constants of kernels and links inside a node come from {device}, scaled to this GPU's figures.")
    for level in fabric.levels if fabric.cluster.num_nodes > 1 else ():
        rate = format_rate(level.bytes_per_s / level.oversubscription)
        found.append(
            f"{level.name}: {level.num_nodes:,} nodes, {rate} per rail, {level.efficiency:.0%} of it reached, "
            f"{level.latency_us:g} us; source: {level.source}."
        )
    if fabric.cluster.num_nodes > 1:
        found.append(fabric.rails_in_words)
    found.append(
        "All ranks of a stage are assumed equal, so one of each is simulated; equal layers and micro-batches are "
        "simulated once."
    )
    if software.host_us_per_operation:
        found.append(f"The host issues one operation per {software.host_us_per_operation:g} us ({software.source}).")
    else:
        found.append("The host keeps ahead of the GPU (host_us_per_operation = 0).")
    if not skew.sigma and not skew.slow_ranks:
        found.append("No rank is slower than another ([skew] is not given).")
    return found


def print_estimate(console: Console, configuration: Configuration, estimate: ClusterEstimate) -> None:
    """Print one step: what it is, how long it takes, and what that consists of."""
    sizes, fabric = configuration.parallelism, configuration.fabric
    console.print(
        Text(f"{printable(fabric.cluster.name)}: {fabric.num_gpus:,} GPUs, {fabric.cluster.num_nodes:,} nodes", "bold")
    )
    console.print(Text(f"of {fabric.machine.title}"))
    console.print(
        Text(
            f"tensor {sizes.tensor}, pipeline {sizes.pipeline} ({sizes.schedule}), context {sizes.context}, expert "
            f"{sizes.expert}, data {estimate.data_size} ({sizes.sharding}); {estimate.num_micro_batches:,} micro-batches; "
            f"{configuration.model.num_parameters / 1e9:.4g} billion parameters"
        )
    )
    console.print(bullets(Text(printable(line), style="dim") for line in assumptions(configuration)))
    console.print()
    table = new_table("step", "time", "share")
    table.add_row("whole step", format_us(estimate.step_us), "")
    for name, field in PARTS:
        part = getattr(estimate, field)
        table.add_row(f"  {name}", format_us(part), format_percent(part / estimate.step_us))
    console.print(table)
    memory = format_bytes(estimate.memory_bytes)
    room = format_bytes(fabric.machine.gpu.hbm_bytes)
    console.print(
        Text(
            f"{estimate.tokens_per_s_per_gpu:,.0f} tokens/s per GPU, {format_percent(estimate.model_flops_utilization)} "
            f"model FLOPs utilization; about {memory} of {room} memory{'' if estimate.fits_memory else ': it does not fit'}"
        )
    )
    for label in estimate.controls_in_force:
        console.print(Text(f"in force: {printable(label)}"))
