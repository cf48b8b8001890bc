"""Joins the other ranks, and ends the process without making another rank hang.

Under torchrun each process uses the GPU of its local rank and joins the NCCL process group; alone it uses GPU 0. A rank
that fails prints why and exits at once, so that the other ranks' rendezvous times out instead of waiting forever.
"""

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from importlib.metadata import version
from typing import NoReturn

from counterpoint.errors import INSTALL, INTERRUPTED, READER_LEFT, CounterpointError, DeviceError, say

JOIN_TIMEOUT = timedelta(seconds=300)
LEAVING_LIMIT = timedelta(seconds=10)
OLDEST_TORCH = (2, 11)
FROM_TRACE = "Without GPUs, plan from a trace: counterpoint tune TRACE."


def require_gpu(instead: str) -> None:
    """Raise `DeviceError` without torch, with a torch that is too old, without a GPU, or without cuda-bindings.

    Checks in this order, so that no one installs packages for GPUs that are missing. `instead` says what works without.
    """
    _require("torch", "torch", instead)
    found = version("torch")
    if tuple(int(part) for part in found.split("+")[0].split(".")[:2]) < OLDEST_TORCH:
        raise DeviceError(
            f"torch {found} is too old; {'.'.join(map(str, OLDEST_TORCH))} or later is needed. Update it. {instead}"
        )
    import torch  # noqa: PLC0415  only after the checks above

    if not torch.cuda.is_available():
        raise DeviceError(f"No GPU is visible, so nothing can be measured. {instead}")
    _require("cuda.bindings.driver", "cuda-bindings", instead)


def join_ranks(instead: str = FROM_TRACE) -> int:
    """Select this process's GPU, join the other ranks, and return the rank. Raises as `require_gpu` does."""
    require_gpu(instead)
    import torch  # noqa: PLC0415  only after the checks above
    import torch.distributed as dist  # noqa: PLC0415

    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise DeviceError(f"Rank {local_rank} has no GPU: {torch.cuda.device_count()} are visible. Start fewer processes.")
    torch.cuda.set_device(local_rank)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank), timeout=JOIN_TIMEOUT)
    return dist.get_rank() if dist.is_initialized() else 0


def _require(module: str, package: str, instead: str) -> None:
    try:
        import_module(module)
    except ImportError as problem:
        raise DeviceError(f"'{package}' is needed to run on GPUs and is not installed. {INSTALL} {instead}") from problem


def run_and_leave(command: Callable[[], None]) -> NoReturn:
    """Run a command that all ranks run, and end this process at once, whether it succeeded or failed."""
    try:
        command()
    except CounterpointError as problem:
        say(str(problem))
        leave(2)
    except SystemExit as ended:  # the argument parser has printed why
        leave(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
    except KeyboardInterrupt:
        leave(INTERRUPTED)
    except BrokenPipeError:
        leave(READER_LEFT)
    except BaseException:
        # a bug here or in the user's step: print the traceback, but do not wait for ranks that will never answer
        traceback.print_exc()
        leave(1)
    wait_until_all_leave()
    leave(0)


def wait_until_all_leave() -> None:
    """Wait, by the store, until every rank comes here, for `LEAVING_LIMIT` at most: where NCCL sends by a network, a rank
    that ends takes with it what the others have not received yet.
    """
    if sys.modules.get("torch") is None:
        return
    import torch.distributed as dist  # noqa: PLC0415  only after a command that used it

    if not dist.is_initialized():
        return
    store = dist.distributed_c10d._get_default_store()
    with suppress(RuntimeError):  # a rank that failed never comes, or took the store with it
        store.set(f"counterpoint, leaving {dist.get_rank()}", "")
        store.wait([f"counterpoint, leaving {rank}" for rank in range(dist.get_world_size())], LEAVING_LIMIT)


def leave(exit_code: int) -> NoReturn:
    """End this process now; a normal exit would wait for collectives that will never finish."""
    for output in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the reader has exited, or the disk is full
            output.flush()
    os._exit(exit_code)
