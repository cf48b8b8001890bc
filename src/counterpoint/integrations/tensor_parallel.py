"""Eager tensor parallelism with sequence shards, whose gathers and reductions hide behind its own matmuls.

    parallelize_module(block, mesh, plan)      # with inputs and outputs sharded along the sequence
    overlapped = tensor_parallel.overlap(block)
    ...
    overlapped.undo()

Column-parallel linears become all-gather + matmul, row-parallel ones matmul + reduce-scatter, forward and backward, without
torch.compile. Those that are neighbors in a module (q, k and v; gate and up) are taken to have the same input and share one
gather; where that proves wrong they part, with no harm to results. A module that cannot be served stays as it was, and
`refused` and the log say why.

Inputs that `PrepareModuleInput` gathered arrive as sharded DTensors of the same shape; whatever else a module does with
them, DTensor gathers itself. With FSDP2 call `overlap` first and `fully_shard` after it.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, final

import msgspec
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from counterpoint.errors import IntegrationError
from counterpoint.integrations.layouts import (
    GatheringHook,
    Hook,
    LinearLayout,
    gathering_hook,
    is_sequence,
    linear_layout,
)
from counterpoint.integrations.parallel_linears import ColumnwiseForward, RowwiseForward, SharedInput
from counterpoint.schedule import ScheduleDescription
from counterpoint.value import require

logger = logging.getLogger("counterpoint")


@final
class Overlapped:
    """What `overlap` put in place: names of the linears it took, and of those it refused with the reason."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.refused: dict[str, str] = {}
        self._undo: list[Callable[[], object]] = []

    def undo(self) -> None:
        """Let everything run as before. Call it between steps, on every rank."""
        for action in reversed(self._undo):
            action()
        self._undo.clear()
        self.taken.clear()

    def replace_forward(self, name: str, linear: nn.Linear, forward: ColumnwiseForward | RowwiseForward) -> None:
        """Give a linear another `forward`, whose result may be local already."""
        self.taken.append(name)
        vars(linear)["forward"] = forward
        self._undo.append(lambda: vars(linear).pop("forward"))
        key = forward.layout.output_hook
        self.replace_hook(linear._forward_hooks, key, _unless_local(linear._forward_hooks[key]))

    def replace_hook(self, hooks: dict[int, Hook], key: int, hook: Hook) -> None:
        """Put a hook in another's place."""
        earlier = hooks[key]
        hooks[key] = hook
        self._undo.append(partial(hooks.__setitem__, key, earlier))

    def finish_with(self, module: nn.Module, shared: SharedInput) -> None:
        """Tell the linears of a module when its forward pass is over, also by an error."""
        self._undo.append(module.register_forward_hook(shared.finish, always_call=True).remove)

    def refuse(self, name: str, reason: str) -> None:
        """Note and say why a linear stays as it is."""
        self.refused[name] = reason
        logger.warning("counterpoint: %s stays as it is: %s.", name or "the module", reason)


def overlap(module: nn.Module, *, schedule: ScheduleDescription | None = None) -> Overlapped:
    """Let the tensor-parallel linears within `module` communicate beside their own matmuls; on every rank.

    `schedule` overrides the heuristic for all of them. Raises `IntegrationError` if there is none that can be served.
    """
    require(
        isinstance(module, nn.Module),
        IntegrationError,
        f"overlap() takes a module that parallelize_module has split; found one of type {type(module).__name__}. "
        "Give the model.",
    )
    require(
        schedule is None or isinstance(schedule, ScheduleDescription),
        IntegrationError,
        f"schedule takes a ScheduleDescription or None; found one of type {type(schedule).__name__}. Make one: "
        'ScheduleDescription(pattern="ring").',
    )
    text = "" if schedule is None else msgspec.json.encode(schedule).decode()
    overlapped = Overlapped()
    linears = [(name, each) for name, each in module.named_modules() if _is_parallel(each)]
    require(
        bool(linears),
        IntegrationError,
        f"{type(module).__name__} has no linear that parallelize_module has split. Parallelize it first.",
    )
    gathering = {name: found for name, each in module.named_modules() if (found := gathering_hook(each))}
    shared = {name: SharedInput() for name in gathering}
    columns: dict[str, ColumnwiseForward] = {}
    for name, linear in linears:
        layout = linear_layout(linear)
        if isinstance(layout, str):
            overlapped.refuse(name, layout)
        elif layout.kind == "row":
            _take_row(overlapped, name, linear, (layout, text))
        else:
            column = _take_column(overlapped, name, linear, (layout, _nearest(name, shared), text))
            if column is not None:
                columns[name] = column
    _join_neighbors(columns, shared)
    for name, hook in gathering.items():
        if any(_nearest(taken, shared) is shared[name] for taken in overlapped.taken):
            container = module.get_submodule(name)
            overlapped.replace_hook(container._forward_pre_hooks, hook.key, _keep_sharded(hook))
            overlapped.finish_with(container, shared[name])
    require(
        bool(overlapped.taken),
        IntegrationError,
        f"No linear of {type(module).__name__} can be served: "
        + "; ".join(f"{name}: {reason}" for name, reason in list(overlapped.refused.items())[:1])
        + ".",
    )
    return overlapped


