"""Every bad input gives one line that says what is wrong and what to do, exit code 2, and leaves the files as they were."""

import gzip
import os
import random
import re
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from counterpoint.machine import load_machine, save_machine
from helpers.command import COUNTERPOINT, TRACES, counterpoint, refusal
from helpers.trace_builder import MATMUL, TraceBuilder, small_trace

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"
MOE = TRACES / "moe.rank0.json.gz"
SOURCES = Path(__file__).parents[2] / "src" / "counterpoint"
H200 = (SOURCES / "machines" / "h200.toml").read_text()
WORKLOAD = (SOURCES / "workloads" / "cb_ar_opt1.toml").read_text()
NOISE = b"\x89" + random.Random(7).randbytes(500)
MI300X = {"id": 0, "name": "AMD Instinct MI300X", "computeMajor": 9, "computeMinor": 4, "numSms": 304}
CYCLE = """
name = "cycle"
num_ranks = 2
[[kernels]]
name = "a"
stream = 0
num_ctas = 1
threads_per_cta = 32
registers_per_thread = 16
lone_us = 1.0
waits_for = ["b"]
[[kernels]]
name = "b"
stream = 1
num_ctas = 1
threads_per_cta = 32
registers_per_thread = 16
lone_us = 1.0
waits_for = ["a"]
"""


def directive(control: str, kind: str = "communication", match: str = "") -> str:
    return f'[[directives]]\nreason = "test"\nmatch = {{ kind = "{kind}"{match} }}\ncontrols = [{{ {control} }}]\n'


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("none.json", None, ["Cannot read none.json", "No such file", "give a .json, .json.gz"]),
        ("none.toml", None, ["Cannot read none.toml", "No such file", "give a TOML file"]),
        ("none", None, ["'none' does not exist", "Shipped workloads: cb_a2a_opt1"]),
        ("trace.txt", b"hello", ["'trace.txt' is neither a trace", ".json.gz"]),
        ("folder.json/", None, ["'folder.json/' is a folder", "those of several ranks"]),
        ("a.json", b"", ["a.json is empty", "profile again"]),
        ("a.json.gz", MOE.read_bytes()[:20_000], ["damaged gzip", "copy or record it again"]),
        ("a.json", b'{"hello": 1}', ["not a profiler trace", "give the file torch.profiler exported"]),
        ("a.json", b'{"traceEvents": []}', ["holds no GPU activity", "activities=[CPU, CUDA]"]),
        ("a.json", NOISE, ["not whole JSON"]),
        ("a.toml", NOISE, ["a.toml is not text", "give a TOML file"]),
        ("a.toml", b"not toml at all", ["a.toml is not TOML", "line 1"]),
        ("a.toml", b"num_ranks = 2", ["a.toml: the file lacks 'name', text. Add it."]),
        (
            "a.toml",
            directive('control = "priority", priority = -5').encode(),
            ["a.toml: the file looks like a plan file, and a workload file is needed", "counterpoint plan show"],
        ),
        ("a.toml", CYCLE.encode(), ["cycle: a -> b -> a", "Break it"]),
    ],
)
def test_a_step_that_cannot_be_read(name: str, content: bytes | None, says: list[str], tmp_path: Path) -> None:
    if name.endswith("/"):
        (tmp_path / name).mkdir()
    elif content is not None:
        (tmp_path / name).write_bytes(content)
    before = sorted(path.name for path in tmp_path.iterdir())
    message = refusal("tune", name, "-o", "plan.toml", "--timeline", "lanes.json", cwd=tmp_path)
    assert all(part in message for part in says), message
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("name", "says"),
    [("two\nlines", r"'two\nlines' does not exist"), ("x" * 300, "does not exist"), ("x" * 300 + ".json", "too long")],
)
def test_an_odd_file_name_still_gives_one_line(name: str, says: str) -> None:
    assert says in refusal("tune", name)


