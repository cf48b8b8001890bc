"""The task graph that the engine runs: the tasks of a step under a plan, and their dependencies.

Most operations are one task. A reduction by copies is up to three: copies of blocks to their ranks, a sum that waits for
SMs, and for an all-reduce copies of the sums back. A gather in place is two: copies, and a kernel for the own part. A
collective that runs together with its matmul is two copies: the part hidden beside the matmul, and the exposed part, which
comes first if the matmul needs the data, and last if it produces them. An operation that an operator or copies in place make
unnecessary takes no time.
"""

from collections.abc import Sequence

import msgspec

from counterpoint.controls import ALL_REDUCES_IN_FLIGHT
from counterpoint.errors import StepError, shown
from counterpoint.machine import Gpu, Machine
from counterpoint.occupancy import residency
from counterpoint.sim.calibration import Calibration
from counterpoint.sim.costs import LEAST_US, SUMMED_COLLECTIVES, CostModel
from counterpoint.sim.effects import Effect, Overlap
from counterpoint.sim.engine import Launch
from counterpoint.sim.task import CopyTask, CopyWork, SmTask, SmWork, Task
from counterpoint.step import Collective, Copy, Footprint, Kernel, Operation, Step, is_fill, predecessors
from counterpoint.units import PS_PER_US, us_to_ps

PLACED_COLLECTIVES = ("all_gather", "all_to_all")  # a rank keeps a part of its own, which has another place
MOST_WITHOUT_REQUEST = 48 << 10  # bytes of dynamic shared memory that a CTA may have without asking the driver
INDUCTOR = "triton_"  # how names of its Triton kernels begin
START = -1  # instead of an operation: an operation without dependencies waits for the start of the step


