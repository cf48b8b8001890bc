"""Ranks on CPUs that run operators under plans, or choose schedules by a scripted clock, as the argument says."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from counterpoint import LEAVE_IT, Directive, Match, Plan, Priority, ScheduleChoice, load_plan, ops, save_plan
from counterpoint.cli.schedule import _tune as tune_schedules
from counterpoint.errors import CounterpointError
from counterpoint.ops.call_timer import AbstractCallTimer
from counterpoint.ops.collectives import Collectives
from counterpoint.ops.messages import CompiledMessages
from counterpoint.planner.operators import descriptions_to_measure
from counterpoint.planner.operators_on_gpu import measure_operators, tune_operators
from counterpoint.schedule import SEQUENTIAL, Problem, ScheduleDescription
from counterpoint.value import write_toml
from helpers.gloo_sections import report, run_sections
from helpers.operator_definitions import draw, keywords, reference, with_schedules

D = ScheduleDescription
INNER, COLUMNS = 7, 5
OPERATORS = with_schedules((None,), (None,))


class Clock(AbstractCallTimer):
    """Runs a call, and says that it took what a script says for its label on this rank."""

    num_warm_up_rounds = 3

    def __init__(self, script: Callable[[str, int], float]) -> None:
        self._script = script
        self.timed: list[str] = []
        self.runs_before = -1

    def time_us(self, label: str, call: Callable[[], None]) -> float:
        if self.runs_before < 0:
            self.runs_before = sum(RUNS.values())
        self.timed.append(label)
        call()
        return self._script(label, dist.get_rank())


RUNS: Counter[int] = Counter()


def count_runs() -> None:
    """Count the calls of every prepared schedule."""
    for kind in (CompiledMessages, Collectives):

        def counted(self: object, *arguments: object, run: Callable[..., bool] = kind.run) -> bool:
            RUNS[id(self)] += 1
            return run(self, *arguments)

        kind.run = counted


def plan(*choices: tuple[str, D]) -> Plan:
    return Plan(
        directives=tuple(
            Directive(match=Match(name=name), controls=(ScheduleChoice(schedule=schedule),), reason=f"reason {number}")
            for number, (name, schedule) in enumerate(choices)
        )
    )


def call(name: str, num_rows: int = 24, **more: object) -> torch.Tensor:
    """One operator forward and backward; its product, which must be what the operator defines."""
    lefts, weights = draw(name, (num_rows, INNER, COLUMNS), torch.Generator().manual_seed(1), torch.float64)
    rank = dist.get_rank()
    left, weight = lefts[rank].clone().requires_grad_(), weights[rank].clone().requires_grad_()
    found = OPERATORS[name][0](left, weight, **keywords(name, num_rows), **more)
    assert torch.allclose(found, reference(name, lefts, weights, rank), atol=1e-10), name
    found.sum().backward()
    return found.detach()


def picks() -> dict[str, tuple[str, str]]:
    """What `explain` says, by request."""
    return {each.request: (each.schedule.label(), each.reason) for each in ops.explain()}


GATHER = "all_gather_matmul of (24, 7) @ (7, 5) float64"
BACKWARD = "all_gather_matmul backward of (24, 7) @ (7, 5) float64"


def named() -> None:
    """A plan's schedules run from the next call on, forward and backward apart, but not where the call names one."""
    size = dist.get_world_size()
    call("all_gather_matmul")
    assert picks()[GATHER][0] == picks()[BACKWARD][0] == "sequential"
    assert {each.name for each in ops.explain()} == {f"{each} on {size} ranks" for each in (GATHER, BACKWARD)}

    refusals = ops.use_plan(plan(("all_gather_matmul of *", D(chunks=2)), ("matmul_*", D())))
    assert refusals == ()
    assert picks() == {}, "nothing was picked since"
    call("all_gather_matmul")
    assert picks()[GATHER] == ("one_peer/2 chunk 1+2", "reason 0")
    assert picks()[BACKWARD][0] == "sequential"
    call("all_gather_matmul", schedule=D(pattern="all_peers", matmul="rest"))
    assert ("all_peers/1 rest 1+2", "named by the caller") in picks().values()
    assert ("all_peers/1 peer 1+2", "named by the caller") in picks().values(), "in backward what the forward one means"
    call("all_to_all_matmul")
    assert picks()["all_to_all_matmul of (24, 7) @ (7, 5) float64"][0] == "sequential"
    report("named")


