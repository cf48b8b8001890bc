"""A fork server for ranks: it imports torch and the operators once, and each job's rank is a fork of it.

Importing takes a rank three to four seconds of processor time, more than most jobs run. Each rank number has a server of its
own, so that hash seeds still differ between ranks: order by hash, which may not reach a collective, stays different. What a
job itself imports, and what reads the environment, is imported after the fork.
"""

import json
import os
import runpy
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import NoReturn, TextIO

PRELOADED = (
    "torch._functorch.aot_autograd",
    "torch.distributed.checkpoint",
    "counterpoint.ops",
    "counterpoint.integrations",
)


def serve(requests: TextIO, replies: TextIO) -> None:
    """Say that all is imported; then fork for each line, and tell the fork's status as `subprocess` counts it."""
    print("ready", file=replies, flush=True)
    for line in requests:
        pid = os.fork()
        if pid == 0:
            replies.close()
            _become_rank(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=replies, flush=True)


def _become_rank(job: str, arguments: list[str], environment: dict[str, str], output: str, errors: str) -> NoReturn:
    """Run a job's file as a process that had been started for it would."""
    for path, number in ((os.devnull, 0), (output, 1), (errors, 2)):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [job, *arguments]
    sys.path[:0] = [str(Path(job).parent), *filter(None, environment["PYTHONPATH"].split(os.pathsep))]
    status = 1
    try:
        runpy.run_path(job, run_name="__main__")
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))  # or this folder's modules hide others of their names
    own_replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in PRELOADED:
        import_module(name)
    serve(sys.stdin, own_replies)
