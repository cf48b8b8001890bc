"""Ranks that report to each other after the first step, and that notice who is lost: with a thread for each rank."""

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from counterpoint.launch_filter.library import LIBRARY_PREFIX
from counterpoint.ranks import Exchange, LocalStore, launched_rank, launched_size
from counterpoint.supervised.handshake import (
    HandshakeError,
    RankReport,
    Roll,
    fail_handshake,
    meet,
    report_rank,
    why_no_filter,
)
from counterpoint.supervised.heartbeat import LOOK_BEATS, Heartbeat

LIMIT_S = 0.3
BEAT_S = 0.05
NUM_RANKS = 4


def report(rank: int, **changes: object) -> RankReport:
    """Two ranks on each host, under one `counterpoint run`."""
    fields = {"host": f"n{rank // 2}", "run": "/dev/shm/x", "version": "1"}
    return RankReport(**(fields | changes))  # type: ignore[arg-type]


def outcomes(changes: Mapping[int, Mapping[str, object] | None]) -> dict[int, Roll | HandshakeError]:
    """What `meet` comes to on every rank; a rank whose change is None never comes."""
    store = LocalStore()

    def come(rank: int) -> Roll | HandshakeError:
        exchange = Exchange(store, rank, NUM_RANKS, limit_s=1.0)
        report_rank(exchange, report(rank, **(changes.get(rank) or {})))
        try:
            return meet(exchange, limit_s=LIMIT_S, slack_s=LIMIT_S)
        except HandshakeError as problem:
            return problem

    there = [rank for rank in range(NUM_RANKS) if changes.get(rank, {}) is not None]
    with ThreadPoolExecutor(NUM_RANKS) as threads:
        return dict(zip(there, threads.map(come, there), strict=True))


def test_all_ranks_hear_of_the_hosts_of_all() -> None:
    found = outcomes({})
    assert set(found.values()) == {Roll(hosts=("n0", "n0", "n1", "n1"), runs=(0, 0, 2, 2))}


@pytest.mark.parametrize(
    ("changes", "teller", "says"),
    [
        ({3: {"problem": "no filter, because X"}}, 0, "rank 3 (host n1): no filter, because X"),
        ({2: {"problem": "X"}, 3: {"problem": "X"}, 1: {"problem": "Y"}}, 0, "rank 1 (host n0): Y; ranks 2-3 (host n1): X"),
        ({1: {"version": "2"}}, 0, "rank 1 (host n0): Counterpoint 2 runs there, and 1 on rank 0. Install one version"),
        ({2: None}, 0, "rank 2: no filter and no agent reported"),
        ({0: None}, 1, "rank 0: no filter and no agent reported"),
        ({0: None, 1: None}, 2, "rank 0: no filter and no agent reported"),
        ({rank: {"problem": "no GPU", "is_silent": True} for rank in range(NUM_RANKS)}, None, "no GPU"),
    ],
)
def test_one_rank_with_a_problem_stops_all_and_one_of_them_says_so(
    changes: Mapping[int, Mapping[str, object] | None], teller: int | None, says: str
) -> None:
    found = outcomes(changes)
    assert all(isinstance(each, HandshakeError) and says in str(each) for each in found.values()), found
    assert [rank for rank, each in found.items() if each.is_told] == ([] if teller is None else [teller])  # type: ignore[union-attr]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_before_it_takes_part_answers_the_others(failing: int) -> None:
    store = LocalStore()
    exchanges = [Exchange(store, rank, 2, limit_s=1.0) for rank in range(2)]
    fail_handshake(exchanges[failing], report(failing, problem="the disk is full"))
    other = exchanges[1 - failing]
    report_rank(other, report(other.rank))
    with pytest.raises(HandshakeError, match=f"rank {failing} .host n0.: the disk is full"):
        meet(other, limit_s=LIMIT_S, slack_s=LIMIT_S)


@pytest.mark.parametrize(
    ("environment", "maps", "says"),
    [
        ({}, "", "LD_PRELOAD does not name it there"),
        ({"LD_PRELOAD": "/x/jemalloc.so"}, "", "LD_PRELOAD does not name it there"),
        ({"LD_PRELOAD": f"/x/{LIBRARY_PREFIX}1.so"}, "", "does not exist on this host or in this container"),
        ({"LD_PRELOAD": f"/x.so:{__file__} {LIBRARY_PREFIX}"}, "", "does not exist"),
        ({"COUNTERPOINT_FILTER_DIRECTORY": "/no/such"}, f"7f00-7f01 r-xp /x/{LIBRARY_PREFIX}1.so", "the folder of the run"),
    ],
)
def test_why_a_process_has_no_filter_is_found_with_a_remedy(
    tmp_path: Path, environment: Mapping[str, str], maps: str, says: str
) -> None:
    (tmp_path / "maps").write_text(maps)
    found = why_no_filter(environment, tmp_path / "maps")
    assert found.startswith("no filter, because")
    assert says in found
    assert "Start `counterpoint run` on each node" in found


def test_the_dynamic_linkers_own_words_say_why_it_left_a_library_out(tmp_path: Path) -> None:
    library = tmp_path / f"{LIBRARY_PREFIX}1.so"
    library.write_bytes(b"no library")
    found = why_no_filter({"LD_PRELOAD": str(library)})
    assert "did not load" in found
    assert "file too short" in found or "invalid ELF header" in found


def test_ranks_that_stand_still_are_named_by_the_first_that_is_left_and_those_that_ended_are_not() -> None:
    store, said = LocalStore(), [[] for _ in range(NUM_RANKS)]
    roll = Roll(hosts=("n0", "n0", "n1", "n1"), runs=(0, 0, 2, 2))
    hearts = [
        Heartbeat(Exchange(store, rank, NUM_RANKS, limit_s=1.0), roll, said[rank].append, beat_s=BEAT_S)
        for rank in range(NUM_RANKS)
    ]
    counting = [threading.Thread(target=hearts[rank].count, daemon=True) for rank in (0, 1)]
    for each in counting:
        each.start()
    hearts[3].end()
    time.sleep(3 * BEAT_S)
    hearts[0].tell_lost()
    begun_s = time.monotonic()
    hearts[1].tell_lost()
    assert time.monotonic() - begun_s >= 2 * LOOK_BEATS * BEAT_S, "rank 0 would be ended with it, before it speaks"
    assert said[1:] == [[], [], []]
    (line,) = said[0]
    assert line.startswith("rank 2 (host n1) has not been heard of")
    for rank in (0, 1):
        hearts[rank].end()


@pytest.mark.parametrize(
    ("environment", "rank", "size"),
    [
        ({}, None, 1),
        ({"RANK": "5", "WORLD_SIZE": "8", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, 5, 8),
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}, 3, 4),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, 2, 4),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, 0, 2),
        ({"RANK": "", "PMIX_RANK": "x"}, None, 1),
    ],
)
def test_a_rank_is_what_its_launcher_says(environment: Mapping[str, str], rank: int | None, size: int) -> None:
    assert (launched_rank(environment), launched_size(environment)) == (rank, size)
