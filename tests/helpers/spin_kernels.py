"""Kernels of known length for tests on a GPU, as PTX that the driver compiles; each notes when and where its CTAs ran.

`spin` holds its slot for a given time, `large_spin` too, with as many registers as an NCCL kernel of compute capability 9.0
has, and `latch` holds its stream until the host opens it. Times are the GPU's own clock, the same for all SMs.
"""

import ctypes
import time
from typing import Any

import torch
from cuda.bindings import driver as cu

from counterpoint.cuda.driver import check

NUM_SM_SLOTS = 1024
NEVER = 2**63 - 1
NUM_BALLAST = 78
LATCH_LIMIT_NS = 2_000_000_000
HOST_LIMIT_S = 1.0

HEADER = ".version 7.0\n.target sm_70\n.address_size 64\n"
SPIN = """
.visible .entry {name}(.param .u64 duration_ns, .param .u64 marks_at, .param .u64 counts_at, .param .u64 started_at)
{{
    .reg .u64 %start, %now, %elapsed, %duration, %marks, %counts, %started, %offset, %slot, %old;
    .reg .u32 %thread, %cta, %sm, %count, %before, %kept<{num_ballast}>;
    .reg .pred %waiting, %follows, %later, %never;
    ld.param.u64 %duration, [duration_ns];
    ld.param.u64 %marks, [marks_at];
    ld.param.u64 %counts, [counts_at];
    ld.param.u64 %started, [started_at];
    mov.u64 %start, %globaltimer;
    mov.u32 %thread, %tid.x;
    setp.ne.u32 %follows, %thread, 0;
    @%follows bra READY;
    atom.global.min.u64 %old, [%marks], %start;
    mov.u32 %sm, %smid;
    mul.wide.u32 %offset, %sm, 8;
    add.u64 %slot, %counts, %offset;
    atom.global.add.u32 %count, [%slot], 1;
    add.u32 %count, %count, 1;
    atom.global.max.u32 %before, [%slot+4], %count;
    mov.u32 %cta, %ctaid.x;
    setp.ne.u32 %later, %cta, 0;
    @%later bra READY;
    st.volatile.global.u32 [%started], 1;
READY:
{load}
AGAIN:
    mov.u64 %now, %globaltimer;
    sub.u64 %elapsed, %now, %start;
    setp.lt.u64 %waiting, %elapsed, %duration;
    @%waiting bra AGAIN;
{use}
    @%follows bra DONE;
    atom.global.add.u32 %count, [%slot], 4294967295;
    atom.global.max.u64 %old, [%marks+8], %now;
DONE:
    ret;
}}
"""
LATCH = """
.visible .entry latch(.param .u64 opened_at, .param .u64 marks_at, .param .u64 limit_ns)
{
    .reg .u64 %start, %now, %elapsed, %limit, %marks, %opened, %old;
    .reg .u32 %value;
    .reg .pred %is_open, %waiting;
    ld.param.u64 %opened, [opened_at];
    ld.param.u64 %marks, [marks_at];
    ld.param.u64 %limit, [limit_ns];
    mov.u64 %start, %globaltimer;
    atom.global.min.u64 %old, [%marks], %start;
AGAIN:
    ld.volatile.global.u32 %value, [%opened];
    mov.u64 %now, %globaltimer;
    setp.ne.u32 %is_open, %value, 0;
    @%is_open bra DONE;
    sub.u64 %elapsed, %now, %start;
    setp.lt.u64 %waiting, %elapsed, %limit;
    @%waiting bra AGAIN;
DONE:
    atom.global.max.u64 %old, [%marks+8], %now;
    ret;
}
"""