def of_several_the_last() -> None:
    """Of directives that match the last one counts; an exact name goes by the number of ranks, too; `sequential` is one."""
    size = dist.get_world_size()
    exact = f"{GATHER} on {size} ranks"
    ops.use_plan(plan(("*", D(pattern="all_peers")), (exact, D(chunks=3)), (f"{GATHER} on {size + 1} ranks", D(chunks=4))))
    call("all_gather_matmul")
    assert picks()[GATHER] == ("one_peer/3 chunk 1+2", "reason 1")
    assert picks()[BACKWARD] == ("all_peers/1 chunk 1+2", "reason 0")
    ops.use_plan(plan(("*", D(chunks=2)), ("all_gather*", SEQUENTIAL)))
    call("all_gather_matmul")
    assert picks()[GATHER] == ("sequential", "reason 1")
    report("of several the last")


def taken_back() -> None:
    """`LEAVE_IT` brings the heuristic's picks back, and a plan that comes again takes no more memory than the first time."""
    for name in OPERATORS:
        call(name)
    before = picks()
    wanted = plan(("*", D(chunks=2)))
    taken = []
    for _ in range(3):
        ops.use_plan(wanted)
        for name in OPERATORS:
            call(name)
        assert {reason for _, reason in picks().values()} == {"reason 0"}
        (runtime,) = ops.all_runtimes()
        taken.append((ops.pool_report(), len(runtime.transport._prepared)))
        ops.use_plan(LEAVE_IT)
        for name in OPERATORS:
            call(name)
        assert picks() == before
    assert taken[0] == taken[1] == taken[2]
    report("taken back")


def refused() -> None:
    """What is not for operators comes back with the reason, and the rest is in force."""
    mixed = Plan(
        directives=(
            Directive(match=Match(name="gemm*"), controls=(Priority(priority=-5),), reason="a race"),
            Directive(
                match=Match(name="all_*", kind="communication"), controls=(ScheduleChoice(schedule=D()),), reason="no"
            ),
            Directive(match=Match(name="all_gather*"), controls=(ScheduleChoice(schedule=D(chunks=2)),), reason="yes"),
        )
    )
    first, second = ops.use_plan(mixed)
    assert (first.control, first.target) == ("priority", "gemm*")
    assert "operators accept only copy schedules" in first.reason
    assert (second.control, second.target) == ("copy_schedule", "all_*")
    assert "leave everything else out" in second.reason
    call("all_gather_matmul")
    assert picks()[GATHER][1] == "yes"
    report("refused")


def different() -> None:
    """Ranks with different plans, and a schedule that is not for a request, are one line on every rank; then all works."""
    rank = dist.get_rank()
    call("all_gather_matmul")
    attempts = {
        "other schedules": lambda: ops.use_plan(plan(("*", D(chunks=1 + rank)))),
        "one without": lambda: ops.use_plan(plan(("*", D())) if rank else LEAVE_IT),
        "unfit": lambda: ops.use_plan(plan(("nothing", D()), ("*", D(matmul="rest")))),
    }
    for name, attempt in attempts.items():
        attempt()
        print(f"{name}: {problem_of(lambda: call('all_gather_matmul'))}", flush=True)
        call("all_gather_matmul", schedule=D(chunks=2))  # which no plan changes
    print(f"named: {problem_of(lambda: call('all_to_all_matmul', schedule=D(pattern='ring')))}", flush=True)
    ops.use_plan(plan(("all_gather*", D(chunks=2))))
    call("all_gather_matmul")
    assert picks()[GATHER][1] == "reason 0"
    report("after all that")


def other_machine() -> None:
    """A plan that was measured on another machine is refused by every rank; CPUs are no machine."""
    call("all_gather_matmul")
    elsewhere = Plan(machine="b200", directives=plan(("*", D())).directives)
    ops.use_plan(elsewhere)
    call("all_gather_matmul")
    (runtime,) = ops.all_runtimes()
    runtime.machine_name = "h200"
    ops.use_plan(elsewhere)
    print(f"other machine: {problem_of(lambda: call('all_gather_matmul'))}", flush=True)


