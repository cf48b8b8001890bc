"""Light collectives: which bytes each rank's kernel moves from where to where, on doubles of the driver and of the group;
and that the argument built here is the one that light.cu reads. What the kernels do is in tests/multigpu."""

import importlib
import re
import sys
from collections.abc import Iterator
from importlib import resources
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

torch = pytest.importorskip("torch")
SIZE = 4096  # bytes of one rank's whole tensor
GIVEN, GOT = 1 << 20, 2 << 20  # addresses on the rank itself; another rank's are OTHER further
OTHER = 16 << 20
FLAGS = 64 << 20


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module on a double of the driver; whatever was imported on the double is forgotten."""
    importlib.import_module("counterpoint.ops.runtime")  # needs no driver, and registers operators, which happens once
    bindings = ModuleType("cuda.bindings")
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    for name in ("driver", "nvrtc"):
        double = MagicMock()
        setattr(bindings, name, double)
        monkeypatch.setitem(sys.modules, f"cuda.bindings.{name}", double)
    before = dict(sys.modules)
    yield importlib.import_module("counterpoint.ops.light_collectives")
    for name in set(sys.modules) - set(before):
        del sys.modules[name]


def issued(module: Any, collective: str, reduction: str = "", dtype: Any = None, num_bytes: int = SIZE) -> Any:
    blocks = importlib.import_module("counterpoint.cuda.collective_blocks")
    dtype = dtype or torch.bfloat16
    small, large = num_bytes // dtype.itemsize // 2, num_bytes // dtype.itemsize
    given = small if collective == "all_gather" else large
    got = small if collective == "reduce_scatter" else large

    def extent(address: int, number: int) -> Any:
        return blocks.Extent(address=address, num_elements=number, dtype=dtype, is_contiguous=True)

    group = SimpleNamespace(group_name="group", rank=lambda: 1, size=lambda: 2)
    return blocks.IssuedCollective(
        collective=collective,
        group=group,
        given=extent(GIVEN, given),
        got=extent(GOT, got),
        reduction=reduction,
        nodes=(1,),
    )


def launches(module: Any, monkeypatch: pytest.MonkeyPatch, *collectives: Any) -> list[Any]:
    """What rank 1 of 2 prepares: the kernel's name, what it moves, and its flags; or why nothing."""
    runtime = SimpleNamespace(
        obstacle="",
        group=collectives[0].group,
        agreement=SimpleNamespace(exchange=lambda own: [own, own]),
    )
    monkeypatch.setattr(module, "runtime_of", lambda name, device: runtime)
    monkeypatch.setattr(module.torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(module, "ipc_memory_of", lambda address: module.IpcMemory(allocation=b"", offset=address))
    memory = MagicMock()
    memory.return_value.address_of.side_effect = lambda place: place.offset + OTHER
    monkeypatch.setattr(module, "PeerMemory", memory)
    flags = SimpleNamespace(local=torch.ones(1), addresses=[FLAGS + OTHER, FLAGS])
    monkeypatch.setattr(module, "SymmetricMemory", lambda *_: flags)
    monkeypatch.setattr(module, "launch_of", lambda kernel, moves, signals: (kernel, moves, signals))
    return list(module.LightCollectives(collectives, torch.device("cpu")).made)


@pytest.mark.parametrize(
    ("collective", "reduction", "moves"),
    [
        ("all_gather", "", ((GIVEN, GIVEN), (GOT + SIZE // 2 + OTHER, GOT + SIZE // 2), (SIZE // 2,) * 2, 1.0)),
        (
            "all_to_all",
            "",
            ((GIVEN, GIVEN + SIZE // 2), (GOT + SIZE // 2 + OTHER, GOT + SIZE // 2), (SIZE // 2,) * 2, 1.0),
        ),
        ("reduce_scatter", "mean", ((GIVEN + SIZE // 2 + OTHER, GIVEN + SIZE // 2), (GOT,), (SIZE // 2,), 0.5)),
        (
            "all_reduce",
            "sum",
            (
                (GIVEN + SIZE // 2 + OTHER, GIVEN + SIZE // 2),
                (GOT + SIZE // 2 + OTHER, GOT + SIZE // 2),
                (SIZE // 2,),
                1.0,
            ),
        ),
    ],
)
def test_a_rank_pushes_its_blocks_and_sums_its_own_block_of_all_ranks(
    module: Any, monkeypatch: pytest.MonkeyPatch, collective: str, reduction: str, moves: tuple[object, ...]
) -> None:
    ((kernel, found, _),) = launches(module, monkeypatch, issued(module, collective, reduction))
    assert kernel == ("counterpoint_light_reduce_bfloat16" if reduction else "counterpoint_light_push")
    assert (found.source, found.target, found.num_bytes, found.scale) == moves


def test_each_collective_has_flags_of_its_own_and_ranks_agree_on_where(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (_, _, first), (_, _, second) = launches(module, monkeypatch, *[issued(module, "all_gather")] * 2)
    row = 4 * module.MOST_LIGHT_CTAS  # bytes: a word for each CTA
    assert (first.raised, first.awaited) == ((FLAGS + OTHER + row,), (FLAGS,)), "rank 1 raises row 1, and awaits row 0"
    assert (second.raised, second.awaited) == ((FLAGS + OTHER + 3 * row,), (FLAGS + 2 * row,))
    assert second.counts - first.counts == row


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (("all_reduce", "other"), "by something else than a sum or a mean"),
        (("all_reduce", "sum", torch.int32), "it reduces int32; light kernels support only float32, bfloat16, float16"),
        (("all_gather", "", torch.bfloat16, SIZE + 4), "multiples of 16 bytes"),
    ],
)
def test_what_light_kernels_cannot_do_is_refused_with_the_reason(
    module: Any, monkeypatch: pytest.MonkeyPatch, asked: tuple[Any, ...], reason: str
) -> None:
    (found,) = launches(module, monkeypatch, issued(module, *asked))
    assert reason in found


def test_the_argument_has_the_fields_that_the_kernels_read(module: Any) -> None:
    kernels = importlib.import_module("counterpoint.ops.light_kernels")
    source = resources.files("counterpoint.ops").joinpath("light.cu").read_text()
    body = re.search(r"struct LightArgument \{(.*?)\n\};", source, re.DOTALL)
    assert body
    declared = [
        name
        for names in re.findall(r"^    \w+ ([^;]+);", body[1], re.MULTILINE)
        for name in re.sub(r"\[.*?\]", "", names).split(", ")
    ]
    assert declared == [name for name, _ in kernels.LightArgument._fields_]
    assert f"#define MAX_PEERS {kernels.MAX_PEERS}\n" in source
    assert f"#define THREADS {kernels.THREADS}\n" in source
    assert all(name in source for name in (kernels.PUSH, *kernels.REDUCE.values()))
