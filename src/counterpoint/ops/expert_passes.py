"""The passes of experts: the order in which rows are sent, multiplied and sent back, forward and backward.

Rows are multiplied group by group of experts, each group as soon as all its rows are there, while the next group's rows
are in transit; a group's results go back at once. In backward, the gradients of weights come last and hide the way back.
Other ranks' tokens are not kept: they are sent again if weights need their gradients, beside the earlier matmuls.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, final

import torch

from counterpoint.ops.expert_exchange import AbstractCombine, AbstractDispatch, ExpertRegion, RowFormat
from counterpoint.ops.expert_routing import ExpertRouting
from counterpoint.ops.gated_activation import Activation, activate, activate_backward
from counterpoint.ops.grouped_matmul import multiply, weight_gradient

Matrices = Sequence[torch.Tensor]
DISPATCH, AGAIN, COMBINE = ExpertRegion


class Wanted(NamedTuple):
    """The requested gradients; the same on all ranks. `ups`: of w1, or w3, or both."""

    tokens: bool = True
    ups: bool = True
    down: bool = True


@final
class Pass:
    """One pass of a call: what it sends, from the beginning to the end."""

    def __init__(self, routing: ExpertRouting, rows: RowFormat, regions: Sequence[ExpertRegion]) -> None:
        """`regions`: the regions that need memory, for this pass or later ones of the call."""
        self._routing, self._rows = routing, routing.rows(rows)
        self._exchange = routing.exchange(self._rows, regions)
        self._sent: list[AbstractDispatch | AbstractCombine] = []
        self._exchange.begin()

    def dispatch(self, region: ExpertRegion, source: torch.Tensor) -> AbstractDispatch:
        """Send this rank's rows to their experts."""
        found = self._exchange.dispatch(region, self._rows, source)
        self._sent.append(found)
        return found

    def combine(self) -> AbstractCombine:
        """Give back results."""
        found = self._exchange.combine(self._rows)
        self._sent.append(found)
        return found

    def finish(self) -> None:
        """End the pass: all is issued."""
        for each in self._sent:
            each.join()
        self._exchange.end()
        self._routing.count(self._exchange, sum(each.num_sent_bytes for each in self._sent))


