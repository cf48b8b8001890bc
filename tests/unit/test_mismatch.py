"""What does not fit in a file is one line in words: the place, what belongs there, what was found, what to do next."""

import copy
import gzip
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.analysis.gate import load_baseline
from counterpoint.doctor.job_context import JobContext
from counterpoint.errors import CounterpointError
from counterpoint.machine import Machine
from counterpoint.mismatch import describe_mismatch, nearest
from counterpoint.paper.stored import read_grid
from counterpoint.plan import Plan
from counterpoint.schedule.routing import read_routing
from counterpoint.validation.records import load_measured
from counterpoint.value import read_toml
from counterpoint.workloads.description import Description

SOURCES = Path(__file__).parents[2] / "src" / "counterpoint"
PLAN = {
    "step_name": "s",
    "verdict": "GAIN",
    "expectation": {"origin": "measured", "baseline_us": 2.0, "planned_us": 1.0},
    "directives": [
        {
            "reason": "r",
            "match": {"kind": "computation", "operations": [1, 2]},
            "controls": [{"control": "priority", "priority": -1}],
        }
    ],
}
SURROUNDINGS = {
    "vendor": "nvidia",
    "environment": {"A": "b"},
    "gpus": [{"name": "G"}, {"name": "G"}],
    "blocked_peers": [[0, 1]],
}


def shipped(name: str) -> dict[str, Any]:
    return msgspec.toml.decode((SOURCES / name).read_bytes(), type=dict[str, Any])


DOCUMENTS: dict[type[Any], dict[str, Any]] = {
    Plan: PLAN,
    JobContext: SURROUNDINGS,
    Machine: shipped("machines/h200.toml"),
    Description: shipped("workloads/cb_ar_opt1.toml"),
}


def refused(kind: type[Any], document: object) -> str:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(document, kind)
    return ". ".join(describe_mismatch(caught.value, kind, document))


def changed(document: dict[str, Any], *steps: str | int, to: object) -> dict[str, Any]:
    """A copy with one value replaced, or left out where `to` is Ellipsis."""
    copied: Any = copy.deepcopy(document)
    inner = copied
    for step in steps[:-1]:
        inner = inner[step]
    if to is ...:
        del inner[steps[-1]]
    else:
        inner[steps[-1]] = to
    return copied  # type: ignore[no-any-return]


CONTROL, NAMED = ("directives", 0, "controls", 0), "directives[0].controls[0]"


