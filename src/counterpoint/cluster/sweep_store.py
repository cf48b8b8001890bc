"""The rows of a sweep on disk: CSV, to which rows are appended as they come, and Parquet, written when all are there.

A Parquet file's rows are kept beside it as CSV (`NAME.parquet.csv`) while the sweep runs. A line that was cut off by a crash
is dropped, and its combination estimated again. A file that holds rows of another sweep is refused.
"""

import csv
import io
from collections.abc import Sequence, Set
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from counterpoint.cluster.estimate import ClusterEstimate
from counterpoint.cluster.sweep_file import TABLE_OF
from counterpoint.errors import CounterpointError, MachineError, shown_path
from counterpoint.value import OutputKind, Value, write_whole

PYARROW = "pyarrow>=15,<26"
PARQUET_MAGIC = b"PAR1"
SEPARATOR = "+"  # between the controls of one combination


class SweepRow(Value, frozen=True, kw_only=True):
    """One combination: its estimate, or why there is none."""

    key: str
    point: dict[str, Any]
    estimate: ClusterEstimate | None = None
    problem: str = ""


FIGURES = tuple(ClusterEstimate.__struct_fields__)
HEADER = ("key", *TABLE_OF, *FIGURES, "problem")


def _holds_rows(content: bytes) -> bool:
    """Return whether a file holds rows of a sweep, or the start of their header, however short.

    Rows of another version are told apart when they are read.
    """
    is_parquet = content.startswith(PARQUET_MAGIC)
    return all(name.encode() in content for name in TABLE_OF) if is_parquet else b"key,".startswith(content[:4])


ROWS = OutputKind("sweep", (".csv", ".parquet"), _holds_rows)


def check_store(path: Path) -> None:
    """Raise `CounterpointError` for a file that cannot hold a sweep's rows, before anything is estimated."""
    if path.suffix.lower() == ".parquet" and find_spec("pyarrow") is None:
        raise CounterpointError(
            f"A .parquet file needs 'pyarrow', which is not installed. Install it: pip install '{PYARROW}', or name a .csv "
            "file."
        )


class SweepStore:
    """The file of one sweep; `path` None keeps nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._is_parquet = path is not None and path.suffix.lower() == ".parquet"
        self._csv = path.with_name(f"{path.name}.csv") if path is not None and self._is_parquet else path

    def read(self, keys: Set[str]) -> dict[str, SweepRow]:
        """Return the rows of the file, by key; the values of axes are text.

        Raises `MachineError` if the file is not of this sweep.
        """
        if self._csv is None or not self._csv.exists() or not self._csv.stat().st_size:
            return {}
        text = self._csv.read_text("utf-8", errors="replace")
        whole = text[: text.rfind("\n") + 1]
        # a header that was itself cut off counts as read
        cut = HEADER if ",".join(HEADER).startswith(text) else ()
        head, *lines = [tuple(line) for line in csv.reader(io.StringIO(whole))] or [cut]
        if head != HEADER:
            raise MachineError(f"{shown_path(self._csv)} holds no sweep of this version. Name another file, or remove it.")
        rows = [_row(line) for line in lines if len(line) == len(HEADER)]
        others = [row.key for row in rows if row.key not in keys]
        if others:
            raise MachineError(
                f"{shown_path(self._csv)} holds {len(others)} rows of another sweep: the sweep file, or Counterpoint, "
                "has changed. Name another file, or remove it."
            )
        if whole != text:
            write_whole(self._csv, whole.encode())
        return {row.key: row for row in rows}

    def append(self, rows: Sequence[SweepRow]) -> None:
        """Append rows to the file now. Raises `CounterpointError` if that is impossible."""
        if self._csv is None:
            return
        try:
            is_new = not self._csv.exists() or not self._csv.stat().st_size
            with self._csv.open("a", encoding="utf-8", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                if is_new:
                    writer.writerow(HEADER)
                writer.writerows(_cells(row) for row in rows)
        except OSError as problem:
            raise CounterpointError(
                f"Cannot write {shown_path(self._csv)}: {problem.strerror}. Name a file that you may write."
            ) from problem

    def finish(self, rows: Sequence[SweepRow]) -> None:
        """Write what only whole sweeps have: the Parquet file."""
        if not self._is_parquet or self._path is None or self._csv is None:
            return
        import pyarrow  # noqa: PLC0415  an extra
        from pyarrow import parquet  # noqa: PLC0415

        columns: dict[str, list[Any]] = {name: [] for name in HEADER}
        for row in rows:
            for name, cell in zip(HEADER, _values(row), strict=True):
                columns[name].append(cell)
        try:
            parquet.write_table(pyarrow.table(columns), str(self._path))
        except OSError as problem:
            raise CounterpointError(f"Cannot write {shown_path(self._path)}: {problem}. Name another file.") from problem
        self._csv.unlink(missing_ok=True)


def _values(row: SweepRow) -> list[Any]:
    """Return a row's cells in the order of the header; None where there is no figure."""
    point = [_joined(row.point.get(name)) for name in TABLE_OF]
    figures = [None if row.estimate is None else _joined(getattr(row.estimate, name)) for name in FIGURES]
    return [row.key, *point, *figures, row.problem]


def _joined(value: Any) -> Any:
    return SEPARATOR.join(value) if isinstance(value, (tuple, list)) else value


def _cells(row: SweepRow) -> list[Any]:
    return ["" if value is None else value for value in _values(row)]


def _row(line: Sequence[str]) -> SweepRow:
    """Return a row as it was appended; the values of axes stay text."""
    cells = dict(zip(HEADER, line, strict=True))
    point = {name: cells[name] for name in TABLE_OF if cells[name]}
    figures: dict[str, Any] = {name: cells[name] for name in FIGURES}
    if not figures["step_us"]:
        return SweepRow(key=cells["key"], point=point, problem=cells["problem"])
    labels = figures.pop("controls_in_force")
    figures["fits_memory"] = figures["fits_memory"] == "True"
    try:
        estimate = msgspec.convert(
            {**figures, "controls_in_force": labels.split(SEPARATOR) if labels else []}, ClusterEstimate, strict=False
        )
    except msgspec.ValidationError as problem:
        raise MachineError(f"The row of key {cells['key']} is damaged: {problem}. Remove that line.") from problem
    return SweepRow(key=cells["key"], point=point, estimate=estimate)
