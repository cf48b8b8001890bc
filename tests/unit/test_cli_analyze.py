"""`counterpoint analyze` as a user types it: files written, exit codes, and one line for whatever is wrong."""

import gzip
import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from counterpoint import workers
from counterpoint.analysis.combine import combine
from counterpoint.analysis.values import RankWaits
from counterpoint.cli.ranks_of_job import _each_rank, _setting_the_pace
from helpers.command import TRACES, counterpoint, refusal
from helpers.inspector_builder import record, write_log
from helpers.rank_builder import rank_of, traced

DDP = [str(TRACES / f"ddp.rank{rank}.json.gz") for rank in (0, 1)]


def analyze(*words: str) -> tuple[int, str, str]:
    done = counterpoint("analyze", *words)
    return done.returncode, done.stdout, done.stderr


def without_rank(source: str, target: Path) -> str:
    """A copy of a trace that does not say which rank it is of."""
    document = json.loads(gzip.decompress(Path(source).read_bytes()))
    document.pop("distributedInfo", None)
    target.write_text(json.dumps(document))
    return str(target)


def test_two_ranks_give_a_report_and_every_file_that_was_asked_for(tmp_path: Path) -> None:
    html, merged, summary, saved = (tmp_path / name for name in ("r.html", "all.json.gz", "s.md", "a.json"))
    status, out, err = analyze(
        *DDP, "--html", str(html), "--merge", str(merged), "--markdown", str(summary), "-o", str(saved)
    )
    assert (status, err) == (0, "")
    assert "of the step is exposed communication" in " ".join(out.split())
    assert "Waits of ranks" in out
    assert "copies and sums" in out, "what can be recovered"
    assert html.read_text().startswith("<!doctype html>")
    assert json.loads(gzip.decompress(merged.read_bytes()))["traceEvents"]
    assert "Causes of exposed communication" in summary.read_text()
    found = json.loads(saved.read_text())
    assert found["schema"] == "counterpoint.analysis/1"
    assert sum(cause["share"] for cause in found["causes"]) == pytest.approx(1)
    assert {wait["rank"]: (wait["times_last"], wait["times_first"]) for wait in found["waits"]} == {0: (38, 19), 1: (19, 38)}


def test_no_more_processes_read_traces_than_this_one_may_use_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(workers, "worker_processes", lambda *_: pytest.fail("there is one core"))
    found = _each_rank(DDP, None, lambda *_: None, simulates=False)
    assert [rank.rank for rank, _ in found] == [0, 1]


def test_a_gate_that_fails_says_why_and_ends_with_1(tmp_path: Path) -> None:
    saved = tmp_path / "before.json"
    assert analyze(DDP[0], "--no-recover", "-o", str(saved))[0] == 0
    assert "Add --fail-if, or leave out --baseline" in refusal("analyze", DDP[0], "--baseline", str(saved))
    passing = ("--fail-if", "exposed > 50%", "--fail-if", "step > baseline + 3%", "--baseline", str(saved))
    status, out, _ = analyze(DDP[0], "--no-recover", *passing)
    assert status == 0
    assert "No condition of --fail-if holds." in out
    summary = tmp_path / "s.md"
    status, _, err = analyze(DDP[0], "--no-recover", "--fail-if", "overlap < 99%", "--markdown", str(summary))
    assert status == 1
    assert err.startswith("counterpoint: fails: overlap < 99%: overlap is 9")
    assert summary.read_text().startswith("- **fails**: overlap < 99%")


def test_ranks_that_no_trace_names_come_from_the_names_of_files_or_their_order(tmp_path: Path) -> None:
    named = [without_rank(source, tmp_path / f"run-rank_{rank}.json") for source, rank in zip(DDP, (5, 3), strict=True)]
    plain = [without_rank(source, tmp_path / name) for source, name in zip(DDP, ("a.json", "b.json"), strict=True)]
    for files, ranks in ((named, {5, 3}), (plain, {0, 1})):
        status, out, err = analyze(*files, "--no-recover", "--json")
        assert (status, err) == (0, "")
        assert {rank["rank"] for rank in json.loads(out)["ranks"]} == ranks


def test_what_changed_between_two_runs_is_listed() -> None:
    status, out, _ = analyze(str(TRACES / "fsdp2.rank0.json.gz"), "--no-recover", "--compare", DDP[0])
    assert status == 0
    assert "step time" in out


def test_logs_of_nccl_inspector_give_sizes_groups_and_waits(tmp_path: Path) -> None:
    logs = [
        str(
            write_log(
                tmp_path / f"host-pid{rank}.log", [record(rank=rank, number=n, time_us=100 + 60 * rank) for n in (1, 2)]
            )
        )
        for rank in (0, 1)
    ]
    html, summary = tmp_path / "r.html", tmp_path / "s.md"
    status, out, err = analyze(*logs, "--html", str(html), "--markdown", str(summary))
    assert (status, err) == (0, "")
    assert "2 collectives in 1 communicator; exposed time is unknown." in summary.read_text()
    for table in ("Logged communication by process group", "Waits of ranks", "Collectives by size"):
        assert table in out
        assert table in html.read_text()
    for absent in ("Causes of exposed", "launch-bound", "overlap"):
        assert absent not in out
        assert absent not in summary.read_text()
    status, out, _ = analyze(*logs, "--json")
    waits = json.loads(out)["waits"]
    assert {wait["rank"]: wait["waited_us"] for wait in waits} == {0: 0.0, 1: 120.0}


