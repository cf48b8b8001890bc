"""Estimates collectives on a cluster: inside a node by the single-node simulator, beyond it by switches and rails.

Bytes that leave a node go through its rails, of which a group gets the share of its members there. Three ways are known:
one ring over all ranks, whose latency grows with their number; a hierarchical one (reduce-scatter in the node, between
nodes, gather in the node), whose parts follow one another; and a double binary tree for all-reduces. NCCL has rings for all
collectives on nodes of several GPUs, and trees for all-reduces (src/graph/tuning.cc), so the faster of these counts, unless
the cluster names a way. That is a model; nobody measured it here.
"""

import math
from functools import cached_property

from counterpoint.sim.calibration import Calibration
from counterpoint.sim.costs import CostModel
from counterpoint.sim.network import Fabric, Level
from counterpoint.sim.reach import wire_bytes
from counterpoint.step import Collective, CollectiveKind
from counterpoint.units import MIB, US_PER_S
from counterpoint.value import Value

LARGE = 256 * MIB  # from this size on, a collective's time grows only with its bytes
RING_STEP_US = 3.4  # of a step of a ring over NVLink: NCCL's own model, hwLat in src/graph/tuning.cc, ring, simple protocol
CONCURRENT_PEERS = 8  # that an all-to-all sends to at a time: NCCL 2.28, NCCL_MAX_DEV_WORK_P2P_ELEMENTS / 2; assumed


