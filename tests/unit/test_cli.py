"""The command as a user meets it: what it prints, writes and returns."""

import gzip
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete

from counterpoint import workloads
from counterpoint.cli.main import COMPLETION_VARIABLE, app
from counterpoint.machine import load_machine, machine_names, save_template
from counterpoint.units import format_rate
from counterpoint.value import shipped_text
from counterpoint.workloads import load_workload, workload_names
from helpers.command import COUNTERPOINT, TRACES, counterpoint, refusal

FSDP2 = TRACES / "fsdp2.rank0.json.gz"
TP = TRACES / "tp.rank0.json.gz"


def as_json(*arguments: str | Path, cwd: Path | None = None) -> Any:
    done = counterpoint(*arguments, "--json", cwd=cwd)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def rows(found: Any) -> dict[str, Any]:
    return {row["name"]: row for row in found["step"]}


def test_tune_prints_the_step_the_verdict_the_reasons_and_the_lanes() -> None:
    done = counterpoint("tune", FSDP2)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("fsdp2.rank0: 276 kernels, 18 collectives of 6.751 GiB")
    assert any(line.startswith("GAIN  copy engines, reductions too: ") for line in lines)
    order = ["candidate (simulated)", "to apply", "left out", "before "]
    places = [next(place for place, line in enumerate(lines) if line.startswith(start)) for start in ("GAIN  ", *order)]
    assert places == sorted(places)
    assert "Simulated, not measured: no GPU was used." in lines
    assert [line.split()[0] for line in lines if line.startswith(("before ", "after "))] == ["before", "after"]


def test_output_that_goes_into_a_file_holds_no_escape_codes() -> None:
    assert "\x1b" not in counterpoint("tune", FSDP2).stdout
    assert "\x1b" not in counterpoint("machines").stdout


def test_tune_as_json_holds_the_figures_of_the_text() -> None:
    found = as_json("tune", FSDP2)
    assert {"step_name", "step_fingerprint", "machine", "origin", "notes", "step", "replay_error", "plan", "trials"} <= set(
        found
    )
    assert (found["step_name"], found["machine"], found["origin"]) == ("fsdp2.rank0", "h200", "simulated")
    assert list(rows(found)) == ["sequential", "as traced", "as replayed", "with the plan", "ideal", "ideal in pieces"]
    assert abs(found["replay_error"]) < 0.03
    assert found["plan"]["verdict"] == "GAIN"
    expected = found["plan"]["expectation"]
    assert expected["baseline_us"] == rows(found)["as replayed"]["makespan_us"] == found["trials"][0]["makespan_us"]
    assert expected["planned_us"] == rows(found)["with the plan"]["makespan_us"]
    assert rows(found)["ideal"]["makespan_us"] <= expected["planned_us"] <= rows(found)["sequential"]["makespan_us"]


def test_json_says_no_gain_rather_than_nothing() -> None:
    found = as_json("tune", TP)
    assert found["plan"]["verdict"] == "NO_GAIN"
    assert "with the plan" not in rows(found)


@pytest.mark.parametrize("workload", ["cb_a2a_opt1", "mb_a2a_opt2", "cb_ar_opt2"])
def test_no_plan_is_said_to_gain_more_than_is_possible(workload: str) -> None:
    found = rows(as_json("tune", workload))
    assert found["with the plan"]["makespan_us"] >= found["ideal"]["makespan_us"]


@pytest.mark.parametrize("workload", ["cb_a2a_opt1", "mb_a2a_opt2", "cb_ar_opt2"])
def test_a_step_has_one_ideal_whichever_command_tells_it(workload: str, tmp_path: Path) -> None:
    counterpoint("bench", "paper", workload, "--simulate", "h200", "-o", "paper.json", cwd=tmp_path)
    (paper,) = json.loads((tmp_path / "paper.json").read_text())["result"]
    ideals_us = {rows(as_json(command, workload))["ideal"]["makespan_us"] for command in ("tune", "simulate")}
    assert ideals_us == {paper["ideal_us"]}


