"""Finds out which of several candidates is faster than the baseline: a heat picks one, and fresh rounds prove it.

In the heat all candidates and the baseline take turns, and the worst drop out on the way (successive halving: Jamieson and
Talwalkar, "Non-stochastic best arm identification", 2016). It proves nothing. The candidate that did best is then compared
with the baseline alone, in rounds that had no part in picking it (`proof.py`). So noise wins in at most `ERROR_RATE` of all
decisions, however many candidates there were. A candidate that can hardly be proven any more gives way to the next best one,
which gets what is left of the error rate.

It measures nothing itself: `begin` and `next` say who takes turns, and `add` takes the times of a round, possibly much
later.
"""

import math
import statistics
from collections.abc import Callable, Sequence, Set
from typing import final

from counterpoint.measurement.evidence import NORMAL_DEVIATION, Turn, is_timed, log_time, step_deviation
from counterpoint.measurement.proof import FIRST_LOOK, LEAST_PROOF_ROUNDS, SURE, Proof
from counterpoint.measurement.values import (
    ERROR_RATE,
    LEAST_GAIN,
    Comparison,
    Measurement,
    Order,
    Reason,
    Verdict,
    summarize_rounds,
    summarize_turns,
)

LEAST_HEAT_ROUNDS = 2
HALVED_FROM = 6  # rounds that a heat must have for the worse half to drop out on the way
HEAT_SHARE = 0.5  # of the turns
POLISHES = 30
ROUNDS_WITHOUT_VERDICT = 3  # of what is measured where nothing can be proven
WARM_UP_ROUNDS, WARM_UP_US = 3, 1e6  # before `compare` and `measure_rounds`; after that long, one round is enough
SHARE_OF_ERROR = 0.7  # of what is left of the error rate, for the next candidate to be proven


def least_turns(num_candidates: int, answer_turns: int = 0) -> int:
    """Return the fewest turns that could prove one of this many candidates faster.

    `answer_turns` are lost with each new order, while the ranks wait for it.
    """
    heat = LEAST_HEAT_ROUNDS * (num_candidates + 1) + answer_turns if num_candidates > 1 else 0
    return heat + 2 * LEAST_PROOF_ROUNDS


def num_admitted(num_candidates: int, num_turns: int, answer_turns: int) -> int:
    """Return how many candidates, in order, this many turns can test; 0 if they could not prove even one faster."""
    fitting = (count for count in range(num_candidates, 0, -1) if least_turns(count, answer_turns) <= num_turns)
    return next(fitting, 0)


