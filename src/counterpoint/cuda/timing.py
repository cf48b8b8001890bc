"""The one way in which times are measured: warm up, interleave the candidates, repeat until the spread is known.

All candidates run in every round, in an order that rotates, so that clocks and temperature are shared. A time is the
median over rounds. What counts is the ratio to the baseline of the same round, and its spread: the half-width of the middle
half of the rounds' ratios. The baseline's own spread is that of its times around their median.
"""

import statistics
from collections.abc import Callable, Sequence

from counterpoint.value import Value

WARM_UP_ROUNDS = 3


class Measurement(Value, frozen=True, kw_only=True):
    """Times of one candidate in microseconds, and its ratio to the baseline measured in the same rounds."""

    label: str
    median_us: float
    least_us: float
    ratio: float
    spread: float
    num_rounds: int

    def is_faster(self) -> bool:
        """Faster than the baseline beyond the spread."""
        return self.ratio < 1 - self.spread

    def is_slower(self) -> bool:
        """Slower than the baseline beyond the spread."""
        return self.ratio > 1 + self.spread


def measure_interleaved(labels: Sequence[str], run: Callable[[int], float], num_rounds: int = 15) -> tuple[Measurement, ...]:
    """Measure candidates against the first of them. `run(i)` executes candidate i once and returns microseconds."""
    rounds: list[list[float]] = []
    for number in range(WARM_UP_ROUNDS + num_rounds):
        times = [0.0] * len(labels)
        for place in range(len(labels)):
            candidate = (place + number) % len(labels)
            times[candidate] = run(candidate)
        if number >= WARM_UP_ROUNDS:
            rounds.append(times)
    return tuple(_summarize(label, candidate, rounds) for candidate, label in enumerate(labels))


def _summarize(label: str, candidate: int, rounds: Sequence[Sequence[float]]) -> Measurement:
    times = [entry[candidate] for entry in rounds]
    baseline_us = statistics.median(entry[0] for entry in rounds)
    ratios = [entry[candidate] / (entry[0] if candidate else baseline_us) for entry in rounds]
    return Measurement(
        label=label,
        median_us=statistics.median(times),
        least_us=min(times),
        ratio=statistics.median(ratios),
        spread=_half_width(ratios),
        num_rounds=len(rounds),
    )


def _half_width(values: Sequence[float]) -> float:
    if len(values) < 4:
        return max(values) - min(values)
    quarters = statistics.quantiles(values, n=4)
    return (quarters[2] - quarters[0]) / 2
