"""A step: the kernels, collectives and copies of one iteration with footprints, streams and dependencies.

A step knows nothing of how fast a machine is. It may carry lone times: the durations that operations took, or would
take, alone on the traced machine. A described workload carries floating-point operations and bytes instead. Operations
are in the order in which the host issued them, and an operation waits only for earlier ones.
"""

import hashlib
from typing import Literal

import msgspec

from counterpoint.display import html_list, shortened
from counterpoint.errors import StepError, shown
from counterpoint.machine import ElementType
from counterpoint.units import format_bytes, format_count
from counterpoint.value import Value, check_types, require

DependencyOrigin = Literal["exact", "inferred"]
OperationKind = Literal["computation", "communication", "copy"]
Character = Literal["matmul", "attention", "streaming", "row_wise", "other"]
CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_recv"]
REDUCING_COLLECTIVES: tuple[CollectiveKind, ...] = ("all_reduce", "reduce_scatter", "reduce")
TransportKind = Literal["sm", "copy_engine"]
CopyDirection = Literal["device_to_device", "host_to_device", "device_to_host", "peer_to_peer", "set"]
MatmulSizes = tuple[int, int, int]  # rows, inner size and columns of a matrix multiplication

MAX_RANKS = 1 << 20  # of a job
LEAST_ROW_BYTES = 16  # of a row for each byte of what goes with it, such as its probability; chosen
MAX_CTAS = 1 << 50  # more CTAs are no real launch: at a nanosecond each on every slot of a GPU they would take minutes


class Footprint(Value, frozen=True, kw_only=True):
    """The SM resources of a launch: CTAs, threads, registers, shared memory, cluster.

    If only the sum of static and dynamic shared memory is known (profiler traces), it is in `dynamic_shared_bytes`.
    `carveout_percent` is the preferred shared-memory carveout; -1 leaves it to the driver.
    """

    num_ctas: int
    threads_per_cta: int
    registers_per_thread: int
    static_shared_bytes: int = 0
    dynamic_shared_bytes: int = 0
    ctas_per_cluster: int = 1
    named_barriers: int = 1
    carveout_percent: int = -1

    def __post_init__(self) -> None:
        check_types(self, StepError)
        require(
            1 <= self.num_ctas <= MAX_CTAS,
            StepError,
            f"num_ctas of a kernel must be from 1 to {MAX_CTAS:,}; found {self.num_ctas:,}. Check the grid.",
        )
        for name, least in (("threads_per_cta", 1), ("registers_per_thread", 0), ("ctas_per_cluster", 1)):
            number = getattr(self, name)
            require(number >= least, StepError, f"{name} of a kernel must be at least {least}; found {number}.")
        require(
            min(self.static_shared_bytes, self.dynamic_shared_bytes, self.named_barriers) >= 0,
            StepError,
            f"Shared memory and barriers of a kernel cannot be negative; found {self.static_shared_bytes} static, "
            f"{self.dynamic_shared_bytes} dynamic, {self.named_barriers} barriers.",
        )
        require(
            -1 <= self.carveout_percent <= 100,
            StepError,
            f"carveout_percent must be -1 (driver's choice) or 0 to 100; found {self.carveout_percent}.",
        )

    @property
    def shared_bytes(self) -> int:
        """Static and dynamic shared memory of one CTA, without what the system reserves."""
        return self.static_shared_bytes + self.dynamic_shared_bytes

    @property
    def registers_per_cta(self) -> int:
        """The registers of all threads of one CTA, at least one for each."""
        return self.threads_per_cta * max(1, self.registers_per_thread)


class Dependency(Value, frozen=True, kw_only=True):
    """A wait for operation number `operation`; `origin` says whether the source stated it or it was inferred."""

    operation: int
    origin: DependencyOrigin = "exact"


