"""The simulator's constants, read from `calibration.toml` and `footprints.toml`: each has a source, a date and a status."""

from functools import cache
from importlib import resources
from typing import Literal

from counterpoint.errors import MachineError
from counterpoint.machine import Gpu
from counterpoint.step import Character, CollectiveKind, Footprint
from counterpoint.value import Value, read_toml

Status = Literal["measured", "assumed"]


class Constant(Value, frozen=True, kw_only=True):
    """One number in the unit that its name ends with."""

    value: float
    status: Status
    date: str
    source: str


class CharacterConstants(Value, frozen=True, kw_only=True):
    """What limits kernels of one character alone, and what saturates it per SM: warps, or bytes of tile buffers if given."""

    bottleneck: Literal["issue", "hbm"]
    saturation_warps: float
    hbm_fraction: float
    status: Status
    date: str
    source: str
    saturation_shared_bytes: float | None = None


class CollectiveConstants(Value, frozen=True, kw_only=True):
    """Bandwidth of one kind of collective by SM kernels, on the wire."""

    bytes_per_s_per_cta: float
    link_fraction: float
    latency_us: float
    status: Status
    date: str
    source: str


class Calibration(Value, frozen=True, kw_only=True):
    """All constants of the simulator."""

    launch_gap_us: Constant
    dependency_latency_us: Constant
    hbm_efficiency: Constant
    l2_bytes_per_cycle_per_sm: Constant
    matmul_peak_fraction: Constant
    fp32_peak_fraction: Constant
    latency_per_load: Constant
    communication_issue_share: Constant
    hbm_bytes_per_wire_byte: Constant
    copy_engine_fraction: Constant
    copy_latency_us: Constant
    host_link_bytes_per_s: Constant
    characters: dict[Character, CharacterConstants]
    collectives: dict[CollectiveKind, CollectiveConstants]


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
    status: Status
    source: str

    def footprint(self) -> Footprint:
        """As a launch of the simulator."""
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
def load_calibration() -> Calibration:
    """The shipped constants."""
    with resources.as_file(resources.files("counterpoint.sim").joinpath("calibration.toml")) as file:
        return read_toml(file, Calibration, MachineError)


@cache
def known_footprints() -> tuple[KnownFootprint, ...]:
    """The shipped table of communication kernels' footprints."""
    with resources.as_file(resources.files("counterpoint.sim").joinpath("footprints.toml")) as file:
        return read_toml(file, _FootprintTable, MachineError).footprints


def communication_footprint(gpu: Gpu, library: str) -> Footprint:
    """The usual footprint of a library's collective on `gpu`; on AMD, NCCL means RCCL.

    Raises `MachineError` where the table has no entry, so that nothing is planned on a guess.
    """
    name = "rccl" if gpu.vendor == "amd" and library == "nccl" else library
    for known in known_footprints():
        if known.library == name and gpu.compute_capability in known.compute_capabilities:
            return known.footprint()
    libraries = ", ".join(sorted({known.library for known in known_footprints()}))
    raise MachineError(
        f"No footprint is known for {name} kernels on compute capability {gpu.compute_capability}. "
        f"Give the collective a footprint, or use one of: {libraries}."
    )
