"""Python's start-up hook inside a supervised job: tells the agent of each optimizer step, then runs the next start-up hook.

Python imports a module of this name from the search path when it starts. `counterpoint run` puts this folder in front;
this file takes it out again, waits for `torch.optim.optimizer` to be imported, registers torch's global hook there, and
hands over to the `sitecustomize` that would have run without us. Only the standard library is used until a step has
ended, because the job's Python need not be ours.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # as `typing` has it, which every start of Python would have to load
    from collections.abc import Callable, Sequence
    from types import ModuleType
    from typing import Any

AWAITED = "torch.optim.optimizer"


def report(problem: Exception) -> None:
    """Say in one line why the agent does not run; the job does."""
    reason = " ".join(f"{type(problem).__name__}: {problem}".split())[:200]
    print(f"counterpoint: the agent cannot run in this process ({reason}); the job runs without it", file=sys.stderr)


class OptimizerWatch:
    """Called after each optimizer step. It stays registered when its work is done: torch forbids leaving from within."""

    def __init__(self) -> None:
        self.is_done = False

    def register(self, module: Any) -> None:
        """Ask torch to be called, also when an optimizer is made: torch has no hook for that, so `__init__` is wrapped."""
        module.register_optimizer_step_post_hook(self.stepped)
        make = module.Optimizer.__init__

        @functools.wraps(make)
        def make_and_tell(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            make(optimizer, *args, **kwargs)
            if not self.is_done:
                self.tell(lambda agent: agent.optimizer_made())

        module.Optimizer.__init__ = make_and_tell

    def stepped(self, optimizer: object, _args: object, _kwargs: object) -> None:
        """Hand the step on to the agent."""
        if not self.is_done:
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


class AwaitedImport:
    """A finder that finds nothing, but sees `torch.optim.optimizer` being looked for, and has its loader call back."""

    def __init__(self, on_import: Callable[[ModuleType], None]) -> None:
        self.on_import = on_import

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the awaited module as the others would, once; say nothing about any other."""
        if name != AWAITED:
            return None
        sys.meta_path.remove(self)
        for finder in list(sys.meta_path):
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                try:
                    self.follow(spec.loader)
                except Exception as problem:
                    report(problem)
                return spec
        return None

    def follow(self, loader: Any) -> None:
        """Call back when the loader has run the module; afterwards it is as it was."""
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
    """Take this folder out of the search path, so that only the environment still names it, for processes to come."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if not entry or os.path.abspath(entry) != here]


def run_next() -> None:
    """Run the start-up hook that this one stands in front of; its errors are Python's to report, as without us."""
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


leave_path()
if os.environ.get("COUNTERPOINT_FILTER_DIRECTORY"):
    sys.meta_path.insert(0, AwaitedImport(OptimizerWatch().register))
run_next()
