"""Shared experts that are computed early: the same numbers, and nothing stays behind when a layer has ended."""

import gc
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")
routed_experts = pytest.importorskip("counterpoint.integrations.routed_experts")


class Layer(torch.nn.Module):
    """Experts, beside which the shared ones are computed; their result is added at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.shared = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.early = routed_experts.SharedExperts(self, self.shared)
        self.shared.forward, self.forward = self.early.run, self.early.run_layer

    def forward(self, tokens: Any) -> Any:
        self.early.compute()
        return self.experts(tokens) + self.shared(tokens)


@pytest.mark.parametrize("is_reentrant", [None, True, False], ids=["kept", "reentrant", "checkpointed"])
def test_a_layer_that_has_ended_keeps_no_tokens(is_reentrant: bool | None) -> None:
    layer, given = Layer(), torch.randn(3, 4, requires_grad=True)
    wanted = (2 * given @ (layer.experts.weight + layer.shared.weight).T).detach() + layer.experts.bias + layer.shared.bias
    gc.collect()
    gc.disable()
    try:
        tokens = 2 * given
        known = weakref.ref(tokens)
        if is_reentrant is None:
            found = layer(tokens)
        else:
            found = torch.utils.checkpoint.checkpoint(layer, tokens, use_reentrant=is_reentrant)
        torch.testing.assert_close(found, wanted)
        found.sum().backward()  # checkpointing ends what it runs again as soon as it has all it needs
        del tokens, found
        assert known() is None
    finally:
        gc.enable()
