"""How reports say a plan is applied: what is printed can be typed, and names only what there is."""

import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

import counterpoint as package
from counterpoint.cli.main import app
from counterpoint.cli.run import _print_to_apply, _report
from counterpoint.controls import (
    CommunicationCtas,
    Control,
    HeadStart,
    OverlapMatmul,
    Priority,
    ResidencyCap,
    ScheduleChoice,
    Transport,
)
from counterpoint.engagement import Engagement
from counterpoint.measurement.values import Measurement
from counterpoint.plan import LEAVE_IT, Directive, Match, Plan, Refusal, load_plan, save_plan
from counterpoint.report.to_apply import NOWHERE, Application, PlanOrigin, ways_to_apply
from counterpoint.schedule.description import ScheduleDescription
from counterpoint.supervised.process import Ended
from counterpoint.supervised.proof import ControlProof, ProcessProof
from counterpoint.supervised.run import RunOutcome, RunRequest
from counterpoint.supervised.settings import CANDIDATE, LiveRecord
from helpers.command import counterpoint

COPIES = Transport(transport="copy_engine")
OF_THE_JOB = "collectives.replace()"
CONTROLS: tuple[Control, ...] = (
    ResidencyCap(ctas_per_sm=4, dynamic_shared_bytes=45_696),
    Priority(priority=-5),
    HeadStart(hold_us=5.0),
    CommunicationCtas(max_ctas=8),
    CommunicationCtas(max_ctas=24, num_threads=256),
    COPIES,
    OverlapMatmul(),
    ScheduleChoice(schedule=ScheduleDescription(chunks=2)),
)


def plan(*controls: Control, match: Match = Match()) -> Plan:  # noqa: B008  a frozen value
    return Plan(verdict="GAIN", directives=(Directive(match=match, controls=controls, reason="test"),))


def lines_of(ways: tuple[Application, ...]) -> list[str]:
    return [line for way in ways for line in way.lines]


@pytest.mark.parametrize("control", CONTROLS)
def test_every_control_has_a_way(control: Control) -> None:
    ways = ways_to_apply(plan(control), PlanOrigin(file="p.toml", is_captured=True))
    assert any(control.describe() in way.controls for way in ways)
    assert all(way.lines and way.where for way in ways)
    by_run = [line for line in lines_of(ways) if line.startswith("counterpoint run")]
    assert bool(by_run) == ("job" not in control.refused_by)
    captured = [line for line in lines_of(ways) if "capture(" in line]
    assert bool(captured) == ("graph" not in control.refused_by)


@pytest.mark.parametrize(
    ("collective", "expected"),
    [
        ("all_gather", {"fsdp2.use_copy_engines(model)", OF_THE_JOB}),
        ("reduce_scatter", {"fsdp2.use_copy_engines(model)", OF_THE_JOB}),
        ("all_reduce", {"ddp.register(model)", OF_THE_JOB}),
        ("all_to_all", {OF_THE_JOB}),
        ("broadcast", set()),
        (None, {"ddp.register(model)", "fsdp2.use_copy_engines(model)", OF_THE_JOB}),
    ],
)
def test_copies_are_had_by_the_integration_that_makes_them(collective: str | None, expected: set[str]) -> None:
    found = ways_to_apply(plan(COPIES, match=Match(collective=collective)), NOWHERE)  # type: ignore[arg-type]
    assert {line for line in lines_of(found) if line.startswith(("ddp.", "fsdp2.", "collectives."))} == expected


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("collective", [None, "all_gather", "all_to_all"])
def test_lines_of_python_name_what_there_is(control: Control, collective: str | None) -> None:
    torch = pytest.importorskip("torch")
    assert torch is not None
    directives = plan(control, match=Match(collective=collective))  # type: ignore[arg-type]
    for way in ways_to_apply(directives, PlanOrigin(file="p.toml", is_captured=True)):
        if way.lines[0].startswith(("counterpoint ", "export ")):
            continue
        imports = [line for line in way.lines if line.startswith(("import ", "from "))]
        if "from counterpoint import apply, capture, load_plan" in imports:  # they need CUDA's bindings when they are taken
            assert {"apply", "capture", "load_plan"} <= set(dir(package))
            continue
        names: dict[str, object] = {}
        exec("\n".join(imports), names)
        for line in way.lines[len(imports) :]:
            compile(line, "line", "exec")
            called = line.split(" = ")[-1].split("(")[0]
            module, _, attribute = called.partition(".")
            if attribute and module in names:
                assert callable(getattr(names[module], attribute.split(".")[0], None)) or "ProcessGroupNCCL" in line


