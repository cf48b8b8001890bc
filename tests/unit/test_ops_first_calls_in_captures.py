"""What runs for the first time within a capture is refused in one line, and leaves nothing behind; streams are kept."""

import pytest

from counterpoint.errors import OperatorError
from counterpoint.schedule import ScheduleDescription

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
ops = pytest.importorskip("counterpoint.ops")
graph_cache = pytest.importorskip("counterpoint.ops.graph_cache")
runtime = pytest.importorskip("counterpoint.ops.runtime")
streams = pytest.importorskip("counterpoint.ops.streams")

CPU = torch.device("cpu")
REFUSAL = "has not run before this capture, and its first run cannot be captured. Run it once before."


class Capture:
    """Stands for a capture: there is none on CPUs."""

    is_on = False

    def __call__(self, device: object) -> bool:
        return self.is_on


@pytest.fixture
def capture(group_of_one: None, monkeypatch: pytest.MonkeyPatch) -> Capture:
    """A process group of this process alone, and a capture that can be switched on."""
    found = Capture()
    monkeypatch.setattr(graph_cache, "is_capturing", found)
    monkeypatch.setattr(runtime, "is_capturing", found)
    return found


def call(num_rows: int) -> None:
    ops.all_gather_matmul(torch.ones(num_rows, 3), torch.ones(3, 2), schedule=ScheduleDescription(chunks=2))


def test_a_groups_first_call_is_refused_in_a_capture_and_nothing_is_left_of_it(capture: Capture) -> None:
    capture.is_on = True
    with pytest.raises(OperatorError, match=REFUSAL):
        call(4)
    assert ops.pool_report() == ()
    capture.is_on = False
    call(4)
    capture.is_on = True
    call(4)


def test_a_shape_is_refused_in_a_capture_unless_it_was_run(capture: Capture) -> None:
    call(4)
    capture.is_on = True
    with pytest.raises(OperatorError, match=r"all_gather_matmul of \(8, 3\) @ \(3, 2\) float32 with .*" + REFUSAL):
        call(8)
    assert len(ops.explain()) == 1
    capture.is_on = False
    call(8)


def test_a_lane_is_refused_in_a_capture_unless_it_was_used(capture: Capture) -> None:
    call(4)
    found = runtime.runtime_of(dist.group.WORLD.group_name, CPU)
    capture.is_on = True
    with pytest.raises(OperatorError, match=f"A collective on a lane named a test {REFUSAL}"):
        found.lane("a test")
    capture.is_on = False
    lane = found.lane("a test")
    capture.is_on = True
    assert found.lane("a test") is lane


def test_a_call_that_is_wrong_is_refused_in_a_capture_without_asking_the_other_ranks(
    capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    call(4)
    capture.is_on = True
    found = runtime.runtime_of(dist.group.WORLD.group_name, CPU)
    monkeypatch.setattr(found.agreement, "refuse", lambda problem: pytest.fail("the host waits for others in a capture"))
    with pytest.raises(OperatorError, match="operands of one type"):
        ops.all_gather_matmul(torch.ones(4, 3), torch.ones(3, 2).double())


def test_nothing_is_captured_on_cpus() -> None:
    assert not graph_cache.is_capturing(CPU)


def test_a_groups_streams_are_made_once_for_each_name_and_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: object())
    device = torch.device("cuda", 0)
    wanted = [("one", device, "copy 0"), ("one", device, "copy 1"), ("two", device, "copy 0"), ("one", device, "copy 0", -5)]
    try:
        first = [streams.stream_of(*each) for each in wanted]
        assert len(set(first)) == len(wanted)
        assert [streams.stream_of(*each) for each in wanted] == first
    finally:
        streams.stream_of.cache_clear()


@pytest.mark.parametrize(("group", "words"), [(None, "no process group"), (5, "found a value of type int")])
def test_a_group_that_is_none_is_one_line(group: object, words: str) -> None:
    with pytest.raises(OperatorError, match=words) as caught:
        ops.all_gather_matmul(torch.ones(4, 4), torch.ones(4, 4), group)
    assert "\n" not in str(caught.value)
