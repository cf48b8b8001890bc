"""What people read: lanes that show the union of what ran, and lines that fit, in whole words and right numbers."""

import io
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from counterpoint import load_machine
from counterpoint.controls import CommunicationCtas, Control, HeadStart, Priority, ResidencyCap, Transport
from counterpoint.plan import Directive, Expectation, Match, Plan, Refusal
from counterpoint.planner import Trial
from counterpoint.report import text
from counterpoint.report.lanes import ASCII_BLOCKS, BLOCKS, Lane, draw_lanes
from counterpoint.report.refusals import merge_alike, print_left_out
from counterpoint.step import Collective, Copy, Footprint, Kernel, OperationKind, Step
from counterpoint.supervised.settings import CANDIDATE, UNTRIED
from counterpoint.timeline import Interval, Timeline
from counterpoint.units import format_change, format_percent

FILL = "_ZN2at6native29vectorized_elementwise_kernelILi8ENS0_11FillFunctorIN3c108BFloat16EEESt5arrayIPcLm1EEEEviT0_T1_"
LONG_NAME = "void at::native::elementwise_kernel<128, 4, " + "at::native::gpu_kernel_impl<" * 20
Span = tuple[OperationKind, float, float]


def timeline(*spans: Span, rank: int = 0) -> Timeline:
    intervals = tuple(
        Interval(rank=rank, stream=index, operation=index, name="x", kind=kind, start_us=start_us, end_us=end_us)
        for index, (kind, start_us, end_us) in enumerate(spans)
    )
    return Timeline(step_name="made up", origin="simulated", intervals=intervals)


def console(width: int = 80, encoding: str = "utf-8") -> tuple[Console, io.TextIOWrapper]:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    return Console(file=file, width=width, markup=False, emoji=False), file


def printed(file: io.TextIOWrapper) -> str:
    file.seek(0)
    return file.read()


def printed_plan(plan: Plan, width: int = 200) -> str:
    out, file = console(width)
    text.print_plan(out, plan)
    print_left_out(out, plan)
    return printed(file)


def step(num_kernels: int, num_collectives: int, num_copies: int, num_ranks: int) -> Step:
    footprint = Footprint(num_ctas=1, threads_per_cta=32, registers_per_thread=16)
    kernels = [Kernel(name="k", stream=0, footprint=footprint, lone_us=1) for _ in range(num_kernels)]
    collectives = [
        Collective(name="c", stream=1, collective="all_reduce", num_bytes=1 << 20, group_size=2)
        for _ in range(num_collectives)
    ]
    copies = [Copy(name="m", stream=0, direction="device_to_device", num_bytes=1) for _ in range(num_copies)]
    return Step(name="made up", num_ranks=num_ranks, operations=(*kernels, *collectives, *copies))


def test_each_column_shows_the_share_of_it_that_was_busy() -> None:
    spans: list[Span] = [("computation", 0, 15), ("computation", 30, 35), ("communication", 10, 20)]
    computation, communication = draw_lanes(timeline(*spans), num_columns=4, total_us=40)
    assert computation.busy == pytest.approx((1, 0.5, 0, 0.5))
    assert communication.busy == pytest.approx((0, 1, 0, 0))
    assert computation.text() == "█▄ ▄"


def test_overlapping_intervals_of_one_row_count_once() -> None:
    spans: list[Span] = [("computation", 0, 6), ("computation", 2, 8), ("computation", 3, 4), ("computation", 8, 9)]
    computation, communication = draw_lanes(timeline(*spans), num_columns=1, total_us=10)
    assert computation.busy == pytest.approx((0.9,))
    assert communication.busy == (0,)


def test_copies_and_other_ranks_are_not_drawn() -> None:
    other = timeline(("computation", 0, 10), rank=3)
    both = Timeline(
        step_name="x", origin="simulated", intervals=(*timeline(("copy", 0, 10), rank=1).intervals, *other.intervals)
    )
    assert [lane.busy for lane in draw_lanes(both, 2, 10)] == [(0, 0), (0, 0)]


