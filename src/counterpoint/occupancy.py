"""Occupancy of one SM: the residency of a kernel, the shared memory that caps it, and which kernels fit beside each
other.

This module knows nothing of time, of which CTA is placed next, or of where a cluster finds its SMs. Rules and their
sources:

- Limits of one kernel: the occupancy rules of CUDA 13.0 (`tests/data/occupancy_vectors.csv`: 6,000 reference answers).
- Sub-partitions: each warp goes to the sub-partition with the fewest warps, ties to the lowest number, and a CTA whose next
  warp finds too few registers there does not start, whatever is free elsewhere. Measured on H200 for 301 pairs of
  kernels (`tests/data/beside_h200.csv`); taken to hold on other GPUs.
- Shared memory is taken from the SM's present carveout, which is fixed while anything is resident
  (`tests/data/coresidency_h200.csv`: a collective waits beside free bytes until the carveout is raised).
"""

from functools import lru_cache
from typing import Literal

from msgspec.structs import replace

from counterpoint.errors import OccupancyError
from counterpoint.machine import Gpu
from counterpoint.step import Footprint
from counterpoint.value import Value, require

Limiter = Literal["threads_per_cta", "warps", "registers", "shared_memory", "named_barriers", "cta_slots"]
Residents = tuple[tuple[Footprint, int], ...]


class Residency(Value, frozen=True, kw_only=True):
    """How many CTAs of a kernel live on one SM at once, and what stops one more.

    `ctas_per_sm` is 0 if not one fits. `shared_bytes_per_cta` is what a CTA gets: static, dynamic and reserved, rounded
    up. `carveout_bytes` is the shared memory to which an empty SM is configured for this kernel.
    """

    ctas_per_sm: int
    limiter: Limiter
    shared_bytes_per_cta: int
    carveout_bytes: int


class SmLoad(Value, frozen=True, kw_only=True):
    """What all CTAs on one SM hold; `registers` by sub-partition."""

    ctas: int
    warps: int
    registers: tuple[int, ...]
    shared_bytes: int
    named_barriers: int


class Beside(Value, frozen=True, kw_only=True):
    """The largest residency of a computation kernel that leaves room for one communication CTA on the same SM.

    `dynamic_shared_bytes` caps the kernel to it; None if no cap is needed. `carveout_percent` is what the kernel must
    ask for; it is the present one if that suffices.
    """

    ctas_per_sm: int
    dynamic_shared_bytes: int | None
    carveout_percent: int