def tuned() -> None:
    """Every operator's calls are measured, warm; the plan is the same on all ranks, takes no memory, and can be used."""
    count_runs()
    for name in OPERATORS:
        call(name, 23)
    call("matmul_reduce_scatter", 2)  # fewer rows than ranks, where there are more than two
    call("all_gather_matmul", 24, schedule=D(chunks=2))  # which no plan changes
    (runtime,) = ops.all_runtimes()
    before, ran, prepared = ops.pool_report(), len(ops.explain()), list(runtime.transport._prepared)
    RUNS.clear()
    clock = Clock(lambda label, _: 1000.0 if "sequential" in label else 800.0 + sum(map(ord, label)) % 50)
    found = measure_operators(timer=clock, num_rounds=3)
    assert clock.runs_before > 4 * len(found.operators[0].descriptions), "three rounds, and a comparison with sequential"
    assert ops.pool_report() == before
    assert runtime.transport._prepared == prepared
    assert len(found.operators) == ran - 2
    assert {each.name for each in found.operators} == {each.name for each in ops.explain() if " with " not in each.request}
    for each in found.operators:
        assert each.chosen > 0
        assert each.chosen_us == min(row.median_us for row in each.measurements)
    path = Path(os.environ["MEETING_FILE"]).with_name(f"plan of rank {dist.get_rank()}.toml")
    save_plan(found.plan, path)
    ops.use_plan(load_plan(path))
    for name in OPERATORS:
        call(name, 23)
    kept = {each.name: each.descriptions[each.chosen].label() for each in found.operators}
    used = {each.name: each.schedule.label() for each in ops.explain() if " with " not in each.request}
    assert used.items() <= kept.items()
    assert len(used) == 8
    assert all(each.reason.startswith("measured: ") for each in ops.explain() if " with " not in each.request)
    report("tuned")
    print(f"plan: {write_toml(found.plan)!r}", flush=True)


def slowest() -> None:
    """The slowest rank's time counts: what is fast on one rank alone is not kept."""
    call("all_gather_matmul")
    (runtime,) = ops.all_runtimes()
    request = next(iter(runtime.requests))
    steady = descriptions_to_measure(request.problem(dist.get_world_size()), runtime.machine, "forward")[-1].label()

    def script(label: str, rank: int) -> float:
        if "sequential" in label:
            return 1000.0
        if label.endswith(steady):
            return 900.0
        return 500.0 if rank == 0 else 1100.0

    for tuned_plan in (
        tune_operators(timer=Clock(script), num_rounds=3),
        tune_operators(timer=Clock(lambda label, rank: 700.0 + rank), num_rounds=3),
    ):
        directive = tuned_plan.directives[0]
        label = directive.controls[0].schedule.label()
        print(f"{'steady' if label == steady else label}: {directive.reason}", flush=True)


def wrong() -> None:
    """A schedule that gives other results on one rank is one line on every rank, its memory given back, and all works on."""
    call("all_gather_matmul")
    before = ops.pool_report()
    run = CompiledMessages.run

    def spoiled(self: CompiledMessages, tensors: dict[str, torch.Tensor], weights: Sequence[torch.Tensor]) -> bool:
        is_replayed = run(self, tensors, weights)
        if dist.get_rank() == dist.get_world_size() - 1:
            tensors["product"][-1] = tensors["product"][0]
        return is_replayed

    CompiledMessages.run = spoiled
    clock = Clock(lambda label, rank: 1.0)
    print(f"wrong: {problem_of(lambda: tune_operators(timer=clock, num_rounds=3))}", flush=True)
    assert clock.timed == [], "it is found out before anything is timed"
    CompiledMessages.run = run
    assert ops.pool_report() == before
    call("all_gather_matmul")
    report("after it")


def idle() -> None:
    """A schedule that leaves results as they were is found out, though what is there is right."""
    call("all_gather_matmul")
    run = CompiledMessages.run

    def spoiled(self: CompiledMessages, tensors: dict[str, torch.Tensor], weights: Sequence[torch.Tensor]) -> bool:
        return run(self, {name: tensor.clone() for name, tensor in tensors.items()}, weights)

    CompiledMessages.run = spoiled
    print(f"idle: {problem_of(lambda: tune_operators(timer=Clock(lambda label, rank: 1.0), num_rounds=3))}", flush=True)
    CompiledMessages.run = run


def operands() -> None:
    """What is measured has the shapes and strides of a call with a linear's weight."""
    found: dict[object, set[object]] = {}
    run = Collectives.run

    def noted(self: Collectives, tensors: dict[str, torch.Tensor], weights: Sequence[torch.Tensor]) -> bool:
        (weight,) = weights
        given = {name: (tensor.shape, tensor.stride(), tensor.dtype) for name, tensor in {**tensors, "": weight}.items()}
        found.setdefault(self._sequential, set()).add(frozenset(given.items()))
        return run(self, tensors, weights)

    Collectives.run = noted
    for name in OPERATORS:
        lefts, weights = draw(name, (23, INNER, COLUMNS), torch.Generator().manual_seed(1), torch.bfloat16)
        left, linear = lefts[dist.get_rank()].requires_grad_(), weights[dist.get_rank()].t().contiguous().requires_grad_()
        product = OPERATORS[name][0](left, linear.t(), **keywords(name, 23))
        product.backward(torch.ones_like(product))
    called = {key: set(signatures) for key, signatures in found.items()}
    found.clear()
    tune_operators(timer=Clock(lambda label, rank: 1.0), num_rounds=3)
    Collectives.run = run
    assert len(called) == 8
    assert found == called
    report("operands")