def test_a_plan_that_is_nowhere_is_saved_first_and_options_stand_before_the_words_of_the_job() -> None:
    finding = ("counterpoint", "run", "--tune", "--", "torchrun", "train it.py", "-x")
    first, second = ways_to_apply(plan(Priority(priority=-5)), PlanOrigin(finding=finding, job=finding[4:]))
    assert first.lines == ("counterpoint run --tune -o plan.toml -- torchrun 'train it.py' -x",)
    assert second.lines == ("counterpoint run --plan plan.toml -- torchrun 'train it.py' -x",)


@pytest.mark.parametrize(
    ("match", "controls", "is_named"),
    [
        (Match(name="gemm"), (HeadStart(hold_us=5),), False),
        (Match(kind="communication"), (Priority(priority=-5),), False),
        (Match(name="gemm", ordinals=(1,)), (HeadStart(hold_us=5),), True),
        (Match(operations=(1,)), (HeadStart(hold_us=5),), True),
        (Match(collective="all_gather"), (Priority(priority=-5),), True),
        (Match(collective="all_gather"), (COPIES,), False),
        (Match(collective="all_gather", process_group="mesh_tp"), (COPIES,), True),
        (Match(collective="all_gather", num_bytes=2**27), (COPIES,), True),
    ],
)
def test_the_step_is_named_only_where_names_of_launches_do_not_tell(
    match: Match, controls: tuple[Control, ...], is_named: bool
) -> None:
    ways = ways_to_apply(plan(*controls, match=match), PlanOrigin(file="p.toml", step="t.json.gz"))
    assert ("--step t.json.gz" in lines_of(ways)[0]) == is_named


def test_a_plan_file_alone_asks_for_the_trace_that_it_was_made_from() -> None:
    match = Match(collective="all_gather", ordinals=(1,))
    first, *_ = ways_to_apply(plan(COPIES, match=match), PlanOrigin(file="p.toml"))
    assert first.lines == ("counterpoint run --plan p.toml --step TRACE -- torchrun train.py",)


def test_a_plan_that_leaves_all_as_it_is_has_no_way() -> None:
    assert ways_to_apply(LEAVE_IT, PlanOrigin(finding=("counterpoint", "tune"))) == ()


def test_the_commands_that_tune_prints_run_as_they_stand(tmp_path: Path) -> None:
    """Save, show and run: each line is typed as it was printed, with a command of this machine for the job."""
    printed = counterpoint("tune", "cb_ar_opt1", cwd=tmp_path).stdout.splitlines()
    save, run = (line.strip() for line in printed if line.startswith("     counterpoint "))
    assert counterpoint(*shlex.split(save)[1:], cwd=tmp_path).returncode == 0
    assert load_plan(tmp_path / "plan.toml").verdict == "GAIN"
    words = [*shlex.split(run)[1:-2], "sh", "-c", "echo the job ran"]
    assert shlex.split(run)[-2:] == ["torchrun", "train.py"]
    done = counterpoint(*words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "the job ran\n"), done.stderr


def test_the_command_that_saves_the_plan_names_the_calibration_that_the_plan_was_found_with() -> None:
    constants = Path(package.__file__).parent / "calibrations" / "h200.toml"
    said = CliRunner().invoke(app, ["tune", "cb_ar_opt1", "--calibration", str(constants)]).output
    assert f"     counterpoint tune cb_ar_opt1 --calibration {constants} -o plan.toml\n" in said


ON_ONE_STREAM = """
name = "on_one_stream"
num_ranks = 4
iterations = 4

[[gemms]]
name = "gemm"
stream = 0
m = 4096
n = 4096
k = {inner}
dtype = "bf16"
tile = "128x128x64"
threads_per_cta = 256
registers_per_thread = 128
stages = 3

[[collectives]]
name = "sum"
stream = 0
collective = "all_reduce"
bytes = "{size}"
"""


@pytest.mark.parametrize(
    ("size", "inner", "says"),
    [
        (
            "8 MiB",
            4096,
            "changes to the job that could help (simulated; only if the data flow allows them) - issue each all_reduce on",
        ),
        ("1 KiB", 65536, "No change to the job saves 1.0 % or more. Simulated: issue each all_reduce on"),
    ],
)
def test_where_no_control_pays_the_report_says_what_the_job_could_change_or_that_nothing_would_help(
    size: str, inner: int, says: str, tmp_path: Path
) -> None:
    (tmp_path / "step.toml").write_text(ON_ONE_STREAM.format(size=size, inner=inner))
    told = CliRunner().invoke(app, ["tune", str(tmp_path / "step.toml"), "--machine", "h200"]).stdout
    assert says in " ".join(told.split())
    assert "to apply" not in told


