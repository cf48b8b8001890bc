"""The switch of an overlapped model, and replacements of the hooks that a framework registered; while the switch is off,
they call the originals.

torch.compile guards on what these functions read, so they read the switch and otherwise only constants.
"""

import copy
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any, final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from counterpoint.integrations.closures import Hook
from counterpoint.integrations.layouts import Boundary, GatheringHook, LinearLayout
from counterpoint.ops.dispatch import is_observed


@final
class Switch:
    """Whether the linears of a model run operators; a copy of the model has the same one.

    A job may switch between a forward pass and its backward pass, or within the latter, where optimizers step. What
    checkpointing runs again in the backward pass then does what it did in the forward pass.
    """

    def __init__(self, *, is_on: bool) -> None:
        self.is_on = self._was_on = is_on
        self.is_watching = False
        self.has_second_derivatives = False  # seen while `is_watching`, in eager code

    def watch(self, output: torch.Tensor) -> torch.Tensor:
        """Return what an original forward gave. While `is_watching`, see whether its gradients are differentiated again."""
        if not torch.compiler.is_compiling() and self.is_watching and output.requires_grad and not is_observed():
            output.register_hook(self._look)
        return output

    def _look(self, _gradient: torch.Tensor) -> None:
        self.has_second_derivatives |= torch.is_grad_enabled()  # only a backward pass with create_graph records gradients

    @property
    def holds(self) -> bool:
        """Whether the part of the model that asks runs operators now."""
        if torch.compiler.is_compiling():
            return self.is_on
        if not is_in_backward():
            self._was_on = self.is_on
        return self._was_on

    def __deepcopy__(self, _memo: dict[int, Any]) -> "Switch":
        return self


def is_in_backward() -> bool:
    """Return whether a backward pass runs in this thread."""
    return int(torch._C._current_graph_task_id()) != -1


def keep_sharded(found: GatheringHook, earlier: Hook, switch: Switch) -> Callable[..., Any]:
    """Replace a module's gathering hook by one that does everything but the gather."""
    style, mesh, positions = found.style, found.mesh, found.positions

    def prepare(module: nn.Module, inputs: tuple[Any, ...]) -> Any:
        if not switch.holds:
            return earlier(module, inputs)
        prepared = list(inputs)
        for position, given in enumerate(inputs[: len(style.input_layouts)]):
            layout = style.input_layouts[position]
            if position not in positions:
                prepared[position] = style._prepare_input_arg(given, mesh, layout, style.desired_input_layouts[position])
            elif not isinstance(given, DTensor):
                prepared[position] = DTensor.from_local(given, mesh, (layout,), run_check=False)
        return tuple(prepared)

    return prepare


def keep_inputs_sharded(module: Any, found: Boundary, switch: Switch) -> Callable[..., Any]:
    """Replace the function by which torchtitan 0.3 redistributes a module's inputs: it does everything but the gather."""
    earlier, leave = module._redistribute_inputs, unchanged_inputs_of(module, found.gathered)

    def prepare(parallel_dims: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if not switch.holds:
            return earlier(parallel_dims, inputs, named)
        return leave(parallel_dims, inputs, named)

    return prepare


def unchanged_inputs_of(module: Any, names: Iterable[str]) -> Callable[..., Any]:
    """Return the function by which torchtitan 0.3 redistributes a module's inputs, without those of these names."""
    redistribute, config = type(module)._redistribute_inputs, module._sharding_config
    changed = copy.copy(config)
    changed.in_dst_shardings = config.in_dst_shardings | {name: config.in_src_shardings[name] for name in names}
    alike = SimpleNamespace(_sharding_config=changed, _cache_pos_arg_names=module._cache_pos_arg_names)
    return partial(redistribute, alike)


def annotate(layout: LinearLayout, earlier: Hook, switch: Switch) -> Callable[..., Any]:
    """Replace the hook of a linear that gathers its own input: only the layout is recorded; in eager code the linear
    knows it.
    """
    mesh, layouts = layout.mesh, layout.input_layouts

    def prepare(module: nn.Module, inputs: tuple[Any, ...]) -> Any:
        if not switch.holds:
            return earlier(module, inputs)
        if not torch.compiler.is_compiling():
            return None
        given = inputs[0]
        return given if isinstance(given, DTensor) else DTensor.from_local(given, mesh, layouts, run_check=False)

    return prepare


def pass_on(earlier: Hook, switch: Switch) -> Callable[..., Any]:
    """Replace a hook by one that leaves inputs or outputs as they are: `forward` needs them so, or does the hook's work."""

    def hook(*arguments: Any) -> Any:
        return None if switch.holds else earlier(*arguments)

    return hook


def unless_local(earlier: Hook) -> Hook:
    """Replace a hook that makes outputs local: outputs that are local already pass through."""

    def convert(module: nn.Module, inputs: tuple[Any, ...], outputs: torch.Tensor) -> Any:
        return earlier(module, inputs, outputs) if isinstance(outputs, DTensor) else outputs

    return convert
