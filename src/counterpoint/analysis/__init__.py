"""Analyzes the communication in profiler traces: what is exposed, why, and how much of it can be recovered."""
