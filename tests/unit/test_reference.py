"""The reference pages against the code: every key of every file, every public name, every command."""

import importlib
import inspect
import math
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import MappingProxyType, ModuleType

import msgspec
import pytest
from msgspec.structs import replace
from website import commands

import counterpoint
from counterpoint.analysis.values import Analysis
from counterpoint.cluster.description import ClusterFile, load_cluster
from counterpoint.cluster.estimate import ClusterEstimate
from counterpoint.cluster.sweep_file import Axes
from counterpoint.cluster.sweep_store import SweepRow
from counterpoint.controls import Carveout, CommunicationCtas, Control, HeadStart, LightKernel, Priority, ResidencyCap
from counterpoint.doctor.job_context import Finding, JobContext
from counterpoint.machine import load_machine
from counterpoint.metrics import Metrics, RankMetrics
from counterpoint.plan import Directive, Expectation, Match, Plan, Refusal
from counterpoint.planner.operators import OperatorTuning
from counterpoint.report.check import Checked
from counterpoint.report.expert_schedule import ExpertSummary
from counterpoint.report.schedule import EstimatedSchedule, ScheduleSummary
from counterpoint.report.summary import ReportRow, Summary
from counterpoint.schedule import CopySchedule, ScheduleDescription
from counterpoint.schedule.actions import Action
from counterpoint.sim.calibration import Constant
from counterpoint.sim.network import Level
from counterpoint.traces.classify import Rule
from counterpoint.validation.figures import Figures, PredictedRow
from counterpoint.validation.outcome import Outcome
from counterpoint.workloads.description import CollectiveEntry, CopyEntry, Description, Gemm, OtherKernel, Wait
from helpers.command import counterpoint as counterpoint_command

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
CLUSTER = load_cluster(ROOT / "examples" / "clusters" / "h100_4096.toml")
assert CLUSTER.model is not None
assert CLUSTER.training is not None
COPY = CopyEntry(name="c", stream=1, direction="peer_to_peer", bytes=1024)
LAUNCH = {"threads_per_cta": 128, "registers_per_thread": 64}
# A heading of docs/reference/formats.md, and a value of the table that stands below it
TABLES: MappingProxyType[str, msgspec.Struct | type[msgspec.Struct]] = MappingProxyType(
    {
        "The top of a machine file": load_machine("h200"),
        "[gpu]": load_machine("h200").gpu,
        "[link] and [network]": load_machine("h200").link,
        "[[link.pairs]]": load_machine("mi250x").link.pairs[0],
        "The top of a workload file": Description(name="w", num_ranks=2, copies=(COPY,)),
        "[[gemms]]": Gemm(name="g", stream=0, m=64, n=64, k=64, dtype="bf16", tile="8x8x8", stages=2, num_ctas=4, **LAUNCH),
        "[[kernels]]": OtherKernel(name="k", stream=0, num_ctas=4, flops=1e9, hbm_bytes=1e6, **LAUNCH),
        "[[collectives]]": CollectiveEntry(name="c", stream=1, collective="all_reduce", bytes="1 MiB", num_ctas=4),
        "[[copies]]": COPY,
        "An entry of waits_for": Wait(name="g"),
        "The top of a plan": Plan(),
        "[[directives]]": Directive,
        "match": Match(num_bytes=1, ordinals=(0,)),
        "[expectation]": Expectation,
        "[[refusals]]": Refusal,
        "priority": Priority(priority=-1),
        "head_start": HeadStart(hold_us=5.0),
        "residency_cap": ResidencyCap(ctas_per_sm=1, dynamic_shared_bytes=1024),
        "carveout": Carveout(percent=57),
        "communication_ctas": CommunicationCtas(max_ctas=8, num_threads=256),
        "light_kernel": LightKernel(num_ctas=8),
        "schedule": ScheduleDescription(),
        "The tables of a cluster file": ClusterFile,
        "[cluster]": CLUSTER.cluster,
        "[[cluster.levels]]": Level(name="l", num_nodes=8, bytes_per_s=1e10, latency_us=1.0),
        "[model]": replace(CLUSTER.model, num_kv_heads=1, ffn=1024, expert_ffn=1024),
        "[training]": CLUSTER.training,
        "[parallelism]": CLUSTER.parallelism,
        "[compression]": CLUSTER.compression,
        "[skew]": CLUSTER.skew,
        "[software]": CLUSTER.software,
        "[sweep]": Axes,
        "[[rule]]": Rule(source="s", names=("n",)),
        "The top of a context": JobContext,
        "A constant": Constant,
        "What tune and simulate print": Summary,
        "An entry of step": ReportRow,
        "metrics": Metrics,
        "An entry of metrics.ranks": RankMetrics,
        "What analyze prints": Analysis,
        "What sweep prints": SweepRow,
        "estimate": ClusterEstimate,
        "What schedule show and schedule experts print": EstimatedSchedule,
        "What schedule show adds": ScheduleSummary,
        "What schedule experts adds": ExpertSummary,
        "A whole schedule": CopySchedule,
        "An entry of actions": Action,
        "What schedule tune prints": OperatorTuning,
        "What check prints": Checked,
        "An entry of findings": Finding,
        "What validate prints": Outcome,
        "An entry of figures": Figures,
        "An entry of rows": PredictedRow,
    }
)
ROW = re.compile(r"^\| `([^`]+)` \| (.*?) \| (.*?) \| (.*?) \| (.*?) \|$", re.MULTILINE)
WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false", dict: "table"}


