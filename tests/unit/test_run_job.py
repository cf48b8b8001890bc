"""`counterpoint run` around real jobs of two ranks on CPUs, with the real filter and a double of the driver.

Torchrun starts the ranks where it may make a difference: how a plan reaches them, tuning, exit statuses, ends by signals.
"""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from counterpoint.controls import CommunicationCtas, Control, OwnStream, Priority, ResidencyCap, Transport
from counterpoint.plan import Directive, Match, Plan, load_plan, save_plan
from helpers.command import COUNTERPOINT
from helpers.ranks_of_node import ranks_of_node

ROOT = Path(__file__).parents[2]
JOB = ROOT / "tests" / "helpers" / "jobs" / "launches.py"
TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2"]
LIMIT_S = 240
Ended = subprocess.CompletedProcess[str]


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["COUNTERPOINT_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))


def run(*arguments: str | Path, **environment: str) -> Ended:
    """The command as a user starts it; `torchrun` in the arguments is this environment's."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "RANK", "WORLD_SIZE")}
    return subprocess.run(
        [COUNTERPOINT, "run", *arguments],
        env=inherited | {"COLUMNS": "200", "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def plan_of(path: Path, match: Match, *controls: Control) -> Path:
    save_plan(Plan(verdict="GAIN", directives=(Directive(match=match, controls=controls, reason="test"),)), path)
    return path


def priority_plan(folder: Path) -> Path:
    return plan_of(folder / "plan.toml", Match(kind="communication"), Priority(priority=-5))


def own_lines(ended: Ended) -> list[str]:
    return [line for line in ended.stderr.splitlines() if line.startswith("counterpoint:")]


def test_a_plan_reaches_every_rank_and_the_table_says_verified(driver: Path, tmp_path: Path) -> None:
    ended = run("--strict", "--plan", priority_plan(tmp_path), "--", *TORCHRUN, JOB, driver, "--steps", "5")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith("at 4000 us\n"), "each of 5 steps took 800 us: the driver got the priority"
    row = next(line for line in ended.stderr.splitlines() if line.startswith("priority"))
    assert "0-1" in row
    assert "5 of 5" in row
    assert "priority -5" in row
    assert row.rstrip().endswith("verified")


def test_the_job_computes_the_same_with_a_plan_and_without(driver: Path, tmp_path: Path) -> None:
    bare = subprocess.run(
        [*ranks_of_node(), JOB, driver, "--steps", "60"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    planned = run("--plan", priority_plan(tmp_path), "--", *ranks_of_node(), JOB, driver, "--steps", "60")
    through = run("--", *ranks_of_node(), JOB, driver, "--steps", "60")
    assert bare.returncode == planned.returncode == through.returncode == 0, planned.stderr
    assert through.stdout == bare.stdout
    assert planned.stdout.split(" at ")[0] == bare.stdout.split(" at ")[0], "bit for bit, as repr prints it"


@pytest.mark.parametrize("by_hand", [False, True])
def test_tuning_finds_steps_by_itself_or_by_hand_and_saves_a_plan_that_runs_again(
    driver: Path, tmp_path: Path, by_hand: bool
) -> None:
    found = tmp_path / "found.toml"
    hand = ["--by-hand"] if by_hand else []
    launcher = ranks_of_node() if by_hand else TORCHRUN
    ended = run("--tune", "--budget", "120", "-o", found, "--", *launcher, JOB, driver, "--steps", "150", *hand)
    assert ended.returncode == 0, ended.stderr
    assert sum("within 120 steps" in line for line in own_lines(ended)) == 1, ended.stderr
    assert sum("GAIN after" in line for line in own_lines(ended)) == 1, ended.stderr
    plan = load_plan(found)
    assert plan.verdict == "GAIN"
    assert plan.expectation is not None
    assert plan.expectation.origin == "measured"
    assert (plan.expectation.baseline_us, plan.expectation.planned_us) == (1000, 800)
    again = run("--strict", "--plan", found, "--guard", "0", "--", *ranks_of_node(), JOB, driver, "--steps", "5")
    assert again.returncode == 0, again.stderr
    assert again.stdout.endswith("at 4000 us\n")


def test_a_plan_that_cannot_be_saved_at_the_end_does_not_hide_the_jobs_own_exit_status(driver: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    job = shlex.join(map(str, (*ranks_of_node(), JOB, driver, "--steps", "120")))
    found = tmp_path / "folder" / "found.toml"
    command = ["sh", "-c", f"{job}; rmdir {found.parent}; exit 5"]
    ended = run("--tune", "--budget", "100", "-o", found, "--", *command)
    assert ended.returncode == 5, ended.stderr
    assert "Cannot write the plan" in own_lines(ended)[-1]


def lone_job(driver: Path, folder: Path) -> Path:
    """A job of one process without a process group; it prints the priority that the driver got in each step."""
    script = folder / "alone.py"
    script.write_text(
        f"import sys, torch\nsys.path.insert(0, {str(JOB.parent)!r})\nimport launches\n"
        f"driver, clock, found = launches.Driver({str(driver)!r}), launches.StepClock(), []\nlaunches.stand_in(clock)\n"
        "optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])\n"
        "for _ in range(int(sys.argv[1])):\n    found.append(driver.step())\n"
        "    clock.now_us += 800 if found[-1] < 0 else 1000\n    optimizer.step()\nprint(found)\n"
    )
    return script


def test_a_job_that_is_started_again_keeps_the_plan_found_before(driver: Path, tmp_path: Path) -> None:
    script, found = lone_job(driver, tmp_path), tmp_path / "found.toml"
    job = shlex.join([sys.executable, str(script)])
    command = ["sh", "-c", f"{job} 120 && {job} 20"]  # as a launcher does, which starts a failed job once more
    ended = run("--tune", "--strict", "--budget", "100", "-o", found, "--", *command, RANK="0")
    assert ended.returncode == 3, ended.stderr
    assert load_plan(found).verdict == "GAIN"
    assert any("ended after 20 steps" in line and "decided before is kept" in line for line in own_lines(ended))
    assert "it was not applied in this process" in own_lines(ended)[-1]
    assert "no launch matched" not in ended.stderr


def test_ranks_that_cannot_agree_leave_the_job_as_it_was_and_fail_strict(driver: Path, tmp_path: Path) -> None:
    arguments = ("--strict", "--plan", priority_plan(tmp_path), "--", sys.executable, lone_job(driver, tmp_path), "5")
    ended = run(*arguments, RANK="0", WORLD_SIZE="2")
    assert (ended.returncode, ended.stdout) == (3, "[-5, 0, 0, 0, 0]\n"), ended.stderr
    row = next(line for line in ended.stderr.splitlines() if line.startswith("priority"))
    assert "1 of 1" in row, "what was changed before is not forgotten"
    assert "strict: rank 0 does not tune or guard" in own_lines(ended)[-1]


def test_a_program_that_replaces_one_that_launched_can_be_left_as_it_was_too(driver: Path, tmp_path: Path) -> None:
    script = lone_job(driver, tmp_path)
    launches_first = (
        f"import os, sys\nsys.path.insert(0, {str(JOB.parent)!r})\nimport launches\n"
        f"launches.Driver({str(driver)!r}).step()\nos.execv(sys.executable, [sys.executable, {str(script)!r}, '5'])\n"
    )
    command = (sys.executable, "-c", launches_first)
    ended = run("--plan", priority_plan(tmp_path), "--", *command, RANK="0", WORLD_SIZE="2")
    assert (ended.returncode, ended.stdout) == (0, "[-5, 0, 0, 0, 0]\n"), ended.stderr
    row = next(line for line in ended.stderr.splitlines() if line.startswith("priority"))
    assert "1 of 1" in row, "one launch of either program, and neither is counted twice"


def test_paths_of_a_job_without_steps_are_reported_as_never_switched_and_fail_strict(driver: Path, tmp_path: Path) -> None:
    """As of one that serves a model: it has no optimizer and marks no steps."""
    script = tmp_path / "serve.py"
    script.write_text(
        f"import sys, torch.distributed\nsys.path.insert(0, {str(JOB.parent)!r})\nimport launches\n"
        f"torch.distributed.init_process_group('gloo')\ndriver = launches.Driver({str(driver)!r})\n"
        "for _ in range(5):\n    driver.step()\ntorch.distributed.destroy_process_group()\n"
    )
    copies = Transport(transport="copy_engine")
    plan = plan_of(tmp_path / "plan.toml", Match(kind="communication", collective="all_reduce"), copies)
    ended = run("--strict", "--plan", plan, "--", *ranks_of_node(), script)
    assert ended.returncode == 3, ended.stderr
    row = next(line for line in ended.stderr.splitlines() if line.startswith("transport"))
    assert row.rstrip().endswith("failed")
    assert "finished a step. A step ends with a call of" in ended.stderr
    assert "counterpoint.step()" in ended.stderr
    script.write_text(script.read_text() + "sys.exit(5)\n")
    ended = run("--plan", plan, "--", *ranks_of_node(), script)
    assert "before a rank finished a step" in ended.stderr


def test_several_optimizers_make_one_step(driver: Path, tmp_path: Path) -> None:
    """Two optimizers step in each of 80 steps: a budget of 120 would be used up if each of their calls counted."""
    ended = run("--tune", "--budget", "120", "--", *ranks_of_node(), JOB, driver, "--steps", "80")
    assert ended.returncode == 0
    assert not any("GAIN after" in line for line in own_lines(ended)), ended.stderr
    told = next(line for line in own_lines(ended) if "ended after 80 steps, while live tuning was" in line)
    assert "until step 120" in told


def test_the_guard_leaves_proof_of_the_plan_that_it_lifted_for_a_while(driver: Path, tmp_path: Path) -> None:
    ended = run("--strict", "--plan", priority_plan(tmp_path), "--", *ranks_of_node(), JOB, driver, "--steps", "40")
    assert ended.returncode == 0, ended.stderr
    row = next(line for line in ended.stderr.splitlines() if line.startswith("priority"))
    assert row.rstrip().endswith("verified")
    assert "40 of 40" not in row, "the guard compared with the job as it is"


def test_strict_fails_a_job_whose_control_found_no_launch(driver: Path, tmp_path: Path) -> None:
    cap = ResidencyCap(ctas_per_sm=1, dynamic_shared_bytes=115_840)
    plan = plan_of(tmp_path / "plan.toml", Match(name="no_such_kernel"), cap)
    strict, lax = (
        run(*option, "--plan", plan, "--", *ranks_of_node(), JOB, driver, "--steps", "2") for option in (("--strict",), ())
    )
    assert strict.returncode == 3
    assert "strict: residency_cap on 'no_such_kernel' is failed: no launch matched" in strict.stderr
    assert lax.returncode == 0
    assert "failed: no launch matched" in lax.stderr


def test_a_cap_is_verified_by_the_drivers_occupancy(driver: Path, tmp_path: Path) -> None:
    cap = ResidencyCap(ctas_per_sm=1, dynamic_shared_bytes=115_840)
    plan = plan_of(tmp_path / "plan.toml", Match(name="*long_kernel*", kind="computation"), cap)
    ended = run("--strict", "--plan", plan, "--", *ranks_of_node(), JOB, driver, "--steps", "3")
    assert ended.returncode == 0, ended.stderr
    row = next(line for line in ended.stderr.splitlines() if line.startswith("residency_cap"))
    assert "1 CTA per SM" in row
    assert row.rstrip().endswith("verified")


def test_controls_that_are_no_launches_are_settings_or_refused(driver: Path, tmp_path: Path) -> None:
    limit = plan_of(tmp_path / "limit.toml", Match(kind="communication"), CommunicationCtas(max_ctas=8))
    ended = run("--plan", limit, "--", *ranks_of_node(), JOB, driver, "--steps", "2")
    assert "the process group was created with other limits" in ended.stderr, "the double's collective has 24 CTAs"


def test_a_plan_of_which_nothing_can_be_applied_is_refused_before_the_job_starts(tmp_path: Path) -> None:
    collectives, copies = Match(kind="communication"), Match(kind="copy", name="Memcpy*")
    for plan, words in (
        (
            plan_of(tmp_path / "streams.toml", collectives, OwnStream()),
            "in the job, issue the collective with async_op=True",
        ),
        (plan_of(tmp_path / "copies.toml", copies, Priority(priority=-5)), "it matches copies"),
    ):
        for options in ((), ("--tune",)):
            ended = run("--plan", plan, *options, "--", "echo", "started")
            assert (ended.returncode, ended.stdout) == (2, ""), ended.stderr
            assert len(ended.stderr.splitlines()) == 1
            assert "can get no control of this plan" in ended.stderr
            assert words in ended.stderr


def test_a_plan_of_transports_alone_is_taken_but_not_where_it_names_collectives_by_number(tmp_path: Path) -> None:
    engines = Transport(transport="copy_engine")
    by_kind = plan_of(tmp_path / "kind.toml", Match(kind="communication", collective="all_gather"), engines)
    by_number = plan_of(tmp_path / "number.toml", Match(operations=(3, 28)), engines)
    taken, refused = (run("--plan", plan, "--", "echo", "started") for plan in (by_kind, by_number))
    assert (taken.returncode, taken.stdout) == (0, "started\n"), taken.stderr
    assert (refused.returncode, refused.stdout) == (2, ""), refused.stderr
    (line,) = refused.stderr.splitlines()
    assert "(transport) names operations by number (3, 28)" in line
    assert "--step TRACE" in line


def test_a_plan_that_can_be_applied_in_part_says_at_the_start_what_is_left_out(driver: Path, tmp_path: Path) -> None:
    plan = plan_of(tmp_path / "plan.toml", Match(kind="communication"), Priority(priority=-5), OwnStream())
    script = lone_job(driver, tmp_path)
    ended = run("--strict", "--plan", plan, "--guard", "0", "--", "sh", "-c", f"echo >&2 began; {sys.executable} {script} 3")
    assert ended.returncode == 3
    assert ended.stdout == "[-5, -5, -5]\n"
    lines = ended.stderr.splitlines()
    assert "does not get all of this plan" in lines[0]
    assert "async_op=True" in lines[0]
    assert lines[1] == "began"
    assert "only the job knows what needs the result" in " ".join(ended.stderr.split("began")[1].split())


def test_a_job_that_launches_nothing_on_a_gpu_is_told_so_in_one_line(tmp_path: Path) -> None:
    script = tmp_path / "cpu.py"
    script.write_text(
        "import torch\noptimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])\n"
        "for _ in range(3):\n    optimizer.step()\n"
    )
    for options in (("--tune",), ("--plan", priority_plan(tmp_path))):
        ended = run(*options, "--", sys.executable, script, RANK="0")
        assert (ended.returncode, len(ended.stderr.splitlines())) == (0, 1), ended.stderr
        assert "no process of the command launched a GPU kernel" in ended.stderr


def test_a_failing_rank_gives_its_jobs_own_status_also_under_strict(driver: Path, tmp_path: Path) -> None:
    job = [*ranks_of_node(), JOB, driver, "--steps", "2", "--exit", "5"]
    ended = run("--strict", "--plan", priority_plan(tmp_path), "--", *job)
    assert ended.returncode == 5, ended.stderr


@pytest.mark.parametrize("fault", ["kill -9 of a rank", "Ctrl-C", "kill -9 of torchrun"])
def test_whatever_ends_the_job_no_process_of_it_is_left(fault: str, tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text(
        "import os, signal\n"
        # in one write, so that lines of two ranks stay whole
        "os.write(1, f\"{os.environ['RANK']} {os.getpid()} {os.getppid()}\\n\".encode())\n"
        "signal.pause()\n"
    )
    command = [COUNTERPOINT, "run", "--plan", priority_plan(tmp_path), "--", *TORCHRUN, script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ranks = [[int(word) for word in process.stdout.readline().split()] for _ in range(2)]
        if fault == "Ctrl-C":
            process.send_signal(signal.SIGINT)
        else:
            os.kill(ranks[0][1] if "rank" in fault else ranks[0][2], signal.SIGKILL)
        _, errors = process.communicate(timeout=LIMIT_S)
    # torchrun itself ends in one way or another after Ctrl-C: with 1, or aborted by a thread of its own
    expected = {"kill -9 of torchrun": {137}, "kill -9 of a rank": {1}, "Ctrl-C": {1, 134}}[fault]
    assert process.returncode in expected, errors
    for _, rank, torchrun in ranks:
        assert not Path(f"/proc/{rank}").exists()
        assert not Path(f"/proc/{torchrun}").exists()


def test_another_preloaded_library_stays_behind_the_filter(driver: Path, tmp_path: Path) -> None:
    source, library = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text("int counterpoint_test_other(void) { return 41; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    code = "import ctypes, os; print(ctypes.CDLL(None).counterpoint_test_other() + 1, os.environ['LD_PRELOAD'].count(':'))"
    ended = run("--plan", priority_plan(tmp_path), "--", sys.executable, "-c", code, LD_PRELOAD=str(library))
    assert ended.stdout == "42 1\n", ended.stderr


def test_a_child_that_clears_its_environment_is_named_in_one_line(tmp_path: Path, driver: Path) -> None:
    command = ["env", "-i", sys.executable, "-c", "print('ran')"]
    ended = run("--plan", priority_plan(tmp_path), "--", *command)
    assert (ended.returncode, ended.stdout) == (0, "ran\n")
    assert len(own_lines(ended)) == 1
    assert "clears LD_PRELOAD" in ended.stderr
    assert run("--strict", "--plan", priority_plan(tmp_path), "--", *command).returncode == 3


def test_an_example_runs_the_same_under_tuning_on_cpus() -> None:
    small = ["--device", "cpu", "--width", "64", "--tokens", "32", "--steps", "20", "--layers", "2", "--buckets", "2"]
    example = ROOT / "benchmarks" / "jobs" / "starved.py"
    losses = []
    for prefix in ([], [str(COUNTERPOINT), "run", "--tune", "--"]):
        ended = subprocess.run(
            [*prefix, *ranks_of_node(), example, *small],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        losses.append([line.split("  ")[1] for line in ended.stdout.splitlines() if line.startswith("step")])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2
