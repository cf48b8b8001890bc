"""The command `validate`: compares predictions of a fixed set of cases with measurements, or measures the set again."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from counterpoint.cli.options import FILE, Command, argument, json_option, output_option
from counterpoint.errors import CounterpointError
from counterpoint.value import check_outputs, write_json

if TYPE_CHECKING:
    from counterpoint.validation.outcome import Outcome


@click.command(
    cls=Command,
    examples=(
        "counterpoint validate",
        "torchrun --nproc-per-node 2 -m counterpoint validate --measure -o m.json",
    ),
)
@argument(
    "files",
    metavar="[FILE...]",
    nargs=-1,
    type=FILE,
    help="Measurements that --measure saved (.json).  [default: those that ship with Counterpoint]",
)
@click.option("--measure", "is_measuring", is_flag=True, help="Measure the cases on the GPUs of this machine.")
@output_option("With --measure: save after each case (.json). Cases that the file already holds are not measured again.")
@json_option
def validate(files: tuple[Path, ...], is_measuring: bool, output: Path | None, is_json: bool) -> None:
    """Compare predictions with measurements of a fixed set of cases.

    No constant of the simulator was fitted to these cases. Without --measure no GPU is used.
    """
    if not is_measuring:
        if output is not None:
            raise CounterpointError("-o is where --measure writes its measurements. Add --measure, or leave -o out.")
        _show(files, is_json)
        return
    if files:
        raise CounterpointError(f"--measure takes no FILE to compare with; found {files[0]}. Name its output with -o.")
    if output is None:
        raise CounterpointError("--measure needs a file to write: add -o NAME.json.")
    from counterpoint.cuda.ranks import run_and_leave  # noqa: PLC0415
    from counterpoint.validation.records import MEASURED  # noqa: PLC0415

    check_outputs(((output, MEASURED),))
    run_and_leave(lambda: _measure(output, is_json))


def _measure(output: Path, is_json: bool) -> None:
    from counterpoint.cuda.ranks import join_ranks  # noqa: PLC0415

    rank = join_ranks("Without GPUs, counterpoint validate compares with the measurements that ship with it.")
    from counterpoint.validation.on_gpu import measure_set  # noqa: PLC0415
    from counterpoint.validation.records import save_measured  # noqa: PLC0415

    measure_set(output, lambda measured: save_measured(measured, output) if rank == 0 else None)
    if rank == 0:
        _show((output,), is_json)


def _show(files: tuple[Path, ...], is_json: bool) -> None:
    from counterpoint.report.text import ProgressLine, new_console  # noqa: PLC0415
    from counterpoint.report.validation import print_validation  # noqa: PLC0415
    from counterpoint.validation.outcome import validate_files  # noqa: PLC0415
    from counterpoint.validation.records import shipped_measurements  # noqa: PLC0415

    paths = files or shipped_measurements()
    found: list[Outcome] = []
    with ProgressLine() as show:
        for path in paths:
            show(f"predicting the cases of {path.name}, file {len(found) + 1} of {len(paths)}")
            found += validate_files([path])
    if is_json:
        print(write_json(found))
        return
    print_validation(new_console(), found)
