"""All-to-alls of expert layers: what is recognised in a step, what operators of it cost, and what the planner says of it."""

from pathlib import Path

import msgspec
import pytest

from counterpoint import Simulator, load_machine, measure
from counterpoint.controls import OverlapMatmul
from counterpoint.errors import StepError, WorkloadError
from counterpoint.plan import LEAVE_IT, Directive, Match, Plan
from counterpoint.planner import tune
from counterpoint.planner.movements import propose_overlaps
from counterpoint.sim.calibration import load_calibration
from counterpoint.sim.costs import CostModel
from counterpoint.sim.expert_layers import ExpertExchange, ExpertLayers, ExpertModel, issued_sooner_us
from counterpoint.step import Collective, Copy, Dependency, Footprint, Kernel, Operation, Step, UnevenParts
from counterpoint.workloads import load_workload

H200 = load_machine("h200")
CALIBRATION = load_calibration(H200)
GROUPED = Footprint(num_ctas=132, threads_per_cta=384, registers_per_thread=168, dynamic_shared_bytes=213_000)
PLAIN = Footprint(num_ctas=132 * 16, threads_per_cta=128, registers_per_thread=32)
OUT = UnevenParts(sent_bytes=(100_000_000, 300_000_000), received_bytes=(100_000_000, 50_000_000), group_rank=0)
BACK = UnevenParts(sent_bytes=OUT.received_bytes, received_bytes=OUT.sent_bytes, group_rank=0)
COUNTS = UnevenParts(sent_bytes=(256, 256), received_bytes=(256, 256), group_rank=0)


def exchange(parts: UnevenParts, *after: int, wait_us: float = 0.0) -> Collective:
    return Collective(
        name="ncclDevKernel_SendRecv",
        stream=1,
        collective="all_to_all",
        num_bytes=max(sum(parts.sent_bytes), sum(parts.received_bytes)),
        group_size=len(parts.sent_bytes),
        process_group="ep",
        parts=parts,
        peer_wait_us=wait_us,
        waits_for=tuple(Dependency(operation=each) for each in after),
    )


def kernel(name: str, *after: int, lone_us: float = 100.0) -> Kernel:
    is_matmul = name == "grouped"
    return Kernel(
        name=name,
        stream=0,
        footprint=GROUPED if is_matmul else PLAIN,
        character="matmul" if is_matmul else "streaming",
        lone_us=lone_us,
        waits_for=tuple(Dependency(operation=each) for each in after),
    )


def step_of(*operations: Operation) -> Step:
    num_ranks = max(each.group_size for each in operations if isinstance(each, Collective))
    return Step(name="experts", num_ranks=num_ranks, operations=operations)


def expert_step(out: UnevenParts = OUT, back: UnevenParts = BACK, matmul_us: float = 900.0) -> Step:
    return step_of(
        kernel("router"),
        exchange(COUNTS, 0),
        exchange(out, 1),
        kernel("index_kernel", 2, lone_us=150.0),
        kernel("grouped", lone_us=matmul_us),
        kernel("silu"),
        kernel("grouped", lone_us=matmul_us),
        kernel("index_put_kernel", lone_us=300.0),
        exchange(back, 7),
        kernel("norm", 8),
    )


def experts_plan(step: Step) -> Plan:
    (candidate,) = propose_overlaps(step, H200).candidates
    return Plan(directives=candidate.directives)


def test_a_layer_is_found_with_what_falls_away() -> None:
    (layer,) = ExpertLayers(expert_step()).found
    assert (layer.dispatch, layer.combine, layer.counts) == (2, 8, 1)
    assert layer.matmuls == (4, 6)
    assert layer.reorders == (3, 7)


