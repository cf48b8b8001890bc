"""Proposes other ways to move a collective's data: by copy engines, beside its matmul, or on a separate stream.

Each way is proposed for the collectives that allow it, and refused with the reason for the others. Later proposals leave
alone what an earlier one moves. The limits are those of the code that applies them: sizes below which the integrations
leave a collective to the library, and the schedules that operators have.
"""

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from counterpoint.controls import COPIES_TAKE_NO_SIZES, LEAST_PART_BYTES, OverlapMatmul, OwnStream, Transport
from counterpoint.machine import Machine
from counterpoint.plan import LEAVE_IT, Match, Plan, Refusal
from counterpoint.planner.proposal import ALL_COLLECTIVES, Candidate, Proposal, one, proposal, refusal
from counterpoint.sim import Simulator
from counterpoint.sim.calibration import load_calibration
from counterpoint.sim.costs import SUMMED_COLLECTIVES, CostModel
from counterpoint.sim.effects import COPY_ENGINE_COLLECTIVES
from counterpoint.sim.expert_layers import ExpertModel
from counterpoint.sim.flat_buffers import FlatBuffers
from counterpoint.sim.matmul_pairs import OPERATOR_OF, MatmulPairs
from counterpoint.sim.nodes import obstacle_to_copies
from counterpoint.sim.overlapped import OverlapModel
from counterpoint.step import Collective, Kernel, Step
from counterpoint.traces.classify import classify_kernel
from counterpoint.units import MIB, format_bytes, format_count, format_us

LEAST_COPIED_BYTES = 16 * MIB  # bytes that one rank sends to another; reported by users of copy engines, not measured here
MOST_TIMES_LONGER = 2.5
"""A traced collective that takes longer than this many times what its bytes need has waited. In the traces of 2 to 8 GPUs
those of 4 MiB or more take 0.7 to 1.7 times as long, and 3.4 to 33 times where one rank is late in every step."""
ALONE = "its group has one rank, so it sends nothing to another GPU"
ONLY_WAITS = "it only waits for other ranks or signals them, as part of an operator"


def propose_transports(step: Step, machine: Machine, plan: Plan = LEAVE_IT) -> Proposal:
    """Propose copy engines for collectives that only move data, for those that reduce, and for both; say why not for the
    others.
    """
    moving: list[int] = []
    reducing: list[int] = []
    refusals: dict[str, Refusal] = {}
    buffers = FlatBuffers(step)
    costs = CostModel(machine, load_calibration(machine))
    for index, operation in _collectives(step, plan, OverlapMatmul):
        if operation.transport == "copy_engine":
            continue
        # DDP's small buckets are joined
        joined_bytes = buffers.bucket_bytes if operation.collective == "all_reduce" and index in buffers.copies_of else 0
        obstacle = (
            obstacle_to_copies(operation, step.num_ranks, machine)
            or _obstacle_to_copying(operation, joined_bytes)
            or _obstacle_of_waiting(step, operation, costs)
        )
        if obstacle is None:
            (reducing if operation.collective in SUMMED_COLLECTIVES else moving).append(index)
        else:
            refusals[obstacle] = Refusal(control="transport", target=operation.collective, reason=obstacle)
    return proposal(_transports(step, buffers, moving, reducing), refusals.values())


def _transports(step: Step, buffers: FlatBuffers, moving: Sequence[int], reducing: Sequence[int]) -> Iterator[Candidate]:
    control = (Transport(transport="copy_engine"),)
    if moving:
        subject = "it only moves" if len(moving) == 1 else "they only move"
        reason = f"{subject} data, and copy engines do that without taking SMs{_saved(step, buffers, moving)}"
        match = Match(kind="communication", operations=tuple(moving))
        by_engines = one("transport", "copy engines", match, control, reason)
        yield by_engines
    if reducing:
        reason = "copy engines move the blocks and each rank sums what it received: only the sum takes SMs"
        reason += _saved(step, buffers, reducing)
        match = Match(kind="communication", operations=tuple(reducing))
        by_sums = one("transport", "copies and sums", match, control, reason)
        yield by_sums
    if moving and reducing:
        yield Candidate(
            family="transport",
            label="copy engines, reductions too",
            directives=(*by_engines.directives, *by_sums.directives),
        )


def _saved(step: Step, buffers: FlatBuffers, moved: Sequence[int]) -> str:
    """Say how long the kernels take that are not needed any more if these collectives are moved in place."""
    copies = [copy for number in moved for copy in buffers.copies_of.get(number, ())]
    saved_us = sum(step.operations[number].lone_us or 0.0 for number in copies)
    return f"; copies into and out of flat buffers ({format_us(saved_us)} now) become unnecessary" if saved_us else ""


def _collectives(step: Step, plan: Plan, *taken_by: type) -> Iterator[tuple[int, Collective]]:
    """Yield the collectives, with their numbers, to which no control of these kinds applies."""
    for index, (operation, controls) in enumerate(zip(step.operations, plan.controls_of(step), strict=True)):
        if isinstance(operation, Collective) and not any(isinstance(control, taken_by) for control in controls):
            yield index, operation


