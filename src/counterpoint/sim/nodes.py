"""Decides which jobs of more ranks than a node has GPUs can be simulated, and which collectives leave the node.

The simulator does not model collectives across nodes, so their time is known only if it was measured, as in a trace of the
job. A described step of more ranks than a node has GPUs is refused. Copy engines reach the GPUs of one node, so they do not
move a collective that leaves the node or may leave it.
"""

from counterpoint.errors import MachineError
from counterpoint.machine import Machine
from counterpoint.step import Collective, Copy, Operation, Step

NO_PEER_ACCESS = "these GPUs cannot access each other's memory, which copies between them need"
BEYOND_THE_NODE = "its ranks are on several nodes, but copies reach only ranks on the same node"
MAYBE_BEYOND_THE_NODE = "its ranks are unknown; they may be on several nodes, and copies do not cross nodes"
MEASURED_INSTEAD = ", or plan from a trace of the job, which contains the times"


def check_ranks(num_ranks: int, machine: Machine, way_out: str = "") -> None:
    """Raise `MachineError`, in one line, for more ranks than the machine has GPUs in a node; `way_out` ends the line."""
    if num_ranks > machine.num_gpus:
        raise MachineError(
            f"{num_ranks:,} ranks were requested, but machine '{machine.name}' has {machine.num_gpus} GPUs in a "
            f"node, and communication between nodes is not simulated. Ask for {machine.num_gpus} ranks or "
            f"fewer, or name a machine with larger nodes{way_out}."
        )


def check_nodes(step: Step, machine: Machine) -> None:
    """Raise as `check_ranks` does, unless every operation that communicates has its measured time."""
    if any(_needs_a_link(operation) for operation in step.operations):
        groups = (collective.group_size for collective in step.collectives().values())
        check_ranks(max(step.num_ranks, *groups, 1), machine, MEASURED_INSTEAD)


def _needs_a_link(operation: Operation) -> bool:
    """Return whether the time of the operation is computed from a link."""
    is_remote = isinstance(operation, Collective) or (isinstance(operation, Copy) and operation.direction == "peer_to_peer")
    return is_remote and operation.lone_us is None


def leaves_node(collective: Collective, machine: Machine) -> bool:
    """Return whether the collective's ranks are known to be on several nodes; nodes hold ranks in order."""
    return collective.group_size > machine.num_gpus or len({rank // machine.num_gpus for rank in collective.ranks}) > 1


def obstacle_to_copies(collective: Collective, num_ranks: int, machine: Machine) -> str | None:
    """Return why copies cannot reach all ranks of a collective in a job of `num_ranks`, or None."""
    return beyond_node(collective, num_ranks, machine) if machine.link.has_peer_access else NO_PEER_ACCESS


def beyond_node(collective: Collective, num_ranks: int, machine: Machine) -> str | None:
    """Return why a collective in a job of `num_ranks` is not known to stay on one node, or None if it is."""
    if num_ranks <= machine.num_gpus:
        return None
    if leaves_node(collective, machine):
        return BEYOND_THE_NODE
    return None if collective.ranks else MAYBE_BEYOND_THE_NODE