def test_anything_busy_shows_and_nothing_busy_does_not() -> None:
    lane = Lane(kind="computation", busy=(0.0, 0.01, 0.5, 1.0))
    assert lane.text() == " ▁▄█"
    assert lane.text(ASCII_BLOCKS) == " .=#"
    assert len(BLOCKS) == len(ASCII_BLOCKS) == 9


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)).map(sorted), min_size=1, max_size=8),
    st.integers(1, 130),
)
def test_columns_add_up_to_the_union(spans: list[list[float]], num_columns: int) -> None:
    """The union is measured by sampling edges, not as the code does it."""
    drawn = timeline(*[("computation", start, end) for start, end in spans])
    lane = draw_lanes(drawn, num_columns, 100.0)[0]
    edges = sorted({edge for span in spans for edge in span})
    covered = sum(
        right - left for left, right in pairwise(edges) if any(start <= (left + right) / 2 <= end for start, end in spans)
    )
    assert sum(lane.busy) * 100 / num_columns == pytest.approx(covered, abs=1e-6)
    assert len(lane.busy) == num_columns


@pytest.mark.parametrize("width", [20, 40, 60, 80, 300])
def test_lanes_fit_the_console_and_share_one_scale(width: int) -> None:
    out, file = console(width)
    spans: list[Span] = [("computation", 0, 80), ("communication", 40, 100)]
    text.print_lanes(out, [("before", timeline(*spans)), ("after", timeline(("computation", 0, 50)))])
    before, communication, exposed, after, *_ = printed(file).splitlines()
    assert max(map(len, printed(file).splitlines())) <= max(width, 60)
    if width >= 40:
        assert before.count("█") == pytest.approx(communication.count("█") * 80 / 60, abs=2)
        assert exposed.count("█") == pytest.approx(before.count("█") * 20 / 80, abs=2)
        assert after.count("█") == pytest.approx(before.count("█") * 50 / 80, abs=2)


def test_lanes_on_a_console_without_utf8_are_ascii() -> None:
    out, file = console(encoding="ascii")
    text.print_lanes(out, [("as it is", timeline(("computation", 0, 50), ("communication", 0, 100)))])
    assert "#" in printed(file)
    assert printed(file).isascii()


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        ((1, 1, 1, 1), "made up: 1 kernel, 1 collective of 1 MiB in all, 1 copy or fill; 1 rank"),
        ((2, 2, 2, 2), "made up: 2 kernels, 2 collectives of 2 MiB in all, 2 copies and fills; 2 ranks"),
        ((2, 0, 0, 1), "made up: 2 kernels, 0 collectives; 1 rank"),
    ],
)
def test_counts_read_well(counts: tuple[int, int, int, int], says: str) -> None:
    out, file = console(200)
    text.print_step(out, step(*counts), load_machine("h200"))
    assert printed(file).splitlines() == [says, "on 8 x NVIDIA H200 141 GB SXM, NVSwitch", ""]


def test_notes_stand_apart_from_the_table_that_follows() -> None:
    out, file = console(200)
    text.print_step(out, step(1, 1, 0, 2), load_machine("h200"), notes=["one", "two"])
    assert printed(file).splitlines()[2:] == [" - one", " - two", ""]


@pytest.mark.parametrize(
    ("control", "says"),
    [
        (
            ResidencyCap(ctas_per_sm=1, dynamic_shared_bytes=115_713),
            "cap of 1 CTA per SM (115,713 B of shared memory, carveout 100 %)",
        ),
        (ResidencyCap(ctas_per_sm=2, dynamic_shared_bytes=1), "cap of 2 CTAs per SM (1 B of shared memory, carveout 100 %)"),
        (
            ResidencyCap(ctas_per_sm=2, dynamic_shared_bytes=1, carveout_percent=-1),
            "cap of 2 CTAs per SM (1 B of shared memory)",
        ),
        (Priority(priority=-5), "priority -5"),
        (CommunicationCtas(max_ctas=1), "at most 1 CTA"),
        (CommunicationCtas(max_ctas=8, num_threads=256), "at most 8 CTAs of 256 threads"),
        (Transport(transport="copy_engine"), "transport copy_engine"),
        (HeadStart(hold_us=5), "head start 5 us"),
    ],
)
def test_every_control_is_named_in_words(control: Control, says: str) -> None:
    assert control.describe() == says


