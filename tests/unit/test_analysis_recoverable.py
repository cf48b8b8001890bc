"""What can be recovered: no more than controls can do, and nothing of what was waited for other ranks."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from counterpoint.analysis import recoverable
from counterpoint.analysis.combine import combine
from counterpoint.analysis.headline import with_recoverable
from counterpoint.analysis.rank import analyze_rank
from counterpoint.analysis.recoverable import find_recoverable
from counterpoint.analysis.values import Recoverable
from counterpoint.errors import AnalysisError
from counterpoint.job import load_job
from counterpoint.planner.search import tune
from counterpoint.sim import Simulator
from counterpoint.traces.formats import read_activity
from helpers.command import TRACES, counterpoint, refusal
from helpers.trace_builder import MATMUL, TraceBuilder

FITS_BESIDE = {"grid": [132, 1, 1], "block": [128, 1, 1], "registers per thread": 64}
DDP = [TRACES / f"ddp.rank{rank}.json.gz" for rank in (0, 1)]


def recovered(source: Path, *files: Path) -> tuple[Recoverable, ...]:
    """Of the step in `source`, with the traces of `files` beside each other."""
    analysis = combine([analyze_rank(read_activity(file)) for file in files])
    return find_recoverable(analysis, load_job(str(source)), str(source))


def test_entries_come_by_value_with_lines_to_paste_and_marks_on_what_the_replay_cannot_tell() -> None:
    found = recovered(TRACES / "fsdp2.rank0.json.gz", TRACES / "fsdp2.rank0.json.gz")
    assert [each.recovers_us for each in found] == sorted((each.recovers_us for each in found), reverse=True)
    copies = next(each for each in found if each.what == "copy engines, reductions too")
    assert copies.recovers_us == pytest.approx(7190, rel=0.15)
    assert "fsdp2.use_copy_engines(model)" in copies.apply
    assert copies.saved_us == pytest.approx(2427 + 1464, abs=2)  # FSDP's copies out of and into flat buffers
    assert not copies.is_within_replay_error


def test_the_summary_says_what_else_than_exposed_time_and_kernels_a_change_recovers() -> None:
    analysis = combine([analyze_rank(read_activity(DDP[0]))])
    for rest_us, is_said in ((1.0, True), (-1.0, False)):
        entry = Recoverable(causes=("tail",), what="it", recovers_us=analysis.exposed_us + 10.0 + rest_us, saved_us=10.0)
        (line, *_) = with_recoverable(analysis, [entry]).headline.next
        assert "10 us of kernels become unnecessary" in line
        assert ("idle time, and computation that communication slows down" in line) == is_said


def test_nothing_is_recommended_from_a_replay_that_tune_would_not_use(tmp_path: Path) -> None:
    """The all-reduces could have run beside the matmuls, and did not for a reason that the replay does not know."""
    trace = TraceBuilder()
    for number in range(4):
        begin = 10_000.0 * number
        trace.step(begin, begin + 9_900)
        for place in range(4):
            trace.kernel(MATMUL, begin + 200 + 1000 * place, 990, host=begin + place, args=FITS_BESIDE)
            trace.collective(begin + 4200 + 1000 * place, 990, host=begin + place + 0.5, elements=1 << 24)
    with pytest.raises(AnalysisError, match=r"the replay differs from the trace .* a simulation is not used\.$"):
        recovered(trace.write(tmp_path), tmp_path / "small.json")


def test_the_order_of_the_files_changes_nothing() -> None:
    assert recovered(DDP[1], *DDP) == recovered(DDP[1], *reversed(DDP))


def test_the_plan_is_named_as_tune_names_it_and_alone_has_the_commands_that_apply_it() -> None:
    analysis, job = combine([analyze_rank(read_activity(DDP[0]))]), load_job("cb_ar_opt2")
    found = find_recoverable(analysis, job, "cb_ar_opt2")
    planned = [each for each in found if "counterpoint tune cb_ar_opt2 -o plan.toml" in each.apply]
    assert [each.what for each in planned] == ["copies and sums"]
    assert tune(job.step, job.machine, Simulator()).plan.summary.startswith("copies and sums: ")
    assert "priority" in {each.what for each in found}


@pytest.mark.parametrize(("trace", "is_needed"), [(DDP[0], True), (TRACES / "fsdp2.rank0.json.gz", False)])
def test_the_command_that_runs_the_plan_names_the_trace_where_run_refuses_the_plan_without_it(
    trace: Path, is_needed: bool
) -> None:
    lines = [line for each in recovered(trace, trace) for line in each.apply]
    step = f"--step {trace} " if is_needed else ""
    assert f"counterpoint run --plan plan.toml {step}-- torchrun train.py" in lines


def test_the_command_that_finds_the_plan_names_the_traces_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, together = ([line for each in recovered(DDP[1], *files) for line in each.apply] for files in (DDP[1:], DDP))
    assert f"counterpoint tune {DDP[1]} -o plan.toml" in alone
    assert f"counterpoint tune {DDP[0]} {DDP[1]} -o plan.toml" in together
    monkeypatch.setattr(recoverable, "MOST_NAMED", 1)
    shortened = [line for each in recovered(DDP[1], *DDP) for line in each.apply]
    assert recoverable.OTHER_PLAN in shortened
    assert recoverable.OTHER_PLAN not in (*alone, *together)


def test_waits_that_other_ranks_show_are_not_recovered() -> None:
    alone, together = (sum(each.recovers_us for each in recovered(DDP[1], *files)) for files in (DDP[1:], DDP))
    assert together <= alone


def uneven_job(folder: Path) -> list[Path]:
    """Two ranks whose matmuls and all-reduces take turns on one stream; those of rank 1 take twice as long."""
    traces = [TraceBuilder(world_size=2, rank=rank) for rank in (0, 1)]
    for number in range(4):
        for rank, trace in enumerate(traces):
            begin = 10_000.0 * number
            trace.step(begin, begin + 9_000)
            for place in range(6):
                start, end, host = begin + 200 + 1000 * place, begin + 1195 + 1000 * place, begin + 2 * place
                trace.kernel(MATMUL, start, 300 + 300 * rank, host=host, args=FITS_BESIDE)
                after = start + 303 + 300 * rank
                group = {"Group size": 2, "Process Group Ranks": "[0, 1]"}
                trace.collective(after, end - after, host=host + 1, elements=1 << 25, stream=7, args=group)
    return [trace.write(folder, f"rank{rank}.json") for rank, trace in enumerate(traces)]


def test_what_can_be_recovered_is_that_of_the_rank_that_sets_the_pace_in_any_order(tmp_path: Path) -> None:
    files = uneven_job(tmp_path)
    first, last = (json.loads(counterpoint("analyze", *order, "--json").stdout) for order in (files, files[::-1]))
    assert first["recoverable"]
    for found, other in zip(first["recoverable"], last["recoverable"], strict=True):
        assert (found["what"], found["apply"]) == (other["what"], other["apply"])
        assert found["recovers_us"] == pytest.approx(other["recovers_us"], rel=1e-3)
        assert not any(str(files[0]) in line for line in found["apply"] if "counterpoint tune" not in line)
    transfers_us = 6 * (995 - 603)
    assert first["recoverable"][0]["recovers_us"] < transfers_us


def test_tune_plans_the_rank_that_sets_the_pace_with_the_waits_that_other_ranks_show(tmp_path: Path) -> None:
    files = uneven_job(tmp_path)
    analyzed = json.loads(counterpoint("analyze", *files, "--json").stdout)["recoverable"]
    planned, other = (json.loads(counterpoint("tune", *order, "--json").stdout) for order in (files, files[::-1]))
    assert (planned["plan"]["directives"], planned["step"]) == (other["plan"]["directives"], other["step"])
    assert any(f"{files[1]} is planned: of 2 traces, its rank waits least" in note for note in planned["notes"])
    times_us = {row["name"]: row["makespan_us"] for row in planned["step"]}
    best = max(each["recovers_us"] for each in analyzed if any("counterpoint tune" in line for line in each["apply"]))
    assert times_us["as replayed"] - times_us["with the plan"] == pytest.approx(best)


@pytest.mark.parametrize("second", ["cb_ar_opt1", "train:make_step", "step.toml"])
def test_of_several_arguments_of_tune_all_are_traces(tmp_path: Path, second: str) -> None:
    trace = uneven_job(tmp_path)[0]
    said = refusal("tune", trace, second)
    assert said == f"'{second}' is no trace. Give traces of the ranks of one job, or one STEP."


def test_traces_that_are_not_of_the_ranks_of_one_job_are_refused(tmp_path: Path) -> None:
    said = refusal("tune", DDP[0], TRACES / "fsdp2.rank0.json.gz")
    assert "are both of rank 0, so the second is left out. Give each rank once." in said
    builder = TraceBuilder(world_size=2, rank=1)
    for number in range(3):
        builder.step(10_000.0 * number, 10_000.0 * number + 9_000)
        for place in range(9):
            group = {"Group size": 2, "Process Group Ranks": "[0, 1]", "Collective name": "reduce_scatter"}
            builder.collective(10_000.0 * number + 50 + 900 * place, 100, elements=1 << 20, args=group)
    said = refusal("tune", uneven_job(tmp_path)[0], builder.write(tmp_path, "stranger.json"))
    assert said.endswith("so they are not of one job. Give the traces of one job.")


def test_waits_are_those_of_the_ranks_own_groups_and_numbers(tmp_path: Path) -> None:
    files = uneven_job(tmp_path)
    analysis = combine([analyze_rank(read_activity(file)) for file in files])
    job = load_job(str(files[0]))
    of_others = tuple(
        replace(each, waits_us=((2, 0.0), (3, 0.0)), group_numbers=((2, each.group_number), (3, each.group_number)))
        for each in analysis.skews
    )
    began_later = tuple(replace(each, group_number=each.group_number + 6) for each in analysis.skews)
    usual = find_recoverable(analysis, job, str(files[0]))
    for skews in ((*analysis.skews, *of_others), began_later):
        assert find_recoverable(replace(analysis, skews=skews), job, str(files[0])) == usual
