"""Which operator calls are recorded as graphs: those that come again, as many as there is room for, the idle making room."""

from collections.abc import Hashable

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from counterpoint.ops import recordings
from counterpoint.ops.recordings import SIGHTINGS_BEFORE, Recordings


class Graph:
    """Stands for a captured call."""


def call(kept: Recordings, key: Hashable) -> str:
    """What a call of an operator does with the recordings."""
    if kept.find(key) is not None:
        return "replayed"
    if kept.is_due(key):
        kept.keep(key, Graph())  # type: ignore[arg-type]
        return "recorded"
    return "issued"


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Recordings:
    monkeypatch.setattr(recordings, "MAX_RECORDINGS", 3)
    monkeypatch.setattr(recordings, "IDLE_CALLS", 12)
    return Recordings()


def test_a_call_is_issued_until_it_has_come_often_enough_then_recorded_then_replayed() -> None:
    kept = Recordings()
    found = [call(kept, ("op", 1)) for _ in range(SIGHTINGS_BEFORE + 3)]
    assert found == ["issued"] * SIGHTINGS_BEFORE + ["recorded", "replayed", "replayed"]
    assert len(kept) == 1


def test_addresses_that_never_come_again_are_never_recorded_and_do_not_pile_up(few: Recordings) -> None:
    assert {call(few, number) for number in range(100)} == {"issued"}
    assert len(few) == 0
    assert len(few._sightings) <= 2 * 3


def test_without_room_further_calls_are_issued_as_long_as_the_others_are_in_use(few: Recordings) -> None:
    steps = [[call(few, key) for key in range(4)] for _ in range(12)]
    assert steps[-1] == ["replayed"] * 3 + ["issued"]
    assert len(few) == 3


def test_what_is_idle_makes_room(few: Recordings) -> None:
    for _ in range(4):
        for key in range(3):
            call(few, key)
    late = [call(few, key) for _ in range(12) for key in ("new", 1)]
    assert "recorded" in late
    assert late[-2:] == ["replayed", "replayed"]
    assert few.find(0) is None, "the one that was replayed longest ago is gone"
    assert few.find(1) is not None


def test_nothing_is_replayed_after_memory_has_changed() -> None:
    kept = Recordings()
    for _ in range(SIGHTINGS_BEFORE + 1):
        call(kept, "op")
    kept.clear()
    assert call(kept, "op") == "issued"
    assert len(kept) == 0


@given(keys=st.lists(st.integers(0, 6), max_size=200))
def test_there_are_never_more_than_the_limit_and_only_what_was_recorded_is_replayed(keys: list[int]) -> None:
    kept, recorded = Recordings(), set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recordings, "MAX_RECORDINGS", 2)
        patch.setattr(recordings, "IDLE_CALLS", 5)
        for key in keys:
            found = call(kept, key)
            recorded |= {key} if found == "recorded" else set()
            assert found != "replayed" or key in recorded
            assert len(kept) <= 2


@pytest.mark.parametrize(("connections", "is_enabled"), [(None, True), ("8", True), ("32", True), ("1", False)])
def test_few_hardware_queues_forbid_recording(
    monkeypatch: pytest.MonkeyPatch, connections: str | None, is_enabled: bool
) -> None:
    if connections is None:
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    else:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    assert Recordings().is_enabled is is_enabled
