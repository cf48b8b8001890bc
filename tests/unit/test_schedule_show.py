"""`counterpoint schedule show`: the picture fits the terminal and says what it shows; bad input is one line."""

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from counterpoint.machine import load_machine
from counterpoint.report.schedule import ScheduleSummary
from counterpoint.report.schedule_lanes import LaneSpan, StreamLane, draw_lane, lanes_of, letters, tell_order
from counterpoint.schedule import CopySchedule, Problem
from counterpoint.schedule.estimate import Estimate, estimate
from helpers.command import counterpoint, refusal
from helpers.schedules import OPERATIONS, first_pass, schedules

SIZES = ("--ranks", "4", "--rows", "16384", "--inner", "8192", "--columns", "2560")


def estimated(schedule: CopySchedule) -> Estimate:
    sizes: dict[str, Any] = {"num_rows": schedule.num_rows, "num_inner": 4096, "num_columns": 4096}
    return estimate(
        schedule, Problem(operation=schedule.operation, num_ranks=schedule.num_ranks, **sizes), load_machine("h200")
    )


@pytest.mark.parametrize("columns", [80, 95, 110])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_report_fits_the_terminal(operation: str, columns: int) -> None:
    backward = ["--backward"] * (first_pass(operation) == "backward")
    done = counterpoint("schedule", "show", operation, *SIZES, *backward, "--chunks", "3", COLUMNS=str(columns))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert max(map(len, done.stdout.splitlines())) <= columns


def test_the_report_says_what_it_shows_and_that_nothing_was_measured() -> None:
    output = counterpoint("schedule", "show", "all_gather_matmul", *SIZES, "--chunks", "2", COLUMNS="110").stdout
    assert "all_gather_matmul of (16384, 8192) @ (8192, 2560), bf16, 4 ranks, machine h200" in output
    assert "one_peer/2 chunk 1+2, rank 0" in output
    assert "Rank 0 issues 6 copies of 192 MiB in all, 7 matmuls; 256 MiB of symmetric memory on each rank." in output
    assert "Checked: order, buffers, delivery, signals, ports." in output
    assert "The heuristic picks" in output
    assert "Estimated by arithmetic, not measured: no GPU was used." in output
    lanes = [line.split()[0] for line in output.splitlines() if line.rstrip().endswith(("]", "|"))]
    assert lanes == ["collective", "matmul", "arriving", "compute", "compute", "copy"]


def test_where_nothing_is_described_the_pick_of_the_heuristic_is_drawn() -> None:
    found = shown("all_gather_matmul", *SIZES)
    assert found.description == found.pick.description
    assert found.candidates[0].estimated_us <= found.estimated_us < found.sequential_us
    small = shown("all_gather_matmul", "--ranks", "4", "--rows", "64", "--inner", "64", "--columns", "64")
    assert small.description.is_sequential
    assert small.schedule is None
    assert small.lanes == small.sequential_lanes
    assert [lane.name for lane in small.lanes] == ["collective", "matmul"]


def test_every_choice_of_a_description_can_be_made() -> None:
    choices = "--pattern all_peers --chunks 3 --matmul fused --local-last --copy-streams 2 --compute-streams 1"
    found = shown("all_gather_matmul", *SIZES, *choices.split(), "--rank", "2", "--dtype", "fp32", "--machine", "a100")
    assert found.description.label() == "all_peers/3 fused local last 2+1"
    assert (found.machine, found.rank, found.dtype, found.problem.element_bytes) == ("a100", 2, "fp32", 4)
    assert found.schedule is not None
    assert [lane.name for lane in found.lanes][-3:] == ["compute 0", "copy 0", "copy 1"]


def test_slices_and_growing_chunks_are_drawn() -> None:
    sliced = shown("all_gather_matmul", *SIZES, "--chunks", "2", "--along", "inner")
    graded = shown("matmul_reduce_scatter", *SIZES, "--chunks", "3", "--chunk-growth", "0.5")
    assert [sliced.description.label(), graded.description.label()] == [
        "one_peer/2 inner chunk 1+2",
        "one_peer/3x0.5 chunk 1+2",
    ]
    assert all(found.lanes and "delivery" in found.checks for found in (sliced, graded))


