"""Which calls of a schedule use which kernels, and which of them are recorded: on a double of the driver."""

import importlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from helpers.bindings_double import double_of_bindings

pytest.importorskip("torch")

import torch

from counterpoint.ops import graph_cache, kernel_trial, products
from counterpoint.ops.graph_cache import Recordings
from counterpoint.ops.kernel_trial import PATIENCE, TURNS


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

    def record(self) -> None:
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
    with double_of_bindings():
        module = importlib.import_module("counterpoint.ops.compiled_copies")
        monkeypatch.setattr(module, "half_precision_settings", tuple)
        yield lambda *arguments, **named: Calls(monkeypatch, *arguments, **named)


AS_RECORDED = (TURNS[0], True, *TURNS[1:])
NAMES = {False: "replayed first", True: "replayed chosen"}


@pytest.mark.parametrize(("gain", "wins"), [(0.05, True), (0.001, False), (-0.2, False)])
def test_recordings_take_turns_and_the_faster_one_is_replayed(calls: Callable[..., Calls], gain: float, wins: bool) -> None:
    product, shard = Product(chosen=3), torch.ones(2, 4)
    made = calls(product, gain)
    ran = [made.call(shard) for _ in range(30)]
    assert ran[:4] == ["issued first"] * 2 + ["replayed first"] * 2, "the third call is recorded, and measures"
    assert ran[4:17] == [NAMES[turn] for turn in AS_RECORDED], "one is recorded first, which does not count"
    assert ran[17:] == [NAMES[wins]] * 13
    assert (product.num_measured, len(made.recordings)) == (1, 2)
    assert made.copies.kernels() == ("chosen by their times" if wins else "torch's")


def test_another_layer_of_the_shape_goes_on_where_the_first_one_is(calls: Callable[..., Calls]) -> None:
    made, shards = calls(Product(chosen=3), 0.05), [torch.ones(2, 4) for _ in range(8)]
    steps = [[made.call(shard) for shard in shards] for _ in range(8)]
    assert steps[0] == steps[1] == ["issued first"] * 8, "only what is replayed takes turns"
    assert steps[2] == ["replayed first"] * 8, "for the first time"
    assert [ran.split()[1] for step in steps[3:5] for ran in step][:2] == ["first", "chosen"]
    assert steps[-1] == ["replayed chosen"] * 8
    assert len(made.recordings) == 16


def test_addresses_that_never_come_again_take_turns_in_the_end(calls: Callable[..., Calls]) -> None:
    made = calls(Product(chosen=3), 0.05)
    shards = [torch.ones(2, 4) for _ in range(100)]
    ran = [made.call(shard) for shard in shards]
    assert ran[:PATIENCE] == ["issued first"] * PATIENCE
    assert ran[PATIENCE : PATIENCE + len(TURNS)] == [NAMES[turn].replace("replayed", "issued") for turn in TURNS]
    assert ran[-1] == "issued chosen"


def test_nothing_is_recorded_twice_where_no_kernel_is_faster(calls: Callable[..., Calls]) -> None:
    made, shard = calls(Product(chosen=0), 0.05), torch.ones(2, 4)
    made.call(shard)
    assert made.copies.kernels() == "torch's, while others are timed"
    assert [made.call(shard) for _ in range(9)] == ["issued first"] + ["replayed first"] * 8
    assert len(made.recordings) == 1


def test_without_recordings_calls_that_are_issued_take_the_turns(calls: Callable[..., Calls]) -> None:
    made, shard = calls(Product(chosen=3), 0.05, is_recorded=False), torch.ones(2, 4)
    ran = [made.call(shard) for _ in range(20)]
    assert ran[4:16] == [NAMES[turn].replace("replayed", "issued") for turn in TURNS]
    assert ran[16:] == ["issued chosen"] * 4


def test_a_call_that_its_caller_captures_takes_no_turn_and_uses_what_is_decided(calls: Callable[..., Calls]) -> None:
    made, shard = calls(Product(chosen=3), 0.05), torch.ones(2, 4)
    captured = []
    for _ in range(20):
        made.call(shard)
        made.order.is_in_capture = True
        captured.append(made.call(shard))
        made.order.is_in_capture = False
    assert captured == ["issued first"] * 17 + ["issued chosen"] * 3
    assert made.ran[::2][4:17] == [NAMES[turn] for turn in AS_RECORDED]
