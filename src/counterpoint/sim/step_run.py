"""Simulates one step under a plan at a given clock, finds the clock under the power limit, and bounds a step by its work.

Operations of different streams share what a single one leaves free, so the sum of their lone times is no lower bound. Work
adds up: what kernels issue and load, by the most that all SMs and the memory can do (`rates.py`), and the bytes of
collectives, by the link's bandwidth. Kernels that state the time of their CTAs count only by the bytes that they state.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial

from counterpoint.machine import Machine
from counterpoint.metrics import critical_path_us
from counterpoint.sim.alike import alike, first_alike
from counterpoint.sim.calibration import Calibration
from counterpoint.sim.costs import CostModel
from counterpoint.sim.effects import Effect
from counterpoint.sim.engine import Engine
from counterpoint.sim.power import Drawn, PowerModel, slowdown
from counterpoint.sim.rates import SM_EXPONENT, RateModel
from counterpoint.sim.task_graph import TaskGraph, check_fit
from counterpoint.step import Collective, Copy, Footprint, Kernel, Operation, Step
from counterpoint.units import PS_PER_US, ps_to_us

Spans = list[tuple[int, int]]
CLOSE_CLOCK = 0.008  # as a share of a burst's clock
MODELS = 8  # of machines and clocks that are kept
MOST_SIMULATIONS = 4  # where a race turns between two clocks, none is found


class StepRun:
    """A step, the effect of a plan's controls on each of its operations, and a machine with its constants."""

    def __init__(self, step: Step, effects: Sequence[Effect], machine: Machine, calibration: Calibration) -> None:
        self.step, self.effects, self.machine, self.calibration = step, effects, machine, calibration
        self._spans: dict[float, Spans] = {}  # what was simulated, by clock
        self._settled: tuple[float, float] | None = None
        self._alone_us: list[float] | None = None  # of each operation, at the clock of lone times
        # by operation, the first one with the same work and footprint that moves its data in the same way
        self._first = first_alike(
            (effect.footprint, effect.is_saved, _is_copied(effect), *alike(operation))
            for operation, effect in zip(step.operations, effects, strict=True)
        )

    def _models(self, clock_share: float = 1.0) -> tuple[CostModel, RateModel]:
        step = self.step
        is_traced = step.device_name is not None and not step.is_timed_in_bursts
        return _shared_models(
            self.machine, self.calibration, clock_share, is_captured=step.is_timed_in_bursts, is_traced=is_traced
        )

    def simulated(self, clock_share: float) -> Spans:
        """Return start and end of every operation, in picoseconds from the start, at a share of the lone times' clock."""
        if clock_share not in self._spans:
            self._spans[clock_share] = self._simulated(clock_share)
        return self._spans[clock_share]

    def spans(self, clock_share: float) -> Spans:
        """Return what `simulated` does, but close below the clock of the latest simulation without another one: all its
        times become longer by as much as the guess at the step's time. So no operation starts too early after another one.
        """
        latest_share, spans = next(reversed(self._spans.items()), (0.0, []))
        if clock_share in self._spans or not _is_close(latest_share, clock_share):
            return self.simulated(clock_share)
        longer = self.guessed_us(clock_share) / self.guessed_us(latest_share)
        return [(round(start * longer), round(end * longer)) for start, end in spans]

    def _simulated(self, clock_share: float) -> Spans:
        costs, rates = self._models(clock_share)
        if rates.is_full:
            _shared_models.cache_clear()
        graph = TaskGraph(self.step, self.effects, costs, self.calibration)
        engine = Engine(self.machine, rates, graph.tasks, graph.launches, _fits_beside(self.step))
        return graph.spans(engine.run())

    def lone_us(self, clock_share: float = 1.0) -> list[float]:
        """Return each operation's time alone, in microseconds, at a share of the lone times' clock; for an operation that
        copies move, the copies' time; for one that a plan makes unnecessary, 0. Raises `StepError` for a launch that does
        not fit.
        """
        if self._alone_us is None:
            self._alone_us = self._found_alone_us()
        if clock_share == 1:
            return self._alone_us
        operations, alone_us = self.step.operations, self._alone_us
        slower = {
            first: alone_us[first] * slowdown(operations[first], self.machine, self.calibration, clock_share)
            for first in set(self._first)
        }
        return [slower[first] for first in self._first]

    def _found_alone_us(self) -> list[float]:
        costs, _ = self._models()
        found = {first: self._found_us(first, costs) for first in sorted(set(self._first))}
        return [found[first] for first in self._first]

    def _found_us(self, index: int, costs: CostModel) -> float:
        operation, effect = self.step.operations[index], self.effects[index]
        if effect.is_saved:
            return 0.0
        if isinstance(operation, Collective) and _is_copied(effect):
            return costs.copied_us(operation)
        if not isinstance(operation, Copy) and effect.footprint is not None:
            check_fit(index, operation, effect.footprint, self.machine)
        return costs.lone_us(operation)

    def guessed_us(self, clock_share: float) -> float:
        """Return a guess at the step's time: half way between all operations one after the other and the critical path."""
        lone_us = self.lone_us(clock_share)
        return (sum(lone_us) + critical_path_us(self.step, lone_us)) / 2

    def settled(self) -> tuple[float, float]:
        """Return a simulated clock that is close to what the power limit allows this step by itself, and the ratio of
        simulated to guessed time there.
        """
        if self._settled is None:
            power, drawn = PowerModel(self.machine, self.calibration), self.drawn()
            clock, _ = _search(power, drawn, [self], _just_above(power.allowed(drawn, self.guessed_us)))
            self._settled = clock, _makespan_us(self.simulated(clock)) / self.guessed_us(clock)
        return self._settled

    def drawn(self) -> list[Drawn]:
        """Return the energy of operations, together for those of the same work; nothing if the power limit cannot act or is
        unknown, or the clock is a job's.
        """
        if not self.calibration.power or not (self.step.is_timed_in_bursts or any(map(_is_computed, self.step.operations))):
            return []
        power, lone_us = PowerModel(self.machine, self.calibration), self.lone_us()
        return [
            power.drawn(self.step.operations[first], number * lone_us[first], is_copied=_is_copied(self.effects[first]))
            for first, number in Counter(self._first).items()
        ]