@pytest.mark.parametrize("source", [FSDP2, "cb_ar_opt1"])
def test_a_saved_plan_simulates_to_the_makespan_it_promised(source: str | Path, tmp_path: Path) -> None:
    found = as_json("tune", source, "-o", "plan.toml", cwd=tmp_path)
    again = as_json("simulate", source, "--plan", "plan.toml", cwd=tmp_path)
    assert rows(again)["with the plan"]["makespan_us"] == found["plan"]["expectation"]["planned_us"]
    assert "replay_error" not in again  # the step under a plan is no replay
    without = as_json("simulate", source)
    assert rows(without)["simulated"]["makespan_us"] == found["plan"]["expectation"]["baseline_us"]


def test_an_empty_plan_is_saved_with_its_verdict_and_changes_nothing(tmp_path: Path) -> None:
    saved = counterpoint("tune", TP, "-o", "plan.toml", cwd=tmp_path)
    assert saved.stdout.splitlines()[-1] == "Plan saved to plan.toml."
    assert 'verdict = "NO_GAIN"' in (tmp_path / "plan.toml").read_text()
    simulated = counterpoint("simulate", TP, "--plan", "plan.toml", cwd=tmp_path)
    assert simulated.returncode == 0
    assert simulated.stdout == counterpoint("simulate", TP).stdout


def test_a_plan_replaces_an_older_one_and_leaves_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("verdict = 'NO_GAIN'\n" + "# older and longer\n" * 1000)
    assert counterpoint("tune", "cb_ar_opt1", "-o", "plan.toml", cwd=tmp_path).returncode == 0
    assert (tmp_path / "plan.toml").read_text().startswith('step_name = "cb_ar_opt1"')
    assert [path.name for path in tmp_path.iterdir()] == ["plan.toml"]


@pytest.mark.parametrize("name", ["plan.json", "rank0.json.gz", "plan"])
@pytest.mark.parametrize("arguments", [("tune", "cb_ar_opt2"), ("run", "--tune")])
def test_a_plan_whose_name_does_not_say_toml_is_refused_before_any_work(
    arguments: tuple[str, ...], name: str, tmp_path: Path
) -> None:
    wanted = tmp_path / name
    command = ("--", "touch", str(tmp_path / "worked")) if "run" in arguments else ()
    done = counterpoint(*arguments, "-o", str(wanted), *command)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"counterpoint: A plan file must end in .toml; found '{name}'. Rename it.\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["lanes.json", "lanes.json.gz"])
