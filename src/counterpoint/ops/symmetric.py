"""Symmetric memory: every rank of a group allocates a part, and copy engines of all ranks can access it.

torch's caching allocator may lend it out: a kernel that allocates its result by itself, such as torch's grouped matmul, then
writes it where other ranks can read it.
"""

import os
from contextlib import AbstractContextManager
from typing import ClassVar, final

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from counterpoint.errors import OperatorError, cause_of
from counterpoint.ops.agreement import Agreement, CallNotice
from counterpoint.ops.graph_cache import UNCACHED, refuse_in_capture
from counterpoint.units import format_bytes

LENT_MULTIPLE = 512  # as torch's caching allocator rounds sizes
DEFAULT_POOL = 0, 0  # torch's number of the memory of no pool
LEAST_LENT = 2**20 + 1  # smaller tensors have segments of their own


@final
class SymmetricMemory:
    """This rank's part, `num_bytes` on every rank, and the addresses of all parts.

    `is_lent`: torch's caching allocator lends it out, if it can. Raises `RefusedTogetherError` on every rank if one of them
    has no room.
    """

    def __init__(
        self, num_bytes: int, device: torch.device, group: dist.ProcessGroup, agreement: Agreement, *, is_lent: bool = False
    ) -> None:
        problem, local, self._device = "", None, device
        self.is_lent = is_lent and UNCACHED not in os.environ and torch.cuda.get_allocator_backend() == "native"
        self._stream = _current_stream(device)
        self._lending: _Lending | None = None
        try:
            with torch.inference_mode(mode=False):  # later calls write to it in any mode
                local = self._allocated(num_bytes)
        except RuntimeError as error:
            problem = (
                f"{format_bytes(num_bytes)} of symmetric memory cannot be allocated ({cause_of(error, 160)}). "
                "Free GPU memory, or call counterpoint.ops.release() on every rank."
            )
        # all ranks find out together, before any of them waits for the others' memory
        try:
            agreement.compare(CallNotice(request=f"{num_bytes} bytes of symmetric memory", problem=problem))
        except OperatorError:
            local = None  # first: a pool that ends leaves allocated what lies in it
            raise
        self._handle = symmetric_memory.rendezvous(local, group.group_name)
        self.addresses = [int(address) for address in self._handle.buffer_ptrs]
        if self.is_lent:  # this tensor shares the memory, and the one that torch allocated is free to be lent
            local = self._handle.get_buffer(group.rank(), (num_bytes,), torch.uint8)
        assert local is not None, "or the ranks would have refused"
        self.local: torch.Tensor = local

    def _allocated(self, num_bytes: int) -> torch.Tensor:
        if self.is_lent and _has_pool_of_job(self._device):  # which may go first, and in which torch cannot end a pool
            self.is_lent = False
        if not self.is_lent:
            return symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._lending = _Lending(self._device)
        with self._lending:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def is_lent_here(self) -> bool:
        """Return whether torch allocates from this memory in the context of `lending` on the current stream."""
        return self.is_lent and _current_stream(self._device) == self._stream

    def lending(self) -> AbstractContextManager[None]:
        """Return a context in which torch allocates from this memory, from its front on: tensors of more than a MiB, each
        rounded up to `LENT_MULTIPLE` bytes. See `is_lent_here`.
        """
        assert self._lending is not None, "see is_lent_here"
        return self._lending

    def can_end(self) -> bool:
        """Return whether this may be freed now. Memory that was lent has a pool, and torch ends the process if a pool is
        freed while another one is current.
        """
        return self._lending is None or not _has_pool_of_job(self._device)


@final
class SymmetricPool:
    """The symmetric memory of one transport or lane. Larger memory replaces smaller, which stays allocated if graphs
    that a user captured write to it, or if it cannot end now. `is_lent`: see `SymmetricMemory`.
    """

    _ended: ClassVar[list[SymmetricMemory]] = []  # of closed pools, until torch can free it

    def __init__(
        self, device: torch.device, group: dist.ProcessGroup, agreement: Agreement, *, is_lent: bool = False
    ) -> None:
        self._device, self._group, self._agreement, self._is_lent = device, group, agreement, is_lent
        self.memory: SymmetricMemory | None = None
        self._retired: list[SymmetricMemory] = []

    def replace(self, num_bytes: int, what: str, *, has_captured: bool) -> SymmetricMemory:
        """Replace the memory by one of another size, all ranks together; `what` needs it. If this raises `OperatorError`,
        there is no memory left.
        """
        refuse_in_capture(what, self._device)
        torch.cuda.synchronize(self._device)
        self._free_ended()
        if self.memory is not None and (has_captured or not self.memory.can_end()):
            self._retired.append(self.memory)
        self.memory = None
        self.memory = SymmetricMemory(num_bytes, self._device, self._group, self._agreement, is_lent=self._is_lent)
        return self.memory

    def num_bytes(self) -> int:
        """Return the bytes held, including memory that only graphs use."""
        return sum(int(memory.local.numel()) for memory in self._held())

    def _held(self) -> list[SymmetricMemory]:
        return [*self._retired, *([self.memory] if self.memory else [])]

    def close(self) -> None:
        """Free all memory, or as soon as torch can free it."""
        self._ended.extend(self._held())
        self.memory = None
        self._retired.clear()
        self._free_ended()

    def _free_ended(self) -> None:
        if all(memory.can_end() for memory in self._ended):
            self._ended.clear()


def host_memory(num_bytes: int, what: str, agreement: Agreement) -> torch.Tensor:
    """Allocate ordinary memory (bytes), which stands for symmetric memory on CPUs.

    As on GPUs, all ranks get it, or all raise `RefusedTogetherError`. `what` needs it, in the same words on all ranks.
    """
    memory, problem = torch.empty(0, dtype=torch.uint8, device="cpu"), ""
    try:
        with torch.inference_mode(mode=False):  # later calls write to it in any mode
            memory = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:
        problem = f"{format_bytes(num_bytes)} for {what} cannot be allocated ({cause_of(error, 160)})"
    agreement.compare(CallNotice(request=f"{num_bytes} bytes for {what}", problem=problem))
    return memory


@final
class _Lending(AbstractContextManager[None]):
    """What `torch.cuda.use_mem_pool` does, in a third of the host's time."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.MemPool(symmetric_memory.get_mempool_allocator(device))  # which lives as long as this
        self._where = device.index, self._pool.id

    def __enter__(self) -> None:
        torch._C._cuda_beginAllocateCurrentThreadToPool(*self._where)

    def __exit__(self, *_: object) -> None:
        torch._C._cuda_endAllocateToPool(*self._where)
        torch._C._cuda_releasePool(*self._where)


def _current_stream(device: torch.device) -> int:
    stream: int = torch._C._cuda_getCurrentRawStream(device.index)
    return stream


def _has_pool_of_job(device: torch.device) -> bool:
    """Return whether torch allocates from a memory pool that the job has made current."""
    address = torch.empty(1, dtype=torch.uint8, device=device).data_ptr()
    segments = (each for each in torch.cuda.memory_snapshot() if 0 <= address - each["address"] < each["total_size"])
    return any(tuple(each.get("segment_pool_id", DEFAULT_POOL)) != DEFAULT_POOL for each in segments)
