"""Whether the calls of a schedule are faster with the kernels that are the fastest alone: calls take turns with and without.

Beside copies, which load L2 as a matmul's own reads do, and beside the next matmul on another stream, a kernel that is the
fastest alone may be slower than torch's: on 4 H100s whole calls took up to 15 % longer (2026-11-27).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from counterpoint.ops.kernel_choice import fastest_alike, is_wanted
from counterpoint.ops.products import Product, multiplying

NUM_CALLS_BEFORE = 2  # calls before kernels are timed: many shapes come only once, or twice
TURNS = 3 * (False, True, True, False)  # whether a turn's call uses the chosen kernels
PATIENCE = 64  # after so many calls addresses do not come again, and calls that are not replayed are turns, too


class KernelTrial:
    """The choice of kernels for the calls of one schedule with weights of one layout. `takes_chosen` says whether the call
    that was prepared last uses the chosen kernels.

    Ranks take their turns in the same calls, and each decides for itself: all kernels give the same bits. A turn that could
    not be timed is taken again.
    """

    def __init__(self) -> None:
        self.is_over = not is_wanted()
        self.takes_chosen = False
        self._num_calls = 0
        self._products: Sequence[Product] = ()
        self._is_turn = False  # whether the call that was prepared last is timed
        self._turns: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def prepare(self, look: Callable[[], Sequence[Product]]) -> None:
        """Note a call that is about to be made. Before the third, the kernels of the products that `look` returns are timed:
        here, where nothing of that call waits for other ranks yet.
        """
        if self.is_over:
            return
        self._num_calls += 1
        self._is_turn = self.takes_chosen = False
        if self._num_calls == 1 + NUM_CALLS_BEFORE:
            self._products = look()
            for product in self._products:
                product.measure()
        elif len(self._turns) == len(TURNS):
            self._decide()
        elif self._num_calls > NUM_CALLS_BEFORE and all(product.is_chosen() for product in self._products):
            self.is_over = not any(product.chosen for product in self._products)
            self._is_turn = not self.is_over
            self.takes_chosen = self._is_turn and TURNS[len(self._turns)]

    @contextmanager
    def turn(self, *, is_captured: bool, is_steady: bool) -> Iterator[None]:
        """Let the call that was prepared run, by its kernels, and time it if it is a turn and `is_steady`: replayed, and not
        for the first time, which is slower. A call that is captured was not prepared, and takes what is decided.
        """
        if is_captured or not self._is_turn or not (is_steady or self._num_calls > PATIENCE):
            with multiplying(by_chosen=self.takes_chosen and (self.is_over or not is_captured)):
                yield
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        with multiplying(by_chosen=self.takes_chosen):
            yield
        end.record()
        self._turns.append((start, end))

    def in_words(self) -> str:
        """Return whose kernels multiply."""
        if not self.is_over:
            return "torch's, while others are timed"
        return "chosen by their times" if self.takes_chosen else "torch's"

    def _decide(self) -> None:
        """End the trial, if the GPU has passed the last turn."""
        if not self._turns[-1][1].query():
            return
        times: dict[bool, list[float]] = {False: [], True: []}
        for takes_chosen, (start, end) in zip(TURNS, self._turns, strict=True):
            times[takes_chosen].append(start.elapsed_time(end))
        self.takes_chosen = fastest_alike([times[False], times[True]], [0, 0]) == 1
        self.is_over, self._products, self._turns = True, (), []
