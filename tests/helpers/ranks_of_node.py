"""What starts ranks on this host without an agent of torch, which takes as long to import torch as each rank does."""

import socket
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "jobs" / "ranks_of_node.py"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def ranks_of_node(num_ranks: int = 2, *, node: int = 0, num_nodes: int = 1, port: int | None = None) -> list[str]:
    """The command's first words, before a script and its arguments; nodes of one job have a port in common."""
    return [sys.executable, str(SCRIPT), str(node), str(num_nodes), str(num_ranks), str(port or free_port())]
