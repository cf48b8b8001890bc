"""Which calls of a schedule use which kernels, and which of them are recorded: on a double of the driver."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from helpers.bindings_double import double_of_bindings

pytest.importorskip("torch")

import torch

from counterpoint.ops import graph_cache, kernel_trial, products
from counterpoint.ops.graph_cache import Recordings
from counterpoint.ops.kernel_trial import NUM_TURNS, STARTS, takes_chosen_in


class Product:
    """Stands for a product with a chosen kernel; a measurement is over one call later."""

    def __init__(self, chosen: int) -> None:
        self.chosen, self.num_measured, self.num_asked = chosen, 0, 0

    def measure(self) -> None:
        self.num_measured += 1

    def is_chosen(self) -> bool:
        self.num_asked += 1
        return self.num_asked > 1


class Event:
    """Stands for an event; the GPU has passed it, and each call takes what the script says."""

    now = 0.0

    def __init__(self, **_: bool) -> None:
        self.at = 0.0

    def record(self, _stream: object) -> None:
        self.at = Event.now

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Event") -> float:
        return end.at - self.at


class Calls:
    """A schedule whose calls only note how they ran: issued or replayed, by which kernels, in whose capture."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, product: Product, gain: float, *, is_recorded: bool = True) -> None:
        module = importlib.import_module("counterpoint.ops.compiled_copies")
        self.ran: list[str] = []
        self.order = MagicMock(is_in_capture=False)
        self.recordings: Recordings[Any] = Recordings(is_enabled=is_recorded)
        self.weight, self._gain = torch.ones(4, 4), gain
        monkeypatch.setattr(module.CompiledCopies, "_issue", lambda _self, _call: self._run("issued"))
        monkeypatch.setattr(module.CompiledCopies, "_record", lambda *_: self._recorded())
        monkeypatch.setattr(module.CompiledCopies, "_products", lambda *_: [product])
        monkeypatch.setattr(module.CompiledCopies, "_present_call", lambda *_: None)
        self.copies = copies = object.__new__(module.CompiledCopies)
        memory = object()
        copies._shared = SimpleNamespace(
            memory=lambda: memory, order=self.order, recordings=self.recordings, device=SimpleNamespace(index=0)
        )
        self.settings: tuple[object, ...] = ()
        monkeypatch.setattr(module, "check", lambda _what, result: result)
        monkeypatch.setattr(module, "half_precision_settings", lambda: self.settings)
        copies._memory, copies._sliced, copies._local, copies._trials = memory, [], [], {}
        copies._may_be_recorded = True

    def call(self, shard: torch.Tensor) -> str:
        """Make a call; return how it ran."""
        self.copies.run({"shard": shard}, [self.weight])
        return self.ran[-1]

    def _run(self, how: str, by_chosen: bool | None = None) -> None:
        by_chosen = products.THREAD.takes_chosen if by_chosen is None else by_chosen
        Event.now += 1 - self._gain if by_chosen else 1.0
        self.ran.append(f"{how} {'chosen' if by_chosen else 'first'}")

    def _recorded(self) -> SimpleNamespace:
        by_chosen = products.THREAD.takes_chosen
        return SimpleNamespace(replay=lambda: self._run("replayed", by_chosen))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Calls]]:
    """Makes `Calls`; nothing of them is left afterwards."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(kernel_trial, "is_wanted", lambda: True)
    monkeypatch.setattr(graph_cache, "Allocations", lambda _: SimpleNamespace(are_present=lambda: True))
    for name in ("_cuda_getCurrentRawStream", "_cuda_tunableop_is_enabled"):
        monkeypatch.setattr(torch._C, name, lambda *_: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    with double_of_bindings():
        importlib.import_module("counterpoint.ops.compiled_copies")
        yield lambda *arguments, **named: Calls(monkeypatch, *arguments, **named)


NAMES = {False: "replayed first", True: "replayed chosen"}
FIRST_TURN = STARTS - 1  # as calls are counted from 0
SIDES = [takes_chosen_in(number) for number in range(80)]


def sides_until_decided(num_uncounted: int = 1) -> list[bool]:
    """The sides of one address's calls; the first one by chosen kernels is recorded, which does not count."""
    counted = {False: 0, True: -num_uncounted}
    for number, side in enumerate(SIDES):
        if min(counted.values()) >= NUM_TURNS:
            return SIDES[:number]
        counted[side] += 1
    raise AssertionError("never decided")