def test_a_file_name_that_is_no_text_is_refused_since_steps_are_named_after_their_files(tmp_path: Path) -> None:
    name = os.fsdecode(b"bad\xff.json.gz")
    (tmp_path / name).write_bytes(MOE.read_bytes())
    assert "Rename the file" in refusal("tune", name, "--json", cwd=tmp_path)


def traced(change: Callable[[list[dict[str, Any]]], object]) -> TraceBuilder:
    trace = small_trace()
    change(trace.events)
    return trace


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda events: events[-1].update(ts=-5), "times must be from 0 to 1e17 us; '"),
        (lambda events: events[-1].update(dur=-3.5), " us and takes -3.5 us; record the trace again"),
        (lambda events: events[-1].update(ts=20_300.0), "overlap their predecessor"),
        (lambda events: events[-1]["args"].update(grid=[0, 1, 1]), "positive grid"),
        (lambda events: events[-1]["args"].update(grid=[0, 1, 1]), "]; record the trace again"),
    ],
)
def test_a_trace_that_contradicts_itself(change: Callable[..., object], says: str, tmp_path: Path) -> None:
    traced(change).write(tmp_path)
    assert says in refusal("tune", "small.json", cwd=tmp_path)


def test_a_gate_refuses_a_trace_whose_figures_are_wrong(tmp_path: Path) -> None:
    traced(lambda events: events[-1].update(ts=20_300.0)).write(tmp_path)
    assert "predecessor on a stream" in refusal("analyze", "small.json", "--fail-if", "exposed > 90%", cwd=tmp_path)


def test_a_trace_whose_collectives_took_no_time_still_plans(tmp_path: Path) -> None:
    traced(lambda events: [event.update(dur=0) for event in events if "nccl" in event["name"]]).write(tmp_path)
    assert counterpoint("tune", "small.json", cwd=tmp_path).returncode == 0


def test_a_trace_of_one_stream_works_and_says_so(tmp_path: Path) -> None:
    trace = TraceBuilder()
    for number in range(3):
        trace.kernel(MATMUL, 100 + 1000 * number, 100)
        trace.collective(300 + 1000 * number, 100, stream=7)
    trace.write(tmp_path)
    done = counterpoint("tune", "small.json", cwd=tmp_path)
    assert done.returncode == 0
    assert "one stream" in done.stdout
    assert "NO_GAIN" in done.stdout


def test_an_unknown_collective_works_and_is_not_given_to_copy_engines(tmp_path: Path) -> None:
    def rename(events: list[dict[str, Any]]) -> None:
        for event in events:
            if "nccl" in event["name"]:
                event["name"] = "ncclDevKernel_Mystery(x)"
                event["args"]["Collective name"] = "mystery"

    traced(rename).write(tmp_path)
    done = counterpoint("tune", "small.json", cwd=tmp_path, COLUMNS="200")
    assert done.returncode == 0
    assert "'mystery'" in done.stdout
    assert "transport on send_recv: " in done.stdout
    assert "size" in done.stdout.split("transport on send_recv: ")[1].split("\n")[0]


@pytest.mark.parametrize(("device", "machine"), [(MI300X, None), (MI300X, "mi300x"), (None, "mi300x")])
def test_an_amd_trace_works_by_its_device_name_or_by_the_machine(
    device: dict[str, Any] | None, machine: str | None, tmp_path: Path
) -> None:
    trace = small_trace()
    trace.document["deviceProperties"] = [device] if device else []
    for event in trace.events:
        if "nccl" in event["name"]:
            event["args"].update({"block": [256, 1, 1], "shared memory": 36_864})
    trace.write(tmp_path)
    done = counterpoint("tune", "small.json", *(["--machine", machine] if machine else []), cwd=tmp_path, COLUMNS="200")
    assert (done.returncode, done.stderr) == (0, "")
    assert "AMD Instinct MI300X" in done.stdout
    assert "DEBUG_HIP_IGNORE_STREAM_PRIORITY=0" in done.stdout


def test_a_trace_of_another_gpu_than_the_machine() -> None:
    message = refusal("tune", MOE, "--machine", "a100")
    assert "'NVIDIA H200'" in message
    assert "'a100'" in message
    assert "Leave --machine out" in message


