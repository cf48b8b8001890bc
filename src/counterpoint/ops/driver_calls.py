"""The operations of a compiled call, each as a function bound once: copies, flags, events, the current stream,
computation.

Each is a single driver call or a call of torch, and looks up only what differs from call to call.
"""

from collections.abc import Callable, Sequence

from cuda.bindings import driver as cu

from counterpoint.cuda.driver import SUCCESS, Handle, check
from counterpoint.ops.computation import bind_computation, rows_in
from counterpoint.ops.streams import StreamNumbers, make_current
from counterpoint.ops.transport import Tensors, Weights
from counterpoint.schedule.actions import Region
from counterpoint.schedule.program import Instruction

WAIT = cu.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_32
WRITE = cu.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32
WRITE_64 = cu.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_64
WAIT_EQUAL = int(cu.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ)
WAIT_AT_LEAST = int(cu.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)  # as signed 32-bit differences
FLUSH = int(cu.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_FLUSH)
CAN_FLUSH = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES
NATIVE_ATOMICS = cu.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED  # across NVLink, not PCIe
MAX_MEMORY_OPERATIONS = 255  # most operations of one cuStreamBatchMemOp


class Call:
    """What differs from call to call: the tensors, the weights, the streams, and whether it becomes part of a graph."""

    __slots__ = ("handles", "is_captured", "streams", "tensors", "weights")

    def __init__(
        self,
        operands: tuple[Tensors, Weights],
        handles: dict[str, Handle],
        streams: dict[str, StreamNumbers],
        *,
        is_captured: bool,
    ) -> None:
        self.tensors, self.weights = operands
        self.handles, self.streams, self.is_captured = handles, streams, is_captured


Issue = Callable[[Call], None]


def copy_to_peer(name: str, to: int, source: tuple[str, int, int]) -> Issue:
    """Copy part of a tensor, (its name, first byte, bytes), to the address `to` of a peer's memory."""
    buffer, offset, num_bytes = source
    target = cu.CUdeviceptr(to)

    def issue(call: Call) -> None:
        (result,) = cu.cuMemcpyAsync(target, call.tensors[buffer].data_ptr() + offset, num_bytes, call.handles[name])
        if result != SUCCESS:
            check("Copying to a peer", (result,))

    return issue


def copy_slice_to_peer(name: str, to: int, source: Region) -> Issue:
    """Copy rows of a slice of a tensor's columns, which are not contiguous there, to the address `to` of a peer's
    memory, where they are contiguous.
    """
    parameters = cu.CUDA_MEMCPY2D()
    parameters.srcMemoryType = parameters.dstMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_UNIFIED
    parameters.dstDevice = cu.CUdeviceptr(to)
    parameters.Height = source.num_rows

    def issue(call: Call) -> None:
        rows = rows_in(call.tensors[source.buffer], source.start, source.num_rows)
        width = rows.shape[1] * rows.element_size()
        parameters.srcDevice, parameters.srcPitch = cu.CUdeviceptr(rows.data_ptr()), rows.stride(0) * rows.element_size()
        parameters.dstPitch = parameters.WidthInBytes = width
        (result,) = cu.cuMemcpy2DAsync(parameters, call.handles[name])
        if result != SUCCESS:
            check("Copying to a peer", (result,))

    return issue


def reset_flags(name: str, flags: tuple[int, int]) -> Issue:
    """Set flags to 0, given the address of the first and their number."""
    address, number = flags
    first = cu.CUdeviceptr(address)

    def issue(call: Call) -> None:
        (result,) = cu.cuMemsetD32Async(first, 0, number, call.handles[name])
        if result != SUCCESS:
            check("Resetting flags", (result,))

    return issue


def exchange_flags(name: str, of_peers: Sequence[int], own: Sequence[int], *, is_flushing: bool) -> list[Issue]:
    """Set the flags of peers to 1, wait until all of one's own are 1, then reset these."""
    return _batches(name, raising(of_peers) + taking(own, is_flushing=is_flushing))


def await_flags(name: str, addresses: Sequence[int], *, is_flushing: bool) -> list[Issue]:
    """Wait until all these flags are 1."""
    return _batches(name, awaiting(addresses, is_flushing=is_flushing))