class Kernel(Value, frozen=True, kw_only=True, tag_field="type", tag="kernel"):
    """A computation kernel.

    One of three says how much work it is: `lone_us` (its time alone, uncapped, on the machine of the step); `flops`,
    `hbm_bytes` and `l2_bytes` (what its CTAs read from L2); or `cta_us`, how long one CTA lasts (the shortest, if they
    differ). `is_work_sharing`: its CTAs take tiles from a shared counter, so CTAs that find no SM cost only their share
    of the machine. `matmul_sizes`: rows, inner size and columns of a matrix multiplication, if known. `stage_bytes`: the
    shared memory of one stage of its tiles, if known. `element_type`: the type of its operands; None means bf16.
    `cta_time_spread`: CTAs last between 1 and 1 + spread times the shortest, by index. `issued_us`: when the host issued
    it, from the start of the step, or, if the host waited for an operation first, from the end of that one
    (`issued_after`); None if that cannot delay it. `priority`: that of its stream, where the job asks for one; less comes
    first.
    """

    name: str
    stream: int
    footprint: Footprint
    character: Character = "other"
    lone_us: float | None = None
    cta_us: float | None = None
    flops: float | None = None
    hbm_bytes: float | None = None
    l2_bytes: float | None = None
    matmul_sizes: MatmulSizes | None = None
    stage_bytes: int | None = None
    element_type: ElementType | None = None
    is_work_sharing: bool = False
    cta_time_spread: float = 0.0
    priority: int = 0
    waits_for: tuple[Dependency, ...] = ()
    issued_us: float | None = None
    issued_after: int | None = None

    @property
    def kind(self) -> OperationKind:
        return "computation"


class UnevenParts(Value, frozen=True, kw_only=True):
    """What one rank of an all-to-all sends to each rank of its group, and receives from each, in bytes.

    `group_rank` is its own rank in the group; what it keeps for itself counts on both sides.
    """

    sent_bytes: tuple[int, ...]
    received_bytes: tuple[int, ...]
    group_rank: int

    def __post_init__(self) -> None:
        check_types(self, StepError)
        size = len(self.sent_bytes)
        require(
            len(self.received_bytes) == size and 0 <= self.group_rank < size,
            StepError,
            f"Uneven parts need as many sizes sent as received, and a rank among them; found {size}, "
            f"{len(self.received_bytes)} and rank {self.group_rank}. Give one size for each rank of the group.",
        )
        require(
            min(*self.sent_bytes, *self.received_bytes) >= 0,
            StepError,
            f"Uneven parts must be 0 bytes or more; found {min(*self.sent_bytes, *self.received_bytes)}. Correct it.",
        )

    @property
    def kept_bytes(self) -> int:
        """What the rank sends to itself."""
        return self.sent_bytes[self.group_rank]

    @property
    def leaving_bytes(self) -> int:
        """What the rank sends to others."""
        return sum(self.sent_bytes) - self.kept_bytes

    @property
    def arriving_bytes(self) -> int:
        """What others send to the rank."""
        return sum(self.received_bytes) - self.received_bytes[self.group_rank]

    def goes_with(self, rows: "UnevenParts") -> bool:
        """Return whether these are numbers that go with rows: a few bytes for each of them, in the same parts."""
        both = ((self.sent_bytes, rows.sent_bytes), (self.received_bytes, rows.received_bytes))
        own, theirs = (sum(sum(each) for each in column) for column in zip(*both, strict=True))
        is_small = 0 < own * LEAST_ROW_BYTES <= theirs
        is_alike = len(self.sent_bytes) == len(rows.sent_bytes) and all(
            few * theirs == many * own for small, large in both for few, many in zip(small, large, strict=True)
        )
        return is_small and is_alike

    @property
    def is_uneven(self) -> bool:
        """Whether the sizes differ."""
        return len({*self.sent_bytes, *self.received_bytes}) > 1

    @property
    def as_equal_bytes(self) -> int:
        """The buffer size of equal parts, each as large as the largest that crosses a link to or from the rank; or the
        larger of the rank's own buffers, if that is more.
        """
        equal_bytes = len(self.sent_bytes) * self.most_crossing_bytes
        return max(equal_bytes, sum(self.sent_bytes), sum(self.received_bytes))

    @property
    def most_crossing_bytes(self) -> int:
        """The largest part that crosses a link to or from the rank."""
        others = [rank for rank in range(len(self.sent_bytes)) if rank != self.group_rank]
        return max((max(self.sent_bytes[rank], self.received_bytes[rank]) for rank in others), default=0)

    def returns(self, other: "UnevenParts") -> bool:
        """Return whether this returns what the other delivered: as much to each rank as came from it, and vice versa."""
        return (self.sent_bytes, self.received_bytes) == (other.received_bytes, other.sent_bytes)