def test_a_trace_of_another_gpu_than_the_cluster(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text('[cluster]\nname = "two"\nmachine = "h100"\nnum_nodes = 2\n')
    message = refusal("simulate", MOE, "--cluster", str(tmp_path / "cluster.toml"))
    assert "Name a machine of that GPU as machine in [cluster] of" in message
    assert "--machine" not in message


@pytest.mark.parametrize(
    ("device", "says"),
    [([], "a GPU that the trace does not name"), ([{"id": 0, "name": "GPU X"}], "'GPU X', which no shipped")],
)
def test_a_trace_whose_machine_nobody_knows(device: list[Any], says: str, tmp_path: Path) -> None:
    trace = small_trace()
    trace.document["deviceProperties"] = device
    trace.write(tmp_path)
    message = refusal("tune", "small.json", cwd=tmp_path)
    assert says in message
    assert "--machine" in message


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("h999", None, ["Unknown machine 'h999'", "a100", "(.toml)"]),
        ("", None, ["Unknown machine ''"]),
        ("own.toml", None, ["Cannot read own.toml", "No such file"]),
        ("own.toml", b"", ["own.toml: the file is empty", "make it again"]),
        ("own.toml", NOISE, ["own.toml is not text"]),
        ("own.toml", H200.replace('name = "h200"', 'name = ""', 1).encode(), ["own.toml", "needs a name"]),
        (
            "own.toml",
            H200.replace("num_sms = 132\n", "", 1).encode(),
            ["own.toml: gpu lacks 'num_sms', a whole number. Add"],
        ),
        ("own.toml", H200.replace("num_sms = 132", "num_sms = 13200", 1).encode(), ["from 1 to 4,096; found 13,200"]),
        (
            "own.toml",
            H200.replace("num_sms = 132", "colour = 1\nnum_sms = 132", 1).encode(),
            ["own.toml: gpu has an unknown field 'colour'. Remove it."],
        ),
    ],
)
@pytest.mark.parametrize("command", [["tune", "cb_ar_opt1", "--machine"], ["machines"]])
def test_a_machine_that_cannot_be_loaded(
    command: list[str], name: str, content: bytes | None, says: list[str], tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    message = refusal(*command, name, cwd=tmp_path)
    assert all(part in message for part in says), message


CAP = 'control = "residency_cap", ctas_per_sm = {}, dynamic_shared_bytes = {}'


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, ["Cannot read plan.toml", "No such file"]),
        (NOISE, ["plan.toml is not text"]),
        (b"", ["plan.toml: the file is empty", "make it again"]),
        (b"x", ["plan.toml is not TOML"]),
        (
            H200,
            ["plan.toml: the file looks like a machine file, and a plan file is needed. A machine file is for --machine."],
        ),
        ('step_name = "s"\nstep_fingerprint = "0"', ["was made for step 's' (0)", "Run `counterpoint tune`"]),
        ('machine = "a100"', ["was made for machine 'a100', not for 'h200'", "Run `counterpoint tune`"]),
        (directive('control = "magic"'), ["directives[0].controls[0].control must be one of 'residency_cap',", "'magic'"]),
        (
            directive('control = "transport", transport = "pigeon"'),
            ["directives[0].controls[0].transport must be one of", "'copy_engine'", "found 'pigeon'"],
        ),
        (
            directive('control = "transport", transport = "copy_engine"', "computation"),
            ["A transport control cannot apply to", "which is computation", "kind"],
        ),
        (directive('control = "priority", priority = -500'), ["from -5 (highest) to 0 (lowest); found -500", "Ask for -5"]),
        (directive('control = "priority", priority = 1'), ["directives[0].controls[0]: ", "0 or lower", "found 1"]),
        (directive('control = "communication_ctas", max_ctas = 65'), ["from 1 to 64; found 65"]),
        (directive('control = "head_start", hold_us = 0', "computation"), ["above 0", "found 0"]),
        (directive(CAP.format(2, 50_000)), ["residency_cap", "'all_reduce'", "which is communication", "kind"]),
        (directive(CAP.format(0, 50_000), "computation"), ["at least 1 CTA; found 0"]),
        (directive(CAP.format(1, 5_000_000), "computation"), ["5,000,000 bytes", "232,448 bytes", "Ask for fewer"]),
        (
            directive('control = "priority", priority = -1', match=', name = "nothing*"'),
            ["matches none of the 8", "Correct"],
        ),
        (
            directive('control = "priority", priority = -1', match=", operations = [0, 99]"),
            ["names operation 99, and step 'cb_ar_opt1' has operations 0 to 7.", "Correct"],
        ),
    ],
)
def test_a_plan_that_does_not_work(content: bytes | str | None, says: list[str], tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "plan.toml").write_bytes(content if isinstance(content, bytes) else content.encode())
    message = refusal("simulate", "cb_ar_opt1", "--plan", "plan.toml", "--timeline", "lanes.json", cwd=tmp_path)
    assert all(part in message for part in says), message
    assert not (tmp_path / "lanes.json").exists()