def obstacle_to_moving(collective: Collective) -> str | None:
    """Return why nothing is gained wherever the collective runs, or None. Barriers and signals are told by their names."""
    if collective.group_size < 2:
        return ALONE
    return ONLY_WAITS if not collective.num_bytes and classify_kernel(collective.name).is_waiting else None


def _obstacle_to_copying(collective: Collective, joined_bytes: int) -> str | None:
    """Return why copy engines should not move the collective, or None; `joined_bytes` may be moved together with it."""
    is_summed = collective.collective in SUMMED_COLLECTIVES
    if not is_summed and collective.collective not in COPY_ENGINE_COLLECTIVES:
        return "it reduces to one rank; no integration does that by copies"
    if obstacle := obstacle_to_moving(collective):
        return obstacle
    if collective.gives_sizes:
        return COPIES_TAKE_NO_SIZES
    if not collective.num_bytes:
        return "its size is unknown, and so is the time that copy engines would take"
    if is_summed:
        if max(collective.num_bytes, joined_bytes) < collective.group_size * LEAST_PART_BYTES:
            least = format_bytes(LEAST_PART_BYTES)
            return f"it sums less than {least} from each rank; the integrations leave that to the library"
        return None
    pieces = collective.group_size if collective.collective in ("all_gather", "all_to_all") else 1
    if collective.num_bytes < pieces * LEAST_COPIED_BYTES:
        return f"it moves less than {format_bytes(LEAST_COPIED_BYTES)} to a rank; NCCL is faster for so little"
    return None


def _obstacle_of_waiting(step: Step, collective: Collective, costs: CostModel) -> str | None:
    """Return why the time of a traced collective says nothing of moving its bytes, or None.

    A trace of one rank does not tell a transfer from the wait for a rank that is late in every step.
    """
    lone_us = collective.lone_us
    if step.device_name is None or lone_us is None or collective.num_bytes < collective.group_size * LEAST_PART_BYTES:
        return None
    needed_us = costs.lone_us(replace(collective, lone_us=None, peer_wait_us=0.0))
    if lone_us <= MOST_TIMES_LONGER * needed_us:
        return None
    return (
        f"it takes far longer than its bytes need: {format_us(lone_us)} instead of {format_us(needed_us)}, so it waits for "
        "a rank that is late in every step, or the links are slower than described; analyze the traces of all ranks"
    )


def propose_overlaps(step: Step, machine: Machine, plan: Plan = LEAVE_IT) -> Proposal:
    """Propose to overlap each collective with the matmul that needs or feeds it, if a copy schedule promises enough, and
    experts' all-to-alls with the matmuls between them.
    """
    able = list(_collectives(step, plan, OwnStream))  # an operator takes a collective that copies would move as well
    calibration = load_calibration(machine)
    experts = ExpertModel(step, CostModel(machine, calibration), calibration)
    of_experts = [
        (index, each) for index, each in able if index in experts.layers.layer_of or index in experts.layers.others
    ]
    taken = {index for index, _ in of_experts}
    pairs = _propose_pairs(step, machine, [(index, each) for index, each in able if index not in taken])
    layers = _propose_experts(step, machine, experts, of_experts)
    candidates = [*pairs.candidates, *layers.candidates]
    if len(candidates) > 1:
        label = " and ".join(each.label for each in candidates)
        directives = tuple(directive for each in candidates for directive in each.directives)
        candidates.append(Candidate(family="overlap_matmul", label=label, directives=directives))
    return proposal(candidates, [*pairs.refusals, *layers.refusals])


def _propose_experts(
    step: Step, machine: Machine, experts: ExpertModel, collectives: Sequence[tuple[int, Collective]]
) -> Proposal:
    """Propose the all-to-alls of all expert layers that are large enough, and those that tell the sizes."""
    able: list[int] = []
    refusals: dict[str, Refusal] = {}
    for index, operation in collectives:
        if index in experts.layers.others:
            continue
        obstacle = obstacle_to_copies(operation, step.num_ranks, machine)
        found = experts.estimate(index) if obstacle is None else obstacle
        if isinstance(found, str):
            reason = found.split(":")[0]
            refusals.setdefault(reason, Refusal(control="overlap_matmul", target="experts' all_to_all", reason=found))
        else:
            able.append(index)
    whole = [layer for layer in experts.layers.found if {layer.dispatch, layer.combine} <= set(able)]
    if not whole:
        return proposal(refusals=refusals.values())
    numbers = sorted({number for layer in whole for number in (layer.dispatch, layer.combine, *layer.others)})
    saved_us = sum(step.operations[number].lone_us or 0.0 for layer in whole for number in layer.reorders)
    reason = (
        "experts' matmuls wait while rows arrive, and later kernels wait while rows return; in groups of "
        "experts, one group's rows travel while others compute, as ops.expert_ffn does "
        f"({format_count(len(whole), 'pass', 'passes')} of layers)"
    )
    if saved_us:
        reason += f"; rows then need no reordering, which takes {format_us(saved_us)} now"
    if max(each.group_size for _, each in collectives) > 2:
        reason += " (the size above which copies win was measured with 2 ranks only)"
    match = Match(kind="communication", operations=tuple(numbers))
    label = "experts overlapped with their all-to-alls"
    return proposal([one("overlap_matmul", label, match, (OverlapMatmul(),), reason)], refusals.values())


