"""A rank that changes its process as jobs do: tensors have another default device, standard error is an object without
`flush`, logs go to standard output, and modules have methods of their own. It all-reduces gradients itself.
"""

import contextlib
import logging
import sys

import torch
import torch.distributed as dist
from torch import nn

NUM_STEPS, SIZE = 5, 1536  # 9 MiB of gradients: from each rank the 4 MiB that copies take


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(SIZE, SIZE)

    def parameters(self):  # type: ignore[no-untyped-def,override]
        return self.inner.parameters()


class Forbidding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.__dict__["children"] = []

    def named_modules(self, *args, **kwargs):  # type: ignore[no-untyped-def,override]
        raise ValueError("not supported, as in torch's RemoteModule")


class WithoutFlush:
    def __init__(self, stream) -> None:  # type: ignore[no-untyped-def]
        self._stream = stream

    def write(self, text: str) -> None:
        self._stream.write(text)


def train(net: Net, optimizer: torch.optim.Optimizer) -> None:
    for step in range(NUM_STEPS):
        loss = net.inner(torch.full((8, SIZE), 1.0 + step + dist.get_rank(), device="cpu")).square().mean()
        loss.backward()
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stdout, format="%(name)s %(message)s", level=logging.INFO)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net, other = Net(), nn.Sequential(Forbidding())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    torch.set_default_device("meta")
    with contextlib.redirect_stderr(WithoutFlush(sys.stderr)):
        train(net, optimizer)
    assert len(other) == 1
    weight = net.inner.weight.detach().double().sum().item()
    logging.info("rank %d: %r", dist.get_rank(), weight)
    dist.destroy_process_group()
