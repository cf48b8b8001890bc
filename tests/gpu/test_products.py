"""Products, and sums with a product, by kernels of cuBLASLt: results, and that nothing else runs on the GPU; which kernel
is chosen."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from counterpoint.ops import products
from counterpoint.ops.kernel_trial import KernelTrial
from counterpoint.ops.products import Product, add_product, looking, multiplying, set_product

NUM_ROWS, NUM_INNER, NUM_COLUMNS = 384, 512, 640


def drawn(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*sizes, device="cuda").to(dtype)


def gpu_operations(added: torch.Tensor, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> list[str]:
    """Names of what one call runs on the GPU."""
    add_product(added, left, right, out)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        add_product(added, left, right, out)
        torch.cuda.synchronize()
    return [event.name for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("is_transposed", [False, True], ids=["weight", "transposed weight"])
@pytest.mark.parametrize("layout", ["whole", "rows", "columns", "odd rows"])
def test_the_sum_is_right_and_one_kernel_in_half_precision(dtype: torch.dtype, is_transposed: bool, layout: str) -> None:
    left = drawn(NUM_ROWS, NUM_INNER, dtype=dtype)
    right = drawn(NUM_COLUMNS, NUM_INNER, dtype=dtype).t() if is_transposed else drawn(NUM_INNER, NUM_COLUMNS, dtype=dtype)
    start = {"rows": 128, "odd rows": 3}.get(layout, 0)
    there = drawn(2 * NUM_ROWS, NUM_COLUMNS, dtype=dtype)[start : start + NUM_ROWS]
    target = drawn(NUM_ROWS, NUM_COLUMNS * (2 if layout == "columns" else 1), dtype=dtype)[:, -NUM_COLUMNS:]
    before = there.clone()
    found = gpu_operations(there, left, right, target)
    wanted = before.double() + left.double() @ right.double()
    rounding = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-3  # fp32 may be multiplied as tf32
    assert (target - wanted).abs().max() <= 2 * rounding * wanted.abs().max()
    assert torch.equal(there, before)
    assert dtype == torch.float32 or len(found) == 1, found


@pytest.mark.parametrize("sizes", [(37, 512, 644), (37, 513, 641), (64, 1, 64), (64, 64, 1), (1, 64, 64)], ids=str)
@pytest.mark.parametrize("is_transposed", [False, True], ids=["weight", "transposed weight"])
def test_sizes_without_a_kernel_of_their_own_are_added_as_well(sizes: tuple[int, int, int], is_transposed: bool) -> None:
    num_rows, num_inner, num_columns = sizes
    left, added = drawn(num_rows, num_inner, dtype=torch.bfloat16), drawn(num_rows, num_columns, dtype=torch.bfloat16)
    right = drawn(num_inner, num_columns, dtype=torch.bfloat16)
    right = drawn(num_columns, num_inner, dtype=torch.bfloat16).t() if is_transposed else right
    add_product(added, left, right, out := torch.empty_like(added))
    wanted = added.double() + left.double() @ right.double()
    assert (out - wanted).abs().max() <= 2 * torch.finfo(torch.bfloat16).eps * wanted.abs().max()


def test_bits_are_the_same_in_every_call() -> None:
    operands = [drawn(*sizes, dtype=torch.bfloat16) for sizes in ((512, 1024), (512, 2048), (2048, 1024))]
    results = [torch.empty_like(operands[0]) for _ in range(5)]
    for result in results:
        add_product(*operands, result)
    assert all(torch.equal(result, results[0]) for result in results)


def test_settings_that_the_library_would_not_follow_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    operands = [drawn(*sizes, dtype=torch.float16) for sizes in ((256, 256), (256, 256), (256, 256))]
    monkeypatch.setattr(products, "_known_product", lambda *_: pytest.fail("the library would multiply"))
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    try:
        add_product(*operands, out := torch.empty_like(operands[0]))
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = False
    assert (out.double() - operands[0].double() - operands[1].double() @ operands[2].double()).abs().max() < 1


@pytest.fixture(autouse=True)
def afresh() -> None:
    """No product is known."""
    products._known_product.cache_clear()


def measured(multiply: Callable[[], None]) -> Product:
    """The product that `multiply` computes, when its kernel is chosen."""
    with looking() as found:
        multiply()
        multiply()
    assert found[0] is found[1], "the second time it is known"
    found[0].measure()
    torch.cuda.synchronize()
    assert found[0].is_chosen()
    return found[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["weight", "transposed weight", "gradient of a weight", "of a transposed weight"])
def test_every_kernel_gives_the_bits_of_torch_and_the_fastest_is_used(dtype: torch.dtype, layout: str) -> None:
    num_rows, num_inner, num_columns = 1024, 4096, 3584
    left, right = drawn(num_rows, num_inner, dtype=dtype), drawn(num_inner, num_columns, dtype=dtype)
    out = torch.empty(num_rows, num_columns, device="cuda", dtype=dtype)
    if layout == "transposed weight":
        right = right.t().contiguous().t()
    elif layout != "weight":
        left = left.t().contiguous().t()
    if layout == "of a transposed weight":
        out = torch.empty(num_columns, num_rows, device="cuda", dtype=dtype).t()
    wanted = torch.mm(left, right)
    set_product(left, right, out)
    assert torch.equal(out, wanted), "before anything is chosen"
    out.zero_()
    product = measured(lambda: set_product(left, right, out))
    assert not out.any(), "who looks does not multiply"
    measured_times(product, left, right, out)  # the clock rises
    times = measured_times(product, left, right, out)
    assert times[product.chosen] <= 1.15 * min(times), times
    found = []
    with multiplying(by_chosen=True):
        for number in range(product._kernels.number + 1):
            product.chosen = number
            set_product(left, right, out.zero_())
            found.append(torch.equal(out, wanted))
    assert all(found), found


def measured_times(product: Product, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> list[float]:
    """The least time of a few launches by each kernel, torch's first."""
    chosen, times = product.chosen, []
    with multiplying(by_chosen=True):
        for number in range(product._kernels.number + 1):
            product.chosen = number
            events = [torch.cuda.Event(enable_timing=True) for _ in range(11)]
            torch.cuda._sleep(1_000_000)
            for event in events:
                event.record()
                set_product(left, right, out)
            torch.cuda.synchronize()
            times.append(min(one.elapsed_time(other) for one, other in pairwise(events)))
    product.chosen = chosen
    return times