def test_the_backward_pass_moves_the_shards_and_the_gradients() -> None:
    forward = shown("all_gather_matmul", *SIZES, "--chunks", "2")
    backward = shown("all_gather_matmul", *SIZES, "--chunks", "2", "--backward")
    assert backward.traffic.num_sent_bytes == 2 * forward.traffic.num_sent_bytes
    assert "dW" in {span.label for lane in backward.lanes for span in lane.spans}


def test_a_schedule_that_needs_more_memory_than_a_gpu_has_is_told_so() -> None:
    sizes = ("--ranks", "4", "--inner", "8192", "--columns", "2560")
    large, small = (shown("all_gather_matmul", *sizes, "--rows", rows) for rows in ("20000000", "8192"))
    assert large.obstacle.startswith(
        "This schedule cannot run: it needs 305.2 GiB of symmetric memory, and a GPU of h200 has 139.8 GiB."
    )
    assert small.obstacle == ""
    done = counterpoint("schedule", "show", "all_gather_matmul", *sizes, "--rows", "20000000", COLUMNS="160")
    assert large.obstacle in done.stdout.splitlines()


def shown(operation: str, *arguments: str) -> ScheduleSummary:
    done = counterpoint("schedule", "show", operation, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["problem"]["operation"] == operation
    return msgspec.json.decode(done.stdout, type=ScheduleSummary)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nothing", *SIZES), ["'OPERATION': 'nothing' is not one of", "all_to_all_matmul"]),
        (("all_gather_matmul", *SIZES[2:]), ["Missing option '--ranks'"]),
        (
            ("all_gather_matmul", "--ranks", "9", *SIZES[2:]),
            ["9 ranks were requested, but machine 'h200' has 8 GPUs", "8 ranks or fewer"],
        ),
        (("all_gather_matmul", "--ranks", "0", *SIZES[2:]), ["must have 1 to 64 ranks; found 0"]),
        (("all_gather_matmul", *SIZES, "--rows", "0"), ["--rows must be from 1 to", "found 0"]),
        (("all_gather_matmul", *SIZES, "--rows", "16k"), ["value for '--rows': '16k' is not a valid integer. Try"]),
        (("all_gather_matmul", *SIZES, "--rows", ""), ["value for '--rows': '' is not a valid integer. Try"]),
        (("all_gather_matmul", *SIZES, "--rows", "9" * 5000), ["value for '--rows': '999"]),
        (("all_gather_matmul", *SIZES, "--inner", "9" * 400), ["--inner must be from 1 to"]),
        (("all_gather_matmul", *SIZES, "--chunks", "65"), ["--chunks of a schedule must be from 1 to 64; found 65"]),
        (
            ("all_gather_matmul", *SIZES, "--copy-streams", "9"),
            ["--copy-streams of a schedule must be from 1 to 8; found 9"],
        ),
        (("all_gather_matmul", *SIZES, "--compute-streams", "3"), ["--compute-streams of a schedule must", "found 3"]),
        (("all_gather_matmul", *SIZES, "--pattern", "star"), ["'star' is not one of", "one_peer"]),
        (("all_gather_matmul", *SIZES, "--rank", "4"), ["must be from 0 to 3; found 4"]),
        (("all_gather_matmul", *SIZES, "--dtype", "int8"), ["'int8' is not one of", "'bf16'"]),
        (("all_gather_matmul", *SIZES, "--machine", "abacus"), ["Unknown machine 'abacus'"]),
        (("all_gather_matmul", *SIZES, "--pattern", "sequential", "--chunks", "2"), ["found also --chunks."]),
        (("all_to_all_matmul", *SIZES, "--pattern", "ring"), ["takes the pattern one_peer or all_peers; found 'ring'"]),
        (("matmul_reduce_scatter", *SIZES, "--matmul", "rest"), ["takes matmul granularity", "found 'rest'"]),
        (
            ("all_gather_matmul", *SIZES, "--chunk-growth", "9"),
            ["--chunk-growth of a schedule must be from 0.25 to 4; found 9"],
        ),
        (
            ("all_gather_matmul", *SIZES, "--chunks", "2", "--along", "columns"),
            ["are for the forward pass of matmul_reduce_scatter"],
        ),
        (("matmul_all_reduce", *SIZES, "--backward"), ["copies nothing in its backward pass", "Use the forward pass"]),
        (("column_parallel_matmul", *SIZES), ["copies nothing in its forward pass", "Use the backward pass"]),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], says: list[str]) -> None:
    line = refusal("schedule", "show", *arguments)
    assert all(each in line for each in says), line
    assert "num_" not in line, "the user typed an option, not a field"