def test_a_log_refuses_what_needs_steps_in_one_line(tmp_path: Path) -> None:
    log = str(write_log(tmp_path / "a.log", [record()]))
    cut = tmp_path / "cut.log"
    cut.write_text(json.dumps(record())[:-9])
    assert "--fail-if needs profiler traces" in refusal("analyze", log, "--fail-if", "exposed > 5%")
    assert "--merge needs profiler traces" in refusal("analyze", log, "--merge", str(tmp_path / "m.json"))
    assert "Give one kind at a time" in refusal("analyze", log, DDP[0])
    assert "holds no record of NCCL Inspector. 1 entry (line 1)" in refusal("analyze", str(cut))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none.json"], "'none.json' does not exist"),
        ([str(Path(__file__).parent)], "is a folder. Name the traces in it"),
        ([DDP[0], DDP[0]], "is named twice"),
        ([str(Path(__file__))], "is not a profiler trace"),
        ([DDP[0], "--fail-if", "exposed"], "--fail-if takes conditions"),
        ([DDP[0], "--no-recover", "--fail-if", "step > baseline"], "Add --baseline FILE"),
        ([DDP[0], "--baseline", DDP[0]], "is not a saved analysis"),
        ([DDP[0], "--merge", "out.txt"], "A trace file must end in .json or .json.gz"),
        ([DDP[0], "--html", DDP[0]], "already uses that file"),
        ([DDP[0], "--rules", str(Path(__file__))], "is not TOML"),
        ([DDP[0], "--machine", "no_such_gpu"], "Unknown machine 'no_such_gpu'"),
        ([DDP[0], "--machine", "h200", "--no-recover"], "Leave out --machine or --no-recover"),
    ],
)
def test_what_is_wrong_is_one_line(words: Sequence[str], said: str) -> None:
    assert said in refusal("analyze", *words)


def test_the_command_that_saves_the_plan_names_the_machine_that_the_user_named(tmp_path: Path) -> None:
    document = json.loads(gzip.decompress(Path(DDP[0]).read_bytes()))
    document["deviceProperties"][0].pop("name")
    unnamed = tmp_path / "unnamed.json"
    unnamed.write_text(json.dumps(document))
    status, out, _ = analyze(str(unnamed), "--machine", "h200")
    assert status == 0
    assert f"counterpoint tune {unnamed} --machine h200 -o plan.toml" in out


def test_a_plan_that_was_found_by_the_users_rules_says_that_tune_has_none(tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nnames = ["my_*"]\nsource = "my.cu"\n')
    remark = "# tune reads no file of --rules, so its plan may differ"
    assert [remark in analyze(DDP[0], *words)[1] for words in (("--rules", str(rules)), ())] == [True, False]


def test_a_machine_that_is_not_the_traced_one_leaves_out_only_what_is_simulated() -> None:
    status, out, _ = analyze(DDP[0], "--machine", "a100")
    assert status == 0
    assert "What can be recovered is not known" in " ".join(out.split())


def test_of_several_traces_the_bad_one_is_named(tmp_path: Path) -> None:
    document = json.loads(gzip.decompress(Path(DDP[1]).read_bytes()))
    for event in document["traceEvents"]:
        if event.get("cat") == "kernel":
            event["args"]["grid"] = [1 << 30, 1 << 30, 1 << 10]
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(document))
    assert refusal("analyze", DDP[0], str(bad)).startswith(f"{bad}: num_ctas of a kernel must be from 1 to")


def test_a_kernel_that_the_machine_cannot_run_leaves_out_only_what_is_simulated(tmp_path: Path) -> None:
    document = json.loads(gzip.decompress(Path(DDP[0]).read_bytes()))
    kernel = next(event for event in document["traceEvents"] if event.get("cat") == "kernel")
    for event in document["traceEvents"]:
        if event["name"] == kernel["name"]:
            event["args"]["shared memory"] = 1_000_000
    trace = tmp_path / "too_large.json"
    trace.write_text(json.dumps(document))
    status, out, err = analyze(str(trace))
    assert (status, err) == (0, "")
    said = " ".join(out.split())
    assert "of the step is exposed communication" in said
    assert "What can be recovered is not known: Operation" in said
    assert "limited by shared_memory" in said


def test_a_rank_of_which_few_collectives_were_matched_does_not_set_the_pace() -> None:
    def waits(rank: int, mean_us: float, number: int) -> RankWaits:
        return RankWaits(
            rank=rank, waited_us=mean_us * number, mean_us=mean_us, times_last=0, times_first=0, num_collectives=number
        )

    found = combine([rank_of(rank, [traced(rank, 0, 10.0, 900.0)]) for rank in range(3)])
    few, least = waits(1, 90.0, 8), waits(2, 80.0, 64)
    assert _setting_the_pace(replace(found, waits=(waits(0, 400.0, 64), few, least)), "rank0.json") == "rank2.json"
    assert _setting_the_pace(replace(found, waits=(waits(0, 80.0, 64), few, least)), "rank0.json") == "rank0.json"