@pytest.mark.parametrize(
    ("kind", "steps", "to", "says"),
    [
        (Plan, (*CONTROL, "priority"), "x", f"{NAMED}.priority must be a whole number; found 'x'. Correct it."),
        (Plan, (*CONTROL, "priority"), True, f"{NAMED}.priority must be a whole number; found true. Correct it."),
        (Plan, (*CONTROL, "priority"), ..., f"{NAMED} lacks 'priority', a whole number. Add it."),
        (
            Plan,
            (*CONTROL, "prioritty"),
            1,
            f"{NAMED} has an unknown field 'prioritty'. Did you mean 'priority'? Correct or remove it.",
        ),
        (Plan, (*CONTROL, "x"), 1, f"{NAMED} has an unknown field 'x'. Remove it; the known fields are priority."),
        (
            Plan,
            ("verdict",),
            "MAYBE",
            "verdict must be one of 'GAIN', 'NO_GAIN', 'NO_VERDICT', 'UNKNOWN'; found 'MAYBE'. Correct it.",
        ),
        (Plan, ("verdict",), 3, "verdict must be one of 'GAIN', 'NO_GAIN', 'NO_VERDICT', 'UNKNOWN'; found 3. Correct it."),
        (Plan, ("step_name",), "y" * 50, None),
        (Plan, ("step_name",), ["y"], "step_name must be text; found a list of 1. Correct it."),
        (Plan, ("expectation",), "none", "expectation must be a table of fields; found 'none'. Correct it."),
        (
            Plan,
            ("expectation", "baseline_us"),
            {},
            "expectation.baseline_us must be a number; found a table of fields. Correct it.",
        ),
        (Plan, ("directives",), {}, "directives must be a list; found a table of fields. Correct it."),
        (
            Plan,
            ("directives", 0, "match", "operations", 1),
            "z" * 50,
            f"directives[0].match.operations[1] must be a whole number; found '{'z' * 37}...'. Correct it.",
        ),
        (Machine, ("gpu",), ..., "the file has no [gpu] table. Add it."),
        (Machine, ("gpu", "colour"), 1, "gpu has an unknown field 'colour'. Remove it."),
        (Machine, ("gpu", "sms_per_gpc", 0), "a", "gpu.sms_per_gpc[0] must be a whole number; found 'a'. Correct it."),
        (
            Description,
            ("collectives", 0, "waits_for"),
            [3],
            "collectives[0].waits_for[0] must be text or a table of fields; found 3. Correct it.",
        ),
        (JobContext, ("environment", "A"), 3, "a value of environment must be text; found a whole number. Correct it."),
        (JobContext, ("blocked_peers", 0), [0], "blocked_peers[0] must be a list of 2; found a list of 1. Correct it."),
        (JobContext, ("blocked_peers", 0, 1), "x", "blocked_peers[0][1] must be a whole number; found 'x'. Correct it."),
    ],
)
def test_place_kind_and_value_are_told(kind: type[Any], steps: tuple[str | int, ...], to: object, says: str | None) -> None:
    document = changed(DOCUMENTS[kind], *steps, to=to)
    if says is None:
        msgspec.convert(document, kind)
        return
    assert refused(kind, document) == says


@pytest.mark.parametrize("wanted", DOCUMENTS)
@pytest.mark.parametrize("given", DOCUMENTS)
def test_a_file_of_another_kind_is_called_so(wanted: type[Any], given: type[Any]) -> None:
    names = {Plan: "plan", JobContext: "context", Machine: "machine", Description: "workload"}
    if wanted is not given:
        says = (
            f"the file looks like a {names[given]} file, and a {names[wanted]} file is needed. A {names[given]} file is for "
        )
        assert refused(wanted, DOCUMENTS[given]).startswith(says)


@pytest.mark.parametrize(("tag", "verb"), [("magic", "must be"), (..., "lacks 'control',")])
def test_a_control_that_nobody_knows_lists_those_that_are(tag: object, verb: str) -> None:
    said = refused(Plan, changed(PLAN, *CONTROL, "control", to=tag))
    known = (
        "'residency_cap', 'carveout', 'priority', 'communication_ctas', 'transport', 'light_kernel', 'overlap_matmul', "
        "'own_stream', 'head_start'"
    )
    assert f"{verb} one of {known}" in said


def test_without_the_document_types_stand_for_values() -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert({"num_gpus": []}, Machine)
    assert (
        describe_mismatch(caught.value, Machine, {"num_gpus": []})[0] == "num_gpus must be a whole number; found a list of 0"
    )
    assert describe_mismatch(caught.value, Machine, whole="args")[0] == "args.num_gpus must be a whole number; found a list"
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(b'{"num_ranks": 1e999}', type=Description)
    assert describe_mismatch(caught.value, Description)[0] == "num_ranks must be a whole number; found one out of range"


