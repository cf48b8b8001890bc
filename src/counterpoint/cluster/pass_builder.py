"""Writes the operations of one pass through some layers as a step that the single-node simulator runs.

Streams: computation, gathers of parameters, reductions of gradients, tensor- and expert-parallel collectives, exchanges of
context parallelism. On one node a collective carries no time, so the single-node simulator computes it, as for any step; on
more, each carries the time that the cluster's switches give it.
"""

import msgspec

from counterpoint.cluster.description import Configuration
from counterpoint.sim.collective_times import CollectiveTimes, RankGroup
from counterpoint.step import Collective, CollectiveKind, Dependency, Kernel, Operation, Step
from counterpoint.units import PS_PER_US

COMPUTE, GATHER, REDUCE, TENSOR, CONTEXT = range(5)
TENSOR_GROUP, EXPERT_GROUP, CONTEXT_GROUP = "tensor", "expert", "context"
DATA_GROUP, SHARD_GROUP, REPLICA_GROUP = "data", "shard", "replica"
EXPERT_DATA_GROUP, EXPERT_SHARD_GROUP, EXPERT_REPLICA_GROUP = "expert_data", "expert_shard", "expert_replica"
# of the ranks that hold the same parameters: those that share them, and those that hold the same shard
PARTS_OF = {
    DATA_GROUP: (SHARD_GROUP, REPLICA_GROUP),
    EXPERT_DATA_GROUP: (EXPERT_SHARD_GROUP, EXPERT_REPLICA_GROUP),
}
STREAM_OF = {TENSOR_GROUP: TENSOR, EXPERT_GROUP: TENSOR, CONTEXT_GROUP: CONTEXT}


def groups_of(configuration: Configuration) -> dict[str, RankGroup]:
    """Return the process groups of one rank, by the kind of parallelism."""
    sizes, data = configuration.parallelism, configuration.data_size
    across = data * sizes.context  # ranks that hold the same parameters
    shard, expert_shard = configuration.shard_ranks, configuration.expert_shard_ranks
    same_experts = RankGroup(size=across // sizes.expert, stride=sizes.tensor * sizes.expert)
    return {
        TENSOR_GROUP: RankGroup(size=sizes.tensor),
        CONTEXT_GROUP: RankGroup(size=sizes.context, stride=sizes.tensor),
        EXPERT_GROUP: RankGroup(size=sizes.expert, stride=sizes.tensor * sizes.context),
        DATA_GROUP: RankGroup(size=across, stride=sizes.tensor),
        SHARD_GROUP: RankGroup(size=shard, stride=sizes.tensor),
        REPLICA_GROUP: RankGroup(size=across // shard, stride=sizes.tensor * shard),
        EXPERT_DATA_GROUP: same_experts,
        EXPERT_SHARD_GROUP: RankGroup(size=expert_shard, stride=same_experts.stride),
        EXPERT_REPLICA_GROUP: RankGroup(size=same_experts.size // expert_shard, stride=same_experts.stride * expert_shard),
    }


class PassBuilder:
    """Collects operations; the computation's stream waits where it is told to."""

    def __init__(self, configuration: Configuration, times: CollectiveTimes) -> None:
        self._configuration, self._times = configuration, times
        self.groups = groups_of(configuration)
        self._host_us = configuration.software.host_us_per_operation
        self._operations: list[Operation] = []
        self._last_compute: int | None = None
        self._awaited: list[int] = []
        self._context: int | None = None
        self._ends: list[int] = []

    @property
    def layer_ends(self) -> tuple[int, ...]:
        """The last computation of each layer so far."""
        return tuple(self._ends)

    def compute(self, kernel: Kernel, *, stream: int = COMPUTE, after: int | None = None) -> int:
        """Issue a kernel: on the computation's stream behind what it was told to wait for, else after one operation."""
        waits = ([after] if after is not None else []) if stream != COMPUTE else self._awaited
        number = self._add(msgspec.structs.replace(kernel, stream=stream, waits_for=_dependencies(waits)))
        if stream == COMPUTE:
            self._awaited = []
            self._last_compute = number
        return number

    def communicate(
        self,
        kind: CollectiveKind,
        num_bytes: float,
        group: str,
        *,
        is_waited_for: bool = False,
        after: int | None = None,
        stream: int | None = None,
    ) -> int | None:
        """Issue a collective after operation `after` (-1: after nothing; None: after the computation so far).

        Returns None where the group is one rank.
        """
        members = self.groups[group]
        if members.size < 2:
            return None
        waits = [each for each in (self._last_compute if after is None else after,) if each is not None and each >= 0]
        is_alone = self._configuration.fabric.cluster.num_nodes == 1
        collective = Collective(
            name=f"{group}.{kind}",
            stream=STREAM_OF.get(group, REDUCE) if stream is None else stream,
            collective=kind,
            num_bytes=max(1, round(num_bytes)),
            group_size=members.size,
            ranks=members.ranks,
            library="nccl",
            process_group=group,
            lone_us=None if is_alone else self._times.time_us(kind, max(1, round(num_bytes)), members),
            waits_for=_dependencies(waits),
        )
        number = self._add(collective)
        if is_waited_for:
            self._awaited.append(number)
        return number

    def wait_for(self, number: int | None) -> None:
        """Let the next computation wait for an operation."""
        if number is not None:
            self._awaited.append(number)

    def compute_after(self, kernel: Kernel, number: int | None) -> int | None:
        """Issue a kernel behind a collective of gradients, on its stream; None where there was no collective."""
        return None if number is None else self.compute(kernel, stream=REDUCE, after=number)

    def exchange_context(self, num_bytes: float) -> None:
        """Gather keys and values from the context ranks while the attention runs."""
        self._context = self.communicate("all_gather", num_bytes, CONTEXT_GROUP)

    def wait_for_context(self) -> None:
        """Let the next computation wait for the exchange."""
        self.wait_for(self._context)

    def end_layer(self) -> None:
        """Note where a layer ends."""
        if self._last_compute is not None:
            self._ends.append(self._last_compute)

    def step(self, name: str) -> Step:
        """Return all operations so far as a step of all ranks of the cluster."""
        return Step(name=name, num_ranks=self._configuration.fabric.num_gpus, operations=tuple(self._operations))

    def _add(self, operation: Kernel | Collective) -> int:
        number = len(self._operations)
        issued = self._host_us * number if self._host_us > 1 / PS_PER_US else None
        self._operations.append(msgspec.structs.replace(operation, issued_us=issued))
        return number


def _dependencies(numbers: list[int]) -> tuple[Dependency, ...]:
    return tuple(Dependency(operation=number) for number in sorted(set(numbers)))
