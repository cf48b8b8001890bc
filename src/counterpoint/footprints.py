"""The SM resources of communication kernels, if a step does not state them: by library and architecture, from
`footprints.toml`.

It knows nothing of time. Each entry of the table says whether it was measured or assumed, and where.
"""

from functools import cache
from typing import Literal

from counterpoint.errors import MachineError
from counterpoint.machine import Gpu
from counterpoint.step import Footprint
from counterpoint.value import Value, read_shipped

LIGHT_LIBRARY = "counterpoint"  # the table's name for light kernels


class KnownFootprint(Value, frozen=True, kw_only=True):
    """The footprint of a library's communication kernels on some architectures."""

    library: str
    versions: str
    compute_capabilities: tuple[str, ...]
    num_ctas: int
    threads_per_cta: int
    registers_per_thread: int
    static_shared_bytes: int
    dynamic_shared_bytes: int
    ctas_per_cluster: int
    status: Literal["measured", "assumed"]
    source: str

    def describe(self) -> str:
        """Return words such as "NCCL 2.27 to 2.29: 24 CTAs of 544 threads x 96 registers, 103,808 bytes each"."""
        cluster = f", clusters of {self.ctas_per_cluster}" if self.ctas_per_cluster > 1 else ""
        return (
            f"{self.library.upper()} {self.versions}: {self.num_ctas} CTAs of {self.threads_per_cta} threads x "
            f"{self.registers_per_thread} registers, {self.static_shared_bytes + self.dynamic_shared_bytes:,} bytes "
            f"each{cluster}"
        )

    def footprint(self) -> Footprint:
        """Return it as a launch."""
        return Footprint(
            num_ctas=self.num_ctas,
            threads_per_cta=self.threads_per_cta,
            registers_per_thread=self.registers_per_thread,
            static_shared_bytes=self.static_shared_bytes,
            dynamic_shared_bytes=self.dynamic_shared_bytes,
            ctas_per_cluster=self.ctas_per_cluster,
        )


class _FootprintTable(Value, frozen=True, kw_only=True):
    footprints: tuple[KnownFootprint, ...]


@cache
def known_footprints() -> tuple[KnownFootprint, ...]:
    """Return the shipped table of communication kernels' footprints."""
    return read_shipped("footprints.toml", _FootprintTable, MachineError).footprints


def known_footprint(library: str, compute_capability: str) -> KnownFootprint:
    """Return the first entry of the table that matches.

    Raises `MachineError` if none does, so that no plan rests on a guess.
    """
    for known in known_footprints():
        if known.library == library and compute_capability in known.compute_capabilities:
            return known
    libraries = ", ".join(sorted({known.library for known in known_footprints()}))
    raise MachineError(
        f"No footprint is known for {library} kernels on compute capability {compute_capability}. "
        f"Give the collective a footprint, or use one of: {libraries}."
    )


def known_on(gpu: Gpu, library: str) -> KnownFootprint:
    """Return what is known of a library's collectives on `gpu`; on AMD, NCCL means RCCL. Raises `MachineError` if nothing
    is.
    """
    name = "rccl" if gpu.vendor == "amd" and library == "nccl" else library
    return known_footprint(name, gpu.compute_capability)


def communication_footprint(gpu: Gpu, library: str) -> Footprint:
    """Return the usual footprint of a library's collective on `gpu`. Raises `MachineError` as `known_on` does."""
    return known_on(gpu, library).footprint()
