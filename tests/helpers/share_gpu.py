"""Runs a script, or with -m a module, as one of several ranks that share the only GPU of a machine.

    torchrun --nproc-per-node 2 tests/helpers/share_gpu.py SCRIPT [ARGUMENT ...]

The ranks compute and copy in turns, so results and faults are those of several GPUs and times mean nothing. NCCL refuses two
ranks on one GPU of a host, so each rank names a host of its own, and NCCL sends by sockets. Torch's symmetric memory allows
shared GPUs if a variable says so.
"""

import os
import runpy
import sys
from pathlib import Path


def share_gpu() -> None:
    """Set what lets this rank use GPU 0 beside the others."""
    os.environ |= {
        "LOCAL_RANK": "0",
        "NCCL_HOSTID": f"rank {os.environ['RANK']}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    }


if __name__ == "__main__":
    share_gpu()
    is_module = sys.argv[1] == "-m"
    sys.argv = sys.argv[1 + is_module :]
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
