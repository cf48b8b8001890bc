"""What a framework that none of the integrations knows left on a module is refused by name, not guessed at."""

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402  after the check for torch
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Shard, distribute_tensor  # noqa: E402

from counterpoint.errors import IntegrationError  # noqa: E402
from counterpoint.integrations import tensor_parallel  # noqa: E402

pytestmark = pytest.mark.usefixtures("group_of_one")


def parallelize(module: nn.Module, parallel_dims: object) -> None:
    """As torchtitan 0.3 puts a function in place of a module's forward."""
    fn: Callable[..., Any] = module.forward

    def forward_with_redistribution(*inputs: Any) -> Any:
        assert parallel_dims is not None
        return fn(*inputs)

    module.forward = forward_with_redistribution


def linear() -> nn.Linear:
    made = nn.Linear(8, 8, bias=False)
    made.weight = nn.Parameter(distribute_tensor(made.weight.data, init_device_mesh("cpu", (1,)), [Shard(0)]))
    return made


def test_linears_that_a_torchtitan_of_another_release_split_are_refused() -> None:
    model = nn.Sequential(linear())
    parallelize(model[0], object())
    with pytest.raises(IntegrationError, match=r"split it by its backend of another release, but only partial_dtensor and"):
        tensor_parallel.overlap(model)
    assert "torchtitan" in tensor_parallel.why_none_waits(model)


def test_linears_that_only_fsdp_shards_are_none_of_tensor_parallelism() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(8, 8)), mesh=init_device_mesh("cpu", (1,)))
    assert isinstance(model[0].weight, DTensor)
    with pytest.raises(IntegrationError, match=r"has no linear that parallelize_module has split, .* Parallelize it first"):
        tensor_parallel.overlap(model)
