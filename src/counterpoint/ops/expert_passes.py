"""The passes of experts: the order in which rows are sent, multiplied and sent back, forward and backward.

Rows are multiplied group by group of experts, each group as soon as all its rows have arrived, while the next group's rows
are in transit; a group's results go back at once. In backward, the gradients of weights come last and hide the returning
rows. Other ranks' tokens are sent again if weights need their gradients, beside the earlier matmuls, unless the call keeps
them.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple, TypeAlias, final

import torch

from counterpoint.ops.expert_exchange import AbstractCombine, AbstractDispatch, ExpertRegion, RowFormat
from counterpoint.ops.expert_routing import ExpertRouting
from counterpoint.ops.gated_activation import Activation, activate, activate_backward
from counterpoint.ops.grouped_matmul import (
    ExpertRows,
    ExpertTotals,
    Memory,
    add_bias,
    add_weight_gradients,
    bias_gradient,
    multiply,
    multiply_in_fp8,
    weight_gradient,
)
from counterpoint.schedule.expert_layout import ExpertRange

Matrices = Sequence[torch.Tensor]
Totals: TypeAlias = Callable[[], ExpertTotals]
Gradients: TypeAlias = tuple[torch.Tensor | None, torch.Tensor | None]  # of weights and biases
DISPATCH, AGAIN, COMBINE = ExpertRegion


class Linear(NamedTuple):
    """The weights (E, N, K) and, if any, the biases (E, N) of one linear of every expert. `is_fp8`: forward multiplies in
    fp8. `totals`: returns what takes the gradients of the weights, if autograd does not.
    """

    weights: torch.Tensor
    bias: torch.Tensor | None = None
    is_fp8: bool = False
    totals: Totals | None = None


class Layer(NamedTuple):
    """The linears of experts: w1 and, if given, w3 before the activation, and w2 after it."""

    ups: Sequence[Linear]
    down: Linear


class Wanted(NamedTuple):
    """The requested gradients; the same on all ranks. `ups`: of w1, or w3, or both; their biases likewise."""

    tokens: bool = True
    ups: bool = True
    down: bool = True
    up_biases: bool = False
    down_bias: bool = False


class LayerGradients(NamedTuple):
    """The gradients of tokens and of a layer, as (weights, bias) each; None for gradients that were not requested."""

    tokens: torch.Tensor | None
    ups: list[Gradients]
    down: Gradients


@final
class Pass:
    """One pass of a call, with everything that it sends."""

    def __init__(self, routing: ExpertRouting, rows: RowFormat, regions: Sequence[ExpertRegion]) -> None:
        """`regions`: the regions that need memory, for this pass or later ones of the call."""
        self._routing, self._rows = routing, routing.rows(rows)
        self._exchange = routing.exchange(self._rows, regions)
        self._sent: list[AbstractDispatch | AbstractCombine] = []
        self._is_ahead = False
        self._exchange.begin()

    def dispatch(self, region: ExpertRegion, source: torch.Tensor, *, were_ready: bool = False) -> AbstractDispatch:
        """Send this rank's rows to their experts. `were_ready`: since before the counts were exchanged."""
        found = self._exchange.dispatch(region, self._rows, source, were_ready=were_ready)
        self._sent.append(found)
        return found

    def first_dispatch(self, tokens: torch.Tensor) -> AbstractDispatch:
        """Send this rank's tokens in forward, unless they were sent before the host knew the counts."""
        ahead = self._routing.ahead
        if ahead is None:
            return self.dispatch(DISPATCH, tokens, were_ready=not self._routing.was_dropped)
        self._is_ahead = True
        ahead.send_others(self._exchange)
        self._sent.append(ahead)
        return ahead

    def combine(self) -> AbstractCombine:
        """Send back results."""
        found = self._exchange.combine(self._rows)
        self._sent.append(found)
        return found

    def finish(self) -> None:
        """End the pass: all is issued."""
        for each in self._sent:
            each.join()
        self._exchange.end()
        num_bytes = sum(each.num_sent_bytes for each in self._sent)
        self._routing.count(self._exchange, num_bytes, is_ahead=self._is_ahead)