def _take_row(overlapped: Overlapped, name: str, linear: nn.Linear, rest: tuple[LinearLayout, str]) -> None:
    layout, schedule = rest
    if not is_sequence(layout.output_layouts[0]):
        overlapped.refuse(
            name,
            f"its output is {layout.output_layouts[0]}, and an output sharded along the sequence is served. Give "
            "RowwiseParallel output_layouts=Shard(1)",
        )
    elif layout.input_layouts != (Shard(-1),):
        overlapped.refuse(name, f"its input is {layout.input_layouts[0]}, and Shard(-1) is served. Leave out input_layouts")
    else:
        overlapped.replace_forward(name, linear, RowwiseForward(linear, layout, schedule))
        overlapped.replace_hook(linear._forward_pre_hooks, layout.input_hook, _as_it_is)


def _take_column(
    overlapped: Overlapped, name: str, linear: nn.Linear, rest: tuple[LinearLayout, SharedInput | None, str]
) -> ColumnwiseForward | None:
    """Take a column-parallel linear; the result is one that may have neighbors."""
    layout, shared, schedule = rest
    if is_sequence(layout.input_layouts[0]):
        alone = SharedInput()
        overlapped.replace_forward(name, linear, ColumnwiseForward(linear, layout, alone, schedule))
        overlapped.replace_hook(linear._forward_pre_hooks, layout.input_hook, _annotate(layout))
        overlapped.finish_with(linear, alone)
    elif shared is not None:
        column = ColumnwiseForward(linear, layout, shared, schedule)
        overlapped.replace_forward(name, linear, column)
        return column
    else:
        overlapped.refuse(
            name,
            "its input comes whole, so there is nothing to gather. Give the module around it "
            "PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())",
        )
    return None


def _join_neighbors(columns: dict[str, ColumnwiseForward], shared: dict[str, SharedInput]) -> None:
    """Linears of one parent, with the same input features and type."""
    neighbors: dict[tuple[object, ...], list[tuple[str, ColumnwiseForward]]] = {}
    for name, column in columns.items():
        weight = column.local_weight()
        key = (name.rpartition(".")[0], weight.shape[1], weight.dtype)
        neighbors.setdefault(key, []).append((name, column))
    for members in neighbors.values():
        found = _nearest(members[0][0], shared)
        if len(members) > 1 and found is not None:
            found.join([column for _, column in members])


def _nearest(name: str, shared: dict[str, SharedInput]) -> SharedInput | None:
    """Of the innermost module around `name` that gathers its inputs."""
    around = [outer for outer in shared if not outer or name == outer or name.startswith(f"{outer}.")]
    return shared[max(around, key=len)] if around else None


def _keep_sharded(hook: GatheringHook) -> Callable[..., tuple[Any, ...]]:
    """What takes the place of a gathering hook: the same but for the gathering."""
    style, mesh = hook.style, hook.mesh

    def prepare(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        prepared = list(inputs)
        for position, given in enumerate(inputs[: len(style.input_layouts)]):
            layout = style.input_layouts[position]
            if position not in hook.positions:
                prepared[position] = style._prepare_input_arg(given, mesh, layout, style.desired_input_layouts[position])
            elif not isinstance(given, DTensor):
                prepared[position] = DTensor.from_local(given, mesh, (layout,), run_check=False)
        return tuple(prepared)

    return prepare


def _annotate(layout: LinearLayout) -> Callable[..., DTensor]:
    """What takes the place of a linear's own gathering hook."""

    def prepare(_module: nn.Module, inputs: tuple[Any, ...]) -> DTensor:
        given = inputs[0]
        return (
            given
            if isinstance(given, DTensor)
            else DTensor.from_local(given, layout.mesh, layout.input_layouts, run_check=False)
        )

    return prepare


def _as_it_is(_module: nn.Module, _inputs: tuple[Any, ...]) -> None:
    """What takes the place of a hook that makes a DTensor of an input, where the local tensor is what is needed."""


def _unless_local(hook: Hook) -> Hook:
    """What takes the place of a hook that makes outputs local: outputs that are stay as they are."""

    def convert(module: nn.Module, inputs: tuple[Any, ...], outputs: torch.Tensor) -> Any:
        return hook(module, inputs, outputs) if isinstance(outputs, DTensor) else outputs

    return convert


def _is_parallel(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and isinstance(module.weight, DTensor)
