"""A model of layers of odd sizes, its inputs and its gradients, for DDP and FSDP2."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from integration_sections.comparing import DEVICE


class Deep(nn.Module):
    """Layers of odd sizes, one of which is used twice and one not at all."""

    def __init__(self, width: int = 33) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.last = nn.Linear(width, 7)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, self.layers[0]):
            given = torch.tanh(layer(given))
        return self.last(given)


def deep_model(dtype: torch.dtype = torch.float32, width: int = 33) -> Deep:
    torch.manual_seed(0)
    return Deep(width).to(DEVICE, dtype)


def given_to(rank: int, dtype: torch.dtype = torch.float32, width: int = 33) -> torch.Tensor:
    return torch.randn(5, width, generator=torch.Generator().manual_seed(100 + rank)).to(DEVICE, dtype)


def gradients(model: nn.Module, given: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(given).float().pow(2).sum().backward()
    found = [parameter.grad for parameter in model.parameters()]
    return [each.full_tensor() if isinstance(each, DTensor) else each.clone() for each in found]
