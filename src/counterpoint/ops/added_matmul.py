"""A matrix plus a product, written to a third matrix, by one kernel of cuBLASLt.

torch's `addmm` adds in place: if its output is another matrix, it first copies the added matrix there. A ring adds to rows
that arrived in symmetric memory and writes the sum elsewhere, so `addmm` would make this copy for every chunk.

The kernel gets a workspace of a few bytes, in which its CTAs count the tiles that are taken. Without a workspace cuBLASLt
assigns tiles to CTAs beforehand: if a CTA finds no SM, since another kernel is on it, its tiles wait. With such
kernels, calls of two matmuls at a time took up to 1.8 times as long (4 H100s, 2026-11-27).
"""

import ctypes
import logging
import threading
import weakref
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch

from counterpoint.errors import DeviceError

NUM_PRODUCTS = 1024  # most products whose kernel is kept; each is a few hundred bytes of the host
LARGEST_ALIGNMENT = 256  # in bytes, of an operand
NUM_WORKSPACES = 256  # streams of a device that have one of their own
WORKSPACE_BYTES = 512  # a kernel counts its tiles in 4; those that add up parts of sums need far more, and are left out
# from cublasLt.h, cublas_api.h and library_types.h of CUDA 13.0; the numbers are the same in CUDA 12
DATA_TYPES = {torch.bfloat16: 14, torch.float16: 2}  # CUDA_R_16BF, CUDA_R_16F
COMPUTE_32F, SCALE_32F = 68, 0
DESCRIPTOR_TRANSPOSES = (3, 4)  # of the first and of the second operand
PREFERENCE_WORKSPACE, PREFERENCE_REDUCTION, REDUCE_IN_COMPUTE_TYPE = 1, 3, 2
PREFERENCE_ALIGNMENTS = (5, 6, 7, 8)  # of both operands, of what is added, and of the sum
TAKING = threading.Lock()  # for workspaces: several threads may have streams that have none yet
ONE = ctypes.c_float(1.0)
Handle = ctypes.c_void_p
LOGGER = logging.getLogger("counterpoint")


class Operand(NamedTuple):
    """What determines the kernel of a matrix in half precision: its sizes and strides, and how its address is aligned."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    alignment: int


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: a kernel that fits."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("num_workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("num_waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


def add_product(added: torch.Tensor, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """Write added + left @ right to `out`: (M, N), (M, K), (K, N) -> (M, N), all of one type. `out` and `added` share no
    memory.

    On NVIDIA GPUs, products of bf16 and fp16 are one kernel. All others are torch's `addmm`. Raises `DeviceError` if the
    kernel cannot be launched.
    """
    kernel = _kernel(left.dtype, left.device, *map(_operand, (right, left, added, out))) if _is_able(left) else None
    if kernel is None:
        torch.addmm(added, left, right, out=out)
    else:
        kernel.launch(added, left, right, out)


def _is_able(left: torch.Tensor) -> bool:
    """Return whether cuBLASLt may multiply these: not if one of torch's settings is on that it would not follow."""
    return (
        left.dtype in DATA_TYPES
        and left.is_cuda
        and not torch._C._get_cublas_allow_fp16_accumulation()
        and torch._C._get_sm_carveout_experimental() is None
        and _library() is not None
    )


def _operand(matrix: torch.Tensor) -> Operand:
    address = matrix.data_ptr() | LARGEST_ALIGNMENT
    return Operand(tuple(matrix.shape), matrix.stride(), address & -address)


@cache
def _library() -> Any:
    """Return the cuBLASLt that torch has loaded; None on other GPUs, or if it has another name."""
    if not torch.version.cuda:
        return None
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}")
    except OSError:
        return None
    pointer = ctypes.c_void_p
    library.cublasLtMatmul.argtypes = [*[pointer] * 14, ctypes.c_size_t, pointer]
    return library


@cache
def _handle(device: torch.device) -> Handle:
    """Return the library's handle for a device."""
    handle = Handle()
    with torch.cuda.device(device):
        _check(_library().cublasLtCreate(ctypes.byref(handle)))
    return handle


def reserve_workspaces(device: torch.device) -> None:
    """Take the memory of workspaces now, where nothing waits for other ranks, unless that was done before."""
    if device.type == "cuda":
        _reserved(device)


@cache
def _reserved(device: torch.device) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Return memory for the workspaces of a device's streams, and those that are taken, by stream."""
    return torch.empty(NUM_WORKSPACES, WORKSPACE_BYTES, dtype=torch.uint8, device=device), {}


