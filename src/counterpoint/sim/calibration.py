"""The simulator's constants: one file for each calibrated GPU, `calibrations/*.toml`, or the user's own.

Each constant has a source, a date and a status. A machine names its GPU, and the GPU determines the file. A GPU without a
file gets the H200's constants: fractions and rates per SM, scaled by the machine file's figures. Reports state this
assumption.
"""

import math
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec

from counterpoint.errors import MachineError, shown, shown_path
from counterpoint.machine import ElementType, Gpu, Machine, machine_for_device
from counterpoint.measurement.points import Point
from counterpoint.mismatch import describe_mismatch
from counterpoint.occupancy import residency
from counterpoint.step import Character, CollectiveKind, Footprint
from counterpoint.units import MIB
from counterpoint.value import Value, read_shipped, read_toml, require, shipped_names

BASE = "h200"  # the GPU whose constants replace those that were not measured
DROPPED = ("sum_cta_us",)  # in files of earlier versions; nothing reads it any more
ABSURD_FIGURE = 1e18  # no constant comes near
MOST_BYTES_OF_FEW = 8 * MIB  # to a peer: NCCL's send-and-receive kernels are slower up to 8 MiB a CTA, not from 16 MiB on
LARGE_BYTES = 64 * MIB  # from this size on, a collective's latency is constant
# constants by kind
TABLES = ("matmul_peak_fractions", "characters", "collectives", "light_collectives", "least_l1", "power")
# What large matmuls and attentions of H200s reach in steps, as a share of their rates in a burst: 0.72 and 0.81 of the peak.
# It stands for the power limit of a GPU whose power was never measured. Matmuls in fp32 are not slowed down by the limit.
IN_STEPS = 0.888
MEASURED_GPU = "NVIDIA H200"  # BASE by its full name, as PyTorch gives it
PowerFigure = Literal[
    "limit_w",
    "idle_w",
    "exponent",
    "window_us",
    "library_matmul_w",
    "matmul_w",
    "large_matmul_w",
    "matmul_clock_knee",
    "tile_clock_exponent",
    "large_matmul_clock_exponent",
    "fp32_matmul_w",
    "attention_w",
    "flash_attention_w",
    "streaming_w",
    "row_wise_w",
    "other_w",
    "collective_w",
    "copy_w",
]
Status = Literal["measured", "assumed"]


def _require_positive(entry: "AnyConstant") -> None:
    """Raise `MachineError` for a figure that no measurement gives. All are above 0; spreads and latencies may be 0."""
    for name in entry.__struct_fields__:
        figure = getattr(entry, name)
        if isinstance(figure, float | int):
            may_be_zero = name in ("spread", "latency_us", "latency_weight")
            require(
                0 <= figure < ABSURD_FIGURE and (may_be_zero or figure > 0),
                MachineError,
                f"{name} must be {'0 or more' if may_be_zero else 'above 0'} and below {ABSURD_FIGURE:g}; found {figure:g}",
            )


class Constant(Value, frozen=True, kw_only=True):
    """One number in the unit at the end of its name.

    `spread` is relative: the half-width of the middle half of repetitions, or the residual of a fit; None if none was
    kept.
    """

    value: float
    status: Status
    date: str
    source: str
    spread: float | None = None

    def __post_init__(self) -> None:
        _require_positive(self)


class CharacterConstants(Value, frozen=True, kw_only=True):
    """The limits of kernels of one character: the bottleneck of a kernel alone, and what saturates an SM, in warps.

    `saturation_bytes_in_flight`, if given, is for kernels that keep tiles in shared memory: what an SM takes in during one
    latency. `saturation_registers`, if given, is how many registers of CTAs saturate an SM, if that takes fewer CTAs.

    Kernels limited by "latency" wait for their own loads: they share SMs as those limited by "issue" do, and reach at
    most `hbm_fraction` of the memory's bandwidth.
    """

    bottleneck: Literal["issue", "hbm", "latency"]
    saturation_warps: float
    hbm_fraction: float
    status: Status
    date: str
    source: str
    saturation_bytes_in_flight: float | None = None
    saturation_registers: float | None = None
    spread: float | None = None

    def __post_init__(self) -> None:
        _require_positive(self)


