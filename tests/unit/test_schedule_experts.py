"""Schedules of experts' operators: right for any routing, and the checks find what is wrong with one that is not."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_expert_layout import routings

from counterpoint import load_machine
from counterpoint.errors import ScheduleError
from counterpoint.schedule import Action, CopySchedule, Problem, ScheduleDescription
from counterpoint.schedule.actions import ExpertOperation, Pass
from counterpoint.schedule.checks import CHECKS, check_schedule
from counterpoint.schedule.costs import Clock
from counterpoint.schedule.expert_choice import expert_description, pick_exchange, rank_expert_schedules
from counterpoint.schedule.expert_estimate import (
    estimate_experts,
    estimate_experts_ideal,
    estimate_experts_sequential,
    expert_computation_us,
)
from counterpoint.schedule.expert_schedules import STAGES, ExpertProblem, make_expert_schedule
from counterpoint.schedule.program import make_program
from counterpoint.schedule.routing import Routing, example_routing, read_routing
from helpers.command import counterpoint, refusal

H200 = load_machine("h200")
NUM_EXCHANGES = {
    ("dispatch_grouped_matmul", "forward"): 1,
    ("grouped_matmul_combine", "forward"): 1,
    ("expert_ffn", "forward"): 2,
    ("dispatch_grouped_matmul", "backward"): 2,  # tokens again, and gradients back
    ("grouped_matmul_combine", "backward"): 1,
    ("expert_ffn", "backward"): 3,  # gradients there, tokens again, and gradients back
}
ROUTING = Routing(counts=((3, 0, 2, 5), (1, 2, 0, 4)))


def problem(
    operation: ExpertOperation = "expert_ffn", routing: Routing = ROUTING, direction: Pass = "forward"
) -> ExpertProblem:
    return ExpertProblem(operation=operation, routing=routing, num_inner=16, num_hidden=8, direction=direction)


def scheduled(operation: ExpertOperation = "expert_ffn", direction: Pass = "forward") -> CopySchedule:
    return make_expert_schedule(problem(operation, direction=direction), expert_description(num_groups=2))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(STAGES)), routings(), st.integers(1, 6))
def test_any_routing_is_delivered(which: tuple[ExpertOperation, Pass], routing: Routing, num_groups: int) -> None:
    operation, direction = which
    asked = problem(operation, routing, direction)
    schedule = make_expert_schedule(asked, expert_description(num_groups))
    check_schedule(schedule)
    for rank in range(routing.num_ranks):
        make_program(schedule, rank)
    moved = sum(region.num_rows for action in schedule.actions if action.kind == "copy" for region in action.reads)
    crossing = sum(routing.num_landing(rank) for rank in range(routing.num_ranks))
    assert moved == crossing * NUM_EXCHANGES[operation, direction]


def changed(schedule: CopySchedule, number: int, **changes: object) -> CopySchedule:
    actions = list(schedule.actions)
    actions[number] = msgspec.structs.replace(actions[number], **changes)
    return msgspec.structs.replace(schedule, actions=tuple(actions))


def first(schedule: CopySchedule, kind: str, buffer: str) -> tuple[int, Action]:
    return next(
        (number, action)
        for number, action in enumerate(schedule.actions)
        if action.kind == kind and action.reads[0].buffer == buffer
    )


def faults_of(schedule: CopySchedule, check: str) -> list[str]:
    return list(dict(CHECKS)[check](schedule))


def test_a_row_that_is_not_sent_is_found() -> None:
    schedule = scheduled()
    number, copy = first(schedule, "copy", "tokens")
    shorter = [msgspec.structs.replace(each, stop=each.stop - 1) for each in (copy.reads[0], copy.writes[0])]
    short = changed(schedule, number, reads=(shorter[0], *copy.reads[1:]), writes=(shorter[1], *copy.writes[1:]))
    assert any("may not be written yet" in fault for fault in faults_of(short, "buffers"))
    assert any("is not what expert_ffn defines" in fault for fault in faults_of(short, "delivery"))


def test_the_wrong_experts_weight_is_found() -> None:
    schedule = scheduled("dispatch_grouped_matmul")
    number, matmul = first(schedule, "matmul", "landed")
    wrong = changed(schedule, number, expert_rows=matmul.expert_rows[::-1])
    assert any("is not what" in fault for fault in faults_of(wrong, "delivery"))


def test_a_piece_that_waits_for_its_own_result_is_found() -> None:
    """The destination would compute after the result's copy, which waits for that computation: nobody could go on."""
    schedule = scheduled()
    number, _ = first(schedule, "matmul", "landed")
    back, _ = first(schedule, "copy", "partial")
    assert any("does not precede it" in fault for fault in faults_of(changed(schedule, number, after=(back,)), "order"))


