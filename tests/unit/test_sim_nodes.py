"""More ranks than a node has GPUs: refused where times would be computed, simulated where they were measured."""

import msgspec
import pytest

from counterpoint.controls import CommunicationCtas, Transport
from counterpoint.errors import MachineError, PlanError
from counterpoint.machine import load_machine
from counterpoint.plan import LEAVE_IT, Directive, Match, Plan
from counterpoint.planner.movements import propose_overlaps, propose_transports
from counterpoint.sim import Simulator
from counterpoint.step import Collective, Copy, Operation, Step
from helpers.toy_steps import NCCL, all_reduce, kernel, toy

H100 = load_machine("h100")
GATHER = Collective(
    name="gather", stream=1, collective="all_gather", num_bytes=1 << 30, group_size=16, footprint=NCCL, lone_us=9000.0
)
BY_COPIES = Plan(
    directives=(Directive(match=Match(operations=(0,)), controls=(Transport(transport="copy_engine"),), reason="test"),)
)


def step_of(*operations: Operation, num_ranks: int = 16) -> Step:
    return Step(name="large", num_ranks=num_ranks, operations=operations)


def unmeasured(operation: Collective, **changes: object) -> Collective:
    return msgspec.structs.replace(operation, lone_us=None, **changes)


@pytest.mark.parametrize(
    ("step", "asked"),
    [
        (step_of(unmeasured(GATHER)), "16 ranks"),
        (step_of(unmeasured(GATHER, group_size=8)), "16 ranks"),
        (step_of(unmeasured(GATHER, group_size=4096), num_ranks=4096), "4,096 ranks"),
        (step_of(unmeasured(GATHER), num_ranks=4), "16 ranks"),
        (step_of(GATHER, unmeasured(all_reduce(10.0))), "16 ranks"),
        (step_of(Copy(name="copy", stream=1, direction="peer_to_peer", num_bytes=1 << 20)), "16 ranks"),
    ],
)
@pytest.mark.parametrize("method", ["run", "lone_times_us"])
def test_ranks_beyond_the_node_are_refused_in_one_line(step: Step, asked: str, method: str) -> None:
    for machine in (H100, msgspec.structs.replace(H100, network=None)):
        with pytest.raises(MachineError) as caught:
            getattr(Simulator(), method)(step, machine, LEAVE_IT)
        assert str(caught.value).startswith(f"{asked} were requested, but machine 'h100' has 8 GPUs in a node, and")
        assert "\n" not in str(caught.value)


def test_measured_times_of_a_larger_job_are_simulated_with_and_without_a_network() -> None:
    beside = msgspec.structs.replace(kernel(400, 100.0), lone_us=None)
    for machine in (toy(48), msgspec.structs.replace(toy(48), network=None)):
        timeline = Simulator().run(step_of(GATHER, beside), machine, LEAVE_IT)
        ends = {interval.name: interval.end_us - interval.start_us for interval in timeline.intervals}
        assert ends["gather"] == pytest.approx(9000, rel=0.01)


@pytest.mark.parametrize(("lone_us", "least", "most"), [(4000.0, 3.0, 6.0), (40_000.0, 1.0, 1.1)])
def test_fewer_ctas_slow_a_collective_over_nodes_by_what_it_was_measured_to_reach(
    lone_us: float, least: float, most: float
) -> None:
    """1 GiB on 16 ranks: at 252 GB/s four CTAs of 15 GB/s are too few; at 25 GB/s the network is the limit, not they."""
    gather = msgspec.structs.replace(GATHER, lone_us=lone_us)
    fewer = (CommunicationCtas(max_ctas=4),)
    plan = Plan(directives=(Directive(match=Match(operations=(0,)), controls=fewer, reason="test"),))
    (interval,) = Simulator().run(step_of(gather), H100, plan).intervals
    assert least <= (interval.end_us - interval.start_us) / lone_us <= most


@pytest.mark.parametrize(
    ("group_size", "ranks", "reason"),
    [
        (16, tuple(range(16)), "on several nodes"),
        (2, (0, 8), "on several nodes"),
        (2, (), "its ranks are unknown"),
        (8, tuple(range(8)), None),
        (4, (8, 9, 10, 11), None),
    ],
)
def test_copies_are_for_collectives_whose_ranks_are_known_to_be_in_one_node(
    group_size: int, ranks: tuple[int, ...], reason: str | None
) -> None:
    step = step_of(msgspec.structs.replace(GATHER, group_size=group_size, ranks=ranks))
    found = propose_transports(step, H100)
    if reason is None:
        assert found.candidates
        assert Simulator().run(step, H100, BY_COPIES).intervals
        return
    assert not found.candidates
    assert reason in found.refusals[0].reason
    assert reason in propose_overlaps(step, H100).refusals[0].reason
    with pytest.raises(PlanError, match=f"Copies cannot replace operation 0 .*{reason}"):
        Simulator().run(step, H100, BY_COPIES)


def test_gpus_without_peer_access_get_no_plan_with_copies() -> None:
    step, card = step_of(msgspec.structs.replace(GATHER, group_size=2), num_ranks=2), load_machine("rtx_4090")
    assert propose_transports(step, H100).candidates
    for propose in (propose_transports, propose_overlaps):
        found = propose(step, card)
        assert not found.candidates
        assert "cannot access each other's memory" in found.refusals[0].reason
    with pytest.raises(PlanError, match="cannot access each other's memory"):
        Simulator().run(step, card, BY_COPIES)
