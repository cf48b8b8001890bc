"""Times copies between GPUs by copy engines, by bytes and number of peers; flags between GPUs; copies beside kernels.

Rank 0 uses all GPUs of the calibration, which must be visible to it; the other ranks wait.
"""

import torch
from cuda.bindings import driver as cu

from counterpoint.cuda.driver import check
from counterpoint.cuda.probes.session import Session
from counterpoint.errors import DeviceError
from counterpoint.measurement.points import Point, point
from counterpoint.units import KIB, MIB

SIZES = (64 * KIB, MIB, 16 * MIB, 256 * MIB)
NUM_TURNS = 60  # few enough for the host to issue all of them while the stream is held
MATMUL_SIZE = 8192


def probe_copies(session: Session) -> list[Point]:
    """Time copies from rank 0's GPU to others, both ways, with flags, and beside kernels."""
    if torch.cuda.device_count() < session.num_ranks:
        raise DeviceError(f"rank 0 must see {session.num_ranks} GPUs, but sees {torch.cuda.device_count()}")
    here = torch.cuda.current_device()
    others = [number for number in range(session.num_ranks) if number != here]
    source = torch.zeros(SIZES[-1], dtype=torch.uint8, device="cuda")
    targets = [torch.zeros(SIZES[-1], dtype=torch.uint8, device=f"cuda:{number}") for number in others]
    for target in targets:  # the first copy lets the GPUs access each other's memory
        target.copy_(source)
        source.copy_(target)
    points = []
    for num_bytes in SIZES:
        for num_peers in range(1, len(others) + 1):
            pairs = [(target, source) for target in targets[:num_peers]]
            points.append(_copied(session, "copy_us", pairs, num_bytes, peers=num_peers, pieces=1))
    for pieces in (2, 4):
        points.append(
            _copied(session, "copy_us", [(targets[0], source)] * pieces, SIZES[-1] // pieces, peers=1, pieces=pieces)
        )
    back = torch.zeros_like(source)
    both = [(targets[0], source), (back, targets[0])]
    points.append(_copied(session, "copy_both_ways_us", both, SIZES[-1], peers=1))
    points.append(point("flag_latency_us", _flag_latencies_us(session, others[0]), peers=1))
    return points + _beside(session, source, targets[0])


def _copied(
    session: Session, name: str, pairs: list[tuple[torch.Tensor, torch.Tensor]], num_bytes: int, **at: float | str
) -> Point:
    """Time copies of `num_bytes` for each (target, source), each on a stream of the source's GPU, from a common start."""
    streams = [torch.cuda.Stream(source.device) for _, source in pairs]
    current = torch.cuda.current_stream()

    def copy() -> None:
        start = torch.cuda.Event()
        start.record(current)
        for stream, (target, source) in zip(streams, pairs, strict=True):
            stream.wait_event(start)
            copy_bytes(target, source, num_bytes, stream)
            current.wait_stream(stream)

    def copy_alone() -> None:
        copy_bytes(*pairs[0], num_bytes, current)

    times = session.times_us(copy_alone if len(pairs) == 1 else copy, calls=4)
    return point(name, times, bytes=num_bytes, **at)


def copy_bytes(target: torch.Tensor, source: torch.Tensor, num_bytes: int, stream: torch.cuda.Stream) -> None:
    """Issue a copy by a copy engine on a stream; torch's own copy would also order the streams of both GPUs."""
    handle = cu.CUstream(stream.cuda_stream)
    check("Copying to a peer", cu.cuMemcpyAsync(target.data_ptr(), source.data_ptr(), num_bytes, handle))


def _flag_latencies_us(session: Session, other: int) -> list[float]:
    """Time a flag that goes back and forth between streams of two GPUs by stream memory operations: half of a round trip."""
    here = torch.cuda.current_device()
    streams, words = {}, {}
    for number in (here, other):
        with torch.cuda.device(number):
            streams[number] = torch.cuda.Stream()
            words[number] = torch.zeros(1, dtype=torch.int32, device=f"cuda:{number}")
            torch.cuda.synchronize()
    session.wait()
    times = []
    equal = cu.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
    for batch in range(3):
        session.hold(5000)
        streams[here].wait_event(session.mark())
        start = session.mark(streams[here])
        for turn in range(1, NUM_TURNS + 1):
            value = batch * NUM_TURNS + turn
            for writer, waiter in ((here, other), (other, here)):
                write, wait = (cu.CUstream(streams[number].cuda_stream) for number in (writer, waiter))
                with torch.cuda.device(writer):
                    check("Raising a flag", cu.cuStreamWriteValue32(write, words[waiter].data_ptr(), value, 0))
                with torch.cuda.device(waiter):
                    check("Awaiting a flag", cu.cuStreamWaitValue32(wait, words[waiter].data_ptr(), value, equal))
        end = session.mark(streams[here])
        session.wait(end)
        times.append(1000 * start.elapsed_time(end) / (2 * NUM_TURNS))
    return times


def _beside(session: Session, source: torch.Tensor, target: torch.Tensor) -> list[Point]:
    """Time a copy beside streaming and beside a matmul, and each of these beside copies."""
    streamed = torch.ones(512 * MIB // 4, device="cuda")
    a, b, c = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def copy() -> None:
        copy_bytes(target, source, SIZES[-1], torch.cuda.current_stream())

    points = []
    for name, kernel, num_others in (
        ("streaming", lambda: torch.mul(streamed, 2.0, out=streamed), 12),
        ("matmul", lambda: torch.mm(a, b, out=c), 4),
    ):
        points.append(point("kernel_us", session.times_us(kernel, rounds=3), kernel=name, group="copies"))
        slowed = session.times_beside_us(copy, kernel, num_others=num_others)
        points.append(point("copy_beside_us", slowed, kernel=name, bytes=SIZES[-1]))
        slowed = session.times_beside_us(kernel, copy, num_others=8)
        points.append(point("kernel_beside_us", slowed, kernel=name, kind="copy", bytes=SIZES[-1]))
    return points
