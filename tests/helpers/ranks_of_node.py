"""What starts ranks on this host without an agent of torch, which takes as long to import torch as each rank does."""

import contextlib
import random
import socket
import sys
from pathlib import Path

TORCH = ("torch.distributed", "torch._dynamo")  # the second one takes longer, and the start-up hook needs it
PORTS = range(20_000, 32_000)
SCRIPT = Path(__file__).parent / "jobs" / "ranks_of_node.py"


def free_ports(number: int) -> list[int]:
    """Different ports of this host that nobody uses, drawn from those that the system gives to no connection by itself: one
    of these could be gone before the job listens.
    """
    found: list[int] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("", port))
            found.append(port)
        if len(found) == number:
            break
    return found


def free_port() -> int:
    return free_ports(1)[0]


def ranks_of_node(num_ranks: int = 2, *, node: int = 0, num_nodes: int = 1, port: int | None = None) -> list[str]:
    """The command's first words, before a script and its arguments; nodes of one job have a port in common. Ranks are forks
    of a process that has imported torch.
    """
    numbers = [node, num_nodes, num_ranks, port or free_port()]
    return [sys.executable, str(SCRIPT), *map(str, numbers), ",".join(TORCH)]
