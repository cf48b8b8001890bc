"""Starts the two ranks of a node, as torchrun does, without the two seconds that torchrun takes to import torch.

NODE NUM_NODES PORT SCRIPT ARGUMENT...: the ranks find each other by the variables that torchrun would set.
"""

import os
import subprocess
import sys

node, num_nodes, port = (int(word) for word in sys.argv[1:4])
shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(2 * num_nodes)}
ranks = [
    subprocess.Popen([sys.executable, *sys.argv[4:]], env=shared | {"RANK": str(2 * node + local), "LOCAL_RANK": str(local)})
    for local in range(2)
]
sys.exit(max(rank.wait() for rank in ranks))
