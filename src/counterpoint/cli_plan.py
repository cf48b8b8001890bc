"""The command line's part for `plan`: plan files read and compared, without running anything."""

from pathlib import Path
from typing import Annotated

import typer

from counterpoint.value import write_json

plan = typer.Typer(help="Look at plan files, or compare two.", rich_markup_mode=None)
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