def test_a_piece_that_does_not_wait_is_found() -> None:
    schedule = scheduled()
    number, _ = first(schedule, "matmul", "landed")
    assert faults_of(changed(schedule, number, after=()), "buffers")


def test_gradients_travel_behind_the_backward_matmuls() -> None:
    """A group's gradients leave before the next group is multiplied, and before the gradients of weights."""
    for operation in ("expert_ffn", "dispatch_grouped_matmul"):
        schedule = scheduled(operation, direction="backward")
        own = [(number, schedule.actions[number]) for number in schedule.of_rank(0)]
        multiplied = [number for number, action in own if action.writes and action.writes[0].buffer == "partial"]
        (first_back, copy), (second_back, _) = (
            (number, action) for number, action in own if action.kind == "copy" and action.reads[0].buffer == "partial"
        )
        of_weights = [number for number, action in own if action.kind == "weight_gradient"]
        assert multiplied[0] in copy.after
        assert first_back < multiplied[1] < second_back < min(of_weights)
        again = [number for number, action in own if action.kind == "copy" and action.reads[0].buffer == "tokens"]
        assert max(again) < multiplied[0], "tokens travel beside all matmuls of groups"
    combine = scheduled("grouped_matmul_combine", direction="backward")
    first_matmul, _ = first(combine, "matmul", "landed")
    waits = [combine.actions[number].writes[0].buffer for number in combine.actions[first_matmul].after]
    assert waits == ["landed"] * len(waits)
    assert len(waits) < sum(action.kind in ("copy", "place") and action.writes[0].rank == 0 for action in combine.actions)


@pytest.mark.parametrize("buffer", ["landed", "again"])
def test_a_gradient_of_weights_that_does_not_wait_or_lacks_rows_is_found(buffer: str) -> None:
    schedule = scheduled(direction="backward")
    number, action = next(
        (number, action)
        for number, action in enumerate(schedule.actions)
        if action.kind == "weight_gradient" and buffer in {each.buffer for each in action.reads}
    )
    shorter = tuple(msgspec.structs.replace(each, stop=each.stop - 1) for each in action.reads)
    assert any(
        "gradients of weights of rank" in each for each in faults_of(changed(schedule, number, reads=shorter), "delivery")
    )
    if buffer == "again":
        assert any("may not be written" in each for each in faults_of(changed(schedule, number, after=()), "buffers"))


def test_rows_beyond_a_ranks_own_memory_are_found() -> None:
    schedule = scheduled()
    number, copy = first(schedule, "copy", "tokens")
    target = copy.writes[-1]
    num_rows = schedule.buffer("landed").rows_of(target.rank)
    beyond = msgspec.structs.replace(target, start=num_rows - target.num_rows + 1, stop=num_rows + 1)
    wrong = changed(schedule, number, writes=(*copy.writes[:-1], beyond))
    assert any("touches rows" in fault for fault in faults_of(wrong, "buffers"))


def test_results_of_a_group_leave_while_the_next_is_computed() -> None:
    schedule = scheduled()
    own = [(number, schedule.actions[number]) for number in schedule.of_rank(0)]
    matmuls = [number for number, action in own if action.kind == "matmul"]
    back, copy = next(
        (number, action) for number, action in own if action.kind == "copy" and action.reads[0].buffer == "partial"
    )
    assert matmuls[1] in copy.after
    assert back < matmuls[2]


