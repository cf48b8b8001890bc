"""The linears of tensor parallelism with sequence shards: what takes the place of their `forward`.

Column-parallel linears that are taken to have the same input share one gather; where that proves wrong they part. What a
linear gives is a local tensor where its output hook would make it one anyway: a trip through DTensor and back takes the
host some 100 us, forward and backward together (measured on a CPU, 2026-11-21).
"""

from typing import final

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from counterpoint.errors import IntegrationError
from counterpoint.integrations.layouts import LinearLayout
from counterpoint.integrations.sequence_shards import gather_multiply, multiply_scatter
from counterpoint.value import require


@final
class SharedInput:
    """The column-parallel linears of one module, and who of them is taken to be called with one and the same input."""

    def __init__(self) -> None:
        self._groups: dict[ColumnwiseForward, tuple[ColumnwiseForward, ...]] = {}
        self._ready: dict[ColumnwiseForward, tuple[DTensor, torch.Tensor]] = {}
        self._parting: set[ColumnwiseForward] = set()

    def join(self, columns: "list[ColumnwiseForward]") -> None:
        """Let these linears share a gather."""
        self._groups.update(dict.fromkeys(columns, tuple(columns)))

    def product(self, column: "ColumnwiseForward", given: DTensor) -> torch.Tensor:
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
class ColumnwiseForward:
    """A column-parallel linear: what takes the place of its `forward`."""

    def __init__(self, linear: nn.Linear, layout: LinearLayout, shared: SharedInput, schedule: str) -> None:
        self._linear, self._forward, self.layout = linear, linear.forward, layout
        self._shared, self._schedule = shared, schedule

    def __call__(self, given: torch.Tensor) -> torch.Tensor:
        """The linear of a sequence-sharded input; of any other as it was."""
        if not _is_sharded_sequence(given):
            return self._forward(given)
        product = self._shared.product(self, given)
        bias = self._linear.bias
        if bias is not None:
            product = product + _cast(bias.to_local())
        if self.layout.is_output_local:
            return product
        return DTensor.from_local(product, self.layout.mesh, [Shard(product.ndim - 1)], run_check=False)

    def multiply(self, given: DTensor, group: "tuple[ColumnwiseForward, ...]") -> tuple[torch.Tensor, ...]:
        """The products of the linears of a group, without their biases."""
        mesh, dim = self.layout.mesh, given.placements[0].dim
        require(
            given.shape[dim] % mesh.size() == 0,
            IntegrationError,
            f"A sequence must divide by the {mesh.size()} ranks that share it; found {given.shape[dim]} tokens. Pad it.",
        )
        weights = [_cast(member._linear.weight.to_local()) for member in group]
        return gather_multiply(_cast(given.to_local()), weights, dim, mesh.get_group(), self._schedule)

    def local_weight(self) -> torch.Tensor:
        """This rank's part of the weight."""
        weight = self._linear.weight
        assert isinstance(weight, DTensor)
        return weight._local_tensor


@final
class RowwiseForward:
    """A row-parallel linear: what takes the place of its `forward`."""

    def __init__(self, linear: nn.Linear, layout: LinearLayout, schedule: str) -> None:
        self._linear, self.layout, self._schedule = linear, layout, schedule

    def __call__(self, given: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sequence, from its part of the features; a plain tensor is that part."""
        dim, mesh, bias = self.layout.output_layouts[0].dim, self.layout.mesh, self._linear.bias
        if isinstance(given, DTensor):
            features = (Shard(given.ndim - 1),)
            given = (given if given.placements == features else given.redistribute(placements=features)).to_local()
        weight = _cast(self._linear.weight.to_local())
        product = multiply_scatter(_cast(given), weight, dim, mesh.get_group(), self._schedule)
        if bias is None and self.layout.is_output_local:
            return product
        output = DTensor.from_local(product, mesh, [Shard(dim)], run_check=False)
        return output if bias is None else output + _cast(bias)


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
