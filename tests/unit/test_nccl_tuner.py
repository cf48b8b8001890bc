"""`counterpoint plan export --nccl-tuner`: lines that NVIDIA's example plugin reads, and what it cannot do said."""

from pathlib import Path

import pytest

from counterpoint.controls import CommunicationCtas, Priority
from counterpoint.errors import PlanError
from counterpoint.plan import Directive, Match, Plan, save_plan
from counterpoint.report.nccl_tuner import ALGORITHMS, HEADER, LARGEST, TUNED, tuner_file
from counterpoint.step import Collective, Step
from helpers.command import counterpoint, refusal

MOST_LETTERS = 255  # of a line, which the plugin reads by fgets into 256 bytes


def directive(match: Match, *controls: CommunicationCtas | Priority) -> Directive:
    return Directive(match=match, controls=controls, reason="test")


def gather(num_bytes: int, name: str = "gather") -> Collective:
    return Collective(name=name, stream=1, collective="all_gather", num_bytes=num_bytes, group_size=2)


GATHERS = Match(kind="communication", collective="all_gather")
FEW, MORE = CommunicationCtas(max_ctas=4), CommunicationCtas(max_ctas=8)


def parse(text: str) -> list[list[str]]:
    """As plugin.c does: lines cut at 255 letters, comments and empty ones skipped, words between commas."""
    pieces = [
        line[start : start + MOST_LETTERS] for line in text.splitlines() for start in range(0, len(line), MOST_LETTERS)
    ]
    return [piece.split(",") for piece in pieces if not piece.startswith("#")]


def test_single_sizes_come_before_ranges_and_every_line_has_ten_fields() -> None:
    sized = Match(kind="communication", collective="all_gather", num_bytes=1 << 20)
    plan = Plan(verdict="GAIN", directives=(directive(Match(kind="communication"), MORE), directive(sized, FEW)))
    lines = parse(tuner_file(plan).written("ring", "simple"))
    assert lines[0] == ["allgather", "1048576", "1048576", "ring", "simple", "4", "-1", "-1", "-1", "-1"]
    assert sorted(line[0] for line in lines[1:]) == sorted(TUNED.values())
    assert {(line[1], line[2], line[5]) for line in lines[1:]} == {("0", str(LARGEST), "8")}
    assert parse(HEADER) == []


def test_a_step_tells_the_sizes_that_a_name_means_and_what_cannot_be_told_apart() -> None:
    step = Step(name="step", num_ranks=2, operations=(gather(64, "a"), gather(64, "b"), gather(32, "b")))
    plan = Plan(verdict="GAIN", directives=(directive(Match(name="b"), FEW),))
    found = tuner_file(plan, step)
    assert [(line.least_bytes, line.most_bytes) for line in found.lines] == [(32, 32), (64, 64)]
    assert found.left_out == (
        "other all_gather of 64 bytes get the same CTAs, because a tuner plugin cannot tell them apart",
    )
    with pytest.raises(PlanError, match="Add --step TRACE"):
        tuner_file(plan)


@pytest.mark.parametrize(
    ("directives", "says"),
    [
        ((), r"changes nothing, so there is nothing to write\. Start the job alone\.$"),
        ((directive(GATHERS, Priority(priority=-5)),), r"limits the CTAs of no collective .*\(priority on"),
        (
            (directive(Match(kind="communication", collective="all_to_all"), FEW),),
            "NCCL asks tuner plugins only about broadcast",
        ),
        ((directive(GATHERS, FEW), directive(GATHERS, MORE)), "asks for 4 and for 8 CTAs for all_gather"),
    ],
)
def test_a_plan_that_no_tuner_plugin_can_follow_is_refused(directives: tuple[Directive, ...], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        tuner_file(Plan(verdict="GAIN", directives=directives))


def test_the_command_writes_the_file_and_says_what_is_not_in_it(tmp_path: Path) -> None:
    controls = (CommunicationCtas(max_ctas=4, num_threads=256), Priority(priority=-5))
    save_plan(Plan(verdict="GAIN", directives=(directive(GATHERS, *controls),)), tmp_path / "plan.toml")
    written = tmp_path / "nccl_tuner.conf"
    done = counterpoint("plan", "export", tmp_path / "plan.toml", "--nccl-tuner", "-o", written, "--algorithm", "nvls")
    assert (done.returncode, done.stdout) == (0, "")
    assert [line.split(": ")[1] for line in done.stderr.splitlines()] == ["not in the file"] * 2
    assert "NCCL_NTHREADS=256" in done.stderr
    assert parse(written.read_text()) == [["allgather", "0", str(LARGEST), "nvls", "simple", "4", "-1", "-1", "-1", "-1"]]
    assert "Add --nccl-tuner" in refusal("plan", "export", tmp_path / "plan.toml")
    assert ALGORITHMS[0] in refusal("plan", "export", tmp_path / "plan.toml", "--nccl-tuner", "--algorithm", "x")
