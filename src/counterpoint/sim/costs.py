"""The cost of an operation on a machine: its time alone, and the resources that its CTAs use.

A measured lone time takes precedence. Otherwise a kernel's time is the largest of three: its operations, its bytes from L2
and its bytes from HBM, each divided by the share of the peak rate that `calibrations/*.toml` states. A collective's time is
its bytes on the wire divided by the link's bandwidth.
"""

import math
from collections.abc import Callable

import msgspec

from counterpoint.footprints import communication_footprint
from counterpoint.links import Link
from counterpoint.machine import Machine
from counterpoint.occupancy import residency
from counterpoint.sim.alike import alike
from counterpoint.sim.block_kernels import BlockKernels
from counterpoint.sim.calibration import Calibration, CharacterConstants, CollectiveConstants, own_loads_scale
from counterpoint.sim.loads import LOADED_BYTES, under_way
from counterpoint.sim.matmul_rates import is_l2_limited, l2_bytes_per_s, reached_flops_per_s
from counterpoint.sim.nodes import leaves_node
from counterpoint.sim.power import slowdown, tile_latency
from counterpoint.sim.rates import EXPONENT, SM_EXPONENT, L2Delivery, MemoryLatency, smooth_minimum
from counterpoint.sim.reach import (
    by_copies_bytes,
    by_kernels_bytes,
    bytes_to_a_peer,
    collective_bytes_per_s,
    copies_bytes_per_s,
    wire_bytes,
)
from counterpoint.sim.task import CopyWork, SmWork
from counterpoint.sim.tiles import LEAST_TILE_BYTES, num_tiles, share_filled, stages, tile_of, tile_stages
from counterpoint.step import Collective, Copy, Footprint, Kernel, Operation
from counterpoint.units import PS_PER_US, US_PER_S

SUMMED_COLLECTIVES = ("all_reduce", "reduce_scatter")  # collectives that copy engines and a sum can do
MEMSET_US = 0.8  # of a few bytes, as cuBLAS and cuDNN set before their kernels: captured steps and traces of H200s
MOST_OF_L2 = 1.47  # times its share of L2's bandwidth: 64 bytes per cycle; so kernels on 120 of 132 SMs get all of it
MOST_OF_CTAS = 0.99  # share of what its CTAs move from which a collective's lone time says nothing of the link
LEAST_US = 1e-3  # least time of a CTA or a copy, because rates are work per time
LEAST_TILE_REGISTERS = 128  # a thread with fewer keeps no tile of a matmul in registers; an assumption
CALIBRATION_WARP_SIZE = 32  # `saturation_warps` counts warps of the GPU it was measured on, whatever the machine's are


def _rate_of(collective: Collective, lone_us: float, constants: CollectiveConstants) -> float:
    """Return the bytes per second on the wire of a collective by kernels that takes this time, beyond its latency."""
    moved = wire_bytes(collective.collective, by_kernels_bytes(collective), collective.group_size)
    return moved * US_PER_S / max(LEAST_US, lone_us - constants.latency_us_of(collective.num_bytes))


