"""Models concurrent copies: how fast each one is, and when the next one ends.

Rates are those of the machine's link for concurrent copies (`links.py`), times the share of it that copy engines reach.
Does not depend on schedules.
"""

import math
from collections import Counter
from typing import final

from counterpoint.links import Ends, Link
from counterpoint.units import US_PER_S

INSTANT_US = 1e-6  # a rest of a copy that takes less is rounding


@final
class Transfers:
    """Copies by number, each with its remaining bytes.

    Copies that share a GPU's port behind a switch reach `shared_efficiency` of a lone copy's rate; on direct links each has
    its own wires.
    """

    def __init__(self, link: Link, efficiency: float, shared_efficiency: float) -> None:
        self._link = link
        self._efficiency, self._shared_efficiency = efficiency, shared_efficiency
        self._left_bytes: dict[int, float] = {}
        self._ends: dict[int, Ends] = {}
        self._known_rates: dict[tuple[Ends, ...], tuple[float, ...]] = {}
        self._now_us = 0.0

    def add(self, number: int, ends: Ends, num_bytes: float) -> None:
        """Add a copy that starts to move its bytes now."""
        self._left_bytes[number] = max(num_bytes, 0.0)
        self._ends[number] = ends

    def next_end_us(self) -> float | None:
        """Return when the first copy will end if none is added; None without copies."""
        times_us = [left / rate for left, rate in zip(self._left_bytes.values(), self._rates(), strict=True)]
        return self._now_us + min(times_us) if times_us else None

    def advance(self, to_us: float) -> list[int]:
        """Advance all copies to a time before which none ends; remove and return those that end then."""
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
        """Return the bytes per microsecond of each copy."""
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
