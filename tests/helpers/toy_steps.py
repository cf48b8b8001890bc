"""Steps and GPUs small enough to work out by hand: kernels whose CTAs all last a given time, and GPUs of a few SMs.

Such CTAs draw on no bandwidth, so nothing but placement decides when they run. Launch gaps are 0.
"""

import msgspec

from counterpoint.controls import Control, Priority
from counterpoint.machine import Machine, load_machine
from counterpoint.plan import LEAVE_IT, Directive, Match, Plan
from counterpoint.sim import Simulator
from counterpoint.step import Collective, Copy, Dependency, Footprint, Kernel, Operation, Step
from counterpoint.timeline import Timeline

H200 = load_machine("h200")
COLLECTIVE_LAUNCH_US = 3.5
DEPENDENCY_LATENCY_US = 2.6
# 1 KiB is reserved for each CTA, so 2 of these take 2 x 116,736 = 233,472 bytes: all that an SM has.
HALF_SM_BYTES = 115_712
WHOLE_SM_BYTES = 232_448
# The usual kernel of NCCL 2.28.9 on compute capability 9.0.
NCCL = Footprint(
    num_ctas=24,
    threads_per_cta=544,
    registers_per_thread=96,
    static_shared_bytes=21568,
    dynamic_shared_bytes=82240,
    ctas_per_cluster=4,
)
# 384 threads x 168 registers fill an SM, as cuBLAS and cuDNN kernels do.
PERSISTENT = Footprint(num_ctas=132, threads_per_cta=384, registers_per_thread=168, dynamic_shared_bytes=WHOLE_SM_BYTES)
GREATEST = Priority(priority=-5)


def toy(*sms_per_gpc: int, num_copy_engines: int = 3) -> Machine:
    """An H200 node whose GPUs have only these SMs."""
    gpu = msgspec.structs.replace(
        H200.gpu, num_sms=sum(sms_per_gpc), sms_per_gpc=sms_per_gpc, num_copy_engines=num_copy_engines
    )
    return msgspec.structs.replace(H200, name="toy", gpu=gpu)


def kernel(
    num_ctas: int,
    cta_us: float,
    *,
    stream: int = 1,
    shared_bytes: int = 0,
    cluster: int = 1,
    issued_us: float | None = None,
) -> Kernel:
    """A kernel of 32-thread CTAs that each last `cta_us`; shared memory alone decides how many fit on an SM."""
    return Kernel(
        name=f"{num_ctas} x {cta_us:g} us",
        stream=stream,
        footprint=Footprint(
            num_ctas=num_ctas,
            threads_per_cta=32,
            registers_per_thread=16,
            dynamic_shared_bytes=shared_bytes,
            ctas_per_cluster=cluster,
            carveout_percent=100,
        ),
        cta_us=cta_us,
        issued_us=issued_us,
    )


def persistent_kernel(*, shares_work: bool) -> Kernel:
    """One CTA of 100 us on every SM of an H200."""
    return Kernel(name="persistent", stream=1, footprint=PERSISTENT, cta_us=100.0, is_work_sharing=shares_work)


def copy(lone_us: float, *, stream: int, issued_us: float | None = None) -> Copy:
    """A copy to the GPU that draws on next to no bandwidth."""
    return Copy(name="copy", stream=stream, direction="host_to_device", num_bytes=1000, lone_us=lone_us, issued_us=issued_us)


def all_reduce(lone_us: float, *, stream: int = 2, issued_us: float | None = None, after: int | None = None) -> Collective:
    """An all-reduce by NCCL's usual kernel that takes `lone_us` alone."""
    return Collective(
        name="all-reduce",
        stream=stream,
        collective="all_reduce",
        num_bytes=64 << 20,
        group_size=2,
        footprint=NCCL,
        lone_us=lone_us,
        issued_us=issued_us,
        waits_for=() if after is None else (Dependency(operation=after),),
    )


def step_of(*operations: Operation) -> Step:
    return Step(name="toy", num_ranks=2, operations=operations, launch_gap_us=0.0)


def plan_of(controls: dict[int, Control]) -> Plan:
    """One control for each operation number."""
    return Plan(
        directives=tuple(
            Directive(match=Match(operations=(index,)), controls=(control,), reason="test")
            for index, control in controls.items()
        )
    )


def simulate(machine: Machine, *operations: Operation, plan: Plan = LEAVE_IT) -> Timeline:
    return Simulator().run(step_of(*operations), machine, plan)


def spans(timeline: Timeline) -> list[tuple[float, float]]:
    """Start and end of each operation, in the order of the step, in microseconds to the nanosecond."""
    ordered = sorted(timeline.intervals, key=lambda interval: interval.operation)
    return [(round(interval.start_us, 3), round(interval.end_us, 3)) for interval in ordered]