@pytest.mark.parametrize(
    ("match", "says"),
    [
        (Match(kind="communication"), "communication kernels:"),
        (Match(collective="all_gather", num_bytes=64 << 20), "all_gather of 64 MiB:"),
        (
            Match(collective="all_gather", process_group="tp", ordinals=(0, 1, 2, 5)),
            "all_gather in process group tp, numbers 0-2, 5:",
        ),
        (Match(name="gemm", kind="computation", ordinals=(3,)), "gemm, number 3:"),
        (Match(name="gemm", ordinals=tuple(range(0, 20, 2))), "gemm, numbers 0, 2, 4, 6, ... (10 in all):"),
        (Match(kind="communication", operations=(4, 5)), "communication kernels, operations 4-5:"),
    ],
)
def test_a_directive_says_what_it_is_for(match: Match, says: str) -> None:
    directive = Directive(match=match, controls=(Priority(priority=-5),), reason="why")
    assert f" - priority -5 on {says} why" in printed_plan(Plan(verdict="GAIN", directives=(directive,)), width=200)


def test_directives_that_differ_in_their_match_alone_are_one_line() -> None:
    matches = [Match(name=f"k{number}", kind="computation") for number in range(6)]
    hold = (HeadStart(hold_us=5),)
    directives = tuple(Directive(match=match, controls=hold, reason="why") for match in matches)
    shown = printed_plan(Plan(verdict="GAIN", directives=directives), width=200)
    assert "head start 5 us on k0; k1; k2; k3 and 2 others: why" in shown
    assert shown.count("head start") == 1


def test_long_kernel_names_are_shortened_in_directives_and_refusals() -> None:
    directive = Directive(match=Match(name=LONG_NAME), controls=(HeadStart(hold_us=5),), reason="why")
    refusal = Refusal(control="residency_cap", target=LONG_NAME, reason="why not")
    shown = printed_plan(Plan(verdict="GAIN", directives=(directive,), refusals=(refusal,)), width=400)
    assert "at::native" not in shown
    assert "head start 5 us on elementwise_kernel (gpu_kernel_impl): why" in shown
    assert "residency_cap on elementwise_kernel (gpu_kernel_impl): why not" in shown


def test_mangled_names_are_readable_and_other_long_names_are_cut() -> None:
    refusals = tuple(Refusal(control="priority", target=name, reason=name) for name in (FILL, "x" * 90))
    shown = printed_plan(Plan(refusals=refusals), width=400)
    assert f"on vectorized_elementwise_kernel (FillFunctor): {FILL}" in shown
    assert f"on {'x' * 57}...: x" in shown


@pytest.mark.parametrize(
    ("num_targets", "on_kernels", "on_others"),
    [
        (1, "on k0: why", "on k0: why"),
        (2, "on 2 kernels (k0, k1): why", "on k0 and 1 other: why"),
        (5, "on 5 kernels (k0, k1, ...): why", "on k0 and 4 others: why"),
    ],
)
def test_refusals_for_one_reason_are_one_line(num_targets: int, on_kernels: str, on_others: str) -> None:
    for control, says in (("residency_cap", on_kernels), ("transport", on_others)):
        refusals = tuple(Refusal(control=control, target=f"k{n}", reason="why") for n in range(num_targets))
        shown = printed_plan(Plan(refusals=refusals))
        assert says in shown
        assert shown.count(control) == 1


def test_reasons_that_differ_in_figures_are_one_line_with_what_they_have_in_common() -> None:
    def refusal(target: str, reason: str, num_targets: int = 1) -> Refusal:
        return Refusal(control="residency_cap", target=target, reason=reason, num_targets=num_targets)

    none = "No cap: one CTA (544 x 96) does not fit beside that of the kernel ({} x 40). {} Use copies."
    shown = printed_plan(
        Plan(
            refusals=(
                refusal("k0", none.format(128, "It holds 1,280 of 65,536 registers."), num_targets=10),
                refusal("k1", "Fits beside 1 of 16 CTAs, -0.5 % of sm_90."),
                refusal("k2", none.format(1024, "It fills the register file.")),
                refusal("k3", "Fits beside 1 of 1,024 CTAs, 12 % of sm_90."),
                refusal("k4", "Fits beside 1 of 16 CTAs, 1 % of sm_89."),
            )
        )
    )
    assert "on 11 kernels (k0, k2, ...): No cap: one CTA (544 x 96) does not fit beside that of the kernel. Use" in shown
    assert "on 2 kernels (k1, k3): Fits beside 1 of 16 to 1,024 CTAs, -0.5 to 12 % of sm_90." in shown
    assert "on k4: Fits beside 1 of 16 CTAs, 1 % of sm_89." in shown
    assert shown.count("residency_cap") == 3


