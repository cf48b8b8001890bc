"""The contents of a workload file: one value for each of its tables, checked when built.

These values define the file's keys and limits, not how a step is built from them (`reader.py` does that). The format is
documented in `docs/workloads.md`.
"""

import re
from collections.abc import Iterable
from typing import NoReturn

from counterpoint.errors import WorkloadError, shown
from counterpoint.machine import ElementType
from counterpoint.step import MAX_RANKS, Character, CollectiveKind, CopyDirection, TransportKind
from counterpoint.value import Value
from counterpoint.workloads.gemm import Tile, parse_tile, stage_bytes, tile_count

MAX_ITERATIONS = 1000
MAX_DIMENSION = 1 << 31
MAX_BYTES = 1 << 50

_BYTE_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9,
    "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30,
}  # fmt: skip


class Wait(Value, frozen=True, kw_only=True):
    """Wait for the entry called `name`: of the same iteration, or of the previous one if `previous`."""

    name: str
    previous: bool = False


class Gemm(Value, frozen=True, kw_only=True):
    """A tiled matrix multiplication C[M, N] = A[M, K] B[K, N].

    Shared memory is given by `shared_bytes_per_cta` or follows from the number of pipeline `stages`. If `num_ctas` is given,
    the kernel is persistent: that many CTAs divide the tiles evenly. Otherwise each tile has its own CTA. `hbm_bytes`
    replaces the traffic that the reuse model of `gemm.py` gives.
    """

    name: str
    stream: int
    m: int
    n: int
    k: int
    dtype: ElementType
    tile: str
    threads_per_cta: int
    registers_per_thread: int
    shared_bytes_per_cta: int | None = None
    stages: int | None = None
    num_ctas: int | None = None
    hbm_bytes: float | str | None = None
    lone_us: float | None = None
    is_work_sharing: bool = False
    cta_time_spread: float = 0.0
    carveout_percent: int = -1
    waits_for: tuple[str | Wait, ...] = ()

    def __post_init__(self) -> None:
        where = f"GEMM '{shown(self.name)}'"
        _check_range(where, "m", self.m, (1, MAX_DIMENSION))
        _check_range(where, "n", self.n, (1, MAX_DIMENSION))
        _check_range(where, "k", self.k, (1, MAX_DIMENSION))
        tiles = tile_count(self.m, self.n, self.tile_sizes)
        if self.num_ctas is not None:
            _check_range(where, "num_ctas of a grid of tiles", self.num_ctas, (1, tiles))
        if (self.shared_bytes_per_cta is None) == (self.stages is None):
            _refuse(
                f"{where}: give either shared_bytes_per_cta or stages; found "
                f"{'neither' if self.stages is None else f'{self.shared_bytes_per_cta} bytes and {self.stages} stages'}."
            )
        if self.stages is not None:
            _check_range(where, "stages", self.stages, (1, 16))
        parse_traffic(self.hbm_bytes, where)

    @property
    def tile_sizes(self) -> Tile:
        """The tile's M, N and K."""
        return parse_tile(self.tile, f"GEMM '{shown(self.name)}'")

    @property
    def shared_bytes(self) -> int:
        """Shared memory of one CTA."""
        if self.shared_bytes_per_cta is not None:
            return self.shared_bytes_per_cta
        return (self.stages or 0) * stage_bytes(self.dtype, self.tile_sizes)


class OtherKernel(Value, frozen=True, kw_only=True):
    """Any other computation kernel: its launch, and its time alone or its work.

    `dtype` sets the rate of the operations of a matmul or an attention; the default is bf16.
    """

    name: str
    stream: int
    num_ctas: int
    threads_per_cta: int
    registers_per_thread: int
    shared_bytes_per_cta: int = 0
    ctas_per_cluster: int = 1
    carveout_percent: int = -1
    character: Character = "other"
    dtype: ElementType | None = None
    lone_us: float | None = None
    flops: float | None = None
    hbm_bytes: float | str | None = None
    is_work_sharing: bool = False
    cta_time_spread: float = 0.0
    waits_for: tuple[str | Wait, ...] = ()

    def __post_init__(self) -> None:
        parse_traffic(self.hbm_bytes, f"Kernel '{shown(self.name)}'")
        if self.lone_us is None and self.flops is None and self.hbm_bytes is None:
            _refuse(f"Kernel '{shown(self.name)}' has neither a time nor work; give lone_us, flops or hbm_bytes.")
        if self.dtype is not None and self.character not in ("matmul", "attention"):
            _refuse(
                f"Kernel '{shown(self.name)}': dtype is for a kernel of character matmul or attention; found "
                f"{self.character}. Leave it out."
            )


