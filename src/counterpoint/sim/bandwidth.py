"""How bandwidth is shared, and how two limits on one rate combine.

Shares are max-min fair: no flow can get more without another that has no more than it getting less. Two limits (what the
resident CTAs can keep in flight, what the memory or link delivers) combine by a smooth minimum with exponent 4. The same
exponent fits how capped kernels slow down and how all-reduce time falls with CTAs (docs/simulator.md).
"""

from collections.abc import Sequence

EXPONENT = 4


def max_min_shares(demands: Sequence[float], capacity: float) -> list[float]:
    """Max-min fair allocation of `capacity` to `demands` (same unit, each 0 or more; infinity asks for all there is)."""
    shares = [0.0] * len(demands)
    left = capacity
    ascending = sorted(range(len(demands)), key=lambda index: demands[index])
    for position, index in enumerate(ascending):
        shares[index] = min(demands[index], left / (len(ascending) - position))
        left -= shares[index]
    return shares


def available_to(index: int, demands: Sequence[float], capacity: float) -> float:
    """What flow `index` could get of `capacity` if it asked for everything, beside the demands of the others."""
    asked = [float("inf") if other == index else demand for other, demand in enumerate(demands)]
    return max_min_shares(asked, capacity)[index]


def smooth_minimum(first: float, second: float) -> float:
    """The smaller of two positive limits, rounded off where they are close: at equality 0.84 of either."""
    if first <= 0 or second <= 0:
        return 0.0
    ratio = min(first, second) / max(first, second)
    return float(min(first, second) / (1 + ratio**EXPONENT) ** (1 / EXPONENT))