def test_a_priority_that_the_driver_ignores_is_refused_in_a_plan_too(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(directive('control = "priority", priority = -1'))
    message = refusal("simulate", "cb_ar_opt1", "--machine", "mi300x", "--plan", "plan.toml", cwd=tmp_path)
    assert "has no effect" in message
    assert "DEBUG_HIP_IGNORE_STREAM_PRIORITY=0" in message


@pytest.mark.parametrize("command", [["tune", "-o"], ["tune", "--timeline"], ["simulate", "--timeline"]])
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("none/out.json", "does not exist. Name a file in an existing folder."),
        ("folder.json", "it is a folder. Name a file."),
        ("step.toml/out.json", "does not exist. Name a file in an existing folder."),
    ],
)
def test_an_output_that_has_no_place(command: list[str], name: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "step.toml").write_text(WORKLOAD)
    message = refusal(command[0], "cb_ar_opt1", command[1], name, cwd=tmp_path)
    assert message.startswith(f"Cannot write '{name}'")
    assert says in message


def test_an_output_never_replaces_an_input_or_the_other_output(tmp_path: Path) -> None:
    (tmp_path / "step.toml").write_text(WORKLOAD)
    (tmp_path / "link.toml").symlink_to("step.toml")
    (tmp_path / "own.toml").write_text(H200)
    for output in ("step.toml", "link.toml", "./step.toml", "own.toml"):
        assert "already uses that file" in refusal("tune", "step.toml", "--machine", "own.toml", "-o", output, cwd=tmp_path)
    assert "already uses that file" in refusal("tune", "cb_ar_opt1", "-o", "a.json", "--timeline", "a.json", cwd=tmp_path)
    assert (tmp_path / "step.toml").read_text() == WORKLOAD
    assert (tmp_path / "own.toml").read_text() == H200
    assert not (tmp_path / "a.json").exists()


def test_a_timeline_of_another_format_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    message = refusal("tune", "cb_ar_opt1", "-o", "plan.toml", "--timeline", "lanes.txt", cwd=tmp_path)
    assert ".json or .json.gz" in message
    assert list(tmp_path.iterdir()) == []


