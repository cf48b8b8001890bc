"""Hides the gathers and reductions of tensor parallelism behind its own matmuls, eager and under torch.compile.

    parallelize_module(block, mesh, plan)      # with inputs and outputs sharded along the sequence; or torchtitan's own
    overlapped = tensor_parallel.overlap(block)
    ...
    overlapped.use(False)                      # between steps: as before, and use(True) again
    overlapped.undo()

Column-parallel linears become all-gather + matmul, row-parallel ones matmul + reduce-scatter, forward and backward. If
activations are whole on every rank instead, as in Hugging Face models, row-parallel linears become matmul + all-reduce, and
column-parallel ones sum their input's gradient beside the matmul of their weight gradient. Neighbors in a module (q, k and
v; gate and up) are assumed to have the same input and share one gather or one sum; if that proves wrong they are
separated, and results stay right. Linears of Megatron-LM's core and of TransformerEngine are taken, too. A module that is
not supported stays unchanged; `refused` and the log say why.

Inputs that `PrepareModuleInput` or a module of torchtitan 0.3 gathered arrive as sharded DTensors of the same shape; for any
other use in the module, DTensor itself gathers them. `Deferred` does the same where torchtitan's tensors are plain. With
FSDP2, call `overlap` before or after `fully_shard`, but not between a forward and a backward pass.
"""

from collections.abc import Iterable
from typing import Any, TypeAlias

import msgspec
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Replicate, Shard

from counterpoint.errors import IntegrationError, reason_of
from counterpoint.integrations import engine_linears, megatron_linears
from counterpoint.integrations.deferred_inputs import defer_inputs
from counterpoint.integrations.eager_linears import OPERATORS as EAGER_OPERATORS
from counterpoint.integrations.engine_linears import EngineForward
from counterpoint.integrations.layouts import (
    FUSED,
    IS_FUSED,
    Boundary,
    GatheringHook,
    LinearLayout,
    boundary_of,
    gathering_hook,
    is_parallel,
    is_sequence,
    is_split,
    linear_layout,
)
from counterpoint.integrations.megatron_linears import MegatronForward
from counterpoint.integrations.module_tree import modules_within, named_modules
from counterpoint.integrations.overlapped import Overlapped, is_overlapped
from counterpoint.integrations.parallel_linears import (
    AllReduceForward,
    ColumnwiseForward,
    ParallelForward,
    RowwiseForward,
    SharedInput,
)
from counterpoint.integrations.sharding_configs import has_plain_tensors
from counterpoint.integrations.switched_hooks import annotate, keep_inputs_sharded, keep_sharded, pass_on
from counterpoint.schedule import ScheduleDescription
from counterpoint.value import require

__all__ = ["OPERATORS", "Overlapped", "overlap", "waiting_linears", "why_none_waits"]

UNKNOWN_RELEASE = "this release of Megatron-LM or TransformerEngine is not known ({}). Leave it unchanged"
PlainForward: TypeAlias = MegatronForward | EngineForward
# The operators that a policy of selective activation checkpointing sees instead of matmuls and collectives: those whose
# results it saves are not computed and communicated again in the backward pass
OPERATORS = tuple(getattr(torch.ops.counterpoint, operator.name).default for operator in EAGER_OPERATORS)


def overlap(module: nn.Module, *, schedule: ScheduleDescription | None = None, is_on: bool = True) -> Overlapped:
    """Let the tensor-parallel linears within `module` communicate beside their own matmuls; call it on every rank.

    `schedule` overrides the heuristic for all of them. With `is_on=False` everything is prepared, and nothing changes
    before `use(True)`. Raises `IntegrationError` if no linear is supported, or if one of them is already overlapped.
    """
    _check_arguments(module, schedule)
    overlapped = Overlapped(is_on=is_on)
    with overlapped.all_or_nothing():
        _take_linears(overlapped, module, "" if schedule is None else msgspec.json.encode(schedule).decode())
    overlapped.say_obstacles()
    return overlapped