def test_all_but_the_first_or_last_groups_rows_travel_beside_matmuls() -> None:
    step = expert_step()
    costs = CostModel(H200, CALIBRATION)
    dispatch, combine = step.operations[2], step.operations[8]
    assert isinstance(dispatch, Collective)
    assert isinstance(combine, Collective)
    found = [ExpertModel(step, costs, CALIBRATION).estimate(index) for index in (2, 8)]
    exposed_us = [each.exposed_us for each in found if isinstance(each, ExpertExchange)]
    assert exposed_us[0] == pytest.approx(costs.copied_us(dispatch) / 6)  # 4 groups, 1 to 2 to 2 to 1, for 300 MB
    assert exposed_us[1] == pytest.approx(costs.copied_us(combine) / 6), "own results are copied beside the last group's"
    before = measure(Simulator().run(step, H200, LEAVE_IT))
    after = measure(Simulator().run(step, H200, experts_plan(step)))
    hidden_us = costs.lone_us(dispatch) + costs.lone_us(combine) - sum(exposed_us)
    assert before.makespan_us - after.makespan_us == pytest.approx(450.0 + hidden_us, rel=0.05)


def test_the_host_issues_what_follows_sooner_where_one_launch_does_for_many_matmuls() -> None:
    """16 matmuls with fills of their workspace, 20 us apart; what follows a wait for the GPU is issued no sooner."""
    fill = Copy(name="Memset (Device)", stream=0, direction="set", num_bytes=4)
    matmuls = [each for _ in range(16) for each in (fill, kernel("grouped", lone_us=2.0))]
    issued = [msgspec.structs.replace(each, issued_us=2_000.0 + 10.0 * number) for number, each in enumerate(matmuls)]
    end_us = issued[-1].issued_us
    assert end_us is not None
    after = msgspec.structs.replace(exchange(BACK, len(issued)), issued_us=end_us + 50.0)
    late = msgspec.structs.replace(kernel("norm", len(issued) + 1), issued_us=100.0, issued_after=len(issued) + 1)
    step = step_of(exchange(OUT), *issued, after, kernel("silu"), late)
    runs = ExpertLayers(step).runs()
    assert runs == [tuple(range(2, 34, 2))]
    spared_us = 15 * 20.0
    assert issued_sooner_us(step, runs)[-4:] == [spared_us, spared_us, spared_us, 0.0]
    plan = experts_plan(step)
    timelines = [Simulator().run(step, H200, each) for each in (LEAVE_IT, plan)]
    starts = [{each.operation: each.start_us for each in timeline.intervals} for timeline in timelines]
    assert starts[0][32] == pytest.approx(end_us, abs=20)
    assert starts[1][32] < starts[0][32] - 0.6 * spared_us  # kernels take as long as before


def test_own_results_that_take_longer_than_the_last_groups_way_back_are_exposed() -> None:
    out = UnevenParts(sent_bytes=(2_000_000_000, 200_000_000), received_bytes=(2_000_000_000, 90_000_000), group_rank=0)
    back = UnevenParts(sent_bytes=out.received_bytes, received_bytes=out.sent_bytes, group_rank=0)
    costs = CostModel(H200, CALIBRATION)
    found = ExpertModel(expert_step(out, back), costs, CALIBRATION).estimate(8)
    assert isinstance(found, ExpertExchange)
    assert found.exposed_us == pytest.approx(2 * 2e9 / costs.hbm_bytes_per_s * 1e6)


def test_the_busiest_port_of_a_rank_counts_beside_its_busiest_pair() -> None:
    """Nine ranks: 30 MiB for each pair are enough only because a rank sends, or receives, eight times as much."""
    few, many = (0, *[1 << 20] * 8), (0, *[30 << 20] * 8)
    for sent, received, is_enough in ((many, few, True), (few, many, True), ((0, 30 << 20, *[0] * 7), few, False)):
        out = UnevenParts(sent_bytes=sent, received_bytes=received, group_rank=0)
        back = UnevenParts(sent_bytes=received, received_bytes=sent, group_rank=0)
        found = ExpertModel(expert_step(out, back), CostModel(H200, CALIBRATION), CALIBRATION).estimate(2)
        assert isinstance(found, ExpertExchange) == is_enough, found


