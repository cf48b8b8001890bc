"""Every constant of a calibration file changes an answer of the simulator: none is there for show, none is lost."""

from functools import cache

import msgspec
import pytest

from counterpoint import Simulator
from counterpoint.controls import CommunicationCtas, Control, LightKernel, OverlapMatmul, Priority, ResidencyCap, Transport
from counterpoint.footprints import communication_footprint
from counterpoint.plan import LEAVE_IT, Directive, Match, Plan
from counterpoint.sim.calibration import (
    Calibration,
    CharacterConstants,
    CollectiveConstants,
    Constant,
    constants_of,
    load_calibration,
)
from counterpoint.sim.calibration_file import _with_saturation
from counterpoint.sim.calibration_fit import Fitted
from counterpoint.step import (
    Character,
    Collective,
    CollectiveKind,
    Copy,
    CopyDirection,
    Dependency,
    Footprint,
    Kernel,
    Operation,
    Step,
)
from helpers.toy_steps import H200, persistent_kernel

CHARACTERS: tuple[Character, ...] = ("matmul", "attention", "streaming", "row_wise", "other")
KINDS: tuple[CollectiveKind, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "send_recv",
)
DIRECTIONS: tuple[CopyDirection, ...] = ("device_to_device", "peer_to_peer", "host_to_device", "device_to_host")
TILES = Footprint(num_ctas=4096, threads_per_cta=128, registers_per_thread=64, dynamic_shared_bytes=16_384)
LIGHT = Footprint(num_ctas=4096, threads_per_cta=128, registers_per_thread=32)
LATENCIES = ("latency_us_by_bytes", "latency_us_by_bytes_of_more")
CALIBRATION = load_calibration(H200)


def priced(character: Character, footprint: Footprint, element_type: str | None = None) -> Kernel:
    """A kernel whose time follows from its work."""
    reads = {"hbm_bytes": 1e9} if character in ("streaming", "row_wise") else {"flops": 2e11, "hbm_bytes": 1e8}
    return Kernel(
        name=f"{character} {element_type or ''}".strip(),
        stream=0,
        footprint=footprint,
        character=character,
        element_type=element_type,  # type: ignore[arg-type]
        **reads,
    )


def collective(kind: CollectiveKind, num_bytes: int, *, ranks: int = 2, after: int | None = None) -> Collective:
    waits = () if after is None else (Dependency(operation=after),)
    return Collective(name=kind, stream=1, collective=kind, num_bytes=num_bytes, group_size=ranks, waits_for=waits)


def step(*operations: Operation) -> Step:
    return Step(name="constants", num_ranks=4, operations=operations)


def plan(kind: str, control: Control) -> Plan:
    match = Match(kind=kind)  # type: ignore[arg-type]
    return Plan(directives=(Directive(match=match, controls=(control,), reason="by hand"),))


def cases() -> list[tuple[Step, Plan]]:
    """Steps and plans that need all constants between them."""
    matmuls = [priced("matmul", TILES, name) for name in (None, *H200.gpu.matmul_rates())]
    in_registers = msgspec.structs.replace(TILES, registers_per_thread=160, dynamic_shared_bytes=65_536)
    matmuls.append(priced("matmul", in_registers, "fp32"))
    l2 = msgspec.structs.replace(matmuls[0], flops=1.0, l2_bytes=1e10)
    specialized = Footprint(num_ctas=132, threads_per_cta=384, registers_per_thread=168, dynamic_shared_bytes=200_000)
    few_registers = msgspec.structs.replace(LIGHT, registers_per_thread=24)
    attention = [*[priced("attention", specialized)] * 3, priced("attention", few_registers)]
    found: list[tuple[Step, Plan]] = [(step(*matmuls, l2), LEAVE_IT), (step(*attention), LEAVE_IT)]
    for character in CHARACTERS:
        kernel = priced(character, LIGHT)
        big = msgspec.structs.replace(kernel, footprint=TILES)
        for each, bytes_ in ((kernel, 57_344), (big, 57_344)):
            cap = ResidencyCap(ctas_per_sm=3, dynamic_shared_bytes=bytes_)
            traced = msgspec.structs.replace(each, lone_us=200.0, flops=None, hbm_bytes=None)
            found.append((step(each, traced), plan("computation", cap)))
            beside = step(each, *[traced] * 4, collective("all_reduce", 64 << 20, after=0))
            found.append((beside, plan("communication", Priority(priority=-5))))
    for kind in KINDS:
        for num_bytes in (1 << 16, 256 << 20):
            for ranks in (2, 4):
                found.append((step(collective(kind, num_bytes, ranks=ranks)), LEAVE_IT))
        with_little_l1 = msgspec.structs.replace(communication_footprint(H200.gpu, "nccl"), carveout_percent=100)
        slow = step(msgspec.structs.replace(collective(kind, 64 << 20), footprint=with_little_l1))
        found.extend((slow, each) for each in (LEAVE_IT, plan("communication", CommunicationCtas(max_ctas=8))))
        among = step(*[priced("streaming", LIGHT)] * 2, collective(kind, 64 << 20))
        found.append((among, plan("communication", Priority(priority=-5))))
    found.append((step(priced("other", LIGHT), collective("all_reduce", 1 << 20, after=0)), LEAVE_IT))
    few = priced("other", msgspec.structs.replace(LIGHT, num_ctas=4))
    racing = [few, few, collective("all_reduce", 1 << 20, after=0)]
    found.append((step(*racing), LEAVE_IT))
    for kind in ("all_to_all", "send_recv"):
        found.append((step(collective(kind, 32 << 20)), plan("communication", CommunicationCtas(max_ctas=8))))
    copies = [Copy(name=each, stream=0, direction=each, num_bytes=1 << 26) for each in DIRECTIONS]
    found.append((step(*copies), LEAVE_IT))
    for kind in ("all_reduce", "all_gather"):
        found.append((step(collective(kind, 64 << 20)), plan("communication", Transport(transport="copy_engine"))))
    persistent = msgspec.structs.replace(persistent_kernel(shares_work=True), character="matmul", lone_us=400.0, cta_us=None)
    reduced = collective("all_reduce", 64 << 20)
    found.append((step(reduced, persistent), plan("communication", Priority(priority=-5))))
    found.append((step(reduced), plan("communication", CommunicationCtas(max_ctas=8, num_threads=256))))
    for kind in CALIBRATION.light_collectives:
        for num_ctas in (4, 128):
            beside = [*[priced("streaming", LIGHT)] * 2, collective(kind, 4 << 20)]
            light = plan("communication", LightKernel(num_ctas=num_ctas))
            found.extend((each, light) for each in (step(collective(kind, 4 << 20)), step(*beside)))
    return [*found, *overlapped(), *bursts()]


