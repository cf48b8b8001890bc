"""The mapped file: the same layout in C and Python, tables whole or not at all, plans as rules on names."""

import re
import subprocess
from collections.abc import Iterable
from ctypes import sizeof
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.controls import Carveout, CommunicationCtas, Control, HeadStart, Priority, ResidencyCap, Transport
from counterpoint.errors import LaunchFilterError, PlanError
from counterpoint.launch_filter import control_block, layout
from counterpoint.launch_filter.control_block import ControlBlock, RuleCounters, block_paths
from counterpoint.launch_filter.prebuilt import SOURCES
from counterpoint.launch_filter.rules import FilterRule, literal_pattern, translate
from counterpoint.plan import Directive, Match, Plan
from counterpoint.step import Collective, Copy, Footprint, Kernel, Step
from counterpoint.traces.classify import communication_patterns

RECORDS = {
    "rule_record": layout.RuleRecord,
    "counter_record": layout.CounterRecord,
    "slot_record": layout.SlotRecord,
    "function_record": layout.FunctionRecord,
    "block_record": layout.BlockRecord,
}
CAP = ResidencyCap(ctas_per_sm=3, dynamic_shared_bytes=60_000)
HOLD = HeadStart(hold_us=5.0)
GREATEST = Priority(priority=-5)
PATTERNS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=40)
RULES = st.builds(
    FilterRule,
    pattern=PATTERNS,
    kind=st.sampled_from([None, "computation", "communication"]),
    dynamic_shared_bytes=st.none() | st.integers(0, 232_448),
    ctas_per_sm=st.none() | st.integers(1, 32),
    carveout_percent=st.none() | st.integers(-1, 100),
    priority=st.none() | st.integers(-10, 0),
    hold_us=st.none() | st.floats(0.1, 1000),
    is_collective=st.booleans(),
)


def plan(*controls: Control, **match: object) -> Plan:
    return Plan(directives=(Directive(match=Match(**match), controls=controls, reason="test"),))  # type: ignore[arg-type]


def kernel(name: str) -> Kernel:
    footprint = Footprint(num_ctas=132, threads_per_cta=128, registers_per_thread=32)
    return Kernel(name=name, stream=7, footprint=footprint, lone_us=10.0)


def collective(name: str) -> Collective:
    return Collective(name=name, stream=9, collective="all_reduce", num_bytes=1 << 20, group_size=2)


STEP = Step(
    name="made up",
    num_ranks=2,
    operations=(
        kernel("gemm"),
        collective("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"),
        kernel("gemm"),
        kernel("add(float*, int)"),
        Copy(name="Memcpy DtoD", stream=7, direction="device_to_device", num_bytes=4),
    ),
)


def test_c_and_python_have_one_layout(tmp_path: Path) -> None:
    lines = []
    for name, record in RECORDS.items():
        lines.append(f'printf("{name} - 0 %zu\\n", sizeof(struct {name}));')
        for field, *_ in record._fields_:
            place = f"offsetof(struct {name}, {field}), sizeof(((struct {name} *)0)->{field})"
            lines.append(f'printf("{name} {field} %zu %zu\\n", {place});')
    program = tmp_path / "layout.c"
    head = "#include <stddef.h>\n#include <stdio.h>\n#include <block.h>\n"
    program.write_text(head + "int main(void) {\n" + "\n".join(lines) + "\nreturn 0;\n}\n")
    subprocess.run(["cc", f"-I{SOURCES}", "-Werror", "-o", str(tmp_path / "layout"), str(program)], check=True, timeout=60)
    printed = subprocess.run([str(tmp_path / "layout")], capture_output=True, text=True, check=True, timeout=60).stdout
    found = {(name, field): (int(offset), int(size)) for name, field, offset, size in map(str.split, printed.splitlines())}
    for name, record in RECORDS.items():
        assert found[name, "-"] == (0, sizeof(record)), name
        for field, *_ in record._fields_:
            place = getattr(record, field)
            assert found[name, field] == (place.offset, place.size), f"{name}.{field}"


