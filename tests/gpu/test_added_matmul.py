"""A matrix plus a product by one kernel of cuBLASLt: results, and that nothing else runs on the GPU."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from counterpoint.ops import added_matmul
from counterpoint.ops.added_matmul import add_product

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
    monkeypatch.setattr(added_matmul, "_kernel", lambda *_: pytest.fail("the library would multiply"))
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    try:
        add_product(*operands, out := torch.empty_like(operands[0]))
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = False
    assert (out.double() - operands[0].double() - operands[1].double() @ operands[2].double()).abs().max() < 1


def test_sums_that_are_captured_count_their_tiles_apart() -> None:
    """Two graphs of one stream, replayed at the same time on two others."""
    added, left, right = (drawn(*each, dtype=torch.bfloat16) for each in ((2048, 8192), (2048, 2048), (2048, 8192)))
    outs = [torch.empty_like(added) for _ in range(3)]
    add_product(added, left, right, outs[2])
    graphs = [torch.cuda.CUDAGraph() for _ in outs[:2]]
    for graph, out in zip(graphs, outs, strict=False):
        with torch.cuda.graph(graph):
            for _ in range(20):
                add_product(added, left, right, out)
    for _ in range(5):
        for out in outs[:2]:
            out.zero_()
        torch.cuda.synchronize()
        for graph in graphs:
            with torch.cuda.stream(torch.cuda.Stream()):
                graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, outs[2]) for out in outs[:2])
