"""What a backward pass returns for a weight whose gradient went to its main gradient."""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from counterpoint.integrations.main_gradients import MainGradient, is_kept_elsewhere, main_gradient_of


def weight_of(**attributes: object) -> nn.Parameter:
    weight = nn.Parameter(torch.zeros(3, 5))
    vars(weight).update({"main_grad": torch.ones(3, 5), **attributes})
    return weight


def test_a_sign_without_values_tells_the_hooks_that_the_gradient_was_added() -> None:
    weight = weight_of(grad_added_to_main_grad=False)
    sign = MainGradient(weight).sign()
    assert sign is not None
    assert sign.shape == weight.shape
    assert weight.grad_added_to_main_grad
    zeroed = MainGradient(weight_of(grad_added_to_main_grad=False, zero_out_wgrad=True)).sign()
    assert zeroed is not None
    assert not zeroed.any()
    assert MainGradient(weight_of()).sign() is None, "no hook looks for it"


def test_a_modes_tensors_are_no_signs_of_later_passes() -> None:
    weight = weight_of(grad_added_to_main_grad=False)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(MainGradient(weight).sign(), FakeTensor)
    assert not isinstance(MainGradient(weight).sign(), FakeTensor)


def test_weights_that_are_frozen_or_kept_elsewhere_have_none() -> None:
    assert main_gradient_of(weight_of()) is not None
    assert main_gradient_of(weight_of().requires_grad_(False)) is None
    assert main_gradient_of(nn.Parameter(torch.zeros(3))) is None
    assert not is_kept_elsewhere(weight_of(overwrite_main_grad=False))
    for name in ("overwrite_main_grad", "get_main_grad", "__fsdp_param__", "fsdp_managed_main_grad"):
        assert is_kept_elsewhere(weight_of(**{name: True}))
