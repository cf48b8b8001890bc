"""Collectives in two levels on pretended hosts, 2 x 2 to 4 x 2 ranks over gloo; where ranks have their places; and where the
estimate lets two levels pay."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_integrations import TWO_LEVELS

from helpers.gloo_ranks import run_ranks

pytest.importorskip("torch")
import torch
import torch.distributed as dist

from counterpoint.errors import RefusedTogetherError
from counterpoint.integrations import lanes
from counterpoint.integrations.lanes import Lanes, obstacle_by_estimate
from counterpoint.ops.collectives import is_of_lost_rank
from counterpoint.ops.host_levels import places_of

pytestmark = pytest.mark.xdist_group("ranks")  # one worker, whose ranks have imported torch, and no other job beside
MIB = 1 << 20


@pytest.mark.parametrize("num_ranks", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_two_levels_do_what_one_collective_does(num_ranks: int, tmp_path: Path) -> None:
    first, *others = run_ranks("integrations", num_ranks, *TWO_LEVELS, folder=tmp_path, limit_s=240)
    assert first.output.splitlines() == [f"{section}: ok" for section in TWO_LEVELS], first.output + first.errors[-3000:]
    assert all(rank.status == 0 for rank in others), "".join(rank.errors[-1500:] for rank in others)


@pytest.mark.parametrize("integration", ["ddp", "fsdp2", "collectives"])
def test_a_rank_that_dies_is_one_line_on_every_host_and_no_hang(integration: str, tmp_path: Path) -> None:
    ended = run_ranks("integration_faults", 4, integration, "aabb", folder=tmp_path, limit_s=60)
    assert [rank.status for rank in ended] == [2, 9, 2, 2], "".join(rank.errors[-1500:] for rank in ended)
    for rank in (0, 2, 3):
        (line,) = ended[rank].output.splitlines()
        assert line.startswith("OperatorError: A rank of the group did not exchange its blocks"), line
        assert line.endswith("start all ranks again.")


@pytest.mark.parametrize(
    ("says", "is_lost"),
    [
        ("[pair.cc:547] Connection closed by peer [127.0.0.1]:33", True),
        ("[pair.cc:1008] Socket closed [127.0.0.1]:33", True),  # of a call that begins after that was noticed
        ("writev [127.0.0.1]:33: Broken pipe", True),
        ("Timed out waiting 10000ms for send operation to complete", True),
        ("output tensor size must be equal to world_size times input tensor size", False),
    ],
)
def test_a_lost_rank_is_known_by_what_gloo_says(says: str, is_lost: bool) -> None:
    assert is_of_lost_rank(RuntimeError(says), torch.zeros(1)) == is_lost


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("across_hosts", ["auto", "always", "never"])
def test_a_group_without_memory_for_its_flags_stays_with_the_library(
    monkeypatch: pytest.MonkeyPatch, across_hosts: lanes.AcrossHosts
) -> None:
    def refuse(*_: object) -> None:
        raise RefusedTogetherError("8 KiB of symmetric memory cannot be allocated.")

    monkeypatch.setattr(lanes, "runtime_of", refuse)
    found = Lanes((dist.group.WORLD, torch.device("cpu"), "a test"), 1, across_hosts)
    found.prepare()
    assert found.num_hosts == 1
    assert found.obstacle_to("all_gather", MIB) == found.obstacle == "8 KiB of symmetric memory cannot be allocated"


@given(st.integers(1, 4), st.integers(2, 4), st.data())
def test_places_hold_every_rank_once_and_one_of_each_host(num_hosts: int, per_host: int, data: st.DataObject) -> None:
    hosts = data.draw(st.permutations([f"host {number % num_hosts}" for number in range(num_hosts * per_host)]))
    places = places_of(hosts)
    if isinstance(places, str):
        assert re.fullmatch(rf"its ranks are on {num_hosts} hosts in no regular order", places)
        assert num_hosts > 2, "two ranks are always at equal distances"
        return
    assert sorted(rank for ranks in places for rank in ranks) == list(range(num_hosts * per_host))
    for number, ranks in enumerate(places):
        assert len({hosts[rank] for rank in ranks}) == num_hosts
        for rank in ranks:  # the place is the rank's number on its host
            assert [other for other in range(rank) if hosts[other] == hosts[rank]].__len__() == number


@pytest.mark.parametrize("hosts", ["aaabbb", "ababab", "aabbcc", "abcabc", "bbaacc"])
def test_hosts_in_any_regular_order_have_places(hosts: str) -> None:
    assert not isinstance(places_of(list(hosts)), str)


def test_hosts_that_cannot_be_split_are_left_with_the_reason() -> None:
    assert places_of(list("aab")) == "its 2 hosts have unequal numbers of ranks, from 1 to 2"
    assert places_of(list("abc")) == "each of its 3 hosts has one rank, so nothing stays within a host"
    assert places_of(list("aabcbc")) == "its ranks are on 3 hosts in no regular order"


def test_the_estimate_lets_two_levels_pay_between_many_hosts_and_not_between_two() -> None:
    for kind in ("all_gather", "reduce_scatter"):
        assert "NCCL is faster" in obstacle_by_estimate(("h200",), 2, 8, (kind, 256 * MIB))
        assert obstacle_by_estimate(("h200",), 64, 8, (kind, 256 * MIB)) == ""
    assert "NCCL is faster" in obstacle_by_estimate(("h200",), 64, 8, ("all_reduce", 256 * MIB)), "NCCL has trees"


def test_the_guide_has_the_sizes_up_to_which_two_levels_pay() -> None:
    text = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
    rows = text.partition("| hosts of 8 H200s |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(rows) == 6
    for row in rows:
        num_hosts, *sizes = (cell.strip() for cell in row.strip("| ").split("|"))
        for kind, found in zip(("all_gather", "reduce_scatter", "all_reduce"), sizes, strict=True):
            pays = [
                1 << each
                for each in range(15)
                if not obstacle_by_estimate(("h200",), int(num_hosts), 8, (kind, MIB << each))
            ]
            assert found == (f"{max(pays):,} MiB" if pays else "never"), row


@pytest.mark.parametrize(
    ("machines", "per_host", "reason"),
    [
        (("",), 8, "no shipped machine describes its CPUs"),
        (("NVIDIA X1",), 8, "no shipped machine describes its GPUs (NVIDIA X1)"),
        (("l40s",), 8, "machine 'l40s' describes no network"),
        (("h100", "h200"), 8, "its hosts have different GPUs (h100, h200)"),
        (("h200",), 3, "3 ranks are no even share of a host's 8 GPUs"),
    ],
)
def test_without_an_estimate_the_library_does_it(machines: tuple[str, ...], per_host: int, reason: str) -> None:
    assert (
        obstacle_by_estimate(machines, 64, per_host, ("all_gather", MIB))
        == f"{reason}, so no estimate says whether two levels pay"
    )
