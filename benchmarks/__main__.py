"""Run every benchmark that needs no GPU: `python -m benchmarks [--write]`."""

from benchmarks import filter_overhead, heuristic_accuracy, simulator_accuracy, speed, trace_reading

for benchmark in (simulator_accuracy, heuristic_accuracy, speed, trace_reading, filter_overhead):
    print(f"\n== {benchmark.__name__.removeprefix('benchmarks.')}: {(benchmark.__doc__ or '').splitlines()[0]}")
    benchmark.main()