@pytest.mark.parametrize(
    "description",
    [
        ScheduleDescription(pattern="ring"),
        ScheduleDescription(pattern="all_peers", along="columns", matmul="fused"),
        ScheduleDescription(pattern="all_peers", along="experts", matmul="fused", num_compute_streams=2),
    ],
)
def test_choices_without_a_use_for_experts_are_refused(description: ScheduleDescription) -> None:
    with pytest.raises(ScheduleError, match="xperts"):
        make_expert_schedule(problem(), description)


@pytest.mark.parametrize("kind", ["balanced", "zipf", "one-hot"])
def test_example_routings_send_every_row_once(kind: str) -> None:
    routing = example_routing(kind, num_ranks=4, num_rows=1000, num_experts=16)  # type: ignore[arg-type]
    assert [routing.num_sent(rank) for rank in range(4)] == [1000] * 4
    imbalances = {"balanced": 1.0, "one-hot": 4.0}  # the rank that computes most, over the mean
    most = max(routing.num_grouped(rank) for rank in range(4))
    assert most / 1000 == pytest.approx(imbalances.get(kind, 1.5), rel=0.3 if kind == "zipf" else 0.01)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "is not a routing"),
        ("[[1, 2], [3, 4.5]]", "is not a routing"),
        ("[[1, 2], [3]]", "found 1 counts of rank 1"),
        ("[[1, 2], [3, -4]]", "found -4 of rank 1"),
    ],
)
def test_files_without_a_routing_are_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "routing.json"
    path.write_text(text)
    with pytest.raises(ScheduleError, match=said):
        read_routing(path)


def test_the_table_sends_little_by_the_library() -> None:
    routing = example_routing("zipf", num_ranks=2, num_rows=8192, num_experts=8)
    assert pick_exchange(routing, 128, H200.link).description.is_sequential
    large = pick_exchange(routing, 1 << 16, H200.link)
    assert large.description.chunks == 4
    assert "measured with 2 ranks" in large.reason
    nothing = Routing(counts=((5, 0), (0, 5)))
    assert pick_exchange(nothing, 1 << 30, H200.link).description.is_sequential


def test_copies_have_one_stream_behind_a_switch_and_one_for_each_peer_on_direct_links() -> None:
    routing = example_routing("balanced", num_ranks=4, num_rows=8192, num_experts=8)
    for machine, names in ((H200, {"copy 0"}), (load_machine("mi300x"), {"copy 0", "copy 1", "copy 2"})):
        description = pick_exchange(routing, 1 << 16, machine.link).description
        made = make_expert_schedule(problem(routing=routing), description)
        assert {each.stream for each in made.actions if each.kind == "copy"} == names
        assert {each.description.num_copy_streams for each in rank_expert_schedules(problem(routing=routing), machine)} == {
            len(names)
        }


@pytest.mark.parametrize(("operation", "direction"), sorted(STAGES))
def test_an_operator_is_estimated_between_ideal_and_sequential(operation: ExpertOperation, direction: Pass) -> None:
    for kind in ("balanced", "zipf", "one-hot"):
        routing = example_routing(kind, num_ranks=2, num_rows=65536, num_experts=32)  # type: ignore[arg-type]
        asked = ExpertProblem(operation=operation, routing=routing, num_inner=2048, num_hidden=1408, direction=direction)
        best = rank_expert_schedules(asked, H200)[0].estimated_us
        assert estimate_experts_ideal(asked, H200) < best < estimate_experts_sequential(asked, H200)


@pytest.mark.parametrize(("operation", "direction"), sorted(STAGES))
def test_no_schedule_is_estimated_faster_than_ideal_if_one_rank_sends_most(
    operation: ExpertOperation, direction: Pass
) -> None:
    one_way = Routing(counts=((7,) * 8, (60000, *(7,) * 7)))  # rows leave by one port and come back by the other
    for machine, num_inner, num_hidden in (("mi300x", 1024, 128), ("h200", 256, 14336), ("a40", 4096, 128)):
        asked = ExpertProblem(
            operation=operation, routing=one_way, num_inner=num_inner, num_hidden=num_hidden, direction=direction
        )
        best = rank_expert_schedules(asked, load_machine(machine))[0]
        assert estimate_experts_ideal(asked, load_machine(machine)) <= best.estimated_us


