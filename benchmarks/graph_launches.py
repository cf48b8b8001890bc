"""Where the host time of a recorded call goes: launching CUDA graphs by the kind and number of nodes, by branches, and by
what was launched before; and the same copies issued without a graph.

    python -m benchmarks.graph_launches -o graph_launches.json    # one process, one GPU; with two, copies go to the other

Each time is the host's, per launch, while the GPU is kept busy, so that nothing waits for results. Cases take turns in
balanced order. `--list` prints the cases and needs no GPU.
"""

import argparse
import ctypes
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

Kind = Literal["small kernel", "matmul", "copy", "copy to peer", "signal"]
Way = Literal["graph", "graph in flight", "graph among 64", "driver's bindings", "one batch", "C"]
KIB = 1024
COPY_BYTES, MATMUL_SIZE = 256 * KIB, 4096
SPIN_CYCLES = 20_000_000  # longer than a round of launches takes the host
C_SOURCE = Path(__file__).with_name("direct_calls.c")


class Case(NamedTuple):
    """What is launched: nodes of one kind, spread evenly over branches, in one way."""

    kind: Kind
    num_nodes: int
    num_branches: int = 1
    way: Way = "graph"

    def label(self) -> str:
        """For a table."""
        return f"{self.num_nodes} x {self.kind} on {self.num_branches} branches, {self.way}"


def cases() -> list[Case]:
    """All of them: nodes and branches for each kind, then what else a launch may depend on, then copies without a graph."""
    sizes = ((1, 1), (4, 1), (16, 1), (64, 1), (4, 4), (16, 4))
    found = [Case(kind, *size) for kind in get_args(Kind) for size in sizes]
    found += [Case(kind, 16, 4, way) for kind in get_args(Kind) for way in ("graph in flight", "graph among 64")]
    ways: tuple[Way, ...] = ("driver's bindings", "one batch", "C")
    return found + [Case("copy to peer", number, way=way) for number in (4, 16, 64) for way in ways]


