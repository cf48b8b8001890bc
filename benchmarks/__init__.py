"""Benchmarks: each module prints a table and, with --write, stores it with its conditions under benchmarks/results/."""
