"""The launch filter: a preloaded C library that applies a plan to every launch of a process, and its control block."""
