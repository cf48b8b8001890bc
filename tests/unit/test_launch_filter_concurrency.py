"""The filter under threads, forks and swaps, plain and with its memory and its data races watched."""

import threading
from pathlib import Path

import pytest

from counterpoint.launch_filter.rules import FilterRule
from helpers.build_filter import Built, build_sanitized
from helpers.filter_session import Session, session

KERNELS = ("capped_a", "capped_b", "gemm", "ncclDevKernel", "elementwise")
THREADS, LAUNCHES = 6, 20_000
RULES = (
    FilterRule(pattern="ncclDev*", is_collective=True, priority=-5),
    FilterRule(pattern="capped*", dynamic_shared_bytes=60_000, ctas_per_sm=3, carveout_percent=100),
    FilterRule(pattern="gemm", hold_us=5.0),
)
TABLES = ((), RULES, RULES[:1], (FilterRule(pattern="*", dynamic_shared_bytes=80_000, priority=-1, hold_us=20.0), RULES[0]))


def begin(client: Session) -> None:
    assert client.find("proc_of_proc")
    for name in KERNELS:
        client.make(name, is_kernel=name == "capped_b")


def test_every_launch_is_counted_and_none_fails_while_tables_are_swapped(built: Built, tmp_path: Path) -> None:
    with session(built, tmp_path, *RULES) as client:
        begin(client)
        client.launch("gemm")
        is_over = threading.Event()
        num_swaps = 0

        def swap() -> None:
            nonlocal num_swaps
            while not is_over.is_set():
                client.block().swap(TABLES[num_swaps % len(TABLES)])
                num_swaps += 1

        swapper = threading.Thread(target=swap)
        swapper.start()
        num_rounds = 0
        while num_rounds < 5 or (num_swaps < 4 * len(TABLES) and num_rounds < 200):
            assert client.ask(f"stress {THREADS} {LAUNCHES}") == ["failed 0"]
            num_rounds += 1
        is_over.set()
        swapper.join(timeout=60)
        assert not swapper.is_alive()
        assert num_swaps >= 4 * len(TABLES)
        each = num_rounds * THREADS * LAUNCHES // len(KERNELS)
        assert {seen.name: seen.num_launches for seen in client.state().functions} == {
            name: each + (name == "gemm") for name in KERNELS
        }
        client.block().swap(RULES)  # and in the end the last table holds
        assert client.launch("capped_a").last.shared == 60_000
        assert client.launch("ncclDevKernel").last.priority == -5


def test_threads_that_decide_one_kernel_at_once_count_what_they_launched(built: Built, tmp_path: Path) -> None:
    with session(built, tmp_path, *RULES) as client:
        begin(client)
        assert client.ask(f"stress {THREADS} {LAUNCHES}") == ["failed 0"]
        by_rule = client.state().counters
        each = THREADS * LAUNCHES // len(KERNELS)
        assert (by_rule[0].num_matched, by_rule[0].num_prioritized) == (each, each)
        assert (by_rule[1].num_matched, by_rule[1].num_capped, by_rule[1].residency_found) == (2 * each, 2 * each, 3)
        assert by_rule[2].num_matched == each
        assert 0 < by_rule[2].num_held <= each
        assert sum(counters.num_refused + counters.num_retried for counters in by_rule) == 0


@pytest.fixture(scope="module", params=["address", "thread"])
def watched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build_sanitized(tmp_path_factory.mktemp(request.param), request.param)


def test_nothing_is_reported_under_sanitizers(watched: Built, tmp_path: Path) -> None:
    with session(watched, tmp_path, *RULES) as client:
        begin(client)
        for route in ("linked", "dlsym", "dlvsym", "proc", "proc_v2", "old_proc_of_proc", "proc_per_thread", "program"):
            assert client.find(route), route
            for name in KERNELS:
                for how in ("", "ex", "cluster=4 priority=-1"):
                    assert client.launch(name, how=how).result == 0
            client.launch("gemm", command="cooperative")
        for command in ("refuse capped_a 719 50000 0", "capture 7 1", "limit capped_b 49152"):
            client.ask(command)
            for name in KERNELS:
                assert client.launch(name).result == 0
        client.ask("capture 7 0")
        client.block().swap(TABLES[3])
        assert client.launch("gemm").result == 0
        assert client.ask("fork capped_b")[0].endswith(" 0")
        client.ask("unload elementwise")
        client.make("capped_c")
        assert client.launch("capped_c").result == 0
        client.ask("destroy")
        assert client.ask("stress 4 4000 capped* 60") == ["failed 0"]
    assert client.stderr == ""


def test_a_sanitizer_would_have_said_so(watched: Built, tmp_path: Path) -> None:
    """The watched build does watch: an error planted in the client ends it."""
    command = "plant race" if "thread" in watched.folder.name else "plant overflow"
    client = session(watched, tmp_path)
    with pytest.raises(AssertionError, match=r"runtime error|data race"):
        client.ask(command)
