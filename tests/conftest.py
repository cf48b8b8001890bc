"""Settings of all tests.

Hypothesis draws the same examples in every run, so that a run fails only for what changed. No example has a time limit,
since a busy machine is not a failure. Jobs that tests start can be interrupted, also where a shell runs the tests in the
background and so ignores Ctrl-C for them. Commands that tests start find `counterpoint` and `torchrun` of this
environment, also where it is not activated. Python keeps what it compiled, also where the environment says otherwise:
hundreds of commands and ranks would compile the package anew. A process multiplies with one thread, since other processes
run beside it.
"""

import os
import signal
import sys
from pathlib import Path

from hypothesis import settings

settings.register_profile("counterpoint", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None)
settings.load_profile("counterpoint")

sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