class RankGroup(Value, frozen=True, kw_only=True):
    """`size` ranks with `stride` ranks from one to the next, as all groups of one kind of parallelism have them."""

    size: int
    stride: int = 1

    def num_local(self, gpus_per_node: int) -> int:
        """Return the number of members in one node."""
        return min(self.size, max(1, gpus_per_node // self.stride))

    def num_nodes(self, gpus_per_node: int) -> int:
        """Return the number of nodes that have members."""
        return math.ceil(self.size / self.num_local(gpus_per_node))

    def span(self, gpus_per_node: int) -> int:
        """Return the number of neighboring nodes from the first member to the last."""
        return math.ceil(((self.size - 1) * self.stride + 1) / gpus_per_node)

    def leaves_node(self, gpus_per_node: int) -> bool:
        """Return whether any member is on another node than the first."""
        return self.num_nodes(gpus_per_node) > 1

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members of the group that holds rank 0."""
        return tuple(range(0, self.size * self.stride, self.stride))


class CollectiveTimes(Value, frozen=True, kw_only=True, dict=True):
    """Times of collectives of one cluster, in microseconds, alone; `calibration` holds the constants of its GPU."""

    fabric: Fabric
    calibration: Calibration

    @cached_property
    def _costs(self) -> CostModel:
        return CostModel(self.fabric.machine, self.calibration)

    @cached_property
    def _rates(self) -> dict[CollectiveKind, float]:
        return {}

    @cached_property
    def _known(self) -> dict[tuple[CollectiveKind, float, RankGroup], float]:
        return {}

    def time_us(self, kind: CollectiveKind, num_bytes: float, group: RankGroup) -> float:
        """Return the time of a collective of `num_bytes`, as nccl-tests counts them; 0 for a group of one."""
        if group.size < 2 or num_bytes <= 0:
            return 0.0
        key = (kind, num_bytes, group)
        if key not in self._known:
            self._known[key] = self._time_us(kind, num_bytes, group)
        return self._known[key]

    def _time_us(self, kind: CollectiveKind, num_bytes: float, group: RankGroup) -> float:
        gpus = self.fabric.machine.num_gpus
        if not group.leaves_node(gpus):
            return self.in_node_us(kind, num_bytes, group.size)
        level = self.fabric.level_across(group.span(gpus))
        if kind == "all_to_all":
            return self._all_to_all_us(num_bytes, group, level)
        if kind == "send_recv":
            rate = self._share(level, 1) / level.efficiency * level.send_efficiency
            return level.latency_us + US_PER_S * num_bytes / rate
        algorithm = self.fabric.cluster.algorithm
        if algorithm == "hierarchical":
            return self._hierarchical_us(kind, num_bytes, group, level)
        ring_us = self._ring_us(kind, num_bytes, group, level)
        if kind != "all_reduce" or algorithm == "ring":
            return ring_us
        tree_us = self._tree_us(num_bytes, group, level)
        return tree_us if algorithm == "tree" else min(ring_us, tree_us)

    def in_node_us(self, kind: CollectiveKind, num_bytes: float, num_ranks: int) -> float:
        """Return the time inside a node by the single-node simulator."""
        collective = Collective(
            name=kind, stream=0, collective=kind, num_bytes=round(num_bytes), group_size=num_ranks, library="nccl"
        )
        return self._costs.lone_us(collective) if num_ranks > 1 else 0.0

    def _share(self, level: Level, num_local: int) -> float:
        """Return the bytes per second that `num_local` members of a group together send out of their node."""
        return num_local * self.fabric.rails_per_gpu * level.reached_bytes_per_s

    def _node_rate(self, kind: CollectiveKind) -> float:
        """Return the bytes per second that a rank sends inside a node."""
        if kind not in self._rates:
            ranks = self.fabric.machine.num_gpus
            longer, shorter = (self.in_node_us(kind, size, ranks) for size in (2 * LARGE, LARGE))
            moved = wire_bytes(kind, LARGE, ranks)
            self._rates[kind] = US_PER_S * moved / (longer - shorter) if longer > shorter else math.inf
        return self._rates[kind]

    def _ring_us(self, kind: CollectiveKind, num_bytes: float, group: RankGroup, level: Level) -> float:
        gpus = self.fabric.machine.num_gpus
        local, nodes = group.num_local(gpus), group.num_nodes(gpus)
        rate = self._share(level, local)
        if local > 1:
            rate = min(rate, self._node_rate(kind))
        rounds = 2 if kind == "all_reduce" else 1
        hops_us = (nodes - 1) * level.latency_us + (group.size - nodes) * RING_STEP_US
        return rounds * hops_us + US_PER_S * wire_bytes(kind, round(num_bytes), group.size) / rate

    def _hierarchical_us(self, kind: CollectiveKind, num_bytes: float, group: RankGroup, level: Level) -> float:
        local = group.num_local(self.fabric.machine.num_gpus)
        inner: list[CollectiveKind] = ["reduce_scatter", "all_gather"] if kind == "all_reduce" else [kind]
        inside_us = sum(self.in_node_us(each, num_bytes, local) for each in inner)
        return inside_us + self._between_us(kind, num_bytes, group, level)

    def _between_us(self, kind: CollectiveKind, num_bytes: float, group: RankGroup, level: Level) -> float:
        """Return the time of the level between nodes: each member of a node with those of the same place on the others."""
        gpus = self.fabric.machine.num_gpus
        local, nodes = group.num_local(gpus), group.num_nodes(gpus)
        rounds = 2 if kind == "all_reduce" else 1
        between = wire_bytes(kind, round(num_bytes / local), nodes) / self._share(level, 1)
        return rounds * math.ceil(math.log2(nodes)) * level.latency_us + US_PER_S * between

    def with_copies_us(self, kind: CollectiveKind, num_bytes: float, group: RankGroup) -> float:
        """Return the time in two levels if copy engines and sums do the level in the node, for a group of several nodes."""
        gpus = self.fabric.machine.num_gpus
        local = group.num_local(gpus)
        within = Collective(
            name=kind, stream=0, collective=kind, num_bytes=round(num_bytes), group_size=local, library="copy engines"
        )
        between_us = self._between_us(kind, num_bytes, group, self.fabric.level_across(group.span(gpus)))
        return between_us + self._costs.copied_us(within) + self._costs.summed_us(within)

    def _tree_us(self, num_bytes: float, group: RankGroup, level: Level) -> float:
        gpus = self.fabric.machine.num_gpus
        local, nodes = group.num_local(gpus), group.num_nodes(gpus)
        rate = self._share(level, local)
        if local > 1:
            rate = min(rate, self._node_rate("all_reduce"))
        hops_us = 2 * (math.ceil(math.log2(nodes)) * level.latency_us + (local - 1) * self.fabric.machine.link.latency_us)
        return hops_us + US_PER_S * 2 * num_bytes / rate

    def _all_to_all_us(self, num_bytes: float, group: RankGroup, level: Level) -> float:
        gpus = self.fabric.machine.num_gpus
        local = group.num_local(gpus)
        inside_us = self.in_node_us("all_to_all", num_bytes * local / group.size, local)
        away = num_bytes * (group.size - local) / group.size
        rounds = math.ceil((group.size - local) / CONCURRENT_PEERS)
        return max(inside_us, rounds * level.latency_us + US_PER_S * away / self._share(level, 1))
