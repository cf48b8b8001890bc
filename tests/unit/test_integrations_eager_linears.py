"""Linears that take one step of autograd give what DTensor's public way gives: results, gradients, layouts, and errors."""

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
ops = pytest.importorskip("counterpoint.ops")
eager_linears = pytest.importorskip("counterpoint.integrations.eager_linears")
tensor_parallel = pytest.importorskip("counterpoint.integrations.tensor_parallel")

from torch import nn  # noqa: E402  torch may be missing
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: E402
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from counterpoint.errors import OperatorError  # noqa: E402

pytestmark = pytest.mark.usefixtures("group_of_one")


class FeedForward(nn.Module):
    """Two neighbors on one input, and a row-parallel linear."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((6, 8), (6, 8), (8, 6)))

    def forward(self, x: Any) -> Any:
        return self.down(torch.relu(self.gate(x)) * self.up(x))


def overlapped(output: Any, *, gathers_itself: bool) -> nn.Module:
    torch.manual_seed(3)
    module = FeedForward()
    mesh = init_device_mesh("cpu", (1,))
    given = {"input_layouts": Shard(1)} if gathers_itself else {}
    plan: dict[str, Any] = {name: ColwiseParallel(**given) for name in ("gate", "up")}
    plan["down"] = RowwiseParallel(output_layouts=output)
    if not gathers_itself:
        plan[""] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    parallelize_module(module, mesh, plan)
    tensor_parallel.overlap(module)
    return module


def step(module: nn.Module, num_sequences: int) -> list[Any]:
    """The output, and the gradients of the input and of the weights, of two passes that add up."""
    torch.manual_seed(5)
    x = torch.randn(num_sequences, 4, 6, requires_grad=True)
    for _ in range(2):
        output = module(x)
        output = output.to_local() if isinstance(output, DTensor) else output
        output.square().sum().backward()
    return [output, x.grad, *(each.grad for each in module.parameters())]


@pytest.mark.parametrize("num_sequences", [1, 2])
@pytest.mark.parametrize("gathers_itself", [True, False])
@pytest.mark.parametrize("output", [Shard(1), Replicate()])
def test_one_step_gives_what_the_public_way_gives(
    monkeypatch: pytest.MonkeyPatch, output: Any, gathers_itself: bool, num_sequences: int
) -> None:
    taken: list[Any] = []
    calls_it = eager_linears.EagerLinear.__call__

    def noted(self: Any, *arguments: Any) -> Any:
        taken.append(calls_it(self, *arguments))
        return taken[-1]

    monkeypatch.setattr(eager_linears.EagerLinear, "__call__", noted)
    module = overlapped(output, gathers_itself=gathers_itself)
    found = step(module, num_sequences)
    assert taken
    assert all(products is not None for products in taken)
    monkeypatch.setattr(eager_linears.EagerLinear, "__call__", lambda *_: None)
    expected = step(overlapped(output, gathers_itself=gathers_itself), num_sequences)
    for one, other in zip(found, expected, strict=True):
        assert type(one) is type(other)
        pairs = [(one, other)]
        if isinstance(one, DTensor):
            assert (one.placements, one.stride(), one.dtype) == (other.placements, other.stride(), other.dtype)
            pairs = [(one.to_local(), other.to_local())]
        assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("num_sequences", [1, 2])
def test_products_may_be_changed_in_place(num_sequences: int) -> None:
    module = overlapped(Shard(1), gathers_itself=True)
    x = torch.randn(num_sequences, 4, 6, requires_grad=True)
    expected = torch.autograd.grad((2 * module.up(x)).sum(), x)
    assert torch.equal(torch.autograd.grad(module.up(x).mul_(2).sum(), x)[0], expected[0])


def test_a_copy_of_a_model_is_one_of_its_own_and_there_is_no_second_derivative() -> None:
    module = overlapped(Shard(1), gathers_itself=True)
    other = copy.deepcopy(module)
    assert all(torch.equal(one, two) for one, two in zip(step(module, 1), step(other, 1), strict=True))
    x = torch.randn(1, 4, 6, requires_grad=True)
    with pytest.raises(OperatorError, match="has no second derivative"):
        torch.autograd.grad(module(x).square().sum(), x, create_graph=True)


@pytest.mark.parametrize("way", ["autocast", "dispatch mode", "profiler"])
def test_whoever_looks_gets_the_public_way_or_sees_the_operator(way: str) -> None:
    module = overlapped(Shard(1), gathers_itself=True)
    x = torch.randn(1, 4, 6)
    plain = module(x)
    if way == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            found = module(x)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.float(), plain, atol=0.1, rtol=0.1)
    elif way == "dispatch mode":
        seen = []

        class Looks(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc]  # torch is untyped here
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                seen.append(func)
                return func(*args, **(kwargs or {}))

        with Looks():
            found = module(x)
        assert set(seen) >= {torch.ops.counterpoint.matmul_reduce_scatter.default}
        assert torch.equal(found, plain)
    else:
        with torch.profiler.profile(acc_events=True) as profile:  # torch 2.11 and 2.12 warn without
            module(x).sum().backward()
        names = {event.name for event in profile.events()}
        assert {"counterpoint::all_gather_matmul", "counterpoint::matmul_reduce_scatter_backward"} <= names
