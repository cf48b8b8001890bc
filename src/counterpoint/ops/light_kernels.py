"""Compiles the light kernels (`light.cu`) for the current GPU, and prepares their launches.

A CTA has 128 threads with at most 32 registers each and no shared memory, so it fits wherever 4 warps and 4,096
registers are free. NCCL's has 544 threads with 96 registers and about 101 KiB. NVRTC, which comes with torch, compiles
in less than a second; nothing is built when Counterpoint is installed.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

import torch
from cuda.bindings import driver as cu
from cuda.bindings import nvrtc

from counterpoint.controls import MOST_LIGHT_RANKS
from counterpoint.cuda.driver import Handle, check
from counterpoint.cuda.driver_graph import LightLaunch
from counterpoint.errors import DeviceError
from counterpoint.value import Value

MAX_PEERS = MOST_LIGHT_RANKS - 1
THREADS = 128
VECTOR_BYTES = 16  # bytes that a thread moves at once
WORD_BYTES = 4  # bytes of a flag, and of a count
PUSH = "counterpoint_light_push"
REDUCE = {
    torch.float32: "counterpoint_light_reduce_float32",
    torch.bfloat16: "counterpoint_light_reduce_bfloat16",
    torch.float16: "counterpoint_light_reduce_float16",
}


class LightArgument(ctypes.Structure):
    """The argument of every kernel of `light.cu`, field by field; addresses are those of this process."""

    _fields_ = (
        ("source", ctypes.c_uint64 * MOST_LIGHT_RANKS),
        ("target", ctypes.c_uint64 * MOST_LIGHT_RANKS),
        ("num_bytes", ctypes.c_uint64 * MOST_LIGHT_RANKS),
        ("raised", ctypes.c_uint64 * MAX_PEERS),
        ("awaited", ctypes.c_uint64 * MAX_PEERS),
        ("counts", ctypes.c_uint64),
        ("num_sources", ctypes.c_int),
        ("num_targets", ctypes.c_int),
        ("num_peers", ctypes.c_int),
        ("scale", ctypes.c_float),
    )


class LightSignals(Value, frozen=True, kw_only=True):
    """The flags of one collective: those that this rank sets on each peer, those that each peer sets here, and counts."""

    raised: tuple[int, ...]
    awaited: tuple[int, ...]
    counts: int


class Moves(Value, frozen=True, kw_only=True):
    """Blocks to move: sources, targets and bytes. A reduction has as many sources as ranks, one length, and a scale."""

    source: tuple[int, ...]
    target: tuple[int, ...]
    num_bytes: tuple[int, ...]
    scale: float = 1.0

    def obstacle(self) -> str:
        """Return why no kernel can move them; empty if one can."""
        if any(number % VECTOR_BYTES for number in (*self.source, *self.target, *self.num_bytes)):
            return f"its blocks do not begin and end at multiples of {VECTOR_BYTES} bytes, as light kernels require"
        return ""


def launch_of(kernel: str, moves: Moves, signals: LightSignals) -> LightLaunch:
    """Return the launch of a kernel by its name, with one CTA. Raises `DeviceError` if it cannot be compiled."""
    argument = LightArgument(
        source=(ctypes.c_uint64 * MOST_LIGHT_RANKS)(*moves.source),
        target=(ctypes.c_uint64 * MOST_LIGHT_RANKS)(*moves.target),
        num_bytes=(ctypes.c_uint64 * MOST_LIGHT_RANKS)(*moves.num_bytes),
        raised=(ctypes.c_uint64 * MAX_PEERS)(*signals.raised),
        awaited=(ctypes.c_uint64 * MAX_PEERS)(*signals.awaited),
        counts=signals.counts,
        num_sources=len(moves.source),
        num_targets=len(moves.target),
        num_peers=len(signals.raised),
        scale=moves.scale,
    )
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
    params = cu.CUDA_KERNEL_NODE_PARAMS()
    params.func = _function(kernel)
    params.gridDimX, params.gridDimY, params.gridDimZ = 1, 1, 1
    params.blockDimX, params.blockDimY, params.blockDimZ = THREADS, 1, 1
    params.kernelParams = ctypes.addressof(arguments)
    return LightLaunch(params=params, arguments=(argument, arguments))


def _function(kernel: str) -> Handle:
    context = int(check("Finding the CUDA context", cu.cuCtxGetCurrent()))
    return check(f"Finding {kernel}", cu.cuModuleGetFunction(_module(context), kernel.encode()))


@cache
def _module(context: int) -> Handle:
    """Return the kernels in the CUDA context of that handle."""
    source = resources.files("counterpoint.ops").joinpath("light.cu").read_bytes()
    major, minor = torch.cuda.get_device_capability()
    image = compiled(source, f"sm_{major}{minor}")
    return check(f"Loading light kernels in context {context:#x}", cu.cuModuleLoadData(image))


def compiled(source: bytes, architecture: str) -> bytes:
    """Compile CUDA C for a GPU architecture such as "sm_90". Raises `DeviceError` with the compiler's message."""
    try:
        program = _checked("Reading light.cu", nvrtc.nvrtcCreateProgram(source, b"light.cu", 0, [], []))
    except RuntimeError as problem:  # cuda-bindings' own error if the library is missing
        raise DeviceError(
            f"Light kernels need NVRTC, which cannot be loaded ({problem}). Install nvidia-cuda-nvrtc."
        ) from None
    options: Sequence[bytes] = (f"--gpu-architecture={architecture}".encode(), b"--std=c++17")
    compiling = nvrtc.nvrtcCompileProgram(program, len(options), list(options))
    if compiling[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        size = _checked("Reading the compiler's log", nvrtc.nvrtcGetProgramLogSize(program))
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise DeviceError(f"Light kernels cannot be compiled for {architecture}: {log.decode(errors='replace')[:300]}")
    image = b" " * int(_checked("Sizing the compiled kernels", nvrtc.nvrtcGetCUBINSize(program)))
    _checked("Reading the compiled kernels", nvrtc.nvrtcGetCUBIN(program, image))
    return image


def _checked(what: str, result: tuple[Any, ...]) -> Any:
    error, *values = result
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise DeviceError(f"{what} failed with {error.name}. Light kernels need NVRTC of CUDA 12 or later.")
    return values[0] if values else None
