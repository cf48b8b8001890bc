"""Starts the ranks of a node, as torchrun does, without the two seconds that torchrun takes to import torch.

NODE NUM_NODES NUM_RANKS PORT SCRIPT ARGUMENT...: the ranks, as many on each node, find each other by the variables that
torchrun would set.
"""

import os
import subprocess
import sys

node, num_nodes, num_ranks, port = (int(word) for word in sys.argv[1:5])
shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks * num_nodes)}
ranks = [
    subprocess.Popen(
        [sys.executable, *sys.argv[5:]],
        env=os.environ | shared | {"RANK": str(num_ranks * node + local), "LOCAL_RANK": str(local)},
    )
    for local in range(num_ranks)
]
sys.exit(max(rank.wait() for rank in ranks))
