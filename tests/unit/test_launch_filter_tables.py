"""Which rule counts for which kernel, tables swapped under a running process, and patterns against their definition."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from counterpoint.launch_filter.control_block import RuleCounters
from counterpoint.launch_filter.rules import FilterRule, literal_pattern
from helpers.build_filter import Built
from helpers.filter_session import Session, run_directory, session

CAP = FilterRule(pattern="cap*", dynamic_shared_bytes=60_000, ctas_per_sm=3, carveout_percent=100)
PRIORITY = FilterRule(pattern="nccl*", priority=-5)
COLLECTIVE = FilterRule(pattern="nccl*", is_collective=True)


def test_the_last_rule_that_sets_a_control_counts_and_the_others_are_told(built: Built, tmp_path: Path) -> None:
    first = FilterRule(pattern="*", priority=-1, dynamic_shared_bytes=50_000)
    with session(built, tmp_path, first, FilterRule(pattern="capped", dynamic_shared_bytes=60_000)) as client:
        client.find()
        client.make("capped")
        reached = client.launch("capped").last
        assert (reached.shared, reached.priority) == (60_000, -1)
        assert client.state().counters[0].refusal == "a later rule of the table sets the same control for this kernel"
        assert client.state().counters[0].num_prioritized == 1


@pytest.mark.parametrize(("kind", "changed"), [("communication", "ncclDevKernel"), ("computation", "gemm")])
def test_a_kind_is_told_by_the_marks(built: Built, tmp_path: Path, kind: str, changed: str) -> None:
    rule = FilterRule(pattern="*", kind=kind, priority=-2)  # type: ignore[arg-type]
    with session(built, tmp_path, COLLECTIVE, rule) as client:
        client.find()
        for name in ("ncclDevKernel", "gemm"):
            client.make(name)
            assert client.launch(name).last.priority == (-2 if name == changed else 1)


def test_a_swap_counts_from_the_next_launch_and_takes_back_what_was_set(built: Built, tmp_path: Path) -> None:
    with session(built, tmp_path, CAP) as client:
        client.find()
        client.make("capped")
        assert client.launch("capped").last.shared == 60_000
        for round_number in range(6):
            client.block().swap([])
            assert client.launch("capped", round_number).last.shared == round_number
            assert client.attributes("capped") == (70_000 if round_number else 60_000, -1)  # a limit is never lowered
            client.block().swap([FilterRule(pattern="capped", dynamic_shared_bytes=70_000, carveout_percent=80), PRIORITY])
            assert client.launch("capped", round_number).last.shared == 70_000
            assert client.attributes("capped") == (70_000, 80)
            client.block().swap([CAP])
            assert client.launch("capped", round_number).last.shared == 60_000
            assert client.state().counters == (RuleCounters(num_matched=1, num_capped=1, residency_found=3),)
        assert client.state().functions[0].num_launches == 19


def test_what_the_program_chose_meanwhile_is_not_taken_back(built: Built, tmp_path: Path) -> None:
    with session(built, tmp_path, CAP) as client:
        client.find()
        client.make("capped")
        client.launch("capped")
        client.ask("limit capped 90000")
        client.block().swap([])
        client.launch("capped")
        assert client.attributes("capped") == (90_000, -1)


def test_a_table_that_is_still_being_written_is_not_used(built: Built, tmp_path: Path) -> None:
    with session(built, tmp_path, CAP) as client:
        client.find()
        client.make("capped")
        client.launch("capped")
        path = client.block()._path
        client.block().swap([])
        content = bytearray(path.read_bytes())
        torn = content.index(b"\x02" + bytes(7), 16)  # generation 2 in the header
        path.write_bytes(content[:torn] + b"\x03" + content[torn + 1 :])  # says 3, but slot 3 holds no such table
        assert client.launch("capped").last.shared == 60_000
        path.write_bytes(content)
        assert client.launch("capped").last.shared == 0


def test_a_table_of_which_one_byte_has_not_arrived_is_not_used(built: Built, tmp_path: Path) -> None:
    with session(built, tmp_path, CAP) as client:
        client.find()
        client.make("capped")
        client.launch("capped")
        path = client.block()._path
        client.block().swap([FilterRule(pattern="*", priority=-4), FilterRule(pattern="unmistakable", priority=-3)])
        whole = path.read_bytes()
        place = whole.index(b"*unmistakable")
        with path.open("r+b") as file:
            file.seek(place + 5)
            file.write(b"?")
        assert client.launch("capped").last.shared == 60_000
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"*unmistakable")
        assert (client.launch("capped").last.shared, client.launch("capped").last.priority) == (0, -4)


def test_a_handle_that_stands_for_another_kernel_is_decided_anew(built: Built, tmp_path: Path) -> None:
    with session(built, tmp_path, CAP) as client:
        client.find()
        handle = client.make("capped")
        assert client.launch("capped").last.shared == 60_000
        client.ask("unload capped")
        assert client.make("other") == handle
        assert client.launch("other").last.shared == 0
        assert client.attributes("other") == (49_152, -1)
        client.ask("unload other")
        assert client.make("capped", 0, 48) == handle
        assert client.launch("capped").last.shared == 60_000
        assert [(seen.name, seen.num_launches) for seen in client.state().functions] == [
            ("capped", 1),
            ("other", 1),
            ("capped", 1),
        ]


@example(pattern="\\?", names=["a", "?"])
@example(pattern="a\\*b", names=["a*b", "aab"])
@example(pattern="*ab", names=["aab", "abab", "aba"])
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pattern=st.text(alphabet="ab*?\\", min_size=1, max_size=7),
    names=st.lists(st.text(alphabet="ab*?", min_size=1, max_size=6), max_size=4),
)
def test_patterns_match_as_their_definition_says(matcher: Session, pattern: str, names: list[str]) -> None:
    matcher.block().swap([FilterRule(pattern=pattern, priority=-1)])
    for name in names:
        matcher.make(name)
        wanted = matches(pattern, name)
        assert (matcher.launch(name).last.priority == -1) == wanted, (pattern, name)
        matcher.ask(f"unload {name}")
    for name in names:
        matcher.block().swap([FilterRule(pattern=literal_pattern(name), priority=-1)])
        matcher.make(name)
        assert matcher.launch(name).last.priority == -1
        matcher.ask(f"unload {name}")


def matches(pattern: str, name: str) -> bool:
    """The definition, letter by letter: * is any run of letters, ? any one, a backslash takes the next letter literally."""
    if not pattern:
        return not name
    if pattern[0] == "*":
        return any(matches(pattern[1:], name[start:]) for start in range(len(name) + 1))
    if pattern[0] == "\\" and len(pattern) > 1:
        return name[:1] == pattern[1] and matches(pattern[2:], name[1:])
    return bool(name) and pattern[0] in ("?", name[0]) and matches(pattern[1:], name[1:])


@pytest.fixture(scope="module")
def matcher(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with session(built, tmp_path_factory.mktemp("matcher")) as client:
        client.find()
        client.make("warm")
        client.launch("warm")
        yield client


def test_demangled_names_match_where_the_process_can_demangle(built: Built, tmp_path: Path) -> None:
    rule = FilterRule(pattern=literal_pattern("void add<float>(float*, int)"), priority=-1)
    directory = run_directory(tmp_path, rule)
    with Session(built, directory, behind=(Path("libstdc++.so.6"),)) as client:
        client.find()
        client.make("_Z3addIfEvPT_i")
        assert client.launch("_Z3addIfEvPT_i").last.priority == -1


def test_a_name_longer_than_the_census_keeps_still_matches_whole(built: Built, tmp_path: Path) -> None:
    name = "k" * 700
    with session(built, tmp_path, FilterRule(pattern=name, priority=-1)) as client:
        client.find()
        client.make(name)
        assert client.launch(name).last.priority == -1
        (seen,) = client.state().functions
        assert (seen.name, seen.pattern) == ("k" * 512, "k" * 512 + "*")
