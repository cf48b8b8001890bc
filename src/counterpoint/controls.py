"""Controls: what can be changed about one operation of a step, each as a value with its limits and its wording.

A control knows its name, its wording in reports, and who cannot apply it and why. The appliers know how to apply it: the
simulator, captured graphs, supervised jobs, operators. To add a control: docs/extending.md.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Literal

from counterpoint.errors import PlanError
from counterpoint.schedule.description import ScheduleDescription
from counterpoint.step import CollectiveKind, TransportKind
from counterpoint.units import MIB, format_count
from counterpoint.value import Value, check_types, require

__all__ = [
    "Carveout",
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

# The appliers of a plan: the simulator to a step, `cuda/` to a captured graph, `counterpoint run` to a job, `ops` to
# operators.
Applier = Literal["step", "graph", "job", "operators"]
ALL_GROUPS = "in the environment of the job, for all its groups"
COPYING_INTEGRATIONS: tuple[tuple[str, str, str, tuple[CollectiveKind, ...]], ...] = (
    ("fsdp2", "fsdp2.use_copy_engines(model)", "in the code of an FSDP2 job", ("all_gather", "reduce_scatter")),
    ("ddp", "ddp.register(model)", "in the code of a DDP job", ("all_reduce",)),
    (
        "collectives",
        "collectives.replace()",
        "in the code of a job that calls such collectives itself",
        ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"),
    ),
)
OPERATORS_TAKE_SCHEDULES = "operators accept only copy schedules; pass the others to counterpoint.apply or counterpoint run"
OWN_STREAM_IN_THE_JOB = (
    "only the job knows what needs the result; in the job, issue the collective with async_op=True and wait() "
    "where the result is needed"
)
# For copies with a sum, as the integrations do them. Measured: with 6 MiB from each of 4 ranks, copies are faster than
# the library's collective. Below 4 MiB it is an assumption.
LEAST_PART_BYTES = 4 * MIB
COPIES_TAKE_NO_SIZES = (
    "each call gives the sizes of its parts or lists of tensors; copies take all_to_all_single without sizes"
)
MOST_LIGHT_CTAS = 512  # flags exist for this many
MOST_LIGHT_RANKS = 8  # MAX_PEERS + 1 of ops/light.cu
ALL_REDUCES_IN_FLIGHT = 3  # one can wait for an SM while another copies; measured on 4 H200s (docs/integrations.md)
FOR_CAPTURED_STEPS = "light kernels replace collectives in a captured step only: counterpoint tune MODULE:FUNCTION"
FOR_OPERATORS = "it is for operators: pass the plan to counterpoint.ops.use_plan"


class Way(Value, frozen=True, kw_only=True):
    """One way to apply a control without a plan file: what to write, line by line, and where."""

    where: str
    lines: tuple[str, ...]


class AbstractControl(Value, frozen=True, kw_only=True, tag_field="control"):
    """Base of all controls. `refused_by` names the appliers that cannot apply it, each with the reason."""

    refused_by: ClassVar[Mapping[Applier, str]] = MappingProxyType({"operators": OPERATORS_TAKE_SCHEDULES})

    @property
    def tag(self) -> str:
        """The control's name in files and reports, as in "residency_cap"."""
        return str(self.__struct_config__.tag)

    def describe(self) -> str:
        """Describe the control in a few words, the same in every report and proof."""
        raise NotImplementedError

    def ways(self, collective: CollectiveKind | None = None) -> tuple[Way, ...]:
        """Return what a user can write to apply it to a `collective` (None: not known) without a plan file; often
        nothing.
        """
        return ()


class ResidencyCap(AbstractControl, frozen=True, kw_only=True, tag="residency_cap"):
    """At most `ctas_per_sm` CTAs of the kernel on an SM, by raising its dynamic shared memory to `dynamic_shared_bytes`.

    `carveout_percent` raises the SM's shared-memory carveout to match; without it, collectives could not use the freed
    room. -1 leaves the kernel's carveout as it is.
    """

    ctas_per_sm: int
    dynamic_shared_bytes: int
    carveout_percent: int = 100

    def __post_init__(self) -> None:
        check_types(self, PlanError)
        require(self.ctas_per_sm >= 1, PlanError, f"A residency cap must allow at least 1 CTA; found {self.ctas_per_sm}.")
        require(
            self.dynamic_shared_bytes >= 0 and -1 <= self.carveout_percent <= 100,
            PlanError,
            f"A residency cap needs 0 or more bytes and a carveout of -1 to 100; found {self.dynamic_shared_bytes} and "
            f"{self.carveout_percent}.",
        )

    def describe(self) -> str:
        """Return words such as "cap of 2 CTAs per SM (...)"."""
        carveout = f", carveout {self.carveout_percent} %" if self.carveout_percent >= 0 else ""
        how = f"{self.dynamic_shared_bytes:,} B of shared memory{carveout}"
        return f"cap of {format_count(self.ctas_per_sm, 'CTA')} per SM ({how})"


