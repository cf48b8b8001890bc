"""The command `plan`: reads and compares plan files, and writes them for other programs, without running anything."""

from pathlib import Path

import click

from counterpoint.cli.options import FILE, Group, argument, json_option, output_option
from counterpoint.errors import CounterpointError, say, shown
from counterpoint.value import check_outputs, save_text, write_json


@click.group(cls=Group)
def plan() -> None:
    """Show plan files, compare two, or export one for another program."""


@plan.command(examples=("counterpoint plan show plan.toml",))
@argument("file", metavar="FILE", type=FILE, help="A plan that `tune` or `run` saved (.toml).")
@json_option
def show(file: Path, is_json: bool) -> None:
    """Print a plan in words, and how to apply it.

    This prints the verdict, where the plan comes from, and what each directive changes and why.
    """
    from counterpoint.plan import load_plan  # noqa: PLC0415  a fast --help
    from counterpoint.report.plan import print_plan_file, print_to_apply  # noqa: PLC0415
    from counterpoint.report.refusals import print_left_out  # noqa: PLC0415
    from counterpoint.report.text import new_console  # noqa: PLC0415
    from counterpoint.report.to_apply import PlanOrigin, ways_to_apply  # noqa: PLC0415

    found = load_plan(file)
    ways = ways_to_apply(found, PlanOrigin(file=str(file), is_captured=True))
    if is_json:
        print(write_json({"plan": found, "to_apply": ways}))
        return
    console = new_console()
    print_plan_file(console, found)
    print_to_apply(console, ways)
    print_left_out(console, found)


@plan.command(examples=("counterpoint plan diff before.toml after.toml",))
@argument("first", metavar="A", type=FILE, help="A plan (.toml).")
@argument("second", metavar="B", type=FILE, help="Another plan (.toml).")
@json_option
def diff(first: Path, second: Path, is_json: bool) -> None:
    """Print the differences between two plans.

    This prints what B changes of A, what only A has, and what only B has. The exit code is 0 either way.
    """
    from counterpoint.plan import load_plan  # noqa: PLC0415
    from counterpoint.report.plan import compare_plans, print_diff  # noqa: PLC0415
    from counterpoint.report.text import new_console  # noqa: PLC0415

    found = compare_plans(load_plan(first), load_plan(second))
    if is_json:
        print(write_json(found))
        return
    print_diff(new_console(), (str(first), str(second)), found)


@plan.command(examples=("counterpoint plan export plan.toml --nccl-tuner -o nccl.csv",))
@argument("file", metavar="FILE", type=FILE, help="A plan (.toml).")
@click.option("--nccl-tuner", is_flag=True, help="Write the CSV file of the example tuner plugin in NCCL's sources.")
@output_option("The file to write (.csv).  [default: standard output]")
@click.option("--step", metavar="STEP", help="The trace that the plan was made from. It gives the sizes.")
@click.option(
    "--algorithm",
    metavar="NAME",
    default="ring",
    show_default=True,
    help="For every line: tree, ring, collnet_direct, collnet_chain, nvls, nvls_tree or pat.",
)
@click.option("--protocol", metavar="NAME", default="simple", show_default=True, help="For every line: ll, ll128 or simple.")
def export(file: Path, *, nccl_tuner: bool, output: Path | None, step: str | None, algorithm: str, protocol: str) -> None:
    """Write a plan for NCCL's tuner plugin, to be used without Counterpoint.

    The file holds the CTAs that the plan gives collectives, by kind and size. The plan does not choose --algorithm and
    --protocol. Their defaults are what NCCL takes for large collectives without NVLink SHARP.
    """
    from counterpoint.job import load_job  # noqa: PLC0415  a fast --help
    from counterpoint.plan import load_plan  # noqa: PLC0415
    from counterpoint.report.nccl_tuner import ALGORITHMS, PROTOCOLS, TUNER, tuner_file  # noqa: PLC0415

    if not nccl_tuner:
        raise CounterpointError("No export format was given. Add --nccl-tuner.")
    chosen = next((each for each in ALGORITHMS if each == algorithm), None)
    wire = next((each for each in PROTOCOLS if each == protocol), None)
    if chosen is None or wire is None:
        what, wrong, known = ("algorithm", algorithm, ALGORITHMS) if chosen is None else ("protocol", protocol, PROTOCOLS)
        raise CounterpointError(f"NCCL has no {what} '{shown(wrong)}'. Give one of {', '.join(known)}.")
    check_outputs(((output, TUNER),), inputs=(file,))
    found = tuner_file(load_plan(file), load_job(step).step if step is not None else None)
    text = found.written(chosen, wire)
    if output is None:
        print(text, end="")
    else:
        save_text(output, text, TUNER, CounterpointError)
    for line in found.left_out:
        say(f"not in the file: {line}")
