"""Stores measurements of the validation set as readable files, and lists the files that ship with the project.

There is one file per machine and number of GPUs. It holds each case as captured, with the lone times of that day, and a row
for each variant. Traces are beside it, in a folder of the same name. Cases are added only on the same GPUs, with the same
versions.
"""

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import msgspec

from counterpoint.controls import Transport
from counterpoint.errors import CounterpointError, shown, shown_path
from counterpoint.files import read_limited
from counterpoint.paper.values import SumBy
from counterpoint.plan import Plan
from counterpoint.sim.costs import SUMMED_COLLECTIVES
from counterpoint.step import Collective, Step
from counterpoint.validation.cases import cases_for, set_digest
from counterpoint.value import Value, check_continued, decode_json, json_output, write_whole

MEASURED = json_output("measurements", "digest", "cases")
FOLDER = "validation/measured"
KEPT_CONDITIONS = ("gpus", "driver", "cuda", "torch", "nccl", "nvls", "rounds")  # the same for all cases of a file
Setting = Literal["captured", "eager"]


class MeasuredRow(Value, frozen=True, kw_only=True):
    """One variant: its time in microseconds, and its ratio to plain overlap in the same rounds and the same setting.

    `captured` replays a graph in which every control was verified; `eager` calls the step function. `spread` is as in
    `measurement.values.Measurement`.
    `is_identical`: the outputs were bit-identical to plain overlap's; None if outputs were not read.
    """

    label: str
    setting: Setting
    plan: Plan
    measured_us: float
    ratio: float
    spread: float
    num_rounds: int
    is_identical: bool | None = None


class MeasuredCase(Value, frozen=True, kw_only=True):
    """One case: the captured step with lone times, its rows (plain overlap first), and its trace's file name, if any.

    `sum_by`: what added the blocks of reductions by copies when it was measured.
    """

    name: str
    step: Step
    rows: tuple[MeasuredRow, ...]
    trace: str | None = None
    sum_by: SumBy = "torch"

    @property
    def comparable_rows(self) -> tuple[MeasuredRow, ...]:
        """The rows without those of a sum that nothing simulates any more."""
        return tuple(row for row in self.rows if self.sum_by == "one kernel" or not self._is_summed(row.plan))

    def _is_summed(self, plan: Plan) -> bool:
        """Return whether copies and a sum do a reduction under this plan."""
        return any(
            isinstance(operation, Collective)
            and operation.collective in SUMMED_COLLECTIVES
            and any(isinstance(control, Transport) and control.transport == "copy_engine" for control in controls)
            for operation, controls in zip(self.step.operations, plan.controls_of(self.step), strict=True)
        )


class MeasuredSet(Value, frozen=True, kw_only=True):
    """The measurements of the set, with the machine and the conditions. `digest` is the set's."""

    digest: str
    machine: str
    num_gpus: int
    conditions: dict[str, Any]
    cases: tuple[MeasuredCase, ...]

    def conditions_with(self, conditions: Mapping[str, Any]) -> dict[str, Any]:
        """Return the conditions of these cases and of more that are measured now: the latter's, with the days of both."""
        before, now = str(self.conditions.get("date", "unknown")), str(conditions["date"])
        return {**conditions, "date": before if before.endswith(now) else f"{before} and {now}"}


def load_measured(path: Path | str) -> MeasuredSet:
    """Read a file of measurements. Raises `CounterpointError` if it is of another set of cases."""
    content = bytes(read_limited(path, CounterpointError, "give a file that validate --measure -o wrote"))
    what = f"{shown_path(path)} does not hold measurements of the validation set"
    remedy = "Give a file that `counterpoint validate --measure -o` wrote."
    found = decode_json(content, MeasuredSet, CounterpointError, what, remedy)
    known = set_digest(found.num_gpus)
    if found.digest != known:
        raise CounterpointError(
            f"{shown_path(path)} was measured with another set of cases ({shown(found.digest)}; this version has {known}). "
            "Measure it anew: counterpoint validate --measure."
        )
    names = {case.name for case in cases_for(found.num_gpus)}
    for case in found.cases:
        if case.name not in names:
            raise CounterpointError(
                f"{shown_path(path)} holds cases of {found.num_gpus} GPUs, but the case '{shown(case.name)}' is not of that "
                "set. Measure it anew: counterpoint validate --measure."
            )
    return found


def load_begun(path: Path, conditions: Mapping[str, Any]) -> MeasuredSet | None:
    """Read the file that more cases are added to; None without a file.

    Raises `CounterpointError` if its cases were measured on other GPUs or with other versions than `conditions` has.
    """
    if not path.exists():
        return None
    found = load_measured(path)
    check_continued(path, KEPT_CONDITIONS, (found.conditions, conditions), "Name another file with -o")
    return found


def trace_path(measured: Path, name: str) -> Path:
    """Return the path of a case's trace, from the file of measurements that names it."""
    return measured.with_suffix("") / name


def shipped_measurements() -> list[Path]:
    """Return the files of measurements that ship with the project, sorted by name."""
    folder = Path(str(resources.files("counterpoint").joinpath(*FOLDER.split("/"))))
    return sorted(folder.glob("*.json"))


def save_measured(measured: MeasuredSet, path: Path) -> None:
    """Write a file of measurements, with one operation or row per line. Raises `OSError`."""
    head = {
        "digest": measured.digest,
        "machine": measured.machine,
        "num_gpus": measured.num_gpus,
        "conditions": measured.conditions,
    }
    cases = ",\n".join(_case_text(case) for case in measured.cases)
    write_whole(path, f'{_text(head)[:-1]},\n"cases":[\n{cases}\n]}}\n'.encode())


def _case_text(case: MeasuredCase) -> str:
    step = msgspec.to_builtins(case.step)
    operations = ",\n".join(_text(each) for each in step.pop("operations"))
    rows = ",\n".join(_text(row) for row in case.rows)
    trace = "" if case.trace is None else f'"trace":{_text(case.trace)},'
    head = f'{{"name":{_text(case.name)},{trace}"sum_by":{_text(case.sum_by)},\n"step":{_text(step)[:-1]}'
    return f'{head},"operations":[\n{operations}\n]}},\n"rows":[\n{rows}\n]}}'


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()