class Carveout(AbstractControl, frozen=True, kw_only=True, tag="carveout"):
    """Ask for `percent` of an SM's memory as shared memory for a kernel; the rest is L1 cache.

    A kernel that asks for less leaves L1 to collectives beside it and behind it. If less than all of its CTAs need is left,
    fewer CTAs run on an SM.
    """

    percent: int

    def __post_init__(self) -> None:
        check_types(self, PlanError)
        require(0 <= self.percent <= 100, PlanError, f"A carveout must be from 0 to 100 percent; found {self.percent}.")

    def describe(self) -> str:
        """Return words such as "carveout 60 %"."""
        return f"carveout {self.percent} %"


class Priority(AbstractControl, frozen=True, kw_only=True, tag="priority"):
    """A launch priority in the driver's numbers: a lower number is a higher priority, and 0 is the lowest."""

    priority: int

    def __post_init__(self) -> None:
        check_types(self, PlanError)
        require(
            self.priority <= 0,
            PlanError,
            f"A priority must be 0 or lower (a lower number is a higher priority); found {self.priority}.",
        )

    def describe(self) -> str:
        """Return words such as "priority -5"."""
        return f"priority {self.priority}"


class CommunicationCtas(AbstractControl, frozen=True, kw_only=True, tag="communication_ctas"):
    """How many CTAs (NCCL `max_ctas`) a collective runs with, and threads in each (`NCCL_NTHREADS`; None keeps the
    default).
    """

    refused_by = MappingProxyType(
        {
            "graph": (
                "a process group gets it when it is created: set options.config.max_ctas in "
                "dist.ProcessGroupNCCL.Options() and pass it as pg_options"
            ),
            "operators": OPERATORS_TAKE_SCHEDULES,
        }
    )

    max_ctas: int
    num_threads: int | None = None

    def __post_init__(self) -> None:
        check_types(self, PlanError)
        require(1 <= self.max_ctas <= 64, PlanError, f"max_ctas must be from 1 to 64; found {self.max_ctas}.")
        require(
            self.num_threads is None or (64 <= self.num_threads <= 512 and self.num_threads % 32 == 0),
            PlanError,
            f"num_threads must be a multiple of 32 from 64 to 512; found {self.num_threads}.",
        )

    def describe(self) -> str:
        """Return words such as "at most 8 CTAs of 256 threads"."""
        threads = f" of {self.num_threads} threads" if self.num_threads else ""
        return f"at most {format_count(self.max_ctas, 'CTA')}{threads}"

    def ways(self, collective: CollectiveKind | None = None) -> tuple[Way, ...]:
        """Return NCCL's variables for the whole process and, without a number of threads, the options of a process
        group.
        """
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

    By copy engines, an all-reduce or reduce-scatter consists of copies of blocks and a sum, whose kernel needs SMs.
    """

    transport: TransportKind

    def describe(self) -> str:
        """Return words such as "transport copy_engine"."""
        return f"transport {self.transport}"

    def ways(self, collective: CollectiveKind | None = None) -> tuple[Way, ...]:
        """Return the integrations that move such a collective; for an unknown one, all of them."""
        if self.transport != "copy_engine":
            return ()
        return tuple(
            Way(where=where, lines=(f"from counterpoint.integrations import {module}", line))
            for module, line, where, collectives in COPYING_INTEGRATIONS
            if collective is None or collective in collectives
        )


class LightKernel(AbstractControl, frozen=True, kw_only=True, tag="light_kernel"):
    """Run a collective with `num_ctas` CTAs of a light kernel: 128 threads, 32 registers per thread, no shared memory.

    Such a CTA fits beside kernels that leave no room for the library's CTA.
    """

    refused_by = MappingProxyType({"job": FOR_CAPTURED_STEPS, "operators": OPERATORS_TAKE_SCHEDULES})

    num_ctas: int

    def __post_init__(self) -> None:
        check_types(self, PlanError)
        require(
            1 <= self.num_ctas <= MOST_LIGHT_CTAS,
            PlanError,
            f"A light kernel must have from 1 to {MOST_LIGHT_CTAS} CTAs; found {self.num_ctas}.",
        )

    def describe(self) -> str:
        """Return words such as "light kernel of 64 CTAs"."""
        return f"light kernel of {format_count(self.num_ctas, 'CTA')}"


class OverlapMatmul(AbstractControl, frozen=True, kw_only=True, tag="overlap_matmul"):
    """Run a collective together with the matmul that needs or feeds it, as one operator of `counterpoint.ops`.

    `schedule` is the operator's copy schedule; None lets the heuristic choose for each shape.
    """

    refused_by = MappingProxyType(
        {
            "graph": (
                "a captured graph keeps a collective and its matmul apart; capture the step with "
                "counterpoint.integrations.tensor_parallel.overlap applied"
            ),
            "operators": OPERATORS_TAKE_SCHEDULES,
        }
    )

    schedule: ScheduleDescription | None = None

    def describe(self) -> str:
        """Return words such as "overlap with its matmul, ring, 2 pieces"."""
        return "overlap with its matmul" + (f", {self.schedule.label()}" if self.schedule else "")

    def ways(self, collective: CollectiveKind | None = None) -> tuple[Way, ...]:
        """Return the integration for tensor-parallel models or for experts; for all-to-alls that the job itself calls, the
        operator.
        """
        if collective == "all_to_all":
            experts = ("from counterpoint.integrations import expert_parallel", "expert_parallel.overlap(model)")
            by_hand = ("from counterpoint import ops", "product = ops.all_to_all_matmul(tokens, weight)")
            return (
                Way(where="in the code of an expert-parallel job", lines=experts),
                Way(where="in the job's code, instead of an all-to-all of equal blocks and the matmul", lines=by_hand),
            )
        lines = ("from counterpoint.integrations import tensor_parallel", "tensor_parallel.overlap(model)")
        return (Way(where="in the code of a tensor-parallel job (DTensor, Megatron-LM, TransformerEngine)", lines=lines),)


class OwnStream(AbstractControl, frozen=True, kw_only=True, tag="own_stream"):
    """Run a collective on a separate stream: it waits for what it waited for before, and only what needs it waits for
    it.
    """

    refused_by = MappingProxyType(
        {"graph": OWN_STREAM_IN_THE_JOB, "job": OWN_STREAM_IN_THE_JOB, "operators": OPERATORS_TAKE_SCHEDULES}
    )

    def describe(self) -> str:
        """Return words such as "a separate stream"."""
        return "a separate stream"


class HeadStart(AbstractControl, frozen=True, kw_only=True, tag="head_start"):
    """Hold the computation stream for `hold_us` before the matched kernel if a collective was launched just before it."""

    hold_us: float

    def __post_init__(self) -> None:
        check_types(self, PlanError)
        require(
            0 < self.hold_us <= 1000, PlanError, f"A head start must be above 0 and at most 1000 us; found {self.hold_us}."
        )

    def describe(self) -> str:
        """Return words such as "head start 5 us"."""
        return f"head start {self.hold_us:g} us"


class ScheduleChoice(AbstractControl, frozen=True, kw_only=True, tag="copy_schedule"):
    """Run an operator of `counterpoint.ops` by this copy schedule; `sequential` is the library's collective and then a
    matmul.
    """

    refused_by = MappingProxyType({"step": FOR_OPERATORS, "graph": FOR_OPERATORS, "job": FOR_OPERATORS})

    schedule: ScheduleDescription

    def describe(self) -> str:
        """Return words such as "copy schedule ring, 2 pieces"."""
        return f"copy schedule {self.schedule.label()}"


Control = (
    ResidencyCap
    | Carveout
    | Priority
    | CommunicationCtas
    | Transport
    | LightKernel
    | OverlapMatmul
    | OwnStream
    | HeadStart
    | ScheduleChoice
)
