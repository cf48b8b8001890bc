"""Training jobs that benchmarks start and take models from. None of them knows Counterpoint."""
