"""Every value of every part is frozen, built by keyword, and comes back equal from JSON and TOML."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import counterpoint
from counterpoint.cluster.description import load_cluster
from counterpoint.cluster.sweep_file import load_sweep
from counterpoint.controls import CommunicationCtas, HeadStart, Priority, ResidencyCap, ScheduleChoice, Transport
from counterpoint.doctor.job_context import FoundGpu, JobContext
from counterpoint.errors import CounterpointError
from counterpoint.launch_filter.rules import FilterRule
from counterpoint.machine import load_machine
from counterpoint.plan import Directive, Expectation, Match, Plan, Refusal
from counterpoint.report.expert_schedule import ExpertQuestion
from counterpoint.report.schedule import Question
from counterpoint.schedule import ScheduleDescription
from counterpoint.schedule.actions import Problem
from counterpoint.schedule.expert_schedules import ExpertProblem
from counterpoint.schedule.routing import example_routing
from counterpoint.step import Collective, Copy, Dependency, Footprint, Kernel, Step, UnevenParts
from counterpoint.supervised.settings import LiveSettings
from counterpoint.timeline import Interval, Timeline
from counterpoint.value import Value, write_json, write_toml
from counterpoint.workloads.description import CollectiveEntry, CopyEntry, Description, Gemm, OtherKernel, Wait

MACHINE = load_machine("h200")
FOOTPRINT = Footprint(num_ctas=8, threads_per_cta=128, registers_per_thread=64, dynamic_shared_bytes=16384)
KERNEL = Kernel(name='"quoted"\\\nkernel', stream=7, footprint=FOOTPRINT, lone_us=1.25, cta_time_spread=0.5)
COLLECTIVE = Collective(
    name="sum",
    stream=20,
    collective="all_reduce",
    num_bytes=1 << 40,
    group_size=4,
    footprint=FOOTPRINT,
    waits_for=(Dependency(operation=0, origin="inferred"),),
    issued_us=3.5,
)
COPY = Copy(name="push", stream=21, direction="peer_to_peer", num_bytes=4096, lone_us=0.0)
GEMM = Gemm(
    name="up", stream=0, m=64, n=64, k=32, dtype="bf16", tile="64x64x32", threads_per_cta=128, registers_per_thread=64,
    stages=2, waits_for=("sum", Wait(name="up", previous=True)),
)  # fmt: skip
SUM = CollectiveEntry(name="sum", stream=1, collective="all_to_all", bytes="896 MiB", num_ctas=24)
CONTROLS = (
    ResidencyCap(ctas_per_sm=3, dynamic_shared_bytes=57_472),
    Priority(priority=-5),
    CommunicationCtas(max_ctas=16, num_threads=512),
    Transport(transport="copy_engine"),
    HeadStart(hold_us=5.0),
    ScheduleChoice(schedule=ScheduleDescription(chunks=2)),
)
DIRECTIVE = Directive(match=Match(name="gemm*", kind="computation", operations=(0, 2)), controls=CONTROLS, reason="why")

# Values that check more of themselves than their types say, or that hold others worth a round trip.
EXAMPLES: dict[type[Value], Value] = {
    type(value): value
    for value in (
        MACHINE,
        MACHINE.gpu,
        MACHINE.link,
        FOOTPRINT,
        KERNEL,
        COLLECTIVE,
        COPY,
        Step(name="step", num_ranks=4, operations=(KERNEL, COLLECTIVE, COPY), launch_gap_us=1.5),
        Timeline(
            step_name="step",
            origin="measured",
            intervals=(Interval(rank=0, stream=7, operation=0, name="k", kind="computation", start_us=0.0, end_us=0.1),),
        ),
        *CONTROLS,
        DIRECTIVE,
        Plan(
            step_name="step",
            verdict="GAIN",
            expectation=Expectation(origin="simulated", baseline_us=2.0, planned_us=1.0),
            directives=(DIRECTIVE,),
            refusals=(Refusal(control="priority", target="gemm", reason="ignored by the driver"),),
        ),
        LiveSettings(is_tuning=True, plan=Plan(directives=(DIRECTIVE,)), budget_steps=200),
        FilterRule(pattern="nccl*", kind="communication", priority=-5, hold_us=5.0, is_collective=True),
        JobContext(gpus=(FoundGpu(name="NVIDIA H200"), FoundGpu(name="NVIDIA H200")), blocked_peers=((0, 1),)),
        Question(
            problem=Problem(
                operation="all_gather_matmul", num_ranks=4, num_rows=512, num_inner=64, num_columns=64, element_bytes=2
            ),
            dtype="bf16",
            machine=MACHINE,
            rank=3,
        ),
        GEMM,
        SUM,
        OtherKernel(name="act", stream=0, num_ctas=8, threads_per_cta=128, registers_per_thread=32, hbm_bytes="3 MB"),
        CopyEntry(name="push", stream=2, direction="peer_to_peer", bytes=4096),
        Description(name="mine", num_ranks=4, iterations=2, gemms=(GEMM,), collectives=(SUM,)),
    )
}


CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"


def values_within(value: object) -> Iterator[Value]:
    """The value and all that it holds."""
    if isinstance(value, tuple):
        for each in value:
            yield from values_within(each)
    if isinstance(value, Value):
        yield value
        for name in value.__struct_fields__:
            yield from values_within(getattr(value, name))


def described_values() -> Iterator[Value]:
    """Values of clusters and of experts, which are described by files and by routings."""
    described = load_cluster(CLUSTERS / "h100_4096.toml")
    configuration = described.configuration()
    question = ExpertQuestion(
        problem=ExpertProblem(
            operation="expert_ffn", routing=example_routing("zipf", 2, 64, 4), num_inner=64, num_hidden=64, element_bytes=2
        ),
        machine=MACHINE,
    )
    sweep = load_sweep(CLUSTERS / "sweep_512.toml")
    for value in (
        described,
        configuration,
        question,
        sweep,
        UnevenParts(sent_bytes=(1, 2), received_bytes=(1, 4), group_rank=0),
    ):
        yield from values_within(value)


EXAMPLES.update({type(value): value for value in described_values() if type(value) not in EXAMPLES})
DEVICE_LIBRARIES = {"torch", "cuda", "triton"}


def all_values() -> list[type[Value]]:
    """Every subclass of `Value` in every module that can be imported here: all but those that need a device library."""
    for module in pkgutil.walk_packages(counterpoint.__path__, "counterpoint."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as problem:
            if str(problem.name).split(".")[0] not in DEVICE_LIBRARIES:
                raise
    found: set[type[Value]] = set()
    frontier: list[type[Value]] = [Value]
    while frontier:
        children = frontier.pop().__subclasses__()
        found.update(children)
        frontier.extend(children)
    ours = {kind for kind in found if kind.__module__.startswith("counterpoint.")}
    return sorted(ours, key=lambda kind: (kind.__module__, kind.__name__))


VALUES = all_values()


def smallest(kind: Any) -> Any:
    """A small object of a type as msgspec inspects it: ones, single letters, first choices, one element."""
    match kind:
        case msgspec.inspect.StructType():
            return example_of(kind.cls)
        case msgspec.inspect.UnionType():
            present = [member for member in kind.types if not isinstance(member, msgspec.inspect.NoneType)]
            return smallest(present[0])
        case msgspec.inspect.LiteralType():
            return kind.values[0]
        case msgspec.inspect.VarTupleType():
            return (smallest(kind.item_type),)
        case msgspec.inspect.ListType():
            return [smallest(kind.item_type)]
        case msgspec.inspect.TupleType():
            return tuple(smallest(item) for item in kind.item_types)
        case msgspec.inspect.DictType():
            return {smallest(kind.key_type): smallest(kind.value_type)}
        case msgspec.inspect.FrozenSetType():
            return frozenset({smallest(kind.item_type)})
    plain: dict[type, Any] = {
        msgspec.inspect.IntType: 1,
        msgspec.inspect.FloatType: 1.5,
        msgspec.inspect.StrType: "x",
        msgspec.inspect.BoolType: True,
        msgspec.inspect.AnyType: "x",
    }
    return plain[type(kind)]


def example_of(kind: type[Value]) -> Value:
    if kind in EXAMPLES:
        return EXAMPLES[kind]
    described = msgspec.inspect.type_info(kind)
    assert isinstance(described, msgspec.inspect.StructType)
    try:
        return kind(**{field.name: smallest(field.type) for field in described.fields})
    except CounterpointError as problem:
        raise AssertionError(f"{kind.__name__} refuses the simplest figures ({problem}); add it to EXAMPLES") from problem


@pytest.mark.parametrize("kind", VALUES, ids=lambda kind: kind.__name__)
def test_value_comes_back_equal_from_json_and_toml(kind: type[Value]) -> None:
    value = example_of(kind)
    assert msgspec.json.decode(write_json(value), type=kind) == value
    assert msgspec.toml.decode(write_toml({"value": value}), type=dict[str, kind]) == {"value": value}


@pytest.mark.parametrize("kind", VALUES, ids=lambda kind: kind.__name__)
def test_value_is_frozen_and_built_by_keyword(kind: type[Value]) -> None:
    parameters = inspect.signature(kind).parameters.values()
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in parameters)
    value = example_of(kind)
    for name in kind.__struct_fields__:
        with pytest.raises(AttributeError):
            setattr(value, name, NoneType())


@pytest.mark.parametrize("kind", VALUES, ids=lambda kind: kind.__name__)
def test_public_value_says_what_it_is(kind: type[Value]) -> None:
    assert kind.__doc__ or kind.__name__.startswith("_")


@given(
    st.builds(
        Interval,
        rank=st.integers(0, 1 << 20),
        stream=st.integers(-(1 << 31), 1 << 31),
        operation=st.integers(0, 1 << 31),
        name=st.text(),
        kind=st.sampled_from(("computation", "communication", "copy")),
        start_us=st.floats(0, 1e6),
        end_us=st.floats(1e6, 1e12),
    )
)
def test_any_name_and_any_time_survive_the_round_trip(interval: Interval) -> None:
    assert msgspec.json.decode(write_json(interval), type=Interval) == interval
    assert msgspec.toml.decode(write_toml(interval), type=Interval) == interval