def _take_linears(overlapped: Overlapped, module: nn.Module, text: str) -> None:
    """Take all linears of a model that are supported. Raises `IntegrationError` if there is none."""
    # FSDP2's weights are DTensors, too
    sharded = {part for each in modules_within(module) if isinstance(each, FSDPModule) for part in modules_within(each)}
    parallel = [(name, each) for name, each in named_modules(module) if is_parallel(each)]
    overlapped.require_new(parallel, ParallelForward)
    linears = [(name, each) for name, each in parallel if each not in sharded or is_split(each)]
    others = [(name, each, family) for name, each in named_modules(module) if (family := _family_of(each))]
    overlapped.require_new([(name, each) for name, each, _ in others], PlainForward)
    require(
        bool(linears or others),
        IntegrationError,
        f"{type(module).__name__} has no linear that parallelize_module has split, and no parallel one of Megatron-LM "
        "or TransformerEngine. Parallelize it first.",
    )
    gathering = {name: found for name, each in named_modules(module) if (found := gathering_hook(each))}
    boundaries = _boundaries_in(module)
    left = [name for name, each in boundaries.items() if each.dims]
    shared = {name: SharedInput() for name in (*gathering, *left)}
    whole = {_parent(name): SharedInput() for name, _ in linears}
    columns: dict[str, ColumnwiseForward] = {}
    for name, linear in linears:
        layout = _layout_within(name, linear, boundaries)
        if isinstance(layout, str):
            overlapped.refused[name] = layout
        elif layout.kind == "row":
            _take_row(overlapped, name, linear, (layout, text))
        else:
            around = _nearest(name, boundaries if layout.is_configured else gathering)
            gathered = None if around is None else shared.get(around)
            rest = layout, gathered or whole[_parent(name)], text
            dim = boundaries[around].dim if around is not None and layout.is_configured else None
            is_gathered = gathered is not None and (dim is not None or not layout.is_plain)
            column = _take_column(overlapped, name, linear, rest, is_gathered=is_gathered, dim=dim)
            if column is not None:
                columns[name] = column
    for name, other, family in others:
        _take_plain(overlapped, name, (other, family), text)
    _join_neighbors(columns)
    _keep_parts(overlapped, module, columns, (gathering, boundaries, shared))
    for parent, inputs in whole.items():
        if any(column.shared is inputs and column.is_whole and len(column.group) > 1 for column in columns.values()):
            overlapped.finish_with(module.get_submodule(parent), inputs)
    overlapped.require_taken(f"No linear of {type(module).__name__}")


def waiting_linears(module: nn.Module) -> list[nn.Module]:
    """Return the linears in the module that parallelize_module has split and that `overlap` has not taken."""
    boundaries = _boundaries_in(module)
    return [
        each
        for name, each in named_modules(module)
        if is_parallel(each)
        and not is_overlapped(each, ParallelForward)
        and not isinstance(_layout_within(name, each, boundaries), str)  # FSDP2's weights are DTensors as well
    ] + [
        each
        for each in modules_within(module)
        if (family := _family_of(each)) and not is_overlapped(each, PlainForward) and not _refusal_by(family, each)
    ]


def why_none_waits(module: nn.Module) -> str:
    """Return why `overlap` cannot take the first of the linears in the module that it cannot take; nothing without any."""
    boundaries = _boundaries_in(module)
    for name, each in named_modules(module):
        if is_parallel(each) and is_split(each) and isinstance(reason := _layout_within(name, each, boundaries), str):
            return f"{name or 'the linear'}: {reason}"
        if (family := _family_of(each)) and (reason := _refusal_by(family, each)):
            return f"{name or 'the linear'}: {reason}"
    return ""


def _boundaries_in(module: nn.Module) -> dict[str, Boundary]:
    """Return the modules by name whose inputs torchtitan 0.3 redistributes, with what it does."""
    return {name: found for name, each in named_modules(module) if (found := boundary_of(each))}


def _layout_within(name: str, linear: nn.Module, boundaries: dict[str, Boundary]) -> LinearLayout | str:
    """Return the layout of a linear in a model with these boundaries, or why it is unknown or not supported."""
    layout, around = linear_layout(linear), _nearest(name, boundaries)
    found = None if around is None else boundaries[around]
    if found is not None and found.name in FUSED and has_plain_tensors(linear):
        return f"the {found.name} around it {IS_FUSED}"
    if isinstance(layout, str) or layout.kind == "row" or not layout.is_configured:
        return layout
    if found is not None and found.obstacle:
        return f"the {found.name} around it {found.obstacle}"
    if found is None or not (found.gathered or found.summed):
        return "its input arrives whole, and no module around it gathers it or sums its gradient. Leave it unchanged"
    return layout


def _check_arguments(module: object, schedule: object) -> None:
    require(
        isinstance(module, nn.Module),
        IntegrationError,
        "overlap() takes a module that parallelize_module has split; found one of type "
        f"{type(module).__name__}. Pass the model.",
    )
    require(
        schedule is None or isinstance(schedule, ScheduleDescription),
        IntegrationError,
        f"schedule takes a ScheduleDescription or None; found one of type {type(schedule).__name__}. Make one: "
        'ScheduleDescription(pattern="ring").',
    )


def _keep_parts(
    overlapped: Overlapped,
    module: nn.Module,
    columns: dict[str, ColumnwiseForward],
    around: tuple[dict[str, GatheringHook], dict[str, Boundary], dict[str, SharedInput]],
) -> None:
    """Let modules pass on parts of their inputs, where columns within gather them; `around`: by the modules' names, the
    hooks that gather, what torchtitan 0.3 does, and the inputs that columns share.
    """
    gathering, boundaries, shared = around
    for name, inputs in shared.items():
        if any(column.shared is inputs for column in columns.values()):
            container = module.get_submodule(name)
            if name in gathering:
                hook, hooks = gathering[name], container._forward_pre_hooks
                overlapped.replace_hook(hooks, hook.key, keep_sharded(hook, hooks[hook.key], overlapped.switch))
            else:
                keep = keep_inputs_sharded if boundaries[name].mesh is None else defer_inputs
                prepare = keep(container, boundaries[name], overlapped.switch)
                overlapped.exchange(vars(container), "_redistribute_inputs", prepare)
            overlapped.finish_with(container, inputs)


