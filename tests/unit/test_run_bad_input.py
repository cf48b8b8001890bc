"""What `counterpoint run` refuses before it starts anything: one line, exit code 2."""

import subprocess
from pathlib import Path

import pytest

from counterpoint.controls import CommunicationCtas, Control, Priority
from counterpoint.plan import Directive, Match, Plan, save_plan
from helpers.command import counterpoint, refusal

MARK = "started.txt"


def plan(folder: Path, *controls: Control, match: Match = Match(kind="communication")) -> Path:  # noqa: B008  frozen
    save_plan(
        Plan(verdict="GAIN", directives=(Directive(match=match, controls=controls, reason="test"),)), folder / "p.toml"
    )
    return folder / "p.toml"


def refused(folder: Path, *options: str | Path) -> str:
    """What is said, once it is sure that the command did not start."""
    said = refusal("run", *options, "--", "touch", MARK, cwd=folder)
    assert not (folder / MARK).exists()
    return said


@pytest.mark.parametrize(
    ("content", "words"),
    [("", "is empty"), ("verdict = [", "is not TOML"), ("verdict = 'PERHAPS'", "PERHAPS"), ("[[directives]]", "match")],
)
def test_a_plan_that_is_none(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "p.toml").write_text(content)
    assert words in refused(tmp_path, "--plan", "p.toml")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--plan", "missing.toml"], "No such file"),
        (["-o", "found.toml"], "Add --tune"),
        (["--budget", "100"], "Add --tune, or leave out --budget"),
        (["--bitwise"], "Add one of them, or leave out --bitwise"),
        (["--queues", "8"], "Add one of them, or leave out --queues"),
        (["--tune", "--queues", "40"], "--queues must be from 1 to 32, CUDA's limit; found 40"),
        (["--tune", "--queues", "0"], "found 0. CUDA's default is 8"),
        (["--strict"], "Add one of them, or leave out --strict"),
        (["--guard", "500"], "Add one of them, or leave out --guard"),
        (["--tune", "-o", "no/folder/found.toml"], "does not exist"),
        (["--tune", "--budget", "99"], "from 100 to"),
        (["--tune", "--budget", "-5"], "from 100 to"),
        (["--tune", "--budget", "many"], "'many' is not a valid integer"),
        (["--tune", "--guard", "7"], "every 100 steps"),
        (["--step", "trace.json"], "Add --plan"),
        (["--frobnicate"], "No such option"),
    ],
)
def test_options_that_make_no_sense(tmp_path: Path, options: list[str], words: str) -> None:
    assert words in refused(tmp_path, *options)


def test_a_plan_is_not_overwritten_by_the_one_found(tmp_path: Path) -> None:
    path = plan(tmp_path, Priority(priority=-5))
    assert "already uses that file" in refused(tmp_path, "--tune", "--plan", path, "-o", path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--plan", "circle.toml"), "Too many levels of symbolic links"),
        (("--tune", "-o", "circle.toml"), "its links lead in a circle"),
        (("--tune", "-o", "astray.toml"), "does not exist"),
    ],
)
def test_links_that_lead_nowhere(tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    (tmp_path / "circle.toml").symlink_to("circle.toml")
    (tmp_path / "astray.toml").symlink_to("no/folder/found.toml")
    assert words in refused(tmp_path, *options)


def test_the_step_of_another_plan(tmp_path: Path) -> None:
    save_plan(Plan(step_name="other", step_fingerprint="0" * 16, directives=Plan().directives), tmp_path / "p.toml")
    path = tmp_path / "p.toml"
    path.write_text(
        path.read_text() + '[[directives]]\nreason = "test"\n[directives.match]\noperations = [3]\n'
        '[[directives.controls]]\ncontrol = "priority"\npriority = -5\n'
    )
    assert "was made for step 'other'" in refused(tmp_path, "--plan", path, "--step", "cb_ar_opt2")


def test_a_setting_that_contradicts_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MAX_CTAS", "4")
    assert "NCCL_MAX_CTAS=8, but it is set to 4" in refused(
        tmp_path, "--plan", plan(tmp_path, CommunicationCtas(max_ctas=8))
    )


def test_without_a_compiler_a_plan_is_refused_but_a_command_alone_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("COUNTERPOINT_CACHE_DIR", str(tmp_path / "cache"))
    assert "no-such-compiler" in refused(tmp_path, "--plan", plan(tmp_path, Priority(priority=-5)))
    assert counterpoint("run", "--", "touch", MARK, cwd=tmp_path).returncode == 0
    assert (tmp_path / MARK).exists()


def test_a_static_program(tmp_path: Path) -> None:
    source = tmp_path / "alone.c"
    source.write_text("void _start(void) { for (;;); }\n")
    built = ["cc", "-static", "-nostdlib", "-ffreestanding", "-o", tmp_path / "alone", source]
    subprocess.run(built, check=True, timeout=60)
    said = refusal("run", "--plan", plan(tmp_path, Priority(priority=-5)), "--", "./alone", cwd=tmp_path)
    assert "statically linked" in said


def test_a_plan_that_leaves_everything_as_it_is_needs_no_filter(tmp_path: Path) -> None:
    save_plan(Plan(verdict="NO_GAIN", summary="nothing pays"), tmp_path / "p.toml")
    done = counterpoint("run", "--strict", "--plan", "p.toml", "--", "sh", "-c", "echo ${LD_PRELOAD:-bare}", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "bare\n")
    assert "leaves everything as it is" in done.stderr
    queues = counterpoint("run", "--queues", "8", "--plan", "p.toml", "--", "true", cwd=tmp_path)
    assert "without the filter and with the job's own hardware queues" in " ".join(queues.stderr.split())


@pytest.mark.parametrize("options", [(), ("--strict",), ("--tune",)])
def test_operation_numbers_without_the_step(tmp_path: Path, options: tuple[str, ...]) -> None:
    path = plan(tmp_path, Priority(priority=-5), match=Match(kind="communication", operations=(3,)))
    said = refused(tmp_path, *options, "--plan", path)
    assert "Directive 0 of the plan (priority) names operations by number (3)" in said
    assert "--step TRACE" in said
