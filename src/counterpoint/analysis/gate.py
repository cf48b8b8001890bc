"""A gate for continuous integration: conditions on the figures of an analysis, alone or against a saved one.

    exposed > 5%              of the step
    exposed > 3 ms            per step
    starved > 1%              exposed time of one cause
    overlap < 80%             share of the communication that computation hides
    step > baseline + 3%      longer than in the baseline by more than 3 %, and by more than the spread of both

A condition states what fails. A figure that differs from the baseline's by less than the wider spread of the steady steps is
noise, and does not fail the gate.
"""

import operator
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal, get_args

import msgspec

from counterpoint.analysis.logged import is_logged
from counterpoint.analysis.values import SCHEMA, Analysis, Cause, StepFigures, spread_of, steady_steps
from counterpoint.errors import AnalysisError, shown, shown_path
from counterpoint.files import read_limited
from counterpoint.units import format_percent, format_us
from counterpoint.value import Value, decode_json, json_output, require

ANALYSIS = json_output("analysis", "schema", "ranks", "headline")
Unit = Literal["share", "us"]
SHARES_ONLY = ("overlap",)
CAUSES: Final[tuple[str, ...]] = get_args(Cause)
METRICS = ("step", "communication", "exposed", "overlap", "idle", "launch_bound", *CAUSES)
COMPARED: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}
UNITS: dict[str, tuple[Unit, float]] = {"%": ("share", 0.01), "us": ("us", 1.0), "ms": ("us", 1e3), "s": ("us", 1e6)}
METRIC = r"(?P<metric>\w+(?:[ -]\w+)*)"
NUMBER = r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>%|us|ms|s)"
CONDITION = re.compile(
    rf"\s*{METRIC}\s*(?P<sign>[<>]=?)\s*(?:(?P<baseline>baseline)\s*(?:(?P<direction>[+-])\s*)?)?(?:{NUMBER})?\s*"
)


class Condition(Value, frozen=True, kw_only=True):
    """A condition that fails the gate: compares `metric` with `limit`, or with the baseline's figure changed by `limit`.

    `limit` is a share (of the step; of the baseline's figure if `is_relative`) or microseconds, as `unit` says.
    """

    text: str
    metric: str
    sign: str
    limit: float = 0.0
    unit: Unit = "share"
    is_relative: bool = False

    @property
    def is_share(self) -> bool:
        """Whether the metric is compared as a share, not as a time."""
        return self.metric in SHARES_ONLY or (self.unit == "share" and not self.is_relative)


def parse_condition(text: str) -> Condition:
    """Read a condition. Raises `AnalysisError` if the text is not a condition."""
    found = CONDITION.fullmatch(text)
    if found is None or not (found["number"] or found["baseline"]) or bool(found["direction"]) > bool(found["number"]):
        raise AnalysisError(
            "--fail-if takes conditions such as 'exposed > 5%', 'exposed > 3 ms' or 'step > baseline + 3%'; "
            f"found '{shown(text)}'."
        )
    metric = re.sub("[ -]", "_", found["metric"])  # reports print "slow rank" and "launch-bound"
    require(metric in METRICS, AnalysisError, f"--fail-if can check {', '.join(METRICS)}; found '{shown(metric)}'.")
    require(
        not (found["baseline"] and found["number"]) or bool(found["direction"]),
        AnalysisError,
        f"--fail-if needs + or - between baseline and the allowed change; found '{shown(text)}'.",
    )
    unit, scale = UNITS[found["unit"]] if found["unit"] else ("share", 1.0)
    if (metric in SHARES_ONLY and unit == "us") or (metric == "step" and unit == "share" and not found["baseline"]):
        wanted = "a share in %" if metric in SHARES_ONLY else "a time, such as 120 ms, or baseline + 3%"
        raise AnalysisError(f"--fail-if compares {metric} with {wanted}; found '{shown(text)}'.")
    limit = float(found["number"] or 0) * scale * (-1 if found["direction"] == "-" else 1)
    return Condition(
        text=text.strip(), metric=metric, sign=found["sign"], limit=limit, unit=unit, is_relative=bool(found["baseline"])
    )


