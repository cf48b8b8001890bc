"""Draws a timeline as two rows of text: computation above communication.

Each column is an equal part of the time; the height of its block is the share of it in which the row was busy. `text.py`
adds color.
"""

from counterpoint.step import OperationKind
from counterpoint.timeline import Timeline
from counterpoint.value import Value

BLOCKS = " ▁▂▃▄▅▆▇█"
ASCII_BLOCKS = " .:-=+*%#"
ROWS: tuple[OperationKind, ...] = ("computation", "communication")


class Lane(Value, frozen=True, kw_only=True):
    """One row: for each column the fraction of its time, 0 to 1, in which the row was busy."""

    kind: OperationKind
    busy: tuple[float, ...]

    def text(self, blocks: str = BLOCKS) -> str:
        """Write the row in `blocks`, nine characters from empty to full; a busy column shows at least the second."""
        return "".join(blocks[max(1, round(8 * share)) if share > 0.002 else 0] for share in self.busy)


def draw_lanes(timeline: Timeline, num_columns: int, total_us: float) -> tuple[Lane, ...]:
    """Return the rows of the first rank over `total_us` microseconds; to compare timelines, pass the longer makespan."""
    intervals = timeline.of_rank(timeline.ranks()[0])
    return tuple(
        Lane(
            kind=kind,
            busy=_busy_shares(
                [(interval.start_us, interval.end_us) for interval in intervals if interval.kind == kind],
                num_columns,
                total_us,
            ),
        )
        for kind in ROWS
    )


def _busy_shares(spans: list[tuple[float, float]], num_columns: int, total_us: float) -> tuple[float, ...]:
    """Return the share of each column that the union of `spans` covers."""
    width_us = total_us / num_columns
    shares = [0.0] * num_columns
    covered_us = 0.0
    for start_us, end_us in sorted(spans):
        start_us = max(start_us, covered_us)  # noqa: PLW2901
        covered_us = max(covered_us, end_us)
        column = int(start_us / width_us)
        while start_us < end_us and column < num_columns:
            upto_us = min(end_us, (column + 1) * width_us)
            shares[column] += max(0.0, upto_us - start_us) / width_us
            start_us, column = upto_us, column + 1  # noqa: PLW2901
    return tuple(min(1.0, share) for share in shares)