def _propose_pairs(step: Step, machine: Machine, collectives: Sequence[tuple[int, Collective]]) -> Proposal:
    """Propose to overlap each of these collectives with the matmul that needs or feeds it."""
    pairs = MatmulPairs(step)
    model = OverlapModel(step, machine, load_calibration(machine))
    costs = CostModel(machine, load_calibration(machine))
    able: list[int] = []
    matmuls: list[Kernel] = []
    refusals: dict[tuple[str, str], Refusal] = {}
    for index, operation in collectives:
        obstacle = (
            obstacle_to_copies(operation, step.num_ranks, machine)
            or pairs.obstacles.get(index)
            or _obstacle_of_waiting(step, operation, costs)
        )
        if obstacle is None and index in pairs.found:
            found = model.estimate(pairs.found[index])
            obstacle = found if isinstance(found, str) else None
        if obstacle is None:
            able.append(index)
            matmuls.extend(step.kernel(number) for number in pairs.found[index].matmuls)
        else:
            key = operation.collective, obstacle.split(":")[0]  # refusals that differ only in their times are merged
            refusals.setdefault(key, Refusal(control="overlap_matmul", target=operation.collective, reason=obstacle))
    if not able:
        return proposal(refusals=refusals.values())
    match = Match(kind="communication", operations=tuple(able))
    operators = sorted({OPERATOR_OF[each.collective] for index, each in collectives if index in able})
    reason = (
        "its matmul does not run while it moves data; cut into pieces, its copies run beside the matmul, as "
        f"operators do: {', '.join(operators)}"
    )
    if all(each.matmul_sizes is None for each in matmuls):
        reason += " (the matmuls' sizes are inferred from times; record shapes to have them)"
    return proposal([one("overlap_matmul", "overlap with matmuls", match, (OverlapMatmul(),), reason)], refusals.values())


def propose_own_streams(step: Step, machine: Machine, plan: Plan = LEAVE_IT) -> Proposal:
    """Propose a separate stream for each collective on a computation's stream, if the step says what needs its result."""
    busy = _streams_that_compute(step, machine)
    on_busy = [(index, each) for index, each in _collectives(step, plan, OverlapMatmul) if each.stream in busy]
    inside = [(index, each) for index, each in on_busy if obstacle_to_moving(each) is None]
    if not inside:
        obstacles = [obstacle for _, each in on_busy if (obstacle := obstacle_to_moving(each))]
        return refusal("own_stream", ALL_COLLECTIVES, (*obstacles, "no collective runs on a computation stream")[0])
    if step.device_name is not None:
        times_us = Simulator().lone_times_us(step, machine)
        most = format_us(sum(times_us[index] for index, _ in inside))
        return refusal(
            "own_stream",
            f"{format_count(len(inside), 'collective')} on the computation's stream",
            "a trace or a captured step gives the order on a stream, not which kernel needs the result; if the "
            f"kernels after it do not, issue it with async_op=True and wait() for it later, which hides {most} "
            "at most",
        )
    waited_for = {dependency.operation for operation in step.operations for dependency in operation.waits_for}
    needed = tuple(index for index, _ in inside if index in waited_for)
    if not needed:
        return refusal(
            "own_stream",
            f"{format_count(len(inside), 'collective')} on the computation's stream",
            "the step does not say what needs the result; name the collective in the waits_for of what does",
        )
    reason = "later kernels on its stream do not need its result; on a separate stream it runs beside them"
    match = Match(kind="communication", operations=needed)
    return proposal([one("own_stream", "a separate stream", match, (OwnStream(),), reason)])


def _streams_that_compute(step: Step, machine: Machine) -> set[int]:
    """Return the streams with kernels; in a traced step, where libraries also launch small kernels beside their collectives,
    those whose kernels take longer than their collectives.
    """
    if step.device_name is None:
        return {operation.stream for operation in step.operations if isinstance(operation, Kernel)}
    times_us: dict[int, float] = {}
    for operation, time_us in zip(step.operations, Simulator().lone_times_us(step, machine), strict=True):
        sign = 1 if isinstance(operation, Kernel) else -1 if isinstance(operation, Collective) else 0
        times_us[operation.stream] = times_us.get(operation.stream, 0.0) + sign * time_us
    return {stream for stream, time_us in times_us.items() if time_us > 0}
