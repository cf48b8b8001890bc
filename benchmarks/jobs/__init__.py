"""Training jobs that benchmarks start and take models from. None of them knows Counterpoint.

Each is whole in one file and runs by its path from any folder, so both hold their own `print_last_half`.
"""
