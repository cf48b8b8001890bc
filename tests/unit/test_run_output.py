"""The job's exit status is its own, whatever becomes of what we have to say: no room, no reader, damaged files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from counterpoint.controls import Priority
from counterpoint.plan import Directive, Match, Plan, load_plan, save_plan
from helpers.command import COUNTERPOINT

LIMIT_S = 60
DAMAGE = """
import os, pathlib, sys
from counterpoint.launch_filter.control_block import ControlBlock
from counterpoint.launch_filter.rules import FilterRule
from counterpoint.launch_filter.layout import BlockRecord, CounterRecord, SlotRecord
from ctypes import sizeof
folder = pathlib.Path(os.environ["COUNTERPOINT_FILTER_DIRECTORY"])
block = folder / "77.block"
ControlBlock.write_initial(block, [FilterRule(pattern="nccl*", kind="communication", priority=-5)])
def put(offset, content):
    with block.open("r+b") as file:
        file.seek(offset)
        file.write(content)
slot = BlockRecord.slots.offset + sizeof(SlotRecord)
put(BlockRecord.driver.offset, (1).to_bytes(4, "little"))
put(BlockRecord.pid.offset, (77).to_bytes(4, "little"))
exec(sys.argv[1])
sys.exit(7)
"""


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.toml"
    directive = Directive(match=Match(kind="communication"), controls=(Priority(priority=-5),), reason="test")
    save_plan(Plan(verdict="GAIN", directives=(directive,)), path)
    return path


def run_in_shell(redirection: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    line = " ".join(map(str, (COUNTERPOINT, "run", *arguments, redirection)))
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=LIMIT_S, check=False)


@pytest.mark.parametrize("status", [0, 7])
@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-", "2> >(exec true)", ">/dev/full 2>&1", ">&- 2>&- <&-"])
def test_standard_error_that_takes_nothing_does_not_change_the_exit_status(
    redirection: str, status: int, plan: Path
) -> None:
    for options in (("--plan", plan), ("--tune",)):
        ended = run_in_shell(redirection, *options, "--", "sh", "-c", f"'sleep 0.3; exit {status}'")
        assert (ended.returncode, ended.stdout) == (status, ""), (options, ended.stderr)


def test_strict_holds_where_standard_error_takes_nothing(plan: Path) -> None:
    assert run_in_shell("2>/dev/full", "--strict", "--plan", plan, "--", "true").returncode == 3


@pytest.mark.parametrize(
    "damage",
    [
        '(folder / "record.json").write_text("{bad")',
        '(folder / "record.json").write_text("[]")',
        '(folder / "record.json").mkdir()',
        '(folder / "77.totals.json").write_bytes(bytes([255, 254]))',
        'put(BlockRecord.driver.offset, (9).to_bytes(4, "little"))',
        'put(slot + SlotRecord.counters.offset + CounterRecord.refusal.offset, (99 << 32).to_bytes(8, "little"))',
        "put(slot + SlotRecord.pool.offset, bytes([255, 254, 255, 254]))",
        'put(slot + SlotRecord.num_rules.offset, (1 << 31).to_bytes(4, "little"))',
        "os.truncate(block, 1000)",
        "block.chmod(0)",
    ],
)
def test_a_damaged_file_is_one_line_and_the_exit_status_stays(damage: str, plan: Path) -> None:
    command = [COUNTERPOINT, "run", "--plan", plan, "--", sys.executable, "-c", DAMAGE, damage]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == 7, ended.stderr
    assert "Traceback" not in ended.stderr
    lines = [line for line in ended.stderr.splitlines() if line.startswith("counterpoint:")]
    # root reads a block without permissions all the same, and an unknown code is no reason
    is_readable = "chmod" in damage or "refusal" in damage
    assert len(lines) == (0 if is_readable else 1), ended.stderr
    assert all("damaged" in line for line in lines)


def test_strict_fails_a_job_whose_proof_is_damaged(plan: Path) -> None:
    code = DAMAGE.replace("sys.exit(7)", "")
    command = [COUNTERPOINT, "run", "--strict", "--plan", plan, "--", sys.executable, "-c", code, "os.truncate(block, 9)"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == 3
    assert "there is no proof" in ended.stderr


def test_a_plan_that_cannot_be_saved_does_not_make_a_job_fail_unless_strict(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    record = '{"stage":"decided","plan":{"verdict":"GAIN","summary":"found"}}'
    script = f"printf %s '{record}' > $COUNTERPOINT_FILTER_DIRECTORY/record.json; rmdir {folder}"
    for options, status in (((), 0), (("--strict",), 3)):
        folder.mkdir()
        command = [COUNTERPOINT, "run", "--tune", *options, "-o", folder / "found.toml", "--", "sh", "-c", script]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=os.environ)
        assert ended.returncode == status, ended.stderr
        assert "Cannot write the plan" in ended.stderr


def test_the_plan_is_saved_also_where_nothing_can_be_said(tmp_path: Path) -> None:
    found = tmp_path / "found.toml"
    script = tmp_path / "job.sh"
    record = '{"stage":"decided","plan":{"verdict":"GAIN","summary":"found"}}'
    script.write_text(f"printf %s '{record}' > $COUNTERPOINT_FILTER_DIRECTORY/record.json\n")
    assert run_in_shell("2>/dev/full", "--tune", "-o", found, "--", "sh", script).returncode == 0
    assert load_plan(found).summary == "found"