def test_short_matmuls_hide_as_much_as_they_take() -> None:
    step = expert_step(matmul_us=100.0)
    costs = CostModel(H200, CALIBRATION)
    found = ExpertModel(step, costs, CALIBRATION).estimate(2)
    dispatch = step.operations[2]
    assert isinstance(found, ExpertExchange)
    assert isinstance(dispatch, Collective)
    assert found.exposed_us == pytest.approx(costs.copied_us(dispatch) - 200.0 * 5 / 6)


def test_waits_for_other_ranks_stay() -> None:
    late = expert_step()
    operations = list(late.operations)
    operations[2] = exchange(OUT, 1, wait_us=1000.0)
    waiting = step_of(*operations)
    plan = experts_plan(late)
    longer_us = [measure(Simulator().run(each, H200, plan)).makespan_us for each in (late, waiting)]
    assert longer_us[1] - longer_us[0] == pytest.approx(1000.0, rel=0.01)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (expert_step(back=msgspec.structs.replace(BACK, sent_bytes=(1, 1))), "no all-to-all returns"),
        (step_of(kernel("router"), exchange(OUT, 0), kernel("norm", 1), exchange(BACK, 2)), "no all-to-all returns"),
    ],
)
def test_all_to_alls_that_bring_nothing_to_experts_are_told_apart(step: Step, said: str) -> None:
    layers = ExpertLayers(step)
    assert not layers.found
    assert all(said in reason for reason in layers.obstacles.values())
    plan = Plan(directives=(Directive(match=Match(collective="all_to_all"), controls=(OverlapMatmul(),), reason="a test"),))
    with pytest.raises(Exception, match="cannot apply"):
        Simulator().run(step, H200, plan)


def test_small_exchanges_are_refused() -> None:
    small = UnevenParts(sent_bytes=(100_000, 200_000), received_bytes=(100_000, 50_000), group_rank=0)
    back = UnevenParts(sent_bytes=small.received_bytes, received_bytes=small.sent_bytes, group_rank=0)
    found = propose_overlaps(expert_step(small, back), H200)
    assert not found.candidates
    assert any("all-to-all is faster" in each.reason for each in found.refusals)


def test_the_plan_names_all_to_alls_and_none_by_number() -> None:
    tuning = tune(expert_step(), H200, Simulator())
    (directive,) = [each for each in tuning.plan.directives if each.controls == (OverlapMatmul(),)]
    assert directive.match == Match(kind="communication", collective="all_to_all")
    assert "ops.expert_ffn" in directive.reason