def ffn(
    routing: ExpertRouting,
    activation: Activation | None,
    beside: Callable[[], None] | None,
    operands: Matrices,
    *,
    is_differentiated: bool,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Run the whole layer of tokens, w1, w2 and, if given, w3. Return the results in the order of tokens, and the inputs
    of every group's activation, which backward needs. `beside` is called when tokens are in transit.
    """
    tokens, w1, w2, *w3 = operands
    regions = (DISPATCH, AGAIN, COMBINE) if is_differentiated else (DISPATCH, COMBINE)
    work, kept = Pass(routing, RowFormat.of(tokens), regions), list[torch.Tensor]()
    dispatch = work.dispatch(DISPATCH, tokens)
    combine = work.combine()
    if beside is not None:
        beside()
    for group, experts in zip(routing.layout.groups, routing.groups, strict=True):
        rows = dispatch.group(group.number)
        inputs = [multiply(rows, up[group.experts].mT, experts) for up in (w1, *w3)]
        combine.add(group.number, multiply(activate(activation, inputs), w2[group.experts].mT, experts))
        kept += inputs
    dispatch.release()
    results = combine.results()
    work.finish()
    return results, kept


def ffn_backward(
    routing: ExpertRouting,
    activation: Activation | None,
    tensors: tuple[Matrices, Matrices, torch.Tensor],
    wanted: Wanted,
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
    """Return the gradients of tokens, and of w1, w2 and, if given, w3; None for those that are not wanted.

    `tensors` are the operands of `ffn`, what it kept, and the gradient of its results.
    """
    operands, kept, gradient = tensors
    tokens, w1, w2, *w3 = operands
    ups = [w1, *w3]
    regions = [region for region, is_used in zip(ExpertRegion, (True, wanted.ups, wanted.tokens), strict=True) if is_used]
    work = Pass(routing, RowFormat.of(tokens), regions)
    dispatch = work.dispatch(DISPATCH, gradient)
    again = work.dispatch(AGAIN, tokens) if wanted.ups else None
    combine = work.combine() if wanted.tokens else None
    hidden, *of_inputs = (tokens.new_empty(routing.num_rows, w1.shape[1]) for _ in range(1 + len(ups)))
    for group, experts in zip(routing.layout.groups, routing.groups, strict=True):
        of_hidden = multiply(dispatch.group(group.number), w2[group.experts], experts)
        inputs = kept[group.number * len(ups) : (group.number + 1) * len(ups)]
        outs = [each[group.rows] for each in (hidden, *of_inputs)]
        activate_backward(activation, inputs, of_hidden, outs)
        if combine is not None:
            first, *others = zip(outs[1:], ups, strict=True)
            of_rows = multiply(first[0], first[1][group.experts], experts)
            for of_input, up in others:
                of_rows.add_(multiply(of_input, up[group.experts], experts))
            combine.add(group.number, of_rows)
    of_down = weight_gradient(dispatch.all_rows(), hidden, routing.experts) if wanted.down else None
    dispatch.release()
    of_ups: list[torch.Tensor | None] = [None] * len(ups)
    if again is not None:
        rows = _all_arrived(again, routing)
        of_ups = [weight_gradient(of_input, rows, routing.experts) for of_input in of_inputs]
        again.release()
    of_tokens = combine.results() if combine is not None else None
    work.finish()
    return of_tokens, [of_ups[0], of_down, *of_ups[1:]]


def _all_arrived(dispatch: AbstractDispatch, routing: ExpertRouting) -> torch.Tensor:
    for group in routing.layout.groups:
        dispatch.group(group.number)
    return dispatch.all_rows()


def dispatch_multiply(routing: ExpertRouting, tokens: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return all ranks' tokens times this rank's experts' weights (E, N, dim): (rows, N) of each group."""
    work = Pass(routing, RowFormat.of(tokens), (DISPATCH, COMBINE))
    dispatch = work.dispatch(DISPATCH, tokens)
    products = tuple(
        multiply(dispatch.group(group.number), weights[group.experts].mT, experts)
        for group, experts in zip(routing.layout.groups, routing.groups, strict=True)
    )
    dispatch.release()
    work.finish()
    return products


def dispatch_multiply_backward(
    routing: ExpertRouting, tokens: torch.Tensor, weights: torch.Tensor, gradients: Matrices, wanted: Wanted
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of tokens and weights of `dispatch_multiply`."""
    regions = [region for region, is_used in ((DISPATCH, wanted.ups), (COMBINE, wanted.tokens)) if is_used]
    work = Pass(routing, RowFormat.of(tokens), regions)
    dispatch = work.dispatch(DISPATCH, tokens) if wanted.ups else None
    combine = work.combine() if wanted.tokens else None
    if combine is not None:
        for group, experts in zip(routing.layout.groups, routing.groups, strict=True):
            combine.add(group.number, multiply(gradients[group.number], weights[group.experts], experts))
    of_weights = None
    if dispatch is not None:
        of_weights = weight_gradient(_joined(gradients, weights), _all_arrived(dispatch, routing), routing.experts)
        dispatch.release()
    of_tokens = combine.results() if combine is not None else None
    work.finish()
    return of_tokens, of_weights


def multiply_combine(routing: ExpertRouting, inputs: Matrices, weights: torch.Tensor) -> torch.Tensor:
    """Multiply the rows of this rank's experts, by group, by their weights (E, dim, K) and send them back: (tokens, dim)
    of this rank.
    """
    work = Pass(routing, RowFormat(weights.shape[1], weights.dtype, weights.device), (DISPATCH, COMBINE))
    combine = work.combine()
    for group, experts in zip(routing.layout.groups, routing.groups, strict=True):
        combine.add(group.number, multiply(inputs[group.number], weights[group.experts].mT, experts))
    results = combine.results()
    work.finish()
    return results


def multiply_combine_backward(
    routing: ExpertRouting, inputs: Matrices, weights: torch.Tensor, gradient: torch.Tensor, wanted: Wanted
) -> tuple[list[torch.Tensor | None], torch.Tensor | None]:
    """The gradients of inputs (`wanted.tokens`) and weights (`wanted.down`) of `multiply_combine`."""
    work = Pass(routing, RowFormat.of(gradient), (DISPATCH,))
    dispatch = work.dispatch(DISPATCH, gradient)
    of_inputs: list[torch.Tensor | None] = [None] * len(inputs)
    for group, experts in zip(routing.layout.groups, routing.groups, strict=True):
        rows = dispatch.group(group.number)
        if wanted.tokens:
            of_inputs[group.number] = multiply(rows, weights[group.experts], experts)
    of_weights = None
    if wanted.down:
        joined = _joined(inputs, weights, is_inner=True)
        of_weights = weight_gradient(dispatch.all_rows(), joined, routing.experts)
    dispatch.release()
    work.finish()
    return of_inputs, of_weights


def _joined(groups: Matrices, weights: torch.Tensor, *, is_inner: bool = False) -> torch.Tensor:
    """The rows of all groups."""
    if len(groups) == 1:
        return groups[0]
    return torch.cat(list(groups)) if groups else weights.new_empty(0, weights.shape[2 if is_inner else 1])
