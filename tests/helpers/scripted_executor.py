"""An executor that is told what each plan takes: for tests of a planner, which must not care where timelines come from."""

from collections.abc import Callable
from typing import Literal

from counterpoint.controls import Control, HeadStart, Priority, ResidencyCap, Transport
from counterpoint.machine import Machine
from counterpoint.plan import Plan
from counterpoint.step import Collective, Dependency, Footprint, Kernel, Step
from counterpoint.timeline import AbstractExecutor, Interval, Timeline

SPANS_US = ((0.0, 10.0), (100.0, 150.0), (10.0, 60.0), (60.0, 110.0), (110.0, 150.0))


def contended_step() -> Step:
    """An all-gather that is ready at 10 us but starts at 100, behind the kernels 'long' and 'longer'."""
    wide = Footprint(num_ctas=4096, threads_per_cta=128, registers_per_thread=32)
    small = Footprint(num_ctas=24, threads_per_cta=128, registers_per_thread=32)  # a cap of one CTA less lets it in
    after_producer = (Dependency(operation=0),)
    return Step(
        name="contended",
        num_ranks=4,
        operations=(
            Kernel(name="producer", stream=0, footprint=wide, lone_us=10),
            Collective(
                name="gather",
                stream=1,
                collective="all_gather",
                num_bytes=1 << 26,
                group_size=4,
                footprint=small,
                waits_for=after_producer,
            ),
            Kernel(name="long", stream=0, footprint=wide, lone_us=500),
            Kernel(name="longer", stream=0, footprint=wide, lone_us=500),
            Kernel(name="last", stream=0, footprint=wide, lone_us=40),
        ),
    )


def in_words(control: Control, name: str) -> str:
    """A control as the scripts of the tests call it."""
    match control:
        case Priority():
            return "priority"
        case HeadStart():
            return f"hold {control.hold_us:g}"
        case ResidencyCap():
            return f"cap {name} {control.ctas_per_sm}"
        case Transport():
            return "copy engines"
        case _:
            return f"{control.max_ctas} CTAs" + (f" of {control.num_threads}" if control.num_threads else "")


def words_of(plan: Plan) -> frozenset[str]:
    return frozenset(
        in_words(control, directive.match.name) for directive in plan.directives for control in directive.controls
    )


class ScriptedExecutor(AbstractExecutor):
    """Stretches the last kernel of `contended_step` so that the makespan is what `makespan_us` says of the plan's words."""

    def __init__(
        self, makespan_us: Callable[[frozenset[str]], float], origin: Literal["measured", "simulated"] = "simulated"
    ) -> None:
        self.makespan_us = makespan_us
        self.origin = origin
        self.plans: list[Plan] = []

    def run(self, step: Step, machine: Machine, plan: Plan) -> Timeline:
        self.plans.append(plan)
        spans = (*SPANS_US[:-1], (SPANS_US[-1][0], self.makespan_us(words_of(plan))))
        intervals = tuple(
            Interval(
                rank=0,
                stream=operation.stream,
                operation=index,
                name=operation.name,
                kind=operation.kind,
                start_us=start_us,
                end_us=end_us,
            )
            for index, (operation, (start_us, end_us)) in enumerate(zip(step.operations, spans, strict=True))
        )
        return Timeline(step_name=step.name, origin=self.origin, intervals=intervals)
