"""The controls: what can be changed about one operation of a step, each as a value with its limits and its words.

A control says itself what it is called, how a report words it, and who cannot apply it, and why. How it is applied is the
business of each applier: the simulator, captured graphs, supervised jobs, operators. To add one: docs/extending.md.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Literal

from counterpoint.errors import PlanError
from counterpoint.schedule.description import ScheduleDescription
from counterpoint.step import CollectiveKind, TransportKind
from counterpoint.units import MIB, format_count
from counterpoint.value import Value, require

__all__ = [
    "CommunicationCtas",
    "HeadStart",
    "LightKernel",
    "OverlapMatmul",
    "OwnStream",
    "Priority",
    "ResidencyCap",
    "ScheduleChoice",
    "Transport",
]

# Who applies a plan: the simulator to a step, `cuda/` to a captured graph, `counterpoint run` to a job, `ops` to operators.
Applier = Literal["step", "graph", "job", "operators"]
ALL_GROUPS = "in the environment of the job, for all its groups"
COPYING_INTEGRATIONS: tuple[tuple[str, str, str, tuple[CollectiveKind, ...]], ...] = (
    ("fsdp2", "fsdp2.use_copy_engines(model)", "in the code of an FSDP2 job", ("all_gather", "reduce_scatter")),
    ("ddp", "ddp.register(model)", "in the code of a DDP job", ("all_reduce",)),
)
OPERATORS_TAKE_SCHEDULES = "operators take only copy schedules; give the others to counterpoint.apply or counterpoint run"
OWN_STREAM_IN_THE_JOB = (
    "only the job knows what needs the result; issue the collective with async_op=True there, and wait() where it is needed"
)
# Of copies with a sum, as the integrations do them. Measured: with 6 MiB from each of 4 ranks copies are faster than the
# library's collective; below 4 MiB an assumption.
LEAST_PART_BYTES = 4 * MIB
MOST_LIGHT_CTAS = 512  # flags are kept for so many
MOST_LIGHT_RANKS = 8  # MAX_PEERS + 1 of ops/light.cu
ALL_REDUCES_IN_FLIGHT = 3  # so that one can wait for an SM while another copies; measured on 4 H200s (docs/integrations.md)
FOR_CAPTURED_STEPS = "light kernels take the place of collectives in a captured step only: counterpoint tune MODULE:FUNCTION"
FOR_OPERATORS = "it is for operators: counterpoint.ops.use_plan takes it"


class Way(Value, frozen=True, kw_only=True):
    """One way to get a control without us applying the plan: what to write, line by line, and where."""

    where: str
    lines: tuple[str, ...]


class AbstractControl(Value, frozen=True, kw_only=True, tag_field="control"):
    """What every control has. `refused_by` names the appliers that cannot apply it, each with the reason."""

    refused_by: ClassVar[Mapping[Applier, str]] = MappingProxyType({"operators": OPERATORS_TAKE_SCHEDULES})

    @property
    def tag(self) -> str:
        """The name that files and reports call it by, as in "residency_cap"."""
        return str(self.__struct_config__.tag)

    def describe(self) -> str:
        """The control in a few words, the same in every report and proof."""
        raise NotImplementedError

    def ways(self, collective: CollectiveKind | None = None) -> tuple[Way, ...]:
        """What a user can write to get it for a `collective` (None: not told) without a plan file; often nothing."""
        return ()


class ResidencyCap(AbstractControl, frozen=True, kw_only=True, tag="residency_cap"):
    """At most `ctas_per_sm` CTAs of the kernel on an SM, by raising its dynamic shared memory to `dynamic_shared_bytes`.

    `carveout_percent` raises the SM's shared-memory carveout to match; without it the freed room is not usable.
    """

    ctas_per_sm: int
    dynamic_shared_bytes: int
    carveout_percent: int = 100

    def __post_init__(self) -> None:
        require(self.ctas_per_sm >= 1, PlanError, f"A residency cap must allow at least 1 CTA; found {self.ctas_per_sm}.")
        require(
            self.dynamic_shared_bytes >= 0 and -1 <= self.carveout_percent <= 100,
            PlanError,
            f"A residency cap needs 0 or more bytes and a carveout of -1 to 100; found {self.dynamic_shared_bytes} and "
            f"{self.carveout_percent}.",
        )

    def describe(self) -> str:
        """As in "cap of 2 CTAs per SM (...)"."""
        how = f"{self.dynamic_shared_bytes:,} B of shared memory, carveout {self.carveout_percent} %"
        return f"cap of {format_count(self.ctas_per_sm, 'CTA')} per SM ({how})"


class Priority(AbstractControl, frozen=True, kw_only=True, tag="priority"):
    """Launch priority as the driver counts it: a lower number is greater, 0 is the least."""

    priority: int

    def __post_init__(self) -> None:
        require(self.priority <= 0, PlanError, f"A priority is 0 or lower (lower is greater); found {self.priority}.")

    def describe(self) -> str:
        """As in "priority -5"."""
        return f"priority {self.priority}"


class CommunicationCtas(AbstractControl, frozen=True, kw_only=True, tag="communication_ctas"):
    """How many CTAs (NCCL `max_ctas`), and threads in each (`NCCL_NTHREADS`; None leaves them), a collective runs with."""

    refused_by = MappingProxyType(
        {
            "graph": "a process group takes it when it is made: "
            "set options.config.max_ctas in dist.ProcessGroupNCCL.Options() and pass it as pg_options",
            "operators": OPERATORS_TAKE_SCHEDULES,
        }
    )

    max_ctas: int
    num_threads: int | None = None

    def __post_init__(self) -> None:
        require(1 <= self.max_ctas <= 64, PlanError, f"max_ctas must be from 1 to 64; found {self.max_ctas}.")
        require(
            self.num_threads is None or (64 <= self.num_threads <= 512 and self.num_threads % 32 == 0),
            PlanError,
            f"num_threads must be a multiple of 32 from 64 to 512; found {self.num_threads}.",
        )

    def describe(self) -> str:
        """As in "at most 8 CTAs of 256 threads"."""
        threads = f" of {self.num_threads} threads" if self.num_threads else ""
        return f"at most {format_count(self.max_ctas, 'CTA')}{threads}"

    def ways(self, collective: CollectiveKind | None = None) -> tuple[Way, ...]:
        """NCCL's variables, for the whole process; without a number of threads, the options of a process group, too."""
        variables = [f"export NCCL_MAX_CTAS={self.max_ctas}"]
        if self.num_threads is not None:
            return (Way(where=ALL_GROUPS, lines=(*variables, f"export NCCL_NTHREADS={self.num_threads}")),)
        lines = (
            "import torch.distributed as dist",
            "options = dist.ProcessGroupNCCL.Options()",
            f"options.config.max_ctas = {self.max_ctas}",
            'dist.init_process_group("nccl", pg_options=options)',
        )
        return (Way(where=ALL_GROUPS, lines=tuple(variables)), Way(where="in the job's code, for one group", lines=lines))


