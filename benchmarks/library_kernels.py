"""Kernels of PyTorch that no constant was measured with: alone with fewer CTAs on an SM, and beside a kernel that is known.

    python -m benchmarks.library_kernels -o library.json
    python -m benchmarks.library_kernels library.json       # without a GPU: the simulator's errors

*alone*: an operator three times; its longest kernel with all of its CTAs on an SM, one less, three quarters, half, a
quarter, and one. *beside*: an operator twice, then once more together with another one, which is known; as they are, with
priority, and with half of their CTAs. Every step is captured, and its variants take turns.
"""

import argparse
import faulthandler
import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from benchmarks.conditions import compare_or_measure, measured_in
from counterpoint.controls import Control, Priority, ResidencyCap
from counterpoint.errors import OccupancyError
from counterpoint.machine import Machine, load_machine
from counterpoint.occupancy import cap_shared_bytes, residency
from counterpoint.paper.values import PLAIN
from counterpoint.plan import Directive, Match, Plan
from counterpoint.step import Kernel, Step
from counterpoint.validation.figures import PredictedRow, figures_of
from counterpoint.validation.outcome import predict_rows
from counterpoint.validation.records import MeasuredCase, MeasuredSet

DIGEST, ROUNDS, LIMIT_S = "library kernels", 7, 400
KNOWN = ("matmul", "multiply", "softmax")  # each of the others runs beside these
ALONE, BESIDE = "alone", "beside"
Call = Callable[[], object]


def steps() -> Iterator[tuple[str, Call]]:
    """A name and a step function: each operator alone, and beside those that are known."""
    import torch  # noqa: PLC0415  comparing needs no torch

    from benchmarks.library_operators import OPERATORS  # noqa: PLC0415

    side = torch.cuda.Stream()
    known: dict[str, Call] = {}

    def beside(first: Call, second: Call) -> None:
        main = torch.cuda.current_stream()
        first()
        begun = main.record_event()
        first()
        with torch.cuda.stream(side):
            side.wait_event(begun)
            second()
        first()
        main.wait_stream(side)

    for name, make in OPERATORS.items():
        call = make()
        yield f"{ALONE}: {name}", lambda call=call: [call() for _ in range(3)]
        for other, known_call in known.items():
            yield f"{BESIDE}: {name} beside {other}", lambda first=known_call, second=call: beside(first, second)
        if len(known) == len(KNOWN):
            yield f"{BESIDE}: {KNOWN[0]} beside {name}", lambda first=call: beside(first, known[KNOWN[0]])
        if name in KNOWN:
            known[name] = call
        torch.cuda.empty_cache()


def plans_for(name: str, step: Step, machine: Machine) -> dict[str, Plan]:
    """The variants of a step, as it is first; a cap is for the kernel that takes longest, beside others for all kernels."""
    kernels = {number: each for number, each in enumerate(step.operations) if isinstance(each, Kernel)}
    total_us = dict.fromkeys((each.name for each in kernels.values()), 0.0)
    for each in kernels.values():
        total_us[each.name] += each.lone_us or 0.0
    is_alone = name.startswith(ALONE)
    capped = [max(total_us, key=lambda each: total_us[each])] if is_alone else list(total_us)
    found: dict[str, Plan] = {PLAIN: Plan()}
    guests = tuple(number for number, each in kernels.items() if each.stream != step.operations[0].stream)
    if guests:
        found["priority"] = _plan({guests: Priority(priority=machine.gpu.greatest_priority)})
    for label, share in {"three quarters": 0.75, "half": 0.5, "a quarter": 0.25, "one less": 1.0, "one": 0.0}.items():
        controls: dict[tuple[int, ...], Control] = {}
        for kernel in capped if is_alone or label == "half" else ():
            numbers = tuple(number for number, each in kernels.items() if each.name == kernel)
            footprint = kernels[numbers[0]].footprint
            usual = residency(machine.gpu, footprint).ctas_per_sm
            count = min(usual - 1, max(1, math.floor(share * usual)))
            try:
                dynamic = cap_shared_bytes(machine.gpu, footprint, max(1, count))
            except OccupancyError:
                continue
            controls[numbers] = ResidencyCap(ctas_per_sm=count, dynamic_shared_bytes=dynamic)
        if controls and (plan := _plan(controls)) not in found.values():
            found[label] = plan
    return found


