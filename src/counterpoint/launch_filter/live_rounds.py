"""How rounds on live steps are laid out within a budget, and what their times say.

A turn of a candidate is a few steps of which the first is not timed, because launches of two tables may meet in it. A
round gives each candidate, and the job as it is, one turn, in an order of its own (`cuda/timing.py`). The time of a turn
on a rank is that of its timed steps; what counts is the slowest rank. A round in which a rank has no time for some turn
is left out.

The spread says how far rounds differ, not how well their median is known: of six rounds, noise alone exceeded it in 12 % of
simulated finals of two candidates (16 % of four rounds, 4 % of fifteen). So with few rounds a gain has to be larger, as the
error of a median is; then it is 5 % at any number, for normal, exponential and uniform noise alike.
"""

import math
from collections.abc import Sequence

from counterpoint.cuda.timing import Measurement, summarize_rounds
from counterpoint.value import Value

TURN_STEPS = 4  # one of them is not timed
HEAT_ROUNDS = 2
NUM_FINALISTS = 2
LEAST_ROUNDS, MOST_ROUNDS = 4, 15
LEAST_GAIN = 0.005  # of a step; less is not worth a plan, and noise finds it too easily. An assumption
PROVING_ROUNDS = 12  # from here on the spread alone is enough; with fewer rounds it is widened
HEAT_SHARE = 0.6
AGREEING_STEPS = 22  # what an agreement may take: the GPU's lag, the ranks' distance, and the lead of its answer

Times = tuple[tuple[float | None, ...], ...]  # by round, then by candidate; None where it was missed


class Layout(Value, frozen=True, kw_only=True):
    """How many candidates the budget lets try, and whether a heat picks the finalists first."""

    num_candidates: int
    has_heat: bool


def lay_out(num_candidates: int, steps_left: int) -> Layout:
    """Spend at most 60 % of the steps on a heat of two rounds, and leave enough for a final; else the first two compete."""
    if num_candidates <= NUM_FINALISTS:
        return Layout(num_candidates=num_candidates, has_heat=False)
    final_steps = LEAST_ROUNDS * TURN_STEPS * (NUM_FINALISTS + 1) + 2 * AGREEING_STEPS
    heat_steps = min(int(steps_left * HEAT_SHARE), steps_left - final_steps)
    most = heat_steps // (HEAT_ROUNDS * TURN_STEPS) - 1
    if most <= NUM_FINALISTS:
        return Layout(num_candidates=NUM_FINALISTS, has_heat=False)
    return Layout(num_candidates=min(num_candidates, most), has_heat=True)


def num_final_rounds(num_finalists: int, steps_left: int) -> int:
    """As many as the budget has left, within reason; 0 where that is too few to tell a gain from noise."""
    fitting = steps_left // (TURN_STEPS * (num_finalists + 1))
    return 0 if fitting < LEAST_ROUNDS else min(fitting, MOST_ROUNDS)


def slowest_ranks(by_rank: Sequence[Times]) -> list[list[float]]:
    """The slowest rank's time of each turn; only rounds that every rank timed in full."""
    rounds = []
    for entries in zip(*by_rank, strict=True):
        if all(time is not None for entry in entries for time in entry):
            rounds.append([max(times) for times in zip(*entries, strict=True)])
    return rounds


def judge(labels: Sequence[str], by_rank: Sequence[Times], least_rounds: int) -> tuple[Measurement, ...] | None:
    """Measurements against the first label, or None where too few rounds were timed on all ranks."""
    rounds = slowest_ranks(by_rank)
    return summarize_rounds(labels, rounds) if len(rounds) >= least_rounds else None


def needed_gain(measurement: Measurement) -> float:
    """The share of a step by which a candidate must be faster: its spread, wider for few rounds, and the least gain."""
    return max(LEAST_GAIN, measurement.spread * max(1.0, math.sqrt(PROVING_ROUNDS / measurement.num_rounds)))


def best(measurements: Sequence[Measurement]) -> int:
    """The fastest of those faster than the baseline by more than what is needed; 0, the baseline, if none is."""
    faster = [
        number
        for number, measurement in enumerate(measurements)
        if number and measurement.ratio < 1 - needed_gain(measurement)
    ]
    return min(faster, key=lambda number: measurements[number].ratio, default=0)
