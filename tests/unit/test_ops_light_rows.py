"""The light kernel for rows of experts, compiled for the host: every row reaches its place, and every flag is right; and the
argument built here is the one that it reads. GPUs run it in tests/multigpu."""

import ctypes
import importlib
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
HELPERS = Path(__file__).resolve().parents[1] / "helpers"
SOURCE = resources.files("counterpoint.ops").joinpath("light.cu").read_text()
WIDTH = 36  # numbers in a row of the double's memory
ROW_BYTES = 16 * 133  # a whole unrolled step of a warp, and a rest


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """What builds the table and the argument, on a double of the driver; both are forgotten afterwards."""
    importlib.import_module("counterpoint.ops")  # registers operators, which happens once
    bindings = ModuleType("cuda.bindings")
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    for name in ("driver", "nvrtc"):
        setattr(bindings, name, MagicMock())
        monkeypatch.setitem(sys.modules, f"cuda.bindings.{name}", getattr(bindings, name))
    before = dict(sys.modules)
    yield importlib.import_module("counterpoint.ops.expert_light"), importlib.import_module("counterpoint.ops.light_kernels")
    for name in set(sys.modules) - set(before):
        del sys.modules[name]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The kernel as a function of the host: (argument, number of CTAs)."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ with C++20")
    folder = tmp_path_factory.mktemp("light")
    (folder / "rows.cu").write_text(SOURCE[SOURCE.index("#define WARPS") :])
    library = folder / "rows.so"
    named = f'-DROWS_CU="{folder / "rows.cu"}"'
    host = HELPERS / "light_rows_on_host.cpp"
    subprocess.run(
        [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", named, str(host), "-o", str(library)], check=True
    )
    return ctypes.CDLL(str(library)).run


def test_the_argument_has_the_fields_that_the_kernel_reads(modules: tuple[Any, Any]) -> None:
    _, kernels = modules
    body = re.search(r"struct LightRows \{(.*?)\n\};", SOURCE, re.DOTALL)
    assert body
    declared = [
        name
        for names in re.findall(r"^    \w+ ([^;]+);", body[1], re.MULTILINE)
        for name in re.sub(r"\[.*?\]", "", names).split(", ")
    ]
    assert declared == [name for name, _ in kernels.LightRows._fields_]
    assert kernels.ROWS in SOURCE
    assert kernels.WARPS * 32 == kernels.THREADS


@pytest.mark.parametrize("seed", range(6))
def test_all_ranks_together_deliver_every_row_there_and_back(modules: tuple[Any, Any], kernel: Any, seed: int) -> None:
    chance = random.Random(seed)
    num_ranks, num_experts = chance.randint(1, 3), chance.randint(1, 4)
    layouts = importlib.import_module("counterpoint.schedule.expert_layout")
    draw = [chance.choice([0, 0, 1, 3, 9]) for _ in range(num_ranks * num_ranks * num_experts)]
    counts = np.array(draw).reshape(num_ranks, num_ranks, num_experts)
    every = [layouts.ExpertLayout(counts, rank, 1) for rank in range(num_ranks)]
    drawn = np.random.default_rng(seed)
    tokens = [aligned_rows(drawn, layout.num_tokens) for layout in every]
    landed = [aligned_rows(drawn, layout.num_rows) for layout in every]
    for layout in every:
        blocks = [
            (tokens[layout.rank].ctypes.data, landed[to].ctypes.data, layout.block_arrays(layout.rank, to, 0))
            for to in range(num_ranks)
        ]
        run(modules, kernel, blocks, [peer for peer, _ in layout.outgoing()], chance.choice([1, 3]))
    for source, destination in np.ndindex(num_ranks, num_ranks):
        for block in every[source].blocks(source, destination, 0):
            there = landed[destination][block.placed : block.placed + block.num_rows]
            assert (there == tokens[source][block.sent : block.sent + block.num_rows]).all()
    returned = [aligned_rows(drawn, layout.num_tokens) for layout in every]
    for layout in every:
        back = []
        for to in range(num_ranks):
            sent, placed, num_rows = layout.block_arrays(to, layout.rank, 0)
            back.append((landed[layout.rank].ctypes.data, returned[to].ctypes.data, (placed, sent, num_rows)))
        run(modules, kernel, back, layout.sources(0), 2)
    assert all((one == other).all() for one, other in zip(returned, tokens, strict=True))


class Group:
    """What the ranks of a group share on a double of the driver, where everything ends at once: memory and flags."""

    def __init__(self, num_ranks: int, num_numbers: int, resting: list[int], most_rows: int) -> None:
        self.flags = np.repeat(np.array(resting, dtype=np.uint32)[None, :, None], num_ranks, 0).repeat(num_ranks, 2)
        self.memory = [torch.empty(3, most_rows, WIDTH) for _ in range(num_ranks)]
        assert self.flags.shape == (num_ranks, num_numbers, num_ranks)


class Exchange:
    """One rank's `ExpertCopies`, without streams."""

    device, ready = torch.device("cpu"), None

    def __init__(self, group: Group, rank: int, make_outbox: Any, copies: Any) -> None:
        self._group, self._rank, self._make_outbox, self._copies = group, rank, make_outbox, copies
        self.light_counter = torch.zeros(1, dtype=torch.int32)
        self.flags = self.signals = self

    def own(self, number: int, peer: int) -> int:
        return int(self._group.flags[self._rank, number, peer : peer + 1].ctypes.data)

    def of_peer(self, number: int, peer: int) -> int:
        return int(self._group.flags[peer, number, self._rank : self._rank + 1].ctypes.data)

    def take(self, number: int, peers: tuple[int, ...], _stream: object) -> None:
        for peer in peers:
            assert self._group.flags[self._rank, number, peer] == 1, "on a GPU the stream would wait here for ever"
            self._group.flags[self._rank, number, peer] = 0

    def raise_to(self, number: int, peers: tuple[int, ...], _stream: object) -> None:
        for peer in peers:
            assert self._group.flags[peer, number, self._rank] == 0
            self._group.flags[peer, number, self._rank] = 1

    def address(self, region: int, peer: int) -> int:
        return self._group.memory[peer][region].data_ptr()

    def region(self, region: int, _rows: object, num_rows: int) -> Any:
        return self._group.memory[self._rank][region, :num_rows]

    def outbox(self, region: Any, rows: Any) -> Any:
        return self._make_outbox(self, region, rows.format.num_bytes)

    def arrived_flag(self, region: Any, number: int) -> int:
        return int(self._copies.ExpertCopies.arrived_flag(self, region, number))

    def copy_blocks(self, copies: Any, _stream: object) -> None:
        for target, source, num_bytes in zip(*copies, strict=True):
            ctypes.memmove(target, source, num_bytes)

    def collecting(self, _mark: object) -> Any:
        return nullcontext()

    def current(self) -> None: ...
    def copy_stream(self, _name: str) -> None: ...
    def torch_stream(self, _name: str) -> None: ...
    def join(self, _names: object) -> None: ...
    def mark(self) -> None: ...


@pytest.mark.parametrize("most_own_bytes", [1 << 21, 1], ids=["own rows by the kernel", "too many own rows"])
@pytest.mark.parametrize("kinds", [("light", "light"), ("light", "copies", "light"), ("copies", "copies")])
def test_dispatch_and_combine_are_the_same_by_kernels_and_by_copies(
    modules: tuple[Any, Any], kernel: Any, monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...], most_own_bytes: int
) -> None:
    light, kernels = modules
    copies = importlib.import_module("counterpoint.ops.expert_copies")
    exchanges = importlib.import_module("counterpoint.ops.expert_exchange")
    layouts = importlib.import_module("counterpoint.schedule.expert_layout")

    def launch(moves: Any, signals: Any, most_ctas: int, _stream: object) -> None:
        assert most_ctas == 16
        kernel(ctypes.byref(kernels.rows_argument(moves, signals)), 2)

    monkeypatch.setattr(light, "launch_rows", launch)
    monkeypatch.setattr(light, "LIGHT", msgspec.structs.replace(light.LIGHT, below_pair_bytes=most_own_bytes))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(copies, "has_triton", lambda: False)
    for module in (light, copies):
        monkeypatch.setattr(module, "check", lambda *_: None)
    num_ranks, num_experts = len(kinds), 3
    counts = np.random.default_rng(len(kinds)).integers(0, 4, (num_ranks, num_ranks, num_experts))
    group = Group(num_ranks, len(copies.RESTING), copies.RESTING, int(counts.sum()) + 1)
    ranks = []
    for rank, kind in enumerate(kinds):
        sorting = exchanges.Sorting(rank, num_experts)
        sorting.prepare(torch.from_numpy(counts.reshape(num_ranks, -1)))
        layout = sorting.layout = layouts.ExpertLayout(counts, rank, 1)
        rows = exchanges.Rows(layout, exchanges.RowFormat(WIDTH, torch.float32, torch.device("cpu")), sorting, True)
        make_outbox = light.LightOutbox if kind == "light" else copies.Outbox
        ranks.append((Exchange(group, rank, make_outbox, copies), rows, torch.randn(layout.num_tokens, WIDTH)))
    for _ in range(2):  # the second call finds the flags as the first one did
        sent = [copies.CopyDispatch(exchange, rows, 0, tokens) for exchange, rows, tokens in ranks]
        arrived = [each.group(0).clone() for each in sent]
        for each in sent:
            each.release()
        for destination, (_, rows, _) in enumerate(ranks):
            for source, (_, _, tokens) in enumerate(ranks):
                for block in rows.layout.blocks(source, destination, 0):
                    there = arrived[destination][block.placed : block.placed + block.num_rows]
                    assert torch.equal(there, tokens[block.sent : block.sent + block.num_rows])
        back = [copies.CopyCombine(exchange, rows) for exchange, rows, _ in ranks]
        for each, results in zip(back, arrived, strict=True):
            each.add(0, 2 * results)
        for each, (_, _, tokens) in zip(back, ranks, strict=True):
            assert torch.equal(each.results(), 2 * tokens)
            each.join()
        assert (group.flags == np.array(copies.RESTING)[None, :, None]).all(), "all flags are at rest"