class Transport(AbstractControl, frozen=True, kw_only=True, tag="transport"):
    """Run a collective by kernels on SMs or by copy engines.

    An all-reduce or reduce-scatter by copy engines is copies of blocks and a sum, whose kernel needs SMs.
    """

    transport: TransportKind

    def describe(self) -> str:
        """As in "transport copy_engine"."""
        return f"transport {self.transport}"

    def ways(self, collective: CollectiveKind | None = None) -> tuple[Way, ...]:
        """The integrations that move such a collective; of an unknown one, all that there are."""
        if self.transport != "copy_engine":
            return ()
        return tuple(
            Way(where=where, lines=(f"from counterpoint.integrations import {module}", line))
            for module, line, where, collectives in COPYING_INTEGRATIONS
            if collective is None or collective in collectives
        )


class LightKernel(AbstractControl, frozen=True, kw_only=True, tag="light_kernel"):
    """Run a collective by `num_ctas` CTAs of a light kernel, of 128 threads and 32 registers and without shared memory.

    Such a CTA fits beside kernels that leave no room for the library's.
    """

    refused_by = MappingProxyType({"job": FOR_CAPTURED_STEPS, "operators": OPERATORS_TAKE_SCHEDULES})

    num_ctas: int

    def __post_init__(self) -> None:
        require(
            1 <= self.num_ctas <= MOST_LIGHT_CTAS,
            PlanError,
            f"A light kernel has from 1 to {MOST_LIGHT_CTAS} CTAs; found {self.num_ctas}.",
        )

    def describe(self) -> str:
        """As in "light kernel of 64 CTAs"."""
        return f"light kernel of {format_count(self.num_ctas, 'CTA')}"