def ptx() -> str:
    """The three kernels' source."""
    # values that stay alive across the wait keep their registers; the store that needs them hardly ever happens
    load = "\n".join(f"    mov.u32 %kept{number}, %clock;" for number in range(NUM_BALLAST))
    use = "\n".join(
        f"    or.b32 %kept0, %kept0, %kept{number};\n    xor.b32 %kept0, %kept0, {number};"
        for number in range(1, NUM_BALLAST)
    )
    use += "\n    setp.eq.u32 %never, %kept0, 4294967295;\n    @%never st.volatile.global.u32 [%started], 2;"
    spins = SPIN.format(name="spin", num_ballast=1, load="", use="")
    large = SPIN.format(name="large_spin", num_ballast=NUM_BALLAST, load=load, use=use)
    return HEADER + spins + large + LATCH


class Record:
    """What one kernel noted: when its first CTA started and its last ended, and the most CTAs that an SM held at once."""

    def __init__(self) -> None:
        self.marks = torch.tensor([NEVER, 0], dtype=torch.int64, device="cuda")
        self.counts = torch.zeros(NUM_SM_SLOTS, 2, dtype=torch.int32, device="cuda")
        self.flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)

    @property
    def start_us(self) -> float:
        return int(self.marks[0]) / 1000

    @property
    def end_us(self) -> float:
        return int(self.marks[1]) / 1000

    def most_ctas(self, num_sms: int) -> list[int]:
        return self.counts[:num_sms, 1].tolist()

    def clear(self) -> None:
        self.marks.copy_(torch.tensor([NEVER, 0]))
        self.counts.zero_()
        self.flag.zero_()
        torch.cuda.synchronize()

    def wait_for_start(self) -> None:
        """Wait until CTA 0 has started."""
        deadline = time.monotonic() + HOST_LIMIT_S
        while not int(self.flag[0]):
            assert time.monotonic() < deadline, "the kernel did not start"

    def open(self) -> None:
        """Let the latch that this record belongs to go."""
        self.flag.fill_(1)


class SpinKernels:
    """The kernels, loaded; launches go to a torch stream and may be captured."""

    def __init__(self) -> None:
        torch.cuda.init()
        torch.cuda.current_stream().synchronize()
        self._module = check("Loading the test kernels", cu.cuModuleLoadData(ptx().encode() + b"\0"))
        self.functions = {name: self._function(name) for name in ("spin", "large_spin", "latch")}

    def _function(self, name: str) -> Any:
        return check(f"Finding {name}", cu.cuModuleGetFunction(self._module, name.encode()))

    def spin(self, record: Record, duration_us: float, num_ctas: int, threads: int = 128, stream: Any = None) -> None:
        """Launch `num_ctas` CTAs of `threads` threads that each last `duration_us`."""
        self._launch("spin", (num_ctas, threads, 0), self._spin_values(record, duration_us), stream)

    def large_spin(self, record: Record, duration_us: float, launch: tuple[int, int, int], stream: Any = None) -> None:
        """The same with many registers; `launch` is CTAs, threads, bytes of dynamic shared memory."""
        limit = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check("Raising the limit", cu.cuFuncSetAttribute(self.functions["large_spin"], limit, launch[2]))
        self._launch("large_spin", launch, self._spin_values(record, duration_us), stream)

    def latch(self, record: Record, stream: Any = None) -> None:
        """Launch one thread that ends when `record.open()` is called, at the latest after 2 s."""
        self._launch("latch", (1, 1, 0), (record.flag.data_ptr(), record.marks.data_ptr(), LATCH_LIMIT_NS), stream)

    @staticmethod
    def _spin_values(record: Record, duration_us: float) -> tuple[int, ...]:
        return (round(duration_us * 1000), record.marks.data_ptr(), record.counts.data_ptr(), record.flag.data_ptr())

    def _launch(self, name: str, launch: tuple[int, int, int], values: tuple[int, ...], stream: Any) -> None:
        num_ctas, threads, dynamic_bytes = launch
        handle = cu.CUstream((stream or torch.cuda.current_stream()).cuda_stream)
        packed = (values, (ctypes.c_ulonglong,) * len(values))
        sizes = (num_ctas, 1, 1, threads, 1, 1, dynamic_bytes)
        check(f"Launching {name}", cu.cuLaunchKernel(self.functions[name], *sizes, handle, packed, 0))
