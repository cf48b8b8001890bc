"""Collectives of more than two ranks, with all their CTAs and with fewer: what four H200s measured, and lone times."""

import msgspec
import pytest

from counterpoint import Simulator
from counterpoint.controls import CommunicationCtas
from counterpoint.footprints import communication_footprint
from counterpoint.measurement.points import Point
from counterpoint.plan import LEAVE_IT, Directive, Match, Plan
from counterpoint.sim.calibration import LARGE_BYTES, load_calibration
from counterpoint.sim.calibration_curves import FIGURES_OF_MORE, fit_collective
from counterpoint.sim.calibration_fit import Points
from counterpoint.sim.costs import CostModel
from counterpoint.step import Collective, CollectiveKind, Step
from counterpoint.units import MIB
from helpers.toy_steps import H200

KINDS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce")
USUAL = communication_footprint(H200.gpu, "nccl").num_ctas
CALIBRATION = load_calibration()


def collective(kind: CollectiveKind, num_bytes: int, ranks: int, lone_us: float | None = None) -> Collective:
    return Collective(name=kind, stream=0, collective=kind, num_bytes=num_bytes, group_size=ranks, lone_us=lone_us)


def time_us(operation: Collective, max_ctas: int = USUAL) -> float:
    """The time that the simulator has for a collective alone with at most so many CTAs."""
    few = Plan(directives=(Directive(match=Match(), controls=(CommunicationCtas(max_ctas=max_ctas),), reason="by hand"),))
    step = Step(name="alone", num_ranks=operation.group_size, operations=(operation,))
    return Simulator().run(step, H200, few if max_ctas < USUAL else LEAVE_IT).intervals[0].end_us


def large_points(kind: CollectiveKind) -> list[Point]:
    points = CALIBRATION.probes["collectives of 4 ranks"].points
    return [each for each in points if each.at["kind"] == kind and float(each.at["bytes"]) >= LARGE_BYTES]


@pytest.mark.parametrize("kind", KINDS)
def test_the_shipped_figures_of_more_ranks_explain_the_times_of_four(kind: CollectiveKind) -> None:
    for each in large_points(kind):
        ctas = USUAL if each.at["ctas"] == "usual" else int(each.at["ctas"])
        found = time_us(collective(kind, int(each.at["bytes"]), 4), ctas)
        assert found == pytest.approx(each.value, rel=0.09), each


@pytest.mark.parametrize("kind", KINDS)
def test_the_shipped_figures_of_more_ranks_follow_from_the_points(kind: CollectiveKind) -> None:
    points = Points(CALIBRATION.probes["collectives of 4 ranks"].points)
    shipped = CALIBRATION.collectives[kind]
    found = fit_collective(points, H200, kind, shipped)
    assert found is not None
    assert {name: getattr(found, name) for name in FIGURES_OF_MORE} == {
        name: getattr(shipped, name) for name in FIGURES_OF_MORE
    }


def test_more_ranks_than_two_have_their_own_figures_where_they_were_measured() -> None:
    known = CALIBRATION.collectives["all_to_all"]
    assert known.of_ranks(2) is known
    more = known.of_ranks(4)
    assert more == known.of_ranks(8) == more.of_ranks(4)
    assert more.link_fraction == known.link_fraction_of_more
    assert more.bytes_per_s_per_cta == known.bytes_per_s_per_cta_of_more
    assert more.latency_us_by_bytes == known.latency_us_by_bytes_of_more
    few = (each.bytes_per_s_per_cta_of_few or 0.0 for each in (more, known))
    assert next(few) / next(few) == pytest.approx(more.bytes_per_s_per_cta / known.bytes_per_s_per_cta)
    without = msgspec.structs.replace(known, **dict.fromkeys(FIGURES_OF_MORE[:2]), latency_us_by_bytes_of_more=())
    assert without.of_ranks(4) == without


def test_what_few_ctas_send_slowly_counts_by_peer() -> None:
    """256 MiB are 64 MiB to each of 4 ranks: 8 MiB by each of 8 CTAs, as of 128 MiB among 2 ranks."""
    rates = {}
    for ranks, num_bytes in ((2, 128 * MIB), (2, 130 * MIB), (4, 256 * MIB), (4, 260 * MIB)):
        rates[ranks, num_bytes] = num_bytes / time_us(collective("all_to_all", num_bytes, ranks), 8)
    for ranks, most in ((2, 128), (4, 256)):
        slow, fast = (rate for (group, _), rate in rates.items() if group == ranks)
        assert fast > 1.25 * slow, f"more than {most} MiB of {ranks} ranks"


@pytest.mark.parametrize("kind", ["all_to_all", "all_gather", "all_reduce"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_fewer_ctas_do_not_multiply_what_held_a_collective_up(kind: CollectiveKind, ranks: int) -> None:
    usual_us = CostModel(H200, CALIBRATION).lone_us(collective(kind, 64 * MIB, ranks))
    few_us = time_us(collective(kind, 64 * MIB, ranks), 4)
    for slower in (1.0, 1.2, 1.5):
        held_up = collective(kind, 64 * MIB, ranks, lone_us=slower * usual_us)
        assert time_us(held_up) == pytest.approx(slower * usual_us, rel=1e-3), "its usual CTAs take the measured time"
        assert few_us * 0.999 <= time_us(held_up, 4) <= 1.1 * few_us
    long = collective(kind, 64 * MIB, ranks, lone_us=10 * few_us)
    assert time_us(long, 4) >= 10 * few_us * 0.999, "a time that is longer than that of few CTAs stays"


def test_a_lone_time_shorter_than_what_its_ctas_move_still_scales_with_their_number() -> None:
    usual_us = CostModel(H200, CALIBRATION).lone_us(collective("all_gather", 64 * MIB, 4))
    short = collective("all_gather", 64 * MIB, 4, lone_us=usual_us / 4)
    assert time_us(short) == pytest.approx(usual_us / 4, rel=1e-3)
    assert time_us(short, 4) > 2 * usual_us / 4
