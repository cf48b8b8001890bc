"""The replacements of `forward` in tensor-parallel linears.

Column-parallel linears that are assumed to have the same input share one gather, or one sum of its gradient; if that
proves wrong, they are separated. If a linear's output hook would make its output local anyway, it returns a local tensor:
going through DTensor and back takes the host some 100 us, forward and backward together (measured on a CPU, 2026-11-21).

One `Switch` decides for all linears of a model. torch.compile guards on it as on any attribute: each of its two states
is compiled once, and neither is compiled again. Linears get a bound method as their `forward`, because dynamo would
guard on the identity of a callable object, and compile every block anew.
"""

from typing import TypeAlias, final

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from counterpoint.integrations.deferred_inputs import Deferred, checks_types
from counterpoint.integrations.eager_linears import EagerLinear, EagerLinears
from counterpoint.integrations.layouts import LinearLayout
from counterpoint.integrations.sequence_shards import (
    cast_for_matmul,
    conditions_of,
    gather_multiply,
    local_parts,
    multiply_all_reduce,
    multiply_scatter,
    multiply_whole,
    neighbor_product,
    part_of,
    runs_originally,
)
from counterpoint.integrations.switched_hooks import Switch, is_in_backward
from counterpoint.ops import operators
from counterpoint.ops.dispatch import is_checkpointed
from counterpoint.ops.operator_call import calls_of


@final
class SharedInput:
    """The column-parallel linears of one module, and the products that some of them have computed for the others."""

    def __init__(self) -> None:
        self._ready: dict[ColumnwiseForward, tuple[torch.Tensor, tuple[object, ...], torch.Tensor]] = {}
        self._parting: set[ColumnwiseForward] = set()
        self._num_to_recompute = 0  # calls in checkpoints that have not run again in backward

    def product(self, column: "ColumnwiseForward", given: torch.Tensor) -> torch.Tensor:
        """Return this linear's product, computed now with those of its group, or before under the same conditions."""
        is_again, is_counted = is_in_backward(), is_checkpointed()
        if is_counted:
            self._num_to_recompute = max(0, self._num_to_recompute + (-1 if is_again else 1))
        if self._ready:
            ready = self._ready.pop(column, None)
            if ready is not None and ready[0] is given and ready[1] == column.conditions(given):
                return ready[2]
            if ready is not None and ready[0] is not given and not is_again:
                self._parting.add(column)  # a list of linears has no forward pass that could end
        if self._parting and not is_again and self._num_to_recompute <= is_counted:  # none but this call
            self._part()  # what runs again must be computed as before
        conditions = column.conditions(given) if len(column.group) > 1 else ()
        products = column.multiply(given)
        if conditions:
            for member, product in zip(column.group, products, strict=True):
                if member is not column:
                    self._ready[member] = given, conditions, product
        return products[column.position]

    def finish(self, *_: object) -> None:
        """End the module's forward pass. A group with unused linears is split up in the next pass.

        Products left by an error are replaced in the next pass, because products belong to the very tensor from which
        they were made.
        """
        if self._ready:
            self._parting.update(self._ready)
            self._ready.clear()

    def _part(self) -> None:
        for column in self._parting:
            for member in column.group:
                member.join((member,))
        self._parting.clear()


