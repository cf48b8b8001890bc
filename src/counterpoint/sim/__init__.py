"""The simulator: an executor that needs no GPU."""

from counterpoint.sim.simulator import Simulator

__all__ = ["Simulator"]
