"""Simulated timelines as they are stored, and the way to store them anew: `python -m tests.golden.regenerate`.

Stored files hold whole timelines of one workload and the figures of one trace, in microseconds rounded to 0.001. A change of
the simulator or of its constants that moves any of them fails `test_golden_timelines.py`; look at what this prints before
you commit the new files.
"""

import json
from pathlib import Path

from counterpoint.controls import Priority
from counterpoint.job import load_job
from counterpoint.metrics import measure
from counterpoint.plan import LEAVE_IT, Directive, Match, Plan
from counterpoint.sim import Simulator
from counterpoint.timeline import Timeline

FOLDER = Path(__file__).parent
TRACE = FOLDER.parents[1] / "examples" / "traces" / "ddp.rank0.json.gz"
WORKLOAD = "cb_ar_opt2"
PRIORITY = Plan(
    directives=(Directive(match=Match(kind="communication"), controls=(Priority(priority=-5),), reason="golden"),)
)
DIGITS = 3
Stored = dict[str, object]


def simulate_all() -> dict[str, Stored]:
    """Each stored file's name with what should be in it."""
    return {
        "cb_ar_opt2.json": _whole(WORKLOAD, LEAVE_IT),
        "cb_ar_opt2.priority.json": _whole(WORKLOAD, PRIORITY),
        "ddp.rank0.json": _figures(str(TRACE), LEAVE_IT),
        "ddp.rank0.priority.json": _figures(str(TRACE), PRIORITY),
    }


def _run(source: str, plan: Plan) -> Timeline:
    job = load_job(source).to_simulate(None)
    return Simulator().run(job.step, job.machine, plan)


def _whole(source: str, plan: Plan) -> Stored:
    """Start and end of every operation, by its number and name, in the order of their starts."""
    return {
        f"{interval.operation} {interval.name}": [round(interval.start_us, DIGITS), round(interval.end_us, DIGITS)]
        for interval in _run(source, plan).intervals
    }


def _figures(source: str, plan: Plan) -> Stored:
    metrics = measure(_run(source, plan))
    rank = metrics.ranks[0]
    return {name: round(getattr(rank, name), DIGITS) for name in rank.__struct_fields__ if name != "rank"}


def stored(name: str) -> Stored:
    """What is in a stored file."""
    found: Stored = json.loads((FOLDER / name).read_text())
    return found


def differences(old: Stored, new: Stored) -> list[str]:
    """One line for each entry that changed, came or went."""
    return [
        f"{key}: {old.get(key, 'none')} -> {new.get(key, 'none')}"
        for key in [*old, *(key for key in new if key not in old)]
        if old.get(key) != new.get(key)
    ]


def main() -> None:
    """Write every file that changed and print what changed in it."""
    for name, new in simulate_all().items():
        old = stored(name) if (FOLDER / name).exists() else {}
        changed = differences(old, new)
        print(f"{name}: {len(changed)} of {len(new)} entries changed" if changed else f"{name}: as stored")
        for line in changed:
            print(f"  {line}")
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(entry)}" for key, entry in new.items())
        (FOLDER / name).write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
