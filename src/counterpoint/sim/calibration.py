"""The simulator's constants, read from `calibrations/*.toml`: each has a source, a date and a status."""

from functools import cache
from typing import Literal

from counterpoint.errors import MachineError
from counterpoint.step import Character, CollectiveKind
from counterpoint.value import Value, read_shipped

MEASURED_GPU = "NVIDIA H200"  # the only one that the simulator was compared with
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
    """Bandwidth of one kind of collective by SM kernels, on the wire.

    `link_fraction` is of 2 ranks, and of more where `link_fraction_of_more` is None.
    """

    bytes_per_s_per_cta: float
    link_fraction: float
    latency_us: float
    status: Status
    date: str
    source: str
    link_fraction_of_more: float | None = None

    def fraction_of_link(self, group_size: int) -> float:
        """What groups of that many ranks reach of the link's direction, if they have CTAs enough."""
        if group_size > 2 and self.link_fraction_of_more is not None:
            return self.link_fraction_of_more
        return self.link_fraction


class Calibration(Value, frozen=True, kw_only=True):
    """All constants of the simulator."""

    launch_gap_us: Constant
    dependency_latency_us: Constant
    hbm_efficiency: Constant
    l2_bytes_per_cycle_per_sm: Constant
    matmul_peak_fraction: Constant
    matmul_tile_us: Constant
    fp32_peak_fraction: Constant
    latency_per_load: Constant
    communication_issue_share: Constant
    hbm_bytes_per_wire_byte: Constant
    copy_engine_fraction: Constant
    copy_latency_us: Constant
    flag_latency_us: Constant
    sum_cta_us: Constant
    gather_exposed_us: Constant
    reduction_exposed_us: Constant
    host_link_bytes_per_s: Constant
    characters: dict[Character, CharacterConstants]
    collectives: dict[CollectiveKind, CollectiveConstants]


@cache
def load_calibration() -> Calibration:
    """The shipped constants."""
    return read_shipped("calibrations/h200.toml", Calibration, MachineError)
