"""How many bytes a thread of one of torch's kernels has on the way, as its name tells it: what it loads at once, and stores.

An elementwise kernel loads and stores several numbers of each tensor at once; `std::array<char*, 3>` in its name says that
there are three. A kernel over lists of tensors, as of optimizers and of gradient clipping, has four numbers of each list on
the way (`kILP` in ATen's MultiTensorApply.cuh), and a fused optimizer stores all lists but the gradients. With more bytes on
the way fewer CTAs on an SM saturate the memory: one CTA of a fused Adam does on an H200, and `where` with a quarter of its
CTAs takes 19 % longer, a multiplication 74 % (benchmarks/results/library_kernels_h200.json).
"""

import re
from functools import lru_cache

LOADED_BYTES = 16  # by a thread of the kernel that gave streaming's `saturation_warps`: 8 numbers of bf16
USUAL_BYTES = 2 * LOADED_BYTES  # that it stores, too
ELEMENTWISE_NUMBERS, LISTED_NUMBERS = 8, 4
ELEMENTWISE = re.compile(
    r"elementwise_kernel<\d+, (?P<functor>.*), (?:std::|at::detail::)array<char ?\*, (?P<tensors>\d+)", re.DOTALL
)
OVER_LISTS = re.compile(
    r"multi_tensor_apply_kernel<.*?(?P<fused>FusedOptimizer)?TensorListMetadata<(?P<lists>\d+)[,>](?P<functor>.*)", re.DOTALL
)
CAST = re.compile(r"float(8|16)_copy")  # `float8_copy_kernel_cuda`, `bfloat16_copy_kernel_cuda`: the bits of the result
LAMBDA = re.compile(r"lambda\(([^()]+)\)")
ELEMENT = re.compile(r"\b(double|float|BFloat16|Half|bool|long|int)\b")
ELEMENT_BYTES = {"double": 8, "long": 8, "float": 4, "int": 4, "BFloat16": 2, "Half": 2, "bool": 1}


@lru_cache(maxsize=4096)
def under_way(name: str) -> float:
    """Return the bytes that a thread of a kernel of this name has on the way, as a multiple of the usual."""
    if (found := ELEMENTWISE.search(name)) is not None:
        return ELEMENTWISE_NUMBERS * _bytes_of_all(found["functor"], int(found["tensors"])) / USUAL_BYTES or 1.0
    if (found := OVER_LISTS.search(name)) is not None:
        lists = int(found["lists"])
        stored = lists - 1 if found["fused"] else 1
        return LISTED_NUMBERS * _bytes_of_all(found["functor"], lists + stored) / USUAL_BYTES or 1.0
    return 1.0


def _bytes_of_all(functor: str, num_tensors: int) -> int:
    """Return the bytes of a number of each tensor that a functor loads or stores; 0 if unknown. The result is like the last
    argument, unless the kernel converts.
    """
    arguments = LAMBDA.findall(functor)
    sizes = [ELEMENT_BYTES[each] for each in ELEMENT.findall(arguments[-1] if arguments else functor)]
    if not sizes:
        return 0
    if not arguments or len(sizes) != num_tensors - 1:
        return num_tensors * sizes[0]
    cast = CAST.search(functor)
    return sum(sizes) + (int(cast[1]) // 8 if cast else sizes[-1])