def struct_of(entry: msgspec.Struct | type[msgspec.Struct]) -> type[msgspec.Struct]:
    return entry if isinstance(entry, type) else type(entry)


def in_words(kind: msgspec.inspect.Type) -> str:
    """A type as the page words it."""
    match kind:
        case msgspec.inspect.UnionType():
            named = [in_words(each) for each in kind.types if not isinstance(each, msgspec.inspect.NoneType)]
            return " or ".join(dict.fromkeys(named))
        case msgspec.inspect.LiteralType():
            return ", ".join(f"`{value}`" for value in kind.values)
        case msgspec.inspect.VarTupleType():
            item = in_words(kind.item_type)
            return f"list of {item}" if "`" in item else f"list of {plural(item)}"
        case msgspec.inspect.TupleType():
            return f"list of {len(kind.item_types)} {plural(in_words(kind.item_types[0]))}"
        case msgspec.inspect.StructType() | msgspec.inspect.DictType():
            return "table"
        case msgspec.inspect.IntType():
            return "whole number"
        case msgspec.inspect.FloatType():
            return "number"
        case msgspec.inspect.BoolType():
            return "true or false"
        case msgspec.inspect.StrType():
            return "text"
    raise AssertionError(f"No words for {kind}.")


def plural(words: str) -> str:
    return "texts" if words == "text" else re.sub(r"(number|table)\b", r"\1s", words.replace("list of", "lists of"))


def default_in_words(field: msgspec.inspect.Field) -> str:
    """A default as the page words it: nothing for one that only says that the key may be left out."""
    if field.required:
        return "required"
    default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if default in (None, (), "", {}) or isinstance(default, msgspec.Struct):
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def keys_of(heading: str) -> list[tuple[str, str, str]]:
    """Key, value and default of a table, from the structure; keys that it has from another table's stand there."""
    struct = struct_of(TABLES[heading])
    info = msgspec.inspect.type_info(struct)
    assert isinstance(info, msgspec.inspect.StructType)
    tag = [(info.tag_field, f"`{info.tag}`", "required")] if info.tag_field else []
    tables = [each for each in map(struct_of, TABLES.values()) if issubclass(struct, each) and each is not struct]
    own = [field for field in info.fields if not any(field.name in each.__struct_fields__ for each in tables)]
    return [*tag, *((field.encode_name, in_words(field.type), default_in_words(field)) for field in own)]


def nested(kind: msgspec.inspect.Type) -> Iterator[msgspec.inspect.StructType]:
    """The structures without a table of their own, at any depth below a field of this type."""
    match kind:
        case msgspec.inspect.StructType() if kind.cls not in map(struct_of, TABLES.values()):
            yield kind
            for field in kind.fields:
                yield from nested(field.type)
        case msgspec.inspect.UnionType():
            for each in kind.types:
                yield from nested(each)
        case msgspec.inspect.VarTupleType():
            yield from nested(kind.item_type)


@cache
def page() -> dict[str, list[tuple[str, ...]]]:
    """Rows of docs/reference/formats.md by heading."""
    sections = re.split(r"^#{2,4} (.*)\n", (REFERENCE / "formats.md").read_text(), flags=re.MULTILINE)
    rows = {title.replace("`", ""): ROW.findall(body) for title, body in zip(sections[1::2], sections[2::2], strict=True)}
    return {title: found for title, found in rows.items() if found}


def test_the_page_has_a_table_for_each_structure() -> None:
    assert list(page()) == list(TABLES)
    controls = {each.__struct_config__.tag for each in Control.__args__}
    with_keys = {each.__struct_config__.tag for each in Control.__args__ if each.__struct_fields__}
    assert with_keys <= {*TABLES, "transport", "overlap_matmul", "copy_schedule"}
    assert all(f"`{tag}`" in (REFERENCE / "formats.md").read_text() for tag in controls)


@pytest.mark.parametrize("heading", TABLES)
def test_the_page_has_every_key_with_its_type_and_default(heading: str) -> None:
    assert [row[:3] for row in page()[heading]] == keys_of(heading)
    assert all(row[4] for row in page()[heading]), "say what each key means"


@pytest.mark.parametrize("heading", list(TABLES)[list(TABLES).index("What sweep prints") :])
def test_the_page_names_every_key_of_the_tables_within_what_a_command_prints(heading: str) -> None:
    said = " ".join(row[4] for row in page()[heading])
    info = msgspec.inspect.type_info(struct_of(TABLES[heading]))
    assert isinstance(info, msgspec.inspect.StructType)
    own = {row[0] for row in page()[heading]}
    below = [each for field in info.fields if field.encode_name in own for each in nested(field.type)]
    assert [field.encode_name for each in below for field in each.fields if f"`{field.encode_name}`" not in said] == []