def raise_flags(name: str, addresses: Sequence[int]) -> list[Issue]:
    """Set these flags to 1."""
    return _batches(name, raising(addresses))


def taking(addresses: Sequence[int], *, is_flushing: bool) -> list[Handle]:
    """Return operations that wait until all these flags are 1, then reset them."""
    return awaiting(addresses, is_flushing=is_flushing) + [memory_operation(WRITE, address, 0) for address in addresses]


def awaiting(addresses: Sequence[int], *, is_flushing: bool, condition: int = WAIT_EQUAL) -> list[Handle]:
    """Return operations that wait until all these flags are 1, or by another condition on 1. The last one flushes:
    everything that peers wrote before they set the flags can be read after it. Without a flush, the link must keep the
    order of writes.
    """
    last = len(addresses) - 1
    return [
        memory_operation(WAIT, address, 1, flags=condition | FLUSH if is_flushing and number == last else condition)
        for number, address in enumerate(addresses)
    ]


def raising(addresses: Sequence[int]) -> list[Handle]:
    """Return operations that set these flags to 1. Each waits until earlier work's writes can be seen everywhere."""
    return [memory_operation(WRITE, address, 1) for address in addresses]


def wait_event(name: str, event: Handle) -> Issue:
    """Let a stream wait for an event."""

    def issue(call: Call) -> None:
        (result,) = cu.cuStreamWaitEvent(call.handles[name], event, 0)
        if result != SUCCESS:
            check("Ordering streams", (result,))

    return issue


def record_event(name: str, event: Handle) -> Issue:
    """Record an event on a stream."""

    def issue(call: Call) -> None:
        (result,) = cu.cuEventRecord(event, call.handles[name])
        if result != SUCCESS:
            check("Recording an event", (result,))

    return issue


def use_stream(name: str) -> Issue:
    """Make a stream torch's current stream."""

    def issue(call: Call) -> None:
        make_current(call.streams[name])

    return issue


def compute(step: Instruction, fixed: Tensors) -> Issue:
    """Run the matmul, sum or placement of a step on the current stream; `fixed` as in `bind_computation`."""
    bound = bind_computation(step.action, fixed)

    def issue(call: Call) -> None:
        bound(call.tensors, call.weights)

    return issue


def can_flush_remote_writes(number: int) -> bool:
    """Return whether waits on that GPU can flush what peers wrote to it."""
    gpu = check("Finding a GPU", cu.cuDeviceGet(number))
    return bool(check("Asking for CAN_FLUSH_REMOTE_WRITES", cu.cuDeviceGetAttribute(CAN_FLUSH, gpu)))


def is_nvlink_to(number: int, peer: int) -> bool:
    """Return whether NVLink connects two GPUs, judged by peer atomics."""
    first, second = (check("Finding a GPU", cu.cuDeviceGet(each)) for each in (number, peer))
    return bool(check("Asking for peer atomics", cu.cuDeviceGetP2PAttribute(NATIVE_ATOMICS, first, second)))


def memory_operation(kind: Handle, address: int, value: int, flags: int = 0) -> Handle:
    """Return one operation of `cuStreamBatchMemOp`: wait until the word at `address` is `value` (WAIT), or write it
    (WRITE, or WRITE_64 with 64 bits).
    """
    parameters = cu.CUstreamBatchMemOpParams()
    parameters.operation = kind
    fields = parameters.waitValue if kind == WAIT else parameters.writeValue
    fields.operation = kind
    fields.address = cu.CUdeviceptr(address)
    if kind == WRITE_64:
        fields.value64 = cu.cuuint64_t(value)
    else:
        fields.value = cu.cuuint32_t(value)
    fields.flags = flags
    return parameters


def _batches(name: str, operations: Sequence[Handle]) -> list[Issue]:
    """Return the operations in order, in as few driver calls as possible."""

    def batch(part: list[Handle]) -> Issue:
        count = len(part)

        def issue(call: Call) -> None:
            (result,) = cu.cuStreamBatchMemOp(call.handles[name], count, part, 0)
            if result != SUCCESS:
                check("Signalling between GPUs", (result,))

        return issue

    starts = range(0, len(operations), MAX_MEMORY_OPERATIONS)
    return [batch(list(operations[start : start + MAX_MEMORY_OPERATIONS])) for start in starts]
