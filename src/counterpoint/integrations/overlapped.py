"""The object that `overlap` of tensor and expert parallelism returns: it switches, undoes, counts and prints."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import UnionType
from typing import Any, final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from counterpoint.display import capped
from counterpoint.errors import IntegrationError
from counterpoint.integrations.closures import Hook
from counterpoint.integrations.lane_collectives import require_switch, warn_from_first_rank
from counterpoint.integrations.parallel_linears import ParallelForward, SharedInput
from counterpoint.integrations.switched_hooks import Switch, unless_local
from counterpoint.ops.graph_cache import CONNECTIONS, LEAST_CONNECTIONS, num_connections
from counterpoint.ops.operator_call import CallCounts, calls_of, expert_calls_of
from counterpoint.units import format_bytes, format_count
from counterpoint.value import require

FEW_QUEUES = (
    f"{CONNECTIONS} is %d, so copies of operators wait for matmuls. Unset it if the job allows, since operators replace the "
    "collectives for whose order it is set; or start the job by `counterpoint run --queues 8`."
)
Figures = tuple[int, int, int, int, int]  # calls by copies, by the library, bytes, replayed calls, original modules


@final
class Overlapped:
    """The state of `overlap`: names of the modules it took, and of those it refused with the reason.

    The modules are linears, or experts of layers. Counts cover the groups in which they communicate, since `overlap`: all
    operators for linears, or for experts, in these groups, including those of other models. Calls while it is off are not
    counted, because compiled code then contains nothing of Counterpoint's.
    """

    def __init__(self, *, is_on: bool, of_experts: bool = False, keeps_tokens: bool = False) -> None:
        require_switch(is_on=is_on, keeps_tokens=keeps_tokens)
        self._noun, self._keeps_tokens = "expert layer" if of_experts else "linear", keeps_tokens
        self._calls_of = expert_calls_of if of_experts else calls_of
        self.taken: list[str] = []
        self.refused: dict[str, str] = {}
        self.switch = Switch(is_on=is_on)
        self._undo: list[Callable[[], object]] = []
        self._counts: dict[str, tuple[CallCounts, Figures, Counter[str]]] = {}
        self._is_undone = False

    @property
    def is_on(self) -> bool:
        """Whether the modules run operators."""
        return self.switch.is_on

    @property
    def num_by_copies(self) -> int:
        """The number of operator calls, forward and backward, whose rows went by copies."""
        return self._since(0)

    @property
    def num_by_library(self) -> int:
        """The number of operator calls, forward and backward, that ran the library's collective."""
        return self._since(1)

    @property
    def num_in_operators(self) -> int:
        """The number of calls by the library in which an operator ran the library's collective, and not the original
        module.
        """
        return self._since(1) - self._since(4)

    @property
    def library_reason(self) -> str:
        """Why the library ran most of the calls that it ran since `overlap`; empty if it ran none."""
        counts = Counter[str]()
        for calls, _, before in self._counts.values():
            counts.update(Counter(calls.by_reason) - before)
        return max(counts, key=lambda reason: counts[reason], default="")

    @property
    def num_bytes(self) -> int:
        """The bytes that this rank sent by copies."""
        return self._since(2)

    @property
    def num_replayed(self) -> int:
        """The number of calls by copies that were replayed from a recording, which takes the host less."""
        return self._since(3)

    @property
    def most_kept_bytes(self) -> int:
        """The most bytes that one call of experts made in forward for its backward pass: results, inputs of the activation
        and, if they are kept, the tokens that arrived.
        """
        return max((calls.most_kept_bytes for calls, _, _ in self._counts.values()), default=0)

    def use(self, is_on: bool) -> None:
        """Let the modules run operators, or do exactly what they did before `overlap`. Call it between steps, on every
        rank.

        It costs nothing in eager mode. Under torch.compile, code is compiled once for each of the two states; later
        switches do not recompile. Raises `IntegrationError` after `undo`.
        """
        require_switch(is_on=is_on)
        require(
            not self._is_undone,
            IntegrationError,
            f"This overlap was undone, so it has no {self._noun}s. Call overlap again.",
        )
        self.switch.is_on = is_on

    def undo(self) -> None:
        """Restore the original modules for good. Call it between steps, on every rank."""
        for action in reversed(self._undo):
            action()
        self._undo.clear()
        self.taken.clear()
        self.switch.is_on, self._is_undone = False, True

    def require_new(self, modules: Iterable[tuple[str, nn.Module]], kinds: type | UnionType) -> None:
        """Raise `IntegrationError` if one of the modules already has a `forward` of an object of these kinds."""
        twice = next((name for name, each in modules if is_overlapped(each, kinds)), None)
        require(
            twice is None,
            IntegrationError,
            f"{twice or f'This {self._noun}'} is already overlapped. Keep the object that the first overlap() returned, or "
            "call its undo() first.",
        )

    def take(self, name: str, module: nn.Module, run: Callable[..., Any], group_name: str) -> None:
        """Give a module another `forward`, whose operators run in this group."""
        counts = self._calls_of(group_name)
        self._counts.setdefault(group_name, (counts, _figures(counts), Counter(counts.by_reason)))
        self.taken.append(name)
        self.exchange_forward(module, run)

    def leave_counts_to(self, others: Iterable["Overlapped"]) -> None:
        """Leave the counts of groups to these, where they count them already."""
        for each in others:
            for group_name in each._counts:
                self._counts.pop(group_name, None)

    def exchange_forward(self, module: nn.Module, run: Callable[..., Any]) -> None:
        """Give a module another `forward`; `undo` leaves it if the job has wrapped it since: off, it runs the original."""
        self.exchange(vars(module), "forward", run)

    def exchange(self, held: dict[str, Any], name: str, run: Callable[..., Any]) -> None:
        """Put a function in another's place, or before that of a class, until `undo`."""
        earlier = held.get(name)
        held[name] = run
        self._undo.append(partial(_put_back, held, (name, run, earlier)))

    def replace_forward(self, name: str, linear: nn.Linear, forward: ParallelForward) -> None:
        """Give a linear another `forward`, whose result may be local already."""
        self.take(name, linear, forward.run, forward.layout.mesh.get_group().group_name)
        key = forward.layout.output_hook
        if key is not None:
            self.replace_hook(linear._forward_hooks, key, unless_local(linear._forward_hooks[key]))

    def replace_hook(self, hooks: dict[int, Hook], key: int, hook: Hook) -> None:
        """Put a hook in another's place."""
        earlier = hooks[key]
        hooks[key] = hook
        self._undo.append(partial(_put_back, hooks, (key, hook, earlier)))

    def add_hook(self, handle: RemovableHandle) -> None:
        """Remove a hook in `undo`."""
        self._undo.append(handle.remove)

    def finish_with(self, module: nn.Module, shared: SharedInput) -> None:
        """Tell the linears of a module when its forward pass is over.

        A hook that is always called, even after an error, is not used: dynamo guards on the number of such hooks, and
        would compile every block anew.
        """
        self.add_hook(module.register_forward_hook(shared.finish))

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Undo what was taken over within the block if the block fails."""
        try:
            yield
        except BaseException:
            self.undo()
            raise

    def require_taken(self, none: str) -> None:
        """Raise `IntegrationError`, with the first reason, if nothing was taken; `none` names what was searched."""
        first = next((f"{name or 'the module'}: {reason}" for name, reason in self.refused.items()), "")
        require(bool(self.taken), IntegrationError, f"{none} can be overlapped: {first}.")

    def say_obstacles(self) -> None:
        """Log why modules stay unchanged, once for each reason, and what keeps operators from overlapping."""
        for reason, names in self._by_reason().items():
            stay = "stays unchanged" if len(names) == 1 else "stay unchanged"
            warn_from_first_rank("%s %s: %s.", _shortened(names), stay, reason)
        if torch.cuda.is_available() and num_connections() < LEAST_CONNECTIONS:
            warn_from_first_rank(FEW_QUEUES, num_connections())

    def __repr__(self) -> str:
        if self._is_undone:
            return f"overlap: undone, so every {self._noun} runs as originally."
        state = "on" if self.is_on else "off"
        lines = [f"overlap: {state} for {format_count(len(self.taken), self._noun)}: {_shortened(self.taken)}"]
        lines += [f"  refused: {_shortened(names)}: {reason}" for reason, names in self._by_reason().items()]
        by_copies, by_library = (format_count(number, "call") for number in (self.num_by_copies, self.num_by_library))
        sent = format_bytes(self.num_bytes)
        why = f" ({self.library_reason})" if self.num_by_library else ""
        replayed = f" ({self.num_replayed:,} replayed from recordings)" if self.num_replayed else ""
        counts = f"  {by_copies} by copies{replayed}, which sent {sent} from this rank; {by_library} by the library{why}"
        kept = f"  arrived tokens are kept: a call makes up to {format_bytes(self.most_kept_bytes)} for its backward pass"
        return capped("\n".join([*lines, counts, *[kept] * self._keeps_tokens]))

    def _since(self, figure: int) -> int:
        return sum(_figures(counts)[figure] - before[figure] for counts, before, _ in self._counts.values())

    def _by_reason(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name, reason in self.refused.items():
            found.setdefault(reason, []).append(name or "the module")
        return found


def is_overlapped(module: nn.Module, kinds: type | UnionType) -> bool:
    """Return whether a module's `forward` is that of an object of these kinds."""
    return isinstance(getattr(vars(module).get("forward"), "__self__", None), kinds)


def _put_back(held: dict[Any, Any], exchanged: tuple[Any, Any, Any]) -> None:
    """Undo an exchange, given as key, value and earlier value (None: there was none), if the value is still there."""
    key, ours, earlier = exchanged
    if held.get(key) is not ours:
        return
    if earlier is None:
        del held[key]
    else:
        held[key] = earlier


def _figures(counts: CallCounts) -> Figures:
    return counts.num_by_copies, counts.num_by_library, counts.num_bytes, counts.num_replayed, counts.num_original


def _shortened(names: Iterable[str]) -> str:
    """Merge names that differ only in numbers, with their count."""
    counted: dict[str, int] = {}
    for name in names:
        pattern = re.sub(r"(^|(?<=\.))\d+(?=\.|$)", "*", name)
        counted[pattern] = counted.get(pattern, 0) + 1
    return ", ".join(f"{pattern} ({number})" if number > 1 else pattern for pattern, number in counted.items())
