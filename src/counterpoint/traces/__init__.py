"""Profiler traces: read one into a step, and write timelines as traces."""

from counterpoint.traces.traced_step import TracedStep, read_trace

__all__ = ["TracedStep", "read_trace"]
