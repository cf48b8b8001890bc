"""Ranks that hold the integrations against stock DDP, FSDP2 and tensor parallelism; rank 0 prints `NAME: ok` per section.

A section is a public function without parameters and results in a module of `integration_sections`. With GPUs over NCCL and
copy engines, without over gloo: the sections are the same.
"""

import os
import sys
import time
import traceback
from importlib import import_module
from pkgutil import iter_modules

import integration_sections
import torch
import torch.distributed as dist
from integration_sections.comparing import DEVICE

from counterpoint.cuda.ranks import wait_until_all_leave

MODULES = [import_module(f"integration_sections.{found.name}") for found in iter_modules(integration_sections.__path__)]
SECTIONS = {name: found for module in MODULES for name, found in vars(module).items()}


def main(names: list[str]) -> int:
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
        dist.init_process_group("nccl", device_id=DEVICE)
    else:
        meeting = f"file://{os.environ['MEETING_FILE']}"
        dist.init_process_group("gloo", meeting, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    for name in names:
        try:
            began = time.monotonic()
            SECTIONS[name]()
            if dist.get_rank() == 0:
                print(f"{name} took {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
            outcome = "ok"
        except Exception:
            outcome = f"failed\n{traceback.format_exc()}"
        outcomes: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(outcomes, outcome)
        if dist.get_rank() == 0:
            wrong = [f"rank {rank} {each}" for rank, each in enumerate(outcomes) if each != "ok"]
            print(f"{name}: {'ok' if not wrong else wrong[0]}", flush=True)
        if any(each != "ok" for each in outcomes):  # a rank that failed left the section early, and waits for no one
            return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    wait_until_all_leave()
    sys.stdout.flush()
    os._exit(code)