class TaskGraph:
    """Tasks with their launches, and the first and the last task of each operation."""

    def __init__(self, step: Step, effects: Sequence[Effect], costs: CostModel, calibration: Calibration) -> None:
        self._step, self._effects, self._machine = step, effects, costs.machine
        self._costs = costs
        gap_us = step.launch_gap_us if step.launch_gap_us is not None else calibration.launch_gap_us.value
        self._gap_ps = us_to_ps(gap_us)
        self._launch_ps = us_to_ps(calibration.collective_launch_us.value)
        # what follows on the same stream is never later than what waits for its event on another one
        self._latency_ps = max(self._gap_ps, us_to_ps(calibration.dependency_latency_us.value))
        self._flag_ps = us_to_ps(calibration.flag_latency_us.value)
        self.tasks: list[Task] = []
        self.launches: list[Launch] = []
        self.first: list[int] = []
        self.last: list[int] = []
        self._awaited: list[int] = []  # by operation, the task that its followers wait for
        self._on_stream: dict[int, list[int]] = {}
        self._on_own_stream: dict[str | None, int] = {}  # by process group, the latest collective on its separate stream
        self._held_up: dict[int, list[int]] = {}  # by operation, further tasks that it waits for
        self._racing = racing_collectives(step, effects)
        self._streams_of_kernels = {each.stream for each in step.operations if isinstance(each, Kernel)}
        self._is_captured = step.is_timed_in_bursts
        for index, operation in enumerate(step.operations):
            self._add(index, operation)

    def spans(self, of_tasks: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return start and end of every operation from those of its tasks."""
        parts = (of_tasks[first : last + 1] for first, last in zip(self.first, self.last, strict=True))
        return [(min(start for start, _ in each), max(end for _, end in each)) for each in parts]

    def _add(self, index: int, operation: Operation) -> None:
        effect = self._effects[index]
        launch = self._launch(index, operation)
        self.first.append(len(self.tasks))
        if effect.is_saved:
            self._append(CopyTask(len(self.tasks), CopyWork(lone_ps=LEAST_US * PS_PER_US)), launch)
        elif isinstance(operation, Collective) and effect.overlap is not None:
            self._add_overlapped(operation, effect.overlap, launch)
        elif isinstance(operation, Collective) and is_summed(operation, effect):
            self._add_summed(index, operation, self._after_peers(operation, launch))
        elif isinstance(operation, Collective) and effect.uses_copy_engine:
            self._add_copied(index, operation, self._after_peers(operation, launch))
        else:
            self._append(self._task(index, operation), launch)
        self.last.append(len(self.tasks) - 1)
        if len(self._awaited) == index:
            self._awaited.append(self.last[index])
        if effect.has_own_stream and isinstance(operation, Collective):
            self._on_own_stream[operation.process_group] = index
        elif not (effect.is_saved and not operation.waits_for):
            self._on_stream.setdefault(operation.stream, []).append(index)

    def _launch(self, index: int, operation: Operation) -> Launch:
        waits = {self._awaited[dependency.operation]: self._latency_ps for dependency in operation.waits_for}
        for task in self._held_up.get(index, ()):
            waits[task] = self._latency_ps
        for earlier in self._before_on_stream(index, operation):
            waits[self._awaited[earlier]] = self._gap_ps_after(earlier, operation)
        if self._effects[index].has_own_stream and isinstance(operation, Collective):
            before = self._on_own_stream.get(operation.process_group)
            waits |= {} if before is None else {self._awaited[before]: self._gap_ps_after(before, operation)}
        began_first = isinstance(operation, Collective) and operation.begins_first
        late_ps = self._launch_ps if index in self._racing and not began_first else 0
        waits = {task: delay_ps + late_ps for task, delay_ps in waits.items()}
        issued_ps = us_to_ps(max(0.0, (operation.issued_us or 0.0) - self._effects[index].issued_sooner_us))
        if operation.issued_after is not None:
            task = self.last[operation.issued_after]
            waits[task] = max(waits.get(task, 0), issued_ps)
        return Launch(
            waits_for=tuple(sorted(waits.items())),
            earliest_ps=late_ps if operation.issued_after is not None else max(late_ps, issued_ps),
            hold_ps=us_to_ps(self._effects[index].hold_us),
        )

    def _gap_ps_after(self, earlier: int, operation: Operation) -> int:
        """Return the time from the end of an operation to the start of the next one on its stream.

        In a job, libraries of collectives wait for events of other streams between two kernels of their own stream: in
        traces a collective follows another one there after 3 to 5 us, and a kernel another one after 1.5 to 2.
        """
        is_of_job = self._step.device_name is not None and not self._is_captured
        are_collectives = isinstance(operation, Collective) and isinstance(self._step.operations[earlier], Collective)
        is_own = operation.stream not in self._streams_of_kernels
        return max(self._gap_ps, self._latency_ps) if is_of_job and are_collectives and is_own else self._gap_ps

    def _before_on_stream(self, index: int, operation: Operation) -> list[int]:
        """Return what the operation follows on its stream; several all-reduces by copies may be in flight at once."""
        line = self._on_stream.get(operation.stream, [])
        in_flight: list[int] = []
        for earlier in reversed(line[-ALL_REDUCES_IN_FLIGHT:]):
            if not self._is_on_lanes(earlier):
                break
            in_flight.append(earlier)
        if not self._is_on_lanes(index):
            return in_flight or line[-1:]
        if len(in_flight) == ALL_REDUCES_IN_FLIGHT:
            return in_flight[-1:]
        others = line[: len(line) - len(in_flight)]
        return others[-1:]

    def _is_on_lanes(self, index: int) -> bool:
        operation, effect = self._step.operations[index], self._effects[index]
        is_reduced = isinstance(operation, Collective) and operation.collective == "all_reduce"
        return is_reduced and effect.uses_copy_engine and effect.overlap is None

    def _after_peers(self, collective: Collective, launch: Launch) -> Launch:
        """Let copies wait for the other ranks, too, before they start; a kernel's wait is part of its CTAs' time."""
        if not collective.peer_wait_us:
            return launch
        self._append(CopyTask(len(self.tasks), CopyWork(lone_ps=collective.peer_wait_us * PS_PER_US)), launch)
        return self._after((len(self.tasks) - 1, self._flag_ps))

    def _add_copied(self, index: int, collective: Collective, launch: Launch) -> None:
        """Add copies. Those of a captured graph wait for a flag and raise another, and a kernel moves a rank's own part
        beside them.
        """
        copies = len(self.tasks)
        self._append(self._task(index, collective), self._late(launch))
        if self._effects[index].is_in_place:
            self._append(self._own_copy(index, collective), self._after((copies, self._flag_ps)))
        elif self._is_captured:
            ends = [(copies, self._flag_ps)]
            if collective.collective in PLACED_COLLECTIVES:
                self._append(self._own_copy(index, collective), launch)
                ends.append((copies + 1, 0))
            self._add_end(self._after(*ends))

    def _late(self, launch: Launch) -> Launch:
        """Return the launch of copies. Those of a captured graph also wait for a flag, which the peers raise when they get
        there.
        """
        if not self._is_captured:
            return launch
        waits = tuple((task, delay_ps + self._flag_ps) for task, delay_ps in launch.waits_for)
        return msgspec.structs.replace(launch, waits_for=waits, earliest_ps=launch.earliest_ps + self._flag_ps)

    def _add_end(self, launch: Launch) -> None:
        self._append(CopyTask(len(self.tasks), CopyWork(lone_ps=LEAST_US * PS_PER_US)), launch)

    def _own_copy(self, index: int, collective: Collective) -> SmTask:
        own = self._costs.own_copy(collective)
        return self._sm_task(index, own, own.footprint, self._lane_priority())

    def _add_summed(self, index: int, collective: Collective, launch: Launch) -> None:
        """Add copies out, the sum, and copies back; the sum's stream has the greatest priority, as a lane's has."""
        effect = self._effects[index]
        sent = msgspec.structs.replace(collective, num_bytes=round(collective.num_bytes * effect.sent_share))
        out, total, back = self._costs.reducing_copies(sent)
        task = len(self.tasks)
        self._append(CopyTask(task, out), self._late(launch))
        self._append(self._sm_task(index, total, total.footprint, self._lane_priority()), self._after((task, self._flag_ps)))
        if back is not None:
            delay_ps = self._latency_ps if self._is_captured else self._flag_ps
            self._append(CopyTask(task + 2, back), self._after((task + 1, delay_ps)))
            if self._is_captured:
                self._add_end(self._after((task + 2, self._flag_ps)))

    def _lane_priority(self) -> int:
        gpu = self._machine.gpu
        return gpu.greatest_priority if gpu.priority_is_effective else 0

    def _add_overlapped(self, collective: Collective, overlap: Overlap, launch: Launch) -> None:
        """Add two copies: exposed, then hidden, if a matmul needs the data; in reverse order if a matmul produces them."""
        whole = self._costs.all_copies(collective)
        exposed_ps = (overlap.exposed_us + collective.peer_wait_us) * PS_PER_US
        exposed = CopyWork(lone_ps=exposed_ps)
        hidden = whole.less(exposed_ps)
        task = len(self.tasks)
        if overlap.is_fed:
            begun = self.launches[self.first[overlap.pair.matmuls[0]]]
            self._append(CopyTask(task, hidden), begun)
            waits = dict(launch.waits_for) | {task: 0}
            self._append(
                CopyTask(task + 1, exposed), Launch(waits_for=tuple(sorted(waits.items())), earliest_ps=launch.earliest_ps)
            )
            return
        self._append(CopyTask(task, exposed), launch)
        self._append(CopyTask(task + 1, hidden), Launch(waits_for=((task, 0),)))
        self._awaited.append(task)
        if overlap.pair.follower is not None:
            self._held_up.setdefault(overlap.pair.follower, []).append(task + 1)

    @staticmethod
    def _after(*waits: tuple[int, int]) -> Launch:
        return Launch(waits_for=waits)

    def _append(self, task: Task, launch: Launch) -> None:
        self.tasks.append(task)
        self.launches.append(launch)

    def _task(self, index: int, operation: Operation) -> Task:
        effect = self._effects[index]
        if isinstance(operation, Copy) or effect.uses_copy_engine:
            assert not isinstance(operation, Kernel), "only collectives change their transport"
            return CopyTask(len(self.tasks), self._costs.copy_work(operation))
        assert effect.footprint is not None, "every kernel and collective has a footprint"
        priority = effect.priority if self._machine.gpu.priority_is_effective else 0
        if isinstance(operation, Collective) and effect.uses_light_kernel:
            return self._placed(effect.footprint, priority, self._costs.light_work(operation, effect.footprint))
        return self._sm_task(index, operation, effect.footprint, priority)

    def _sm_task(self, index: int, operation: Kernel | Collective, footprint: Footprint, priority: int) -> SmTask:
        check_fit(index, operation, footprint, self._machine)
        if isinstance(operation, Kernel):
            work, shared_work = self._costs.kernel_work(operation), self._costs.shared_work(operation)
        else:
            work, shared_work = self._costs.collective_work(operation, footprint), 0.0
        task = self._placed(footprint, priority, work, shared_work)
        if isinstance(operation, Kernel):
            task.carveout_bytes = carveout_bytes(self._machine.gpu, operation, footprint)
        return task

    def _placed(self, footprint: Footprint, priority: int, work: SmWork, shared_work: float = 0.0) -> SmTask:
        return SmTask(
            index=len(self.tasks),
            footprint=footprint,
            priority=priority,
            work=work,
            carveout_bytes=residency(self._machine.gpu, footprint).carveout_bytes,
            num_unplaced=footprint.num_ctas,
            shared_work=shared_work,
            tiles_left=work.num_tiles,
        )


def carveout_bytes(gpu: Gpu, kernel: Kernel, footprint: Footprint | None = None) -> int:
    """Return the shared memory to which an empty SM is configured for a kernel with a footprint, by default its own.

    Matmuls that state no carveout get the largest: Triton asks for it above 48 KiB of shared memory, and collectives beside
    cuBLAS's are as slow. Inductor's other kernels get it, too, such as flex attention (read in Triton's driver.c, not
    measured). The driver gives other kernels the smallest that allows the most CTAs.
    """
    launched = kernel.footprint if footprint is None else footprint
    may_ask = kernel.character == "matmul" or kernel.name.startswith(INDUCTOR)
    if launched.carveout_percent == -1 and may_ask and kernel.footprint.dynamic_shared_bytes > MOST_WITHOUT_REQUEST:
        return gpu.shared_bytes_per_sm
    return residency(gpu, launched).carveout_bytes


def check_fit(index: int, operation: Kernel | Collective, footprint: Footprint, machine: Machine) -> None:
    """Raise `StepError` if not one CTA of the launch fits the machine, or if it does not consist of whole clusters."""
    fit = residency(machine.gpu, footprint)
    if fit.ctas_per_sm < 1 or footprint.ctas_per_cluster > fit.ctas_per_sm * max(machine.gpu.sms_per_gpc):
        raise StepError(
            f"Operation {index} ('{shown(operation.name)}') does not fit {machine.name}: not one CTA of "
            f"{footprint.threads_per_cta} threads x {footprint.registers_per_thread} registers with "
            f"{footprint.shared_bytes} bytes of shared memory fits, limited by {fit.limiter}. Check the footprint, or "
            "name the machine it was made for."
        )
    if footprint.num_ctas % footprint.ctas_per_cluster:
        raise StepError(
            f"Operation {index} ('{shown(operation.name)}') launches {footprint.num_ctas} CTAs in clusters of "
            f"{footprint.ctas_per_cluster}, but a launch consists of whole clusters. Correct num_ctas or "
            "ctas_per_cluster."
        )


def is_summed(collective: Collective, effect: Effect) -> bool:
    """Return whether copies and a sum do the collective."""
    return effect.uses_copy_engine and collective.collective in SUMMED_COLLECTIVES


def racing_collectives(step: Step, effects: Sequence[Effect]) -> frozenset[int]:
    """Return the library's collectives on SMs that wait for the same operation as a kernel, or as the fill before one.

    Such a kernel is placed first, unless a trace shows otherwise (`traced_waits.py`): a collective's launch, in clusters and
    with large arguments, takes longer. The first operations of a captured graph start in its order, and those of a described
    step are assumed to run already.
    """
    awaited = predecessors(step, START)
    of_kernels: set[int] = set()
    for operation, waits in zip(step.operations, awaited, strict=True):
        if isinstance(operation, Kernel) or is_fill(operation):
            of_kernels |= waits
    if step.device_name is None or step.is_timed_in_bursts:
        of_kernels.discard(START)
    return frozenset(
        index
        for index, (operation, effect) in enumerate(zip(step.operations, effects, strict=True))
        if isinstance(operation, Collective) and _is_usual(effect) and awaited[index] & of_kernels
    )


def _is_usual(effect: Effect) -> bool:
    return not (effect.uses_copy_engine or effect.uses_light_kernel or effect.overlap is not None)