def test_where_a_step_has_no_place_for_a_change_the_report_says_so() -> None:
    trace = Path(__file__).parents[2] / "examples" / "traces" / "tp.rank0.json.gz"
    told = CliRunner().invoke(app, ["tune", str(trace)]).stdout
    assert "No change of streams, bucket sizes or prefetch applies to this step." in " ".join(told.split())
    assert "to apply" not in told


@pytest.mark.parametrize(("stage", "is_told"), [("decided", True), ("reverted", False)])
def test_a_tuned_run_says_how_the_job_is_started_with_what_it_found(
    stage: str, is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    request = RunRequest(command=("torchrun", "train it.py"), is_tuning=True, budget_steps=300)
    record = LiveRecord(stage=stage, plan=plan(Priority(priority=-5)))  # type: ignore[arg-type]
    outcome = RunOutcome(ended=Ended(exit_status=0), is_filtered=True, is_tuned=True, record=record)
    _print_to_apply(outcome, request, None)
    said = capsys.readouterr().err
    assert ("     counterpoint run --tune --budget 300 -o plan.toml -- torchrun 'train it.py'\n" in said) == is_told
    assert ("     counterpoint run --plan plan.toml -- torchrun 'train it.py'\n" in said) == is_told
    _print_to_apply(outcome, request, Path("kept.toml"))
    assert ("     counterpoint run --plan kept.toml -- torchrun 'train it.py'\n" in capsys.readouterr().err) == is_told


def test_a_tuned_run_ends_with_the_verdict_the_proof_and_the_command_before_what_was_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    entry = Engagement(control="priority", target="nccl", state="verified", asked="priority -5", found="priority -5")
    process = ProcessProof(
        pid=1, rank=0, num_launches=1, applied=(ControlProof(engagement=entry, num_matched=1, num_applied=1),)
    )
    times = Measurement(label="as it is", median_us=1, least_us=1, ratio=1, spread=0, num_rounds=1)
    refusal = Refusal(control="residency_cap", target="_Z4longPf", reason="no room")
    found = replace(plan(Priority(priority=-5)), refusals=(refusal,))
    record = LiveRecord(stage="decided", plan=found, measurements=(times, times))
    outcome = RunOutcome(ended=Ended(exit_status=0), is_filtered=True, is_tuned=True, record=record, processes=(process,))
    assert not _report(outcome, RunRequest(command=("true",), is_tuning=True), has_plan=False, output=None)
    said = capsys.readouterr().err
    parts = ["GAIN  ", "candidate (measured)", "verified", "to apply", "left out", "residency_cap on long: no room"]
    assert [said.count(part) for part in parts] == [1] * len(parts)
    assert sorted(parts, key=said.index) == parts


def test_a_tuned_run_that_found_nothing_says_what_tells_more(capsys: pytest.CaptureFixture[str]) -> None:
    record = LiveRecord(stage="decided", plan=Plan(verdict="NO_GAIN"))
    outcome = RunOutcome(ended=Ended(exit_status=0), is_filtered=True, is_tuned=True, record=record)
    _print_to_apply(outcome, RunRequest(command=("true",), is_tuning=True), None)
    said = capsys.readouterr().err
    assert "run `counterpoint tune` on a profiler trace" in said
    assert "to apply" not in said


def test_a_tuned_run_without_room_for_any_candidate_does_not_say_that_none_pays(capsys: pytest.CaptureFixture[str]) -> None:
    refusal = Refusal(control=CANDIDATE, target="priority", reason="--budget 100 is too small")
    record = LiveRecord(stage="decided", plan=Plan(verdict="NO_GAIN", refusals=(refusal,)))
    outcome = RunOutcome(ended=Ended(exit_status=0), is_filtered=True, is_tuned=True, record=record)
    _print_to_apply(outcome, RunRequest(command=("true",), is_tuning=True), None)
    assert not capsys.readouterr().err


def test_the_grid_says_how_its_choice_is_applied() -> None:
    said = counterpoint("bench", "paper", "cb_ar_opt2", "--simulate", "h200").stdout
    assert "     counterpoint tune cb_ar_opt2 --machine h200 -o plan.toml\n" in said


def test_where_a_way_belongs_is_indented_when_it_is_wrapped_and_what_is_typed_is_not_wrapped(tmp_path: Path) -> None:
    save_plan(plan(OverlapMatmul(), match=Match(collective="all_to_all")), tmp_path / "p.toml")
    said = counterpoint("plan", "show", "p.toml", cwd=tmp_path, COLUMNS="40").stdout
    block = said[said.index("to apply\n") :].split("\n\n")[0].splitlines()[1:]
    assert len(block) > 4
    assert all(line.startswith((" - ", "   ")) for line in block)
    assert "     counterpoint run --plan p.toml -- torchrun train.py" in block