def warps_per_cta(gpu: Gpu, footprint: Footprint) -> int:
    """Return the warps of one CTA; the last one may be partly filled."""
    return -(-footprint.threads_per_cta // gpu.warp_size)


def registers_per_warp(gpu: Gpu, footprint: Footprint) -> int:
    """Return the registers that one warp gets, in 32-bit registers."""
    return _round_up(footprint.registers_per_thread * gpu.warp_size, gpu.register_allocation_unit)


def shared_bytes_per_cta(gpu: Gpu, footprint: Footprint) -> int:
    """Return the shared memory that one CTA gets: static, dynamic and what the system reserves, rounded up."""
    return _round_up(footprint.shared_bytes + gpu.reserved_shared_bytes_per_cta, gpu.shared_allocation_unit_bytes)


@lru_cache(maxsize=4096)
def residency(gpu: Gpu, footprint: Footprint) -> Residency:
    """Return how many CTAs of a kernel are resident on one SM if it runs there alone.

    A carveout in percent is rounded up to the next step, and further up to what one CTA needs. With -1 the driver takes
    the smallest step that allows the most CTAs. Nothing is refused: a launch that does not fit has a residency of 0.
    """
    allocated = shared_bytes_per_cta(gpu, footprint)
    offered = _offered_bytes(gpu, footprint.carveout_percent, allocated)
    missing = _missing_for_one(gpu, footprint)
    if missing is not None:
        return Residency(ctas_per_sm=0, limiter=missing, shared_bytes_per_cta=allocated, carveout_bytes=offered)
    ctas_per_sm, limiter = min(_rooms(gpu, sm_load(gpu, ()), offered, footprint))
    if footprint.carveout_percent == -1:
        offered = _step_for(gpu, max(1, ctas_per_sm) * allocated)
    return Residency(ctas_per_sm=ctas_per_sm, limiter=limiter, shared_bytes_per_cta=allocated, carveout_bytes=offered)


def room_for(gpu: Gpu, residents: Residents, carveout_bytes: int, footprint: Footprint) -> int:
    """Return how many more CTAs of `footprint` fit on an SM that holds `residents` and is configured to
    `carveout_bytes`.

    `residents` are footprints with their counts, in the order of placement; their warps are assumed to be placed without
    gaps. The function is pure, so the caller may cache answers. It also returns 0 if the residents already hold too
    much. Raises `OccupancyError` for a carveout that the SM does not have.
    """
    if not 0 <= carveout_bytes <= gpu.shared_bytes_per_sm:
        raise OccupancyError(
            f"A carveout must be from 0 to {gpu.shared_bytes_per_sm:,} bytes on this GPU; found {carveout_bytes:,}. "
            "Use the carveout that residency() reports."
        )
    if _missing_for_one(gpu, footprint) is not None:
        return 0
    return max(0, min(_rooms(gpu, sm_load(gpu, residents), carveout_bytes, footprint))[0])


def room_beside(gpu: Gpu, kernel: Footprint, other: Footprint) -> int:
    """Return how many CTAs of `other` fit on an SM beside those of a kernel that began alone, on the fullest SM."""
    alone = residency(gpu, kernel)
    resident = min(alone.ctas_per_sm, -(-kernel.num_ctas // gpu.num_sms))
    return room_for(gpu, ((kernel, resident),), alone.carveout_bytes, other)


def sm_load(gpu: Gpu, residents: Residents) -> SmLoad:
    """Return what residents hold together, given as footprints with counts; their warps fill the sub-partitions without
    a gap.
    """
    ctas = warps = shared = barriers = 0
    registers = [0] * gpu.num_sub_partitions
    for footprint, count in residents:
        per_warp, last = registers_per_warp(gpu, footprint), warps + count * warps_per_cta(gpu, footprint)
        for index in range(gpu.num_sub_partitions):
            # Warps numbered `warps` to `last` - 1 that fall on this sub-partition.
            here = (last - index - 1) // gpu.num_sub_partitions - (warps - index - 1) // gpu.num_sub_partitions
            registers[index] += per_warp * here
        ctas, warps = ctas + count, last
        shared += count * shared_bytes_per_cta(gpu, footprint)
        barriers += count * footprint.named_barriers
    return SmLoad(ctas=ctas, warps=warps, registers=tuple(registers), shared_bytes=shared, named_barriers=barriers)


def cap_shared_bytes(gpu: Gpu, footprint: Footprint, ctas_per_sm: int) -> int:
    """Return the smallest dynamic shared memory, to the byte, with which at most `ctas_per_sm` CTAs are resident on one
    SM.

    Because sizes are rounded up to the allocation unit, every value from here to the next multiple has the same effect.
    Raises `OccupancyError` if the kernel's residency is already that low, or if no CTA may use that much.
    """
    require(ctas_per_sm >= 1, OccupancyError, f"CTAs per SM must be at least 1; found {ctas_per_sm}. Ask for 1 or more.")
    present = residency(gpu, footprint)
    require(
        ctas_per_sm < present.ctas_per_sm,
        OccupancyError,
        f"A cap at {ctas_per_sm} CTAs per SM changes nothing: {present.ctas_per_sm} are resident on an SM "
        f"already, limited by {present.limiter}. "
        + (f"Ask for {present.ctas_per_sm - 1} or fewer." if present.ctas_per_sm > 1 else "Leave this kernel uncapped."),
    )
    unit = gpu.shared_allocation_unit_bytes
    # Up to an equal share of the shared memory offered now, one CTA more than requested still fits.
    share = _offered_bytes(gpu, footprint.carveout_percent, present.shared_bytes_per_cta) // (ctas_per_sm + 1)
    allocated = max(unit, present.shared_bytes_per_cta, _round_up(share - unit + 1, unit))
    while _offered_bytes(gpu, footprint.carveout_percent, allocated) // allocated > ctas_per_sm:
        allocated += unit
    needed = allocated - unit + 1 - gpu.reserved_shared_bytes_per_cta
    largest = _round_up(gpu.max_shared_bytes_per_cta + gpu.reserved_shared_bytes_per_cta, unit)
    require(
        needed <= gpu.max_shared_bytes_per_cta,
        OccupancyError,
        f"A cap at {ctas_per_sm} CTAs per SM needs {needed:,} bytes of shared memory per CTA, but the limit on "
        f"this GPU is {gpu.max_shared_bytes_per_cta:,}. Ask for {gpu.shared_bytes_per_sm // largest} CTAs or "
        "more.",
    )
    return needed - footprint.static_shared_bytes


def largest_residency_beside(gpu: Gpu, computation: Footprint, communication: Footprint) -> Beside:
    """Return the largest residency of `computation` that leaves room for one CTA of `communication` on the same SM.

    The kernel's own carveout is kept if it suffices; otherwise 100 percent is used. Raises `OccupancyError` with the
    reason if no residency leaves room: no cap can help such a kernel.
    """
    alone = residency(gpu, computation)
    for name, fit in (("computation", alone), ("communication", residency(gpu, communication))):
        require(
            fit.ctas_per_sm > 0,
            OccupancyError,
            f"Not one CTA of the {name} kernel fits an SM of this GPU, limited by {fit.limiter}. Check its footprint.",
        )
    for ctas_per_sm in range(alone.ctas_per_sm, 0, -1):
        found: list[Beside] = []
        for percent in dict.fromkeys((computation.carveout_percent, 100)):
            capped = _capped(gpu, replace(computation, carveout_percent=percent), ctas_per_sm)
            fit = residency(gpu, capped)
            rooms = _rooms(gpu, sm_load(gpu, ((capped, fit.ctas_per_sm),)), fit.carveout_bytes, communication)
            room, lacking = min(rooms)
            if room >= 1:
                is_raised = capped.dynamic_shared_bytes > computation.dynamic_shared_bytes
                found.append(
                    Beside(
                        ctas_per_sm=fit.ctas_per_sm,
                        dynamic_shared_bytes=capped.dynamic_shared_bytes if is_raised else None,
                        carveout_percent=percent,
                    )
                )
        if found:  # an exact cap may allow fewer CTAs under one carveout than under the other
            return max(found, key=lambda each: each.ctas_per_sm)
    raise OccupancyError(_why_nothing_fits(gpu, computation, communication, lacking))


def _capped(gpu: Gpu, footprint: Footprint, ctas_per_sm: int) -> Footprint:
    if residency(gpu, footprint).ctas_per_sm <= ctas_per_sm:
        return footprint
    return replace(footprint, dynamic_shared_bytes=cap_shared_bytes(gpu, footprint, ctas_per_sm))


def _why_nothing_fits(gpu: Gpu, computation: Footprint, communication: Footprint, lacking: Limiter) -> str:
    """Explain in one line why a single CTA of a computation kernel leaves no room for the communication CTA."""
    single = _capped(gpu, replace(computation, carveout_percent=100), 1)
    held, needed = sm_load(gpu, ((single, 1),)), sm_load(gpu, ((communication, 1),))
    reasons: dict[Limiter, str] = {
        "registers": _why_registers_lack(gpu, held, needed),
        "shared_memory": f"holds {held.shared_bytes:,} of {gpu.shared_bytes_per_sm:,} bytes of shared memory, and the other "
        f"needs {needed.shared_bytes:,}",
        "warps": f"holds {held.warps} of {gpu.max_warps_per_sm} warps, and the other needs {needed.warps}",
        "named_barriers": f"holds {held.named_barriers} of {gpu.named_barriers_per_sm} named barriers, and the other needs "
        f"{needed.named_barriers}",
    }
    return (
        f"No cap can help: a communication CTA ({communication.threads_per_cta} threads x "
        f"{communication.registers_per_thread} registers) does not fit beside a single CTA of the kernel "
        f"({computation.threads_per_cta} x {computation.registers_per_thread}). The kernel's CTA "
        f"{reasons.get(lacking, 'takes the only CTA slot')}."
    )


def _why_registers_lack(gpu: Gpu, held: SmLoad, needed: SmLoad) -> str:
    size = gpu.registers_per_sub_partition
    total, together = size * gpu.num_sub_partitions, sum(held.registers) + sum(needed.registers)
    if together > total:
        alone = "fills the register file: it " if 2 * sum(held.registers) > total else ""
        return f"{alone}holds {sum(held.registers):,} of {total:,} registers, and the other needs {sum(needed.registers):,}"
    most = f"{max(needed.registers):,} of the {size:,} registers of one sub-partition"
    return f"holds {max(held.registers):,} registers of a sub-partition, and the other needs {most}"


def _missing_for_one(gpu: Gpu, footprint: Footprint) -> Limiter | None:
    """Return what a single CTA lacks on an empty SM, or None if it may run.

    The hardware checks registers as if a CTA's warps filled all sub-partitions evenly.
    """
    warps = _round_up(warps_per_cta(gpu, footprint), gpu.num_sub_partitions)
    file = gpu.registers_per_sub_partition * gpu.num_sub_partitions
    if footprint.threads_per_cta > gpu.max_threads_per_cta:
        return "threads_per_cta"
    if footprint.registers_per_thread > gpu.max_registers_per_thread or registers_per_warp(gpu, footprint) * warps > file:
        return "registers"
    if footprint.shared_bytes > gpu.max_shared_bytes_per_cta:
        return "shared_memory"
    return "named_barriers" if footprint.named_barriers > gpu.named_barriers_per_cta else None


def _rooms(gpu: Gpu, load: SmLoad, carveout_bytes: int, footprint: Footprint) -> list[tuple[int, Limiter]]:
    """Return how many more CTAs each resource has room for; negative if the load exceeds it."""
    warps = warps_per_cta(gpu, footprint)
    rooms: list[tuple[int, Limiter]] = [
        ((gpu.max_warps_per_sm - load.warps) // warps, "warps"),
        (gpu.max_ctas_per_sm - load.ctas, "cta_slots"),
    ]
    per_warp, shared = registers_per_warp(gpu, footprint), shared_bytes_per_cta(gpu, footprint)
    if per_warp:
        rooms.append((_warps_until_full(gpu, load, per_warp) // warps, "registers"))
    if shared:
        rooms.append(((carveout_bytes - load.shared_bytes) // shared, "shared_memory"))
    if footprint.named_barriers:
        rooms.append(((gpu.named_barriers_per_sm - load.named_barriers) // footprint.named_barriers, "named_barriers"))
    return rooms


def _warps_until_full(gpu: Gpu, load: SmLoad, per_warp: int) -> int:
    """Return how many more warps can be dealt to the sub-partitions before one has too few registers."""
    number, size = gpu.num_sub_partitions, gpu.registers_per_sub_partition
    turns = [
        (index - load.warps) % number + number * ((size - held) // per_warp) for index, held in enumerate(load.registers)
    ]
    return min(turns)


def _offered_bytes(gpu: Gpu, carveout_percent: int, allocated: int) -> int:
    """Return the most shared memory that an SM offers to CTAs of `allocated` bytes: the preference, or more if one CTA
    needs it.
    """
    if carveout_percent == -1:
        return gpu.shared_bytes_per_sm
    return _step_for(gpu, max(allocated, gpu.shared_bytes_per_sm * carveout_percent // 100))


def _step_for(gpu: Gpu, num_bytes: int) -> int:
    """Return the smallest carveout step that holds `num_bytes`; the largest step if none does."""
    return next((step for step in gpu.carveout_steps_bytes if step >= num_bytes), gpu.shared_bytes_per_sm)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
