"""A caller's activation between an expert's matmuls: its result has the type of the matmuls, and each input a gradient."""

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")
gated_activation = pytest.importorskip("counterpoint.ops.gated_activation")


@pytest.mark.parametrize(
    ("activation", "of_second"),
    [
        (lambda first, second: (first.float() ** 3 * second).float(), lambda first: first**3),  # as autocast does on GPUs
        (lambda first, _: first**3, torch.zeros_like),
    ],
    ids=["another type", "one input alone"],
)
def test_a_callers_activation_may_return_another_type_or_ignore_an_input(
    activation: Callable[..., object], of_second: Callable[..., object]
) -> None:
    inputs = [torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16), torch.ones(1, 2, dtype=torch.bfloat16)]
    wanted = [inputs[0] ** 3, 3 * inputs[0] ** 2, of_second(inputs[0])]
    found = gated_activation.activate(activation, inputs)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, wanted[0])
    outs = [torch.empty_like(inputs[0]) for _ in range(3)]
    gated_activation.activate_backward(activation, inputs, torch.ones_like(inputs[0]), outs)
    assert all(map(torch.equal, outs, wanted))
