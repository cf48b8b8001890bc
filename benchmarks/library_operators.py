"""Operators of PyTorch for `library_kernels`: each makes its tensors when it is asked to, and returns a call."""

from collections.abc import Callable

import torch
from torch.nn import functional as f
from torch.nn.attention import SDPBackend, sdpa_kernel

Call = Callable[[], object]
Make = Callable[[], Call]
ATEN, HALF, SINGLE = torch.ops.aten, torch.bfloat16, torch.float32
WIDE, TALL, FLAT = (16384, 8192), (8192, 8192), (8192,)


def drawn(*sizes: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.randn(*sizes, device="cuda", dtype=dtype)


def image(*sizes: int) -> torch.Tensor:
    return drawn(*sizes).to(memory_format=torch.channels_last)


def on(call: Callable[..., object], *sizes: tuple[int, ...], dtype: torch.dtype = HALF) -> Make:
    """Make tensors of these sizes; the call gets them."""

    def make() -> Call:
        tensors = [drawn(*each, dtype=dtype) for each in sizes]
        return lambda: call(*tensors)

    return make


def compiled(call: Callable[..., object], *sizes: tuple[int, ...]) -> Make:
    """Compile when tensors are made: a module that is imported compiles nothing."""

    def make() -> Call:
        return on(torch.compile(call), *sizes)()

    return make


def attention(backend: SDPBackend, *sizes: int, is_causal: bool = False) -> Make:
    def attend(*tensors: torch.Tensor) -> object:
        with sdpa_kernel(backend):
            return f.scaled_dot_product_attention(*tensors, is_causal=is_causal)

    return on(attend, sizes, sizes, sizes)


def attention_backward() -> Call:
    tensors = [drawn(2, 24, 4096, 128) for _ in range(3)]
    found = ATEN._scaled_dot_product_flash_attention(*tensors, 0.0, True)
    gradient, (result, *rest) = torch.randn_like(found[0]), found
    backward = ATEN._scaled_dot_product_flash_attention_backward
    return lambda: backward(gradient, *tensors, result, *rest[:5], 0.0, True, *rest[5:7])


def convolution(*sizes: int, width: int, in_channels: int) -> Make:
    def make() -> Call:
        given, weight = image(*sizes), image(256, in_channels, width, width)
        return lambda: f.conv2d(given, weight, padding=width // 2)

    return make


def optimizer() -> Call:
    parameters = [torch.nn.Parameter(drawn(4096, 4096, dtype=SINGLE)) for _ in range(8)]
    for each in parameters:
        each.grad = torch.randn_like(each)
    return torch.optim.AdamW(parameters, fused=True, capturable=True).step


def indexed(call: Callable[..., object], most: int, number: int, *sizes: tuple[int, ...]) -> Make:
    def make() -> Call:
        index = torch.randint(0, most, (number,), device="cuda")
        tensors = [drawn(*each) for each in sizes]
        return lambda: call(index, *tensors)

    return make


def on_image(call: Callable[[torch.Tensor], object], *sizes: int) -> Make:
    def make() -> Call:
        given = image(*sizes)
        return lambda: call(given)

    return make


def norm_backward() -> Call:
    gradient, given, weight, bias = drawn(16384, 4096), drawn(16384, 4096), drawn(4096), drawn(4096)
    mean, deviation = drawn(16384, 1, dtype=SINGLE), torch.rand(16384, 1, device="cuda")
    backward = ATEN.native_layer_norm_backward
    return lambda: backward(gradient, given, [4096], mean, deviation, weight, bias, [True, True, True])


def fp8_matmul() -> Call:
    left, right = drawn(8192, 8192).to(torch.float8_e4m3fn), drawn(8192, 8192).to(torch.float8_e4m3fn).t()
    rows, columns = torch.ones(8192, 1, device="cuda"), torch.ones(1, 8192, device="cuda")
    return lambda: torch._scaled_mm(left, right, scale_a=rows, scale_b=columns, out_dtype=HALF)


def grouped_matmul() -> Call:
    rows, weights = drawn(16384, 4096), drawn(8, 4096, 4096).transpose(1, 2)
    ends = torch.arange(2048, 16385, 2048, device="cuda", dtype=torch.int32)
    return lambda: torch._grouped_mm(rows, weights, offs=ends)


OPERATORS: dict[str, Make] = {
    "matmul": on(torch.mm, (8192, 6144), (6144, 7168)),
    "multiply": on(lambda x: torch.mul(x, 1.5), (192 << 20,)),
    "softmax": on(lambda x: torch.softmax(x, 1), WIDE),
    "add": on(torch.add, WIDE, WIDE),
    "GELU": on(f.gelu, (16384, 12288)),
    "where": on(lambda x, y, z: torch.where(x > 0, y, z), TALL, TALL, TALL),
    "cast to fp8": on(lambda x: x.to(torch.float8_e4m3fn), (16384, 16384)),
    "SwiGLU, compiled": compiled(lambda x, y: f.silu(x) * y, (16384, 11008), (16384, 11008)),
    "RMS norm, compiled": compiled(lambda x: f.rms_norm(x, FLAT), WIDE),
    "layer norm": on(lambda x, w, b: f.layer_norm(x, FLAT, w, b), WIDE, FLAT, FLAT),
    "layer norm, backward": norm_backward,
    "RMS norm": on(lambda x, w: f.rms_norm(x, FLAT, w), WIDE, FLAT),
    "group norm": on(lambda x, w, b: f.group_norm(x, 32, w, b), (32, 256, 112, 112), (256,), (256,)),
    "batch norm": on_image(lambda x: f.batch_norm(x, None, None, training=True), 64, 256, 112, 112),
    "log softmax": on(lambda x: f.log_softmax(x, 1), (8192, 50304)),
    "softmax, backward": on(lambda x, y: ATEN._softmax_backward_data(x, y, 1, HALF), WIDE, WIDE),
    "dropout": on(lambda x: ATEN.native_dropout(x, 0.1, True), WIDE),
    "transpose": on(lambda x: x.t().contiguous(), WIDE),
    "concatenate": on(lambda x, y: torch.cat([x, y], 1), (16384, 4096), (16384, 4096)),
    "embedding": indexed(f.embedding, 50304, 32768, (50304, 8192)),
    "index copy": indexed(lambda i, x, y: x.index_copy_(0, i, y), 32768, 16384, (32768, 4096), (16384, 4096)),
    "index add": indexed(lambda i, x, y: x.index_add_(0, i, y), 32768, 16384, (32768, 4096), (16384, 4096)),
    "gather": indexed(lambda i, x: x.gather(1, i.view(16384, 4096)), 8192, 16384 * 4096, WIDE),
    "sum of columns": on(lambda x: x.sum(0), (32768, 8192)),
    "sum of rows": on(lambda x: x.sum(1), (16384, 16384)),
    "largest of rows": on(lambda x: x.argmax(1), (16384, 50304)),
    "vector norm": on(torch.linalg.vector_norm, (256 << 20,)),
    "cumulative sum": on(lambda x: torch.cumsum(x, 1), TALL, dtype=SINGLE),
    "largest eight": on(lambda x: torch.topk(x, 8, 1), TALL, dtype=SINGLE),
    "sort": on(lambda x: torch.sort(x, 1), (2048, 8192), dtype=SINGLE),
    "max pool": on_image(lambda x: f.max_pool2d(x, 3, 2, 1), 64, 256, 112, 112),
    "convolution 3x3": convolution(64, 256, 56, 56, width=3, in_channels=256),
    "convolution 1x1": convolution(64, 512, 56, 56, width=1, in_channels=512),
    "depthwise convolution": on(lambda x, w: f.conv2d(x, w, groups=256), (32, 256, 112, 112), (256, 1, 3, 3)),
    "FlashAttention 2": attention(SDPBackend.FLASH_ATTENTION, 2, 24, 4096, 128, is_causal=True),
    "FlashAttention 2, heads of 64": attention(SDPBackend.FLASH_ATTENTION, 4, 32, 4096, 64),
    "FlashAttention 2, backward": attention_backward,
    "memory-efficient attention": attention(SDPBackend.EFFICIENT_ATTENTION, 1, 24, 4096, 128),
    "cuDNN attention": attention(SDPBackend.CUDNN_ATTENTION, 2, 32, 6144, 128, is_causal=True),
    "batched matmul": on(torch.bmm, (64, 2048, 128), (64, 128, 2048)),
    "grouped matmul": grouped_matmul,
    "fp8 matmul": fp8_matmul,
    "fp32 matmul": on(torch.mm, (4096, 4096), (4096, 4096), dtype=SINGLE),
    "AdamW": optimizer,
}