def test_timelines_before_and_after_are_a_chrome_trace(name: str, tmp_path: Path) -> None:
    assert counterpoint("tune", "cb_ar_opt1", "--timeline", name, cwd=tmp_path).returncode == 0
    content = (tmp_path / name).read_bytes()
    events = json.loads(gzip.decompress(content) if name.endswith(".gz") else content)["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)
    assert {event["cat"] for event in spans} == {"computation", "communication"}
    processes = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert len(processes) == 2
    ends = {name: max(e["ts"] + e["dur"] for e in spans if e["pid"] == process) for name, process in processes.items()}
    (before,) = [end for name, end in ends.items() if name.startswith("before")]
    (after,) = [end for name, end in ends.items() if name.startswith("after")]
    assert after < before


def test_what_is_saved_is_said_and_not_among_json(tmp_path: Path) -> None:
    tuned = counterpoint("tune", "cb_ar_opt1", "-o", "plan.toml", "--timeline", "lanes.json", cwd=tmp_path)
    assert tuned.stdout.splitlines()[-2:] == ["Plan saved to plan.toml.", "Timelines saved to lanes.json."]
    simulated = counterpoint("simulate", "cb_ar_opt1", "--timeline", "lanes.json", cwd=tmp_path)
    assert simulated.stdout.splitlines()[-1] == "Timeline saved to lanes.json."
    as_json("tune", "cb_ar_opt1", "--timeline", "lanes.json", cwd=tmp_path)


def test_simulate_writes_its_timeline(tmp_path: Path) -> None:
    found = as_json("simulate", "cb_ar_opt1", "--timeline", "out.json", cwd=tmp_path)
    events = json.loads((tmp_path / "out.json").read_bytes())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 8
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(rows(found)["simulated"]["makespan_us"])


@pytest.mark.parametrize("name", machine_names(variants=False))
def test_a_machine_is_saved_as_a_template_that_is_read_back(name: str, tmp_path: Path) -> None:
    save_template(name, tmp_path / "my.toml")
    assert load_machine(tmp_path / "my.toml") == load_machine(name)
    save_template(tmp_path / "my.toml", str(tmp_path / "again.toml"))
    assert load_machine(tmp_path / "again.toml") == load_machine(name)


def test_machines_writes_a_template(tmp_path: Path) -> None:
    done = counterpoint("machines", "h200", "-o", "my.toml", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("Change its name and figures, then use it: --machine my.toml\n")
    assert counterpoint("simulate", "cb_ar_opt2", "--machine", "my.toml", cwd=tmp_path).returncode == 0
    assert "Name one, or add --probe" in refusal("machines", "-o", "my.toml", cwd=tmp_path)
    assert "must end in .toml" in refusal("machines", "h200", "-o", "my.txt", cwd=tmp_path)
    assert counterpoint("machines", "h200", "-o", "my.toml", cwd=tmp_path).returncode == 0
    with (tmp_path / "my.toml").open("a") as file:
        file.write("# mine\n")
    assert "'my.toml' would be replaced, and holds another machine" in refusal(
        "machines", "h200", "-o", "my.toml", cwd=tmp_path
    )


@pytest.mark.parametrize("name", workload_names())
def test_a_workload_is_saved_as_a_template_that_is_read_back(name: str, tmp_path: Path) -> None:
    workloads.save_template(name, tmp_path / "my.toml")
    assert load_workload(tmp_path / "my.toml") == load_workload(name)
    workloads.save_template(tmp_path / "my.toml", tmp_path / "again.toml")
    assert (tmp_path / "again.toml").read_text() == (tmp_path / "my.toml").read_text()


def test_workloads_are_listed_shown_and_written(tmp_path: Path) -> None:
    listed = counterpoint("workloads").stdout.splitlines()[2:]
    assert [line.split()[0] for line in listed] == workload_names() == [each["name"] for each in as_json("workloads")]
    shown = counterpoint("workloads", "cb_ar_opt2").stdout
    assert shown == shipped_text("workloads/cb_ar_opt2.toml")
    assert as_json("workloads", "cb_ar_opt2")["gemms"][0]["m"] == 8192
    done = counterpoint("workloads", "cb_ar_opt2", "-o", "my.toml", cwd=tmp_path)
    assert done.stdout == "Workload saved to my.toml. Change its name and sizes, then use it: counterpoint tune my.toml\n"
    assert "Which workload should 'my.toml' hold? Name one." in refusal("workloads", "-o", "my.toml", cwd=tmp_path)
    assert "must end in .toml; found 'my.txt'" in refusal("workloads", "cb_ar_opt2", "-o", "my.txt", cwd=tmp_path)
    assert "already uses that file" in refusal("workloads", "my.toml", "-o", "my.toml", cwd=tmp_path)
    assert "Unknown workload 'nope'" in refusal("workloads", "nope")


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("", {"tune", "machines"}),
        ("mach", {"machines"}),
        ("tune --mach", {"--machine"}),
        ("tune --machine h", {"h100", "h200"}),
        ("simulate cb_ar", {"cb_ar_opt1", "cb_ar_opt2"}),
        ("schedule show all_g", {"all_gather_matmul"}),
    ],
)
def test_shells_complete_commands_options_and_names(typed: str, expected: set[str]) -> None:
    *before, incomplete = typed.split(" ")
    found = ShellComplete(app, {}, "counterpoint", COMPLETION_VARIABLE).get_completions(before, incomplete)
    assert expected <= {each.value for each in found}
    assert typed == "" or expected == {each.value for each in found}


def test_a_file_is_completed_where_no_name_fits() -> None:
    (found,) = ShellComplete(app, {}, "counterpoint", COMPLETION_VARIABLE).get_completions(["tune"], "my_tr")
    assert (found.type, found.value) == ("file", "my_tr")


