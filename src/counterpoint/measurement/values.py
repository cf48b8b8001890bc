"""Measurements as values; the thresholds of what counts as faster or slower; and the summary sentence."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Literal

from counterpoint.measurement.orders import Rounds
from counterpoint.units import format_percent, format_us
from counterpoint.value import Value

# What was measured.
LEAST_GAIN = 0.005  # of the baseline: less is not worth a plan. An assumption
ERROR_RATE = 0.005  # how often a tuning may find a gain where there is none, however many candidates take part
GUARD_ERROR_RATE = 0.005  # how often a guard may take out a plan that is not slower, in the whole life of a job
# What a simulator says of one step: it has no noise, but an error (docs/simulator.md).
LEAST_SIMULATED_GAIN = 0.01  # of the makespan: less is within what simulations have missed by
LEAST_ADDED_GAIN = 0.005  # what one more control must add to a simulated plan
NEGLIGIBLE = 0.0005  # two simulated times that are as good as equal
MOST_REPLAY_ERROR = 0.05  # of the makespan: a replay that misses the traced step by more says nothing about plans
MOST_OVERLAP_DIFFERENCE = 0.10  # between a replay's overlap ratio and the traced one, for the same reason
SIMULATION_ERROR = 0.05  # about the mean over the paper's grid on 2 H200s: a candidate that loses by less is worth measuring
# What the heuristic's model says of an operator's schedule, from sizes and the machine alone (docs/heuristic.md).
LEAST_ESTIMATED_GAIN = 0.01  # chosen: by so much two runs differ (docs/heuristic.md)
NEAR_TIE = 0.005  # chosen from 0 to 1 % by the shapes that the constants were fitted to
# When a job is another than the one that was tuned.
LONGER_STEP = 0.10  # its step, as it is, takes so much longer
CHANGED_SHARE = 0.10  # so many of its launches are of other kernels or grids

Reason = Literal["proven", "not proven", "no faster", "too few rounds", "no candidate"]


class Measurement(Value, frozen=True, kw_only=True):
    """Times of one variant in microseconds, and its ratio to the baseline measured in the same rounds.

    `median_us` is over rounds, `ratio` the median of the rounds' ratios to the baseline's time, `spread` the half-width of
    the middle half of these ratios (of the baseline: of its times around their median).
    """

    label: str
    median_us: float
    least_us: float
    ratio: float
    spread: float
    num_rounds: int

    def is_faster(self) -> bool:
        """Return whether it is faster than the baseline beyond the spread. This only describes: a kept plan must be proven
        faster.
        """
        return self.ratio < 1 - self.spread

    def is_slower(self) -> bool:
        """Return whether it is slower than the baseline beyond the spread; this only describes."""
        return self.ratio > 1 + self.spread


class Verdict(Value, frozen=True, kw_only=True):
    """The result of a comparison. `chosen` is the variant that is proven faster, or 0, the baseline; `best` is the
    candidate that did best, 0 if none was faster at all. `gain` is the best's share less than the baseline, and
    `needed_gain` is what these rounds could have proven.
    """

    chosen: int
    best: int
    reason: Reason
    gain: float = 0.0
    needed_gain: float = LEAST_GAIN


class Comparison(Value, frozen=True, kw_only=True):
    """Measurements of all variants, the baseline first, and the verdict on them."""

    measurements: tuple[Measurement, ...]
    verdict: Verdict

    @property
    def chosen(self) -> int:
        """The variant to use: 0, the baseline, unless another one is proven faster."""
        return self.verdict.chosen

    def describe(self) -> str:
        """Return the verdict in one sentence, for plans and reports."""
        return describe(self.verdict, self.measurements)


class Order(Value, frozen=True, kw_only=True):
    """The variants that take turns from now on, their order, and the most rounds; rounds are counted from `first_round`."""

    number: int
    entrants: tuple[int, ...]
    seed: int
    num_rounds: int
    first_round: int = 0

    def rounds(self) -> Rounds:
        """Return the orders of the rounds; they name places in `entrants`."""
        return Rounds(self.seed, len(self.entrants))


def describe(verdict: Verdict, measurements: Sequence[Measurement]) -> str:
    """Return the verdict in one sentence."""
    if verdict.reason == "no candidate":
        return "there was no candidate to try; leave it as it is"
    if verdict.reason == "too few rounds":
        return "too few rounds could be timed on all ranks to tell a gain from noise; leave it as it is"
    if not verdict.best:
        return "no candidate was faster; leave it as it is"
    best, change = measurements[verdict.best], format_percent(verdict.gain)
    if verdict.chosen:
        times = f"{format_us(measurements[0].median_us)} to {format_us(best.median_us)}"
        return f"{best.label}: {times}, {change} less, spread {format_percent(best.spread)}"
    if verdict.gain > verdict.needed_gain:
        wanted = "too few rounds were left to prove it"
    elif verdict.needed_gain <= LEAST_GAIN:
        wanted = f"a plan must gain at least {format_percent(LEAST_GAIN)}"
    else:
        wanted = f"with this many rounds, {format_percent(verdict.needed_gain)} is needed to tell a gain from noise"
    return f"the best candidate ({best.label}) was {change} faster, but {wanted}; leave it as it is"


def summarize_rounds(labels: Sequence[str], rounds: Sequence[Sequence[float | None]]) -> tuple[Measurement, ...]:
    """Summarize rounds. Each has the time of every variant in microseconds, or None for one that took no part.

    The first variant is the baseline, and takes part in every round.
    """
    return tuple(_summarize(label, variant, rounds) for variant, label in enumerate(labels))


def summarize_turns(labels: Sequence[str], rounds: Sequence[Mapping[int, Sequence[float]]]) -> tuple[Measurement, ...]:
    """Summarize rounds of turns, by variant; a turn has the times of several steps. Empty without a round."""
    variants = range(len(labels))
    times = [[statistics.median(row[each]) if each in row else None for each in variants] for row in rounds]
    return summarize_rounds(labels, times) if times else ()


def _summarize(label: str, variant: int, rounds: Sequence[Sequence[float | None]]) -> Measurement:
    pairs = [(entry[0], time) for entry in rounds if (time := entry[variant]) is not None and entry[0] is not None]
    baseline_us = statistics.median(first for first, _ in pairs)
    ratios = [time / (first if variant else baseline_us) for first, time in pairs]
    return Measurement(
        label=label,
        median_us=statistics.median(time for _, time in pairs),
        least_us=min(time for _, time in pairs),
        ratio=statistics.median(ratios),
        spread=half_width(ratios),
        num_rounds=len(pairs),
    )


def half_width(values: Sequence[float]) -> float:
    """Return half the width of the middle half of values; of fewer than 4, the distance of the largest from the least."""
    if len(values) < 4:
        return max(values) - min(values)
    quarters = statistics.quantiles(values, n=4)
    return (quarters[2] - quarters[0]) / 2