FOREIGN = {"w.toml": WORKLOAD, "a.json": '{"schema": "counterpoint.analysis/1", "ranks": [], "headline": {}}'}


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["tune", "cb_ar_opt1", "-o", "w.toml"], "holds a workload, not a plan."),
        (["workloads", "cb_ar_opt2", "-o", "w.toml"], "holds another workload."),
        (["machines", "h200", "-o", "w.toml"], "holds a workload, not a machine."),
        (["check", "-o", "w.toml"], "holds a workload, not a context."),
        (["bench", "paper", "cb_ar_opt2", "--simulate", "h200", "-o", "a.json"], "holds no results."),
        (["tune", "cb_ar_opt1", "--timeline", "a.json"], "holds no timeline."),
        (["analyze", MOE, "--merge", "a.json"], "holds no trace."),
        (["analyze", MOE, "--html", "page.html"], "holds no page."),
        (["analyze", MOE, "--markdown", "notes.md"], "holds no summary."),
        (["bench", "allocations", "h200", "-o", "notes.md"], "holds no page."),
        (["plan", "export", "p.toml", "--nccl-tuner", "-o", "notes.csv"], "holds no tuner."),
        (["sweep", "s.toml", "-o", "notes.csv"], "holds no sweep."),
        (["bench", "allocations", "h200", "-o", "w.toml"], "A page file must end in .md; found 'w.toml'"),
        (["bench", "paper", "--simulate", "h200", "-o", "w.toml"], "A results file must end in .json; found"),
        (["analyze", MOE, "-o", "w.toml"], "An analysis file must end in .json; found 'w.toml'"),
        (["analyze", MOE, "--html", "w.toml"], "A page file must end in .html or .htm; found 'w.toml'"),
    ],
)
def test_a_file_of_another_kind_or_an_edited_template_is_not_replaced(command: list[str], says: str, tmp_path: Path) -> None:
    plan = "[[directives]]\nreason = 'r'\nmatch = {}\ncontrols = [{control = 'communication_ctas', max_ctas = 4}]\n"
    notes = dict.fromkeys(("page.html", "notes.md", "notes.csv"), "my notes\n")
    files = FOREIGN | notes | {"p.toml": plan, "s.toml": (CLUSTERS / "sweep_512.toml").read_text()}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert says in refusal(*command, cwd=tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files


def test_what_a_command_wrote_it_may_write_again(tmp_path: Path) -> None:
    every = ("-o", "a.json", "--html", "p.html", "--markdown", "m.md", "--merge", "t.json.gz", "--no-recover")
    for command in (
        ("analyze", MOE, *every),
        ("analyze", MOE, *every, "--fail-if", "exposed > 0%"),
        ("tune", "cb_ar_opt1", "-o", "plan.toml", "--timeline", "lanes.svg"),
        ("workloads", "cb_ar_opt2", "-o", "w.toml"),
        ("check", "-o", "c.toml"),
        ("bench", "paper", "cb_ar_opt2", "--simulate", "h200", "-o", "r.json"),
        ("bench", "allocations", "h200", "-o", "a.md"),
    ):
        assert {counterpoint(*command, cwd=tmp_path).returncode for _ in range(2)} <= {0, 1}, command


@pytest.mark.parametrize("arguments", [["-o", "old.toml"], ["--timeline", "old.json"]])
def test_a_full_disk_leaves_the_old_file_whole(arguments: list[str], tmp_path: Path) -> None:
    old = tmp_path / arguments[1]
    precious = {"old.toml": "verdict = 'GAIN'", "old.json": '{"displayTimeUnit":"ms","traceEvents":[]}'}[old.name]
    old.write_text(precious)
    done = subprocess.run(
        [COUNTERPOINT, "tune", "cb_ar_opt1", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)),
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "File too large" in done.stderr
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(old.name, precious)]


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
@pytest.mark.parametrize("arguments", [["-o", "locked.json"], ["--timeline", "locked.json"], ["-o", "closed/new.toml"]])
def test_an_output_without_permission(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "locked.json").write_text("precious")
    (tmp_path / "locked.json").chmod(0o444)
    (tmp_path / "closed").mkdir(mode=0o555)
    assert "permission denied" in refusal("tune", "cb_ar_opt1", *arguments, cwd=tmp_path)
    assert (tmp_path / "locked.json").read_text() == "precious"


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
@pytest.mark.parametrize("name", ["step.toml", "step.json"])
def test_an_input_without_permission(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(WORKLOAD)
    (tmp_path / name).chmod(0)
    assert "Permission denied" in refusal("tune", name, cwd=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["tune"], r"Missing argument 'STEP...'\. Try 'counterpoint tune --help'\."),
        (["simulate"], "simulate needs a STEP, or --cluster FILE that describes a model. Name one of them."),
        (["tune", "--nope"], r"No such option:? '?--nope'?\. Try 'counterpoint tune --help'\."),
        (
            ["tune", "cb_ar_opt1", "--cluster", "c.toml"],
            r"'?--cluster'?; simulate has it\. Try 'counterpoint tune --help'\.",
        ),
        (["run", "--budget", "many"], r"'--budget': 'many' is not a valid integer\. Try 'counterpoint run --help'\."),
        (["check", "--nope"], "Try 'counterpoint check --help'."),
        (["schedule", "show"], "Try 'counterpoint schedule show --help'."),
        (["schedule", "fly"], "No such command 'fly'. Try 'counterpoint schedule --help'."),
        (["bench", "paper", "--nope"], "Try 'counterpoint bench paper --help'."),
        (["tune", "cb_ar_opt1", "--machine"], "'--machine' requires an argument."),
        (["simulate", "a.json.gz", "b.json.gz", "c"], "'b.json.gz' is one argument too many. Give one; `counterpoint tune`"),
        (["workloads", "cb_ar_opt1", "cb_ar_opt2"], r"'cb_ar_opt2' is one argument too many\. Try"),
        (["fly"], "No such command 'fly'. Try 'counterpoint --help'."),
        (["bench", "papers"], r"Did you mean 'paper'\? Try 'counterpoint bench --help'\."),
    ],
)
def test_wrong_usage_points_to_the_help_of_the_command_that_was_meant(arguments: list[str], says: str) -> None:
    assert re.search(says, refusal(*arguments))


