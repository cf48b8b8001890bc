"""Python's start-up hook inside a supervised job: tells the agent of each optimizer step, then runs the next start-up hook.

Python imports a module of this name from the search path when it starts. `counterpoint run` puts this folder first. This
file removes the folder again, waits until `torch.optim.optimizer` is imported, registers torch's global hook there, and
then runs the `sitecustomize` that would have run otherwise. It uses only the standard library until a step has ended,
because the job may use another Python.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # the same value as in `typing`, which would slow every start of Python
    from collections.abc import Callable, Sequence
    from types import ModuleType
    from typing import Any

AWAITED = "torch.optim.optimizer"
QUEUES, CONNECTIONS = "COUNTERPOINT_QUEUES", "CUDA_DEVICE_MAX_CONNECTIONS"
# launchers set one of them for each rank (as in `counterpoint.ranks`)
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")


def report(problem: Exception) -> None:
    """Print one line on why the agent does not run; the job goes on."""
    reason = " ".join(f"{type(problem).__name__}: {problem}".split())[:200]
    print(f"counterpoint: the agent cannot run in this process ({reason}); the job runs without it", file=sys.stderr)


class OptimizerWatch:
    """Called after each optimizer step. It stays registered when its work is done, because torch forbids removing it
    from within.
    """

    def __init__(self) -> None:
        self.is_done = self.is_hooked = False
        self.begun_by = 0  # the id of the optimizer whose step has begun, until that step is told
        os.register_at_fork(after_in_child=self.forked)

    def forked(self) -> None:
        """Go on in a forked child, even if the parent was no rank; its agent may not be needed either."""
        self.is_done = False

    def register(self, module: Any) -> None:
        """Register with torch, also for new optimizers: torch has no hook for those, so `__init__` is wrapped.

        The hooks follow with the first optimizer, since torch is not complete yet.
        """
        make = module.Optimizer.__init__

        @functools.wraps(make)
        def make_and_tell(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            make(optimizer, *args, **kwargs)
            if not self.is_hooked:
                self.hook(module)
            if not self.is_done:
                self.tell(lambda agent: agent.optimizer_made())

        module.Optimizer.__init__ = make_and_tell

    def hook(self, module: Any) -> None:
        """Register for the steps of all optimizers."""
        self.is_hooked = True
        try:
            module.register_optimizer_step_pre_hook(_not_traced(module.torch, self.begun))
            module.register_optimizer_step_post_hook(_not_traced(module.torch, self.stepped))
        except Exception as problem:
            self.is_done = True
            report(problem)

    def begun(self, optimizer: object) -> None:
        """Note that a step has begun. The `step` of a subclass may call the one that it overrides: torch calls hooks for
        both, and only the first that ends is told.
        """
        self.begun_by = id(optimizer)

    def stepped(self, optimizer: object) -> None:
        """Pass the step on to the agent."""
        is_told = self.begun_by != id(optimizer)
        self.begun_by = 0
        if not self.is_done and not is_told:
            self.tell(lambda agent: agent.optimizer_stepped(optimizer))

    def tell(self, what: Callable[[Any], None]) -> None:
        """Call the agent, which never raises."""
        try:
            from counterpoint.supervised.agent import agent_of_job  # noqa: PLC0415  at the first step, not at start-up

            agent = agent_of_job()
        except Exception as problem:
            self.is_done = True
            report(problem)
            return
        what(agent)
        self.is_done = agent.is_retired


def _not_traced(torch: Any, call: Callable[[object], None]) -> Callable[[object, object, object], None]:
    """Return a hook of optimizers that torch.compile does not trace: it calls `call` between two graphs.

    torch's own optimizers break the graph anyway. Others may be compiled whole, and their compiled steps are not told.
    """
    is_compiling = getattr(torch.compiler, "is_compiling", None) if hasattr(torch, "compiler") else None
    if is_compiling is None:  # an old torch
        return lambda optimizer, _args, _kwargs: call(optimizer)
    outside_graphs = torch.compiler.disable(call)

    def hook(optimizer: object, _args: object, _kwargs: object) -> None:
        if not is_compiling() or type(optimizer).__module__.startswith("torch."):
            outside_graphs(optimizer)

    return hook


class AwaitedImport:
    """A finder that finds nothing itself, but notices the import of `torch.optim.optimizer` and has its loader call
    back.
    """

    def __init__(self, on_import: Callable[[ModuleType], None]) -> None:
        self.on_import = on_import

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the awaited module with the other finders, once; return None for any other module."""
        if name != AWAITED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)  # knows what Python asks of finders that have no `find_spec`
        if spec is not None:
            try:
                self.follow(spec.loader)
            except Exception as problem:
                report(problem)
        return spec

    def follow(self, loader: Any) -> None:
        """Call back when the loader has run the module; afterwards the loader is as it was."""
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            run(module)
            try:
                self.on_import(module)
            except Exception as problem:
                report(problem)

        loader.exec_module = exec_module


def leave_path() -> None:
    """Remove this folder from the search path; the environment still names it for child processes."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if not entry or os.path.abspath(entry) != here]


def set_queues() -> None:
    """Tell CUDA how many hardware queues a rank has. CUDA reads the process's environment, of which Python made a copy at
    its start. So the job still finds its own value, which some frameworks check; if it sets one, only the copy changes.
    """
    number = os.environ.get(QUEUES)
    if number and any(name in os.environ for name in RANKS):
        import ctypes  # noqa: PLC0415  only where it is needed: it would slow every start

        ctypes.CDLL(None).setenv(CONNECTIONS.encode(), number.encode(), 1)
        os.putenv = _but_for_queues(os.putenv)  # which os.environ calls
        os.unsetenv = _but_for_queues(os.unsetenv)


def _but_for_queues(change: Callable[..., None]) -> Callable[..., None]:
    """Return a function that changes the process's environment, except for the number of queues."""

    def change_others(name: str | bytes, *value: str | bytes) -> None:
        if os.fsencode(name) != CONNECTIONS.encode():
            change(name, *value)

    return change_others


def run_next() -> None:
    """Run the start-up hook that this one hides; Python reports its errors as it would otherwise."""
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


leave_path()
if os.environ.get("COUNTERPOINT_FILTER_DIRECTORY"):
    set_queues()
    sys.meta_path.insert(0, AwaitedImport(OptimizerWatch().register))
run_next()
