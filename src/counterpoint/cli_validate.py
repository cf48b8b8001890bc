"""The command line's part for `validate`: the fixed set of cases, predicted beside what was measured, or measured anew."""

from pathlib import Path
from typing import Annotated

import typer

from counterpoint.errors import CounterpointError
from counterpoint.value import check_outputs, write_json


def validate(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE", help="Measurements that --measure wrote.  [default: those that ship with counterpoint]"
        ),
    ] = None,
    is_measuring: Annotated[
        bool, typer.Option("--measure", help="Measure the cases on the GPUs at hand; torchrun for several.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Where --measure writes (.json), after each case; a file that holds some cases gets the others.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")] = False,
) -> None:
    """Predict a fixed set of cases that no constant was fitted to, and compare with measurements.

    Without GPUs, today's simulator is compared with the measurements that ship with the project, or with those in FILE. With
    --measure the same cases run on the GPUs at hand:
    torchrun --nproc-per-node 2 --no-python counterpoint validate --measure -o measured.json.
    """
    if not is_measuring:
        if output is not None:
            raise CounterpointError("-o is where --measure writes its measurements. Add --measure, or leave -o out.")
        _show(files, json)
        return
    if files:
        raise CounterpointError(f"--measure takes no FILE to compare with; found {files[0]}. Name its output with -o.")
    if output is None or output.suffix != ".json":
        raise CounterpointError("--measure needs a file to write: add -o NAME.json.")
    check_outputs((output,))
    from counterpoint.cuda.ranks import run_and_leave  # noqa: PLC0415

    run_and_leave(lambda: _measure(output, json))


def _measure(output: Path, is_json: bool) -> None:
    from counterpoint.cuda.ranks import join_ranks  # noqa: PLC0415

    rank = join_ranks("Without GPUs, counterpoint validate compares with the measurements that ship with it.")
    from counterpoint.validation.on_gpu import measure_set  # noqa: PLC0415
    from counterpoint.validation.records import load_measured, save_measured  # noqa: PLC0415

    known = load_measured(output).cases if output.exists() else ()
    measure_set(output, known, lambda measured: save_measured(measured, output) if rank == 0 else None)
    if rank == 0:
        _show([output], is_json)


def _show(files: list[Path] | None, is_json: bool) -> None:
    from counterpoint.report.text import new_console  # noqa: PLC0415
    from counterpoint.report.validation import print_validation  # noqa: PLC0415
    from counterpoint.validation.outcome import validate_files  # noqa: PLC0415
    from counterpoint.validation.records import shipped_measurements  # noqa: PLC0415

    found = validate_files(files or shipped_measurements())
    if is_json:
        print(write_json(found))
        return
    print_validation(new_console(), found)
