"""How far a simulated timeline can be trusted: the simulation of a traced step without controls is compared with the
trace.

The makespan alone does not tell: a replay can match it and still expose communication that was hidden in the trace.
Exposed time and overlap are therefore compared as well, and a gain counts only if it is larger than the error.
"""

from counterpoint.measurement.values import MOST_OVERLAP_DIFFERENCE, MOST_REPLAY_ERROR
from counterpoint.metrics import measure
from counterpoint.timeline import Timeline
from counterpoint.units import format_change, format_percent
from counterpoint.value import Value


class ReplayAccuracy(Value, frozen=True, kw_only=True):
    """Differences of a replay from its trace. `makespan_error` and `exposed_difference` are signed shares of the traced
    makespan.

    `overlap_difference` is that of the overlap ratios, 0 to 1; None if either has no communication.
    """

    makespan_error: float
    exposed_difference: float
    overlap_difference: float | None = None

    @property
    def error(self) -> float:
        """The larger absolute value of the first two: smaller gains are within the error."""
        return max(abs(self.makespan_error), abs(self.exposed_difference))

    @property
    def share_of_limits(self) -> float:
        """The largest difference, as a share of the limit above which a replay is not used."""
        return max(self.error / MOST_REPLAY_ERROR, abs(self.overlap_difference or 0.0) / MOST_OVERLAP_DIFFERENCE)

    def describe(self) -> str:
        """Return words such as "makespan +0.5 %, exposed -0.1 % of the makespan, overlap +1.1 points"."""
        exposed = f"exposed {format_change(self.exposed_difference)} of the makespan"
        words = f"makespan {format_change(self.makespan_error)}, {exposed}"
        if self.overlap_difference is None:
            return words
        return f"{words}, overlap {format_change(self.overlap_difference).removesuffix(' %')} points"

    def why_unusable(self) -> str:
        """Return why no plan can be judged by the replay; an empty string if it is right enough."""
        if self.error > MOST_REPLAY_ERROR:
            limit = f"more than the {format_percent(MOST_REPLAY_ERROR)} limit above which a simulation is not used"
        elif abs(self.overlap_difference or 0.0) > MOST_OVERLAP_DIFFERENCE:
            limit = f"and overlap may differ by at most {100 * MOST_OVERLAP_DIFFERENCE:.0f} points"
        else:
            return ""
        return self._differs(limit)

    def why_unknown(self, gain: float) -> str:
        """Return why a plan with this `gain`, a share of the makespan, cannot be judged; an empty string if it can."""
        if 0 < gain < self.error:
            return self.why_unusable() or self._differs(f"more than the plan's gain of {format_percent(gain)}")
        return self.why_unusable()

    def _differs(self, limit: str) -> str:
        return f"the replay differs from the trace ({self.describe()}), {limit}"


def compare_replay(traced: Timeline, replayed: Timeline) -> ReplayAccuracy:
    """Compare the simulation of a step without any control with its trace."""
    before, after = measure(traced), measure(replayed)
    ratios = (before.overlap_ratio, after.overlap_ratio)
    return ReplayAccuracy(
        makespan_error=after.makespan_us / before.makespan_us - 1,
        exposed_difference=(after.exposed_us - before.exposed_us) / before.makespan_us,
        overlap_difference=None if ratios[0] is None or ratios[1] is None else ratios[1] - ratios[0],
    )
