"""The gate: which conditions are read, which hold, and what is noise."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from counterpoint.analysis.gate import load_baseline, parse_condition, violations
from counterpoint.analysis.values import SCHEMA, Analysis, CauseTotal, Headline, RankAnalysis, StepFigures
from counterpoint.errors import AnalysisError
from counterpoint.value import write_json


def a_step(number: int, makespan_us: float, exposed_us: float) -> StepFigures:
    return StepFigures(
        rank=0,
        step=number,
        start_us=0,
        end_us=makespan_us,
        computation_us=makespan_us - exposed_us,
        communication_us=2 * exposed_us,
        waiting_us=0,
        copy_us=0,
        exposed_us=exposed_us,
        overlapped_us=exposed_us,
        idle_us=0,
        launch_bound_us=0,
        overlap_ratio=0.5,
    )


def an_analysis(*makespans_us: float, exposed_us: float = 60.0) -> Analysis:
    steps = tuple(a_step(number, each, exposed_us) for number, each in enumerate(makespans_us))
    return Analysis(
        ranks=(RankAnalysis(path="a.json", rank=0, steps=steps),),
        headline=Headline(verdict="", why=(), next=()),
        step_us=sum(makespans_us) / len(makespans_us),
        communication_us=2 * exposed_us,
        exposed_us=exposed_us,
        overlap_ratio=0.5,
        causes=(CauseTotal(cause="starved", exposed_us=exposed_us, share=1.0, num_intervals=1, example=""),),
    )


ANALYSIS = an_analysis(1000.0, 1000.0, 1000.0, 1000.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("exposed > 5%", "exposed > 5%: exposed is 6.0 %"),
        ("exposed > 7 %", ""),
        ("exposed >= 0.06 ms", "exposed >= 0.06 ms: exposed is 60 us"),
        ("starved>1%", "starved>1%: starved is 6.0 %"),
        ("tail > 0%", ""),
        ("launch-bound >= 0%", "launch-bound >= 0%: launch_bound is 0.0 %"),
        ("slow rank > 0%", ""),
        ("overlap < 80%", "overlap < 80%: overlap is 50.0 %"),
        ("step > 0.5 ms", "step > 0.5 ms: step is 1 ms"),
    ],
)
def test_a_condition_on_the_figures_alone(text: str, said: str) -> None:
    assert "".join(violations(ANALYSIS, [parse_condition(text)])) == said


@pytest.mark.parametrize(
    ("text", "makespans_us", "fails"),
    [
        ("step > baseline + 3%", (1040.0,) * 4, True),
        ("step > baseline + 3%", (1020.0,) * 4, False),
        ("step > baseline + 10 us", (1020.0,) * 4, True),
        ("step > baseline", (1020.0,) * 4, True),
        ("step > baseline", (920.0, 980.0, 1060.0, 1120.0), False),  # less than the spread of its own steps
        ("step < baseline - 3%", (960.0,) * 4, True),
        ("step > baseline - 3%", (1000.0,) * 4, True),  # the step had to become shorter
        ("step > baseline - 3%", (960.0,) * 4, False),
    ],
)
def test_a_condition_against_a_baseline(text: str, makespans_us: tuple[float, ...], fails: bool) -> None:
    found = violations(an_analysis(*makespans_us), [parse_condition(text)], ANALYSIS)
    assert bool(found) == fails
    assert not found or "in the baseline 1 ms" in found[0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "exposed",
        "exposed > ",
        "exposed = 5%",
        "exposed > 5",
        "speed > 5%",
        "overlap < 3 ms",
        "step > 5%",
        "step > baseline 5%",
        "step > baseline +",
        "exposed > -5%",
        "exposed > 5% and step > 3 ms",
    ],
)
def test_what_is_no_condition_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(AnalysisError, match="--fail-if") as problem:
        parse_condition(text)
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize("is_baseline", [False, True])
def test_figures_that_cannot_be_trusted_pass_no_gate(is_baseline: bool) -> None:
    ranks = tuple(replace(rank, untrusted="1 operation overlaps its predecessor.") for rank in ANALYSIS.ranks)
    wrong = replace(ANALYSIS, ranks=ranks)
    found, saved = (ANALYSIS, wrong) if is_baseline else (wrong, ANALYSIS)
    with pytest.raises(AnalysisError, match=r"cannot judge a\.json: 1 operation overlaps"):
        violations(found, [parse_condition("step > baseline + 3%")], saved)
    assert violations(found, [], saved) == ()


def test_traces_of_which_some_are_left_out_pass_no_gate() -> None:
    partial = replace(ANALYSIS, left_out=("a.json and b.json are both of rank 0, so the second is left out.",))
    for found, saved in ((partial, ANALYSIS), (ANALYSIS, partial)):
        with pytest.raises(AnalysisError, match=r"^--fail-if needs traces of one job, each rank once\. a\.json and b\.json"):
            violations(found, [parse_condition("step > baseline + 3%")], saved)


def test_a_condition_on_a_baseline_needs_one() -> None:
    with pytest.raises(AnalysisError, match="Add --baseline FILE"):
        violations(ANALYSIS, [parse_condition("step > baseline + 3%")])


def test_a_baseline_survives_its_file_and_another_schema_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "before.json"
    file.write_text(write_json(ANALYSIS))
    assert load_baseline(file) == ANALYSIS
    file.write_text(write_json(ANALYSIS).replace(SCHEMA, "counterpoint.analysis/0"))
    with pytest.raises(AnalysisError, match=r"schema 'counterpoint\.analysis/0'"):
        load_baseline(file)
    for content in ("{}", "[]", "no json", ""):
        file.write_text(content)
        with pytest.raises(AnalysisError) as problem:
            load_baseline(file)
        assert "\n" not in str(problem.value)