EXPERTS = "schedule experts expert_ffn --ranks 2 --experts 4 --rows 64 --inner 64 --hidden 64"


@pytest.mark.parametrize(
    ("command", "kind"),
    [("check", Checked), (EXPERTS, ExpertSummary)],
)
def test_a_command_prints_the_structure_of_the_page_and_nothing_else(command: str, kind: type) -> None:
    assert msgspec.json.decode(counterpoint_command(*command.split(), "--json", cwd=ROOT).stdout, type=kind)


def beyond(text: str) -> Iterator[float]:
    """Numbers just outside of a range, as in "1 to 64", "above 0", "0 or more", "up to 5", "2^31 or less"."""

    def number(word: str) -> float:
        base, _, power = word.replace(",", "").partition("^")
        return float(base) ** float(power or 1)

    figure = r"(-?[\d.,]+(?:e\d+)?(?:\^\d+)?)"
    if found := re.match(rf"above {figure}", text):
        yield number(found[1])
    if found := re.match(rf"{figure} (?:to|or more)", text):
        yield _next(number(found[1]), -1)
    if found := re.search(rf"(?:to|up to|at most) {figure}", text):
        yield _next(number(found[1]), 1)
    if found := re.search(rf"below {figure}", text):
        yield number(found[1])
    if found := re.match(rf"{figure} or less", text):
        yield _next(number(found[1]), 1)


def _next(number: float, direction: int) -> float:
    return (
        number + direction if number.is_integer() and abs(number) < 2**53 else math.nextafter(number, direction * math.inf)
    )


RANGES = [
    (heading, row[0], row[3])
    for heading, rows in page().items()
    for row in rows
    if row[3] and not isinstance(TABLES[heading], type)
]


@pytest.mark.parametrize(("heading", "key", "text"), RANGES, ids=lambda value: value.replace(" ", "_"))
def test_a_figure_beyond_its_range_is_refused(heading: str, key: str, text: str) -> None:
    sample = TABLES[heading]
    assert isinstance(sample, msgspec.Struct)
    outside = list(beyond(text))
    assert outside, f"{text} is no range that this test can read"
    is_whole = isinstance(getattr(sample, key), int)
    for number in outside:
        with pytest.raises(counterpoint.CounterpointError):
            replace(sample, **{key: int(number) if is_whole else number})


SHOWN = re.compile(r"^::: (\S+)$", re.MULTILINE)
INTEGRATIONS = ("collectives", "ddp", "expert_parallel", "fsdp2", "tensor_parallel")
NEED_A_GPU_LIBRARY = ("capture", "apply")


def shown_names() -> list[str]:
    return SHOWN.findall((REFERENCE / "python.md").read_text())


def public_objects() -> Iterator[tuple[str, object]]:
    """What a user may call: the names of the package, of each part that lists its own, and of the integrations."""
    for name in sorted({*dir(counterpoint)} - {"__version__", "integrations", "ops", *NEED_A_GPU_LIBRARY}):
        yield f"counterpoint.{name}", getattr(counterpoint, name)
    for part in ("ops", "planner", "schedule", "sim", "traces", "workloads"):
        module = importlib.import_module(f"counterpoint.{part}")
        yield from ((f"{module.__name__}.{name}", getattr(module, name)) for name in module.__all__)
    for part in INTEGRATIONS:
        module = importlib.import_module(f"counterpoint.integrations.{part}")
        yield from ((f"{module.__name__}.{name}", value) for name, value in _functions(module))


def _functions(module: ModuleType) -> list[tuple[str, object]]:
    """Functions that the module itself defines and does not keep to itself."""
    found = inspect.getmembers(module, inspect.isfunction)
    return [(name, value) for name, value in found if value.__module__ == module.__name__ and not name.startswith("_")]


def test_every_public_name_has_an_entry() -> None:
    shown = shown_names()
    assert {f"counterpoint.{name}" for name in NEED_A_GPU_LIBRARY} <= set(shown)
    here = [getattr(*_place(name)) for name in shown if name.removeprefix("counterpoint.") not in NEED_A_GPU_LIBRARY]
    missing = [name for name, value in public_objects() if not any(value is entry for entry in here)]
    assert not missing, "give each an entry in docs/reference/python.md"


def _place(name: str) -> tuple[ModuleType, str]:
    module, _, attribute = name.rpartition(".")
    return importlib.import_module(module), attribute


def test_no_name_has_two_entries() -> None:
    assert len(set(shown_names())) == len(shown_names())


def test_the_reference_of_commands_has_every_command_and_its_help() -> None:
    found = dict(commands.commands())
    assert {(), ("tune",), ("run",), ("analyze",), ("machines",), ("plan", "show"), ("bench", "paper")} <= set(found)
    assert all(f"counterpoint {' '.join(path)}".strip() in printed for path, printed in found.items())
    assert all("--help" in printed for printed in found.values())
    assert commands.MARK in (REFERENCE / "commands.md").read_text()