class OverlapMatmul(AbstractControl, frozen=True, kw_only=True, tag="overlap_matmul"):
    """Run a collective together with the matmul that needs or feeds it, as one operator of `counterpoint.ops`.

    `schedule` is the operator's copy schedule; None leaves it to the heuristic, shape by shape.
    """

    refused_by = MappingProxyType(
        {
            "graph": "a captured collective and its matmul stay two; capture the step with "
            "counterpoint.integrations.tensor_parallel.overlap in force",
            "operators": OPERATORS_TAKE_SCHEDULES,
        }
    )

    schedule: ScheduleDescription | None = None

    def describe(self) -> str:
        """As in "overlap with its matmul, ring, 2 pieces"."""
        return "overlap with its matmul" + (f", {self.schedule.label()}" if self.schedule else "")

    def ways(self, collective: CollectiveKind | None = None) -> tuple[Way, ...]:
        """The integration for DTensor models, or for experts; all-to-alls that the job itself calls have an operator."""
        if collective == "all_to_all":
            experts = ("from counterpoint.integrations import expert_parallel", "expert_parallel.overlap(model)")
            by_hand = ("from counterpoint import ops", "product = ops.all_to_all_matmul(tokens, weight)")
            return (
                Way(where="in the code of an expert-parallel job", lines=experts),
                Way(where="in the job's code, instead of an all-to-all of equal blocks and the matmul", lines=by_hand),
            )
        lines = ("from counterpoint.integrations import tensor_parallel", "tensor_parallel.overlap(model)")
        return (Way(where="in the code of a DTensor tensor-parallel job", lines=lines),)


class OwnStream(AbstractControl, frozen=True, kw_only=True, tag="own_stream"):
    """Run a collective on a stream of its own: it waits for what it waited for; only what needs it waits for it."""

    refused_by = MappingProxyType(
        {"graph": OWN_STREAM_IN_THE_JOB, "job": OWN_STREAM_IN_THE_JOB, "operators": OPERATORS_TAKE_SCHEDULES}
    )

    def describe(self) -> str:
        """As in "a stream of its own"."""
        return "a stream of its own"


class HeadStart(AbstractControl, frozen=True, kw_only=True, tag="head_start"):
    """Hold the computation stream for `hold_us` before the matched kernel when a collective was launched just before it."""

    hold_us: float

    def __post_init__(self) -> None:
        require(0 < self.hold_us <= 1000, PlanError, f"A head start is above 0 and at most 1000 us; found {self.hold_us}.")

    def describe(self) -> str:
        """As in "head start 5 us"."""
        return f"head start {self.hold_us:g} us"


class ScheduleChoice(AbstractControl, frozen=True, kw_only=True, tag="copy_schedule"):
    """Run an operator of `counterpoint.ops` by this copy schedule; `sequential` is the library's collective and a matmul."""

    refused_by = MappingProxyType({"step": FOR_OPERATORS, "graph": FOR_OPERATORS, "job": FOR_OPERATORS})

    schedule: ScheduleDescription

    def describe(self) -> str:
        """As in "copy schedule ring, 2 pieces"."""
        return f"copy schedule {self.schedule.label()}"


Control = (
    ResidencyCap
    | Priority
    | CommunicationCtas
    | Transport
    | LightKernel
    | OverlapMatmul
    | OwnStream
    | HeadStart
    | ScheduleChoice
)
