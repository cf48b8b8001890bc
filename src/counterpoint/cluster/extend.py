"""Extends a step of few ranks to many: which groups grow, how long their collectives then take, and what is assumed.

Groups of all ranks of the step hold the data-parallel ranks, so they grow to the new number; smaller groups keep their size
and lie inside a node where they did. Every rank keeps its batch and its kernels (weak scaling), and a collective its bytes.
A measured time is scaled by what the cluster's switches and the node's links say of the new group and of the old one.
"""

import msgspec

from counterpoint.errors import MachineError, shown
from counterpoint.sim.calibration import load_calibration
from counterpoint.sim.collective_times import CollectiveTimes, RankGroup
from counterpoint.sim.network import Fabric, check_range
from counterpoint.step import MAX_RANKS, Collective, Copy, Operation, Step
from counterpoint.value import Value, require


class Extended(Value, frozen=True, kw_only=True):
    """The step on the cluster, and the assumptions, one sentence each; none if the step is unchanged."""

    step: Step
    assumptions: tuple[str, ...]

    @property
    def is_changed(self) -> bool:
        """Whether anything was assumed at all."""
        return bool(self.assumptions)


def extend_step(step: Step, fabric: Fabric, num_ranks: int | None = None) -> Extended:
    """Return `step` with `num_ranks` ranks (None: its own) on the cluster.

    A step that keeps its ranks inside one node is unchanged. Raises `MachineError` if an extension is impossible.
    """
    ranks = step.num_ranks if num_ranks is None else num_ranks
    where = f"cluster '{shown(fabric.cluster.name)}'"
    check_range(where, "--ranks", ranks, 1, MAX_RANKS)
    require(
        ranks <= fabric.num_gpus,
        MachineError,
        f"{ranks:,} ranks were requested, but {where} has {fabric.num_gpus:,} GPUs. Ask for fewer, or add nodes "
        "to the file.",
    )
    require(
        ranks >= step.num_ranks and ranks % step.num_ranks == 0,
        MachineError,
        f"{ranks:,} ranks were requested, but the step has {step.num_ranks}. Ask for a multiple of that.",
    )
    gpus = fabric.machine.num_gpus
    if ranks == step.num_ranks and ranks <= gpus:
        return Extended(step=step, assumptions=())
    times = CollectiveTimes(fabric=fabric, calibration=load_calibration(fabric.machine))
    growing = [each for each in step.collectives().values() if each.group_size == step.num_ranks]
    operations = tuple(_extended(operation, step.num_ranks, ranks, times) for operation in step.operations)
    found = msgspec.structs.replace(step, num_ranks=ranks, operations=operations)
    return Extended(step=found, assumptions=tuple(_assumptions(step, fabric, ranks, len(growing))))


def _extended(operation: Operation, before: int, after: int, times: CollectiveTimes) -> Operation:
    if isinstance(operation, Copy):
        require(
            operation.direction != "peer_to_peer" or after == before,
            MachineError,
            f"'{shown(operation.name)}' is a copy between GPUs. It does not tell which ranks share data, so it "
            "cannot be extended. Trace the job with its collectives, without copy engines.",
        )
        return operation
    if not isinstance(operation, Collective):
        return operation
    size = after if operation.group_size == before else operation.group_size
    gpus = times.fabric.machine.num_gpus
    old, new = RankGroup(size=min(operation.group_size, gpus)), RankGroup(size=size)
    is_evened = operation.parts is not None and size != operation.group_size  # parts of a larger group are not known
    num_bytes = operation.parts.as_equal_bytes if operation.parts is not None else operation.num_bytes
    new_us = times.time_us(operation.collective, num_bytes, new)
    if operation.lone_us is not None:
        usual_us = times.time_us(operation.collective, num_bytes, old)
        new_us = operation.lone_us * new_us / usual_us if usual_us and new.size > 1 else operation.lone_us
    unknown = msgspec.structs.replace(operation, parts=None, has_unknown_parts=True, num_bytes=num_bytes)
    found = unknown if is_evened else operation
    return msgspec.structs.replace(found, group_size=size, ranks=new.ranks, lone_us=new_us)


def _assumptions(step: Step, fabric: Fabric, ranks: int, num_growing: int) -> list[str]:
    total = len(step.collectives())
    found = [
        f"Extended from {step.num_ranks} to {ranks:,} ranks on cluster '{shown(fabric.cluster.name)}': "
        f"{fabric.cluster.num_nodes:,} nodes. Simulated; never compared with hardware.",
        f"Assumed: the {num_growing} of {total} collectives whose group holds all {step.num_ranks} ranks are data-parallel "
        "and grow; the others keep their groups, inside a node.",
        "Assumed: every rank keeps its batch and its kernels (weak scaling); an optimizer that is sharded over more ranks "
        "would take less time than here.",
    ]
    if ranks > step.num_ranks and any(each.parts is not None for each in step.collectives().values()):
        found.append("Assumed: parts of uneven all-to-alls whose group grows are equal there, as large together as now.")
    if any(each.lone_us is not None for each in step.collectives().values()):
        found.append("Assumed: traced times of collectives scale as the models of the node's links and of the switches do.")
    levels = ", ".join(
        f"{level.name} of {level.num_nodes:,} nodes at {level.efficiency:.0%} of "
        f"{level.bytes_per_s / level.oversubscription / 1e9:g} GB/s a rail"
        for level in fabric.levels
    )
    found.append(f"Switches: {levels or 'none'}.")
    return found