def _plan(controls: dict[tuple[int, ...], Control]) -> Plan:
    directives = (
        Directive(match=Match(operations=numbers), controls=(control,), reason="measured")
        for numbers, control in controls.items()
    )
    return Plan(directives=tuple(directives))


def measure(options: argparse.Namespace) -> None:
    """Measure every step on this GPU, and save after each one."""
    from benchmarks.on_gpus import saving  # noqa: PLC0415
    from counterpoint.cuda.capture import capture  # noqa: PLC0415
    from counterpoint.cuda.conditions import measuring_conditions  # noqa: PLC0415
    from counterpoint.measurement.orders import draw_seed  # noqa: PLC0415
    from counterpoint.measurement.tournament import measure_rounds  # noqa: PLC0415
    from counterpoint.planner.on_gpu import machine_of  # noqa: PLC0415
    from counterpoint.validation.on_gpu import rewritten_variants, row_of  # noqa: PLC0415

    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    save = saving(options.output)
    cases: list[MeasuredCase] = []
    for name, run in steps():
        with ExitStack() as opened:
            captured = capture(run, name)
            opened.callback(captured.close)
            step, machine = captured.read.step, machine_of(captured)
            ready = list(rewritten_variants(captured, plans_for(name, step, machine), opened))
            labels = [each.label for each in ready]
            found = measure_rounds(labels, lambda turn: captured.time_us(ready[turn].executable), ROUNDS, draw_seed())  # noqa: B023
            rows = tuple(row_of(variant, each) for variant, each in zip(ready, found, strict=True))
        cases.append(MeasuredCase(name=name, step=step, rows=rows, sum_by="one kernel"))
        conditions = measuring_conditions(rounds=ROUNDS)
        save(MeasuredSet(digest=DIGEST, machine=machine.name, num_gpus=1, conditions=conditions, cases=tuple(cases)))


def compared(options: argparse.Namespace) -> Iterator[str]:
    """The simulator's errors by variant, and then those of each step."""
    rows: list[tuple[str, PredictedRow]] = []
    for path in options.files:
        measured = measured_in(path)
        for case in measured.cases:
            rows += [(case.name.split(":")[0], row) for row in predict_rows(case, load_machine(measured.machine))]
    for family in (ALONE, BESIDE):
        for label in dict.fromkeys(row.label for _, row in rows):
            chosen = [row for name, row in rows if (name, row.label) == (family, label)]
            if chosen:
                yield f"{family}, {label}: {_errors(chosen)}"
    everything = figures_of([row for _, row in rows])
    yield (
        f"all {everything.num_rows}: {everything.mean_error:.1%} off (90th percentile {everything.p90_error:.1%}), clear "
        f"signs {everything.clear_sign or 0:.0%} of {everything.num_clear}, regret {everything.mean_regret:.1%} "
        f"({everything.worst_regret:.1%})"
    )
    for _, row in rows:
        yield (
            f"{row.group}, {row.label}: {row.measured_us:.0f} us, predicted {row.predicted_us / row.measured_us - 1:+.1%}; "
            f"change {row.measured_us / row.measured_baseline_us - 1:+.1%}, predicted "
            f"{row.predicted_us / row.predicted_baseline_us - 1:+.1%}"
        )


def _errors(rows: list[PredictedRow]) -> str:
    errors = sorted(abs(row.predicted_us / row.measured_us - 1) for row in rows)
    late = errors[int(0.9 * (len(errors) - 1))]
    return f"{len(rows)} rows, {statistics.mean(errors):.1%} off (90th percentile {late:.1%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    compare_or_measure(parser, compared, measure)


if __name__ == "__main__":
    main()