class CollectiveConstants(Value, frozen=True, kw_only=True):
    """The bandwidth on the wire of one kind of collective that SM kernels do.

    `latency_us_by_bytes` are (bytes, latency) of messages for which NCCL uses other protocols than for large ones, whose
    latency is `latency_us`. Figures that end with `_of_more` apply, where given, to more than 2 ranks instead of those of 2.
    `bytes_per_s_per_cta_of_few` applies, if given, to fewer CTAs than usual that send each peer at most `MOST_BYTES_OF_FEW`
    each; with more ranks it changes as `bytes_per_s_per_cta` does.
    `latency_weight` is the share of the growth of the memory's latency that its CTAs see, relative to an all-reduce's.
    """

    bytes_per_s_per_cta: float
    link_fraction: float
    latency_us: float
    status: Status
    date: str
    source: str
    link_fraction_of_more: float | None = None
    bytes_per_s_per_cta_of_more: float | None = None
    bytes_per_s_per_cta_of_few: float | None = None
    latency_weight: float = 1.0
    latency_us_by_bytes: tuple[tuple[float, float], ...] = ()
    latency_us_by_bytes_of_more: tuple[tuple[float, float], ...] = ()
    spread: float | None = None

    def __post_init__(self) -> None:
        _require_positive(self)
        for name in ("latency_us_by_bytes", "latency_us_by_bytes_of_more"):
            points = getattr(self, name)
            sizes = [0.0, *(size for size, _ in points), ABSURD_FIGURE]
            require(
                all(less < more for less, more in pairwise(sizes)) and all(0 <= us < ABSURD_FIGURE for _, us in points),
                MachineError,
                f"{name} must be pairs of rising sizes above 0 and latencies of 0 or more; found {list(map(list, points))}",
            )

    def of_ranks(self, group_size: int) -> "CollectiveConstants":
        """Return the constants as they apply to groups of this many ranks, in the figures of 2 ranks."""
        if group_size <= 2:
            return self
        by_cta, few = self.bytes_per_s_per_cta_of_more or self.bytes_per_s_per_cta, self.bytes_per_s_per_cta_of_few
        return msgspec.structs.replace(
            self,
            bytes_per_s_per_cta=by_cta,
            bytes_per_s_per_cta_of_few=None if few is None else few * by_cta / self.bytes_per_s_per_cta,
            link_fraction=self.link_fraction_of_more or self.link_fraction,
            latency_us_by_bytes=self.latency_us_by_bytes_of_more or self.latency_us_by_bytes,
            bytes_per_s_per_cta_of_more=None,
            link_fraction_of_more=None,
            latency_us_by_bytes_of_more=(),
        )

    def latency_us_of(self, num_bytes: float) -> float:
        """Return the latency of a message; between calibrated sizes it is interpolated in the logarithm of the bytes."""
        if not self.latency_us_by_bytes:
            return self.latency_us
        sizes = [*(math.log(each) for each, _ in self.latency_us_by_bytes), math.log(LARGE_BYTES)]
        latencies = [*(each for _, each in self.latency_us_by_bytes), self.latency_us]
        place = math.log(max(num_bytes, 1.0))
        for (small, least), (large, most) in pairwise(zip(sizes, latencies, strict=True)):
            if place < large:
                return least + (most - least) * max(0.0, place - small) / (large - small)
        return self.latency_us

    def rate_of_few(self, bytes_to_a_peer: float, num_ctas: int) -> float:
        """Return the bytes per second of one CTA, if fewer than usual together send this many bytes to each peer."""
        if self.bytes_per_s_per_cta_of_few is not None and bytes_to_a_peer <= MOST_BYTES_OF_FEW * num_ctas:
            return self.bytes_per_s_per_cta_of_few
        return self.bytes_per_s_per_cta


AnyConstant = Constant | CharacterConstants | CollectiveConstants


class MeasuredRule(Value, frozen=True, kw_only=True):
    """A dispatch rule that the simulator assumes: the measured figure, and whether it agrees with the rule."""

    value: float
    expected: float
    holds: bool
    date: str
    source: str


class ProbeRecord(Value, frozen=True, kw_only=True):
    """The measurements of one probe of `counterpoint calibrate`, or why it failed.

    `is_derived`: the file's constants follow from its points, too; False if deriving them failed.
    """

    date: str
    seconds: float
    points: tuple[Point, ...] = ()
    failure: str = ""
    is_derived: bool = True


