"""Concurrent copies: how fast each one is, and when the next one is done.

Rates are those of the machine's link for copies that run at once (`links.py`), times what copy engines reach of it. Knows
nothing of schedules.
"""

import math
from collections import Counter
from typing import final

from counterpoint.links import Ends, Link
from counterpoint.units import US_PER_S

INSTANT_US = 1e-6  # what is left of a copy and takes less is rounding


@final
class Transfers:
    """Copies by number, each with the bytes that are left of it.

    Copies that share a GPU's port behind a switch reach `shared_efficiency` of what one alone reaches; on direct links each
    has wires of its own.
    """

    def __init__(self, link: Link, efficiency: float, shared_efficiency: float) -> None:
        self._link = link
        self._efficiency, self._shared_efficiency = efficiency, shared_efficiency
        self._left_bytes: dict[int, float] = {}
        self._ends: dict[int, Ends] = {}
        self._known_rates: dict[tuple[Ends, ...], tuple[float, ...]] = {}
        self._now_us = 0.0

    def add(self, number: int, ends: Ends, num_bytes: float) -> None:
        """A copy begins to move its bytes now."""
        self._left_bytes[number] = max(num_bytes, 0.0)
        self._ends[number] = ends

    def next_end_us(self) -> float | None:
        """When the first copy will be done if none is added; None without copies."""
        times_us = [left / rate for left, rate in zip(self._left_bytes.values(), self._rates(), strict=True)]
        return self._now_us + min(times_us) if times_us else None

    def advance(self, to_us: float) -> list[int]:
        """Move all copies on to a time, of which none may be done before; those that are done then leave."""
        passed_us = to_us - self._now_us
        instant_us = max(INSTANT_US, 2 * math.ulp(to_us))  # late in a long schedule clocks are coarser
        done = []
        for number, rate in zip(tuple(self._ends), self._rates(), strict=True):
            self._left_bytes[number] -= rate * passed_us
            if self._left_bytes[number] <= rate * instant_us:
                done.append(number)
        self._now_us = to_us
        for number in done:
            del self._left_bytes[number], self._ends[number]
        return done

    def _rates(self) -> tuple[float, ...]:
        """Bytes per microsecond of each copy."""
        ends = tuple(self._ends.values())
        if ends not in self._known_rates:
            self._known_rates[ends] = self._rates_of(ends)
        return self._known_rates[ends]

    def _rates_of(self, ends: tuple[Ends, ...]) -> tuple[float, ...]:
        sent, received = Counter(sender for sender, _ in ends), Counter(receiver for _, receiver in ends)

        def efficiency(sender: int, receiver: int) -> float:
            is_shared = self._link.topology == "switch" and max(sent[sender], received[receiver]) > 1
            return self._efficiency * (self._shared_efficiency if is_shared else 1.0)

        rates = zip(ends, self._link.concurrent(ends), strict=True)
        return tuple(efficiency(*pair) * rate / US_PER_S for pair, rate in rates)
