"""How often the judge is wrong: simulated jobs under every kind of noise, judged by the package's own functions. Needs no
GPU.

Jobs under `run --tune` are doubles of clock, filter and store (`tests/helpers/live_job_double.py`), of two ranks unless a
row says otherwise; captured steps are `compare` on made-up times, as `tune` and `schedule tune` use it; guards live through
100,000 steps.

    python -m benchmarks.judgement [--trials 500]
"""

import argparse
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pool

from tests.helpers.live_job_double import FakeJob, Rules, nccl, seen

from benchmarks.conditions import store
from counterpoint.measurement.guard import Guard
from counterpoint.measurement.tournament import compare
from counterpoint.supervised.settings import LiveSettings
from counterpoint.supervised.turns import TURN_STEPS

STEP_US = 20_000.0
PERIODS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 50)
Noise = Callable[[random.Random], Callable[[], float]]  # what the next step takes, as a factor
# kernels whose candidates are so many
FUNCTIONS = {
    1: (nccl(), seen("small", 8)),
    4: (nccl(), seen("matmul", 132, block=(384, 1, 1), registers_per_thread=168, dynamic_shared_bytes=213188)),
    8: (nccl(), seen("gemm"), seen("other", 2048)),
}


def lognormal(sigma: float, drawn: random.Random) -> Callable[[], float]:
    return lambda: math.exp(drawn.gauss(0, sigma))


def outliers(sigma: float, drawn: random.Random) -> Callable[[], float]:
    """3 % of steps take 1.2 to 3 times as long."""
    return lambda: math.exp(drawn.gauss(0, sigma)) * (drawn.uniform(1.2, 3) if drawn.random() < 0.03 else 1)


def drift(sigma: float, drawn: random.Random) -> Callable[[], float]:
    """10 % longer in 300 steps."""
    steps = iter(range(1 << 40))
    return lambda: math.exp(drawn.gauss(0, sigma)) * (1 + 0.10 * next(steps) / 300)


def autoregressive(sigma: float, drawn: random.Random) -> Callable[[], float]:
    """Clocks that wander over tens of steps."""
    level = [0.0]

    def step() -> float:
        level[0] = 0.95 * level[0] + drawn.gauss(0, sigma) * math.sqrt(1 - 0.95**2)
        return math.exp(level[0] + drawn.gauss(0, sigma / 3))

    return step


def bimodal(sigma: float, drawn: random.Random) -> Callable[[], float]:
    """Stretches of 5 to 20 steps, 3 of 10 of them 4 sigma longer, as beside another tenant."""
    stretch: list[bool] = []

    def step() -> float:
        if not stretch:
            stretch.extend([drawn.random() < 0.3] * drawn.randint(5, 20))
        return math.exp(drawn.gauss(0, sigma / 3)) * (1 + 4 * sigma * stretch.pop())

    return step


def periodic(period: int, drawn: random.Random) -> Callable[[], float]:
    """Make one step in `period` 4 to 100 % longer, at a random phase."""
    number, phase, extra = [0], drawn.randrange(period), drawn.choice((0.04, 0.12, 0.2, 0.5, 1.0))

    def step() -> float:
        number[0] += 1
        return math.exp(drawn.gauss(0, 0.01)) * (1 + extra * (number[0] % period == phase))

    return step


def sawtooth(height: float, drawn: random.Random) -> Callable[[], float]:
    """Batches sorted by length, over 50 steps."""
    number = [drawn.randrange(50)]

    def step() -> float:
        number[0] += 1
        return math.exp(drawn.gauss(0, 0.01)) * (1 + height * (number[0] % 50) / 50)

    return step


SIGMAS = (0.01, 0.03, 0.05)
BY_SIGMA = {
    "lognormal": lognormal,
    "outliers": outliers,
    "drift": drift,
    "AR(1)": autoregressive,
    "bimodal": bimodal,
}
NOISES: dict[str, Noise] = {
    **{f"{name} {100 * sigma:g} %": partial(kind, sigma) for name, kind in BY_SIGMA.items() for sigma in SIGMAS},
    **{f"sawtooth {100 * height:g} %": partial(sawtooth, height) for height in (0.12, 0.2)},
    **{f"one of {period} steps longer": partial(periodic, period) for period in PERIODS},
}


@dataclass(frozen=True)
class Live:
    """A job under `run --tune`, of which one candidate, priority alone, gains so much."""

    noise: str
    num_candidates: int = 8
    gain: float = 0.0
    budget: int = 200
    lag: int = 2
    most_ahead: int = 2

    def is_gain(self, seed: int) -> tuple[bool, int]:
        """Whether a gain was found, by the candidate that gains, if one does; and after how many steps."""
        drawn = random.Random(seed)
        step_noise, common = NOISES[self.noise](drawn), dict[int, float]()

        def step_time(rank: int, step: int, rules: Rules) -> float:
            while len(common) < step:
                common[len(common) + 1] = step_noise()
            gains = any(rule.priority is not None for rule in rules) and not any(
                rule.hold_us or rule.dynamic_shared_bytes for rule in rules
            )
            own = math.exp(random.Random(f"{seed}/{rank}/{step}").gauss(0, 0.0025))
            return STEP_US * common[step] * own * (1 - self.gain * gains)

        settings = LiveSettings(is_tuning=True, budget_steps=self.budget, guard_every_steps=0)
        job = FakeJob(settings, FUNCTIONS[self.num_candidates], lag=self.lag, most_ahead=self.most_ahead, seed=seed)
        job.run(self.budget + 60 + 8 * (self.lag + self.most_ahead), step_time)
        record = next((each for each in job.ranks[0].records if each.stage == "decided"), None)
        if record is None or record.plan is None or record.plan.verdict != "GAIN":
            return False, record.num_steps if record else 0
        return not self.gain or record.plan.summary.startswith("priority:"), record.num_steps


