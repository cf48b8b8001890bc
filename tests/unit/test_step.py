"""Steps: what they refuse, and what their fingerprint depends on."""

import pickle

import msgspec
import pytest
from msgspec.structs import replace

from counterpoint.errors import StepError
from counterpoint.step import Collective, Copy, Dependency, Footprint, Kernel, Operation, Step

FOOTPRINT = Footprint(num_ctas=8, threads_per_cta=128, registers_per_thread=64, dynamic_shared_bytes=16384)
KERNEL = Kernel(name="matmul", stream=7, footprint=FOOTPRINT, lone_us=10.0)
COLLECTIVE = Collective(
    name="all-reduce",
    stream=19,
    collective="all_reduce",
    num_bytes=1 << 20,
    group_size=4,
    lone_us=5.0,
    waits_for=(Dependency(operation=0),),
)


def step(*operations: Operation) -> Step:
    return Step(name="step", num_ranks=4, operations=operations or (KERNEL, COLLECTIVE))


@pytest.mark.parametrize(
    "other",
    [
        step(replace(KERNEL, footprint=replace(FOOTPRINT, dynamic_shared_bytes=32768)), COLLECTIVE),
        step(replace(KERNEL, footprint=replace(FOOTPRINT, registers_per_thread=72)), COLLECTIVE),
        step(KERNEL, replace(COLLECTIVE, num_bytes=2 << 20)),
        step(KERNEL, replace(COLLECTIVE, stream=20)),
        step(KERNEL, replace(COLLECTIVE, waits_for=())),
        step(KERNEL, KERNEL, COLLECTIVE),
        replace(step(), num_ranks=8),
    ],
)
def test_the_fingerprint_changes_with_what_is_launched(other: Step) -> None:
    assert other.fingerprint() != step().fingerprint()


def test_the_fingerprint_stays_when_only_times_or_the_name_change() -> None:
    slower = step(replace(KERNEL, lone_us=99.0, issued_us=3.0), replace(COLLECTIVE, lone_us=1.0, peer_wait_us=2.0))
    assert replace(slower, name="another day", launch_gap_us=9.0).fingerprint() == step().fingerprint()


def test_the_fingerprint_is_that_of_plans_saved_before_and_the_same_in_every_process() -> None:
    explicit = replace(FOOTPRINT, static_shared_bytes=int("0"), ctas_per_cluster=int("1"), carveout_percent=int("-1"))
    everything = step(
        replace(KERNEL, footprint=explicit), COLLECTIVE, Copy(name="copy", stream=1, direction="set", num_bytes=3)
    )
    copies = (
        pickle.loads(pickle.dumps(everything)),
        msgspec.json.decode(msgspec.json.encode(everything), type=Step),
        msgspec.toml.decode(msgspec.toml.encode(everything), type=Step),
    )
    assert {each.fingerprint() for each in (everything, *copies)} == {"08523046ff4304c4"}


def test_copies_between_gpus_are_communication_and_others_are_not() -> None:
    kinds = {
        direction: Copy(name="copy", stream=1, direction=direction, num_bytes=1).kind
        for direction in ("peer_to_peer", "set")
    }
    assert kinds == {"peer_to_peer": "communication", "set": "copy"}


@pytest.mark.parametrize(
    ("operations", "says"),
    [
        ((replace(KERNEL, waits_for=(Dependency(operation=0),)),), "waits for operation 0"),
        ((replace(KERNEL, lone_us=None),), "has no time and no amount of work"),
        ((replace(KERNEL, lone_us=-1.0),), "lone_us must be from 0 to below 1e18; found -1.0"),
        ((replace(COLLECTIVE, waits_for=(), group_size=0),), "group_size must be at least 1; found 0"),
        ((replace(KERNEL, cta_time_spread=11.0),), "cta_time_spread must be from 0 to 10; found 11.0"),
        ((replace(KERNEL, stage_bytes=0),), "stage_bytes must be above 0; found 0"),
        ((replace(KERNEL, matmul_sizes=(128, 0, 64)),), "matmul_sizes must be above 0; found \\(128, 0, 64\\)"),
    ],
)
def test_a_step_that_contradicts_itself_is_refused_with_the_limit_and_the_value(
    operations: tuple[Operation, ...], says: str
) -> None:
    with pytest.raises(StepError, match=says):
        step(*operations)


def test_a_step_without_operations_is_refused() -> None:
    with pytest.raises(StepError, match="holds no operation"):
        Step(name="empty", num_ranks=1, operations=())
