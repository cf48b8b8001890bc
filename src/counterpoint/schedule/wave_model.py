"""Models how matmul pieces share a rank's SMs: last tiles go to the SM that is free first, so the last wave of one piece
and the first wave of the next, if it is ready, run side by side.

Every SM runs one tile at a time, as with cuBLAS's persistent kernels: a CTA fills an SM's registers. The cost of a tile
comes from `costs.py`.
"""

from collections import Counter

from counterpoint.value import Value

Group = tuple[float, int]  # a time, and how many SMs are free from then on
# if so many SMs become free at another time than most, the next piece's tiles no longer run side by side; of fewer, as
# behind 128 tiles on 132 SMs, a part of the loss. Assumed: with 0.05 as many picks are right
UNEVEN_SHARE = 0.1


class Piece(Value, frozen=True, kw_only=True):
    """Equal tiles; the first of them start `start_us` after the SMs are free, and up to `stagger_us` later if the SMs become
    free one after the other. Work that waits for the piece starts `after_us` after the last tile, when the SMs may already
    run another piece's tiles.
    """

    num_tiles: int
    tile_us: float
    start_us: float
    stagger_us: float = 0.0
    after_us: float = 0.0


class Sms:
    """When each SM of a rank is free."""

    def __init__(self, num_sms: int) -> None:
        self._num_sms = num_sms
        self._groups: list[Group] = [(0.0, num_sms)]  # in order of time

    def first_free_us(self) -> float:
        """Return when the first SM is free."""
        return self._groups[0][0]

    def fill(self, ready_us: float, duration_us: float) -> float:
        """Run work that spreads evenly over all SMs, as activations do, and return its end."""
        end_us = self._mean_us(ready_us) + duration_us
        self._groups = [(end_us, self._num_sms)]
        return end_us

    def run(self, ready_us: float, piece: Piece, smoothing: float) -> float:
        """Run the tiles of a piece, and return when work that waits for it may start.

        `smoothing` from 0 to 1: the share of the loss of SMs without a tile in the last wave that returns, as power that
        the others may draw.
        """
        if not piece.num_tiles:
            return max(ready_us, self.first_free_us())
        late_us = piece.start_us + piece.stagger_us * self._unevenness(ready_us)
        even_us = self._mean_us(ready_us) + late_us + piece.num_tiles * piece.tile_us / self._num_sms
        ends = self._place(ready_us, late_us, piece)
        last_us = max(end_us for end_us, _ in ends)

        def smoothed(time_us: float) -> float:
            return time_us + smoothing * (even_us - time_us)

        self._groups = [(smoothed(time_us), count) for time_us, count in ends]
        return smoothed(last_us) + piece.after_us

    def _unevenness(self, ready_us: float) -> float:
        """Return from 0 to 1 how unevenly SMs become free for work that is ready at `ready_us`."""
        nums = Counter[float]()
        for time_us, count in self._groups:
            nums[max(time_us, ready_us)] += count
        return min(1.0, (1 - max(nums.values()) / self._num_sms) / UNEVEN_SHARE)

    def _place(self, ready_us: float, late_us: float, piece: Piece) -> list[Group]:
        """Give every SM equally many tiles of all whole waves but the last, as a persistent kernel's CTAs share them, and
        the rest tile by tile to the SMs that are free first."""
        num_waves = max(0, piece.num_tiles // self._num_sms - 1)
        later_us = late_us + num_waves * piece.tile_us
        groups = [(max(time_us, ready_us) + later_us, count) for time_us, count in self._groups]
        left = piece.num_tiles - num_waves * self._num_sms
        while left > 0:
            groups.sort()
            time_us, count = groups.pop(0)
            taken = min(count, left)
            groups.append((time_us + piece.tile_us, taken))
            if count > taken:
                groups.append((time_us, count - taken))
            left -= taken
        return sorted(groups)

    def _mean_us(self, ready_us: float) -> float:
        return sum(max(time_us, ready_us) * count for time_us, count in self._groups) / self._num_sms