@dataclass(frozen=True)
class Captured:
    """A captured step, or an operator's schedules: one replay a turn."""

    noise: str
    num_candidates: int
    gain: float = 0.0
    num_rounds: int = 15

    def is_gain(self, seed: int) -> tuple[bool, int]:
        """As `Live.is_gain`, in replays."""
        step_noise, runs = NOISES[self.noise](random.Random(seed)), list[int]()

        def run(variant: int) -> float:
            runs.append(variant)
            return STEP_US * step_noise() * (1 - self.gain * (variant == 1))

        chosen = compare([str(number) for number in range(self.num_candidates + 1)], run, self.num_rounds, seed).chosen
        return chosen == 1 if self.gain else chosen > 0, len(runs)


@dataclass(frozen=True)
class Guarded:
    """The life of a job under a plan whose steps take `ratio` of the job's, looked at every 500 steps."""

    noise: str
    ratio: float
    num_steps: int

    def is_gain(self, seed: int) -> tuple[bool, int]:
        """Whether the plan was taken out, and after how many steps."""
        step_noise, guard, step = NOISES[self.noise](random.Random(seed)), Guard(seed), 500
        while step < self.num_steps:
            begun, order, outcome = step, guard.look(), "go on"
            while outcome == "go on":
                for number in range(order.first_round, order.first_round + order.num_rounds):
                    turns: list[list[float]] = [[], []]
                    for variant in order.rounds().order(number):
                        times = [STEP_US * step_noise() * (self.ratio if variant else 1.0) for _ in range(TURN_STEPS)]
                        turns[variant] = times[1:]
                    guard.add(number, turns)
                    step += 2 * TURN_STEPS
                outcome = guard.settle()
                order = guard.go_on() if outcome == "go on" else order
            if outcome == "remove":
                return True, step
            step = max(step, begun + 500)
        return False, step


@dataclass(frozen=True)
class Row:
    """One row: a case, how often it is tried, and what is required of its share of gains found (or plans taken out)."""

    what: str
    case: Live | Captured | Guarded
    least: float | None = None
    most: float | None = None


def rows() -> Iterator[Row]:
    for noise in NOISES:
        for count in FUNCTIONS:
            yield Row(f"false GAIN, live, {count} candidates", Live(noise, count), most=0.02)
        for count in (1, 2, 4, 6, 8):
            yield Row(f"false GAIN, captured, {count} candidates", Captured(noise, count), most=0.02)
    yield Row("gain of 2 % found in 200 steps", Live("lognormal 1 %", gain=0.02), least=0.95)
    yield Row("gain of 5 % found in 200 steps", Live("lognormal 3 %", gain=0.05), least=0.90)
    yield Row("gain of 2 % found in 800 steps", Live("lognormal 3 %", gain=0.02, budget=800), least=0.90)
    yield Row("gain of 5 % found in 400 steps", Live("outliers 3 %", gain=0.05, budget=400), least=0.85)
    behind = partial(Live, gain=0.10, lag=60, most_ahead=30)
    for noise in ("lognormal 1 %", "lognormal 3 %"):
        yield Row("gain of 10 % found, GPU 60 steps behind, ranks up to 30 apart", behind(noise), least=0.95)
    for noise in ("lognormal 1 %", "lognormal 3 %", "lognormal 5 %", "outliers 3 %", "AR(1) 3 %", "one of 12 steps longer"):
        yield Row("plan that gains 0.5 % taken out in 100,000 steps", Guarded(noise, 0.995, 100_000), most=0.01)
    yield Row("plan that is 2 % slower taken out in 3,000 steps", Guarded("lognormal 3 %", 1.02, 3_000), least=0.95)


def tried(case: Live | Captured | Guarded, seed: int) -> tuple[bool, int]:
    return case.is_gain(seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=500, help="of each row")
    parser.add_argument("--only", default="", help="rows whose words hold this")
    options = parser.parse_args()
    found, num_missed = [], 0
    with Pool(os.cpu_count()) as pool:
        for row in rows():
            if options.only not in row.what:
                continue
            began = time.monotonic()
            outcomes = pool.map(partial(tried, row.case), range(options.trials), chunksize=10)
            share = sum(is_gain for is_gain, _ in outcomes) / len(outcomes)
            steps = sorted(count for is_gain, count in outcomes if is_gain) or [0]
            is_met = (row.least is None or share >= row.least) and (row.most is None or share <= row.most)
            num_missed += not is_met
            required = f"at least {row.least:.0%}" if row.least is not None else f"at most {row.most:.0%}"
            print(
                f"{'' if is_met else 'MISSED  '}{row.what}, {row.case.noise}: {share:.1%} ({required}), "
                f"median {steps[len(steps) // 2]}; {time.monotonic() - began:.0f} s",
                flush=True,
            )
            found.append(
                {
                    "what": row.what,
                    "noise": row.case.noise,
                    "share": share,
                    "required": required,
                    "is_met": is_met,
                    "median_steps": steps[len(steps) // 2],
                }
            )
    print(f"{len(found)} rows of {options.trials} trials, {num_missed} missed")
    if not options.only:
        store("judgement", {"trials": options.trials, "rows": found})
    sys.exit(num_missed > 0)


if __name__ == "__main__":
    main()
