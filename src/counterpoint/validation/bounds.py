"""Bounds of measured times around predicted ones; they are shown with figures of machines that were never measured.

They come from `bounds.toml`, which `python -m benchmarks.validation --write` derives from the errors of the validation set.
A span holds 90 % of the ratios of measured to predicted times: from the 5th to the 95th percentile. If a machine was never
compared with hardware, its constants are scaled from another GPU's. The error that this adds is taken from times of GPUs
whose constants were scaled likewise, and the bounds are multiplied by it.
"""

from functools import cache
from typing import Literal

from counterpoint.errors import CounterpointError
from counterpoint.machine import Machine
from counterpoint.sim.calibration import describe_origin
from counterpoint.units import format_change, format_count
from counterpoint.value import Value, read_shipped, require

Basis = Literal["captured steps", "traces", "sizes alone", "copy schedules"]
NEVER_COMPARED = "never compared with hardware"


class RatioSpan(Value, frozen=True, kw_only=True):
    """Measured over predicted times, from the 5th to the 95th percentile of so many rows; `source` names the rows."""

    low: float
    high: float
    num_rows: int
    source: str

    def __post_init__(self) -> None:
        require(0 < self.low <= self.high, CounterpointError, f"A span must rise; found {self.low} to {self.high}.")


class ComparedGpu(Value, frozen=True, kw_only=True):
    """A GPU that predictions were compared with, and the largest number of them in one comparison."""

    device_name: str
    most_gpus: int


class BoundsTable(Value, frozen=True, kw_only=True):
    """The contents of `bounds.toml`. `transfer` is of GPUs whose constants are scaled from another GPU's."""

    date: str
    compared: tuple[ComparedGpu, ...]
    bases: dict[Basis, RatioSpan]
    transfer: RatioSpan


class ErrorBounds(Value, frozen=True, kw_only=True):
    """Bounds of predicted times on one machine: a measured time is from `low` to `high` times the predicted one."""

    basis: Basis
    is_compared: bool
    low: float
    high: float
    note: str

    def around(self, predicted_us: float) -> tuple[float, float]:
        """Return the bounds of the measured time, in microseconds, around a predicted time."""
        return predicted_us * self.low, predicted_us * self.high


@cache
def bounds_table() -> BoundsTable:
    """Return the shipped table."""
    return read_shipped("validation/bounds.toml", BoundsTable, CounterpointError)


def bounds_for(machine: Machine, num_gpus: int, basis: Basis) -> ErrorBounds:
    """Return the bounds of predictions for so many GPUs of a machine, from captured steps, traces, sizes or schedules."""
    table = bounds_table()
    compared = next((gpu for gpu in table.compared if gpu.device_name in machine.device_names), None)
    span = table.bases[basis]
    name = next(iter(machine.device_names), machine.name)
    if compared is not None and num_gpus <= compared.most_gpus:
        words = f"{name}, up to {format_count(compared.most_gpus, 'GPU')}: compared with hardware"
        return _bounds(basis, span.low, span.high, words, is_compared=True)
    if compared is not None:
        words = f"{format_count(num_gpus, 'GPU')} of {name}: {NEVER_COMPARED} on more than {compared.most_gpus}"
    else:
        words = f"{name}: {NEVER_COMPARED}; {describe_origin(machine)}"
    transfer = table.transfer
    low, high = span.low * min(1.0, transfer.low), span.high * max(1.0, transfer.high)
    return _bounds(basis, low, high, words, is_compared=False)


def _bounds(basis: Basis, low: float, high: float, words: str, *, is_compared: bool) -> ErrorBounds:
    expected = f"expect measured times from {format_change(low - 1)} to {format_change(high - 1)} of these"
    return ErrorBounds(basis=basis, is_compared=is_compared, low=low, high=high, note=f"{words}; {expected}.")
