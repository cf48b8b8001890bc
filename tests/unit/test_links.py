"""Links as a matrix: rates between two GPUs, to all peers at once, and of copies that share ports or wires."""

import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from counterpoint.errors import MachineError
from counterpoint.links import Link, PairRate
from counterpoint.machine import load_machine

H200, MI300X, MI250X = (load_machine(name).link for name in ("h200", "mi300x", "mi250x"))
TWO_NICS = Link(kind="network", bytes_per_s=100e9, per_peer_bytes_per_s=50e9, latency_us=5.0)
LINKS = {"switch": H200, "direct": MI300X, "pairs": MI250X, "NICs": TWO_NICS}


def to_others(link: Link, num_gpus: int) -> float:
    """What GPU 0 sends while it copies to each of the others at once."""
    return sum(link.concurrent([(0, receiver) for receiver in range(1, num_gpus)]))


@pytest.mark.parametrize(
    ("link", "to_one", "to_all", "group"),
    [(H200, 450e9, 450e9, 450e9), (MI300X, 64e9, 448e9, 448e9), (TWO_NICS, 50e9, 100e9, 100e9)],
    ids=["switch", "direct", "two NICs"],
)
def test_a_rank_reaches_one_peer_and_all_seven(link: Link, to_one: float, to_all: float, group: float) -> None:
    assert link.between(0, 5) == to_one
    assert to_others(link, 8) == pytest.approx(to_all)
    assert link.group_bytes_per_s(8) == pytest.approx(group)


def test_pairs_of_mi250x_dies_differ_and_the_slowest_die_sets_what_a_group_has() -> None:
    assert [MI250X.between(0, other) for other in (1, 6, 2, 7)] == [200e9, 100e9, 50e9, 50e9]
    assert MI250X.between(1, 0) == 200e9
    assert to_others(MI250X, 4) == pytest.approx(300e9)  # to 1, 2 and 3
    assert MI250X.group_bytes_per_s(4) == pytest.approx(300e9)
    assert MI250X.group_bytes_per_s(2) == pytest.approx(200e9)


def test_copies_share_a_switchs_ports_a_pairs_wires_and_a_receiver() -> None:
    assert H200.concurrent([(0, 1), (0, 2)]) == pytest.approx((225e9, 225e9))
    assert H200.concurrent([(1, 0), (2, 0), (2, 3)]) == pytest.approx((225e9, 225e9, 225e9))
    assert MI300X.concurrent([(0, 1), (0, 2)]) == pytest.approx((64e9, 64e9))
    assert MI300X.concurrent([(0, 1), (0, 1), (1, 0)]) == pytest.approx((32e9, 32e9, 64e9))
    assert TWO_NICS.concurrent([(0, 1), (0, 1), (0, 1)]) == pytest.approx((100e9 / 3,) * 3)
    assert H200.concurrent([]) == ()


def test_the_rates_of_many_copies_that_share_ports_in_many_ways_take_no_seconds() -> None:
    copies = [(sender, (sender + 1) * 1000 + number) for sender in range(200) for number in range(sender)]
    begin = time.process_time()
    rates = H200.concurrent(copies)
    assert time.process_time() - begin < 1.5, "seconds; 0.15 as a rule, where a set of copies for each port took 5"
    assert rates == pytest.approx([450e9 / sender for sender, _ in copies])


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
@given(copies=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)).filter(lambda ends: ends[0] != ends[1]), max_size=24))
def test_no_limit_is_exceeded_and_no_copy_could_be_faster(link: Link, copies: list[tuple[int, int]]) -> None:
    rates, slack = link.concurrent(copies), 1 + 1e-6
    sent, received, wires = Counter[int](), Counter[int](), Counter[tuple[int, int]]()
    for (sender, receiver), rate in zip(copies, rates, strict=True):
        sent[sender] += rate  # type: ignore[assignment]
        received[receiver] += rate  # type: ignore[assignment]
        wires[sender, receiver] += rate  # type: ignore[assignment]
    assert max([*sent.values(), *received.values()], default=0) <= slack * link.bytes_per_s
    for (sender, receiver), rate in zip(copies, rates, strict=True):
        own = wires[sender, receiver] if link.topology == "direct" else rate
        assert own <= slack * link.between(sender, receiver)
        full = (own / link.between(sender, receiver), sent[sender] / link.bytes_per_s, received[receiver] / link.bytes_per_s)
        assert max(full) >= 1 / slack


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topology": "switch"}, r"link pairs are for topology 'direct'"),
        ({"pairs": (PairRate(bytes_per_s=9e11, gpus=((0, 1),)),)}, r"link pairs\.bytes_per_s must be at most 35.*; found 9"),
        ({"pairs": (PairRate(bytes_per_s=1e11, gpus=((1, 1),)),)}, r"two different GPUs.*found \[1, 1\]"),
        ({"pairs": (PairRate(bytes_per_s=1e11, gpus=((0, 1), (1, 0))),)}, r"each pair once; found \[1, 0\] again"),
    ],
)
def test_absurd_pairs_are_refused_in_one_line(changes: dict[str, object], message: str) -> None:
    with pytest.raises(MachineError, match=message):
        replace(MI250X, **changes)


def test_a_machine_refuses_pairs_beyond_its_gpus() -> None:
    link = replace(MI250X, pairs=(PairRate(bytes_per_s=1e11, gpus=((0, 8),)),))
    with pytest.raises(MachineError, match=r"numbered from 0 to num_gpus - 1 = 7; found 8"):
        replace(load_machine("mi250x"), link=link)