def test_sizes_to_tune_are_refused_by_the_names_that_were_typed() -> None:
    line = refusal("schedule", "tune", "all_gather_matmul", "--rows", "4", "--inner", "0", "--columns", "4")
    assert line.startswith("--inner must be from 1 to ")


@given(schedule=schedules(), data=st.data())
def test_lanes_hold_every_action_of_the_rank_that_takes_time_and_all_that_comes_to_it(
    schedule: CopySchedule, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    times = estimated(schedule)
    lanes = lanes_of(schedule, times, rank)
    concerned = [
        (span.start_us, span.end_us)
        for action, span in zip(schedule.actions, times.spans, strict=True)
        if action.kind != "end"  # what a call costs beside its actions
        and span.end_us > span.start_us
        and rank in {action.rank, *(region.rank for region in action.writes)}
    ]
    drawn = [(span.start_us, span.end_us) for lane in lanes for span in lane.spans]
    assert sorted(drawn) == sorted(concerned)
    for lane in lanes:
        assert all(one.end_us <= other.start_us for one, other in zip(lane.spans, lane.spans[1:], strict=False))


@given(schedule=schedules(least_ranks=2), data=st.data())
def test_a_matmul_piece_has_the_letters_of_what_it_waits_for(schedule: CopySchedule, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    lanes = lanes_of(schedule, estimated(schedule), rank)
    arriving = {span.label for lane in lanes if lane.name == "arriving" for span in lane.spans}
    pieces = [span for lane in lanes if lane.name.startswith("compute") for span in lane.spans]
    needed = {part for span in pieces for part in span.label.split(">")[0].replace("-", ",").split(",")}
    assert needed - {"", "own", "sum", "dW", "put"} <= arriving
    gathers = schedule.direction == "forward" and schedule.operation in ("all_gather_matmul", "all_to_all_matmul")
    if gathers and schedule.description.matmul == "chunk":
        assert {span.label for span in pieces} - {"own"} == arriving


def test_what_a_ring_places_before_it_adds_to_it_keeps_its_letter() -> None:
    found = shown("matmul_reduce_scatter", "--ranks", "2", *SIZES[2:], "--pattern", "ring", "--chunks", "2")
    labels = {lane.name: [span.label for span in lane.spans] for lane in found.lanes}
    assert labels["arriving"] == ["a", "b"]
    assert (labels["compute 0"], labels["compute 1"]) == ([">1", "a"], [">1", "b"])


@given(
    lengths=st.lists(st.tuples(st.floats(0, 50), st.floats(0.001, 50)), max_size=30),
    num_columns=st.integers(1, 150),
)
@example(lengths=[(1.8120336160947055, 21.38671875), (9.38671875, 13.812033616094705)], num_columns=74)
def test_a_lane_is_as_wide_as_asked_for_and_busy_where_its_spans_are(
    lengths: list[tuple[float, float]], num_columns: int
) -> None:
    spans, now_us = [], 0.0
    for pause_us, length_us in lengths:
        spans.append(LaneSpan(label="a", start_us=now_us + pause_us, end_us=now_us + pause_us + length_us))
        now_us = spans[-1].end_us
    total_us = max(now_us, 1.0)
    drawn = draw_lane(StreamLane(name="copy 0", spans=tuple(spans)), num_columns, total_us)
    assert len(drawn) == num_columns
    width_us = total_us / num_columns
    for column, character in enumerate(drawn):
        covered = any(span.start_us <= column * width_us and (column + 1) * width_us <= span.end_us for span in spans)
        assert not covered or character != " "


def test_a_label_is_written_where_there_is_room_for_it() -> None:
    spans = (
        LaneSpan(label="own", start_us=0, end_us=7),
        LaneSpan(label="a-c", start_us=7, end_us=10),
        LaneSpan(label="d", start_us=10, end_us=10.5),
        LaneSpan(label="e", start_us=14, end_us=17),
    )
    assert draw_lane(StreamLane(name="compute 0", spans=spans), 20, 20.0) == "[-own-]a-cd   [e]   "


@given(schedule=schedules(least_ranks=2), num_columns=st.integers(1, 150))
def test_every_label_is_drawn_or_told_in_its_order(schedule: CopySchedule, num_columns: int) -> None:
    times = estimated(schedule)
    for lane in lanes_of(schedule, times, 0):
        drawn, told = draw_lane(lane, num_columns, times.makespan_us), tell_order(lane, num_columns, times.makespan_us)
        if not told:
            place = 0
            for span in lane.spans:  # in this order, none of them within another
                place = drawn.index(span.label, place) + len(span.label)
            assert re.sub(r"[\[\]\- ]", "", drawn) == re.sub("-", "", "".join(span.label for span in lane.spans))
            continue
        name, _, labels = told.partition(": ")
        assert name == lane.name
        assert [
            label
            for times_label in labels.split(", ")
            for count, _, label in [times_label.rpartition(" x ")]
            for label in [label] * int(count or 1)
        ] == [span.label for span in lane.spans]


def test_eight_ranks_in_80_columns_keep_their_labels() -> None:
    sizes = ("--ranks", "8", *SIZES[2:])
    output = counterpoint("schedule", "show", "all_gather_matmul", *sizes, COLUMNS="80").stdout
    (copies,) = [line for line in output.splitlines() if line.lstrip().startswith("copy 0")]
    assert re.findall(r">\d", copies) == [f">{rank}" for rank in range(7, 0, -1)]
    assert "in order" not in output
    output = counterpoint("schedule", "show", "all_gather_matmul", *sizes, "--chunks", "8", COLUMNS="80").stdout
    assert "in order, copy 0: 8 x >7, 8 x >6, 8 x >5, 8 x >4, 8 x >3, 8 x >2, 8 x >1\n" in output
    assert max(map(len, output.splitlines())) <= 80
    long_matmul = (*sizes, "--inner", "65536", "--chunks", "4")
    output = counterpoint("schedule", "show", "matmul_reduce_scatter", *long_matmul, COLUMNS="80").stdout
    assert re.search(r"^in order, collective: [0-9.]+ us$", output, re.MULTILINE)


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([0], "a"), ([2, 0, 1, 5], "a-c,f"), ([25, 26], "z-a2"), ([3, 3], "d")]
)
def test_arrivals_are_lettered(numbers: list[int], text: str) -> None:
    assert letters(numbers) == text


@pytest.mark.parametrize(
    ("columns", "said"), [("256", "the longer of copies and matmul,"), ("8192", "the longer of the two,")]
)
def test_an_ideal_below_the_drawn_collective_says_that_it_is_of_copies(columns: str, said: str) -> None:
    sizes = ("--ranks", "2", "--rows", "32768", "--inner", "8192", "--columns", columns)
    done = counterpoint("schedule", "show", "all_gather_matmul", *sizes)
    assert said in done.stdout