@given(
    st.lists(st.lists(st.sampled_from(["a", " ", "-", ".", ",", "(", ")", "1", "23", ". B", "X and 2 more"]), max_size=12))
)
def test_any_refusals_can_be_merged_and_none_is_lost(written: list[list[str]]) -> None:
    reasons = ["".join(each) for each in written]
    refusals = [Refusal(control="residency_cap", target=f"k{place}", reason=why) for place, why in enumerate(reasons)]
    merged = list(merge_alike(refusals))
    counted = [re.match(r"(\d+) kernels", each.target) for each in merged]
    assert sum(int(found[1]) if found else 1 for found in counted) == len(refusals)
    for why in set(reasons):
        alone = Refusal(control="residency_cap", target="k", reason=why)
        assert list(merge_alike([alone])) == [alone]


def test_kernels_of_one_template_are_named_once() -> None:
    targets = ("void at::a<1>(int)", "void at::a<2>(int)", "_ZN2at1aILi3EEEvi", "b")
    refusals = tuple(Refusal(control="residency_cap", target=target, reason="why") for target in targets)
    assert "on 4 kernels (a, b): why" in printed_plan(Plan(refusals=refusals))


def test_candidates_that_were_not_tried_are_told_with_the_budget() -> None:
    reason = f"{UNTRIED}: raise --budget (now 120; 190 is enough for all)"
    untried = Refusal(control=CANDIDATE, target="priority, caps and 3 more", reason=reason)
    says = " - Not tried for want of steps: priority, caps and 3 more. Raise --budget (now 120; 190 is enough for all)."
    assert says in printed_plan(Plan(refusals=(untried,)))
    of_an_earlier_version = Refusal(control=CANDIDATE, target="caps and 4 more", reason="the budget is too small")
    assert "candidate on caps and 4 more: the budget" in printed_plan(Plan(refusals=(of_an_earlier_version,)))


def test_brackets_in_names_and_reasons_are_printed_as_they_are() -> None:
    refusal = Refusal(control="priority", target="kernel[/bold]<:smile:>", reason="[red]why[/red]")
    assert "kernel[/bold]<:smile:>: [red]why[/red]" in printed_plan(Plan(refusals=(refusal,)))


def test_what_was_measured_is_not_called_simulated() -> None:
    def plan(origin: str) -> Plan:
        return Plan(expectation=Expectation(origin=origin, baseline_us=2, planned_us=1))  # type: ignore[arg-type]

    assert "Simulated, not measured" in printed_plan(plan("simulated"))
    assert "Simulated" not in printed_plan(plan("measured"))


@pytest.mark.parametrize(
    ("fraction", "change", "share"),
    [
        (0.0, "0.0 %", "0.0 %"),
        (-0.0, "0.0 %", "0.0 %"),
        (-0.0004, "0.0 %", "0.0 %"),
        (0.0004, "0.0 %", "0.0 %"),
        (-0.0006, "-0.1 %", "-0.1 %"),
        (0.0006, "+0.1 %", "0.1 %"),
        (1.0, "+100.0 %", "100.0 %"),
        (0.1, "+10.0 %", "10.0 %"),
    ],
)
def test_what_rounds_to_nothing_has_no_sign(fraction: float, change: str, share: str) -> None:
    assert format_change(fraction) == change
    assert format_percent(fraction) == share


def test_trials_and_measurements_that_change_nothing_say_so_without_a_sign() -> None:
    out, file = console()
    trials = [
        Trial(label=f"trial {n}", families=(), directives=(), makespan_us=100 + change, exposed_us=0)
        for n, change in enumerate((0, -0.01, 0.01))
    ]
    text.print_trials(out, trials)
    assert printed(file).count(" 0.0 %") == 2
    assert not re.search(r"[-+]0\.0 %", printed(file))


@pytest.mark.parametrize(("num_trials", "says"), [(12, None), (13, "and 1 slower"), (20, "and 8 slower")])
def test_only_the_best_trials_are_listed(num_trials: int, says: str | None) -> None:
    trials = [
        Trial(label=f"trial {n}", families=(), directives=(), makespan_us=100 + n, exposed_us=0)
        for n in range(num_trials + 1)
    ]
    out, file = console()
    text.print_trials(out, [trials[0], *reversed(trials[1:])])
    shown = printed(file)
    assert re.findall(r"^trial (\d+) ", shown, re.MULTILINE) == [str(n) for n in range(13)]
    assert re.findall(r"^and .*$", shown, re.MULTILINE) == ([says] if says else [])
