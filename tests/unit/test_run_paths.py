"""`counterpoint run --plan` around real jobs on CPUs: collectives of unmodified jobs by copies and operators.

What a job computes then is, bit for bit, what it computes with the integration called by hand in its code. Torchrun starts
the ranks where its exit status is what is tested. Elsewhere they are forks of a process that has imported torch already.
"""

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from counterpoint.controls import Control, OverlapMatmul
from counterpoint.integrations.paths import COPIES
from counterpoint.plan import Directive, Match, Plan, save_plan
from counterpoint.schedule import ScheduleDescription
from counterpoint.step import CollectiveKind
from counterpoint.units import format_bytes
from helpers.command import COUNTERPOINT
from helpers.gloo_ranks import forked_ranks

JOB = Path(__file__).parents[1] / "helpers" / "jobs" / "paths.py"
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
LIMIT_S = 240
RING = OverlapMatmul(schedule=ScheduleDescription(pattern="ring"))  # the heuristic leaves blocks this small to the library
IN_PIECES = ScheduleDescription(
    pattern="all_peers", along="experts", chunks=2
)  # of experts; so small they are the library's otherwise
CONTROLS: dict[str, tuple[tuple[CollectiveKind | None, Control], ...]] = {
    "ddp": (("all_reduce", COPIES),),
    "fsdp2": (("all_gather", COPIES), ("reduce_scatter", COPIES)),
    "tp": ((None, RING),),
    "bare": (("all_gather", COPIES), ("all_reduce", COPIES)),
    "parts": (("all_gather", COPIES), ("reduce_scatter", COPIES)),
    "2d": ((None, RING),),
    "experts": (("all_to_all", OverlapMatmul(schedule=IN_PIECES)),),
    "exchanged": (("all_to_all", COPIES),),
    "fsdp1": (("reduce_scatter", COPIES),),
}
KINDS = {  # by ranks
    2: ("ddp", "fsdp2", "tp", "bare", "parts", "experts", "exchanged", "fsdp1"),
    4: ("ddp", "fsdp2", "tp", "2d", "experts"),
}
TARGETS = {
    "ddp": ("all-reduces",),
    "fsdp2": ("all-gathers", "reduce-scatters"),
    "tp": ("tensor-parallel linears",),
    "bare": ("all-gathers", "all-reduces"),
    "parts": ("all-gathers", "reduce-scatters"),
    "2d": ("tensor-parallel linears",),
    "experts": ("routed experts",),
    "exchanged": ("all-to-alls",),
    "fsdp1": ("reduce-scatters",),
}
Ended = subprocess.CompletedProcess[str]
Result = tuple[list[float], str, list[int]]  # sums of parameters by rank, names in a checkpoint, calls and bytes by copies


def job(num_ranks: int, *names: str) -> list[str]:
    return forked_ranks(num_ranks, JOB, *names)


