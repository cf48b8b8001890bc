"""When the memory of gathered parameters is freed; on CPUs, where nothing has to wait."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")


class Parameter:
    """As much of FSDP2's parameter as its memory needs."""

    def __init__(self) -> None:
        self.all_gather_outputs = [torch.zeros(8)]
        self._unsharded_inner_tensors: list[Any] = []
        self.num_freed = 0

    def free_unsharded_param(self) -> None:
        self.num_freed += 1

    @property
    def is_allocated(self) -> bool:
        return bool(self.all_gather_outputs[0].untyped_storage().size())


@pytest.fixture
def memory() -> Any:
    return importlib.import_module("counterpoint.integrations.parameter_memory").ParameterMemory(torch.device("cpu"))


def adopted(memory: Any, number: int) -> list[Parameter]:
    """Parameters in groups of their own."""
    parameters = [Parameter() for _ in range(number)]
    for parameter in parameters:
        memory.adopt(SimpleNamespace(fsdp_params=[parameter]))
    return parameters


def gather(memory: Any, parameter: Parameter) -> None:
    memory.allocate(lambda: parameter.all_gather_outputs)
    assert parameter.is_allocated


def test_memory_is_freed_two_groups_later(memory: Any) -> None:
    layers = adopted(memory, 5)
    for layer in layers:
        gather(memory, layer)
        layer.free_unsharded_param()
        assert layer.is_allocated
    assert [layer.is_allocated for layer in layers] == [False, False, False, True, True]
    gather(memory, layers[0])
    assert [layer.is_allocated for layer in layers] == [True, False, False, True, True]


def test_no_more_than_two_groups_stay_where_all_leave_and_none_is_gathered(memory: Any) -> None:
    layers = adopted(memory, 6)
    for layer in layers:
        gather(memory, layer)
    for number, layer in enumerate(layers):  # as at the end of a backward pass
        layer.free_unsharded_param()
        assert [each.is_allocated for each in layers] == [not number - 1 > place for place in range(6)]


def test_what_is_gathered_again_at_once_is_in_use_until_it_is_freed_again(memory: Any) -> None:
    layers = adopted(memory, 4)
    for layer in (layers[0], layers[0], *layers[1:]):
        gather(memory, layer)
        if layer is not layers[0]:
            layer.free_unsharded_param()
    assert [layer.is_allocated for layer in layers] == [True, False, True, True]
    layers[0].free_unsharded_param()
    layers[0].free_unsharded_param()  # as FSDP does where parameters had fewer shards after forward
    assert layers[0].is_allocated
    for _ in range(3):
        gather(memory, layers[1])
        layers[1].free_unsharded_param()
    assert not layers[0].is_allocated


def test_a_model_of_few_groups_frees_its_memory_at_once(memory: Any) -> None:
    layers = adopted(memory, 2)
    for layer in layers:
        gather(memory, layer)
        layer.free_unsharded_param()
        assert not layer.is_allocated


def test_what_fsdp_filled_is_freed_at_once(memory: Any) -> None:
    (layer,) = adopted(memory, 1)
    layer.free_unsharded_param()
    assert not layer.is_allocated


def test_undone_memory_is_fsdps_again(memory: Any) -> None:
    layers = adopted(memory, 3)
    for layer in layers:
        gather(memory, layer)
    layers[0].free_unsharded_param()
    memory.undo([SimpleNamespace(fsdp_params=layers)])
    assert [layer.is_allocated for layer in layers] == [False, True, True]
    layers[1].free_unsharded_param()
    assert layers[1].num_freed == 1