def test_a_sum_with_a_product_has_the_same_bits_by_every_kernel() -> None:
    added, left, right = (drawn(*each, dtype=torch.bfloat16) for each in ((1024, 4096), (1024, 3072), (3072, 4096)))
    add_product(added, left, right, wanted := torch.empty_like(added))
    out = torch.empty_like(added)
    product = measured(lambda: add_product(added, left, right, out))
    assert product._is_measured
    with multiplying(by_chosen=True):
        for number in range(product._kernels.number):
            product.chosen = number
            add_product(added, left, right, out.zero_())
            assert torch.equal(out, wanted), number


def test_a_measurement_leaves_the_numbers_that_the_job_draws() -> None:
    left, right = drawn(1024, 4096, dtype=torch.bfloat16), drawn(4096, 3584, dtype=torch.bfloat16)
    torch.cuda.manual_seed(3)
    wanted = torch.rand(8, device="cuda")
    torch.cuda.manual_seed(3)
    product = measured(lambda: set_product(left, right, torch.empty(1024, 3584, device="cuda", dtype=torch.bfloat16)))
    assert product._is_measured
    assert torch.equal(torch.rand(8, device="cuda"), wanted)


def test_a_full_gpu_keeps_the_first_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = drawn(4096, 4096, dtype=torch.bfloat16), drawn(4096, 4096, dtype=torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 20, 1 << 30))
    product = measured(lambda: set_product(left, right, torch.empty_like(left)))
    assert (product._is_measured, product.chosen) == (True, 0)


@pytest.mark.parametrize("is_faster", [False, True])
def test_calls_take_turns_and_the_faster_kernels_stay(is_faster: bool) -> None:
    left, right = drawn(2048, 4096, dtype=torch.bfloat16), drawn(4096, 4096, dtype=torch.bfloat16)
    out = torch.empty(2048, 4096, device="cuda", dtype=torch.bfloat16)
    product = measured(lambda: set_product(left, right, out))
    product.chosen = 1
    trial = KernelTrial(left.device)
    for _ in range(40):
        trial.prepare(lambda: [product])
        with trial.turn(is_captured=False, is_steady=True):
            if products.THREAD.takes_chosen != is_faster:
                torch.cuda._sleep(1_000_000)
            set_product(left, right, out)
        torch.cuda.synchronize()
    assert trial.is_over
    assert trial.takes_chosen is is_faster
    assert torch.equal(out, torch.mm(left, right))


def test_products_that_are_captured_count_their_tiles_apart() -> None:
    """Two graphs of one stream, replayed at the same time on two others."""
    left, right = drawn(2048, 2048, dtype=torch.bfloat16), drawn(2048, 8192, dtype=torch.bfloat16)
    outs = [torch.empty(2048, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    product = measured(lambda: set_product(left, right, outs[0]))
    product.chosen = max(1, product.chosen)
    graphs = [torch.cuda.CUDAGraph() for _ in outs]
    for graph, out in zip(graphs, outs, strict=True):
        with torch.cuda.graph(graph), multiplying(by_chosen=True):
            for _ in range(20):
                set_product(left, right, out)
    for _ in range(5):
        for out in outs:
            out.zero_()
        torch.cuda.synchronize()
        for graph in graphs:
            with torch.cuda.stream(torch.cuda.Stream()):
                graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, torch.mm(left, right)) for out in outs)