def test_the_slowest_pair_sets_the_time() -> None:
    costs = CostModel(H200, CALIBRATION)
    total = 300_000_000
    even = exchange(UnevenParts(sent_bytes=(total // 2,) * 2, received_bytes=(total // 2,) * 2, group_rank=0))
    skewed = exchange(UnevenParts(sent_bytes=(0, total), received_bytes=(0, 0), group_rank=0))
    kept = exchange(UnevenParts(sent_bytes=(total, 0), received_bytes=(total, 0), group_rank=0))
    unknown = msgspec.structs.replace(even, parts=None)
    assert costs.lone_us(even) == costs.lone_us(unknown)
    assert costs.lone_us(skewed) == pytest.approx(2 * costs.lone_us(even), rel=0.1)
    assert costs.copied_us(skewed) == pytest.approx(2 * costs.copied_us(even), rel=0.1)
    assert costs.copied_us(kept) < 20 < costs.lone_us(kept)  # copies leave it where it is


@pytest.mark.parametrize(("sent", "received", "rank"), [((1, 2), (1,), 0), ((1, 2), (1, 2), 2), ((1, -2), (1, 2), 0)])
def test_parts_that_are_none_are_refused(sent: tuple[int, ...], received: tuple[int, ...], rank: int) -> None:
    with pytest.raises(StepError, match="Uneven parts"):
        UnevenParts(sent_bytes=sent, received_bytes=received, group_rank=rank)


ALL_TO_ALL = """
name = "experts"
num_ranks = 2
[[collectives]]
name = "dispatch"
stream = 1
collective = "all_to_all"
bytes = "300 MB"
"""


def test_a_workload_states_the_parts(tmp_path: Path) -> None:
    path = tmp_path / "experts.toml"
    path.write_text(ALL_TO_ALL + 'sent = ["100 MB", "200 MB"]\nreceived = ["100 MB", 0]\n')
    (operation,) = load_workload(path).operations
    assert isinstance(operation, Collective)
    assert operation.parts == UnevenParts(sent_bytes=(10**8, 2 * 10**8), received_bytes=(10**8, 0), group_rank=0)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ('sent = ["100 MB", "100 MB"]\nreceived = ["100 MB", 0]\n', "bytes must be the larger"),
        ('sent = ["300 MB"]\nreceived = ["300 MB"]\n', "a size for each of 2 ranks"),
        ('sent = ["100 MB", "200 MB"]\n', "a size for each rank in both"),
    ],
)
def test_a_workload_with_parts_that_do_not_fit_is_refused(tmp_path: Path, parts: str, said: str) -> None:
    path = tmp_path / "experts.toml"
    path.write_text(ALL_TO_ALL + parts)
    with pytest.raises(WorkloadError, match=said):
        load_workload(path)


def megatron_step(rows_back: UnevenParts = BACK) -> Step:
    """Probabilities travel after the tokens, and matmuls of single experts are on two streams, as TransformerEngine's."""
    probs = UnevenParts(sent_bytes=(100_000, 300_000), received_bytes=(100_000, 50_000), group_rank=0)
    operations: list[Operation] = [
        kernel("router"),
        exchange(OUT, 0),
        exchange(probs),
        kernel("_sort_chunks_by_map_kernel", 2, lone_us=150.0),
    ]
    operations += [msgspec.structs.replace(kernel("grouped", 3, lone_us=450.0), stream=2 + place % 2) for place in range(4)]
    operations += [
        kernel("_sort_chunks_by_map_kernel", 4, 5, 6, 7, lone_us=150.0),
        exchange(rows_back, 8),
        kernel("norm", 9),
    ]
    own_stream = [msgspec.structs.replace(each, stream=0) if isinstance(each, Collective) else each for each in operations]
    return step_of(*own_stream)


def test_what_goes_with_tokens_and_several_streams_belong_to_a_layer() -> None:
    step = megatron_step()
    (layer,) = ExpertLayers(step).found
    assert (layer.dispatch, layer.combine, layer.companions) == (1, 9, (2,))
    assert layer.matmuls == (4, 5, 6, 7)
    assert layer.reorders == (3, 8)
    (candidate,) = propose_overlaps(step, H200).candidates
    assert candidate.directives[0].match.operations == (1, 2, 9)
    before, after = (
        measure(Simulator().run(step, H200, plan)).makespan_us for plan in (LEAVE_IT, Plan(directives=candidate.directives))
    )
    assert before - after > 300, "rows need no reordering, and travel beside matmuls"


def test_other_small_exchanges_do_not_go_with_tokens() -> None:
    """Counts are not spread as tokens are, and what is nearly as large as the tokens is no companion."""
    assert not COUNTS.goes_with(OUT)
    assert not OUT.goes_with(OUT)
    assert not BACK.goes_with(OUT)
    few = UnevenParts(sent_bytes=(0, 0), received_bytes=(0, 0), group_rank=0)
    assert not few.goes_with(OUT)
    even = UnevenParts(sent_bytes=(100_000_000, 100_000_000), received_bytes=(100_000_000, 100_000_000), group_rank=0)
    assert COUNTS.goes_with(even)
    for step in (expert_step(), expert_step(even, even)):
        (layer,) = ExpertLayers(step).found
        assert (layer.companions, layer.counts) == ((), 1), "equal parts of a few bytes are counts"


def test_matmuls_on_several_streams_hide_what_the_longest_stream_takes() -> None:
    step, costs = megatron_step(), CostModel(H200, CALIBRATION)
    found = ExpertModel(step, costs, CALIBRATION).estimate(1)
    dispatch = step.operations[1]
    assert isinstance(found, ExpertExchange)
    assert isinstance(dispatch, Collective)
    assert found.exposed_us == pytest.approx(max(costs.copied_us(dispatch) / 6, costs.copied_us(dispatch) - 900.0 * 5 / 6))
