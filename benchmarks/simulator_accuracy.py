"""How near the simulator comes to what was measured on H200s: replayed traces and the reference runs."""

from benchmarks.conditions import asks_to_write, store
from benchmarks.reference_runs import Comparison, coresidency_runs, head_start_runs, residency_speed_runs, shipped_traces
from counterpoint.job import load_job
from counterpoint.metrics import measure
from counterpoint.plan import LEAVE_IT
from counterpoint.sim import Simulator


def replays() -> list[Comparison]:
    """The makespan of each shipped trace, as traced and as replayed without any control."""
    found = []
    for path in shipped_traces():
        job = load_job(str(path)).to_simulate(None)
        assert job.traced is not None, "a trace was loaded"
        simulated = measure(Simulator().run(job.step, job.machine, LEAVE_IT)).makespan_us
        found.append(Comparison(path.name, "makespan", measure(job.traced.timeline).makespan_us, simulated))
    return found


def _print(title: str, limit: float, comparisons: list[Comparison]) -> None:
    print(f"\n{title} (asked: {100 * limit:.0f} %)")
    for entry in comparisons:
        print(
            f"  {entry.run:58} {entry.figure:16} measured {entry.measured_us / 1000:8.3f} ms  "
            f"simulated {entry.simulated_us / 1000:8.3f} ms  {100 * entry.error:+6.1f} %"
        )
    worst = max(comparisons, key=lambda entry: abs(entry.error))
    print(f"  worst: {100 * worst.error:+.1f} %")


def main() -> None:
    is_stored = asks_to_write(__doc__)
    pairs = head_start_runs()
    groups = {
        "replay of the shipped traces": (0.02, replays()),
        "co-residency": (0.10, coresidency_runs()),
        "speed of capped kernels": (0.12, residency_speed_runs()),
        "head start": (0.08, [entry for pair in pairs for entry in pair]),
    }
    for title, (limit, comparisons) in groups.items():
        _print(title, limit, comparisons)
    print("\nshare of a head start's measured gain that is predicted")
    for default, ahead in pairs:
        measured, simulated = default.measured_us - ahead.measured_us, default.simulated_us - ahead.simulated_us
        print(
            f"  {default.run:40} measured {measured / 1000:+.3f} ms  simulated {simulated / 1000:+.3f} ms  "
            f"share {simulated / measured:.2f}"
        )
    if is_stored:
        result = {
            title: [
                {
                    "run": entry.run,
                    "figure": entry.figure,
                    "measured_us": round(entry.measured_us, 3),
                    "simulated_us": round(entry.simulated_us, 3),
                    "error": round(entry.error, 4),
                }
                for entry in comparisons
            ]
            for title, (_, comparisons) in groups.items()
        }
        print(f"\nwritten to {store('simulator_accuracy', result)}")


if __name__ == "__main__":
    main()
