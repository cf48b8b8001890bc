"""What notebooks show of values: a short line and a small table, whatever the value holds, and only public names on Tab."""

from collections.abc import Callable
from functools import cache
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

import counterpoint
from counterpoint import (
    Directive,
    Kernel,
    Match,
    Plan,
    Priority,
    Simulator,
    Step,
    Tuning,
    integrations,
    load_machine,
    measure,
    ops,
)
from counterpoint.analysis.combine import combine
from counterpoint.analysis.rank import analyze_rank
from counterpoint.display import MOST_LETTERS, capped, html_list, html_table
from counterpoint.traces.formats import read_activity
from helpers.command import TRACES

MACHINE = load_machine("h200")
TRACED = counterpoint.read_trace(TRACES / "fsdp2.rank0.json.gz")
pytestmark = pytest.mark.xdist_group("notebooks")  # one worker, which tunes once


@cache
def tuning() -> Tuning:
    """When a test needs it, for it takes seconds."""
    return counterpoint.tune(TRACED.step, MACHINE)


LARGE: dict[str, Callable[[], Any]] = {
    "machine": lambda: MACHINE,
    "step": lambda: TRACED.step,
    "traced step": lambda: TRACED,
    "timeline": lambda: tuning().baseline,
    "plan": lambda: tuning().plan,
    "tuning": tuning,
    "analysis": lambda: combine([analyze_rank(read_activity(TRACES / "ddp.rank0.json.gz"))]),
}


def parsed(html: str) -> ElementTree.Element:
    return ElementTree.fromstring(f"<div>{html}</div>")


@pytest.mark.parametrize("name", LARGE)
def test_a_large_value_is_short_in_a_notebook(name: str) -> None:
    value = LARGE[name]()
    assert len(repr(value)) <= MOST_LETTERS
    assert len(value._repr_html_()) <= MOST_LETTERS
    assert parsed(value._repr_html_()).findtext("b")


def test_the_words_say_what_the_value_is() -> None:
    assert (
        repr(TRACED.step) == "<Step 'fsdp2.rank0': 276 kernels, 18 collectives of 6.751 GiB, 140 copies and fills, 4 ranks>"
    )
    assert repr(tuning()) == f"<Tuning GAIN: {tuning().plan.summary}; {len(tuning().trials)} trials>"
    assert repr(MACHINE).startswith("<Machine 'h200': 8 x NVIDIA H200")
    assert repr(tuning().baseline).startswith("<Timeline of 'fsdp2.rank0': simulated, 434 intervals, 1 rank, ends at ")
    assert repr(Simulator()) == "Simulator()"


def test_a_small_value_is_shown_whole() -> None:
    assert repr(Priority(priority=-5)) == "Priority(priority=-5)"
    plan = Plan(directives=(Directive(match=Match(name="gemm"), controls=(Priority(priority=-5),), reason="why"),))
    assert "priority=-5" in repr(plan)
    assert "reason='why'" in repr(plan)


def test_the_table_of_a_tuning_has_the_shortest_candidates() -> None:
    rows = [[cell.text for cell in row] for row in parsed(tuning()._repr_html_()).iter("tr")]
    assert rows[0] == ["candidate (simulated)", "makespan", "change", "exposed"]
    assert rows[1][0] == "as it is"
    assert rows[2][0] == min(tuning().trials, key=lambda trial: trial.makespan_us).label


def test_the_table_of_metrics_has_the_figures_over_all_ranks() -> None:
    found = measure(tuning().baseline)
    assert [cell.text for cell in parsed(found._repr_html_()).iter("th")] == ["makespan", "exposed", "overlap"]


def test_names_of_kernels_are_text_and_not_elements() -> None:
    kernel = Kernel(name="<script>", stream=0, lone_us=1.0, footprint=TRACED.step.operations[0].footprint)  # type: ignore[union-attr]
    step = Step(name="<script>alert(1)</script>", num_ranks=1, operations=(kernel,))
    assert "<script>" not in step._repr_html_()
    assert parsed(step._repr_html_()).findtext("b") == "Step <script>alert(1)</script>"


@given(rows=st.lists(st.tuples(st.text(), st.text()), max_size=40), caption=st.text())
def test_a_table_never_exceeds_the_limit(rows: list[tuple[str, str]], caption: str) -> None:
    html = html_table(caption, ("a", "b"), rows)
    assert len(html) <= MOST_LETTERS
    num_rows = html.count("<tr>") - 1
    assert html.endswith(f"and {len(rows) - num_rows} more" if num_rows < len(rows) else "</table>")


@given(lines=st.lists(st.text(), max_size=40), caption=st.text())
def test_a_list_never_exceeds_the_limit(lines: list[str], caption: str) -> None:
    html = html_list(caption, lines)
    assert len(html) <= MOST_LETTERS
    assert html.endswith(f"and {len(lines) - html.count('<li>')} more" if html.count("<li>") < len(lines) else "</ul>")


def test_a_long_text_is_cut_at_the_limit() -> None:
    assert capped("x" * MOST_LETTERS) == "x" * MOST_LETTERS
    assert capped("x" * (MOST_LETTERS + 1)) == "x" * (MOST_LETTERS - 3) + "..."


def test_completion_offers_the_public_names_and_nothing_else() -> None:
    assert dir(ops) == sorted(ops.__all__)
    assert dir(integrations) == ["collectives", "ddp", "expert_parallel", "fsdp2", "tensor_parallel"]
    assert counterpoint.ops is ops
    assert all(getattr(integrations, name).__name__ == f"counterpoint.integrations.{name}" for name in dir(integrations))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = integrations.nothing