def test_a_trace_is_read_by_its_content_whatever_its_name_says_of_compression(tmp_path: Path) -> None:
    (tmp_path / "plain.json.gz").write_bytes(small_trace().text())
    assert counterpoint("tune", "plain.json.gz", cwd=tmp_path).returncode == 0
    (tmp_path / "packed.json").write_bytes(gzip.compress(small_trace().text()))
    assert counterpoint("tune", "packed.json", cwd=tmp_path).returncode == 0


LONG = "n" * 1_000_000


@pytest.mark.parametrize(
    ("content", "arguments"),
    [
        (f'step_name = "{LONG}"\nstep_fingerprint = "0"\n', ["simulate", "cb_ar_opt2", "--plan", "x.toml"]),
        (f'machine = "{LONG}"\n', ["simulate", "cb_ar_opt2", "--plan", "x.toml"]),
        (f'name = "{LONG}"\nnum_ranks = 0\n', ["tune", "x.toml"]),
        (f'verdict = "{LONG}"\n', ["simulate", "cb_ar_opt2", "--plan", "x.toml"]),
        (f"{LONG} = 1\n", ["machines", "x.toml"]),
    ],
    ids=["step_name", "machine", "name", "verdict", "key"],  # pytest puts the ids into the environment of commands
)
def test_an_error_line_repeats_little_of_what_it_found(tmp_path: Path, content: str, arguments: list[str]) -> None:
    (tmp_path / "x.toml").write_text(content)
    assert len(refusal(*arguments, cwd=tmp_path)) < 2100


def test_names_on_the_command_line_are_shortened_and_an_empty_one_is_told() -> None:
    assert len(refusal("tune", "n" * 5000)) < 600
    assert len(refusal("machines", "n" * 5000)) < 400
    assert "'' is empty; STEP must be a trace (.json, .json.gz, .sqlite)" in refusal("tune", "")


def test_control_characters_of_a_machine_reach_no_terminal(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    machine = load_machine("h200")
    save_machine(machine, path)
    path.write_text(path.read_text().replace(f'"{machine.title}"', '"\\u001b[31mred"'))
    line = refusal("machines", "x.toml", cwd=tmp_path)
    assert "The title of a machine must have at most 200 printable characters; found '\\x1b[31mred'" in line


def test_a_current_folder_that_was_removed_is_named(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    command = f"rmdir '{gone}' && exec '{COUNTERPOINT}' tune cb_ar_opt1 -o plan.toml"
    done = subprocess.run(["sh", "-c", command], check=False, cwd=gone, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("counterpoint: The current folder no longer exists. Change to another one.\n")
