"""Eager tensor parallelism with sequence shards, whose gathers and reductions hide behind its own matmuls.

    parallelize_module(block, mesh, plan)      # with inputs and outputs sharded along the sequence
    overlapped = tensor_parallel.overlap(block)
    ...
    overlapped.undo()

Column-parallel linears become all-gather + matmul, row-parallel ones matmul + reduce-scatter, forward and backward, without
torch.compile. Those that are neighbors in a module (q, k and v; gate and up) are taken to have the same input and share one
gather and one matmul, their weights adjoining in memory; where that proves wrong they part, with no harm to results. A
module that cannot be served stays as it was, and `refused` and the log say why.

Inputs that `PrepareModuleInput` gathered arrive as sharded DTensors of the same shape; whatever else a module does with
them, DTensor gathers itself. With FSDP2 call `overlap` first and `fully_shard` after it.
"""

import logging
from collections.abc import Callable
from typing import Any, final

import msgspec
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from counterpoint.errors import IntegrationError
from counterpoint.integrations.layouts import GatheringHook, LinearLayout, gathering_hook, is_sequence, linear_layout
from counterpoint.integrations.sequence_shards import adjoin, gather_multiply, multiply_scatter
from counterpoint.schedule import ScheduleDescription
from counterpoint.value import require

logger = logging.getLogger("counterpoint")


@final
class SharedInput:
    """The column-parallel linears of one module, and who of them is taken to be called with one and the same input."""

    def __init__(self) -> None:
        self._groups: dict[Column, tuple[Column, ...]] = {}
        self._ready: dict[Column, tuple[DTensor, torch.Tensor]] = {}
        self._parting: set[Column] = set()

    def join(self, columns: "list[Column]") -> None:
        """Let these linears share a gather and a matmul, their weights adjoining in memory."""
        adjoin([column.local_weight() for column in columns])
        self._groups.update(dict.fromkeys(columns, tuple(columns)))

    def product(self, column: "Column", given: DTensor) -> torch.Tensor:
        """This linear's product; computed now, with those of its group, or before."""
        ready = self._ready.pop(column, None)
        if ready is not None and ready[0] is given:
            return ready[1]
        if not _is_in_backward():  # activations that are computed again must be computed as they were
            self._part()
        group = self._groups.get(column, (column,))
        products = column.multiply(given, group)
        for member, product in zip(group, products, strict=True):
            self._ready[member] = (given, product)
        return self._ready.pop(column)[1]

    def finish(self, *_: object) -> None:
        """The module's forward pass is over. A group with linears that nobody asked for is none in the next."""
        self._parting.update(self._ready)
        self._ready.clear()

    def _part(self) -> None:
        for column in self._parting:
            for member in self._groups.get(column, ()):
                self._groups.pop(member, None)
        self._parting.clear()


@final
class Column:
    """A column-parallel linear: what takes the place of its `forward`."""

    def __init__(self, linear: nn.Linear, layout: LinearLayout, shared: SharedInput, schedule: str) -> None:
        self._linear, self._forward, self._layout = linear, linear.forward, layout
        self._shared, self._schedule = shared, schedule

    def __call__(self, given: torch.Tensor) -> torch.Tensor:
        """The linear of a sequence-sharded input; of any other as it was."""
        if not _is_sharded_sequence(given):
            return self._forward(given)
        product = self._shared.product(self, given)
        bias = self._linear.bias
        if bias is not None:
            product = product + _cast(bias.to_local())
        return DTensor.from_local(product, self._layout.mesh, [Shard(product.ndim - 1)], run_check=False)

    def multiply(self, given: DTensor, group: "tuple[Column, ...]") -> tuple[torch.Tensor, ...]:
        """The products of the linears of a group, without their biases."""
        mesh, dim = self._layout.mesh, given.placements[0].dim
        require(
            given.shape[dim] % mesh.size() == 0,
            IntegrationError,
            f"A sequence must divide by the {mesh.size()} ranks that share it; found {given.shape[dim]} tokens. Pad it.",
        )
        weights = [_cast(member._linear.weight.to_local()) for member in group]
        return gather_multiply(_cast(given.to_local()), weights, dim, mesh.get_group(), self._schedule)

    def local_weight(self) -> torch.Tensor:
        """The memory of this rank's part of the weight."""
        weight = self._linear.weight
        assert isinstance(weight, DTensor)
        return weight._local_tensor


@final
class Row:
    """A row-parallel linear: what takes the place of its `forward`."""

    def __init__(self, linear: nn.Linear, layout: LinearLayout, schedule: str) -> None:
        self._linear, self._layout, self._schedule = linear, layout, schedule

    def __call__(self, given: DTensor) -> torch.Tensor:
        """This rank's part of the sequence."""
        dim, mesh = self._layout.output_layouts[0].dim, self._layout.mesh
        weight = _cast(self._linear.weight.to_local())
        product = multiply_scatter(_cast(given.to_local()), weight, dim, mesh.get_group(), self._schedule)
        output = DTensor.from_local(product, mesh, [Shard(dim)], run_check=False)
        return output if self._linear.bias is None else output + _cast(self._linear.bias)


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

    def replace_forward(self, name: str, linear: nn.Linear, forward: Callable[..., torch.Tensor]) -> None:
        """Give a linear another `forward`."""
        self.taken.append(name)
        vars(linear)["forward"] = forward
        self._undo.append(lambda: vars(linear).pop("forward"))

    def replace_hook(self, module: nn.Module, key: int, hook: Callable[..., Any]) -> None:
        """Give a module another hook in place of one before its forward pass."""
        earlier = module._forward_pre_hooks[key]
        module._forward_pre_hooks[key] = hook

        def put_back() -> None:
            module._forward_pre_hooks[key] = earlier

        self._undo.append(put_back)

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
    columns: dict[str, Column] = {}
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
            overlapped.replace_hook(container, hook.key, _keep_sharded(hook))
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
        overlapped.replace_forward(name, linear, Row(linear, layout, schedule))


def _take_column(
    overlapped: Overlapped, name: str, linear: nn.Linear, rest: tuple[LinearLayout, SharedInput | None, str]
) -> Column | None:
    """Take a column-parallel linear; the result is one that may have neighbors."""
    layout, shared, schedule = rest
    if is_sequence(layout.input_layouts[0]):
        alone = SharedInput()
        overlapped.replace_forward(name, linear, Column(linear, layout, alone, schedule))
        overlapped.replace_hook(linear, layout.input_hook, _annotate(layout))
        overlapped.finish_with(linear, alone)
    elif shared is not None:
        column = Column(linear, layout, shared, schedule)
        overlapped.replace_forward(name, linear, column)
        return column
    else:
        overlapped.refuse(
            name,
            "its input comes whole, so there is nothing to gather. Give the module around it "
            "PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())",
        )
    return None


def _join_neighbors(columns: dict[str, Column], shared: dict[str, SharedInput]) -> None:
    """Linears of one parent, with the same input features and type."""
    neighbors: dict[tuple[object, ...], list[tuple[str, Column]]] = {}
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


def _is_parallel(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and isinstance(module.weight, DTensor)


def _is_sharded_sequence(given: torch.Tensor) -> bool:
    if not isinstance(given, DTensor) or len(given.placements) != 1:
        return False
    placement = given.placements[0]
    return isinstance(placement, Shard) and placement.dim < given.ndim - 1


def _is_in_backward() -> bool:
    return int(torch._C._current_graph_task_id()) != -1


def _cast(tensor: torch.Tensor) -> torch.Tensor:
    """To the type that autocast gives to linears, if it is on."""
    kind = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tensor
