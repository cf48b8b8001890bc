"""Whether the calls of a schedule are faster with the kernels that are the fastest alone: calls take turns with and without.

Beside copies, which load L2 as a matmul's own reads do, and beside the next matmul on another stream, a kernel that is the
fastest alone may be slower than torch's: on 4 H100s whole calls took up to 15 % longer (2026-11-27).
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from counterpoint.errors import cause_of
from counterpoint.ops.graph_cache import MAX_RECORDINGS
from counterpoint.ops.kernel_choice import fastest_alike, is_wanted
from counterpoint.ops.products import Product, multiplying

LOGGER = logging.getLogger("counterpoint")
NUM_CALLS_BEFORE = 2  # calls before kernels are timed: many shapes come only once, or twice
STARTS = 8  # turns begin in a call whose number is a multiple, so that ranks begin in the same one
NUM_TURNS = 6  # with and without the chosen kernels
# after so many calls addresses do not come again, and calls that are not replayed are turns, too
PATIENCE = 2 * MAX_RECORDINGS


class KernelTrial:
    """The choice of kernels for the calls of one schedule with weights of one layout, under the same settings of torch.
    `takes_chosen` says whether the call that was prepared last uses the chosen kernels.

    Ranks take their turns in the same calls, and each decides for itself: all kernels give the same bits.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_over = not is_wanted()
        self.takes_chosen = False
        self._device = device
        self._num_calls = 0
        self._begins: int | None = None  # the call of the first turn
        self._is_turn = False  # whether the call that was prepared last may be timed
        self._products: Sequence[Product] = ()
        self._turns: dict[bool, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {False: [], True: []}

    def prepare(self, look: Callable[[], Sequence[Product]]) -> None:
        """Note a call that is about to be made. Before the third, the kernels of the products that `look` returns are timed:
        here, where nothing of that call waits for other ranks yet. If anything fails, torch's kernels stay.
        """
        if self.is_over:
            return
        self._num_calls += 1
        self._is_turn = self.takes_chosen = False
        try:
            with torch.cuda.device(self._device):
                self._go_on(look)
        except Exception as problem:  # the other ranks are about to make this call, whatever went wrong here
            LOGGER.warning("torch's own kernels multiply, because others could not be timed (%s).", cause_of(problem))
            self._end(takes_chosen=False)

    def _go_on(self, look: Callable[[], Sequence[Product]]) -> None:
        if self._num_calls == 1 + NUM_CALLS_BEFORE:
            self._products = look()
            for product in self._products:
                product.measure()
        elif all(len(turns) >= NUM_TURNS for turns in self._turns.values()):
            self._decide()
        elif self._num_calls > NUM_CALLS_BEFORE and all(product.is_chosen() for product in self._products):
            if not any(product.chosen for product in self._products):
                self._end(takes_chosen=False)
            elif self._begins is None and self._num_calls % STARTS == 0:
                self._begins = self._num_calls
        if self._begins is not None and not self.is_over:
            self._is_turn, self.takes_chosen = True, takes_chosen_in(self._num_calls - self._begins)

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
        start.record(torch.cuda.current_stream(self._device))
        with multiplying(by_chosen=self.takes_chosen):
            yield
        end.record(torch.cuda.current_stream(self._device))
        self._turns[self.takes_chosen].append((start, end))

    def in_words(self) -> str:
        """Return whose kernels multiply."""
        if not self.is_over:
            return "the library's first choice, while others are timed"
        return "chosen by their times" if self.takes_chosen else "the library's first choice"

    def _decide(self) -> None:
        """End the trial, if the GPU has passed all turns."""
        if not all(turns[-1][1].query() for turns in self._turns.values()):
            return
        times = [[start.elapsed_time(end) for start, end in self._turns[takes_chosen]] for takes_chosen in (False, True)]
        self._end(takes_chosen=fastest_alike(times, [0, 0]) == 1)

    def _end(self, *, takes_chosen: bool) -> None:
        self.is_over, self.takes_chosen, self._is_turn = True, takes_chosen, False
        self._products = ()
        self._turns.clear()


def takes_chosen_in(number: int) -> bool:
    """Return whether turn `number` uses the chosen kernels, by the Thue-Morse sequence: of two turns one does, and a layer
    that comes at the same place in each step is not always on the same side.
    """
    return bool(number.bit_count() % 2)