class Collective(Value, frozen=True, kw_only=True, tag_field="type", tag="collective"):
    """A collective, or a send and receive, of `group_size` ranks.

    `num_bytes` is the size as nccl-tests counts it: the larger of the buffers of one rank (the reduced buffer, the
    gathered output, the scattered input, the sent buffer). `footprint` is its kernel's; None means the library's usual
    one. `peer_wait_us` is the part of its traced time spent waiting for other ranks. `process_group` is the group's
    description, or its name if that says more; None if unknown. `ranks` are the group's ranks; empty if unknown. `parts`
    are the sizes of an all-to-all's parts, if the job states them; `has_unknown_parts` if its call gives sizes, but they
    are not known. `begins_first`: in a trace it began before kernels that waited for the same operation. `priority`: as
    of a kernel. A step's fingerprint does not depend on these.
    """

    name: str
    stream: int
    collective: CollectiveKind
    num_bytes: int
    group_size: int
    process_group: str | None = None
    ranks: tuple[int, ...] = ()
    parts: UnevenParts | None = None
    has_unknown_parts: bool = False
    begins_first: bool = False
    priority: int = 0
    library: str = "nccl"
    transport: TransportKind = "sm"
    footprint: Footprint | None = None
    lone_us: float | None = None
    peer_wait_us: float = 0.0
    waits_for: tuple[Dependency, ...] = ()
    issued_us: float | None = None
    issued_after: int | None = None

    @property
    def kind(self) -> OperationKind:
        return "communication"

    @property
    def gives_sizes(self) -> bool:
        """Whether the call gives the sizes of its parts."""
        return self.parts is not None or self.has_unknown_parts


class Copy(Value, frozen=True, kw_only=True, tag_field="type", tag="copy"):
    """A copy or fill by a copy engine; between GPUs it counts as communication."""

    name: str
    stream: int
    direction: CopyDirection
    num_bytes: int
    lone_us: float | None = None
    waits_for: tuple[Dependency, ...] = ()
    issued_us: float | None = None
    issued_after: int | None = None

    @property
    def kind(self) -> OperationKind:
        return "communication" if self.direction == "peer_to_peer" else "copy"


Operation = Kernel | Collective | Copy


def is_fill(operation: Operation) -> bool:
    """Return whether an operation sets memory to one value."""
    return isinstance(operation, Copy) and operation.direction == "set"


class Step(Value, frozen=True, kw_only=True):
    """One iteration of a job, as rank 0 (or the traced rank) sees it; all ranks are assumed to be alike.

    `device_name` is the GPU on which lone times were measured, None for a described workload. `launch_gap_us` is the
    usual gap between two kernels of one stream; None leaves it to the machine's calibration. `fits_beside` are pairs of
    operations that were seen together on SMs: the second started while the first had a CTA on every SM, so such launches
    fit however their warps are placed. `is_timed_in_bursts`: lone times were taken in bursts of some milliseconds,
    before the power limit lowered the clock; False for times from a running job.
    """

    name: str
    num_ranks: int
    operations: tuple[Operation, ...]
    device_name: str | None = None
    launch_gap_us: float | None = None
    fits_beside: tuple[tuple[int, int], ...] = ()
    is_timed_in_bursts: bool = False

    def __post_init__(self) -> None:
        check_types(self, StepError)
        require(
            bool(self.operations), StepError, f"Step '{shown(self.name)}' holds no operation, so there is nothing to plan."
        )
        require(
            self.num_ranks >= 1, StepError, f"Step '{shown(self.name)}' must have at least 1 rank; found {self.num_ranks}."
        )
        for index, operation in enumerate(self.operations):
            _check_operation(index, operation)
        for pair in self.fits_beside:
            require(
                min(pair) >= 0 and max(pair) < len(self.operations),
                StepError,
                f"Step '{shown(self.name)}': fits_beside names operations {pair[0]} and {pair[1]}; it has operations 0 to "
                f"{len(self.operations) - 1}.",
            )

    def kernel(self, number: int) -> Kernel:
        """Return the operation of this number, which must be a kernel."""
        operation = self.operations[number]
        assert isinstance(operation, Kernel), f"operation {number} is a {operation.kind}"
        return operation

    def collective(self, number: int) -> Collective:
        """Return the operation of this number, which must be a collective."""
        operation = self.operations[number]
        assert isinstance(operation, Collective), f"operation {number} is a {operation.kind}"
        return operation

    def collectives(self) -> dict[int, Collective]:
        """Return the collectives by their numbers."""
        return {number: each for number, each in enumerate(self.operations) if isinstance(each, Collective)}

    def fingerprint(self) -> str:
        """Return sixteen hexadecimal digits that change with operations, order, launches, sizes and streams, not with
        times.
        """
        # Saved plans hold it, so it stays this JSON and not `all_fields`, which would give every step another one. JSON
        # omits the defaults of a footprint alike in every process, because CPython keeps one object for each of them.
        facts = []
        for operation in self.operations:
            launch = None if isinstance(operation, Copy) else operation.footprint
            size = 0 if isinstance(operation, Kernel) else operation.num_bytes
            waits = [dependency.operation for dependency in operation.waits_for]
            facts.append((operation.kind, operation.name, operation.stream, launch, size, waits))
        return hashlib.sha256(msgspec.json.encode((self.num_ranks, facts))).hexdigest()[:16]

    def _in_short(self) -> str:
        return f"{shortened(self.name)!r}: {', '.join(contents_of(self))}"

    def _repr_html_(self) -> str:
        """Return what notebooks show of the step: the number of its operations."""
        return html_list(f"Step {self.name}", contents_of(self))