def _workspace(device: torch.device, stream: int) -> torch.Tensor:
    """Return the workspace of a stream, whose kernels run one after the other; in a capture one of that graph's own."""
    memory, taken = _reserved(device)
    if not torch.cuda.is_current_stream_capturing():
        with TAKING:
            if stream not in taken and len(taken) < NUM_WORKSPACES:
                taken[stream] = memory[len(taken)]
        if stream in taken:
            return taken[stream]
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


@lru_cache(NUM_PRODUCTS)
def _kernel(dtype: torch.dtype, device: torch.device, *operands: Operand) -> "_Kernel | None":
    """Return the library's best kernel for right, left, added and out, or None if it has none."""
    if any(1 not in each.stride for each in operands) or any(each.stride[1] != 1 for each in operands[2:]):
        return None
    try:
        kernel = _Kernel(dtype, device, operands)
    except DeviceError as problem:  # on one rank perhaps, so the product must go on
        LOGGER.warning("%s torch multiplies instead.", problem)
        return None
    return kernel if kernel.is_found else None


class _Kernel:
    """One product's descriptors and its kernel. The library counts by columns, so it computes the transposed product from
    the transposed operands in the other order."""

    def __init__(self, dtype: torch.dtype, device: torch.device, operands: Sequence[Operand]) -> None:
        library, self._device, self._handle = _library(), device.index, _handle(device)
        self._matmul = library.cublasLtMatmul
        self._product = _created(self, "MatmulDesc", COMPUTE_32F, SCALE_32F)
        for attribute, operand in zip(DESCRIPTOR_TRANSPOSES, operands[:2], strict=True):
            _set(library.cublasLtMatmulDescSetAttribute, self._product, attribute, ctypes.c_int32(operand.stride[1] != 1))
        self._layouts = [_created(self, "MatrixLayout", DATA_TYPES[dtype], *_by_columns(each)) for each in operands]
        preference = _created(self, "MatmulPreference")
        set_preference = library.cublasLtMatmulPreferenceSetAttribute
        _set(set_preference, preference, PREFERENCE_WORKSPACE, ctypes.c_uint64(WORKSPACE_BYTES))
        _set(set_preference, preference, PREFERENCE_REDUCTION, ctypes.c_uint32(REDUCE_IN_COMPUTE_TYPE))
        for attribute, operand in zip(PREFERENCE_ALIGNMENTS, operands, strict=True):
            _set(set_preference, preference, attribute, ctypes.c_uint32(operand.alignment))
        self._heuristic, number = Heuristic(), ctypes.c_int()
        places = ctypes.byref(self._heuristic), ctypes.byref(number)
        find = library.cublasLtMatmulAlgoGetHeuristic
        self.is_found = not find(self._handle, self._product, *self._layouts, preference, 1, *places) and number.value == 1
        self._algorithm = ctypes.addressof(self._heuristic)  # its first field
        self._one = ctypes.addressof(ONE)

    def launch(self, added: torch.Tensor, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        """Launch the kernel on the current stream."""
        right_layout, left_layout, added_layout, out_layout = self._layouts
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        workspace = _workspace(out.device, stream)
        status = self._matmul(
            self._handle,
            self._product,
            self._one,
            right.data_ptr(),
            right_layout,
            left.data_ptr(),
            left_layout,
            self._one,
            added.data_ptr(),
            added_layout,
            out.data_ptr(),
            out_layout,
            self._algorithm,
            workspace.data_ptr(),
            WORKSPACE_BYTES,
            stream,
        )
        _check(status)


def _by_columns(operand: Operand) -> tuple[ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64]:
    """Return the rows, the columns and the leading dimension of a matrix in memory as the library counts."""
    (num_rows, num_columns), (row, column) = operand.shape, operand.stride
    if column != 1:  # its columns are contiguous
        num_rows, num_columns, row = num_columns, num_rows, column
    return ctypes.c_uint64(num_columns), ctypes.c_uint64(num_rows), ctypes.c_int64(row)


def _created(owner: object, kind: str, *arguments: Any) -> Handle:
    """Create a descriptor of the library, which it destroys together with its owner."""
    descriptor, library = Handle(), _library()
    _check(getattr(library, f"cublasLt{kind}Create")(ctypes.byref(descriptor), *arguments))
    weakref.finalize(owner, getattr(library, f"cublasLt{kind}Destroy"), descriptor)
    return descriptor


def _set(setter: Any, descriptor: Handle, attribute: int, value: Any) -> None:
    _check(setter(descriptor, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))))


def _check(status: int) -> None:
    if status:
        raise DeviceError(f"cuBLASLt cannot add a product: status {status} (cublasStatus_t).")