def violations(analysis: Analysis, conditions: Sequence[Condition], baseline: Analysis | None = None) -> tuple[str, ...]:
    """Return one sentence for each condition that holds, with the figures. Raises `AnalysisError` if a baseline is missing.

    Logs of NCCL Inspector hold no steps, and figures of some traces cannot be trusted, so no condition can be checked on
    them: this raises `AnalysisError`, too.
    """
    if not conditions:
        return ()
    compared = [each for each in (analysis, baseline) if each is not None]
    logged = next((each for each in compared if is_logged(each.ranks)), None)
    if logged is not None:
        raise AnalysisError(
            "--fail-if needs profiler traces, because NCCL Inspector's logs hold no steps; found "
            f"{logged.ranks[0].path}. Give traces, or leave --fail-if out."
        )
    wrong = next((rank for each in compared for rank in each.ranks if rank.untrusted), None)
    if wrong is not None:
        raise AnalysisError(f"--fail-if cannot judge {wrong.path}: {wrong.untrusted}")
    mixed = next((each for each in compared if each.untrusted), None)
    if mixed is not None:
        raise AnalysisError(f"--fail-if cannot judge these traces: {mixed.untrusted}")
    partial = next((each for each in compared if each.left_out), None)
    if partial is not None:
        raise AnalysisError(f"--fail-if needs traces of one job, each rank once. {partial.left_out[0]}")
    return tuple(filter(None, (_violation(analysis, each, baseline) for each in conditions)))


def load_baseline(path: Path | str) -> Analysis:
    """Read a file that `analyze -o` saved. Raises `AnalysisError`."""
    content = bytes(read_limited(path, AnalysisError, "give a file that `counterpoint analyze -o` saved"))
    what, remedy = f"{shown_path(path)} is not a saved analysis", "Save one with analyze -o."
    schema = decode_json(content, _Versioned, AnalysisError, what, remedy).schema
    require(
        schema == SCHEMA,
        AnalysisError,
        f"{shown_path(path)} has the schema '{shown(schema)}', but this version reads '{SCHEMA}'. Save it again.",
    )
    return decode_json(content, Analysis, AnalysisError, what, remedy)


class _Versioned(msgspec.Struct):
    schema: str


def _violation(analysis: Analysis, condition: Condition, baseline: Analysis | None) -> str:
    found, spread = _figure(analysis, condition)
    limit, compared_with = condition.limit, ""
    if condition.is_relative:
        if baseline is None:
            raise AnalysisError(f"'{shown(condition.text)}' needs a saved analysis to compare with. Add --baseline FILE.")
        before, before_spread = _figure(baseline, condition)
        is_factor = condition.unit == "share" and condition.metric not in SHARES_ONLY
        limit = before * (1 + condition.limit) if is_factor else before + condition.limit
        compared_with = f", in the baseline {_shown(condition, before)}"
        wants_change = limit != before and COMPARED[condition.sign](before, limit)  # the baseline itself would fail
        if abs(found - before) <= max(spread, before_spread) and not wants_change:
            return ""
    if not COMPARED[condition.sign](found, limit):
        return ""
    return f"{condition.text}: {condition.metric} is {_shown(condition, found)}{compared_with}"


def _figure(analysis: Analysis, condition: Condition) -> tuple[float, float]:
    """Return the metric in the condition's unit, and the half-width of the steady steps' middle half (0 for one cause)."""
    if condition.metric in CAUSES:
        time_us = sum(total.exposed_us for total in analysis.causes if total.cause == condition.metric)
        return _in_unit(condition, time_us, analysis.step_us), 0.0
    values = [_of_step(step, condition) for step in steady_steps(analysis.ranks)]
    return _of_all(analysis, condition), spread_of(values)


def _of_step(step: StepFigures, condition: Condition) -> float:
    if condition.metric == "overlap":
        return step.overlap_ratio or 0.0
    time_us = step.makespan_us if condition.metric == "step" else float(getattr(step, f"{condition.metric}_us"))
    return _in_unit(condition, time_us, step.makespan_us)


def _of_all(analysis: Analysis, condition: Condition) -> float:
    if condition.metric == "overlap":
        return analysis.overlap_ratio if analysis.overlap_ratio is not None else 1.0
    return _in_unit(condition, float(getattr(analysis, f"{condition.metric}_us")), analysis.step_us)


def _in_unit(condition: Condition, time_us: float, step_us: float) -> float:
    """Return a time, or its share of a step, as the condition compares it."""
    return time_us / step_us if condition.is_share and step_us else time_us


def _shown(condition: Condition, value: float) -> str:
    return format_percent(value) if condition.is_share else format_us(value)
