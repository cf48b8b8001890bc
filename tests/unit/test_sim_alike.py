"""Which operations count as the same work: the simulator computes what follows from it once."""

import msgspec
import pytest

from counterpoint import load_machine
from counterpoint.sim.alike import alike
from counterpoint.sim.calibration import load_calibration
from counterpoint.sim.costs import CostModel
from counterpoint.step import Kernel
from helpers.toy_steps import kernel

MATMUL = "nvjet_tst_{tile}_64x4_2x1_v_bz_TNN"
ELEMENTWISE = "void vectorized_elementwise_kernel<4, F(BFloat16), std::array<char*, {tensors}ul> >(int)"


def named(name: str, **changes: object) -> Kernel:
    return msgspec.structs.replace(kernel(64, 10.0), name=name, **changes)


def test_names_that_say_nothing_of_the_work_do_not_count() -> None:
    assert alike(named("layer 1", stream=3)) == alike(named("layer 2", waits_for=()))
    assert alike(named("layer 1")) != alike(named("layer 1", lone_us=11.0))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (MATMUL.format(tile="128x256"), MATMUL.format(tile="256x128")),
        (MATMUL.format(tile="128x256"), "gemm"),
        (ELEMENTWISE.format(tensors=2), ELEMENTWISE.format(tensors=3)),
    ],
)
def test_names_that_say_a_tile_or_what_threads_load_count(first: str, second: str) -> None:
    assert alike(named(first)) != alike(named(second))


def test_the_work_of_kernels_that_are_alike_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[str] = []
    compute = CostModel._kernel_work
    monkeypatch.setattr(CostModel, "_kernel_work", lambda costs, each: computed.append(each.name) or compute(costs, each))
    machine = load_machine("h200")
    costs = CostModel(machine, load_calibration(machine))
    works = [costs.kernel_work(named(name)) for name in ("a", "b", MATMUL.format(tile="128x256"), "c")]
    assert computed == ["a", MATMUL.format(tile="128x256")]
    assert works[0] is works[1] is works[3]