def _take_plain(overlapped: Overlapped, name: str, found: tuple[nn.Module, Any], schedule: str) -> None:
    """Take a linear with a plain weight, given with its family."""
    linear, family = found
    reason = _refusal_by(family, linear)
    if reason:
        overlapped.refused[name] = reason
        return
    try:
        forward = family.forward_of(linear, overlapped.switch, schedule)
    except Exception as problem:
        overlapped.refused[name] = UNKNOWN_RELEASE.format(reason_of(problem))
    else:
        overlapped.take(name, linear, forward.run, forward.route.group_name)


def _refusal_by(family: Any, linear: nn.Module) -> str:
    """Return why a linear of a family stays unchanged; nothing for one that operators multiply."""
    try:
        reason: str = family.refusal_of(linear)
    except Exception as problem:  # attributes that another release does not have
        return UNKNOWN_RELEASE.format(reason_of(problem))
    return reason


def _family_of(module: nn.Module) -> Any | None:
    """Return the module of ours that knows such linears with plain weights, which ranks share; None for any other."""
    return next((each for each in (megatron_linears, engine_linears) if each.is_split(module)), None)


def _take_row(overlapped: Overlapped, name: str, linear: nn.Linear, rest: tuple[LinearLayout, str]) -> None:
    layout, schedule = rest
    output = layout.output_layouts[0]
    if not (is_sequence(output) or output == Replicate()):
        overlapped.refused[name] = (
            f"its output is {output}, but only an output that is whole or sharded along the sequence is "
            "supported. Give RowwiseParallel output_layouts=Shard(1)"
        )
    elif layout.input_layouts[0] not in (Shard(-1), Replicate()):
        overlapped.refused[name] = (
            f"its input is {layout.input_layouts[0]!r}, but only Shard(-1) and Replicate() are supported. If it gets a "
            "DTensor, as from SequenceParallel, leave out input_layouts; if it gets a plain tensor, keep the plan as it is"
        )
    else:
        kind = RowwiseForward if is_sequence(output) else AllReduceForward
        overlapped.replace_forward(name, linear, kind(linear, layout, (overlapped.switch, schedule)))
        hooks, key = linear._forward_pre_hooks, layout.input_hook
        if key is not None:
            overlapped.replace_hook(hooks, key, pass_on(hooks[key], overlapped.switch))


def _take_column(
    overlapped: Overlapped,
    name: str,
    linear: nn.Linear,
    rest: tuple[LinearLayout, SharedInput, str],
    *,
    is_gathered: bool,
    dim: int | None,
) -> ColumnwiseForward | None:
    """Take a column-parallel linear, whose input a module around it gathers (a plain one along `dim`) or not; return one
    that may have neighbors.
    """
    layout, shared, schedule = rest
    key, hooks, given = layout.input_hook, linear._forward_pre_hooks, layout.input_layouts[0]
    is_whole, hook, has_neighbors = False, None, True
    if layout.is_configured:
        is_whole = not is_gathered
    elif key is not None and is_sequence(given):
        dim, shared, has_neighbors = given.dim, SharedInput(), False  # it gathers its own input
        hook = annotate(layout, hooks[key], overlapped.switch)
    elif key is not None and is_gathered:
        dim = None
    elif given == Replicate() and (key is not None or layout.is_output_local):
        dim, is_whole = None, True
        hook = None if key is None else pass_on(hooks[key], overlapped.switch)
    else:
        overlapped.refused[name] = (
            f"its input is {given!r} and its output {layout.output_layouts[0]!r}, but only a whole or sequence-sharded "
            "input and a local output are supported"
        )
        return None
    column = ColumnwiseForward(linear, layout, (shared, overlapped.switch, schedule), input_dim=dim, is_whole=is_whole)
    overlapped.replace_forward(name, linear, column)
    if key is not None and hook is not None:
        overlapped.replace_hook(hooks, key, hook)
    return column if has_neighbors else None


def _join_neighbors(columns: dict[str, ColumnwiseForward]) -> None:
    """Join linears of one parent with the same input features, type and mesh."""
    neighbors: dict[tuple[object, ...], list[tuple[str, ColumnwiseForward]]] = {}
    for name, column in columns.items():
        weight = column.linear.weight
        key = (_parent(name), column.shared, column.layout.mesh, weight.shape[1], weight.dtype)
        neighbors.setdefault(key, []).append((name, column))
    for members in neighbors.values():
        group = tuple(column for _, column in members)
        for column in group:
            column.join(group)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _nearest(name: str, outers: Iterable[str]) -> str | None:
    """Return the innermost module of these around `name`."""
    around = [outer for outer in outers if not outer or name == outer or name.startswith(f"{outer}.")]
    return max(around, key=len, default=None)
