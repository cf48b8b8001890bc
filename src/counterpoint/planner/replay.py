"""How far a simulated timeline may be trusted: what it makes of a traced step without any control, against the trace.

The makespan alone is no judge: a replay can hit it and have communication exposed that was hidden. So exposed time and
overlap are compared as well, and a gain counts only where it is larger than the error.
"""

from counterpoint.measurement.values import MOST_OVERLAP_DIFFERENCE, MOST_REPLAY_ERROR
from counterpoint.metrics import measure
from counterpoint.timeline import Timeline
from counterpoint.units import format_change, format_percent
from counterpoint.value import Value


class ReplayAccuracy(Value, frozen=True, kw_only=True):
    """A replay less the trace. `makespan_error` and `exposed_difference` are shares of the traced makespan, signed.

    `overlap_difference` is of the overlap ratios, 0 to 1; None where either has no communication.
    """

    makespan_error: float
    exposed_difference: float
    overlap_difference: float | None = None

    @property
    def error(self) -> float:
        """The larger of the first two without its sign: no smaller gain can be told from it."""
        return max(abs(self.makespan_error), abs(self.exposed_difference))

    def describe(self) -> str:
        """In words, as in "makespan +0.5 %, exposed -0.1 % of the makespan, overlap +1.1 points"."""
        exposed = f"exposed {format_change(self.exposed_difference)} of the makespan"
        words = f"makespan {format_change(self.makespan_error)}, {exposed}"
        if self.overlap_difference is None:
            return words
        return f"{words}, overlap {format_change(self.overlap_difference).removesuffix(' %')} points"

    def why_unknown(self, gain: float) -> str:
        """Why a plan that brings `gain`, a share of the makespan, cannot be judged; empty where it can."""
        if self.error > MOST_REPLAY_ERROR:
            limit = f"more than the {format_percent(MOST_REPLAY_ERROR)} up to which a simulation says anything"
        elif abs(self.overlap_difference or 0.0) > MOST_OVERLAP_DIFFERENCE:
            limit = f"and overlap may differ by {100 * MOST_OVERLAP_DIFFERENCE:.0f} points at most"
        elif 0 < gain < self.error:
            limit = f"more than the {format_percent(gain)} that a plan would bring"
        else:
            return ""
        return f"the replay differs from the trace ({self.describe()}), {limit}"


def compare_replay(traced: Timeline, replayed: Timeline) -> ReplayAccuracy:
    """What the simulation of a step without any control makes of it, against what was traced."""
    before, after = measure(traced), measure(replayed)
    ratios = (before.overlap_ratio, after.overlap_ratio)
    return ReplayAccuracy(
        makespan_error=after.makespan_us / before.makespan_us - 1,
        exposed_difference=(after.exposed_us - before.exposed_us) / before.makespan_us,
        overlap_difference=None if ratios[0] is None or ratios[1] is None else ratios[1] - ratios[0],
    )