def ffn(
    routing: ExpertRouting,
    activation: Activation | None,
    operands: tuple[torch.Tensor, Layer],
    *,
    is_sent_again: bool,
    keeps_tokens: bool,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Run the whole layer. Return the results in the order of tokens, and what backward needs: the arrived tokens if the
    call keeps them, and the inputs of every group's activation.
    """
    tokens, (ups, down) = operands
    regions = (DISPATCH, AGAIN, COMBINE) if is_sent_again else (DISPATCH, COMBINE)
    work, kept = Pass(routing, RowFormat.of(tokens), regions), list[torch.Tensor]()
    dispatch = work.first_dispatch(tokens)
    combine = work.combine()
    for group, experts in routing.groups():
        inputs = _first_linears(dispatch, ups, group, experts)
        combine.add(group.number, _linear(down, activate(activation, inputs), group.experts, experts, combine.memory))
        kept += inputs
    if keeps_tokens:
        kept.insert(0, dispatch.kept_rows())
    results = combine.results()
    work.finish()
    return results, kept


def _first_linears(
    dispatch: AbstractDispatch, linears: Sequence[Linear], group: ExpertRange, experts: ExpertRows
) -> list[torch.Tensor]:
    """Return the rows of a group after each of the call's first linears; then the other groups' rows are sent, too."""
    rows, found = None, []
    for number, linear in enumerate(linears):
        product = dispatch.product(group.number, number)
        if product is None:
            rows = dispatch.group(group.number) if rows is None else rows
            found.append(_linear(linear, rows, group.experts, experts))
        else:
            bias = None if linear.bias is None else _part_of(linear.bias, group.experts)
            found.append(add_bias(product, bias, experts))
    dispatch.send_rest()
    return found


def _linear(
    linear: Linear, rows: torch.Tensor, part: slice, experts: ExpertRows, memory: Memory = nullcontext
) -> torch.Tensor:
    """Return the rows of some experts after their linear."""
    bias = None if linear.bias is None else _part_of(linear.bias, part)
    multiplied = multiply_in_fp8 if linear.is_fp8 else multiply
    return multiplied(rows, _part_of(linear.weights, part).mT, experts, bias, memory)


def _part_of(whole: torch.Tensor, part: slice) -> torch.Tensor:
    """Return a part of the first dimension; the tensor itself if that is all of it, because slicing costs the host 5 us."""
    return whole if part.start == 0 and part.stop == whole.shape[0] else whole[part]


def ffn_backward(
    routing: ExpertRouting,
    activation: Activation | None,
    tensors: tuple[tuple[torch.Tensor, Layer], Matrices, torch.Tensor],
    wanted: Wanted,
    *,
    keeps_tokens: bool,
) -> LayerGradients:
    """Return the gradients of `ffn`. `tensors` are its operands, what it kept, and the gradient of its results."""
    (tokens, (ups, down)), kept, gradient = tensors
    rows, kept = (kept[0], kept[1:]) if keeps_tokens else (None, kept)
    is_sent_again = wanted.ups and not keeps_tokens
    regions = [region for region, is_used in zip(ExpertRegion, (True, is_sent_again, wanted.tokens), strict=True) if is_used]
    work = Pass(routing, RowFormat.of(tokens), regions)
    dispatch = work.dispatch(DISPATCH, gradient)
    again = work.dispatch(AGAIN, tokens) if is_sent_again else None
    combine = work.combine() if wanted.tokens else None
    widths = (down.weights.shape[2], *(up.weights.shape[1] for up in ups))
    hidden, *of_inputs = (tokens.new_empty(routing.num_rows, width) for width in widths)
    for group, experts in routing.groups():
        of_hidden = multiply(dispatch.group(group.number), _part_of(down.weights, group.experts), experts)
        inputs = kept[group.number * len(ups) : (group.number + 1) * len(ups)]
        outs = [_part_of(each, group.rows) for each in (hidden, *of_inputs)]
        activate_backward(activation, inputs, of_hidden, outs)
        if combine is not None:
            first, *others = zip(outs[1:], ups, strict=True)
            of_rows = multiply(first[0], _part_of(first[1].weights, group.experts), experts, memory=combine.memory)
            for of_input, up in others:
                of_rows.add_(multiply(of_input, _part_of(up.weights, group.experts), experts))
            combine.add(group.number, of_rows)
    of_hidden = dispatch.all_rows(), hidden if wanted.down else None
    of_down = _of_linear(of_hidden, routing, down.totals, has_bias=wanted.down_bias)
    rows = rows if again is None else _all_arrived(again, routing)
    of_ups = [
        _of_linear((of_input, rows if wanted.ups else None), routing, up.totals, has_bias=wanted.up_biases)
        for of_input, up in zip(of_inputs, ups, strict=True)
    ]
    of_tokens = combine.results() if combine is not None else None
    work.finish()
    return LayerGradients(of_tokens, of_ups, of_down)


def _of_linear(
    tensors: tuple[torch.Tensor, torch.Tensor | None],
    routing: ExpertRouting,
    totals: Totals | None = None,
    *,
    has_bias: bool,
) -> Gradients:
    """Return the gradients of weights and biases; those of weights go to the totals, if there are any.

    `tensors` are the gradient of the linear's results, and its inputs, or None if no weight needs a gradient.
    """
    (gradient, rows), of_weights = tensors, None
    if rows is not None and totals is not None:
        add_weight_gradients(gradient, rows, routing.experts, totals())
    elif rows is not None:
        of_weights = weight_gradient(gradient, rows, routing.experts)
    return of_weights, bias_gradient(gradient, routing.experts) if has_bias else None


def _all_arrived(dispatch: AbstractDispatch, routing: ExpertRouting) -> torch.Tensor:
    for group in routing.layout.groups:
        dispatch.group(group.number)
    return dispatch.all_rows()


def dispatch_multiply(
    routing: ExpertRouting, tokens: torch.Tensor, linear: Linear, *, keeps_tokens: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return all ranks' tokens through this rank's experts' linear of (E, N, dim), (rows, N) of each group; and the arrived
    tokens if the call keeps them.
    """
    work = Pass(routing, RowFormat.of(tokens), (DISPATCH, COMBINE))
    dispatch = work.first_dispatch(tokens)
    products = [_first_linears(dispatch, [linear], group, experts)[0] for group, experts in routing.groups()]
    kept = [dispatch.kept_rows()] if keeps_tokens else []
    work.finish()
    return products, kept


def dispatch_multiply_backward(
    routing: ExpertRouting,
    tensors: tuple[torch.Tensor, torch.Tensor | None],
    weights: torch.Tensor,
    gradients: Matrices,
    wanted: Wanted,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of tokens, weights and biases of `dispatch_multiply`. `tensors` are its tokens, and those that
    arrived, if they were kept."""
    tokens, rows = tensors
    is_sent_again = wanted.ups and rows is None
    regions = [region for region, is_used in ((DISPATCH, is_sent_again), (COMBINE, wanted.tokens)) if is_used]
    work = Pass(routing, RowFormat.of(tokens), regions)
    dispatch = work.dispatch(DISPATCH, tokens) if is_sent_again else None
    combine = work.combine() if wanted.tokens else None
    if combine is not None:
        for group, experts in routing.groups():
            of_group = gradients[group.number], _part_of(weights, group.experts), experts
            combine.add(group.number, multiply(*of_group, memory=combine.memory))
    if dispatch is not None:
        rows = _all_arrived(dispatch, routing)
    found = _of_linear((_joined(gradients), rows), routing, has_bias=wanted.up_biases)
    of_tokens = combine.results() if combine is not None else None
    work.finish()
    return of_tokens, *found


def multiply_combine(routing: ExpertRouting, inputs: Matrices, linear: Linear) -> torch.Tensor:
    """Put the rows of this rank's experts, by group, through their linear of (E, dim, K) and send them back: (tokens, dim)
    of this rank.
    """
    weights = linear.weights
    work = Pass(routing, RowFormat(weights.shape[1], weights.dtype, weights.device), (DISPATCH, COMBINE))
    combine = work.combine()
    for group, experts in routing.groups():
        combine.add(group.number, _linear(linear, inputs[group.number], group.experts, experts, combine.memory))
    results = combine.results()
    work.finish()
    return results


def multiply_combine_backward(
    routing: ExpertRouting, inputs: Matrices, weights: torch.Tensor, gradient: torch.Tensor, wanted: Wanted
) -> tuple[list[torch.Tensor | None], Gradients]:
    """Return the gradients of inputs (`wanted.tokens`), and of weights and biases, of `multiply_combine`."""
    work = Pass(routing, RowFormat.of(gradient), (DISPATCH,))
    dispatch = work.dispatch(DISPATCH, gradient)
    of_inputs: list[torch.Tensor | None] = [None] * len(inputs)
    for group, experts in routing.groups():
        rows = dispatch.group(group.number)
        if wanted.tokens:
            of_inputs[group.number] = multiply(rows, _part_of(weights, group.experts), experts)
    joined = _joined(inputs) if wanted.down else None
    of_linear = _of_linear((dispatch.all_rows(), joined), routing, has_bias=wanted.down_bias)
    work.finish()
    return of_inputs, of_linear


def _joined(groups: Matrices) -> torch.Tensor:
    """Return the rows of all groups."""
    return groups[0] if len(groups) == 1 else torch.cat(list(groups))
