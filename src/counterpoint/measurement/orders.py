"""The order in which variants take turns: balanced, and drawn at random.

What ran just before leaves a GPU warmer or cooler, clocks drift, and a job may do something longer every so many steps. So
in each block of rounds every variant takes every place equally often and follows every other variant equally often within
rounds (Williams, "Experimental designs balanced for the estimation of residual effects of treatments", 1949). A seed is
drawn for each run. From it, each block draws which variant is which, and the order of its rounds. So no disturbance can
favor a variant by its period, and a test may count the orders that could have been drawn instead (Fisher, "The Design of
Experiments", 1935).
"""

import random
import secrets
from collections import Counter
from functools import lru_cache
from typing import final

PAIR_SQUARES = 4  # squares of two variants in one block: more orders to draw from than the two of one square
SEED_BITS = 48

Round = tuple[int, ...]


def draw_seed() -> int:
    """Draw a seed for one run. One rank draws it and tells the others."""
    return secrets.randbits(SEED_BITS)


def williams_square(num_variants: int) -> tuple[Round, ...]:
    """Return rounds in which each variant takes each place, and follows each other variant, equally often.

    There are as many rounds as variants, and twice as many for an odd number of them, which no single square balances.
    """
    low, high, first = 0, num_variants - 1, []
    for place in range(num_variants):  # 0, 1, n - 1, 2, n - 2, ...: all differences between neighbors are different
        first.append(low if place == 0 or place % 2 else high)
        if place == 0 or place % 2:
            low += 1
        else:
            high -= 1
    rounds = [tuple((variant + shift) % num_variants for variant in first) for shift in range(num_variants)]
    return (*rounds, *(each[::-1] for each in rounds)) if num_variants % 2 and num_variants > 1 else tuple(rounds)


@final
class Rounds:
    """The endless rounds of `num_variants` variants; the same for the same seed."""

    def __init__(self, seed: int, num_variants: int) -> None:
        self._seed, self._num_variants = seed, num_variants
        squares = PAIR_SQUARES if num_variants == 2 else 1
        self.block_rounds = squares * len(williams_square(num_variants))

    def order(self, number: int) -> Round:
        """Return the order of turns in round `number`."""
        block, place = divmod(number, self.block_rounds)
        return _block(self._seed, self._num_variants, block)[place]

    def odds(self, number: int) -> float:
        """Return, for two variants, how likely the order of round `number` was, given the rounds before it."""
        block, place = divmod(number, self.block_rounds)
        drawn = _block(self._seed, self._num_variants, block)
        left = Counter(drawn[place:])
        return left[drawn[place]] / (self.block_rounds - place)


@lru_cache(maxsize=64)
def _block(seed: int, num_variants: int, block: int) -> tuple[Round, ...]:
    """Return one block of rounds: whole squares, with names and the order of rounds drawn at random."""
    drawn = random.Random(f"{seed}/{num_variants}/{block}")
    names = list(range(num_variants))
    drawn.shuffle(names)
    square = [tuple(names[variant] for variant in each) for each in williams_square(num_variants)]
    rounds = square * (PAIR_SQUARES if num_variants == 2 else 1)
    drawn.shuffle(rounds)
    return tuple(rounds)