def test_groups_of_uneven_experts_have_no_fewer_tiles_than_all_together() -> None:
    rows = (1100, 1990, 40, 1203, 301, 1800, 5, 700)
    routing = Routing(counts=((*rows, *rows[::-1]), (*rows[::-1], *rows)))
    asked = ExpertProblem(operation="dispatch_grouped_matmul", routing=routing, num_inner=1024, num_hidden=14336)
    for machine in ("a100", "h200", "a40"):
        best = rank_expert_schedules(asked, load_machine(machine))[0]
        assert expert_computation_us(asked, load_machine(machine)) <= best.estimated_us
    together, apart = (
        sum(
            Clock(
                Problem(operation="all_to_all_matmul", num_ranks=2, num_rows=8192, num_inner=1024, num_columns=14336), H200
            )
            .grouped_piece(part, 1024, 14336)
            .num_tiles
            for part in parts
        )
        for parts in ([rows], [rows[:4], rows[4:]])
    )
    assert together == apart


def test_gradients_of_weights_take_as_long_in_a_schedule_as_alone() -> None:
    kept = Routing(counts=((300, 0), (0, 300)))  # no row travels, so nothing but computation takes time
    asked = ExpertProblem(
        operation="grouped_matmul_combine", routing=kept, num_inner=256, num_hidden=14336, direction="backward"
    )
    schedule = make_expert_schedule(asked, expert_description(1))
    spans = estimate_experts(schedule, asked, H200).spans
    computed = [
        span.end_us - span.start_us
        for action, span in zip(schedule.actions, spans, strict=True)
        if action.rank == 0 and action.kind in ("matmul", "activate", "weight_gradient")
    ]
    assert sum(computed) == pytest.approx(expert_computation_us(asked, H200), rel=0.03)


def test_the_command_draws_a_routing_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "routing.json"
    path.write_text("[[30, 0, 20, 50], [10, 20, 0, 40]]")
    sizes = ["--ranks", "2", "--rows", "100", "--inner", "64", "--hidden", "32", "--experts", "4"]
    command = ("schedule", "experts", "expert_ffn", *sizes, "--routing", str(path))
    done = counterpoint(*command, "--groups", "2", COLUMNS="110")
    assert done.returncode == 0, done.stderr
    assert "all_peers/2 experts fused 1+1" in done.stdout
    assert "a call with gradients uses sequential: the busiest pair" in " ".join(done.stdout.split())
    assert max(map(len, done.stdout.splitlines())) <= 110
    summary = msgspec.json.decode(counterpoint(*command, "--json").stdout)
    assert summary["problem"]["routing"]["counts"] == [[30, 0, 20, 50], [10, 20, 0, 40]]
    said = refusal(*command, "--rows", "7")
    assert "is for 2 ranks of at most 100 rows, and 4 experts; --ranks is 2, --rows 7 and --experts 4. Give" in said


def test_the_command_draws_a_routing_without_rows() -> None:
    sizes = ["--ranks", "2", "--rows", "0", "--inner", "64", "--hidden", "32", "--experts", "4"]
    done = counterpoint("schedule", "experts", "expert_ffn", *sizes)
    assert done.returncode == 0, done.stderr
    assert "sequential" in done.stdout
    assert "%" not in done.stdout, "no share of nothing"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--experts", "5"], "Name a multiple of the number of ranks"),
        (["--experts", "4", "--rows", "-1"], "--rows must be from 0"),
        (["--experts", "4", "--hidden", "0"], "--hidden must be from 1"),
        (["--experts", "4", "--routing", "nowhere.json"], "nowhere.json"),
        (["--experts", "4", "--groups", "0"], "--groups of a schedule must be from 1 to 64; found 0"),
        (
            ["--experts", "4", "--groups", "3"],
            "--groups must be from 1 to 2, the experts of a rank, because none has the 4,096",
        ),
        (["--experts", "4", "--rank", "2"], "must be from 0 to 1"),
    ],
)
def test_bad_options_end_in_one_line(options: list[str], said: str) -> None:
    sizes = ["--ranks", "2", "--rows", "100", "--inner", "64", "--hidden", "32"]
    assert said in refusal("schedule", "experts", "expert_ffn", *sizes, *options)
