"""The command line's part for `plan`: plan files read, compared and written for others, without running anything."""

from pathlib import Path
from typing import Annotated

import typer

from counterpoint.errors import CounterpointError, say, shown
from counterpoint.value import check_outputs, write_json, write_whole

plan = typer.Typer(help="Look at plan files, compare two, or write one for another program.", rich_markup_mode=None)
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]


@plan.command(short_help="Print a plan in words, and how to apply it.")
def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A plan (.toml) that `tune` or `run` saved.")],
    json: JsonOption = False,
) -> None:
    """Print the plan in FILE: verdict, where it comes from, what each directive changes and why, and how to apply it."""
    from counterpoint.plan import load_plan  # noqa: PLC0415  a fast --help
    from counterpoint.report.plan import print_plan_file, print_to_apply  # noqa: PLC0415
    from counterpoint.report.text import new_console  # noqa: PLC0415
    from counterpoint.report.to_apply import PlanOrigin, ways_to_apply  # noqa: PLC0415

    found = load_plan(file)
    ways = ways_to_apply(found, PlanOrigin(file=str(file), is_captured=True))
    if json:
        print(write_json({"plan": found, "to_apply": ways}))
        return
    console = new_console()
    print_plan_file(console, found)
    print_to_apply(console, ways)


@plan.command(short_help="Print in what two plans differ.")
def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="A plan (.toml).")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another plan (.toml).")],
    json: JsonOption = False,
) -> None:
    """Print what B says otherwise than A, what only A has, and what only B has; the exit code is 0 either way."""
    from counterpoint.plan import load_plan  # noqa: PLC0415
    from counterpoint.report.plan import compare_plans, print_diff  # noqa: PLC0415
    from counterpoint.report.text import new_console  # noqa: PLC0415

    found = compare_plans(load_plan(first), load_plan(second))
    if json:
        print(write_json(found))
        return
    print_diff(new_console(), (str(first), str(second)), found)


@plan.command(short_help="Write a plan for NCCL's tuner plugin, to be used without Counterpoint.")
def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A plan (.toml).")],
    *,
    nccl_tuner: Annotated[
        bool, typer.Option("--nccl-tuner", help="As the CSV file of the example tuner plugin in NCCL's sources.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="CSV", help="Where to write it.  [default: standard output]")
    ] = None,
    step: Annotated[
        str | None, typer.Option("--step", metavar="STEP", help="The trace that the plan was made from, for its sizes.")
    ] = None,
    algorithm: Annotated[
        str,
        typer.Option("--algorithm", help="For every line: tree, ring, collnet_direct, collnet_chain, nvls, nvls_tree, pat."),
    ] = "ring",
    protocol: Annotated[str, typer.Option("--protocol", help="For every line: ll, ll128, simple.")] = "simple",
) -> None:
    """Write the CTAs that the plan in FILE gives collectives, by kind and size. The plan does not choose --algorithm and
    --protocol: the defaults are what NCCL takes for large collectives without NVLink SHARP.
    """
    from counterpoint.job import load_job  # noqa: PLC0415  a fast --help
    from counterpoint.plan import load_plan  # noqa: PLC0415
    from counterpoint.report.nccl_tuner import ALGORITHMS, PROTOCOLS, tuner_file  # noqa: PLC0415

    if not nccl_tuner:
        raise CounterpointError("As what is the plan to be written? Add --nccl-tuner.")
    chosen = next((each for each in ALGORITHMS if each == algorithm), None)
    wire = next((each for each in PROTOCOLS if each == protocol), None)
    if chosen is None or wire is None:
        wrong, known = (algorithm, ALGORITHMS) if chosen is None else (protocol, PROTOCOLS)
        raise CounterpointError(f"NCCL has no '{shown(wrong)}'. Give one of {', '.join(known)}.")
    check_outputs((output,), inputs=(file,))
    found = tuner_file(load_plan(file), load_job(step).step if step is not None else None)
    text = found.written(chosen, wire)
    if output is None:
        print(text, end="")
    else:
        write_whole(output, text.encode())
    for line in found.left_out:
        say(f"not in the file: {line}")