def test_c_and_python_have_the_same_numbers() -> None:
    header = (SOURCES / "block.h").read_text()
    for name, value in re.findall(r"#define (\w+) (\d+|0x[0-9A-F]+ULL)\n", header):
        python = {"BLOCK_MAGIC": layout.MAGIC}.get(name, getattr(layout, name, None))
        assert python == int(value.removesuffix("ULL"), 0), name
    bits = dict(re.findall(r"(\w+) = 1 << (\d)", header))
    traits = {
        "TRAIT_COOPERATIVE": "IS_COOPERATIVE",
        "TRAIT_COLLECTIVE": "IS_COLLECTIVE_FUNCTION",
        "TRAIT_TRUNCATED": "IS_NAME_TRUNCATED",
    }
    for name, bit in bits.items():
        assert getattr(layout, traits.get(name, name)) == 1 << int(bit), name
    assert len(bits) == 11
    assert {int(code) for code in re.findall(r"REFUSED_\w+ = (\d+)", header)} == set(control_block.REFUSALS)


@given(st.lists(RULES, max_size=12))
def test_a_table_is_read_back_as_it_was_written(rules: list[FilterRule]) -> None:
    slot = layout.SlotRecord()
    control_block._fill(slot, rules, 5)
    assert [control_block._rule(slot, index) for index in range(slot.num_rules)] == rules
    assert slot.generation == 5


def test_a_swap_puts_another_table_in_force_and_counters_begin_anew(tmp_path: Path) -> None:
    path = tmp_path / "1.block"
    ControlBlock.write_initial(path, [FilterRule(pattern="a")])
    block = ControlBlock(path)
    for number in range(2, 2 * layout.NUM_SLOTS + 2):
        rules = tuple(FilterRule(pattern=f"kernel{index}", priority=-1) for index in range(number % 5))
        assert block.swap(rules) == number
        state = block.state()
        assert (state.generation, state.rules) == (number, rules)
        assert all(counters.num_matched == 0 and counters.residency_found is None for counters in state.counters)
        assert block.rule_counters() == tuple((rule, RuleCounters()) for rule in rules)
    block.close()
    block.close()
    with pytest.raises(LaunchFilterError, match="closed; open it again"):
        block.state()


def test_the_counters_that_the_filter_wrote_are_those_of_their_rules(tmp_path: Path) -> None:
    path = tmp_path / "1.block"
    ControlBlock.write_initial(path, [FilterRule(pattern="a"), FilterRule(pattern="b")])
    content = layout.BlockRecord.from_buffer_copy(path.read_bytes())
    counters = content.slots[content.generation % layout.NUM_SLOTS].counters
    counters[0].num_matched, counters[1].num_matched, counters[1].residency_found = 3, 5, 2
    path.write_bytes(bytes(content))
    (first, matched), (second, others) = ControlBlock(path).rule_counters()
    assert (first.pattern, matched.num_matched, matched.residency_found) == ("a", 3, None)
    assert (second.pattern, others.num_matched, others.residency_found) == ("b", 5, 2)


