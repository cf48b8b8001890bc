"""Limits of shared memory that the program sets itself: no launch fails that would have succeeded without the filter."""

from pathlib import Path

import pytest

from counterpoint.launch_filter.rules import FilterRule
from helpers.build_filter import Built
from helpers.filter_session import Session, session

BYTES = 100_000
CAP = FilterRule(pattern="cap*", dynamic_shared_bytes=BYTES, carveout_percent=100)


def launches(client: Session, shared: int) -> list[int]:
    return [client.launch("capped", shared).result for _ in range(2)]


@pytest.mark.parametrize("is_kernel", [False, True])
def test_a_kernel_loaded_again_on_its_old_handle_keeps_what_the_program_set(
    built: Built, tmp_path: Path, is_kernel: bool
) -> None:
    with session(built, tmp_path, CAP) as client:
        client.find()
        handle = client.make("capped", is_kernel=is_kernel)
        client.launch("capped")
        client.ask("unload capped")
        assert client.make("capped", is_kernel=is_kernel) == handle
        client.ask(f"{'limit_kernel' if is_kernel else 'limit'} capped 80000")
        assert client.launch("capped", 70_000).last.shared == BYTES
        client.block().swap(())
        assert launches(client, 70_000) == [0, 0]
        assert client.attributes("capped")[0] >= 80_000


@pytest.mark.parametrize("asked", [BYTES - 1, BYTES, BYTES + 1])
def test_a_limit_that_the_program_raises_under_a_cap_stays_when_the_cap_goes(
    built: Built, tmp_path: Path, asked: int
) -> None:
    with session(built, tmp_path, CAP) as client:
        client.find()
        client.make("capped")
        client.launch("capped")
        client.ask(f"limit capped {asked}")
        client.block().swap(())
        assert launches(client, asked) == [0, 0]


def test_a_program_that_reads_the_raised_limit_may_rely_on_it(built: Built, tmp_path: Path) -> None:
    """It finds 100,000 bytes and so sets nothing, where without the filter it would have found 49,152 and set them."""
    with session(built, tmp_path, CAP) as client:
        client.find()
        client.make("capped")
        client.launch("capped")
        assert client.attributes("capped")[0] == BYTES
        client.block().swap(())
        client.launch("capped")
        assert launches(client, 90_000) == [0, 0]


def test_a_limit_is_never_lowered_by_a_smaller_cap_or_a_refused_one(built: Built, tmp_path: Path) -> None:
    with session(built, tmp_path, CAP) as client:
        client.find()
        client.make("capped")
        client.launch("capped")
        for rule in (
            FilterRule(pattern="capped", dynamic_shared_bytes=60_000),
            FilterRule(pattern="capped", dynamic_shared_bytes=300_000),
        ):
            client.block().swap([rule])
            client.launch("capped")
            assert client.attributes("capped")[0] == BYTES


@pytest.mark.parametrize("after_us", [0, 5_000, 10_000, 15_000])
def test_a_limit_that_another_thread_sets_at_the_same_moment_is_not_lost(
    built: Built, tmp_path: Path, after_us: int
) -> None:
    with session(built, tmp_path, FilterRule(pattern="cap*", dynamic_shared_bytes=60_000)) as client:
        client.find()
        client.make("capped")
        assert client.ask(f"limit_beside capped 90000 {after_us}")[0] == "results 0 0"


def test_a_carveout_is_put_back_unless_the_program_chose_it(built: Built, tmp_path: Path) -> None:
    with session(built, tmp_path, CAP) as client:
        client.find()
        client.make("capped")
        client.launch("capped")
        assert client.attributes("capped")[1] == 100
        client.block().swap(())
        client.launch("capped")
        assert client.attributes("capped")[1] == -1
        client.block().swap([CAP])
        client.launch("capped")
        client.ask("carveout capped 100")  # the program's own choice happens to be ours
        client.block().swap(())
        client.launch("capped")
        assert client.attributes("capped")[1] == 100


@pytest.mark.parametrize("ends", ["another context", "its own context"])
def test_a_carveout_is_put_back_after_a_context_has_ended_and_a_new_kernels_is_left(
    built: Built, tmp_path: Path, ends: str
) -> None:
    with session(built, tmp_path, CAP) as client:
        client.find()
        handle = client.make("capped")
        client.ask("carveout capped 30")
        client.launch("capped")
        client.ask("destroy" if ends == "another context" else "destroy capped")
        if ends == "its own context":
            assert client.make("capped") == handle
        client.launch("capped")
        assert client.attributes("capped")[1] == 100
        client.block().swap(())
        client.launch("capped")
        assert client.attributes("capped")[1] == (30 if ends == "another context" else -1)


@pytest.mark.parametrize("route", ["linked", "dlsym", "proc", "proc_of_proc", "next"])
def test_where_no_cap_was_ever_set_limits_are_the_programs(built: Built, tmp_path: Path, route: str) -> None:
    with session(built, tmp_path, FilterRule(pattern="*", priority=-1)) as client:
        client.find(route)
        client.make("capped")
        client.launch("capped")
        client.ask("limit capped 80000")
        assert client.launch("capped", 80_001).result == 1
        assert launches(client, 80_000) == [0, 0]
        client.ask("limit capped 49152")
        assert client.launch("capped", 80_000).result == 1