def bursts() -> list[tuple[Step, Plan]]:
    """Steps at the power limit whose lone times are of short bursts: each kind of operation among a library's matmuls."""
    library = msgspec.structs.replace(persistent_kernel(shares_work=True), character="matmul", lone_us=4000.0, cta_us=None)
    tiled = msgspec.structs.replace(priced("matmul", TILES), lone_us=4000.0, flops=None, hbm_bytes=None)
    beside: list[Operation] = [
        *(msgspec.structs.replace(tiled, character=each) for each in CHARACTERS),
        msgspec.structs.replace(tiled, element_type="fp32"),
        msgspec.structs.replace(tiled, footprint=msgspec.structs.replace(TILES, registers_per_thread=128)),
        collective("all_reduce", 1 << 30),
        Copy(name="copy", stream=0, direction="device_to_device", num_bytes=1 << 32),
    ]
    steps = [step(*[library] * 3, each) for each in beside]
    steps.append(step(*[library] * 18))  # which lasts longer than the power limit's window
    gather = (step(collective("all_gather", 256 << 20)), plan("communication", Transport(transport="copy_engine")))
    planned = [*((each, LEAVE_IT) for each in steps), gather]
    return [(msgspec.structs.replace(each, is_timed_in_bursts=True), how) for each, how in planned]


def overlapped() -> list[tuple[Step, Plan]]:
    """An all-gather with the matmul that needs it, and a matmul with its reduce-scatter, as operators."""
    matmul = msgspec.structs.replace(priced("matmul", TILES), matmul_sizes=(8192, 8192, 4096), lone_us=700.0, flops=None)
    gather = msgspec.structs.replace(collective("all_gather", 8192 * 8192 * 2), stream=0)
    scatter = msgspec.structs.replace(collective("reduce_scatter", 8192 * 4096 * 2, after=0), stream=0)
    needs = msgspec.structs.replace(matmul, waits_for=(Dependency(operation=0),))
    overlap = plan("communication", OverlapMatmul())
    return [(step(gather, needs), overlap), (step(matmul, scatter, priced("streaming", LIGHT)), overlap)]


@cache
def answers() -> list[object]:
    simulator = Simulator(CALIBRATION)
    return [(simulator.run(each, H200, how).intervals, simulator.lone_times_us(each, H200, how)) for each, how in cases()]


def figures_of(entry: Constant | CharacterConstants | CollectiveConstants) -> list[str]:
    """The fields that hold numbers which the simulator may use."""
    names = [name for name in entry.__struct_fields__ if name != "spread" and isinstance(getattr(entry, name), float)]
    if isinstance(entry, CharacterConstants) and entry.bottleneck == "hbm":
        names.remove("hbm_fraction")  # all of it, by definition
    return names + [name for name in LATENCIES if getattr(entry, name, ())]


def changed(name: str, field: str) -> Calibration:
    """The calibration with one figure 40 % larger."""
    entry = constants_of(CALIBRATION)[name]
    value = getattr(entry, field)
    larger = tuple((size, 1.4 * each) for size, each in value) if isinstance(value, tuple) else 1.4 * value
    replaced = msgspec.structs.replace(entry, **{field: larger})
    group, _, key = name.partition(".")
    whole = getattr(CALIBRATION, group) | {key: replaced} if key else replaced
    return msgspec.structs.replace(CALIBRATION, **{group: whole})


FIGURES = [(name, field) for name, entry in constants_of(CALIBRATION).items() for field in figures_of(entry)]


@pytest.mark.parametrize(("name", "field"), FIGURES)
def test_every_constant_changes_what_is_simulated(name: str, field: str) -> None:
    simulator = Simulator(changed(name, field))
    usual = answers()
    assert any(
        (simulator.run(each, H200, how).intervals, simulator.lone_times_us(each, H200, how)) != before
        for (each, how), before in zip(cases(), usual, strict=True)
    )


def test_a_fit_of_two_figures_of_one_character_keeps_both() -> None:
    names = ("saturation_warps", "saturation_bytes_in_flight")
    fits = {name: Fitted(value=value, spread=0.1, source="a test") for name, value in zip(names, (7.0, 9e3), strict=True)}
    found = _with_saturation(CALIBRATION, "matmul", fits, "2026-11-30").characters["matmul"]
    assert [getattr(found, name) for name in names] == [7.0, 9e3]
