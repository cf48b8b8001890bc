"""A cluster: equal nodes joined by a hierarchy of switches. It knows nothing of what runs on it.

Ranks are numbered node by node. A node has `num_rails` network ports; all GPUs of a node share them evenly while all send,
as they do in a job whose ranks all do the same. A level is one kind of switch: the nodes below one switch of the level reach
each other with that level's rate, and farther nodes need the next level.
"""

from typing import Literal

from counterpoint.errors import MachineError, shown
from counterpoint.machine import MAX_NAME, Machine, load_machine
from counterpoint.units import format_count
from counterpoint.value import Value, require

MAX_NODES = 1 << 17
MAX_LEVELS = 16
Algorithm = Literal["auto", "ring", "hierarchical", "tree"]


class Level(Value, frozen=True, kw_only=True):
    """One kind of switch. `num_nodes` are below one switch; `bytes_per_s` is what a rail gets in one direction.

    `oversubscription`: by what the level's rate is divided while all nodes below it send through it. `efficiency` is the
    share of the rate that collectives reach, `send_efficiency` that of one send to one peer; `latency_us` is that of one
    message to a node across this level.
    """

    name: str
    num_nodes: int
    bytes_per_s: float
    latency_us: float
    oversubscription: float = 1.0
    efficiency: float = 0.9
    send_efficiency: float = 0.3
    source: str = "assumed"

    def __post_init__(self) -> None:
        where = f"level '{shown(self.name)}'"
        check_range(where, "num_nodes", self.num_nodes, 1, MAX_NODES)
        check_range(where, "bytes_per_s", self.bytes_per_s, 1e8, 1e14)
        check_range(where, "latency_us", self.latency_us, 0.0, 1e6)
        check_range(where, "oversubscription", self.oversubscription, 1.0, 1000.0)
        check_range(where, "efficiency", self.efficiency, 0.01, 1.0)
        check_range(where, "send_efficiency", self.send_efficiency, 0.01, 1.0)

    @property
    def reached_bytes_per_s(self) -> float:
        """What a rail reaches through this level while all nodes send, in one direction."""
        return self.bytes_per_s * self.efficiency / self.oversubscription


class Cluster(Value, frozen=True, kw_only=True):
    """`num_nodes` nodes of a machine. Without `levels`, the machine's own network is the only one.

    `machine` is a shipped machine's name or the path of a machine file. `num_rails` is the number of network ports of a
    node; None means one for each GPU. `algorithm` is how collectives that leave a node move data; auto is what NCCL has:
    rings, and for all-reduces the faster of ring and tree. hierarchical splits them into levels.
    """

    name: str
    machine: str
    num_nodes: int
    num_rails: int | None = None
    levels: tuple[Level, ...] = ()
    algorithm: Algorithm = "auto"

    def __post_init__(self) -> None:
        require(
            0 < len(self.name) <= MAX_NAME and self.name.isprintable(),
            MachineError,
            f"The name of a cluster must have 1 to {MAX_NAME} printable characters; found '{shown(self.name)}'.",
        )
        where = f"cluster '{shown(self.name)}'"
        check_range(where, "num_nodes", self.num_nodes, 1, MAX_NODES)
        check_range(where, "num_rails", 1 if self.num_rails is None else self.num_rails, 1, 1024)
        check_range(where, "the number of levels", len(self.levels), 0, MAX_LEVELS)
        sizes = [level.num_nodes for level in self.levels]
        require(
            sizes == sorted(set(sizes)),
            MachineError,
            f"{where}: levels go from the inside out, so num_nodes must rise from level to level; found {sizes}.",
        )
        require(
            not sizes or sizes[-1] >= self.num_nodes,
            MachineError,
            f"{where}: the last level must join all {self.num_nodes} nodes; found {sizes[-1] if sizes else 0} below one of "
            "its switches. Raise its num_nodes, or add a level.",
        )

    def load(self) -> "Fabric":
        """Return the cluster with its machine. Raises `MachineError` if the two do not match."""
        return Fabric(cluster=self, machine=load_machine(self.machine))


class Fabric(Value, frozen=True, kw_only=True):
    """A cluster together with its machine."""

    cluster: Cluster
    machine: Machine

    def __post_init__(self) -> None:
        cluster, machine = self.cluster, self.machine
        require(
            self.num_rails <= machine.num_gpus,
            MachineError,
            f"cluster '{shown(cluster.name)}': num_rails must be at most the {machine.num_gpus} GPUs of a node of machine "
            f"'{machine.name}'; found {self.num_rails}.",
        )
        require(
            cluster.num_nodes == 1 or bool(cluster.levels) or machine.network is not None,
            MachineError,
            f"cluster '{shown(cluster.name)}' has {cluster.num_nodes} nodes, and neither it nor machine '{machine.name}' "
            "describes a network. Add [[levels]].",
        )

    @property
    def num_gpus(self) -> int:
        """All GPUs of the cluster."""
        return self.cluster.num_nodes * self.machine.num_gpus

    @property
    def num_rails(self) -> int:
        """Network ports of a node."""
        return self.cluster.num_rails or self.machine.num_gpus

    @property
    def rails_per_gpu(self) -> float:
        """Network ports for each GPU while all GPUs of a node send."""
        return self.num_rails / self.machine.num_gpus

    @property
    def rails_in_words(self) -> str:
        """As in "1 rail per node, shared by 8 GPUs (num_rails = 1)."."""
        rails, gpus = self.num_rails, self.machine.num_gpus
        shared = "one for each GPU" if rails == gpus else f"shared by {gpus} GPUs"
        said = "assumed, since [cluster] has no num_rails" if self.cluster.num_rails is None else f"num_rails = {rails}"
        return f"{format_count(rails, 'rail')} per node, {shared} ({said})."

    @property
    def levels(self) -> tuple[Level, ...]:
        """The cluster's levels, or the machine's network as the only one."""
        network = self.machine.network
        if self.cluster.levels or network is None:
            return self.cluster.levels
        return (
            Level(
                name="network",
                num_nodes=self.cluster.num_nodes,
                bytes_per_s=network.per_peer_bytes_per_s,
                latency_us=network.latency_us,
                source=f"machine '{self.machine.name}'; efficiency assumed",
            ),
        )

    def level_across(self, num_nodes: int) -> Level:
        """Return the innermost level that joins so many neighboring nodes."""
        return next(level for level in self.levels if level.num_nodes >= min(num_nodes, self.levels[-1].num_nodes))


def check_range(where: str, what: str, number: float, least: float, most: float) -> None:
    """Raise `MachineError`, in one line, for a figure outside its range."""
    require(
        least <= number <= most,
        MachineError,
        f"{where}: {what} must be from {least:,} to {most:,}; found {number:,}.",
    )
