"""What copies of a captured step's collectives hold is given back, also where making them fails half-way. On doubles of the
driver and of the group; what they do on GPUs is in tests/multigpu/test_captured_copies.py."""

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from counterpoint.errors import OperatorError
from helpers.driver_double import forget_modules_on_the_driver

pytest.importorskip("torch")
Exchange = Callable[[bytes], list[bytes]]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module on a double of the driver; whatever was imported on the double is forgotten."""
    importlib.import_module("counterpoint.ops.runtime")  # needs no driver, and registers operators, which happens once
    forget_modules_on_the_driver(monkeypatch)
    driver = MagicMock()
    bindings = ModuleType("cuda.bindings")
    bindings.driver = driver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    before = dict(sys.modules)
    found = importlib.import_module("counterpoint.ops.captured_copies")
    monkeypatch.setattr(found, "check", lambda what, result: result)
    monkeypatch.setattr(found.torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(found, "obstacle_of", lambda issued, num_ranks: "")
    blocks = SimpleNamespace(row_bytes=0, got=[(0, 4), (4, 8)], given=[(0, 4), (4, 8)])
    monkeypatch.setattr(found, "cut", lambda issued, rank, num_ranks: blocks)
    monkeypatch.setattr(found, "ipc_memory_of", lambda address: found.IpcMemory(allocation=b"", offset=0))
    monkeypatch.setattr(found, "PeerMemory", MagicMock())
    monkeypatch.setattr(found, "Flags", MagicMock())
    recorder = MagicMock()
    recorder.return_value.record.side_effect = lambda parts, places: found.CopyGraph(
        graph=parts.issued.name, targets=frozenset()
    )
    monkeypatch.setattr(found, "Recorder", recorder)
    monkeypatch.setattr(found.DirectCopies, "_destinations", lambda *_: None)
    yield found
    for name in set(sys.modules) - set(before):
        del sys.modules[name]


def make(module: Any, monkeypatch: pytest.MonkeyPatch, exchange: Exchange) -> Any:
    group = SimpleNamespace(group_name="group", rank=lambda: 0, size=lambda: 2)
    runtime = SimpleNamespace(obstacle="", group=group, agreement=SimpleNamespace(exchange=exchange))
    monkeypatch.setattr(module, "runtime_of", lambda name, device: runtime)
    monkeypatch.setattr(
        module.DirectCopies,
        "_parts",
        lambda self, issued, blocks, memory: SimpleNamespace(issued=issued, blocks=blocks, rows=None),
    )
    got = SimpleNamespace(address=0)
    collectives = [SimpleNamespace(name=name, group=group, got=got, collective="all_gather") for name in ("one", "other")]
    return module.DirectCopies(collectives, None, is_in_turn=True)


def destroyed(module: Any) -> list[str]:
    return [call.args[0] for call in module.cu.cuGraphDestroy.call_args_list]


def test_close_frees_every_graph_once_also_that_which_another_rank_refused(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exchange(own: bytes) -> list[bytes]:
        return [own, own if b"place" in own else b'["", "no copies there"]']

    copies = make(module, monkeypatch, exchange)
    assert [getattr(each, "graph", each) for each in copies.made] == ["one", "no copies there"]
    copies.close()
    copies.close()
    assert sorted(destroyed(module)) == ["one", "other"]
    module.Flags.return_value.watch.close.assert_called_once_with()


def test_what_was_made_is_given_back_where_another_rank_is_lost_half_way(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exchange(own: bytes) -> list[bytes]:
        if b"place" in own:
            return [own, own]
        raise OperatorError("rank 1 is gone")

    with pytest.raises(OperatorError, match="rank 1 is gone"):
        make(module, monkeypatch, exchange)
    assert sorted(destroyed(module)) == ["one", "other"]
    module.Flags.return_value.watch.close.assert_called_once_with()


def test_close_gives_back_the_rest_where_a_graph_cannot_be_freed(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = make(module, monkeypatch, lambda own: [own, own])
    module.cu.cuGraphDestroy.side_effect = RuntimeError("the driver is stuck")
    with pytest.raises(RuntimeError, match="stuck"):
        copies.close()
    module.Flags.return_value.watch.close.assert_called_once_with()
    module.PeerMemory.return_value.close.assert_called_once_with()
