"""Chooses operators' copy schedules by measurement on GPUs: one call after the other, its schedules interleaved.

All ranks measure the same calls with the same schedules. The slowest rank's time counts, so all ranks build the same
plan. Results are compared with those of `sequential` before and after. It has run on 2 H200s, and not on more.
"""

from collections.abc import Sequence
from contextlib import closing

from counterpoint.measurement.orders import Rounds, draw_seed
from counterpoint.measurement.tournament import compare
from counterpoint.ops.call_timer import AbstractCallTimer, open_call_timer
from counterpoint.ops.runtime import Group, Request, Runtime, runtime_of_group
from counterpoint.ops.schedule_benchmark import ScheduleBenchmark
from counterpoint.plan import Plan
from counterpoint.planner.operators import OperatorTuning, TunedOperator, descriptions_to_measure, plan_of
from counterpoint.schedule.estimate import estimate_ideal
from counterpoint.schedule.heuristic import pick_schedule


def tune_operators(
    group: Group | None = None,
    requests: Sequence[Request] | None = None,
    *,
    timer: AbstractCallTimer | None = None,
    num_rounds: int = 15,
) -> Plan:
    """Return the plan with the fastest schedule for every shape that the group has run so far, or for the given
    requests.

    All ranks call it together, between steps and outside of captures. It applies nothing: pass the plan to
    `counterpoint.ops.use_plan` on every rank. In tests, `timer` replaces events on GPUs. Raises `DeviceError` on CPUs,
    and `OperatorError` on every rank if ranks disagree or results differ.
    """
    return measure_operators(group, requests, timer=timer, num_rounds=num_rounds).plan


def measure_operators(
    group: Group | None = None,
    requests: Sequence[Request] | None = None,
    *,
    timer: AbstractCallTimer | None = None,
    num_rounds: int = 15,
) -> OperatorTuning:
    """Tune as `tune_operators` does, and also return the measurements."""
    runtime = runtime_of_group(group)
    own_timer = timer or open_call_timer(runtime)
    wanted = tuple(dict.fromkeys(runtime.requests if requests is None else requests))
    names = [request.name(runtime.group.size()) for request in wanted]
    runtime.propose(f"tuning of {', '.join(names)}", _problem_of(wanted))
    return plan_of(
        [_measured(runtime, request, own_timer, num_rounds=num_rounds) for request in wanted], runtime.machine_name
    )


def _problem_of(requests: Sequence[Request]) -> str:
    """Return why these requests cannot be tuned, or an empty string."""
    if not requests:
        return (
            "there is no call to tune: the group has run no call whose schedule the plan decides. Run a step "
            "first, or give the requests."
        )
    named = next((request for request in requests if request.schedule), None)
    return f"a request to tune names no schedule; found {named.words()}. Leave the schedule out." if named else ""


def _measured(runtime: Runtime, request: Request, timer: AbstractCallTimer, *, num_rounds: int) -> TunedOperator:
    problem = request.problem(runtime.group.size())
    with closing(
        ScheduleBenchmark(runtime, request, descriptions_to_measure(problem, runtime.machine, request.direction))
    ) as benchmark:
        labels = [description.label() for description in benchmark.descriptions]
        benchmark.require_right()
        seed = int(runtime.text_of_first(str(draw_seed())))
        rounds = Rounds(seed, len(labels))
        for number in range(timer.num_warm_up_rounds):
            benchmark.warm_up(rounds.order(number))
        comparison = compare(labels, lambda number: benchmark.time_us(number, timer), num_rounds, seed)
        benchmark.require_right()
    picked = pick_schedule(problem, runtime.machine, request.direction).description
    return TunedOperator(
        name=benchmark.name,
        descriptions=benchmark.descriptions,
        comparison=comparison,
        estimated=benchmark.descriptions.index(picked),
        ideal_us=estimate_ideal(problem, runtime.machine, direction=request.direction),
    )
