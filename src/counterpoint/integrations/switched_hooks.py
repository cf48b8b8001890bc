"""Replacements of the hooks that `parallelize_module` registered; while a model's switch is off, they call the
originals.

torch.compile guards on what these functions read, so they read the switch and otherwise only constants.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from counterpoint.integrations.layouts import GatheringHook, Hook, LinearLayout
from counterpoint.integrations.parallel_linears import Switch


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


def leave_local(earlier: Hook, switch: Switch) -> Callable[..., Any]:
    """Replace a hook that turns an input into a DTensor, if the local tensor is needed."""

    def prepare(module: nn.Module, inputs: tuple[Any, ...]) -> Any:
        return None if switch.holds else earlier(module, inputs)

    return prepare


def unless_local(earlier: Hook) -> Hook:
    """Replace a hook that makes outputs local: outputs that are local already pass through."""

    def convert(module: nn.Module, inputs: tuple[Any, ...], outputs: torch.Tensor) -> Any:
        return earlier(module, inputs, outputs) if isinstance(outputs, DTensor) else outputs

    return convert
