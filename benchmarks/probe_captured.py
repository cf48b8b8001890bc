"""Probe: can captured collectives be replaced by copies, and what do launch-order edges do? torchrun, 2 GPUs."""

import os
import statistics
import sys
import traceback
from collections.abc import Callable
from contextlib import closing

import torch
import torch.distributed as dist
from cuda.bindings import driver as cu

from counterpoint.cuda.capture import record
from counterpoint.cuda.driver import DriverGraph, check
from counterpoint.cuda.ranks import join_ranks, run_and_leave

RANK = int(os.environ["RANK"])


def say(*words: object) -> None:
    print(f"[{RANK}]", *words, flush=True)


def stage(name: str):
    def wrap(function: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            dist.barrier()
            torch.cuda.synchronize()
            try:
                function()
                say(f"== {name}: done")
            except BaseException as problem:
                say(f"== {name}: FAILED {type(problem).__name__}: {problem}")
                traceback.print_exc()
                sys.stderr.flush()
        return run
    return wrap


def timed(executable, rounds: int = 9) -> float:
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream()
        executable.launch(stream.cuda_stream)
        start.record()
        executable.launch(stream.cuda_stream)
        end.record()
        torch.cuda.synchronize()
        times.append(1000 * start.elapsed_time(end))
    return statistics.median(times)


@stage("versions")
def versions() -> None:
    import cuda.bindings
    from torch.utils._python_dispatch import TorchDispatchMode
    say(torch.__version__, cuda.bindings.__version__, "ignore_compile_internals" in dir(TorchDispatchMode), os.environ.get("PYTORCH_CUDA_ALLOC_CONF"))


@stage("ipc")
def ipc() -> None:
    from counterpoint.ops.peer_memory import PeerMemory, Whereabouts, whereabouts_of
    mine = torch.full((1 << 28,), RANK + 1, dtype=torch.uint8, device="cuda")
    target = torch.zeros(1 << 28, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    place = whereabouts_of(target.data_ptr())
    places = [None] * 2
    dist.all_gather_object(places, (place.allocation.hex(), place.offset))
    memory = PeerMemory()
    other = places[1 - RANK]
    address = memory.address_of(Whereabouts(allocation=bytes.fromhex(other[0]), offset=other[1]))
    ordinal = cu.cuPointerGetAttribute(cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address)
    say("peer address", hex(address), "ordinal", ordinal)
    stream = torch.cuda.current_stream().cuda_stream
    for _ in range(2):
        dist.barrier(); torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(4):
            check("copy", cu.cuMemcpyAsync(cu.CUdeviceptr(address), cu.CUdeviceptr(mine.data_ptr()), 1 << 28, cu.CUstream(stream)))
        end.record(); torch.cuda.synchronize()
        say(f"push {4 * (1 << 28) / start.elapsed_time(end) / 1e6:.0f} GB/s")
    dist.barrier()
    say("right:", bool((target == 2 - RANK).all()))


@stage("own copy beside a matmul")
def own_copy() -> None:
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b, c = torch.randn_like(a), torch.empty_like(a)
    source = torch.empty(448 << 20, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    side = torch.cuda.Stream()

    def copy() -> None:
        check("copy", cu.cuMemcpyAsync(cu.CUdeviceptr(target.data_ptr()), cu.CUdeviceptr(source.data_ptr()), source.nbytes,
                                       cu.CUstream(torch.cuda.current_stream().cuda_stream)))

    def by_kernel() -> None:
        torch.bitwise_or(source.view(torch.int32), 0, out=target.view(torch.int32))

    def beside(work, count: int):
        def step() -> None:
            side.wait_stream(torch.cuda.current_stream())
            for _ in range(count):
                torch.mm(a, b, out=c)
            if work:
                with torch.cuda.stream(side):
                    work()
            torch.cuda.current_stream().wait_stream(side)
        return step
    for name, step in (("matmul", beside(None, 3)), ("copy", beside(copy, 0)), ("kernel", beside(by_kernel, 0)),
                       ("matmul + copy", beside(copy, 3)), ("matmul + kernel", beside(by_kernel, 3))):
        recording = record(step)
        graph = DriverGraph(recording.graph.raw_cuda_graph())
        with closing(graph.instantiate()) as executable:
            say(f"{name}: {timed(executable):.0f} us", [node.name[:24] for node in graph.nodes()][-2:])


def moved(name: str, step, outputs, check_bits=True):
    """Capture a step, replace its collectives, compare bits and times."""
    from counterpoint.ops.captured_copies import DirectCopies, StandIn
    recording = record(step)
    graph = DriverGraph(recording.graph.raw_cuda_graph())
    nodes = graph.nodes()
    say(name, "nodes:", [(node.kind, node.name[:40]) for node in nodes][:12])
    for issued in recording.collectives:
        say("  noted", issued.collective, issued.reduction, [graph.number_of(node) for node in issued.nodes])
    copies = DirectCopies(recording.collectives, torch.device("cuda", torch.cuda.current_device()))
    for each in copies.stand_ins:
        say("  ", each if isinstance(each, str) else (each.num_copies, each.num_bytes))
    numbers = [graph.number_of(issued.nodes[0]) for issued in recording.collectives]
    graph.offer_copies({number: each.graph if isinstance(each, StandIn) else each
                        for number, each in zip(numbers, copies.stand_ins)})
    plain = graph.instantiate()
    edited = graph.copy()
    for number in numbers:
        edited.move_to_copies(number)
        say("  moved", number, "bytes to others", edited.copied_bytes(number))
    planned = edited.instantiate()
    bits = []
    for executable in (plain, planned, planned):
        outputs(True)
        torch.cuda.synchronize(); dist.barrier(); torch.cuda.synchronize()
        executable.launch(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        bits.append(outputs(False).clone())
    say("  equal bits:", torch.equal(bits[0], bits[1]), torch.equal(bits[0], bits[2]))
    say(f"  NCCL {timed(plain):.0f} us, copies {timed(planned):.0f} us, NCCL {timed(plain):.0f}, copies {timed(planned):.0f}")
    torch.cuda.synchronize(); dist.barrier()


@stage("gather alone")
def gather() -> None:
    given = torch.randn(64 << 20, device="cuda", dtype=torch.bfloat16)
    got = torch.empty(2 * given.numel(), device="cuda", dtype=torch.bfloat16)

    def outputs(poison: bool):
        return got.fill_(7) if poison else got
    moved("all_gather async", lambda: dist.all_gather_into_tensor(got, given, async_op=True).wait(), outputs)


@stage("reductions alone")
def reductions() -> None:
    whole = torch.randn(128 << 20, device="cuda", dtype=torch.bfloat16)
    start, part = whole.clone(), torch.empty(64 << 20, device="cuda", dtype=torch.bfloat16)
    moved("reduce_scatter", lambda: dist.reduce_scatter_tensor(part, whole, op=dist.ReduceOp.AVG),
          lambda poison: part.fill_(7) if poison else part)
    moved("all_reduce", lambda: dist.all_reduce(whole, op=dist.ReduceOp.AVG),
          lambda poison: whole.copy_(start) if poison else whole)


def paper(name: str) -> None:
    from counterpoint.paper.workloads import PaperWorkload
    workload = PaperWorkload(name)
    start = workload._sent.clone() if not workload.is_all_to_all else None

    def outputs(poison: bool):
        if not poison:
            return workload._received.view(torch.int16)[::61]
        if start is not None:
            return workload._sent.copy_(start)
        return workload._received.fill_(7)
    moved(name, workload.overlapped, outputs)


@stage("launch order edges")
def launch_order() -> None:
    """All-reduce beside cuBLAS's matmul, both ready at once: plain, 5 us hold, launch-order edge."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b, c = torch.randn_like(a), torch.empty_like(a)
    first = torch.empty(1 << 22, device="cuda")
    data = torch.ones(50 << 20, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        for _ in range(4):
            first.add_(1)
            work = dist.all_reduce(data, op=dist.ReduceOp.AVG, async_op=True)
            torch.mm(a, b, out=c)
            work.wait()
    recording = record(step)
    graph = DriverGraph(recording.graph.raw_cuda_graph())
    nodes = graph.nodes()
    say([(number, node.name[:30], node.waits_for) for number, node in enumerate(nodes)][:8])
    matmuls = [number for number, node in enumerate(nodes) if node.kind == "kernel" and ("nvjet" in node.name or "gemm" in node.name)]
    collectives = [number for number, node in enumerate(nodes) if "nccl" in node.name.lower()]
    variants = {"plain": graph.instantiate()}
    held = graph.copy()
    for number in matmuls:
        held.hold_before(number, 5.0)
    variants["hold 5 us"] = held.instantiate()
    for port in (2,):
        for direct in (True, False):
            ordered = graph.copy()
            for collective, matmul in zip(collectives, matmuls):
                edge = cu.CUgraphEdgeData()
                edge.from_port = port
                edge.type = 1
                later = ordered._handles[matmul]
                if not direct:
                    ordered.hold_before(matmul, 0.001)
                    later = ordered._holds[matmul][0]
                check("edge", cu.cuGraphAddDependencies(ordered._graph, [ordered._handles[collective]], [later], [edge], 1))
            variants[f"launch order edge, port {port}, {'direct' if direct else 'by a kernel between'}"] = ordered.instantiate()
    for _ in range(3):
        say({label: round(timed(each)) for label, each in variants.items()})


@stage("launch completion event, eager")
def eager_event() -> None:
    """Own kernels: a long one of 24 CTAs with a completion event, and a stream that waits for the event."""
    image = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry spin(.param .u64 duration_ns, .param .u64 at)
{
    .reg .u64 %start, %now, %elapsed, %duration, %marks, %old;
    .reg .pred %waiting;
    ld.param.u64 %duration, [duration_ns];
    ld.param.u64 %marks, [at];
    mov.u64 %start, %globaltimer;
    atom.global.min.u64 %old, [%marks], %start;
    atom.global.max.u64 %old, [%marks+8], %start;
AGAIN:
    mov.u64 %now, %globaltimer;
    sub.u64 %elapsed, %now, %start;
    setp.lt.u64 %waiting, %elapsed, %duration;
    @%waiting bra AGAIN;
    ret;
}
\0"""
    import ctypes
    module = check("load", cu.cuModuleLoadData(image))
    function = check("find", cu.cuModuleGetFunction(module, b"spin"))
    marks = torch.zeros(4, dtype=torch.int64, device="cuda")
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    event = check("event", cu.cuEventCreate(2))

    def launch(stream, ctas: int, duration_us: float, at: int, attributes) -> None:
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = ctas, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = 1, 1, 1
        config.hStream = cu.CUstream(stream.cuda_stream)
        if attributes:
            config.attrs = attributes
            config.numAttrs = len(attributes)
        args = ((int(duration_us * 1000), marks.data_ptr() + at), (ctypes.c_uint64, ctypes.c_uint64))
        check("launch", cu.cuLaunchKernelEx(config, function, args, 0))

    def attribute():
        value = cu.CUlaunchAttribute()
        value.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT
        value.value.launchCompletionEvent.event = event
        value.value.launchCompletionEvent.flags = 0
        return value
    for kind in ("no event", "completion event"):
        gaps = []
        for _ in range(6):
            marks.copy_(torch.tensor([2**62, 0, 2**62, 0]))
            torch.cuda.synchronize()
            launch(one, 24, 200.0, 0, [attribute()] if kind != "no event" else [])
            if kind != "no event":
                check("wait", cu.cuStreamWaitEvent(cu.CUstream(two.cuda_stream), event, 0))
            launch(two, 1, 1.0, 16, [])
            torch.cuda.synchronize()
            found = marks.tolist()
            gaps.append(((found[1] - found[0]) / 1000, (found[2] - found[1]) / 1000))
        say(kind, "(spread of starts, us from the last CTA's start to the other stream's kernel):", gaps)


def main() -> None:
    join_ranks()
    only = sys.argv[1:]
    for each, name in ((versions, "versions"), (ipc, "ipc"), (own_copy, "own"), (gather, "gather"), (reductions, "reductions"),
                       (stage("a2a")(lambda: paper("cb_a2a_opt1")), "a2a"), (stage("ar")(lambda: paper("cb_ar_opt2")), "ar"),
                       (launch_order, "order"), (eager_event, "event")):
        if not only or name in only:
            each()


run_and_leave(main)