def test_the_script_for_bash_completes_by_asking_the_command(tmp_path: Path) -> None:
    script = counterpoint("completion", "bash").stdout
    ask = f"{script}\nCOMP_WORDS=({COUNTERPOINT} machines h2); COMP_CWORD=2\n"
    ask += f"_counterpoint_completion {COUNTERPOINT}\necho ${{COMPREPLY[@]}}"
    assert subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True).stdout == "h200\n"
    assert "is not one of 'bash', 'zsh', 'fish'" in refusal("completion", "tcsh")


def test_the_demo_shows_a_gain_and_commands_to_try_next(tmp_path: Path) -> None:
    done = counterpoint("demo", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    first, _, told = done.stdout.partition("\n\n")
    assert first == "$ counterpoint tune fsdp2.rank0.json.gz"
    assert "\nGAIN  copy engines, reductions too: " in told
    for line in re.findall(r"counterpoint [a-z].*", told.partition("\nNext\n")[2]):
        command, *rest = shlex.split(line)[1:]
        assert command in app.commands
        if rest != ["--help"]:
            app.commands[command].make_context(command, rest, parent=click.Context(app, **app.context_settings))


def test_machines_are_listed_and_shown_with_sources() -> None:
    names = [machine["name"] for machine in as_json("machines")]
    assert names == sorted(names)
    listed = counterpoint("machines").stdout
    assert all(re.search(rf"^{name} ", listed, re.MULTILINE) for name in names)
    one = as_json("machines", "h200")
    assert one["gpu"]["num_sms"] == 132
    shown = counterpoint("machines", "h200", COLUMNS="200").stdout
    found = re.search(r"^gpu\.num_sms +132 +\[(\d+)\]$", shown, re.MULTILINE)
    assert found
    assert re.search(r"^gpu\.fp8_flops_per_s +1,978,900,000,000,000 ", shown, re.MULTILINE)
    assert re.search(rf"^\[{found[1]}\] +measured on NVIDIA H200", shown, re.MULTILINE)


@pytest.mark.parametrize("columns", [60, 76, 80, 200])
def test_tables_of_machines_cut_no_name_and_no_figure(columns: int) -> None:
    machines = as_json("machines")
    listed = counterpoint("machines", COLUMNS=str(columns)).stdout
    assert max(map(len, listed.splitlines())) <= columns
    assert "…" not in listed
    for machine in machines:
        row = re.search(rf"^{machine['name']} .*/s\b.*$", listed, re.MULTILINE)
        assert row
        assert format_rate(machine["gpu"]["hbm_bytes_per_s"]) in row[0]
        assert f"{machine['link']['kind']} {format_rate(machine['link']['bytes_per_s'])}" in row[0]
    words = set(listed.split())
    assert {word for machine in machines for word in machine["title"].split()} <= words
    shown = counterpoint("machines", "h200", COLUMNS=str(columns)).stdout
    assert max(map(len, shown.splitlines())) <= columns
    if columns >= 76:
        assert re.search(r"^gpu\.registers_per_sub_partition +16,384 +\[\d+\]", shown, re.MULTILINE)
    sources = {
        source for name, source in as_json("machines", "h200")["sources"].items() if re.search(rf"^{name} ", shown, re.M)
    }
    assert all(source in " ".join(shown.split()) for source in sources)


def test_a_machine_of_ones_own_may_hold_any_text(tmp_path: Path) -> None:
    shipped = as_json("machines", "h200")
    text = (Path(__file__).parents[2] / "src/counterpoint/machines/h200.toml").read_text()
    title = "8 x [H200] [/bold] :smile:"
    (tmp_path / "own.toml").write_text(text.replace(f'"{shipped["title"]}"', f'"{title}"').replace('"h200"', '"[/own]"'))
    assert counterpoint("machines", "own.toml", cwd=tmp_path).stdout.startswith(f"[/own]: {title}\n")
    assert f"on {title}\n" in counterpoint("simulate", "cb_ar_opt1", "--machine", "own.toml", cwd=tmp_path).stdout


@pytest.mark.parametrize("columns", ["60", "20", "1", "0", "400", "wide"])
def test_any_width_keeps_the_verdict(columns: str) -> None:
    done = counterpoint("tune", "cb_a2a_opt1", COLUMNS=columns)
    assert (done.returncode, done.stderr) == (0, "")
    assert "GAIN copy engines" in " ".join(done.stdout.split())
    if columns == "60":
        typed = "     counterpoint "  # what is to be pasted is never folded
        assert max(len(line) for line in done.stdout.splitlines() if not line.startswith(typed)) <= 60


@pytest.mark.parametrize("arguments", [["tune", "cb_ar_opt1"], ["tune", FSDP2], ["machines", "h200"], ["machines"]])
def test_a_terminal_without_utf8_gets_ascii(arguments: list[str | Path]) -> None:
    done = counterpoint(*arguments, LC_ALL="C", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    if arguments[0] == "tune":
        assert re.search(r"^before +[.:=+*%#-]+", done.stdout, re.MULTILINE)


def test_a_reader_that_leaves_early_is_no_error_and_no_verdict() -> None:
    gate = ["analyze", FSDP2, "--no-recover", "--fail-if", "exposed > 99%"]
    for arguments in (["tune", FSDP2], ["machines", "h200"], ["tune", FSDP2, "--json"], gate):
        with subprocess.Popen([COUNTERPOINT, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            assert process.stderr.read() == b""
            assert process.wait() == 141


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
@pytest.mark.parametrize("arguments", [["machines"], ["machines", "--json"], ["tune", "cb_ar_opt1"]])
def test_output_that_cannot_be_written_is_one_line(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([COUNTERPOINT, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "counterpoint: Cannot use standard output: No space left on device.\n")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_output_loses_what_is_written_to_it_and_nothing_else(closed: str, tmp_path: Path) -> None:
    plan, trace = tmp_path / "plan.toml", TRACES / "starved.rank0.json.gz"
    script = f'exec "$0" "$@" {closed}'
    done = subprocess.run(
        ["sh", "-c", script, COUNTERPOINT, "tune", trace, "-o", plan], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert ("GAIN" in done.stdout) == (closed == "2>&-")
    assert plan.read_text().startswith("step_name = ")


def test_a_trace_is_read_from_a_pipe_of_any_name(tmp_path: Path) -> None:
    trace = (TRACES / "starved.rank0.json.gz").read_bytes()
    for words in (["tune", "/dev/stdin"], ["simulate", "/dev/stdin"], ["analyze", "/dev/stdin", "--no-recover"]):
        done = subprocess.run([COUNTERPOINT, *words], input=trace, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b""), words


def test_ctrl_c_ends_with_130_and_no_word(tmp_path: Path) -> None:
    waiting = tmp_path / "slow.json"
    os.mkfifo(waiting)  # nothing comes through it, so reading it never ends
    heeding = (  # whoever runs the tests in the background may have SIGINT ignored, and children inherit that
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [sys.executable, "-c", heeding, COUNTERPOINT, "tune", waiting]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            with waiting.open("wb"):  # returns when the command has opened the other end
                time.sleep(0.2)
                process.send_signal(signal.SIGINT)
                output, error = process.communicate(timeout=20)
        finally:
            process.kill()
    assert (process.returncode, output, error) == (130, b"", b"")


SLOW_TO_LOAD = """
import runpy, signal, sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "counterpoint.cli":
            print("loading", flush=True)
            time.sleep(20)
sys.meta_path.insert(0, Slow())
signal.signal(signal.SIGINT, signal.default_int_handler)
"""


@pytest.mark.parametrize(
    "start", ["import counterpoint_command as c; c.main()", "runpy.run_module('counterpoint', run_name='__main__')"]
)
def test_ctrl_c_while_the_command_is_loaded_ends_with_130_and_no_word(start: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SLOW_TO_LOAD + start], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"loading\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20) == (b"", b"")
    assert process.returncode == 130


def test_importing_the_package_loads_neither_numpy_nor_the_command_line() -> None:
    script = "import sys, counterpoint; print(sorted({'numpy', 'click', 'rich', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_version_is_the_packages() -> None:
    done = counterpoint("--version")
    assert (done.returncode, done.stdout) == (0, f"counterpoint {version('counterpoint')}\n")
