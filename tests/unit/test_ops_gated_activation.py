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


def test_gate_and_up_of_one_matrix_give_what_two_give() -> None:
    """With the gradients of both in one matrix, which on GPUs one kernel computes (`tests/gpu/test_expert_kernels.py`)."""
    both = torch.randn(5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    halves, gradient = list(both.chunk(2, 1)), torch.ones(5, 6, dtype=torch.float64)
    assert torch.equal(
        gated_activation.activate(gated_activation.gated_silu, [both]), gated_activation.activate(None, halves)
    )
    joined = [torch.empty(5, 6, dtype=torch.float64), torch.empty_like(both)]
    gated_activation.activate_backward(gated_activation.gated_silu, [both], gradient, joined)
    apart = [torch.empty(5, 6, dtype=torch.float64) for _ in range(3)]
    gated_activation.activate_backward(None, halves, gradient, apart)
    assert torch.allclose(torch.cat(joined, 1), torch.cat(apart, 1), rtol=1e-12)