class Calibration(Value, frozen=True, kw_only=True):
    """All constants of the simulator for one GPU, and the measurements of `counterpoint calibrate` behind them, if it
    ran there.

    `matmul_peak_fraction` is what large matmuls reach at the clock of a short burst if `power` is known, else in steps;
    `matmul_peak_fractions` are those of types that reach another share of their peak. `light_collectives` are collectives
    by light kernels; a missing kind was never measured. `least_l1` says by how much longer a collective's CTA takes, as a
    share, where the largest carveout leaves the least L1, and `least_l1_of_few` how much of that holds for fewer CTAs than
    usual. `power` describes one GPU: its limit, its idle power, and watts above that for each kind of operation, at the
    clock of a short burst; empty if it was never measured.
    """

    device_name: str
    launch_gap_us: Constant
    dependency_latency_us: Constant
    collective_launch_us: Constant
    hbm_efficiency: Constant
    l2_bytes_per_cycle_per_sm: Constant
    l2_crowding: Constant
    tile_latency_per_load: Constant
    matmul_peak_fraction: Constant
    attention_peak_fraction: Constant
    matmul_tile_us: Constant
    fp32_peak_fraction: Constant
    fp32_saturation_warps: Constant
    latency_at_low_load: Constant
    latency_per_load: Constant
    communication_issue_share: Constant
    bandwidth_per_threads: Constant
    hbm_bytes_per_wire_byte: Constant
    least_l1_of_few: Constant
    copy_engine_fraction: Constant
    recorded_copy_fraction: Constant
    copy_latency_us: Constant
    flag_latency_us: Constant
    block_sum_us: Constant
    gather_exposed_us: Constant
    reduction_exposed_us: Constant
    host_link_bytes_per_s: Constant
    characters: dict[Character, CharacterConstants]
    collectives: dict[CollectiveKind, CollectiveConstants]
    matmul_peak_fractions: dict[ElementType, Constant] = msgspec.field(default_factory=dict)
    light_collectives: dict[CollectiveKind, CollectiveConstants] = msgspec.field(default_factory=dict)
    least_l1: dict[CollectiveKind, Constant] = msgspec.field(default_factory=dict)
    power: dict[PowerFigure, Constant] = msgspec.field(default_factory=dict)
    rules: dict[str, MeasuredRule] = msgspec.field(default_factory=dict)
    conditions: dict[str, str] = msgspec.field(default_factory=dict)
    probes: dict[str, ProbeRecord] = msgspec.field(default_factory=dict)

    def __hash__(self) -> int:
        """Equal constants are of equal GPUs; tables of constants have no hash."""
        return hash(self.device_name)

    def matmul_fraction(self, element_type: ElementType) -> float:
        """Return the share of the type's peak rate that large matmuls reach."""
        return self.matmul_peak_fractions.get(element_type, self.matmul_peak_fraction).value

    def least_l1_of(self, kind: CollectiveKind, planned: Footprint, usual: Footprint, gpu: Gpu) -> float:
        """Return by how much longer a collective's CTA takes, as a share, if the largest carveout leaves it the least L1.
        With fewer threads than usual, loads fill less of it. On a GPU where it always has the largest, 0.
        """
        alone = residency(gpu, msgspec.structs.replace(usual, carveout_percent=-1))
        if planned.threads_per_cta < usual.threads_per_cta or alone.carveout_bytes == gpu.shared_bytes_per_sm:
            return 0.0
        return self.least_l1[kind].value * (self.least_l1_of_few.value if planned.num_ctas < usual.num_ctas else 1.0)


def load_calibration(machine: Machine | None = None) -> Calibration:
    """Return the constants for a machine: its own file, else the shipped one of its GPU, else the H200's without its power.
    Without a machine, return the H200's.

    Raises `MachineError` for a file that cannot be read, or that was measured on another GPU than the machine's.
    """
    if machine is None:
        return _shipped(BASE)
    if machine.calibration:
        return read_calibration(machine.calibration, machine)
    return next((each for each in _all_shipped() if each.device_name in machine.device_names), _of_unknown_power())


def read_calibration(path: str, machine: Machine) -> Calibration:
    """Read a user's own file; errors as in `load_calibration`."""
    found = _own(path)
    require(
        found.device_name in machine.device_names,
        MachineError,
        f"{shown_path(path)} was measured on '{shown(found.device_name)}', but machine '{machine.name}' is "
        f"{shown(', '.join(machine.device_names) or 'without device_names', 200)}. Run `counterpoint calibrate` "
        "on it.",
    )
    return found


def read_file(path: str) -> Calibration:
    """Read a calibration file of any GPU, with the H200's constants for those that it lacks."""
    return _completed(read_toml(path, dict[str, Any], MachineError), shown_path(path))


def _own(path: str) -> Calibration:
    """Read a user's file, again only after it has changed: a notebook may outlive what the file held."""
    try:
        found = Path(path).stat()
    except (OSError, ValueError):
        return read_file(path)  # which says what is wrong
    return _read_once(path, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns))


@lru_cache(maxsize=64)
def _read_once(path: str, _state: tuple[int, ...]) -> Calibration:
    return read_file(path)