def places(value: object, steps: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The way to every value within a document."""
    if steps:
        yield steps
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, below in inner:
        yield from places(below, (*steps, step))


STRANGE = st.one_of(
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(),
    st.text("ax'\"\n\t é", max_size=8),
    st.dates(),
    st.lists(st.integers(0, 3), max_size=2),
    st.dictionaries(st.sampled_from(["name", "control", "kind", "x", "two\nlines"]), st.integers(0, 3), max_size=2),
    st.just(...),
)


@given(kind=st.sampled_from(list(DOCUMENTS)), value=STRANGE, data=st.data())
def test_any_wrong_value_anywhere_is_one_line_in_words(
    tmp_path_factory: pytest.TempPathFactory, kind: type[Any], value: object, data: st.DataObject
) -> None:
    steps = data.draw(st.sampled_from(list(places(DOCUMENTS[kind]))))
    if value is ... and isinstance(steps[-1], int):
        value = "x"
    file = tmp_path_factory.getbasetemp() / "wrong.toml"
    file.write_bytes(msgspec.toml.encode(changed(DOCUMENTS[kind], *steps, to=value)))
    try:
        read_toml(file, kind, CounterpointError)
        return
    except CounterpointError as problem:
        said = str(problem)
    assert said.startswith(f"{file}: ")
    assert "\n" not in said
    assert not any(raw in said for raw in ("`", "$.", "Expected", "Object", "enum")), said


def test_a_file_of_another_kind_is_named_as_what_it_is(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    for content, says in (
        (b"", "the file is empty; make it again."),
        (b" \n", "the file is empty; make it again."),
        (gzip.compress(b"verdict = 'GAIN'"), "the file is compressed; give the TOML text itself (gunzip)."),
        (gzip.compress(b' {"traceEvents": []}'), "the file is compressed JSON, as traces are; give a TOML file."),
        (b"\x1f\x8b and no more", "the file is compressed; give the TOML text itself (gunzip)."),
        (b' {"verdict": "GAIN"}', "the file is JSON; give a TOML file."),
        (b"\xff\xfe", "is UTF-16 text, as PowerShell's redirection writes it; save it as UTF-8."),
        (b"a\xff", "is not text: invalid start byte at byte 1; give a TOML file."),
        (b"verdict = [", "is not TOML: Invalid value (at end of document). Correct it there, or make the file again."),
    ):
        file.write_bytes(content)
        with pytest.raises(CounterpointError) as caught:
            read_toml(file, Plan, CounterpointError)
        assert str(caught.value).removeprefix(str(file)).lstrip(": ") == says


def test_what_a_value_says_of_itself_comes_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_bytes(msgspec.toml.encode(changed(PLAN, *CONTROL, "priority", to=3)))
    with pytest.raises(CounterpointError) as caught:
        read_toml(file, Plan, CounterpointError)
    assert str(caught.value) == (
        f"{file}: directives[0].controls[0]: A priority must be 0 or lower (a lower number is a higher priority); found 3."
    )


GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
MATMUL = "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("nvjet_tst_256x128_64x4_1x2_h_bz_copA_TNT", MATMUL),
        ("ncclDevKernel_AllRduce*", REDUCE),
        ("*AllGahter*", GATHER),
        ("nvjt*", MATMUL),
        ("layernorm", ""),
        ("*", ""),
    ],
)
def test_the_name_that_a_misspelt_one_or_a_pattern_means(name: str, found: str) -> None:
    assert nearest(name, {GATHER, REDUCE, MATMUL}) == found
    assert nearest(name, ()) == ""


NESTED = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize("read", [load_measured, load_baseline, read_routing, lambda path: read_grid(path, {}, 2)])
@pytest.mark.parametrize(
    "content",
    [
        b"[1",
        b'{"digest": 1, "schema": 1}',
        b'{"schema": "counterpoint.analysis/1", "digest": "\xff", "conditions": {"a": "\xff"}}',
        b'{"digest": "0", "schema": "", "machine": "", "num_gpus": 2, "conditions": {"a": ' + NESTED + b"}}",
    ],
    ids=["cut", "other types", "no text", "nested"],
)
def test_json_that_cannot_be_read_is_one_line(read: Callable[[Path], object], content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(CounterpointError, match=r"^\S*a\.json (is|does|holds) no[^\n]*: [^\n]*\. (Give|Save) [^\n]*\.$"):
        read(tmp_path / "a.json")
