"""Values that a user builds in Python with a field of a wrong type are refused there, in one line."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from counterpoint.controls import Priority, Transport
from counterpoint.errors import CounterpointError
from counterpoint.plan import Directive, Match, Plan
from counterpoint.step import Collective, Footprint, Kernel, Step
from counterpoint.timeline import Interval

FOOTPRINT = Footprint(num_ctas=132, threads_per_cta=128, registers_per_thread=32)


def kernel(**changes: Any) -> Kernel:
    return Kernel(**({"name": "k", "stream": 0, "footprint": FOOTPRINT, "lone_us": 5.0} | changes))


def step(*operations: Any, **changes: Any) -> Step:
    return Step(**({"name": "s", "num_ranks": 2, "operations": operations} | changes))


def collective(**changes: Any) -> Collective:
    sizes = {"name": "c", "stream": 1, "collective": "all_reduce", "num_bytes": 8, "group_size": 2}
    return Collective(**(sizes | changes))


def plan(*controls: Any) -> Plan:
    return Plan(directives=(Directive(match=Match(), controls=controls, reason="test"),))


def interval(**changes: Any) -> Interval:
    times = {"start_us": 0.0, "end_us": 1.0}
    return Interval(**({"rank": 0, "stream": 0, "operation": 0, "name": "k", "kind": "computation"} | times | changes))


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: step(kernel(stream="0")), "Operation 0: stream must be int; found '0'."),
        (lambda: step(kernel(lone_us="5")), "Operation 0: lone_us must be int or float or None; found '5'."),
        (lambda: step(kernel(footprint=None)), "Operation 0: footprint must be Footprint; found None."),
        (lambda: step(kernel(name=None)), "Operation 0: name must be str; found None."),
        (lambda: step(kernel(), kernel(waits_for=(0,))), "Operation 1 ('k'): waits_for: a value such as"),
        (lambda: step(kernel(), num_ranks="4"), "Step: num_ranks must be int; found '4'."),
        (lambda: Step(name="s", num_ranks=1, operations=[kernel()]), "Step: operations must be tuple; found [Kernel("),
        (
            lambda: step(collective(collective="allreduce")),
            "Operation 0: collective must be one of 'all_gather', 'all_reduce'",
        ),
        (lambda: step(collective(num_bytes=1.5)), "Operation 0: num_bytes must be int; found 1.5."),
        (lambda: Footprint(num_ctas="1", threads_per_cta=32, registers_per_thread=32), "Footprint: num_ctas must be int"),
        (lambda: plan(Transport(transport="nvlink")), "Directive 0 of the plan: transport must be one of"),
        (lambda: plan("priority"), "Directive 0 of the plan: a value such as Priority(priority=-5)"),
        (lambda: Priority(priority="high"), "Priority: priority must be int; found 'high'."),
        (
            lambda: interval(kind="comm"),
            "The kind of an interval must be one of computation, communication, copy; found 'comm'.",
        ),
        (lambda: interval(end_us=math.inf), "An interval must start at 0 or later"),
    ],
)
def test_a_value_of_a_wrong_type_is_one_line_where_it_is_built(build: Callable[[], object], says: str) -> None:
    with pytest.raises(CounterpointError) as problem:
        build()
    assert str(problem.value).startswith(says)
    assert "\n" not in str(problem.value)


def test_values_of_the_right_types_are_built() -> None:
    assert step(kernel(lone_us=5), collective(footprint=FOOTPRINT))
    assert plan(Priority(priority=-5), Transport(transport="copy_engine"))
    assert interval(end_us=2)
