"""What profiler traces say about communication: what is exposed, why, and how much of it can be recovered."""
