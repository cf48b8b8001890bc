"""What starts ranks on this host without an agent of torch, which takes as long to import torch as each rank does."""

import contextlib
import socket
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "jobs" / "ranks_of_node.py"


def free_ports(number: int) -> list[int]:
    """Different ports of this host that nobody uses."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def free_port() -> int:
    return free_ports(1)[0]


def ranks_of_node(num_ranks: int = 2, *, node: int = 0, num_nodes: int = 1, port: int | None = None) -> list[str]:
    """The command's first words, before a script and its arguments; nodes of one job have a port in common."""
    return [sys.executable, str(SCRIPT), str(node), str(num_nodes), str(num_ranks), str(port or free_port())]
