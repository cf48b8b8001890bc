"""A fork server for ranks: it imports torch and the operators once, and each job's ranks are forks of it.

Importing takes a rank five seconds of processor time, more than most jobs run. Even and odd ranks have a server each, so
that hash seeds still differ between ranks: order by hash, which may not reach a collective, stays different. What a job
itself imports, and what reads the environment, is imported after the fork. A fork under `counterpoint run` loads the launch
filter and runs the start-up hook itself, since its server began without them.
"""

import ctypes
import importlib.util
import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import NoReturn, TextIO

from forking import end_with_parent, import_for_forks

PRELOADED = (
    "torch._functorch.aot_autograd",
    "torch._dynamo.backends.debugging",
    "torch.distributed.checkpoint",
    "counterpoint.ops",
    "counterpoint.integrations",
    "pytest",
)


def serve(requests: TextIO, replies: TextIO) -> None:
    """Say that all is imported; then fork each line's ranks, and tell their statuses as `subprocess` counts them."""
    print("ready", file=replies, flush=True)
    for line in requests:
        pids = []
        for asked in json.loads(line):
            pid = os.fork()
            if pid == 0:
                end_with_parent()
                replies.close()
                _become_rank(**asked)
            pids.append(pid)
        print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids], file=replies, flush=True)


def _become_rank(job: str, arguments: list[str], environment: dict[str, str], output: str, errors: str) -> NoReturn:
    """Run a job's file as a process that had been started for it would."""
    for path, number in ((os.devnull, 0), (output, 1), (errors, 2)):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [job, *arguments]
    sys.path[:0] = [str(Path(job).parent), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    status = 1
    try:
        if environment.get("COUNTERPOINT_FILTER_DIRECTORY"):
            _supervise(environment)
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


def _supervise(environment: dict[str, str]) -> None:
    """Do what the dynamic linker and Python would have done at the start of a process under `counterpoint run`."""
    for path in environment["LD_PRELOAD"].replace(":", " ").split():
        ctypes.CDLL(path)
    hook = Path(environment["PYTHONPATH"].split(os.pathsep)[0]) / "sitecustomize.py"
    spec = importlib.util.spec_from_file_location("sitecustomize", hook)
    hooked = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooked)
    (waiting,) = [each for each in sys.meta_path if type(each).__name__ == "AwaitedImport"]
    sys.meta_path.remove(waiting)
    waiting.on_import(sys.modules["torch.optim.optimizer"])


if __name__ == "__main__":
    end_with_parent()
    sys.path.remove(str(Path(__file__).parent))  # or this folder's modules hide others of their names
    own_replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import_for_forks(PRELOADED)
    serve(sys.stdin, own_replies)
