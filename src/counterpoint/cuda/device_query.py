"""Queries the driver about the visible GPUs, and times copies in and between them. Needs cuda-bindings, not torch.

Copies are 256 MiB, timed with events: all of them in every round, medians of 5 rounds. The sender
issues a copy between GPUs, and its copy engines run it; a copy within a GPU reads and writes its HBM.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from cuda.bindings import driver as cu

from counterpoint.cuda.device_facts import ATTRIBUTES, Measured, Peer, Queried, check_alike, check_driver
from counterpoint.cuda.driver import Handle, check
from counterpoint.errors import DeviceError
from counterpoint.measurement.orders import draw_seed
from counterpoint.measurement.tournament import measure_rounds
from counterpoint.units import MIB, US_PER_S

BUFFER_BYTES = 256 * MIB
# one copy within a GPU takes 0.1 ms, too short compared with the overhead of events
HBM_COPIES = 8
NUM_ROUNDS = 5
NAME_BYTES = 256
NON_BLOCKING = 1


def query_devices() -> tuple[Queried, ...]:
    """Return what the driver reports about each visible GPU. Raises `DeviceError` if none is visible, if the driver is too
    old, or if the GPUs differ.
    """
    try:
        version = check_driver(check("Asking for the driver's version", cu.cuDriverGetVersion()))
        check("Starting the driver", cu.cuInit(0))
    except RuntimeError as problem:  # the error of cuda-bindings if there is no driver library
        raise DeviceError(
            "No NVIDIA driver was found, so no GPU can be probed. Run on a machine with one; `counterpoint "
            "machines` lists the shipped ones."
        ) from problem
    count = check("Counting GPUs", cu.cuDeviceGetCount())
    if count == 0:
        raise DeviceError(
            "No GPU is visible, so nothing can be probed. Run on a machine with one, and check CUDA_VISIBLE_DEVICES."
        )
    queried = tuple(_query(number, version) for number in range(count))
    check_alike(queried)
    return queried


def measure_copies(num_gpus: int) -> Measured:
    """Time copies within the first GPU, between every two GPUs, and from the first to all others at once."""
    before = check("Finding the present context", cu.cuCtxGetCurrent())
    try:
        with ExitStack() as stack:
            gpus = [stack.enter_context(_opened(number, max(1, num_gpus - 1))) for number in range(num_gpus)]
            accesses = stack.enter_context(_peer_access(gpus))
            return _measure(gpus, accesses)
    finally:
        check("Going back to the present context", cu.cuCtxSetCurrent(before))


class OpenedGpu:
    """A GPU with a context, two buffers, and one stream for each copy that it sends at the same time."""

    def __init__(self, device: Handle, context: Handle, buffers: Sequence[Handle], streams: Sequence[Handle]) -> None:
        self.device = device
        self.context = context
        self.sent, self.received = buffers
        self.streams = streams


def _query(number: int, version: tuple[int, int]) -> Queried:
    device = check("Finding a GPU", cu.cuDeviceGet(number))
    context = check("Opening a GPU", cu.cuDevicePrimaryCtxRetain(device))
    try:
        check("Using a GPU", cu.cuCtxPushCurrent(context))
        _, greatest = check("Asking for priorities", cu.cuCtxGetStreamPriorityRange())
        check("Leaving a GPU", cu.cuCtxPopCurrent())
    finally:
        check("Closing a GPU", cu.cuDevicePrimaryCtxRelease(device))
    name = check("Asking for a GPU's name", cu.cuDeviceGetName(NAME_BYTES, device))
    return Queried(
        device_name=name.split(b"\0")[0].decode(),
        cuda_version=version,
        attributes={attribute: _attribute(device, attribute) for attribute in ATTRIBUTES},
        hbm_bytes=int(check("Asking for a GPU's memory", cu.cuDeviceTotalMem(device))),
        greatest_priority=int(greatest),
    )


def _attribute(device: Handle, name: str) -> int:
    attribute = getattr(cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(check(f"Asking for {name}", cu.cuDeviceGetAttribute(attribute, device)))


@contextmanager
def _opened(number: int, num_streams: int) -> Iterator[OpenedGpu]:
    """Create the context, the buffers and the streams that copies of a GPU need, and free all of them at the end."""
    with ExitStack() as stack:
        device = check("Finding a GPU", cu.cuDeviceGet(number))
        context = check("Opening a GPU", cu.cuDevicePrimaryCtxRetain(device))
        stack.callback(cu.cuDevicePrimaryCtxRelease, device)
        check("Using a GPU", cu.cuCtxSetCurrent(context))
        buffers, streams = [], []
        for _ in range(2):
            buffers.append(check("Taking GPU memory for a copy", cu.cuMemAlloc(BUFFER_BYTES)))
            stack.callback(cu.cuMemFree, buffers[-1])
        for _ in range(num_streams):
            streams.append(check("Making a stream", cu.cuStreamCreate(NON_BLOCKING)))
            stack.callback(cu.cuStreamDestroy, streams[-1])
        stack.callback(cu.cuCtxSetCurrent, context)
        yield OpenedGpu(device, context, buffers, streams)


@contextmanager
def _peer_access(gpus: Sequence[OpenedGpu]) -> Iterator[dict[tuple[int, int], bool]]:
    """Let GPUs access each other's memory if the driver allows it; otherwise the driver copies through the host."""
    allowed = {}
    with ExitStack() as stack:
        for source, one in enumerate(gpus):
            for destination, other in enumerate(gpus):
                if source == destination:
                    continue
                access = check("Asking for peer access", cu.cuDeviceCanAccessPeer(one.device, other.device))
                allowed[source, destination] = bool(access)
                if access and _allow(one, other):
                    stack.callback(_forbid, one, other)
        yield allowed


