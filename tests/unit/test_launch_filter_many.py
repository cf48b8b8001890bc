"""Many kernels: a full table costs launches nothing to speak of, and an unload concerns its own module."""

from pathlib import Path

import pytest

from counterpoint.launch_filter import layout
from counterpoint.launch_filter.rules import FilterRule
from helpers.build_filter import Built
from helpers.filter_session import Session, session

MORE_THAN_KEPT = 24_000


def again(client: Session, rounds: int) -> tuple[int, int]:
    """Launches that failed, and questions that the driver was asked."""
    _, failed, _, asked, *_ = client.ask(f"again {rounds}")[0].split()
    return int(failed), int(asked)


def asked(client: Session) -> int:
    return int(client.ask("asked")[0].split()[1])


def test_kernels_beyond_the_table_are_launched_as_they_are_and_never_looked_at_again(built: Built, tmp_path: Path) -> None:
    with session(built, tmp_path, FilterRule(pattern="*", priority=-1)) as client:
        client.find()
        assert client.ask(f"many {MORE_THAN_KEPT}")[0].startswith("failed 0 ")
        assert again(client, 3) == (0, 0)
        state = client.state()
        assert state.num_launches == 4 * MORE_THAN_KEPT
        assert len(state.functions) == layout.MAX_FUNCTIONS
        assert state.problem.startswith("more kernels than the launch filter keeps")


def test_an_unload_makes_room_in_a_full_table(built: Built, tmp_path: Path) -> None:
    with session(built, tmp_path, FilterRule(pattern="capped", priority=-1)) as client:
        client.find()
        client.make("other")
        client.launch("other")
        client.ask(f"many {MORE_THAN_KEPT}")
        client.ask("unload other")
        client.make("capped")  # on the handle that has just become free
        assert client.launch("capped").last.priority == -1


@pytest.mark.parametrize("is_kernel", [False, True])
def test_an_unload_makes_no_other_kernel_be_looked_at_again(built: Built, tmp_path: Path, is_kernel: bool) -> None:
    with session(built, tmp_path, FilterRule(pattern="*", dynamic_shared_bytes=60_000)) as client:
        client.find()
        client.make("stays")
        client.make("stays_too", is_kernel=True)
        client.ask("many 500")
        for name in ("stays", "stays_too"):
            client.launch(name)
        for _ in range(3):
            client.make("temporary", is_kernel=is_kernel)
            client.launch("temporary")
            before = asked(client)
            client.ask("unload temporary")
            assert again(client, 1) == (0, 0)
            for name in ("stays", "stays_too"):
                assert client.launch(name).last.shared == 60_000
            assert asked(client) == before
        assert {seen.name: seen.num_launches for seen in client.state().functions}["temporary"] == 3


def test_where_the_driver_does_not_tell_the_module_names_are_compared(built: Built, tmp_path: Path) -> None:
    with session(built, tmp_path, FilterRule(pattern="cap*", dynamic_shared_bytes=60_000)) as client:
        client.find()
        handle = client.make("capped")
        client.launch("capped")
        before = asked(client)
        client.ask("unload_library capped")  # its functions have other modules, so all functions are in doubt
        assert client.make("other") == handle
        assert client.launch("other").last.shared == 0
        assert asked(client) > before
