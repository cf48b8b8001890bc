"""Starts the ranks of a node, as torchrun does: forks of a process that has imported torch, which takes each seconds.

NODE NUM_NODES NUM_RANKS PORT MODULES SCRIPT ARGUMENT...: the ranks, as many on each node, find each other by the variables
that torchrun would set. MODULES, with commas between them, are imported before the fork.

More than two ranks are forks of two processes, the even and the odd ones, so that hash seeds still differ between ranks:
order by hash may not reach what ranks agree on.
"""

import os
import runpy
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from forking import import_for_forks

del sys.path[:2]  # or modules of these folders hide others of their names
ODD = "ODD_RANKS"  # is set in the second process


def start(local: int) -> int:
    """Fork a rank, which runs the script as Python would; returns its process id."""
    pid = os.fork()
    if pid == 0:
        os.environ |= shared | {"RANK": str(num_ranks * node + local), "LOCAL_RANK": str(local)}
        sys.argv[:] = sys.argv[6:]
        sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
    return pid


node, num_nodes, num_ranks, port = (int(word) for word in sys.argv[1:5])
shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks * num_nodes)}
is_split, is_odd = num_ranks > 2, bool(os.environ.pop(ODD, ""))
others = [subprocess.Popen([sys.executable, *sys.argv], env=os.environ | {ODD: "1"})] if is_split and not is_odd else []
import_for_forks(sys.argv[5].split(","))
pids = [start(local) for local in range(is_odd, num_ranks, 1 + is_split)]
sys.exit(max([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] + [each.wait() for each in others]))
