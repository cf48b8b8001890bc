"""Products of two matrices, and sums with a product, by the fastest kernel that is known.

The kernel of a product in half precision is chosen by its operands' properties, for all schedules of the process, from
times of numbers drawn for that (`kernel_choice.py`). `multiplying` says whether it is used, or torch's own, which gives the
same bits.
"""

import logging
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial

import torch

from counterpoint.errors import DeviceError
from counterpoint.ops import cublaslt
from counterpoint.ops.cublaslt import Kernels, Operand, half_precision_settings
from counterpoint.ops.kernel_choice import KernelTimes, num_turns

LOGGER = logging.getLogger("counterpoint")
NUM_PRODUCTS = 1024  # most products whose kernels are kept; each is a few KB of the host
MAX_MEASURED = 256  # most products of a process whose kernels are timed, in some 0.05 s each: shapes may never end


TILE = 128  # rows and columns of a result that one SM computes, in the usual kernels with the smallest tiles


class _Thread(threading.local):
    """How this thread multiplies: whether by chosen kernels, and the list to which products are added instead."""

    takes_chosen = False
    found: "list[Product] | None" = None


class _Measured:
    """How many products of this process have been measured."""

    num = 0


THREAD = _Thread()
MEASURED = _Measured()


def set_product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """Write left @ right to `out`: (M, K), (K, N) -> (M, N), all of one type."""
    if THREAD.found is None and not THREAD.takes_chosen:
        torch.mm(left, right, out=out)
        return
    if out.stride(1) != 1:  # as for the gradient of a transposed weight: the same product, transposed
        left, right, out = right.t(), left.t(), out.t()
    product = _product(left, right, out, out)
    if THREAD.found is not None:
        THREAD.found += [product] if product else []
    elif product is None:
        torch.mm(left, right, out=out)
    else:
        product.launch(product.chosen, left, right, out, out)


def add_product(added: torch.Tensor, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """Write added + left @ right to `out`: (M, N), (M, K), (K, N) -> (M, N), all of one type. `out` and `added` share no
    memory, or are the same.

    On NVIDIA GPUs, products of bf16 and fp16 are one kernel, unless `out` is `added`. All others are torch's `addmm`, which
    copies `added` first.
    """
    product = None if added is out else _product(left, right, added, out, is_added=True)
    if THREAD.found is not None:
        THREAD.found += [product] if product else []
    elif product is None:
        torch.addmm(added, left, right, out=out)
    else:
        product.launch(product.chosen if THREAD.takes_chosen else 0, left, right, added, out)


def is_looking() -> bool:
    """Return whether products of this thread are only looked at."""
    return THREAD.found is not None


@contextmanager
def looking() -> "Iterator[list[Product]]":
    """Let this thread add products to a list instead of multiplying."""
    found: list[Product] = []
    THREAD.found = found
    try:
        yield found
    finally:
        THREAD.found = None


@contextmanager
def multiplying(*, by_chosen: bool) -> Iterator[None]:
    """Let this thread multiply by the kernels that are chosen, where there are any, or else by torch's."""
    THREAD.takes_chosen = by_chosen
    try:
        yield
    finally:
        THREAD.takes_chosen = False


def _product(
    left: torch.Tensor, right: torch.Tensor, added: torch.Tensor, out: torch.Tensor, *, is_added: bool = False
) -> "Product | None":
    """Return the product with these operands, or None if torch alone can multiply them."""
    if not cublaslt.is_available(left):
        return None
    operands = tuple(map(Operand.of, (right, left, added, out)))
    return _known_product(left.dtype, left.device, operands, is_added=is_added, settings=half_precision_settings())


@lru_cache(NUM_PRODUCTS)
def _known_product(
    dtype: torch.dtype, device: torch.device, operands: tuple[Operand, ...], *, is_added: bool, settings: object
) -> "Product | None":
    """Return the product under these settings of torch, by which its own kernel may have other bits."""
    try:
        kernels = Kernels(dtype, device, operands, is_added=is_added)
    except DeviceError as problem:  # on one rank perhaps, so the product must go on
        LOGGER.warning("%s torch multiplies instead.", problem)
        return None
    return Product(kernels, (dtype, device, operands), is_added=is_added) if kernels.number else None


class Product:
    """One product's kernels, and which of them is used. Without an addition, number 0 is torch's own."""

    def __init__(
        self, kernels: Kernels, like: tuple[torch.dtype, torch.device, tuple[Operand, ...]], *, is_added: bool
    ) -> None:
        self._kernels, self._like, self._is_added = kernels, like, is_added
        self.chosen = 0
        self._is_measured = False
        self._measurement: KernelTimes | None = None

    def launch(self, number: int, left: torch.Tensor, right: torch.Tensor, added: torch.Tensor, out: torch.Tensor) -> None:
        """Launch the kernel of that number on the current stream; `added` counts only if this product is added."""
        if self._is_added:
            self._kernels.launch(number, left, right, added, out)
        elif number:
            self._kernels.launch(number - 1, left, right, out, out)
        else:
            torch.mm(left, right, out=out)

    def measure(self) -> None:
        """Begin to time the kernels on the current stream, unless they have been timed, or it would take too long.

        Kernels may be loaded for that, so nothing that the GPU has yet to do may wait for what other ranks have not issued.
        """
        dtype, device, (right, left, added, out) = self._like
        numbers = range(self._kernels.number + (not self._is_added))
        num_tiles = math.ceil(out.shape[0] / TILE) * math.ceil(out.shape[1] / TILE)
        busy = min(1.0, num_tiles / torch.cuda.get_device_properties(device).multi_processor_count)
        turns = num_turns(2.0 * left.shape[0] * left.shape[1] * right.shape[1] / busy, len(numbers))
        if self._is_measured or turns is None or MEASURED.num >= MAX_MEASURED:
            return
        self._is_measured = True
        MEASURED.num += 1
        draw = torch.Generator(device)  # the job's own numbers stay what they are
        kinds = (left, right, *([added] if self._is_added else []), out, out)
        num_bytes = dtype.itemsize * sum(each.extent for each in kinds)
        if 2 * num_bytes > torch.cuda.mem_get_info(device)[0]:  # torch must not have to give its cache back for this
            return
        first, second, *others = (each.drawn(dtype, draw) for each in kinds)
        launches = [partial(self.launch, number, first, second, others[0]) for number in numbers]
        self._measurement = KernelTimes(launches, others[-2:], turns)

    def is_chosen(self) -> bool:
        """Return whether the measurement is over; if so, take its kernel."""
        measurement = self._measurement  # of a product that other threads may ask as well
        if measurement is not None and measurement.is_over():
            self.chosen, self._measurement = measurement.fastest(), None
        return self._measurement is None