def late() -> None:
    """A schedule that goes wrong only once it was timed is found out, too."""
    call("all_gather_matmul")
    run = CompiledMessages.run
    clock = Clock(lambda label, rank: 1.0)

    def spoiled(self: CompiledMessages, tensors: dict[str, torch.Tensor], weights: Sequence[torch.Tensor]) -> bool:
        is_replayed = run(self, tensors, weights)
        if len(clock.timed) > 20:
            tensors["product"].fill_(float("nan"))
        return is_replayed

    CompiledMessages.run = spoiled
    print(f"late: {problem_of(lambda: tune_operators(timer=clock, num_rounds=3))}", flush=True)


def command() -> None:
    """`schedule tune`, as far as it goes without GPUs: both passes are measured, and rank 0 alone prints and writes."""
    clock = Clock(lambda label, _: 1000.0 if "sequential" in label else 800.0)
    with (
        mock.patch("counterpoint.cuda.ranks.join_ranks", return_value=dist.get_rank()),
        mock.patch("counterpoint.planner.operators_on_gpu.open_call_timer", return_value=clock),
    ):
        for operation in ("all_gather_matmul", "matmul_all_reduce"):
            problem = Problem(operation=operation, num_ranks=2, num_rows=24, num_inner=INNER, num_columns=COLUMNS)
            output = Path(os.environ["MEETING_FILE"]).with_name(f"{operation} {dist.get_rank()}.toml")
            tune_schedules(problem, "fp32", output, is_json=False)
            assert output.exists() == (dist.get_rank() == 0)
        problem = Problem(operation="all_gather_matmul", num_ranks=2, num_rows=24, num_inner=INNER, num_columns=COLUMNS)
        print(f"fp8: {problem_of(lambda: tune_schedules(problem, 'fp8', None, is_json=False))}", flush=True)
        tune_schedules(problem, "bf16", None, is_json=True)


def cannot() -> None:
    """What cannot be tuned is one line on every rank."""
    rank = dist.get_rank()
    clock = Clock(lambda label, _: 1.0)
    sizes = {"num_rows": 8, "num_inner": INNER, "num_columns": COLUMNS, "dtype": torch.float64}

    def request(operation: str = "all_gather_matmul", direction: str = "forward", **more: object) -> ops.Request:
        return ops.Request(operation=operation, direction=direction, **{**sizes, **more})

    attempts: dict[str, Callable[[], object]] = {
        "nothing ran": lambda: tune_operators(timer=clock, num_rounds=3),
        "on CPUs": lambda: tune_operators(requests=[request()]),
        "other requests": lambda: tune_operators(requests=[request(num_rows=8 + rank)], timer=clock, num_rounds=3),
        "more requests": lambda: tune_operators(
            requests=[request(), *[request(num_rows=9)] * rank], timer=clock, num_rounds=3
        ),
        "named schedule": lambda: tune_operators(requests=[request(schedule='{"chunks":2}')], timer=clock, num_rounds=3),
        "whole numbers": lambda: tune_operators(requests=[request(dtype=torch.int64)], timer=clock, num_rounds=3),
        "nothing copied": lambda: tune_operators(
            requests=[request("matmul_all_reduce", "backward")], timer=clock, num_rounds=3
        ),
        "no rows": lambda: tune_operators(requests=[request(num_rows=0)], timer=clock, num_rounds=3),
        "too large": lambda: tune_operators(
            requests=[request(num_rows=1 << 40, num_inner=1 << 20)], timer=clock, num_rounds=3
        ),
    }
    for name, attempt in attempts.items():
        print(f"{name}: {problem_of(attempt)}", flush=True)
    assert len(tune_operators(requests=[request(), request()], timer=clock, num_rounds=3).directives) == 1, (
        "each request once"
    )
    report("after all that")


def problem_of(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except CounterpointError as problem:
        return str(problem)
    return "nothing was refused"


def start_anew() -> None:
    ops.use_plan(LEAVE_IT)
    ops.release()


if __name__ == "__main__":
    run_sections(globals(), after_each=start_anew)
