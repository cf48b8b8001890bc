"""What collectives get of links of different widths."""

from itertools import combinations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.links import Link, PairRate
from counterpoint.machine import load_machine
from counterpoint.sim import Simulator
from counterpoint.sim.reach import collective_bytes_per_s, copies_bytes_per_s
from counterpoint.step import Collective, CollectiveKind, Step

MI250X, MI300X, H200 = (load_machine(name).link for name in ("mi250x", "mi300x", "h200"))
GB = 1e9


@pytest.mark.parametrize(
    ("link", "kind", "num_ranks", "expected"),
    [
        # Dies 0 and 1 and dies 2 and 3 share a package (200 GB/s); four pairs of 50 GB/s join the packages.
        (MI250X, "all_reduce", 2, 200),
        (MI250X, "all_gather", 4, 200),  # the cut between the packages
        (MI250X, "all_to_all", 4, 150),  # three pieces, the slowest at 50
        (MI250X, "send_recv", 4, 50),
        (MI250X, "all_reduce", 8, 350),  # all links of a die
        (MI300X, "reduce_scatter", 4, 192),
        (MI300X, "all_to_all", 8, 448),
        (H200, "all_to_all", 4, 450),
        (H200, "all_reduce", 2, 450),
    ],
)
def test_bounds_of_the_shipped_links(link: Link, kind: CollectiveKind, num_ranks: int, expected: float) -> None:
    assert collective_bytes_per_s(link, kind, num_ranks) == pytest.approx(expected * GB)


@pytest.mark.parametrize(
    ("link", "num_ranks", "expected"),
    [(H200, 8, 450), (MI300X, 8, 64), (MI250X, 2, 200), (MI250X, 4, 3 / (1 / 200 + 2 / 50))],
)
def test_copies_that_follow_one_another_take_each_pairs_time(link: Link, num_ranks: int, expected: float) -> None:
    assert copies_bytes_per_s(link, num_ranks) == pytest.approx(expected * GB)


@st.composite
def meshes(draw: st.DrawFn) -> Link:
    """Direct links of 4 GPUs with pairs of random widths."""
    widths = {pair: draw(st.floats(1e9, 1e11)) for pair in combinations(range(4), 2)}
    pairs = tuple(PairRate(bytes_per_s=width, gpus=(pair,)) for pair, width in widths.items())
    return Link(kind="xgmi", bytes_per_s=1e12, per_peer_bytes_per_s=1e9, latency_us=1.0, topology="direct", pairs=pairs)


@given(meshes())
def test_no_ring_bound_is_above_any_cut_and_no_exchange_above_its_slowest_pair(link: Link) -> None:
    ring = collective_bytes_per_s(link, "all_gather", 4)
    for size in (1, 2, 3):
        for part in combinations(range(4), size):
            rest = [gpu for gpu in range(4) if gpu not in part]
            assert ring <= 1.000001 * sum(link.between(one, other) for one in part for other in rest)
    slowest = min(link.between(*pair) for pair in combinations(range(4), 2))
    assert collective_bytes_per_s(link, "all_to_all", 4) == pytest.approx(3 * slowest)
    assert slowest <= copies_bytes_per_s(link, 4) * 1.000001


def test_a_collective_of_four_dies_takes_the_time_of_what_they_reach_and_not_of_all_links() -> None:
    machine = load_machine("mi250x")
    wide = msgspec.structs.replace(machine, link=msgspec.structs.replace(MI250X, topology="switch", pairs=()))
    gather = Collective(name="gather", stream=1, collective="all_gather", num_bytes=1 << 30, group_size=4)
    step = Step(name="step", num_ranks=4, operations=(gather,))
    times_us = [Simulator().lone_times_us(step, each)[0] for each in (machine, wide)]
    assert times_us[0] / times_us[1] == pytest.approx(350 / 200, rel=0.1)
