"""One tensor of weights that are a parameter each: a view where they lie at equal distances, and a copy otherwise."""

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from counterpoint.integrations.main_gradients import MainGradient
from counterpoint.integrations.separate_weights import are_reversed, join, stacked, totals_of

EXPERTS, ROWS, COLUMNS = 3, 4, 5


def in_buffer(*, is_reversed: bool = False, gap: int = 0) -> list[nn.Parameter]:
    size = ROWS * COLUMNS + gap
    buffer = torch.arange(float(EXPERTS * size))
    places = range(EXPERTS)[::-1] if is_reversed else range(EXPERTS)
    return [nn.Parameter(buffer[place * size :][: ROWS * COLUMNS].view(ROWS, COLUMNS)) for place in places]


class WithoutGradient(torch.autograd.Function):
    """An operator that has added the gradient to main gradients."""

    @staticmethod
    def forward(_ctx: Any, weights: torch.Tensor) -> torch.Tensor:
        return weights.clone()

    @staticmethod
    def backward(_ctx: Any, _gradient: torch.Tensor) -> None:
        return None


def test_weights_of_a_buffer_are_viewed() -> None:
    for gap in (0, 7):
        weights = in_buffer(gap=gap)
        assert not are_reversed(weights)
        whole = stacked(weights, [None] * EXPERTS)
        assert torch.equal(whole, torch.stack(weights))
        assert whole.untyped_storage().data_ptr() == weights[0].untyped_storage().data_ptr()
        reverse = in_buffer(is_reversed=True, gap=gap)
        assert are_reversed(reverse)
        viewed = stacked(reverse[::-1], [None] * EXPERTS)
        assert torch.equal(viewed, torch.stack(reverse[::-1]))
        assert viewed.untyped_storage().data_ptr() == reverse[0].untyped_storage().data_ptr()


def test_others_are_copied() -> None:
    first, second, third = in_buffer()
    own = nn.Parameter(torch.zeros(ROWS, COLUMNS))
    transposed = [nn.Parameter(each.detach().reshape(COLUMNS, ROWS).t()) for each in in_buffer()]
    for weights in ([first, third, second], [first, own, third], [first, first, first], transposed, [own]):
        assert not are_reversed(weights)
        whole = stacked(weights, [None] * len(weights))
        assert torch.equal(whole, torch.stack(weights))
        whole.sum().backward()
        assert all(
            torch.equal(each.grad, torch.ones_like(each) * (3 if weights[0] is weights[-1] and each is first else 1))
            for each in weights
        )
        for each in weights:
            each.grad = None
    assert stacked([own], [None]).untyped_storage().data_ptr() == own.untyped_storage().data_ptr()


def test_weights_with_memory_of_their_own_are_put_into_one() -> None:
    own = [nn.Parameter(torch.full((ROWS, COLUMNS), float(number))) for number in range(EXPERTS)]
    join(own)
    assert [each[0, 0].item() for each in own] == [0, 1, 2]
    assert stacked(own, [None] * EXPERTS).untyped_storage().data_ptr() == own[1].untyped_storage().data_ptr()
    first, second, third = in_buffer()
    places = [each.data_ptr() for each in (first, third, second)]
    join([first, third, second])
    assert [each.data_ptr() for each in (first, third, second)] == places, "the buffer has them, too"


def test_gradients_go_to_each_weight_or_to_main_gradients() -> None:
    weights = in_buffer(is_reversed=True)[::-1]
    factors = torch.tensor([1.0, 2.0, 3.0])
    (stacked(weights, [None] * EXPERTS) * factors[:, None, None]).sum().backward()
    assert [each.grad[0, 0].item() for each in weights] == [1, 2, 3]
    assert totals_of([None] * EXPERTS) is None
    for number, each in enumerate(weights):
        vars(each).update(main_grad=torch.full((ROWS, COLUMNS), float(number)), grad_added_to_main_grad=False)
    mains = [MainGradient(each, is_first=True) for each in weights]
    of_two = totals_of([*mains[:-1], None])
    assert of_two is not None
    assert of_two().matrices[-1] is None, "it is frozen"
    totals = totals_of(mains)
    assert totals is not None
    found = totals()
    assert found.are_set
    assert [0 if each is None else each[0, 0].item() for each in found.matrices] == [0, 1, 2]
    WithoutGradient.apply(stacked(weights, mains)).sum().backward()
    assert all(each.grad_added_to_main_grad for each in weights)
