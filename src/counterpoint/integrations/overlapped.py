"""What `overlap` of tensor and expert parallelism put in place: it is switched, undone, counted and printed here."""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, final

from torch import nn
from torch.utils.hooks import RemovableHandle

from counterpoint.errors import IntegrationError
from counterpoint.integrations.lane_collectives import warn_from_first_rank
from counterpoint.integrations.layouts import Hook
from counterpoint.integrations.parallel_linears import ParallelForward, SharedInput, Switch
from counterpoint.integrations.switched_hooks import unless_local
from counterpoint.ops.operator_call import CallCounts, calls_of
from counterpoint.units import format_bytes, format_count
from counterpoint.value import require


@final
class Overlapped:
    """What `overlap` put in place: names of the modules it took, and of those it refused with the reason.

    `noun` says what these modules are: linears, or experts of a layer. Counts are of the groups that they communicate in,
    since `overlap`: of all operators of these groups, those of other models included. Calls while it is off are not counted:
    compiled code then holds nothing of ours.
    """

    def __init__(self, *, is_on: bool, noun: str = "linear") -> None:
        self._noun = noun
        self.taken: list[str] = []
        self.refused: dict[str, str] = {}
        self.switch = Switch(is_on=is_on)
        self._undo: list[Callable[[], object]] = []
        self._counts: dict[str, tuple[CallCounts, tuple[int, int, int], Counter[str]]] = {}
        self._is_undone = False

    @property
    def is_on(self) -> bool:
        """Whether the modules run operators."""
        return self.switch.is_on

    @property
    def num_by_copies(self) -> int:
        """Calls of operators, forward and backward, whose rows went by copies."""
        return self._since(0)

    @property
    def num_by_library(self) -> int:
        """Calls of operators, forward and backward, that ran the library's collective."""
        return self._since(1)

    @property
    def library_reason(self) -> str:
        """Why the library ran most of the calls that it ran since `overlap`; empty where it ran none."""
        counts = Counter[str]()
        for calls, _, before in self._counts.values():
            counts.update(Counter(calls.by_reason) - before)
        return max(counts, key=lambda reason: counts[reason], default="")

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank sent by copies."""
        return self._since(2)

    def use(self, is_on: bool) -> None:
        """Let the modules run operators, or do just what they did before `overlap`. Call it between steps, on every rank.

        It costs nothing in eager mode. Code that torch.compile made is compiled once for each of the two states; from then
        on a switch costs no compilation. Raises `IntegrationError` after `undo`.
        """
        require(
            isinstance(is_on, bool),
            IntegrationError,
            f"use() takes True or False; found one of type {type(is_on).__name__}. Give one of them.",
        )
        require(
            not self._is_undone,
            IntegrationError,
            f"This overlap was undone, so it has no {self._noun}s. Call overlap again.",
        )
        self.switch.is_on = is_on

    def undo(self) -> None:
        """Let everything run as before, for good. Call it between steps, on every rank."""
        for action in reversed(self._undo):
            action()
        self._undo.clear()
        self.taken.clear()
        self.switch.is_on, self._is_undone = False, True

    def take(self, name: str, module: nn.Module, run: Callable[..., Any], group_name: str) -> None:
        """Give a module another `forward`, whose operators run in this group."""
        counts = calls_of(group_name)
        self._counts.setdefault(group_name, (counts, _figures(counts), Counter(counts.by_reason)))
        self.taken.append(name)
        self.exchange_forward(module, run)

    def exchange_forward(self, module: nn.Module, run: Callable[..., Any]) -> None:
        """Give a module another `forward`."""
        earlier = vars(module).get("forward")
        vars(module)["forward"] = run
        self._undo.append(
            partial(vars(module).pop, "forward") if earlier is None else partial(vars(module).update, forward=earlier)
        )

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
        self._undo.append(partial(hooks.__setitem__, key, earlier))

    def add_hook(self, handle: RemovableHandle) -> None:
        """Remove a hook in `undo`."""
        self._undo.append(handle.remove)

    def finish_with(self, module: nn.Module, shared: SharedInput) -> None:
        """Tell the linears of a module when its forward pass is over.

        Not by an error, for of hooks that are always called dynamo guards on the number, and compiles every block anew.
        """
        self.add_hook(module.register_forward_hook(shared.finish))

    def require_taken(self, none: str) -> None:
        """Raise `IntegrationError`, with the first reason, where nothing was taken; `none` says what was looked for."""
        first = next((f"{name or 'the module'}: {reason}" for name, reason in self.refused.items()), "")
        require(bool(self.taken), IntegrationError, f"{none} can be served: {first}.")

    def say_refused(self) -> None:
        """Log why modules stay as they are, once for each reason."""
        for reason, names in self._by_reason().items():
            stay = "stays as it is" if len(names) == 1 else "stay as they are"
            warn_from_first_rank("%s %s: %s.", _shortened(names), stay, reason)

    def __str__(self) -> str:
        if self._is_undone:
            return f"overlap: undone, so every {self._noun} runs as before."
        state = "on" if self.is_on else "off"
        lines = [f"overlap: {state} for {format_count(len(self.taken), self._noun)}: {_shortened(self.taken)}"]
        lines += [f"  refused: {_shortened(names)}: {reason}" for reason, names in self._by_reason().items()]
        by_copies, by_library = (format_count(number, "call") for number in (self.num_by_copies, self.num_by_library))
        sent = format_bytes(self.num_bytes)
        why = f" ({self.library_reason})" if self.num_by_library else ""
        ran = f"  {by_copies} by copies, which sent {sent} from this rank; {by_library} by the library{why}"
        return "\n".join([*lines, ran])

    def _since(self, figure: int) -> int:
        return sum(_figures(counts)[figure] - before[figure] for counts, before, _ in self._counts.values())

    def _by_reason(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name, reason in self.refused.items():
            found.setdefault(reason, []).append(name or "the module")
        return found


def _figures(counts: CallCounts) -> tuple[int, int, int]:
    return counts.num_by_copies, counts.num_by_library, counts.num_bytes


def _shortened(names: Iterable[str]) -> str:
    """Names that differ in numbers only as one, with how many they are."""
    counted: dict[str, int] = {}
    for name in names:
        pattern = re.sub(r"(^|(?<=\.))\d+(?=\.|$)", "*", name)
        counted[pattern] = counted.get(pattern, 0) + 1
    return ", ".join(f"{pattern} ({number})" if number > 1 else pattern for pattern, number in counted.items())
