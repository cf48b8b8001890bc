"""The commands that simulate clusters: `simulate --cluster` and `sweep`."""

from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import click

from counterpoint.cli.options import FILE, Command, argument, file_option, json_option, output_option
from counterpoint.errors import CounterpointError, shown, shown_path
from counterpoint.value import check_outputs, write_json

if TYPE_CHECKING:
    from counterpoint.job import Job

cluster_option = file_option(
    "--cluster",
    help="Nodes, switches, and a model with its parallel sizes (.toml). With STEP: extend STEP to that cluster.  "
    "[default: one node]",
)
ranks_option = click.option(
    "--ranks", type=int, metavar="N", help="With --cluster: extend STEP to this many ranks.  [default: the ranks of STEP]"
)


def check_cluster(step: str | None, cluster: Path | None, machine: str | None, ranks: int | None) -> None:
    """Raise `CounterpointError` for options that cannot be combined."""
    if cluster is None and step is None:
        raise CounterpointError("simulate needs a STEP, or --cluster FILE that describes a model. Name one of them.")
    if cluster is None and ranks is not None:
        raise CounterpointError(f"--ranks {ranks} needs --cluster FILE, which describes nodes and switches. Add it.")
    if cluster is not None and machine is not None:
        _check_same_machine(cluster, machine)
    if step is None and ranks is not None:
        raise CounterpointError(f"--ranks {ranks} is for a STEP; the cluster file's own model has all GPUs. Leave it out.")


def _check_same_machine(cluster: Path, machine: str) -> None:
    from counterpoint.cluster.description import load_cluster  # noqa: PLC0415  a fast --help
    from counterpoint.machine import load_machine  # noqa: PLC0415

    named = load_cluster(cluster).cluster.machine
    if load_machine(machine) != load_machine(named):
        raise CounterpointError(
            f"The machine of {shown_path(cluster)} is '{shown(named)}', and --machine names '{shown(machine)}'. Leave "
            "--machine out, or change the cluster file."
        )


def extended_job(
    step: str, cluster: Path, ranks: int | None, calibration: Path | None = None
) -> "tuple[Job, tuple[str, ...]]":
    """Return the step on the cluster, and remarks: what reading its trace noted, and the assumptions.

    A step that is not changed keeps its trace, which holds these notes.
    """
    from counterpoint.cluster.description import load_cluster  # noqa: PLC0415  a fast --help
    from counterpoint.cluster.extend import extend_step  # noqa: PLC0415
    from counterpoint.job import Job, load_job  # noqa: PLC0415

    described = load_cluster(cluster).cluster
    instead = f"Name a machine of that GPU as machine in [cluster] of {shown_path(cluster)}"
    job = load_job(step, described.machine, instead=instead).to_simulate(calibration)
    extended = extend_step(job.step, described.load(), ranks)
    if not extended.is_changed:
        return job, extended.assumptions
    notes = job.traced.notes if job.traced is not None else ()
    return Job(step=extended.step, machine=job.machine), (*notes, *extended.assumptions)


def simulate_model(cluster: Path, for_steps: tuple[Path | None, ...], is_json: bool) -> None:
    """Estimate the step that a cluster file describes, and print it; `for_steps` are files of options that a STEP needs."""
    from counterpoint.cluster.description import load_cluster  # noqa: PLC0415
    from counterpoint.cluster.estimate import estimate_step  # noqa: PLC0415
    from counterpoint.report.cluster import assumptions, print_estimate  # noqa: PLC0415
    from counterpoint.report.text import new_console  # noqa: PLC0415

    for path in for_steps:
        if path is not None:
            raise CounterpointError(
                f"'{shown_path(path)}' is for a STEP: --plan, --calibration and --timeline do not go with a described "
                "model. Name a STEP; a model's controls stand in [training], its calibration in the machine file."
            )
    configuration = load_cluster(cluster).configuration()
    estimate = estimate_step(configuration)
    if is_json:
        print(write_json({"estimate": estimate, "assumptions": assumptions(configuration)}))
    else:
        print_estimate(new_console(), configuration, estimate)


@click.command(cls=Command, examples=("counterpoint sweep cluster.toml -o rows.csv --plot front.svg",))
@argument("file", metavar="FILE", type=FILE, help="A cluster file whose [sweep] section lists the values to try (.toml).")
@output_option("Save every row (.csv, .parquet). An interrupted sweep continues from this file.  [default: none]")
@click.option(
    "--ray", metavar="ADDRESS", help="Run on this Ray cluster, as in host:6379.  [default: the cores of this machine]"
)
@file_option("--plot", help="Draw all estimates and the front (.svg, .png, .pdf).  [default: none]")
@json_option
def sweep(file: Path, output: Path | None, ray: str | None, plot: Path | None, is_json: bool) -> None:
    """Estimate many parallel sizes and controls on described clusters.

    Every combination of parallel sizes, micro-batches, controls and machines in FILE is estimated. The front is printed: the
    combinations that no other beats in tokens per second and GPU, in memory, and in number of GPUs.
    """
    from counterpoint.cluster.sweep import front, run_sweep  # noqa: PLC0415  a fast --help
    from counterpoint.cluster.sweep_file import load_sweep  # noqa: PLC0415
    from counterpoint.cluster.sweep_store import ROWS, SweepStore, check_store  # noqa: PLC0415
    from counterpoint.report.plots import PLOT, check_plot  # noqa: PLC0415
    from counterpoint.report.sweep import draw_front, print_sweep, tell_progress  # noqa: PLC0415
    from counterpoint.report.text import ProgressLine, new_console  # noqa: PLC0415

    check_outputs(((output, ROWS), (plot, PLOT)), inputs=(file,))
    if output is not None:
        check_store(output)
    if plot is not None:
        check_plot()
    described = load_sweep(file)
    store = SweepStore(output)
    with ProgressLine(is_shown=not is_json) as show:
        rows = run_sweep(described, store, ray_address=ray, on_rows=tell_progress(show, monotonic))
    store.finish(rows)
    best = front(rows)
    if plot is not None:
        draw_front(rows, best, plot)
    if is_json:
        print(write_json(best))
        return
    print_sweep(new_console(), described, rows, best)
    for path, what in ((output, "Rows"), (plot, "Plot")):
        if path is not None:
            print(f"{what} saved to {path}.")
