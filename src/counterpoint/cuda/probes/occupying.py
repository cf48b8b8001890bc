"""Launches kernels of known length and footprint for the probes; each kernel records when and where its CTAs ran."""

import ctypes
from functools import cache
from importlib import resources
from typing import Any

import torch
from cuda.bindings import driver as cu

from counterpoint.cuda.driver import Handle, check
from counterpoint.value import Value

WORDS_PER_CTA = 3
ATTRIBUTES = cu.CUfunction_attribute


class ProbeLaunch(Value, frozen=True, kw_only=True):
    """How a probe's kernel is launched. `carveout_percent` is the share of L1 requested as shared memory; -1: no request."""

    num_ctas: int
    threads: int = 256
    shared_bytes: int = 0
    carveout_percent: int = -1


class Marks:
    """What one launch recorded of its CTAs: times in microseconds by the GPU's clock, which all SMs and streams share."""

    def __init__(self, num_ctas: int) -> None:
        self._words = torch.zeros(num_ctas, WORDS_PER_CTA, dtype=torch.int64, device="cuda")

    @property
    def address(self) -> int:
        """Address that the kernel writes to."""
        return int(self._words.data_ptr())

    def starts_us(self) -> list[float]:
        """Return the start of each CTA. Waits for the GPU, as the other methods do."""
        return [each / 1000 for each in self._words[:, 0].tolist()]

    def ends_us(self) -> list[float]:
        """Return the end of each CTA."""
        return [each / 1000 for each in self._words[:, 2].tolist()]

    def sms(self) -> list[int]:
        """Return the SM of each CTA."""
        return [int(each) for each in self._words[:, 1].tolist()]


def occupy(launch: ProbeLaunch, marks: Marks, duration_us: float) -> None:
    """Launch on the current stream: CTAs that last `duration_us` each."""
    _launch("occupy", launch, (round(1000 * duration_us), 0, marks.address))


def compute(launch: ProbeLaunch, marks: Marks, iterations: int, num_chains: int = 8) -> None:
    """Launch on the current stream: CTAs whose threads do 64 fused multiply-adds `iterations` times, in 8 chains or 1."""
    _launch("arithmetic" if num_chains == 8 else "chain", launch, (iterations, 0, marks.address))


def _launch(name: str, launch: ProbeLaunch, values: tuple[int, ...]) -> None:
    function = _functions(int(check("Finding the CUDA context", cu.cuCtxGetCurrent())))[name]
    shared, carveout = ATTRIBUTES.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, launch.carveout_percent
    check("Raising a kernel's shared memory limit", cu.cuFuncSetAttribute(function, shared, launch.shared_bytes))
    preferred = ATTRIBUTES.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    check("Asking for a carveout", cu.cuFuncSetAttribute(function, preferred, carveout))
    handle = cu.CUstream(torch.cuda.current_stream().cuda_stream)
    sizes = (launch.num_ctas, 1, 1, launch.threads, 1, 1, launch.shared_bytes)
    packed: Any = (values, (ctypes.c_ulonglong,) * len(values))
    check(f"Launching {name}", cu.cuLaunchKernel(function, *sizes, handle, packed, 0))


@cache
def _functions(context: int) -> dict[str, Handle]:
    """Load the kernels into a context, and return them by name."""
    image = resources.files("counterpoint.cuda.probes").joinpath("kernels.ptx").read_bytes() + b"\0"
    module = check("Loading the probes' kernels", cu.cuModuleLoadData(image))
    return {
        name: check(f"Finding {name}", cu.cuModuleGetFunction(module, name.encode()))
        for name in ("occupy", "arithmetic", "chain")
    }