class Nodes:
    """Memory that the nodes work on, and how each kind is issued on a stream."""

    def __init__(self) -> None:
        import torch  # noqa: PLC0415  --list and --help need neither
        from cuda.bindings import driver  # noqa: PLC0415

        self.torch, self.driver = torch, driver
        peer = torch.device("cuda", 1 if torch.cuda.device_count() > 1 else 0)
        self.source, self.target = (torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
        self.remote = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=peer)
        self.remote.copy_(self.source)  # torch lets the GPUs reach each other
        self.matrix = torch.zeros(MATMUL_SIZE, MATMUL_SIZE, dtype=torch.bfloat16, device="cuda")
        self.product = torch.mm(self.matrix, self.matrix)
        self.word = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.stream = torch.cuda.Stream()  # a batch of copies refuses the default stream
        self.library = load_direct_calls(Path(tempfile.mkdtemp()))
        self.copy_function = ctypes.cast(ctypes.CDLL("libcuda.so.1").cuMemcpyAsync, ctypes.c_void_p)

    def issue(self, kind: Kind) -> None:
        """One node on the current stream."""
        torch, driver = self.torch, self.driver
        stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
        if kind == "small kernel":
            self.word.add_(1)
        elif kind == "matmul":
            torch.mm(self.matrix, self.matrix, out=self.product)
        elif kind == "signal":
            from counterpoint.ops.driver_calls import WRITE, memory_operation  # noqa: PLC0415

            operation = memory_operation(WRITE, self.word.data_ptr(), 1)
            require_success(driver.cuStreamBatchMemOp(stream, 1, [operation], 0))
        else:
            target = self.target if kind == "copy" else self.remote
            require_success(driver.cuMemcpyAsync(target.data_ptr(), self.source.data_ptr(), COPY_BYTES, stream))

    def graph(self, case: Case) -> Any:
        """A case's nodes, captured: branches leave the first stream and come back to it."""
        torch = self.torch
        graph, first = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        branches = [first, *(torch.cuda.Stream() for _ in range(case.num_branches - 1))]
        with torch.cuda.graph(graph, stream=first):
            for branch in branches[1:]:
                branch.wait_stream(first)
            for branch in branches:
                with torch.cuda.stream(branch):
                    for _ in range(case.num_nodes // case.num_branches):
                        self.issue(case.kind)
            for branch in branches[1:]:
                first.wait_stream(branch)
        return graph

    def launcher(self, case: Case) -> tuple[Callable[[], object], int]:
        """What is timed, and how many launches it makes."""
        if case.way == "graph":
            return self.graph(case).replay, 1
        if case.way == "graph in flight":
            graph = self.graph(case)
            return lambda: [graph.replay() for _ in range(4)], 4
        if case.way == "graph among 64":
            graphs = [self.graph(case) for _ in range(64)]
            return lambda: [graph.replay() for graph in graphs], 64
        return self.direct(case), 1

    def direct(self, case: Case) -> Callable[[], object]:
        """Copies without a graph."""
        driver, count = self.driver, case.num_nodes
        handle = self.stream.cuda_stream
        target, source = self.remote.data_ptr(), self.source.data_ptr()
        if case.way == "C":
            words = ctypes.c_uint64 * count
            addresses = words(*[target] * count), words(*[source] * count)
            stream, size = ctypes.c_void_p(handle), ctypes.c_size_t(COPY_BYTES)
            issue = self.library.issue_copies
            return lambda: require_success((issue(self.copy_function, *addresses, size, count, stream),))
        stream = driver.CUstream(handle)
        if case.way == "one batch":
            attributes = driver.CUmemcpyAttributes()
            attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
            lists = [driver.CUdeviceptr(target)] * count, [driver.CUdeviceptr(source)] * count, [COPY_BYTES] * count
            return lambda: require_success(driver.cuMemcpyBatchAsync(*lists, count, [attributes], [0], 1, stream))
        return lambda: [require_success(driver.cuMemcpyAsync(target, source, COPY_BYTES, stream)) for _ in range(count)]


def load_direct_calls(folder: Path) -> ctypes.CDLL:
    """Compile the loop in C, and load it."""
    library = folder / "direct_calls.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(C_SOURCE)], check=True)
    return ctypes.CDLL(str(library))


def require_success(result: tuple[Any, ...]) -> None:
    """Raise `RuntimeError` for an error of the driver."""
    if int(result[0]) != 0:
        raise RuntimeError(f"the driver answered {result[0]}")


def measure(chosen: list[Case], num_rounds: int) -> list[dict[str, object]]:
    """Host time of each case per launch, in us: the quartiles over rounds, the median in the middle."""
    from counterpoint.measurement.orders import Rounds, draw_seed  # noqa: PLC0415

    nodes = Nodes()
    torch = nodes.torch
    launchers = [nodes.launcher(case) for case in chosen]
    times: list[list[float]] = [[] for _ in chosen]
    rounds = Rounds(draw_seed(), len(chosen))
    for number in range(num_rounds + 2):  # the first two upload graphs and load kernels
        for place in rounds.order(number):
            call, num_launches = launchers[place]
            torch.cuda.synchronize()
            torch.cuda._sleep(SPIN_CYCLES)
            began = time.perf_counter()
            call()
            if number >= 2:
                times[place].append((time.perf_counter() - began) * 1e6 / num_launches)
    torch.cuda.synchronize()
    quartiles = [statistics.quantiles(each, n=4) for each in times]
    return [
        {**case._asdict(), "host_us": [round(us, 1) for us in each]} for case, each in zip(chosen, quartiles, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="2 or more")
    parser.add_argument("--kind", choices=get_args(Kind), action="append", help="only these kinds of nodes")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error(f"--rounds takes 2 or more; found {options.rounds}")
    chosen = [case for case in cases() if not options.kind or case.kind in options.kind]
    if options.list:
        print(*(case.label() for case in chosen), sep="\n")
        return
    result = measure(chosen, options.rounds)
    for case, row in zip(chosen, result, strict=True):
        print(f"{case.label():60} {row['host_us']} us")
    if options.output is not None:
        from benchmarks.on_gpus import conditions  # noqa: PLC0415

        options.output.write_text(json.dumps({"conditions": conditions(), "result": result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