class CostModel:
    """The costs of operations on one machine, at a share of the clock at which lone times were taken. `is_captured`: copies
    are those of a captured graph, not of a running job.
    """

    def __init__(
        self, machine: Machine, calibration: Calibration, clock_share: float = 1.0, *, is_captured: bool = False
    ) -> None:
        self._clock_share, self._is_captured = clock_share, is_captured
        self._copy_fraction = (calibration.recorded_copy_fraction if is_captured else calibration.copy_engine_fraction).value
        self.machine = machine
        self._gpu = machine.gpu
        self._calibration = calibration
        self.hbm_bytes_per_s = machine.gpu.hbm_bytes_per_s * calibration.hbm_efficiency.value
        self.latency = MemoryLatency(
            at_low_load=calibration.latency_at_low_load.value, per_load=calibration.latency_per_load.value
        )
        self.l2 = L2Delivery(
            bytes_per_s=l2_bytes_per_s(machine, calibration),
            crowding=calibration.l2_crowding.value,
            latency_per_load=calibration.tile_latency_per_load.value,
        )
        self._blocks = BlockKernels(machine.gpu.num_sms, calibration.block_sum_us.value, self.hbm_bytes_per_s)
        self._works: dict[tuple[object, ...], SmWork] = {}
        self._own_loads_scale = own_loads_scale(calibration.device_name, machine)

    def lone_us(self, operation: Operation) -> float:
        """Return the time of the operation alone, as the step describes it, without any control."""
        if operation.lone_us is not None:
            return operation.lone_us
        if isinstance(operation, Kernel):
            work = self.kernel_work(operation)
            rounds = math.ceil(work.num_tiles / self._resident_ctas(operation)) if work.num_tiles else self._waves(operation)
            return rounds * work.cta_ps / PS_PER_US
        if isinstance(operation, Collective):
            return self._collective_us(operation, self.footprint(operation))
        return self._copy_us(operation)

    def footprint(self, operation: Kernel | Collective) -> Footprint:
        """Return the operation's footprint; for a collective without one, its library's usual one."""
        if isinstance(operation, Kernel) or operation.footprint is not None:
            assert operation.footprint is not None, "a kernel always has a footprint"
            return operation.footprint
        return communication_footprint(self._gpu, operation.library)

    def kernel_work(self, kernel: Kernel) -> SmWork:
        """Return the work of one CTA of a kernel, at the kernel's own residency."""
        return self._once(alike(kernel), lambda: self._kernel_work(kernel))

    def _once(self, key: tuple[object, ...], work: Callable[[], SmWork]) -> SmWork:
        """Return the work with this key, computed at its first use, since steps repeat."""
        if key not in self._works:
            self._works[key] = work()
        return self._works[key]

    def _kernel_work(self, kernel: Kernel) -> SmWork:
        constants = self._calibration.characters[kernel.character]
        per_sm, issue = self._ctas_per_sm(kernel), self._issue_per_cta(kernel)
        effective = self._effective_ctas(kernel)
        speed = 1 / slowdown(kernel, self.machine, self._calibration, self._clock_share)
        hbm = speed * self._hbm_per_cta(kernel, constants, effective)
        waits = constants.bottleneck != "issue" and kernel.cta_us is None
        longer = self.latency.slowdown(hbm * effective / self.hbm_bytes_per_s, 0.0) if waits else 1.0
        achieved = smooth_minimum(hbm * effective / longer, self.hbm_bytes_per_s)
        cta_us = max(self._cta_us(kernel, issue * per_sm, per_sm, achieved), LEAST_US)
        tiles = self._num_tiles(kernel, cta_us)
        if tiles:
            cta_us *= self._waves(kernel) / math.ceil(tiles / self._resident_ctas(kernel))
        return SmWork(
            cta_ps=cta_us * PS_PER_US / speed,
            issue_per_cta=issue,
            issue_reference=issue * per_sm,
            hbm_per_cta=hbm,
            hbm_reference=achieved / (hbm * effective) if hbm else 1.0,
            is_work_sharing=kernel.is_work_sharing and not tiles,
            num_tiles=tiles,
            cta_time_spread=kernel.cta_time_spread,
            waits_for_memory=waits,
            loads_l2=constants.bottleneck == "issue",
            has_tiles=kernel.cta_us is None and tile_of(kernel) is not None,
            clock_latency=tile_latency(kernel, self._calibration, self._clock_share),
            l2_reference=self._crowding(kernel, self._resident_ctas(kernel)),
        )

    def shared_work(self, kernel: Kernel) -> float:
        """Return the total work of a work-sharing kernel, in CTAs of its reference state; 0 for any other kernel."""
        return self._waves(kernel) * self._effective_ctas(kernel) if kernel.is_work_sharing else 0.0

    def _issue_per_cta(self, kernel: Kernel) -> float:
        """Return the share of an SM's throughput that one CTA can use at most; 0 if the SM does not limit the kernel."""
        constants = self._calibration.characters[kernel.character]
        if constants.bottleneck == "hbm" or kernel.cta_us is not None:
            return 0.0
        return 1 / self._saturating_ctas(constants, kernel)

    def _effective_ctas(self, kernel: Kernel) -> float:
        """Return the resident CTAs, each weighted by its speed: on SMs that hold one CTA less than the fullest, they run
        faster.
        """
        num_sms, issue = self._gpu.num_sms, self._issue_per_cta(kernel)
        resident = self._resident_ctas(kernel)
        fewer, num_fuller = divmod(resident, num_sms)
        if not num_fuller:
            return float(resident)
        faster = (1 + (issue * (fewer + 1)) ** SM_EXPONENT) / (1 + (issue * fewer) ** SM_EXPONENT)
        return float(num_fuller * (fewer + 1) + (num_sms - num_fuller) * fewer * faster ** (1 / SM_EXPONENT))

    def _ctas_per_sm(self, kernel: Kernel) -> int:
        """Return the CTAs of the kernel on an SM in its reference state: alone and uncapped."""
        return min(
            residency(self._gpu, kernel.footprint).ctas_per_sm, math.ceil(kernel.footprint.num_ctas / self._gpu.num_sms)
        )

    def _cta_us(self, kernel: Kernel, issue_reference: float, per_sm: int, hbm_achieved: float) -> float:
        """Return the time of one CTA in the reference state: as stated, from the lone time, or from the work."""
        if kernel.cta_us is not None:
            return kernel.cta_us * (1 + kernel.cta_time_spread / 2)
        if kernel.lone_us is not None:
            return kernel.lone_us / self._waves(kernel)
        # memory traffic that is usual for a character does not limit it; its warps do if memory is its bottleneck
        is_limited = self._calibration.characters[kernel.character].bottleneck == "hbm"  # by its bytes in flight
        memory_us = US_PER_S * (kernel.hbm_bytes or 0.0) / (hbm_achieved if is_limited else self.hbm_bytes_per_s)
        resident, total = self._resident(kernel), float(kernel.footprint.num_ctas)
        if kernel.is_work_sharing:
            total = self.shared_work(kernel)
        busy_us = self._busy_us(kernel, issue_reference, per_sm)
        return max(busy_us, memory_us, self._staged_us(kernel, memory_us)) * resident / total

    def _staged_us(self, kernel: Kernel, memory_us: float) -> float:
        """Return a library's matmul time if its stages are too few to load one beside multiplying another; 0 if unknown."""
        found = stages(kernel)
        if found is None:
            return 0.0
        number, steps = found
        multiplied_us = US_PER_S * (kernel.flops or 0.0) / reached_flops_per_s(kernel, self.machine, self._calibration)
        one_by_one_us = memory_us + multiplied_us * self._gpu.num_sms / self._resident_ctas(kernel)
        warps = self._calibration.characters["streaming"].saturation_warps * self._gpu.num_sms
        latency_us = US_PER_S * warps * CALIBRATION_WARP_SIZE * LOADED_BYTES / self.hbm_bytes_per_s
        rounds = math.ceil(self._num_tiles(kernel, one_by_one_us) / self._resident_ctas(kernel))
        return (one_by_one_us + rounds * steps * latency_us) / max(1, number - 1)

    def _hbm_fraction(self, constants: CharacterConstants) -> float:
        """Return the share of this machine's memory bandwidth that kernels of a character reach at most."""
        scale = self._own_loads_scale if constants.bottleneck == "latency" else 1.0
        return min(1.0, constants.hbm_fraction * scale)

    def _resident(self, kernel: Kernel) -> float:
        """Return the CTAs of the kernel on the GPU in its reference state; for a work-sharing one, weighted by their
        speed.
        """
        return self._effective_ctas(kernel) if kernel.is_work_sharing else self._resident_ctas(kernel)

    def _num_tiles(self, kernel: Kernel, cta_us: float) -> int:
        lone_us = cta_us * self._waves(kernel) if kernel.is_work_sharing else 0.0  # others have no such tiles
        usual_us = self._calibration.matmul_tile_us.value
        return num_tiles(kernel, self._resident_ctas(kernel), self._gpu.num_sms, lone_us, usual_us)

    def _resident_ctas(self, kernel: Kernel) -> int:
        return min(kernel.footprint.num_ctas, residency(self._gpu, kernel.footprint).ctas_per_sm * self._gpu.num_sms)

    def _busy_us(self, kernel: Kernel, issue_reference: float, per_sm: int) -> float:
        """Return the time that the SMs take for the kernel's work in its reference state: for what they compute, or for what
        L2 delivers to them.
        """
        used = self._resident(kernel) / (per_sm * self._gpu.num_sms)  # a kernel of few CTAs leaves SMs empty
        delivered_us = US_PER_S * (kernel.l2_bytes or 0.0) / self.l2.bytes_per_s / min(1.0, used * MOST_OF_L2)
        busy_us = max(self._computed_us(kernel) / used, delivered_us)
        busy_us *= self._crowding(kernel, self._resident_ctas(kernel)) or 1.0
        if kernel.is_work_sharing and per_sm == 1 and issue_reference:
            return busy_us / min(issue_reference, 1.0)  # a persistent kernel issues the loads of its next tile ahead
        return busy_us / (smooth_minimum(issue_reference, 1.0, SM_EXPONENT) if issue_reference else 1.0)

    def _computed_us(self, kernel: Kernel) -> float:
        """Return the time that all SMs would take for the kernel's operations, and for loads that it waits for."""
        computed_us = US_PER_S * (kernel.flops or 0.0) / reached_flops_per_s(kernel, self.machine, self._calibration)
        computed_us /= share_filled(kernel, self._resident_ctas(kernel), self._gpu.num_sms)
        constants, hbm_bytes = self._calibration.characters[kernel.character], kernel.hbm_bytes or 0.0
        if kernel.character == "attention":  # a CTA multiplies neither while its first tiles come nor while its last ones go
            return computed_us + US_PER_S * hbm_bytes / self.l2.bytes_per_s
        if constants.bottleneck != "latency":
            return computed_us
        return max(computed_us, US_PER_S * hbm_bytes / (self._hbm_fraction(constants) * self.hbm_bytes_per_s))

    def _hbm_per_cta(self, kernel: Kernel, constants: CharacterConstants, effective_ctas: float) -> float:
        """Return the bytes per second that one CTA can keep in flight."""
        if kernel.cta_us is not None:
            return (kernel.hbm_bytes or 0.0) / kernel.footprint.num_ctas * US_PER_S / kernel.cta_us
        if constants.bottleneck == "hbm":
            return self.hbm_bytes_per_s / self._gpu.num_sms / self._saturating_ctas(constants, kernel)
        fraction = self._hbm_fraction(constants)
        if kernel.hbm_bytes is not None and kernel.lone_us:
            fraction = min(1.0, kernel.hbm_bytes * US_PER_S / kernel.lone_us / self.hbm_bytes_per_s)
        elif kernel.hbm_bytes:
            # stated bytes count if they are fewer than usual for the character
            per_sm = self._ctas_per_sm(kernel)
            busy_us = self._busy_us(kernel, self._issue_per_cta(kernel) * per_sm, per_sm)
            fraction = min(fraction, kernel.hbm_bytes * US_PER_S / self.hbm_bytes_per_s / busy_us) if busy_us else fraction
        if constants.bottleneck == "latency":
            fraction *= 1 + self.latency.at_low_load * fraction  # share in flight at idle latency
        return fraction * self.hbm_bytes_per_s / effective_ctas

    def _waves(self, kernel: Kernel) -> float:
        """Return the time of the kernel alone in units of one CTA's reference time; CTAs of the last, partial wave run
        faster.
        """
        footprint = kernel.footprint
        slots = residency(self._gpu, footprint).ctas_per_sm * self._gpu.num_sms
        if kernel.is_work_sharing:
            return max(1.0, footprint.num_ctas / slots)
        full, rest = divmod(footprint.num_ctas, slots)
        if not rest or not full:
            return float(max(full, 1))
        if kernel.cta_us is not None:
            return float(full + 1)
        constants = self._calibration.characters[kernel.character]
        if constants.bottleneck == "hbm":
            saturating = self._saturating_ctas(constants, kernel) * self._gpu.num_sms
            usual, last = slots / saturating, rest / saturating
            slowdown, last_slowdown = self.latency.slowdown(usual, 0.0), self.latency.slowdown(last, 0.0)
            faster, usual, last = last_slowdown / slowdown, usual / slowdown, last / last_slowdown
            exponent = EXPONENT
        else:
            per_sm, exponent = math.ceil(rest / self._gpu.num_sms), SM_EXPONENT
            usual, last = (
                number / self._saturating_ctas(constants, kernel) for number in (slots / self._gpu.num_sms, per_sm)
            )
            crowding = self._crowding(kernel, slots)
            faster = self._crowding(kernel, rest) / crowding if crowding else 1.0
        return float(full + faster * ((1 + last**exponent) / (1 + usual**exponent)) ** (1 / exponent))

    def _crowding(self, kernel: Kernel, num_ctas: int) -> float:
        """Return how much longer a matmul that L2 limits takes because so many CTAs crowd L2; 0 for other kernels.

        If some SMs hold one CTA less, theirs end earlier. After that, the other CTAs have L2 to themselves.
        """
        if not is_l2_limited(kernel, self.machine, self._calibration):
            return 0.0
        num_sms, issue = self._gpu.num_sms, self._issue_per_cta(kernel)
        together = self.l2.slowdown(issue * num_ctas / num_sms)
        fewer, num_fuller = divmod(num_ctas, num_sms)
        if not fewer or not num_fuller:
            return together
        most = fewer + 1
        done: float = ((1 + (issue * fewer) ** SM_EXPONENT) / (1 + (issue * most) ** SM_EXPONENT)) ** (1 / SM_EXPONENT)
        return done * together + (1 - done) * self.l2.slowdown(issue * most * num_fuller / num_sms)

    def _saturating_ctas(self, constants: CharacterConstants, kernel: Kernel) -> float:
        """Return the CTAs per SM above which the bottleneck is saturated: by bytes in flight, registers or warps.

        A stage of tiles is loaded after one latency and the time that its own bytes take, and all stages but the one that is
        multiplied are under way. `saturation_bytes_in_flight` is what an SM takes in during one latency.
        """
        footprint, saturation_warps = kernel.footprint, constants.saturation_warps
        in_flight = constants.saturation_bytes_in_flight if footprint.shared_bytes >= LEAST_TILE_BYTES else None
        is_ordinary = kernel.element_type == "fp32" and self._gpu.fp32_matrix_flops_per_s is None
        if in_flight and is_ordinary and footprint.registers_per_thread >= LEAST_TILE_REGISTERS:
            saturation_warps = self._calibration.fp32_saturation_warps.value
        by_warps = saturation_warps / math.ceil(footprint.threads_per_cta / CALIBRATION_WARP_SIZE) / under_way(kernel.name)
        if constants.saturation_registers:
            by_warps = min(by_warps, constants.saturation_registers / footprint.registers_per_cta)
        if not in_flight:
            return by_warps
        number, stage_bytes = tile_stages(kernel)
        return min(by_warps, (in_flight / stage_bytes + 1) / max(1.0, number - 1))

    def collective_work(self, collective: Collective, planned: Footprint) -> SmWork:
        """Return the work of one CTA of a collective that runs with `planned.num_ctas` CTAs instead of its own number."""
        return self._once((planned, *alike(collective)), lambda: self._collective_work(collective, planned))

    def _collective_work(self, collective: Collective, planned: Footprint) -> SmWork:
        usual = self.footprint(collective)
        constants = self._constants_of(collective)
        link_limit, by_cta = self._link_limit(collective, constants), constants.bytes_per_s_per_cta
        if planned.num_ctas < usual.num_ctas:
            link_limit = self._limit_of_lone_time(collective, constants) or link_limit
            by_cta = constants.rate_of_few(bytes_to_a_peer(collective), planned.num_ctas)
        reference = smooth_minimum(usual.num_ctas * constants.bytes_per_s_per_cta, link_limit) / usual.num_ctas
        threads = planned.threads_per_cta / usual.threads_per_cta
        link_per_cta = by_cta * threads**self._calibration.bandwidth_per_threads.value
        alone = smooth_minimum(planned.num_ctas * link_per_cta, link_limit) / planned.num_ctas
        lone_us = collective.lone_us if collective.lone_us is not None else self._collective_us(collective, usual)
        waiting_us = min(constants.latency_us_of(collective.num_bytes), lone_us)
        # bytes are divided among the planned CTAs; latency and peers take as long for any number of CTAs
        moving_us = (lone_us - waiting_us) * usual.num_ctas / planned.num_ctas
        cta_us = moving_us + (waiting_us + collective.peer_wait_us) * alone / reference
        link = (self._clock_share * link_per_cta, link_limit)
        work = self._wire_work(cta_us, usual.num_ctas, reference, link, constants.latency_weight)
        least_l1 = self._calibration.least_l1_of(collective.collective, planned, usual, self._gpu)
        return msgspec.structs.replace(work, least_l1=least_l1)

    def light_work(self, collective: Collective, planned: Footprint) -> SmWork:
        """Return the work of one CTA of a light kernel that does a collective with `planned.num_ctas` CTAs."""
        constants = self._calibration.light_collectives[collective.collective].of_ranks(collective.group_size)
        link_limit = self._wire_bytes_per_s(collective) * constants.link_fraction
        rate = smooth_minimum(planned.num_ctas * constants.bytes_per_s_per_cta, link_limit) / planned.num_ctas
        moved = wire_bytes(collective.collective, by_kernels_bytes(collective), collective.group_size) / planned.num_ctas
        lone_us = constants.latency_us + collective.peer_wait_us + US_PER_S * moved / rate
        link = (self._clock_share * constants.bytes_per_s_per_cta, link_limit)
        return self._wire_work(lone_us, planned.num_ctas, rate, link, constants.latency_weight)

    def _wire_work(
        self, cta_us: float, num_ctas: int, reference: float, link: tuple[float, float], latency_weight: float
    ) -> SmWork:
        """Return the resources that one CTA of a collective uses; alone, each of `num_ctas` moves `reference` bytes per
        second.

        `link`: the bytes per second that one CTA can move at most, and that all CTAs can.
        """
        hbm = reference * self._calibration.hbm_bytes_per_wire_byte.value
        issue = self._calibration.communication_issue_share.value
        return SmWork(
            cta_ps=max(cta_us, LEAST_US) * PS_PER_US,
            issue_per_cta=issue,
            issue_reference=issue,
            hbm_per_cta=hbm,
            hbm_reference=smooth_minimum(hbm * num_ctas, self.hbm_bytes_per_s) / (hbm * num_ctas),
            link_per_cta=link[0],
            link_limit=link[1],
            link_reference=reference,
            latency_weight=latency_weight,
        )

    def copy_work(self, operation: Copy | Collective) -> CopyWork:
        """Return the work of a copy, or of a collective that copy engines move."""
        if isinstance(operation, Copy):
            lone_us = max(self.lone_us(operation), LEAST_US)
            rate = operation.num_bytes * US_PER_S / lone_us
            is_remote = operation.direction == "peer_to_peer"
            hbm = rate * (2 if operation.direction == "device_to_device" else 1)
            link = self.machine.link.bytes_per_s * self._copy_fraction
            return CopyWork(
                lone_ps=lone_us * PS_PER_US,
                hbm_demand=min(hbm, self.hbm_bytes_per_s),
                link_demand=min(rate, link) if is_remote else 0.0,
                link_limit=link,
            )
        rate = self._copy_bytes_per_s(operation)
        moved = wire_bytes(operation.collective, by_copies_bytes(operation), operation.group_size)
        lone_us = US_PER_S * moved / rate + self._calibration.copy_latency_us.value * max(1, operation.group_size - 1)
        return self._copies(lone_us, operation)

    def reducing_copies(self, collective: Collective) -> tuple[CopyWork, Kernel, CopyWork | None]:
        """Return the parts of a reducing collective by copies: the copies of blocks to their ranks, the sum of the own
        block, and for an all-reduce the copies of the sums back.
        """
        ranks = collective.group_size
        moved_us = US_PER_S * collective.num_bytes / ranks * (ranks - 1) / self._copy_bytes_per_s(collective)
        number = ranks - self._is_captured  # of latencies: in a job, one is for the flag that lets the copies begin
        copies = self._copies(self._calibration.copy_latency_us.value * number + moved_us, collective)
        total = self._blocks.total(collective, in_job=not self._is_captured)
        return copies, total, copies if collective.collective == "all_reduce" else None

    def own_copy(self, collective: Collective) -> Kernel:
        """Return the kernel that copies a rank's own part of an all-gather to its place."""
        return self._blocks.own_copy(collective)

    def all_copies(self, collective: Collective) -> CopyWork:
        """Return all copies of a collective that copy engines move, one after the other."""
        if collective.collective in SUMMED_COLLECTIVES:
            copies, _, back = self.reducing_copies(collective)
            return copies if back is None else msgspec.structs.replace(copies, lone_ps=copies.lone_ps + back.lone_ps)
        return self.copy_work(collective)

    def copied_us(self, collective: Collective) -> float:
        """Return the time of the collective's copies alone."""
        return self.all_copies(collective).lone_ps / PS_PER_US

    def summed_us(self, collective: Collective) -> float:
        """Return the time of the kernels beside these copies, alone: the sum of a reduction, or the copy of an all-gather's
        own part.
        """
        if collective.collective in SUMMED_COLLECTIVES:
            return self.lone_us(self._blocks.total(collective, in_job=not self._is_captured))
        return US_PER_S * 2 * collective.num_bytes / collective.group_size / self.hbm_bytes_per_s

    def _constants_of(self, collective: Collective) -> CollectiveConstants:
        """Return the constants of the collective's kind for its number of ranks."""
        return self._calibration.collectives[collective.collective].of_ranks(collective.group_size)

    def link(self, collective: Collective) -> Link:
        """Return the link that the collective uses. A collective with more ranks than a node has GPUs gets here only with
        its measured time.
        """
        network = self.machine.network
        return self.machine.link if network is None or collective.group_size <= self.machine.num_gpus else network

    def wire_us(self, collective: Collective) -> float:
        """Return how long a rank's bytes take at the full bandwidth of its link; no way to move them takes less."""
        moved = wire_bytes(collective.collective, by_copies_bytes(collective), collective.group_size)
        return US_PER_S * moved / self.link(collective).bytes_per_s

    def _wire_bytes_per_s(self, collective: Collective) -> float:
        """Return the bytes per second that each rank of a library's collective can send at most."""
        num_ranks = min(collective.group_size, max(2, self.machine.num_gpus))
        return collective_bytes_per_s(self.link(collective), collective.collective, num_ranks)

    def _link_limit(self, collective: Collective, constants: CollectiveConstants) -> float:
        """Return the link limit of the collective; over several nodes it is the measured rate, because no model exists."""
        stated = self._wire_bytes_per_s(collective) * constants.link_fraction
        if collective.lone_us is None or not leaves_node(collective, self.machine):
            return stated
        return min(_rate_of(collective, collective.lone_us, constants), self.machine.link.bytes_per_s) or stated

    def _limit_of_lone_time(self, collective: Collective, constants: CollectiveConstants) -> float | None:
        """Return the link limit with which a collective takes its lone time; None if it has none, or its CTAs explain it.

        A collective that took longer than its bytes was held up by the link or by other ranks. Fewer CTAs do not multiply
        that time, so it must not count as time of its CTAs.
        """
        if collective.lone_us is None or leaves_node(collective, self.machine):
            return None
        rate = _rate_of(collective, collective.lone_us, constants)
        by_ctas = self.footprint(collective).num_ctas * constants.bytes_per_s_per_cta
        if not 0 < rate < MOST_OF_CTAS * by_ctas:
            return None
        limit = float((rate**-EXPONENT - by_ctas**-EXPONENT) ** (-1 / EXPONENT))
        return min(limit, self._wire_bytes_per_s(collective))

    def _copies(self, lone_us: float, collective: Collective) -> CopyWork:
        """Return the copies of a rank to its peers, one after the other; another collective's copies may use the rest of
        its links.
        """
        rate, limit = self._copy_bytes_per_s(collective), self._wire_bytes_per_s(collective)
        most = max(rate, limit * self._copy_fraction)
        return CopyWork(lone_ps=lone_us * PS_PER_US, hbm_demand=2 * rate, link_demand=rate, link_limit=most)

    def _copy_bytes_per_s(self, collective: Collective) -> float:
        """Return the bytes per second that copy engines reach if a rank copies to its peers one after the other."""
        num_ranks = min(collective.group_size, max(2, self.machine.num_gpus))
        return copies_bytes_per_s(self.link(collective), num_ranks) * self._copy_fraction

    def _collective_us(self, collective: Collective, footprint: Footprint) -> float:
        constants = self._constants_of(collective)
        limit = self._wire_bytes_per_s(collective) * constants.link_fraction
        rate = smooth_minimum(footprint.num_ctas * constants.bytes_per_s_per_cta, limit)
        moved = wire_bytes(collective.collective, by_kernels_bytes(collective), collective.group_size)
        return constants.latency_us_of(collective.num_bytes) + US_PER_S * moved / rate

    def _copy_us(self, copy: Copy) -> float:
        rates = {
            "device_to_device": self.hbm_bytes_per_s / 2,
            "set": self.hbm_bytes_per_s,
            "peer_to_peer": self.machine.link.per_peer_bytes_per_s * self._copy_fraction,
            "host_to_device": self._calibration.host_link_bytes_per_s.value,
            "device_to_host": self._calibration.host_link_bytes_per_s.value,
        }
        latency_us = MEMSET_US if copy.direction == "set" else self._calibration.copy_latency_us.value
        return latency_us + US_PER_S * copy.num_bytes / rates[copy.direction]
