"""Which kernel of a product is chosen, on doubles of the kernels, and products that torch alone multiplies."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch

from counterpoint.ops import products
from counterpoint.ops.kernel_choice import FLOPS_PER_US, SWITCH, fastest_alike, is_wanted, num_turns
from counterpoint.ops.kernel_trial import KernelTrial
from counterpoint.ops.products import add_product, looking, multiplying, set_product


@pytest.mark.parametrize(
    ("times", "num_wrong", "chosen"),
    [
        ([[10, 10, 10], [9, 9, 9], [8, 8, 8]], [0, 0, 0], 2),
        ([[10, 10, 10], [9, 9, 9], [8, 8, 8]], [0, 0, 1], 1),  # other bits
        ([[10, 10, 10], [9.95, 9.95, 9.95]], [0, 0], 0),  # alike
        ([[10, 10, 10], [9, 30, 9]], [0, 0], 1),  # one turn was disturbed
        ([[10, 30, 30], [9, 9, 40]], [0, 0], 1),
        ([[10, 10, 10], [9, 9, 9]], [0, 5], 0),
        ([[10, 10, 10], [9, 9, 9]], [3, 0], 1),  # torch's own kernel has other bits from call to call
        ([[10, 10, 10], [12, 12, 12]], [3, 3], 0),
    ],
)
def test_the_fastest_kernel_with_the_same_bits_is_chosen(
    times: list[list[float]], num_wrong: list[int], chosen: int
) -> None:
    assert fastest_alike(times, num_wrong) == chosen


@pytest.mark.parametrize(
    ("launch_us", "turns"),
    [(0.02, None), (25, (5, 40)), (400, (5, 3)), (1500, (5, 1)), (30_000, (3, 1)), (40_000, None)],
)
def test_long_products_are_timed_less_and_very_long_ones_not(launch_us: float, turns: tuple[int, int] | None) -> None:
    assert num_turns(launch_us * FLOPS_PER_US, num_kernels=9) == turns


@pytest.mark.parametrize("is_transposed", [False, True])
def test_products_on_cpus_are_those_of_torch(is_transposed: bool) -> None:
    left, right, added = torch.randn(5, 7), torch.randn(7, 3), torch.randn(5, 3)
    out = torch.empty(3, 5).t() if is_transposed else torch.empty(5, 3)
    with looking() as found:
        set_product(left, right, out.zero_())
        add_product(added, left, right, out)
    assert not out.any(), "who looks does not multiply"
    assert found == [], "only torch multiplies these"
    with multiplying(by_chosen=True):
        set_product(left, right, out)
        assert torch.allclose(out, left @ right)
        add_product(added, left, right, out)
        assert torch.allclose(out, added + left @ right)
        add_product(out, left, right, out)
    assert torch.allclose(out, added + 2 * left @ right)


class Clocked:
    """Stands for a measurement that is over when the test says so."""

    def __init__(self) -> None:
        self.number, self.has_passed = 2, False

    def is_over(self) -> bool:
        return self.has_passed

    def fastest(self) -> int:
        return self.number


class Kernels:
    """Stands for the library's kernels, and keeps which were launched."""

    number = 3

    def __init__(self) -> None:
        self.launched: list[int] = []

    def launch(self, number: int, *_matrices: torch.Tensor) -> None:
        self.launched.append(number)


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clocked]:
    """The measurement of every product, on kernels that only note their launches."""
    found = Clocked()
    monkeypatch.setattr(products, "MEASURED", products._Measured())
    monkeypatch.setattr(products, "KernelTimes", lambda *_: found)
    monkeypatch.setattr(products, "num_turns", lambda *_: (5, 1))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 30, 1 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(products.cublaslt, "is_available", lambda _left: True)
    monkeypatch.setattr(products, "Kernels", lambda *_, **__: Kernels())
    products._known_product.cache_clear()
    yield found
    products._known_product.cache_clear()


@pytest.mark.usefixtures("clocked")
def test_a_chosen_kernel_multiplies_where_it_is_asked_for() -> None:
    left, right, out, total = torch.randn(4, 6), torch.randn(6, 8), torch.empty(4, 8), torch.empty(4, 8)
    with looking() as found:
        set_product(left, right, out)
        add_product(out, left, right, total)
    product, added = found
    assert product is not added, "a sum is another product"
    for each in found:
        each.measure()
        assert not each.is_chosen()
    product.chosen = added.chosen = 2
    set_product(left, right, out)
    assert torch.equal(out, left @ right)
    with multiplying(by_chosen=True):
        set_product(left, right, out)
        add_product(out, left, right, total)
    add_product(out, left, right, total)
    launched = [each._kernels.launched for each in found]  # type: ignore[attr-defined]
    assert launched == [[1], [2, 0]], "number 0 of a product alone is torch's own"


@pytest.mark.usefixtures("clocked")
def test_shapes_without_end_are_not_measured_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "MAX_MEASURED", 5)
    with looking() as found:
        for size in range(2, 20):
            set_product(torch.randn(size, 4), torch.randn(4, 4), torch.empty(size, 4))
    for product in found:
        product.measure()
    assert products.MEASURED.num == 5


@pytest.mark.usefixtures("clocked")
def test_a_full_gpu_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (300, 1 << 30))
    with looking() as found:
        set_product(torch.randn(4, 6), torch.randn(6, 8), torch.empty(4, 8))
    found[0].measure()
    assert found[0].is_chosen()
    assert found[0]._measurement is None


@pytest.mark.parametrize("why", ["switch", "deterministic", "tuned by torch", "nothing"])
def test_kernels_are_chosen_unless_something_forbids_it(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    monkeypatch.setenv(SWITCH, "0" if why == "switch" else "")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: why == "deterministic")
    monkeypatch.setattr(torch._C, "_cuda_tunableop_is_enabled", lambda: why == "tuned by torch", raising=False)
    assert is_wanted() is (why == "nothing")
    assert KernelTrial(torch.device("cpu")).is_over is not is_wanted()


def test_numbers_are_drawn_for_the_same_strides_and_alignment() -> None:
    matrix = torch.randn(8, 1024)[:, 4:68].t()
    like = products.Operand((64, 8), matrix.stride(), 16)
    found = like.drawn(torch.float32, torch.Generator())
    assert (found.shape, found.stride()) == (matrix.shape, matrix.stride())
    assert found.std() > 0.8
    assert found.storage_offset() == 4