def predecessors(step: Step, start: int | None = None) -> list[set[int]]:
    """Return what each operation follows, by number: what it waits for, and the operation before it on its stream, or
    `start`, if it is given, for the first one there.
    """
    last: dict[int, int] = {}
    found: list[set[int]] = []
    for number, operation in enumerate(step.operations):
        before = last.get(operation.stream, start)
        found.append({each.operation for each in operation.waits_for} | ({before} if before is not None else set()))
        last[operation.stream] = number
    return found


def contents_of(step: Step) -> tuple[str, ...]:
    """Describe how many operations of each kind a step holds, and its number of ranks."""
    collectives = step.collectives().values()
    num_copies = sum(isinstance(operation, Copy) for operation in step.operations)
    return (
        format_count(len(step.operations) - len(collectives) - num_copies, "kernel"),
        f"{format_count(len(collectives), 'collective')} of {format_bytes(sum(each.num_bytes for each in collectives))}",
        format_count(num_copies, "copy or fill", "copies and fills"),
        format_count(step.num_ranks, "rank"),
    )


def _check_operation(index: int, operation: Operation) -> None:
    check_types(operation, StepError, f"Operation {index}")
    where = f"Operation {index} ('{shown(operation.name)}')"
    earlier = f"an earlier one, 0 to {index - 1}" if index else "an earlier one, and the first operation has none"
    for dependency in operation.waits_for:
        check_types(dependency, StepError, f"{where}: waits_for")
        require(
            0 <= dependency.operation < index,
            StepError,
            f"{where} waits for operation {dependency.operation}; it can wait only for {earlier}.",
        )
    require(
        operation.issued_after is None or 0 <= operation.issued_after < index,
        StepError,
        f"{where} was issued after operation {operation.issued_after}; it can follow only {earlier}.",
    )
    for name in ("lone_us", "cta_us", "flops", "hbm_bytes", "l2_bytes", "num_bytes", "peer_wait_us"):
        number = getattr(operation, name, None)
        require(
            number is None or 0 <= number < 1e18, StepError, f"{where}: {name} must be from 0 to below 1e18; found {number}."
        )
    if isinstance(operation, Kernel):
        _check_kernel(where, operation)
    if isinstance(operation, Collective):
        _check_collective(where, operation)


def _check_kernel(where: str, kernel: Kernel) -> None:
    require(
        any(known is not None for known in (kernel.lone_us, kernel.cta_us, kernel.flops, kernel.hbm_bytes)),
        StepError,
        f"{where} has no time and no amount of work; give lone_us, cta_us, flops or hbm_bytes.",
    )
    require(
        0 <= kernel.cta_time_spread <= 10,
        StepError,
        f"{where}: cta_time_spread must be from 0 to 10; found {kernel.cta_time_spread}.",
    )
    require(
        kernel.stage_bytes is None or kernel.stage_bytes > 0,
        StepError,
        f"{where}: stage_bytes must be above 0; found {kernel.stage_bytes}. Leave it out if it is not known.",
    )
    require(
        min(kernel.matmul_sizes or (1,)) > 0,
        StepError,
        f"{where}: matmul_sizes must be above 0; found {kernel.matmul_sizes}. Leave them out if they are not known.",
    )


def _check_collective(where: str, collective: Collective) -> None:
    require(
        collective.transport != "copy_engine" or collective.collective not in REDUCING_COLLECTIVES,
        StepError,
        f"{where}: copy engines cannot reduce, but {collective.collective} does. Keep transport sm; a plan "
        "may ask for copies and a sum.",
    )
    size = collective.group_size
    require(
        collective.parts is None or (collective.collective == "all_to_all" and len(collective.parts.sent_bytes) == size),
        StepError,
        f"{where}: parts belong to an all_to_all, one for each of its {size} ranks. Give one for each.",
    )
    require(size >= 1, StepError, f"{where}: group_size must be at least 1; found {size}.")