@pytest.mark.parametrize(("gain", "wins"), [(0.05, True), (0.001, False), (-0.2, False)])
def test_recordings_take_turns_and_only_the_faster_one_is_kept(calls: Callable[..., Calls], gain: float, wins: bool) -> None:
    product, shard = Product(chosen=3), torch.ones(2, 4)
    made = calls(product, gain)
    ran = [made.call(shard) for _ in range(60)]
    assert ran[:FIRST_TURN] == ["issued first"] * 2 + ["replayed first"] * (FIRST_TURN - 2), "the third is recorded"
    end = FIRST_TURN + len(sides_until_decided())
    assert ran[FIRST_TURN:end] == [NAMES[side] for side in sides_until_decided()]
    assert set(ran[end:]) == {NAMES[wins]}
    assert product.num_measured == 1
    assert len(made.recordings) == 1
    assert made.copies.kernels() == ("chosen by their times" if wins else "the library's first choice")


def test_layers_of_a_shape_share_its_turns_and_drop_the_loser(calls: Callable[..., Calls]) -> None:
    made, shards = calls(Product(chosen=3), 0.05), [torch.ones(2, 4) for _ in range(8)]
    steps = [[made.call(shard) for shard in shards] for _ in range(12)]
    assert steps[0][:FIRST_TURN] == ["issued first"] * FIRST_TURN
    assert "replayed chosen" in steps[4]
    assert steps[-1] == ["replayed chosen"] * 8
    assert len(made.recordings) == 8


def test_addresses_that_never_come_again_take_turns_in_the_end(calls: Callable[..., Calls], monkeypatch: Any) -> None:
    monkeypatch.setattr(kernel_trial, "PATIENCE", 63)
    made = calls(Product(chosen=3), 0.05)
    ran = [made.call(shard) for shard in [torch.ones(2, 4) for _ in range(100)]]
    assert {each.split()[0] for each in ran} == {"issued"}
    assert set(ran[-20:]) == {"issued chosen"}


def test_nothing_is_recorded_twice_where_no_kernel_is_faster(calls: Callable[..., Calls]) -> None:
    made, shard = calls(Product(chosen=0), 0.05), torch.ones(2, 4)
    made.call(shard)
    assert made.copies.kernels() == "the library's first choice, while others are timed"
    assert [made.call(shard) for _ in range(29)] == ["issued first"] + ["replayed first"] * 28
    assert len(made.recordings) == 1


def test_without_recordings_calls_that_are_issued_take_the_turns(calls: Callable[..., Calls]) -> None:
    made, shard = calls(Product(chosen=3), 0.05, is_recorded=False), torch.ones(2, 4)
    ran = [made.call(shard) for _ in range(40)]
    sides = sides_until_decided(num_uncounted=0)
    assert ran[FIRST_TURN:][: len(sides)] == [NAMES[side].replace("replayed", "issued") for side in sides]
    assert set(ran[FIRST_TURN + len(sides) :]) == {"issued chosen"}


def test_a_call_that_its_caller_captures_takes_no_turn_and_uses_what_is_decided(calls: Callable[..., Calls]) -> None:
    made, shard = calls(Product(chosen=3), 0.05), torch.ones(2, 4)
    captured = []
    for _ in range(40):
        made.call(shard)
        made.order.is_in_capture = True
        captured.append(made.call(shard))
        made.order.is_in_capture = False
    sides = sides_until_decided()
    assert captured[: FIRST_TURN + len(sides)] == ["issued first"] * (FIRST_TURN + len(sides))
    assert set(captured[FIRST_TURN + len(sides) :]) == {"issued chosen"}
    assert made.ran[::2][FIRST_TURN:][: len(sides)] == [NAMES[side] for side in sides]


def test_other_settings_of_torch_are_another_choice(calls: Callable[..., Calls]) -> None:
    made, shard = calls(Product(chosen=3), 0.05), torch.ones(2, 4)
    assert [made.call(shard) for _ in range(40)][-1] == "replayed chosen"
    made.settings = ("deterministic",)
    assert [made.call(shard) for _ in range(4)] == ["issued first"] * 2 + ["replayed first"] * 2
    made.settings = ()
    assert made.call(shard) == "replayed chosen"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, AttributeError])
def test_a_failure_leaves_the_first_kernels_and_one_warning(
    error: type[Exception],
    calls: Callable[..., Calls],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(_: Product) -> None:
        raise error("no room")

    monkeypatch.setattr(Product, "measure", fail)
    made, shard = calls(Product(chosen=3), 0.05), torch.ones(2, 4)
    assert [made.call(shard) for _ in range(30)][2:] == ["replayed first"] * 28
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("torch's own kernels multiply, because others could not be timed (")
    assert "no room" in message
