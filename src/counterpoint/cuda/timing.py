"""The one way in which times are measured: warm up, interleave the candidates, repeat until the spread is known.

All candidates run in every round, in an order drawn anew for each, so that clocks and temperature are shared and nobody
always follows the same one: what ran just before leaves the GPU warmer or cooler, which was seen to count 3 % of a step. A
time is the median over rounds. What counts is the ratio to the baseline of the same round, and its spread: the half-width
of the middle half of the rounds' ratios. The baseline's own spread is that of its times around their median.
"""

import random
import statistics
from collections.abc import Callable, Sequence

from counterpoint.value import Value

WARM_UP_ROUNDS = 3
WARM_UP_US = 1e6  # after that long, one round is enough
NUM_FINALISTS = 3


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
    spent_us = 0.0
    for number in range(WARM_UP_ROUNDS):
        if spent_us < WARM_UP_US:
            spent_us += sum(_run_round(number, len(labels), run))
    rounds = [_run_round(WARM_UP_ROUNDS + number, len(labels), run) for number in range(num_rounds)]
    return summarize_rounds(labels, rounds)


def measure_in_heats(labels: Sequence[str], run: Callable[[int], float], num_rounds: int = 15) -> tuple[Measurement, ...]:
    """As `measure_interleaved`, but the full number of rounds only for the first and the few fastest in a shorter heat.

    Whoever did not reach the final keeps what the heat measured; `num_rounds` of a measurement tells which it was.
    """
    heat = measure_interleaved(labels, run, -(-num_rounds // 2))
    places = [0, *sorted(range(1, len(labels)), key=lambda candidate: heat[candidate].ratio)[:NUM_FINALISTS]]
    final = measure_interleaved([labels[number] for number in places], lambda place: run(places[place]), num_rounds)
    found = dict(zip(places, final, strict=True))
    return tuple(found.get(number, heat[number]) for number in range(len(labels)))


def finalists(measurements: Sequence[Measurement]) -> list[int]:
    """Places of those that `measure_in_heats` measured in as many rounds as the first, which is one of them."""
    return [number for number, row in enumerate(measurements) if row.num_rounds == measurements[0].num_rounds]


def fastest(measurements: Sequence[Measurement], least_gain: float = 0.0) -> int:
    """The fastest finalist that beats the first beyond its spread and by `least_gain`; 0, the first, if none does."""
    better = [
        number
        for number in finalists(measurements)
        if measurements[number].is_faster() and measurements[number].ratio < 1 - least_gain
    ]
    return min(better, key=lambda number: measurements[number].ratio, default=0)


def summarize_rounds(labels: Sequence[str], rounds: Sequence[Sequence[float]]) -> tuple[Measurement, ...]:
    """What rounds of times say, one entry a round and in it one time a candidate; the first candidate is the baseline."""
    return tuple(_summarize(label, candidate, rounds) for candidate, label in enumerate(labels))


def _run_round(number: int, num_candidates: int, run: Callable[[int], float]) -> list[float]:
    times = [0.0] * num_candidates
    for candidate in order_of_round(number, num_candidates):
        times[candidate] = run(candidate)
    return times


def order_of_round(number: int, num_candidates: int) -> list[int]:
    """The order in which the candidates of round `number` run: at random, but the same on every rank and every time."""
    order = list(range(num_candidates))
    random.Random(number).shuffle(order)
    return order


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