def _allow(one: OpenedGpu, other: OpenedGpu) -> bool:
    """Give one GPU access to the other; return False if this process has given it before."""
    check("Using a GPU", cu.cuCtxSetCurrent(one.context))
    result = cu.cuCtxEnablePeerAccess(other.context, 0)
    if result[0] == cu.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
        return False
    check("Giving a GPU access to another", result)
    return True


def _forbid(one: OpenedGpu, other: OpenedGpu) -> None:
    check("Using a GPU", cu.cuCtxSetCurrent(one.context))
    check("Ending a GPU's access to another", cu.cuCtxDisablePeerAccess(other.context))


def _measure(gpus: Sequence[OpenedGpu], accesses: dict[tuple[int, int], bool]) -> Measured:
    pairs = list(accesses)
    runs: list[Callable[[], float]] = [lambda: _copy_within_us(gpus[0])]
    runs += [lambda pair=pair: _send_us(gpus[pair[0]], [gpus[pair[1]]]) for pair in pairs]  # type: ignore[misc]
    if len(gpus) > 1:
        runs.append(lambda: _send_us(gpus[0], gpus[1:]))
    labels = [str(number) for number in range(len(runs))]
    times = [entry.median_us for entry in measure_rounds(labels, lambda number: runs[number](), NUM_ROUNDS, draw_seed())]
    rates = [BUFFER_BYTES * US_PER_S / time_us for time_us in times]
    peers = tuple(
        Peer(
            source=source,
            destination=destination,
            has_access=accesses[source, destination],
            has_native_atomics=_has_native_atomics(gpus[source], gpus[destination]),
            copy_bytes_per_s=rate,
        )
        for (source, destination), rate in zip(pairs, rates[1:], strict=False)
    )
    return Measured(
        hbm_copy_bytes_per_s=2 * HBM_COPIES * rates[0],
        peers=peers,
        all_peers_bytes_per_s=(len(gpus) - 1) * rates[-1] if len(gpus) > 1 else None,
    )


def _has_native_atomics(one: OpenedGpu, other: OpenedGpu) -> bool:
    attribute = cu.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    return bool(check("Asking for peer atomics", cu.cuDeviceGetP2PAttribute(attribute, one.device, other.device)))


def _copy_within_us(gpu: OpenedGpu) -> float:
    def issue() -> None:
        for _ in range(HBM_COPIES):
            check("Copying", cu.cuMemcpyDtoDAsync(gpu.received, gpu.sent, BUFFER_BYTES, gpu.streams[0]))

    return _timed_us(gpu, [issue])


def _send_us(gpu: OpenedGpu, others: Sequence[OpenedGpu]) -> float:
    def sending(place: int, other: OpenedGpu) -> Callable[[], None]:
        def issue() -> None:
            source, stream = (gpu.sent, gpu.context), gpu.streams[place]
            copied = cu.cuMemcpyPeerAsync(other.received, other.context, *source, BUFFER_BYTES, stream)
            check("Copying to a peer", copied)

        return issue

    return _timed_us(gpu, [sending(place, other) for place, other in enumerate(others)])


def _timed_us(gpu: OpenedGpu, issues: Sequence[Callable[[], None]]) -> float:
    """Return the microseconds from the common start of the work on the GPU's streams to the end of the last of it."""
    check("Using a GPU", cu.cuCtxSetCurrent(gpu.context))
    start, *ends = (check("Making an event", cu.cuEventCreate(0)) for _ in range(1 + len(issues)))
    check("Recording the start", cu.cuEventRecord(start, gpu.streams[0]))
    for stream, issue, end in zip(gpu.streams, issues, ends, strict=False):
        check("Ordering a stream", cu.cuStreamWaitEvent(stream, start, 0))
        issue()
        check("Recording an end", cu.cuEventRecord(end, stream))
    last_ms = 0.0
    for end in ends:
        check("Waiting for a copy", cu.cuEventSynchronize(end))
        last_ms = max(last_ms, check("Reading a time", cu.cuEventElapsedTime(start, end)))
    for event in (start, *ends):
        check("Freeing an event", cu.cuEventDestroy(event))
    return 1000 * last_ms