@final
class Tournament:
    """One decision between the baseline, variant 0, and candidates. Ranks that decide independently need the same seed."""

    def __init__(self, num_variants: int, seed: int) -> None:
        self._num_variants, self._seed = num_variants, seed
        self._order = Order(number=-1, entrants=(0,), seed=seed, num_rounds=0)
        self._heat: list[dict[int, Turn]] = []  # its rounds: turns by variant
        self._num_heat_turns = self._answer_turns = 0
        self._error_rate = ERROR_RATE  # that is left
        self._proofs: list[Proof] = []

    def begin(self, num_turns: int, answer_turns: int = 0) -> Order | Verdict:
        """Return who takes turns first, out of this many turns; or a verdict if they are too few, or there is no
        candidate.

        `answer_turns` are as in `least_turns`.
        """
        candidates = range(1, self._num_variants)
        if not candidates:
            return self._verdict("no candidate")
        if num_admitted(len(candidates), num_turns, answer_turns) < len(candidates):
            return self._verdict("too few rounds")
        if len(candidates) == 1:
            return self._prove(1, num_turns)
        self._answer_turns = answer_turns
        most = num_turns - answer_turns - 2 * LEAST_PROOF_ROUNDS
        self._num_heat_turns = max(LEAST_HEAT_ROUNDS * self._num_variants, min(int(HEAT_SHARE * num_turns), most))
        return self._go_on(candidates)

    def add(self, order: int, number: int, turns: Sequence[Turn | None]) -> None:
        """Add the turns of round `number` of an order, by its entrants; a round that lacks one (None) is left out."""
        timed = [turn for turn in turns if turn is not None and is_timed(turn)]
        if order != self._order.number or len(timed) < len(turns):
            return
        if self._proofs:
            self._proofs[-1].add(number, *timed)
        else:
            self._heat.append(dict(zip(self._order.entrants, timed, strict=True)))

    def next(self, num_turns: int, *, is_over: bool) -> Order | Verdict | None:
        """Return what follows from the rounds so far, with this many turns left for something new; None to continue.

        `is_over`: the present order has had all its rounds, so there is an answer.
        """
        if not self._proofs:
            return self._after_heat(num_turns, is_over=is_over)
        state = self._proofs[-1].judge(is_over=is_over)
        if state == "proven":
            return self._verdict("proven")
        return self._prove_best(num_turns) if state == "given up" else None

    def measurements(self, labels: Sequence[str]) -> tuple[Measurement, ...]:
        """Return the times of all variants: in the proof of those that came so far, else in the heat. Empty at first."""
        proven = {proof.candidate for proof in self._proofs if proof.pairs}
        rows = [{variant: turn for variant, turn in row.items() if variant not in proven} for row in self._heat]
        rows += [{0: first, proof.candidate: second} for proof in self._proofs for first, second in proof.pairs]
        return summarize_turns(labels, rows)

    # --- the heat ---

    def _go_on(self, candidates: Sequence[int]) -> Order:
        """Return the rest of the heat; half of it where there are rounds enough for the worse half to drop out then."""
        num_rounds = max(1, (self._num_heat_turns - self._num_used()) // (len(candidates) + 1))
        if num_rounds >= HALVED_FROM and len(candidates) > 2:
            num_rounds = -(-num_rounds // 2)
        return self._give(candidates, num_rounds)

    def _num_used(self) -> int:
        return sum(len(row) for row in self._heat)

    def _after_heat(self, num_turns: int, *, is_over: bool) -> Order | Verdict | None:
        """Drop those surely behind the best once they are half of all, and the worse half at the end of an order."""
        candidates = self._order.entrants[1:]
        if not self._heat:
            return self._verdict("too few rounds") if is_over else None
        if not is_over and len(self._heat) < LEAST_HEAT_ROUNDS:
            return None
        gains, error = self._estimated_gains(candidates)
        ranked = sorted(candidates, key=lambda candidate: -gains[candidate])
        kept = [each for each in ranked if gains[each] >= gains[ranked[0]] - SURE * math.sqrt(2) * error]
        half = -(-len(ranked) // 2)
        if not is_over and len(kept) > half:
            return None
        kept = kept[:half]
        left = self._num_heat_turns - self._num_used()
        has_time = left > len(kept) and num_turns - left - self._answer_turns >= 2 * LEAST_PROOF_ROUNDS
        return self._go_on(kept) if len(kept) > 1 and has_time else self._prove_best(num_turns)

    def _estimated_gains(self, candidates: Sequence[int]) -> tuple[dict[int, float], float]:
        """Return gains over the baseline in the heat, as logarithms, and the standard error of a variant's mean.

        What a round has in common and what a variant has are told apart as by Tukey's median polish ("Exploratory Data
        Analysis", 1977), with means for variants, since not all variants are in all rounds.
        """
        deviation = step_deviation([turn for row in self._heat for turn in row.values()])
        rows = [{variant: log_time(turn, deviation) for variant, turn in row.items()} for row in self._heat]
        means = dict.fromkeys((variant for row in rows for variant in row), 0.0)
        of_each: dict[int, list[float]] = {}
        for _ in range(POLISHES):
            of_each = {variant: [] for variant in means}
            for row in rows:
                middle = statistics.median(time - means[variant] for variant, time in row.items())
                for variant, time in row.items():
                    of_each[variant].append(time - middle)
            means = {variant: statistics.fmean(times) for variant, times in of_each.items()}
        num_rounds = min(len(of_each[variant]) for variant in candidates)
        rest = [abs(time - means[variant]) for variant, times in of_each.items() if len(times) > 1 for time in times]
        error = statistics.median(rest) / NORMAL_DEVIATION / math.sqrt(num_rounds - 1) if num_rounds > 1 else math.inf
        return {variant: means[0] - means[variant] for variant in candidates}, error

    # --- the proof ---

    def _prove_best(self, num_turns: int) -> Order | Verdict:
        """Prove the candidate that did best in the heat, of those that were not tried yet and may still be faster."""
        if self._heat and self._error_rate > 0 and num_turns >= 2 * LEAST_PROOF_ROUNDS:
            gains, error = self._estimated_gains(range(1, self._num_variants))
            tried = {proof.candidate for proof in self._proofs}
            hopeful = [each for each in gains if each not in tried and gains[each] + 2 * SURE * error > LEAST_GAIN]
            if hopeful:
                most = max(gains[each] for each in hopeful)
                # the first that is within one standard error of the best, since candidates come in order of preference
                return self._prove(next(each for each in hopeful if gains[each] >= most - error), num_turns)
        return self._verdict("not proven")

    def _prove(self, candidate: int, num_turns: int) -> Order:
        """Prove a candidate, at most of what is left of the error rate, or all of it if nobody can follow."""
        is_last = self._num_variants == 2 or num_turns < 2 * (FIRST_LOOK + LEAST_PROOF_ROUNDS)
        error_rate = self._error_rate * (1.0 if is_last else SHARE_OF_ERROR)
        self._error_rate -= error_rate
        order = self._give([candidate], num_turns // 2)
        self._proofs.append(Proof(candidate, order, error_rate))
        return order

    def _give(self, candidates: Sequence[int], num_rounds: int) -> Order:
        number = self._order.number + 1
        self._order = Order(number=number, entrants=(0, *candidates), seed=self._seed + number, num_rounds=num_rounds)
        return self._order

    def _verdict(self, reason: Reason) -> Verdict:
        """Return the verdict, with the candidate that did best where it was tried hardest."""
        if reason in ("too few rounds", "no candidate"):
            return Verdict(chosen=0, best=0, reason=reason)
        tried = [proof for proof in self._proofs if len(proof.pairs) >= LEAST_PROOF_ROUNDS]
        proof = max(tried, key=lambda each: (each.is_proven, each.gain), default=None)
        if proof is not None and proof.gain > 0:
            best, gain, needed = proof.candidate, proof.gain, proof.needed_gain
        else:
            best, gain, needed = self._best_untried({each.candidate for each in tried})
        share = 1 - math.exp(-gain)
        if share <= 0:
            return Verdict(chosen=0, best=0, reason="no faster")
        needed = max(LEAST_GAIN, 1 - math.exp(-needed))
        return Verdict(chosen=best if reason == "proven" else 0, best=best, reason=reason, gain=share, needed_gain=needed)

    def _best_untried(self, tried: Set[int]) -> tuple[int, float, float]:
        """Return, of the candidates without a proof, the one that did best in the heat, its gain, and the gain that the
        heat can tell from noise: 0 if it has only one round.
        """
        gains, error = self._estimated_gains(range(1, self._num_variants)) if self._heat else ({}, 0.0)
        best = max((each for each in gains if each not in tried), key=lambda each: gains[each], default=0)
        return best, gains.get(best, 0.0), SURE * math.sqrt(2) * error if math.isfinite(error) else 0.0


def compare(labels: Sequence[str], run: Callable[[int], float], num_rounds: int, seed: int) -> Comparison:
    """Compare variants with the first of them, of which `run(i)` executes variant i once and returns microseconds.

    It takes as many turns at most as so many rounds of all variants, or as the least proof. All ranks call it with the same
    seed, and `run` returns the slowest rank's time on each, so all come to the same verdict.
    """
    num_turns = max(num_rounds * len(labels), least_turns(len(labels) - 1))
    tournament = Tournament(len(labels), seed)
    answer, num_used = tournament.begin(num_turns), 0
    if isinstance(answer, Verdict):
        return Comparison(measurements=measure_rounds(labels, run, ROUNDS_WITHOUT_VERDICT, seed), verdict=answer)
    _warm_up(len(labels), run)
    while isinstance(answer, Order):
        order, number, following = answer, 0, None
        while following is None:
            times = _run_round(order, number, run)
            num_used += len(times)
            tournament.add(order.number, number, [[time] for time in times])
            number += 1
            following = tournament.next(num_turns - num_used, is_over=number == order.num_rounds)
        answer = following
    return Comparison(measurements=tournament.measurements(labels), verdict=answer)


def measure_rounds(
    labels: Sequence[str], run: Callable[[int], float], num_rounds: int, seed: int
) -> tuple[Measurement, ...]:
    """Time all variants in every round, in balanced order, without a verdict; `run` and `seed` are as in `compare`."""
    _warm_up(len(labels), run)
    order = Order(number=0, entrants=tuple(range(len(labels))), seed=seed, num_rounds=num_rounds)
    return summarize_rounds(labels, [_run_round(order, number, run) for number in range(num_rounds)])


def _warm_up(num_variants: int, run: Callable[[int], float]) -> None:
    """Run all variants a few times, or once where that takes long; the times do not count."""
    spent_us = 0.0
    for _ in range(WARM_UP_ROUNDS):
        if spent_us < WARM_UP_US:
            spent_us += sum(run(variant) for variant in range(num_variants))


def _run_round(order: Order, number: int, run: Callable[[int], float]) -> list[float]:
    """Run one round, and return its times by entrant."""
    times = [0.0] * len(order.entrants)
    for place in order.rounds().order(number):
        times[place] = run(order.entrants[place])
    return times
