"""One measured figure with its spread and its conditions: the data of a calibration."""

import statistics
from collections.abc import Sequence

import msgspec

from counterpoint.value import Value


class Point(Value, frozen=True, kw_only=True):
    """A median and its spread. The unit is the suffix of `name`; a name without suffix is a count or a share.

    `at` says what was varied (bytes, CTAs, ranks, ...). `spread` is the half-width of the middle half of the repetitions,
    relative to the median.
    """

    name: str
    value: float
    spread: float = 0.0
    at: dict[str, int | float | str] = msgspec.field(default_factory=dict)


def point(name: str, values: Sequence[float], **at: float | str) -> Point:
    """Return the median of repetitions, to six digits, with their spread."""
    median = statistics.median(values)
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else (median,) * 3
    spread = abs((upper - lower) / 2 / median) if median else 0.0
    return Point(name=name, value=float(f"{median:.6g}"), spread=round(spread, 4), at=dict(at))