class CollectiveEntry(Value, frozen=True, kw_only=True):
    """A collective of `group_size` ranks (default: all ranks of the file) over `bytes`, as nccl-tests counts them.

    Without launch figures, the library's usual kernel is used. If any of them is given, the rest are those of NCCL 2.28.9's
    generic kernel on compute capability 9.0 (`reader.py`). `sent` and `received` are the parts of an uneven all-to-all: what
    rank 0 sends to each rank of the group and receives from each, itself first; `bytes` is then the larger sum.
    """

    name: str
    stream: int
    collective: CollectiveKind
    bytes: int | str
    sent: tuple[int | str, ...] = ()
    received: tuple[int | str, ...] = ()
    group_size: int | None = None
    library: str = "nccl"
    transport: TransportKind = "sm"
    num_ctas: int | None = None
    threads_per_cta: int | None = None
    registers_per_thread: int | None = None
    shared_bytes_per_cta: int | None = None
    ctas_per_cluster: int | None = None
    lone_us: float | None = None
    waits_for: tuple[str | Wait, ...] = ()

    def __post_init__(self) -> None:
        num_bytes = parse_bytes(self.bytes, f"Collective '{shown(self.name)}': bytes")
        if self.sent or self.received:
            self._check_parts(num_bytes)
        figures = (self.threads_per_cta, self.registers_per_thread, self.shared_bytes_per_cta, self.ctas_per_cluster)
        if self.num_ctas is None and any(figure is not None for figure in figures):
            _refuse(
                f"Collective '{shown(self.name)}' gives launch figures without num_ctas; add num_ctas, or leave "
                f"them all out."
            )
        if self.num_ctas is not None:
            _check_range(f"Collective '{shown(self.name)}'", "num_ctas", self.num_ctas, (1, 1024))

    def _check_parts(self, num_bytes: int) -> None:
        where = f"Collective '{shown(self.name)}'"
        if self.collective != "all_to_all" or len(self.sent) != len(self.received):
            _refuse(f"{where}: sent and received are for an all_to_all, with a size for each rank in both. Correct them.")
        sent, received = (sum(parts_in_bytes(parts, where)) for parts in (self.sent, self.received))
        if max(sent, received) != num_bytes:
            _refuse(
                f"{where} sends {sent:,} and receives {received:,} bytes, and bytes must be the larger; found "
                f"{num_bytes:,}. Correct it."
            )


class CopyEntry(Value, frozen=True, kw_only=True):
    """A copy by a copy engine."""

    name: str
    stream: int
    direction: CopyDirection
    bytes: int | str
    lone_us: float | None = None
    waits_for: tuple[str | Wait, ...] = ()

    def __post_init__(self) -> None:
        parse_bytes(self.bytes, f"Copy '{shown(self.name)}': bytes")


Entry = Gemm | OtherKernel | CollectiveEntry | CopyEntry


class Description(Value, frozen=True, kw_only=True):
    """A whole workload file. Its entries run `iterations` times."""

    name: str
    num_ranks: int
    iterations: int = 1
    gemms: tuple[Gemm, ...] = ()
    kernels: tuple[OtherKernel, ...] = ()
    collectives: tuple[CollectiveEntry, ...] = ()
    copies: tuple[CopyEntry, ...] = ()

    def __post_init__(self) -> None:
        _check_range(f"Workload '{shown(self.name)}'", "num_ranks", self.num_ranks, (1, MAX_RANKS))
        _check_range(f"Workload '{shown(self.name)}'", "iterations", self.iterations, (1, MAX_ITERATIONS))
        if not self.entries:
            _refuse(
                f"Workload '{shown(self.name)}' holds no entry; add [[gemms]], [[kernels]], [[collectives]] or [[copies]]."
            )
        _check_name(self.name)
        seen: set[str] = set()
        for entry in self.entries:
            _check_name(entry.name)
            if entry.name in seen:
                _refuse(f"Workload '{shown(self.name)}' has two entries called '{shown(entry.name)}'; names must differ.")
            seen.add(entry.name)
            _check_range(f"'{shown(entry.name)}'", "stream", entry.stream, (0, MAX_DIMENSION))

    @property
    def entries(self) -> tuple[Entry, ...]:
        """GEMMs, kernels, collectives and copies, each in the order of the file."""
        return (*self.gemms, *self.kernels, *self.collectives, *self.copies)


def parse_bytes(size: int | str, where: str) -> int:
    """Read 1024, "1024 B", "896 MiB" or "1.5 GB" as whole bytes. `where` opens the message of the `WorkloadError`.

    KB, MB and GB are powers of 1000; KiB, MiB and GiB are powers of 1024.
    """
    found = re.fullmatch(r"([0-9]{1,16}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)", str(size).strip())
    unit = _BYTE_UNITS.get(found[2].upper()) if found else None
    num_bytes = float(found[1]) * unit if found and unit else -1.0
    if not (0 < num_bytes <= MAX_BYTES and num_bytes.is_integer()):
        _refuse(
            f"{where} must be a whole number of bytes from 1 to 1 PiB, with B, KB, MB, GB, KiB, MiB or GiB; "
            f"found {str(size)[:40]!r}."
        )
    return int(num_bytes)


def parts_in_bytes(parts: Iterable[int | str], where: str) -> tuple[int, ...]:
    """Return the parts of an all-to-all in bytes; each is 0 or a size that `parse_bytes` can read."""
    return tuple(0 if part == 0 else parse_bytes(part, f"{where}: a part") for part in parts)


def parse_traffic(size: float | str | None, where: str) -> float | None:
    """Read `hbm_bytes`: return a number of 0 or more unchanged, and read text as `parse_bytes` does. None stays None."""
    if isinstance(size, str):
        return float(parse_bytes(size, f"{where}: hbm_bytes"))
    if size is not None and not 0 <= size <= MAX_BYTES:
        _refuse(f"{where}: hbm_bytes must be from 0 to {MAX_BYTES}; found {size}.")
    return size


def _check_name(name: str) -> None:
    if not (name.isprintable() and 1 <= len(name) <= 200):
        _refuse(f"A name must be 1 to 200 printable characters; found {name[:40]!r}.")


def _check_range(where: str, name: str, number: int, limits: tuple[int, int]) -> None:
    least, most = limits
    if not least <= number <= most:
        _refuse(f"{where}: {name} must be from {least} to {most}; found {number}.")


def _refuse(message: str) -> NoReturn:
    raise WorkloadError(message)