def clock_share(runs: Sequence[StepRun], as_is: StepRun) -> float:
    """Return the clock that the power limit allows steps that take turns, as a share of the clock of their lone times.

    `as_is`: the same step without a plan. The search begins where these steps would take as much longer than guessed as that
    one does, or at its clock if that is no other, so that a plan without an effect gives the same times as no plan.
    """
    drawn = [each for run in runs for each in run.drawn()]
    if not drawn:
        return 1.0
    power = PowerModel(as_is.machine, as_is.calibration)
    settled, longer = as_is.settled()
    guessed = power.allowed(drawn, partial(_guessed_us, runs, longer), settled)
    _, found = _search(power, drawn, runs, settled if _is_close(settled, guessed) else _just_above(guessed))
    in_burst = power.share_in_burst(as_is.lone_us()) if as_is.step.is_timed_in_bursts else 1.0
    if in_burst == 1:
        return found
    under_load = power.allowed(as_is.drawn(), lambda share: sum(as_is.lone_us(share)))
    return min(1.0, found / (in_burst + (1 - in_burst) * under_load))


def _search(power: PowerModel, drawn: Sequence[Drawn], runs: Sequence[StepRun], first: float) -> tuple[float, float]:
    """Return a simulated clock and the clock that the power limit allows, which is close to it unless races turn between
    clocks. `first` is simulated first.
    """
    simulated = first
    for _ in range(MOST_SIMULATIONS):
        longer = sum(_makespan_us(run.simulated(simulated)) for run in runs) / _guessed_us(runs, 1.0, simulated)
        found = power.allowed(drawn, partial(_guessed_us, runs, longer), simulated)
        if _is_close(simulated, found):
            break
        simulated = _just_above(found)
    return simulated, found


def _is_close(simulated: float, clock_share: float) -> bool:
    """Return whether a clock is so close below a simulated one that all times change by one factor."""
    return 0 <= simulated - clock_share < CLOSE_CLOCK


def _just_above(clock_share: float) -> float:
    """Return a clock to simulate, so that one close to `clock_share` needs no other simulation."""
    return min(1.0, clock_share + CLOSE_CLOCK / 2)


def _guessed_us(runs: Sequence[StepRun], longer: float, clock_share: float) -> float:
    return longer * sum(run.guessed_us(clock_share) for run in runs)


def least_busy_us(step: Step, costs: CostModel, least_us: Sequence[float]) -> float:
    """Return how long the busiest of SMs, memory and links is busy. An operation counts for at most its `least_us`."""
    totals: dict[str, float] = {}
    for index, (operation, most_us) in enumerate(zip(step.operations, least_us, strict=True)):
        if isinstance(operation, Kernel):
            check_fit(index, operation, operation.footprint, costs.machine)
        for shared, busy_us in _busy_us(operation, costs):
            totals[shared] = totals.get(shared, 0.0) + min(busy_us, most_us)
    return max(totals.values(), default=0.0)


def _busy_us(operation: Operation, costs: CostModel) -> Iterator[tuple[str, float]]:
    """Yield what the operation shares with others, and for how long it would use all of it."""
    if isinstance(operation, Collective):
        yield costs.link(operation).kind, costs.wire_us(operation)
    if isinstance(operation, Kernel):
        work = costs.kernel_work(operation)
        num_ctas = work.num_tiles or costs.shared_work(operation) or operation.footprint.num_ctas
        total_us = num_ctas * work.cta_ps * work.hbm_reference / PS_PER_US
        of_sm = work.issue_per_cta / (1 + work.issue_reference**SM_EXPONENT) ** (1 / SM_EXPONENT)
        yield "SMs", total_us * of_sm / (work.l2_reference or 1.0) / costs.machine.gpu.num_sms
        yield "memory", total_us * work.hbm_per_cta / costs.hbm_bytes_per_s


def _makespan_us(spans: Spans) -> float:
    return ps_to_us(max(end for _, end in spans))


def _is_computed(operation: Operation) -> bool:
    """Return whether the operation's time follows from its work, and so is that of a burst."""
    return isinstance(operation, Kernel) and operation.lone_us is None and operation.cta_us is None


def _is_copied(effect: Effect) -> bool:
    return effect.uses_copy_engine or effect.overlap is not None


def _fits_beside(step: Step) -> frozenset[tuple[Footprint, Footprint]]:
    """Return the pairs of launches that fit beside each other according to the step."""
    pairs = [[step.operations[number] for number in pair] for pair in step.fits_beside]
    footprints = [[None if isinstance(each, Copy) else each.footprint for each in pair] for pair in pairs]
    return frozenset((first, second) for first, second in footprints if first is not None and second is not None)


@lru_cache(maxsize=MODELS)
def _shared_models(
    machine: Machine, calibration: Calibration, clock_share: float, *, is_captured: bool, is_traced: bool
) -> tuple[CostModel, RateModel]:
    """Return the models of costs and rates. Candidates of a step have most works and states in common, which these keep."""
    costs = CostModel(machine, calibration, clock_share, is_captured=is_captured)
    return costs, RateModel(machine.gpu, costs.hbm_bytes_per_s, costs.latency, costs.l2, is_traced=is_traced)
