"""Error figures of predictions against measurements: errors, signs, ranks and regret, also for naive models."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from counterpoint.measurement.values import NEGLIGIBLE
from counterpoint.paper.accuracy import rank_correlation
from counterpoint.paper.values import PLAIN
from counterpoint.value import Value

CLEAR_CHANGE = 0.03  # share of plain overlap's time: the sign of a measured change of this size must be predicted
SAME = 0.01  # a smaller change counts as none
Model = Literal["simulator", "sum", "maximum", "best constant"]
MODELS: tuple[Model, ...] = get_args(Model)


class PredictedRow(Value, frozen=True, kw_only=True):
    """One variant of one case, measured and predicted, in microseconds. Rows of one `group` were measured together.

    The `baseline_us` fields are the times of plain overlap in the group, measured in the same rounds. `sum_us` and
    `longest_us` are of the operations alone: one after the other, and along the longest path of dependencies.
    """

    group: str
    family: str
    label: str
    measured_us: float
    measured_baseline_us: float
    predicted_us: float
    predicted_baseline_us: float
    sum_us: float
    longest_us: float
    spread: float

    @property
    def error(self) -> float:
        """Predicted over measured time, minus one."""
        return self.predicted_us / self.measured_us - 1

    @property
    def measured_change(self) -> float:
        """The measured change against plain overlap, as a fraction; it is negative if the variant is faster."""
        return self.measured_us / self.measured_baseline_us - 1

    @property
    def predicted_change(self) -> float:
        """The predicted change against plain overlap, as a fraction; it is negative if the variant is faster."""
        return self.predicted_us / self.predicted_baseline_us - 1


class Figures(Value, frozen=True, kw_only=True):
    """The accuracy of one model; all figures are fractions, and None if nothing can be stated.

    `same_sign`: the share of all changes that are predicted as measured: faster, slower, or within 1 %. `clear_sign`: the
    share of measured changes of 3 % or more whose direction is predicted. `rank_correlation`: Spearman's, over the variants
    of one case; the median of the cases whose best and worst variants differ by 3 % or more. Times that differ by less than
    1 % are ties, because a plan that is measured twice differs by as much. `regret`: how much longer the variant that is
    predicted as fastest takes than the best one.
    """

    model: Model
    num_rows: int
    num_groups: int
    mean_error: float
    p90_error: float
    bias: float
    same_sign: float | None
    num_clear: int
    clear_sign: float | None
    rank_correlation: float | None
    mean_regret: float
    worst_regret: float


def figures_of(rows: Sequence[PredictedRow], model: Model = "simulator") -> Figures:
    """Return the figures of one model; naive models know no control, so all variants of a case are equal to them."""
    if model != "simulator":
        share = {"sum": 1.0, "maximum": 0.0}.get(model)
        exposed_share = best_constant(rows) if share is None else share
        rows = [_by_naive_model(row, exposed_share) for row in rows]
    errors = np.array([row.error for row in rows])
    changed = [row for row in rows if row.label != PLAIN]
    clear = [row for row in changed if abs(row.measured_change) >= CLEAR_CHANGE]
    groups = _groups(rows)
    regrets = [_regret(group) for group in groups.values()]
    correlations = [found for group in groups.values() if (found := _correlation(group)) is not None]
    return Figures(
        model=model,
        num_rows=len(rows),
        num_groups=len(groups),
        mean_error=float(np.mean(np.abs(errors))),
        p90_error=float(np.quantile(np.abs(errors), 0.9)),
        bias=float(np.mean(errors)),
        same_sign=_share(changed, lambda row: _sign(row.measured_change) == _sign(row.predicted_change)),
        num_clear=len(clear),
        clear_sign=_share(clear, lambda row: row.measured_change * row.predicted_change > 0),
        rank_correlation=float(np.median(correlations)) if correlations else None,
        mean_regret=float(np.mean(regrets)),
        worst_regret=float(np.max(regrets)),
    )


def _by_naive_model(row: PredictedRow, share: float) -> PredictedRow:
    predicted_us = row.longest_us + share * (row.sum_us - row.longest_us)
    return msgspec.structs.replace(row, predicted_us=predicted_us, predicted_baseline_us=predicted_us)


def best_constant(rows: Sequence[PredictedRow]) -> float:
    """Return the exposed share of what could be hidden, fitted to these same rows: no constant can predict better."""
    measured, total, longest = (
        np.array([getattr(row, name) for row in rows]) for name in ("measured_us", "sum_us", "longest_us")
    )
    shares = np.linspace(0.0, 1.5, 151)
    errors = [np.mean(np.abs((longest + share * (total - longest)) / measured - 1)) for share in shares]
    return float(shares[int(np.argmin(errors))])


def _groups(rows: Sequence[PredictedRow]) -> Mapping[str, list[PredictedRow]]:
    groups: dict[str, list[PredictedRow]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    return groups


def _share(rows: Sequence[PredictedRow], is_right: Callable[[PredictedRow], bool]) -> float | None:
    return sum(map(is_right, rows)) / len(rows) if rows else None


def _sign(change: float) -> int:
    return 0 if abs(change) < SAME else 1 if change > 0 else -1


def _regret(group: Sequence[PredictedRow]) -> float:
    """Return the regret of a group; of variants that are predicted as equally good, the first is chosen."""
    least = min(row.predicted_us for row in group)
    chosen = next(row for row in group if row.predicted_us <= least * (1 + NEGLIGIBLE))
    return chosen.measured_us / min(row.measured_us for row in group) - 1


def _correlation(group: Sequence[PredictedRow]) -> float | None:
    measured, predicted = (np.array([getattr(row, name) for row in group]) for name in ("measured_us", "predicted_us"))
    if len(group) < 3 or measured.max() / measured.min() < 1 + CLEAR_CHANGE:
        return None
    found = rank_correlation(_with_ties(measured), _with_ties(predicted))
    return None if np.isnan(found) else found


def _with_ties(times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the times; those within 1 % above a shorter one are set to that one."""
    tied = times.copy()
    least = 0.0
    for place in np.argsort(times):
        least = least if times[place] < least * (1 + SAME) else times[place]
        tied[place] = least
    return tied