@cache
def _shipped(name: str) -> Calibration:
    file = f"calibrations/{name}.toml"
    if name == BASE:
        return read_shipped(file, Calibration, MachineError)
    return _completed(read_shipped(file, dict[str, Any], MachineError), file)


@cache
def _of_unknown_power() -> Calibration:
    """Return the H200's constants for a GPU whose power was never measured: its matmuls are as fast as in steps."""
    base = _shipped(BASE)
    by_type = {kind: each if kind == "fp32" else _in_steps(each) for kind, each in base.matmul_peak_fractions.items()}
    return msgspec.structs.replace(
        base,
        matmul_peak_fraction=_in_steps(base.matmul_peak_fraction),
        attention_peak_fraction=_in_steps(base.attention_peak_fraction),
        matmul_peak_fractions=by_type,
        power={},
    )


def _in_steps(constant: Constant) -> Constant:
    return msgspec.structs.replace(
        constant, value=constant.value * IN_STEPS, source=f"{IN_STEPS}, as in steps, of: {constant.source}"
    )


@cache
def _all_shipped() -> tuple[Calibration, ...]:
    return tuple(_shipped(name) for name in shipped_names("calibrations"))


def _completed(found: dict[str, Any], where: str) -> Calibration:
    """Complete a file's constants with the H200's. Raises `MachineError` for a file that is no calibration."""
    found = {name: entry for name, entry in found.items() if name not in DROPPED}
    base = _shipped(BASE) if found.get("power") else _of_unknown_power()
    whole = msgspec.to_builtins(as_assumed_elsewhere(base, str(found.get("device_name", ""))))
    for name in ("device_name", "rules", "conditions", "probes"):
        whole.pop(name, None)
    for name in TABLES:
        own = found.get(name)
        found = found | {name: whole.get(name, {}) | (own if isinstance(own, dict) else {})}
    whole |= found
    try:
        return msgspec.convert(whole, Calibration)
    except msgspec.ValidationError as problem:
        raise MachineError(f"{where}: {'. '.join(describe_mismatch(problem, Calibration, whole))}") from problem


def as_assumed_elsewhere(base: Calibration, device_name: str) -> Calibration:
    """Return the constants of one GPU as they apply to another: assumed. For the same GPU they are unchanged."""
    if device_name == base.device_name:
        return base
    changed: dict[str, object] = {"device_name": device_name}
    for name in base.__struct_fields__:
        entry = getattr(base, name)
        if isinstance(entry, Constant):
            changed[name] = _assumed(entry, base)
        elif name in TABLES:
            changed[name] = {key: _assumed(each, base) for key, each in entry.items()}
    return msgspec.structs.replace(base, **changed)


def _assumed(entry: AnyConstant, base: Calibration) -> AnyConstant:
    return msgspec.structs.replace(entry, status="assumed", source=f"as {base.device_name}: {entry.source}")


def own_loads_scale(device_name: str, machine: Machine) -> float:
    """Return by how much larger a share of the memory's bandwidth a kernel that waits for its own loads reaches on this
    machine than on the calibrated GPU. Its rate follows the SMs and their clock: softmax takes as long on an H100 as on an
    H200, whose memory is 1.43 times as fast.
    """
    calibrated = machine_for_device(device_name)
    if calibrated is None or device_name in machine.device_names:
        return 1.0
    ours, theirs = machine.gpu, calibrated.gpu
    sms = ours.num_sms * ours.clock_mhz / (theirs.num_sms * theirs.clock_mhz)
    return sms * theirs.hbm_bytes_per_s / ours.hbm_bytes_per_s


def describe_origin(machine: Machine) -> str:
    """Describe the origin of a machine's constants for a report; empty if all are those of the H200 itself."""
    found = load_calibration(machine)
    if found.device_name == MEASURED_GPU and MEASURED_GPU in machine.device_names:
        return ""
    if found.device_name not in machine.device_names:
        return (
            f"the simulator's constants are assumed: they are scaled from {MEASURED_GPU}, because this GPU was "
            "never calibrated"
        )
    assumed = sum(1 for each in constants_of(found).values() if each.status == "assumed")
    measured = len(constants_of(found)) - assumed
    return f"{measured} constants of the simulator were measured on it; {assumed} are scaled from {MEASURED_GPU}"


def constants_of(calibration: Calibration) -> dict[str, AnyConstant]:
    """Return every constant by its name in the file, as in "collectives.all_reduce"."""
    found: dict[str, AnyConstant] = {}
    for name in calibration.__struct_fields__:
        entry = getattr(calibration, name)
        if isinstance(entry, Constant):
            found[name] = entry
        elif name in TABLES:
            found |= {f"{name}.{key}": each for key, each in entry.items()}
    return found