@final
class ColumnwiseForward:
    """A column-parallel linear with a sequence-sharded input, or with `is_whole` one that is the same on every rank.

    `group`: the linears that are assumed to be called with the same input, this one at `position`. `input_dim`: the
    dimension in which a plain tensor is sharded; None if another module's hook turns inputs into DTensors.
    """

    def __init__(
        self,
        linear: nn.Linear,
        layout: LinearLayout,
        rest: tuple[SharedInput, Switch, str],
        *,
        input_dim: int | None = None,
        is_whole: bool = False,
    ) -> None:
        self.linear, self.layout, self._forward = linear, layout, linear.forward
        self.shared, self._switch, schedule = rest
        self._mesh, self._is_output_local, self._kind = layout.mesh, layout.is_output_local, layout.mesh.device_type
        self._gathers_output = layout.output_hook is None and layout.output_layouts[0] == Replicate()
        self._route = layout.route(schedule)
        self._input_dim, self.is_whole = input_dim, is_whole
        operator = operators.column_parallel_matmul if is_whole else operators.all_gather_matmul
        self._eager = EagerLinears(operator, self._route)
        self.group: tuple[ColumnwiseForward, ...] = (self,)
        self.position = 0

    def join(self, group: "tuple[ColumnwiseForward, ...]") -> None:
        """Share the communication of the linears of a group."""
        self.group, self.position = group, group.index(self)

    def run(self, given: torch.Tensor) -> torch.Tensor:
        """Run the linear: by the operator for an input of the kind that was taken, as originally for any other."""
        if not self._switch.holds:
            return self._switch.watch(self._forward(given))
        whole = given
        if self.layout.is_plain:
            if not isinstance(given, Deferred):  # it was gathered, as under torch.compile
                return self._forward(given)
            given = given.part
        dim = self._token_dim(given)
        if dim is None:
            self._count_distributed(given)
            return self._forward(_as_prepared(whole, self.layout))
        num_parts = self._route.num_ranks if isinstance(given, DTensor) and not self.is_whole else 1
        if runs_originally((given.shape, dim, num_parts), self._route):
            prepared = _as_prepared(whole, self.layout)
            if isinstance(prepared, DTensor):
                prepared = prepared.redistribute(placements=[Replicate()])
            return self._forward(prepared)
        if torch.compiler.is_compiling():
            weights = [member.linear.weight for member in self.group]
            product = neighbor_product(given, weights, self.position, tuple(self._route))
        else:
            product = self.shared.product(self, given)
        bias = self.linear.bias
        if bias is not None:
            product = product + cast_for_matmul(part_of(bias))
        if self._is_output_local and not self._gathers_output:
            return product
        output = DTensor.from_local(product.contiguous(), self._mesh, [Shard(product.ndim - 1)], run_check=False)
        return output.redistribute(placements=[Replicate()]).to_local() if self._gathers_output else output

    def _count_distributed(self, given: torch.Tensor) -> None:
        """Count a call whose input was to be plain and is a DTensor. Code made by torch.compile does not count it."""
        is_compiling = torch.compiler.is_compiling()
        if self.is_whole and isinstance(given, DTensor) and not self.layout.is_configured and not is_compiling:
            calls_of(self._route.group_name).add_library("an input that is a DTensor already", is_original=True)

    def conditions(self, given: torch.Tensor) -> tuple[object, ...]:
        """See `conditions_of`; the same for all linears of the group. Parametrized weights are none of theirs."""
        weights = [member.linear._parameters.get("weight") for member in self.group]
        return conditions_of(self._kind, [given, *[each for each in weights if each is not None]])

    def multiply(self, given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the products of the linears of the group, without their biases."""
        weights = [member.linear.weight for member in self.group]
        dim = self._token_dim(given)
        assert dim is not None, "only inputs for the operator come here"
        products = self._eager.of(dim)(given, weights)
        if products is not None:
            return products
        local = cast_for_matmul(part_of(given))
        parts = local_parts(weights)
        if self.is_whole:
            return multiply_whole(local, parts, self._route)
        return gather_multiply(local, parts, dim, self._route)

    def _token_dim(self, given: torch.Tensor) -> int | None:
        """Return the dimension that holds the rows of an input for the operator; None for an input that is not the
        operator's. Nothing is ever sent for a whole input that needs no gradient.
        """
        if self.is_whole:
            placements = given.placements if isinstance(given, DTensor) else None
            is_known = placements == ((Replicate(),) if self.layout.is_configured and not self.layout.is_plain else None)
            return 0 if is_known and torch.is_grad_enabled() and given.requires_grad else None
        if not isinstance(given, DTensor):
            return self._input_dim
        placement = given.placements[0]
        return placement.dim if len(given.placements) == 1 and isinstance(placement, Shard) else None


@final
class RowwiseForward:
    """A row-parallel linear whose output is sharded along the sequence."""

    def __init__(self, linear: nn.Linear, layout: LinearLayout, rest: tuple[Switch, str]) -> None:
        self.linear, self.layout, self._forward = linear, layout, linear.forward
        self._switch, schedule = rest
        self._mesh, self._is_output_local, self._dim = layout.mesh, layout.is_output_local, layout.output_layouts[0].dim
        self._route = layout.route(schedule)
        self._eager = EagerLinear(operators.matmul_reduce_scatter, self._dim, self._route)

    def run(self, given: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the sequence, from its part of the features (see `_features_of`)."""
        if not self._switch.holds:
            return self._switch.watch(self._forward(given))
        if _states_types(self.layout):
            return self._forward(given)
        if runs_originally((given.shape, self._dim, self._route.num_ranks), self._route):
            return self._forward(_as_prepared(given, self.layout))
        weight, bias, features = self.linear.weight, self.linear.bias, _features_of(given, self.layout)
        products = None
        if not torch.compiler.is_compiling():
            products = self._eager(features, (weight,))
        if products is not None:
            product = products[0]
        else:
            part = cast_for_matmul(part_of(weight))
            product = multiply_scatter(cast_for_matmul(features), part, self._dim, self._route)
        if bias is None and self._is_output_local:
            return product
        output = DTensor.from_local(product.contiguous(), self._mesh, [Shard(self._dim)], run_check=False)
        if bias is None:
            return output
        # to where it is already: backward adds up the ranks' parts of its gradient, as in the original forward
        return output + cast_for_matmul(bias.redistribute(placements=bias.placements))


@final
class AllReduceForward:
    """A row-parallel linear whose output is whole on every rank."""

    def __init__(self, linear: nn.Linear, layout: LinearLayout, rest: tuple[Switch, str]) -> None:
        self.linear, self.layout, self._forward = linear, layout, linear.forward
        self._switch, schedule = rest
        self._mesh, self._is_output_local = layout.mesh, layout.is_output_local
        self._route = layout.route(schedule)
        self._eager = EagerLinear(operators.matmul_all_reduce, 0, self._route)

    def run(self, given: torch.Tensor) -> torch.Tensor:
        """Return all tokens with all features, from this rank's part of the features (see `_features_of`)."""
        if not self._switch.holds:
            return self._switch.watch(self._forward(given))
        if _states_types(self.layout):
            return self._forward(given)
        if runs_originally((given.shape, 0, 1), self._route):
            return self._forward(_as_prepared(given, self.layout))
        weight, bias, features = self.linear.weight, self.linear.bias, _features_of(given, self.layout)
        products = None if torch.compiler.is_compiling() else self._eager(features, (weight,))
        if products is not None:
            product = products[0]
        else:
            product = multiply_all_reduce(cast_for_matmul(features), cast_for_matmul(part_of(weight)), self._route)
        if bias is not None:
            product = product + cast_for_matmul(part_of(bias))
        return product if self._is_output_local else DTensor.from_local(product, self._mesh, [Replicate()], run_check=False)


ParallelForward: TypeAlias = ColumnwiseForward | RowwiseForward | AllReduceForward


def _states_types(layout: LinearLayout) -> bool:
    """Return whether the original linear runs, because torchtitan checks types, which operators do not state."""
    return layout.is_plain and not torch.compiler.is_compiling() and checks_types()


def _features_of(given: torch.Tensor, layout: LinearLayout) -> torch.Tensor:
    """Return this rank's part of the features, as a local tensor. A plain tensor is that part, or whole if the layout is."""
    if not isinstance(given, DTensor):
        if layout.input_layouts[0] != Replicate():
            return given
        given = DTensor.from_local(given, layout.mesh, layout.input_layouts, run_check=False)
    features = (Shard(given.ndim - 1),)
    return (given if given.placements == features else given.redistribute(placements=features)).to_local()


def _as_prepared(given: torch.Tensor, layout: LinearLayout) -> torch.Tensor:
    """Return a linear's input as a DTensor, as its original hook makes it; a linear without hooks makes its own."""
    if layout.input_hook is None:
        return given
    if not isinstance(given, DTensor):
        given = DTensor.from_local(given, layout.mesh, layout.input_layouts, run_check=False)
    if layout.kind == "row" and layout.input_layouts[0] == Replicate():
        return given.redistribute(placements=[Shard(-1)])  # DTensor itself would gather the weight instead
    return given