def test_the_largest_table_fits_and_one_rule_or_one_byte_more_is_refused(tmp_path: Path) -> None:
    size = layout.PATTERN_POOL_BYTES // layout.MAX_RULES
    rules = [FilterRule(pattern="x" * size)] * layout.MAX_RULES
    path = tmp_path / "1.block"
    ControlBlock.write_initial(path, rules)
    block = ControlBlock(path)
    assert block.state().rules == tuple(rules)
    block.close()
    with pytest.raises(
        PlanError, match=f"may have at most {layout.MAX_RULES} rules for launches; found {layout.MAX_RULES + 1}"
    ):
        ControlBlock.write_initial(path, [*rules, rules[0]])
    with pytest.raises(PlanError, match="found 65,537"):
        ControlBlock.write_initial(path, [*rules[1:], FilterRule(pattern="x" * (size + 1))])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "has 0 bytes, but a control block has"),
        (bytes(sizeof(layout.BlockRecord)), "is not a control block of this version"),
    ],
)
def test_another_file_is_no_control_block(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "1.block"
    path.write_bytes(content)
    with pytest.raises(LaunchFilterError, match=said):
        ControlBlock(path)


def test_a_missing_block_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(LaunchFilterError, match="No such file or directory; name the control block"):
        ControlBlock(tmp_path / "1.block")
    with pytest.raises(LaunchFilterError, match="free space or choose another TMPDIR"):
        ControlBlock.write_initial(tmp_path / "missing" / "initial.block", [])


def test_the_blocks_of_a_run_are_those_of_its_processes(tmp_path: Path) -> None:
    for name in ("initial.block", "12.block", "7.block", "7-1.block", "settings.json"):
        (tmp_path / name).touch()
    assert [path.name for path in block_paths(tmp_path)] == ["12.block", "7-1.block", "7.block"]
    assert block_paths(tmp_path / "missing") == []


def test_a_plan_by_names_becomes_rules_by_names() -> None:
    (rule,) = translate(plan(CAP, Priority(priority=-2), name="gemm*")).rules
    assert rule == FilterRule(pattern="gemm*", dynamic_shared_bytes=60_000, ctas_per_sm=3, carveout_percent=100, priority=-2)


def test_a_plan_by_kind_marks_what_communicates() -> None:
    *marks, rule = translate(plan(GREATEST, kind="communication")).rules
    assert [mark.pattern for mark in marks] == list(communication_patterns())
    assert all(mark.is_collective and mark.priority is None for mark in marks)
    assert (rule.kind, rule.priority, rule.target) == ("communication", -5, "communication kernels")


def test_a_head_start_knows_which_kernels_communicate() -> None:
    *marks, rule = translate(plan(HOLD, name="gemm")).rules
    assert [mark.is_collective for mark in marks] == [True] * len(communication_patterns())
    assert not rule.is_collective


@pytest.mark.parametrize("controls", [(), (CommunicationCtas(max_ctas=8), Transport(transport="copy_engine"))])
def test_controls_of_the_process_group_are_neither_rules_nor_refusals(controls: tuple[Control, ...]) -> None:
    translation = translate(plan(*controls))
    assert (translation.rules, translation.refusals) == ((), ())


@pytest.mark.parametrize(
    ("match", "said"),
    [
        ({"kind": "copy"}, "it matches copies"),
        ({"name": "gemm[12]"}, r"not \[...\]"),
    ],
)
def test_without_the_step_what_names_cannot_say_is_refused(match: dict[str, object], said: str) -> None:
    translation = translate(plan(CAP, HOLD, **match))
    assert translation.rules == ()
    assert [refusal.control for refusal in translation.refusals] == ["residency_cap", "head_start"]
    assert all(re.search(said, refusal.reason) for refusal in translation.refusals)


@pytest.mark.parametrize(
    ("match", "target", "means", "rule"),
    [
        (
            {"name": "gemm", "kind": "computation", "ordinals": (0, 3)},
            "gemm, numbers 0, 3",
            "the plan matches 2 launches by number, but eager launches have only names",
            ("gemm", "computation"),
        ),
        (
            {"kind": "communication", "collective": "all_gather", "process_group": "mesh_dp", "num_bytes": 1 << 20},
            "all_gather of 1 MiB in process group mesh_dp",
            "the plan matches all_gather and process group mesh_dp and 1 MiB, but eager launches have only names",
            ("*", "communication"),
        ),
        (
            {"name": "ncclDevKernel_*", "collective": "all_gather"},
            "all_gather 'ncclDevKernel_*'",
            "the plan matches all_gather, but eager launches have only names",
            ("ncclDevKernel_*", "communication"),
        ),
    ],
)
def test_without_the_step_what_names_do_not_tell_refuses_a_cap_and_remarks_on_a_head_start(
    match: dict[str, object], target: str, means: str, rule: tuple[str, str]
) -> None:
    translation = translate(plan(CAP, HOLD, **match))
    (refusal,) = translation.refusals
    assert (refusal.control, refusal.target, refusal.reason) == ("residency_cap", target, means)
    (remark,) = translation.remarks
    assert remark.startswith(f"head_start on '{target}': {means}; all ")
    *_, found = translation.rules
    assert ((found.pattern, found.kind), found.hold_us, found.ctas_per_sm) == (rule, 5.0, None)


def test_a_name_that_is_the_collectives_reaches_no_other() -> None:
    translation = translate(plan(GREATEST, name="ncclDevKernel_AllGather*", collective="all_gather"))
    assert translation.remarks == ()
    assert translation.rules[-1] == FilterRule(pattern="ncclDevKernel_AllGather*", kind="communication", priority=-5)


@pytest.mark.parametrize("step", [None, STEP], ids=["by name", "with the step"])
@pytest.mark.parametrize("priority", [(), (GREATEST,)], ids=["cap alone", "cap with priority"])
def test_a_carveout_leaves_an_earlier_cap_of_the_same_kernels_in_force(
    step: Step | None, priority: tuple[Control, ...]
) -> None:
    directives = (*plan(CAP, *priority, name="add*").directives, *plan(Carveout(percent=50), name="add*").directives)
    name = "add*" if step is None else literal_pattern("add(float*, int)")
    joined = FilterRule(pattern=name, ctas_per_sm=3, dynamic_shared_bytes=60_000, carveout_percent=50)
    before = [FilterRule(pattern=name, priority=-5)] if priority else []
    assert [*translate(Plan(directives=directives), step).rules] == [*before, joined]


def test_of_two_carveouts_both_are_rules_and_the_report_tells_which_counts() -> None:
    directives = [plan(Carveout(percent=percent), name="add*").directives[0] for percent in (100, 50)]
    rules = translate(Plan(directives=tuple(directives))).rules
    assert [(rule.dynamic_shared_bytes, rule.carveout_percent) for rule in rules] == [(0, 100), (0, 50)]


def test_with_the_step_ordinals_become_names_and_a_plan_of_another_step_is_remarked() -> None:
    by_ordinal = plan(GREATEST, name="gemm", ordinals=(0,))
    translation = translate(msgspec.structs.replace(by_ordinal, step_name="other", step_fingerprint="0"), STEP)
    assert translation.rules[-1] == FilterRule(pattern="gemm", priority=-5)
    another, shared = translation.remarks
    assert "was made for step 'other'" in another
    assert "1 of the 2 launches of this name; all of them get it" in shared


@pytest.mark.parametrize(
    ("operations", "shown"),
    [((), r"\(\)"), ((7,), r"\(7\)"), ((0, 1, 2, 3), r"\(0, 1, 2, 3\)"), (range(9), r"\(0, 1, 2, 3, ...\)")],
)
def test_operation_numbers_without_the_step_are_an_error_that_names_the_directive(
    operations: Iterable[int], shown: str
) -> None:
    by_number = plan(CAP, HOLD, operations=tuple(operations)).directives
    with pytest.raises(
        PlanError, match=rf"Directive 1 of the plan \(residency_cap and head_start\) .* {shown}.*--step TRACE"
    ):
        translate(Plan(directives=(*plan(GREATEST).directives, *by_number)))


def test_settings_of_the_process_group_for_numbered_operations_need_no_step() -> None:
    assert translate(plan(CommunicationCtas(max_ctas=8), operations=(3,))).rules == ()


def test_with_the_step_operation_numbers_become_names_taken_literally() -> None:
    translation = translate(plan(CAP, operations=(3,)), STEP)
    assert translation.rules[-1].pattern == r"add(float\*, int)"
    assert not translation.refusals
    assert not translation.remarks


def test_a_cap_is_refused_where_names_would_widen_it_and_a_priority_or_head_start_is_remarked() -> None:
    translation = translate(plan(CAP, HOLD, operations=(2, 4)), STEP)
    assert [(refusal.control, refusal.target) for refusal in translation.refusals] == [
        ("residency_cap", "Memcpy DtoD"),
        ("head_start", "Memcpy DtoD"),
        ("residency_cap", "gemm"),
    ]
    assert "1 of the 2 launches of this name" in translation.refusals[2].reason
    assert translation.remarks == (
        "head_start on 'gemm': the plan matches 1 of the 2 launches of this name; all of them get it",
    )
    assert translation.rules[-1] == FilterRule(pattern="gemm", hold_us=5.0)


def test_a_plan_of_another_step_is_refused() -> None:
    with pytest.raises(PlanError, match="was made for step 'other'"):
        translate(Plan(step_name="other", step_fingerprint="0" * 16), STEP)


@given(st.text(alphabet="ab*?\\[].(", max_size=12))
def test_a_literal_pattern_has_no_wildcards_left(name: str) -> None:
    assert re.sub(r"\\(.)", r"\1", literal_pattern(name)) == name
    assert not re.search(r"(?<!\\)[*?]", re.sub(r"\\\\", "", literal_pattern(name)))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"pattern": ""}, "needs a pattern"),
        ({"kind": "copy"}, "must be for kernels"),
        ({"dynamic_shared_bytes": -1}, "0 or more bytes"),
        ({"carveout_percent": 101}, "carveout of -1 to 100"),
        ({"hold_us": 0.0}, "above 0 and at most 1000 us"),
        ({"priority": 1}, "0 or lower"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        FilterRule(**{"pattern": "*"} | fields)  # type: ignore[arg-type]