def aligned_rows(drawn: Any, num_rows: int) -> Any:
    """Random rows that begin at a multiple of 16 bytes."""
    memory = drawn.integers(0, 256, num_rows * ROW_BYTES + 16, dtype=np.uint8)
    start = -memory.ctypes.data % 16
    return memory[start : start + num_rows * ROW_BYTES].reshape(num_rows, ROW_BYTES)


def run(modules: tuple[Any, Any], kernel: Any, blocks: list[Any], peers: list[int], num_ctas: int) -> None:
    """Run the kernel of one rank, and check that it took and set each peer's flag, and left its counter at rest."""
    light, kernels = modules
    table, num_rows = light.row_table(blocks, ROW_BYTES)
    free, arrived = np.ones(8, dtype=np.uint32), np.zeros(8, dtype=np.uint32)
    done = np.zeros(1, dtype=np.uint32)
    moves = kernels.RowMoves(
        table=table.ctypes.data, num_blocks=len(table), num_rows=num_rows, row_vectors=ROW_BYTES // kernels.VECTOR_BYTES
    )
    signals = kernels.RowSignals(
        free=tuple(free.ctypes.data + 4 * peer for peer in peers),
        arrived=tuple(arrived.ctypes.data + 4 * peer for peer in peers),
        done=done.ctypes.data,
    )
    if num_rows:
        kernel(ctypes.byref(kernels.rows_argument(moves, signals)), num_ctas)
    assert [int(each) for each in np.flatnonzero(free == 0)] == sorted(peers)
    assert [int(each) for each in np.flatnonzero(arrived)] == sorted(peers)
    assert done[0] == 0