def start(*command: str | Path) -> Ended:
    inherited = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "RANK", "WORLD_SIZE")}
    return subprocess.run(
        command,
        env=inherited | {"COLUMNS": "200", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def results(output: str) -> dict[str, Result]:
    found = {}
    for name, sums, names, *calls in map(str.split, output.splitlines()):
        found[name] = ([float.fromhex(each) for each in sums.split(",")], names, [int(each) for each in calls])
    return found


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Result]]:
    """The jobs without us, and with integrations called by hand; run once for all workers of a test run."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder

    def results_on(num_ranks: int) -> dict[str, Result]:
        path = folder / f"references on {num_ranks}"
        with path.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not path.stat().st_size:
                names = [f"{kind}:{variant}" for kind in KINDS[num_ranks] for variant in ("", "hand")]
                ended = start(*job(num_ranks, *names))
                assert ended.returncode == 0, ended.stderr
                path.write_text(ended.stdout)
            return results(path.read_text())

    return results_on


def plan_for(kind: str, folder: Path) -> Path:
    directives = tuple(
        Directive(match=Match(kind="communication", collective=collective), controls=(control,), reason="test")
        for collective, control in CONTROLS[kind]
    )
    save_plan(Plan(verdict="GAIN", directives=directives), folder / "plan.toml")
    return folder / "plan.toml"


def run_planned(kind: str, folder: Path, *command: str) -> Ended:
    return start(COUNTERPOINT, "run", "--strict", "--plan", plan_for(kind, folder), "--", *command)


def row(ended: Ended, target: str) -> str:
    return next(line for line in ended.stderr.splitlines() if f" {target} " in line and "by copies" in line)


@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    [(kind, num_ranks) for num_ranks, kinds in KINDS.items() for kind in kinds if kind != "experts"],
)
def test_a_plan_moves_the_collectives_of_an_unmodified_job_as_the_integration_called_by_hand(
    kind: str, num_ranks: int, tmp_path: Path, references: Callable[[int], dict[str, Result]]
) -> None:
    # a second model in the process does no harm, nor do several modules that hold the model
    variant = {"ddp": "evaluates", "fsdp2": "held"}.get(kind, "")
    ended = run_planned(kind, tmp_path, *job(num_ranks, f"{kind}:{variant}"))
    assert ended.returncode == 0, ended.stderr
    sums, names, _ = results(ended.stdout)[f"{kind}:{variant}"]
    sums_by_hand, _, (num_calls, num_bytes) = references(num_ranks)[f"{kind}:hand"]
    bare_sums, bare_names, _ = references(num_ranks)[f"{kind}:"]
    assert sums == sums_by_hand, "bit for bit"
    assert sums == pytest.approx(bare_sums, rel=1e-5)
    assert names == bare_names, "a checkpoint is as without us"
    rows = [row(ended, target) for target in TARGETS[kind]]
    assert all(f" 0-{num_ranks - 1} " in each and each.rstrip().endswith("verified") for each in rows)
    words = [each.split() for each in rows]
    calls = [(int(each[each.index("of") - 1]), int(each[each.index("of") + 1])) for each in words]  # by copies, of all
    assert sum(number for number, _ in calls) == num_calls > 0
    if len(rows) == 1:
        assert f"{format_bytes(num_bytes)} sent" in rows[0]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_plan_overlaps_the_experts_of_an_unmodified_job_as_the_integration_called_by_hand(
    num_ranks: int, tmp_path: Path, references: Callable[[int], dict[str, Result]]
) -> None:
    ended = run_planned("experts", tmp_path, *job(num_ranks, "experts:"))
    assert ended.returncode == 0, ended.stderr
    sums, names, _ = results(ended.stdout)["experts:"]
    sums_by_hand, _, (num_calls, num_bytes) = references(num_ranks)["experts:hand"]
    bare_sums, bare_names, _ = references(num_ranks)["experts:"]
    assert sums == sums_by_hand, "bit for bit"
    assert sums == pytest.approx(bare_sums, rel=1e-5)
    assert names == bare_names, "a checkpoint is as without us"
    rows = [line for line in ended.stderr.splitlines() if " routed experts " in line and "by copies" in line]
    assert all(f" {num_calls} of {num_calls} " in each and each.rstrip().endswith("verified") for each in rows)
    assert any(f"{format_bytes(num_bytes)} sent" in each for each in rows), "ranks send as much as they are routed"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_ranks_that_a_script_starts_itself_take_part_although_its_process_looks_like_a_rank(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}.items():  # as `srun --pty bash` sets
        monkeypatch.setenv(name, value)
    ended = run_planned("ddp", tmp_path, sys.executable, str(JOB.with_name("started_ranks.py")), method, str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    found = row(ended, "all-reduces")
    assert " 0-1 " in found
    assert found.rstrip().endswith("verified")


def test_a_model_with_a_hook_of_its_own_is_refused_with_the_reason_and_computes_as_without_us(
    tmp_path: Path, references: Callable[[int], dict[str, Result]]
) -> None:
    ended = run_planned("ddp", tmp_path, *job(2, "ddp:hook"))
    assert ended.returncode == 3, "--strict"
    assert results(ended.stdout)["ddp:hook"][0] == references(2)["ddp:"][0], "this hook averages as DDP does without one"
    lines = [line for line in ended.stderr.splitlines() if line.startswith("counterpoint:")]
    assert (
        sum("all-reduces stay unchanged: rank 0: The model already has a communication hook" in line for line in lines) == 1
    )
    assert "strict: transport on 'all-reduces' is refused: rank 0: The model already has a communication hook" in lines[-1]


@pytest.mark.parametrize(
    ("variant", "line"),
    [
        ("broken", "all-reduces stay unchanged: rank 1 could not look for models: KeyError: 'a module'"),
        ("late", "1 DDP model was created after the first step, so its collectives are not changed"),
        ("joins", "all-reduces stay unchanged: the model runs in join(), where ranks may take different numbers of steps"),
    ],
)
def test_what_cannot_be_taken_is_said_once_and_the_job_goes_on(
    variant: str, line: str, tmp_path: Path, references: Callable[[int], dict[str, Result]]
) -> None:
    ended = run_planned("ddp", tmp_path, *job(2, f"ddp:{variant}"))
    assert results(ended.stdout)[f"ddp:{variant}"][0] == pytest.approx(references(2)["ddp:"][0], rel=1e-5)
    assert ended.stderr.count(f"counterpoint: {line}") == 1, ended.stderr
    assert ended.stderr.count("launched no GPU kernel") <= 1, ended.stderr


@pytest.mark.parametrize(
    ("variant", "line"),
    [
        ("joins", "all-to-alls stay unchanged: the model runs in join()"),
        ("hooked", "stopped after 3 steps: the model runs in join()"),
    ],
)
def test_ranks_wait_for_none_in_a_joined_job_with_all_to_alls_of_its_own(
    variant: str, line: str, tmp_path: Path, references: Callable[[int], dict[str, Result]]
) -> None:
    ended = run_planned("exchanged", tmp_path, *job(2, f"exchanged:{variant}"))
    assert results(ended.stdout)[f"exchanged:{variant}"][0] == references(2)["exchanged:"][0], "bit for bit"
    assert f"counterpoint: {line}, where ranks may take different numbers of steps" in ended.stderr, ended.stderr


@pytest.mark.parametrize(("kind", "what"), [("tp", "tensor-parallel linears"), ("experts", "routed experts")])
def test_a_job_that_differentiates_gradients_again_keeps_its_path(kind: str, what: str, tmp_path: Path) -> None:
    command = job(2, f"{kind}:penalized")
    bare, ended = start(*command), run_planned(kind, tmp_path, *command)
    assert bare.returncode == 0, bare.stderr
    assert ended.stdout == bare.stdout, ended.stderr
    line = f"counterpoint: {what} stay unchanged: the job differentiates gradients again (create_graph=True)"
    assert ended.stderr.count(line) == 1, ended.stderr


@pytest.mark.parametrize(("variant", "num_steps"), [("uneven", 3), ("rejoined", 4)])
def test_ranks_part_before_one_of_them_has_more_steps_than_the_others(variant: str, num_steps: int, tmp_path: Path) -> None:
    """Also where the model that runs in join() was wrapped after the first step."""
    bare, ended = start(*job(2, f"ddp:{variant}")), run_planned("ddp", tmp_path, *job(2, f"ddp:{variant}"))
    found, expected = (results(each.stdout)[f"ddp:{variant}"] for each in (ended, bare))
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    said = "the model runs in join(), where ranks may take different numbers of steps; the job runs unchanged"
    assert f"counterpoint: stopped after {num_steps} steps: {said}" in ended.stderr, ended.stderr
    assert row(ended, "all-reduces").rstrip().endswith("verified")


@pytest.mark.parametrize(
    ("kind", "variant"),
    [(kind, variant) for variant in ("probed", "features") for kind in ("ddp", "fsdp2", "tp", "bare")]
    + [("ddp", "alone"), ("ddp", "adapted"), ("fsdp2", "adapted")],
)
def test_ranks_stay_together_while_one_of_them_trains_a_model_of_its_own(
    kind: str, variant: str, tmp_path: Path, references: Callable[[int], dict[str, Result]]
) -> None:
    ended = run_planned(kind, tmp_path, *job(2, f"{kind}:{variant}"))
    assert ended.returncode == 0, ended.stderr
    assert results(ended.stdout)[f"{kind}:{variant}"][0] == references(2)[f"{kind}:hand"][0], "bit for bit"


@pytest.mark.parametrize("kind", ["bare", "exchanged", "ddp"])
def test_a_job_without_an_optimizer_marks_its_steps(
    kind: str, tmp_path: Path, references: Callable[[int], dict[str, Result]]
) -> None:
    ended = run_planned(kind, tmp_path, *job(2, f"{kind}:marked"))
    assert ended.returncode == 0, ended.stderr
    assert results(ended.stdout)[f"{kind}:marked"][0] == pytest.approx(references(2)[f"{kind}:"][0], rel=1e-5)
    for target in TARGETS[kind]:
        assert row(ended, target).rstrip().endswith("verified")


def test_groups_of_ranks_with_models_of_their_own_are_left_to_the_library(tmp_path: Path) -> None:
    bare, ended = start(*job(4, "ddp:halves")), run_planned("ddp", tmp_path, *job(4, "ddp:halves"))
    assert bare.returncode == 0, bare.stderr
    assert ended.stdout == bare.stdout, ended.stderr
    line = "counterpoint: all-reduces stay unchanged: 2 of the job's 4 ranks train a model by themselves"
    assert ended.stderr.count(line) == 1, ended.stderr


def test_a_job_that_is_killed_leaves_proof_of_its_last_steps(tmp_path: Path) -> None:
    torchrun = [TORCHRUN, "--standalone", "--nproc-per-node", "2"]
    ended = run_planned("ddp", tmp_path, *torchrun, str(JOB), "ddp:killed")
    assert ended.returncode == 1, "torchrun's own"
    assert "3 of 3" in row(ended, "all-reduces"), "kept after the fourth step; it was killed after the fifth"
    assert row(ended, "all-reduces").rstrip().endswith("verified")


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "tp"])
def test_bitwise_refuses_a_plan_of_sums_before_the_job_starts(kind: str, tmp_path: Path) -> None:
    ended = start(COUNTERPOINT, "run", "--bitwise", "--plan", plan_for(kind, tmp_path), "--", "echo", "started")
    assert (ended.returncode, ended.stdout) == (2, ""), ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert "--bitwise excludes controls that sum in another order" in ended.stderr


def test_operators_that_run_the_librarys_collective_are_in_effect(tmp_path: Path) -> None:
    plan = Plan(
        verdict="GAIN",
        directives=(Directive(match=Match(kind="communication"), controls=(OverlapMatmul(),), reason="test"),),
    )
    save_plan(plan, tmp_path / "plan.toml")
    ended = start(COUNTERPOINT, "run", "--strict", "--plan", tmp_path / "plan.toml", "--", *job(2, "tp"))
    assert ended.returncode == 0, ended.stderr
    found = row(ended, "tensor-parallel linears")
    assert "0 B sent" in found
    assert "by the library within operators" in found, "the heuristic leaves blocks this small to the library"


@pytest.mark.parametrize("variant", ["replaces", "replaces_later"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "tp", "bare"])
def test_a_job_that_replaces_its_collectives_itself_keeps_them_and_its_models_are_switched(
    kind: str, variant: str, tmp_path: Path, references: Callable[[int], dict[str, Result]]
) -> None:
    ended = run_planned(kind, tmp_path, *job(2, f"{kind}:{variant}"))
    assert results(ended.stdout)[f"{kind}:{variant}"][0] == pytest.approx(references(2)[f"{kind}:"][0], rel=1e-5)
    if kind == "bare":
        for target in TARGETS[kind]:
            line = f"counterpoint: {target} stay unchanged: the job calls collectives.replace() itself"
            assert ended.stderr.count(line) == 1, ended.stderr
        return
    assert ended.returncode == 0, ended.stderr
    assert all(row(ended, target).rstrip().endswith("verified") for target in TARGETS[kind])


def test_a_job_that_changes_its_process_is_switched_and_its_output_holds_nothing_of_ours(tmp_path: Path) -> None:
    command = forked_ranks(2, JOB.with_name("changed_process.py"))
    bare, planned = start(*command), run_planned("ddp", tmp_path, *command)
    assert sorted(planned.stdout.splitlines()) == sorted(bare.stdout.splitlines())
    assert planned.returncode == bare.returncode == 0, planned.stderr
    assert row(planned, "all-reduces").rstrip().endswith("verified")
    assert "counterpoint: The library runs one of the job's own all-reduces, not copies" in planned.stderr
