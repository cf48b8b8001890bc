"""A machine: its GPUs, their per-SM limits and the links between them; loaded by name from `machines/*.toml`.

A machine knows nothing of what runs on it. The `[sources]` table of a shipped file gives the source of every figure. On
AMD, a compute unit is modeled as an SM, a workgroup as a CTA and a wavefront as a warp.
"""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from counterpoint.display import html_table, shortened
from counterpoint.errors import MachineError, require_kind, shown
from counterpoint.links import Link
from counterpoint.units import format_bytes, format_rate
from counterpoint.value import (
    Value,
    check_suffix,
    copy_output,
    read_toml,
    require,
    save_text,
    save_toml,
    shipped_names,
    shipped_text,
    toml_output,
    write_toml,
)

# Operand types of a matrix multiplication. tf32 is stored as fp32, and the matrix units round it. fp32 is not rounded,
# as in PyTorch unless `torch.backends.cuda.matmul.fp32_precision` is set.
ElementType = Literal["bf16", "fp16", "fp8", "int8", "tf32", "fp32", "fp64"]
ELEMENT_BYTES: Mapping[ElementType, int] = MappingProxyType(
    {"bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "tf32": 4, "fp32": 4, "fp64": 8}
)
_USUAL_TYPES: tuple[tuple[int, ElementType], ...] = ((8, "fp64"), (4, "fp32"), (2, "bf16"), (1, "fp8"))
LEAST_ABSURD_FIGURE = 1e18
TEMPLATE_HEAD = """\
# Give it a name of its own: plans carry the name. What each figure means: docs/reference/formats.md.
"""
DEFAULT_MACHINE = "h200"
VARIANTS = "machines/variants"
MACHINE = toml_output("machine")
MEMORY_TOLERANCE = 0.05  # of a GPU's memory, as a driver reports it, to a machine file's
MAX_NAME = 200  # most letters of a name or a title
# How a vendor names its compute capabilities: a regular expression, and an example
CAPABILITIES = MappingProxyType({"nvidia": (r"[0-9]{1,2}\.[0-9]{1,2}", "9.0"), "amd": (r"gfx[0-9a-f]{3,5}", "gfx942")})
# Anything outside these ranges is a typing error: a size in GiB, a clock in GHz, a rate in GB/s.
PLAUSIBLE_RANGES: tuple[tuple[str, float, float], ...] = (
    ("num_sms", 1, 4096),
    ("clock_mhz", 100, 10_000),
    ("warp_size", 8, 128),
    ("max_threads_per_cta", 64, 4096),
    ("max_ctas_per_cluster", 1, 16),
    ("num_sub_partitions", 1, 16),
    ("max_registers_per_thread", 16, 1024),
    ("hbm_bytes", 1 << 30, 1 << 44),
    ("hbm_bytes_per_s", 1e10, 1e15),
    ("l2_bytes", 1 << 16, 1 << 36),
    *(
        (f"{name}_per_s", 1e11, 1e18)
        for name in (
            "bf16_flops",
            "fp16_flops",
            "fp8_flops",
            "int8_ops",
            "tf32_flops",
            "fp32_flops",
            "fp32_matrix_flops",
            "fp64_flops",
        )
    ),
    ("num_copy_engines", 1, 64),
    ("greatest_priority", -1000, 0),
)


class Gpu(Value, frozen=True, kw_only=True):
    """One GPU: the limits of an SM, and the rates of the memory and the copy engines.

    `sms_per_gpc` lists the SMs of each cluster domain (GPC, or XCD on AMD) and adds up to `num_sms`.
    `carveout_steps_bytes` are the shared-memory sizes that an SM can be configured to, ascending; the last is
    `shared_bytes_per_sm`. Rates are the vendor's peaks in bytes or operations per second; the simulator's calibration
    holds the rates that are reached. `fp32_flops_per_s` is the rate of the ordinary units. Every other rate is that of
    matrix multiplications of a type, None if the GPU has no units for it; `fp32_matrix_flops_per_s` is for matrix units
    that multiply fp32 without rounding. `priority_is_effective` is false if the driver ignores stream priorities by
    default. All CTAs on an SM share `named_barriers_per_sm`.
    """

    vendor: Literal["nvidia", "amd"]
    compute_capability: str
    num_sms: int
    sms_per_gpc: tuple[int, ...]
    clock_mhz: float
    warp_size: int
    max_warps_per_sm: int
    max_ctas_per_sm: int
    max_threads_per_cta: int
    max_ctas_per_cluster: int
    num_sub_partitions: int
    registers_per_sub_partition: int
    register_allocation_unit: int
    max_registers_per_thread: int
    shared_bytes_per_sm: int
    max_shared_bytes_per_cta: int
    reserved_shared_bytes_per_cta: int
    shared_allocation_unit_bytes: int
    carveout_steps_bytes: tuple[int, ...]
    named_barriers_per_cta: int
    named_barriers_per_sm: int
    hbm_bytes: int
    hbm_bytes_per_s: float
    l2_bytes: int
    bf16_flops_per_s: float
    fp32_flops_per_s: float
    num_copy_engines: int
    greatest_priority: int
    priority_is_effective: bool = True
    fp16_flops_per_s: float | None = None
    fp8_flops_per_s: float | None = None
    int8_ops_per_s: float | None = None
    tf32_flops_per_s: float | None = None
    fp32_matrix_flops_per_s: float | None = None
    fp64_flops_per_s: float | None = None

    def __post_init__(self) -> None:
        form, example = CAPABILITIES[self.vendor]
        require(
            re.fullmatch(form, self.compute_capability) is not None,
            MachineError,
            f'gpu.compute_capability of an {self.vendor} GPU must be as in "{example}"; found '
            f"'{shown(self.compute_capability)}'.",
        )
        _check_figures(self)
        _check_sm(self)
        _check_shared_memory(self)

    @property
    def has_head_starts(self) -> bool:
        """Whether a stream can be held before a kernel: only CUDA has the holding kernel and its part of the launch
        filter.
        """
        return self.vendor == "nvidia"

    def matmul_rates(self) -> dict[ElementType, float]:
        """Return the peak operations per second of matrix multiplications, by the types that the GPU has."""
        rates: dict[ElementType, float | None] = {
            "bf16": self.bf16_flops_per_s,
            "fp16": self.fp16_flops_per_s,
            "fp8": self.fp8_flops_per_s,
            "int8": self.int8_ops_per_s,
            "tf32": self.tf32_flops_per_s,
            "fp32": self.fp32_matrix_flops_per_s or self.fp32_flops_per_s,
            "fp64": self.fp64_flops_per_s,
        }
        return {element_type: rate for element_type, rate in rates.items() if rate is not None}


def _check_figures(gpu: Gpu) -> None:
    """Check that every figure is positive, and that those with a known range are in it."""
    for name in gpu.__struct_fields__:
        number = getattr(gpu, name)
        if name in ("greatest_priority", "reserved_shared_bytes_per_cta") or not isinstance(number, int | float):
            continue
        require(
            isinstance(number, bool) or 0 < number < LEAST_ABSURD_FIGURE,
            MachineError,
            f"gpu.{name} must be above 0 and below 1e18; found {number}.",
        )
    for name, least, most in PLAUSIBLE_RANGES:
        number = getattr(gpu, name)
        if number is not None and not least <= number <= most:
            raise MachineError(f"gpu.{name} must be from {least:,} to {most:,}; found {number:,}. Check its unit.")


def _check_sm(gpu: Gpu) -> None:
    """Check that SMs, warps and registers divide as in the hardware."""
    require(
        sum(gpu.sms_per_gpc) == gpu.num_sms and min(gpu.sms_per_gpc, default=0) > 0,
        MachineError,
        f"gpu.sms_per_gpc must be positive and add up to num_sms = {gpu.num_sms}; found {list(gpu.sms_per_gpc)}.",
    )
    for name, unit_name in (
        ("max_warps_per_sm", "num_sub_partitions"),
        ("registers_per_sub_partition", "register_allocation_unit"),
        ("register_allocation_unit", "warp_size"),
        ("max_threads_per_cta", "warp_size"),
    ):
        number, unit = getattr(gpu, name), getattr(gpu, unit_name)
        require(number % unit == 0, MachineError, f"gpu.{name} must be a multiple of {unit_name} = {unit}; found {number}.")
    most_threads = gpu.max_warps_per_sm * gpu.warp_size
    require(
        gpu.max_threads_per_cta <= most_threads,
        MachineError,
        f"gpu.max_threads_per_cta must not exceed the SM's {most_threads} threads; found {gpu.max_threads_per_cta}.",
    )
    for name, most_name in (("max_ctas_per_sm", "max_warps_per_sm"), ("named_barriers_per_cta", "named_barriers_per_sm")):
        number, most = getattr(gpu, name), getattr(gpu, most_name)
        require(number <= most, MachineError, f"gpu.{name} must not exceed {most_name} = {most}; found {number}.")


def _check_shared_memory(gpu: Gpu) -> None:
    """Check that the carveout steps rise to the SM's shared memory, which holds at least one of the largest CTAs."""
    steps = gpu.carveout_steps_bytes
    require(
        list(steps) == sorted(set(steps)) and bool(steps) and steps[0] >= 0 and steps[-1] == gpu.shared_bytes_per_sm,
        MachineError,
        f"gpu.carveout_steps_bytes must rise from 0 or more and end at shared_bytes_per_sm = {gpu.shared_bytes_per_sm}; "
        f"found {list(steps)}.",
    )
    require(
        gpu.reserved_shared_bytes_per_cta >= 0,
        MachineError,
        f"gpu.reserved_shared_bytes_per_cta must be 0 or more; found {gpu.reserved_shared_bytes_per_cta}.",
    )
    most = gpu.shared_bytes_per_sm - gpu.reserved_shared_bytes_per_cta
    require(
        gpu.max_shared_bytes_per_cta <= most,
        MachineError,
        f"gpu.max_shared_bytes_per_cta must not exceed {most}, the SM's shared memory less the reserve; "
        f"found {gpu.max_shared_bytes_per_cta}.",
    )


class Machine(Value, frozen=True, kw_only=True):
    """A node of `num_gpus` equal GPUs joined by `link`; several nodes are joined by `network`.

    `device_names` are the names that a profiler or the driver prints for this GPU. `sources` gives the source of each
    figure. `calibration` is the path of a file that `counterpoint calibrate` wrote; if empty, the shipped one for the
    GPU.
    """

    name: str
    title: str
    gpu: Gpu
    num_gpus: int
    link: Link
    device_names: tuple[str, ...] = ()
    network: Link | None = None
    sources: dict[str, str] = msgspec.field(default_factory=dict)
    calibration: str = ""

    def __post_init__(self) -> None:
        require(bool(self.name), MachineError, "A machine needs a name, because its plans carry it; found ''. Give it one.")
        for what, text in (("name", self.name), ("title", self.title)):
            require(
                len(text) <= MAX_NAME and text.isprintable(),
                MachineError,
                f"The {what} of a machine must have at most {MAX_NAME} printable characters; found '{shown(text)}'.",
            )
        require(1 <= self.num_gpus <= 1024, MachineError, f"num_gpus must be from 1 to 1024; found {self.num_gpus}.")
        beyond = [gpu for entry in self.link.pairs for pair in entry.gpus for gpu in pair if gpu >= self.num_gpus]
        require(
            not beyond,
            MachineError,
            f"link pairs.gpus are numbered from 0 to num_gpus - 1 = {self.num_gpus - 1}; found {max(beyond, default=0)}.",
        )

    def __hash__(self) -> int:
        """Equal machines have equal names; `sources` has no hash."""
        return hash(self.name)

    def matmul_flops_per_s(self, element_type: ElementType) -> float:
        """Return the peak operations per second of matmuls of this type; raises `MachineError` if there is none."""
        rates = self.gpu.matmul_rates()
        if element_type not in rates:
            raise MachineError(
                f"Machine '{self.name}' has no rate for {element_type} matrix multiplications, only for "
                f"{', '.join(rates)}. Choose one of these, or state the rate in a machine file of your own."
            )
        return rates[element_type]

    def _in_short(self) -> str:
        gpu = self.gpu
        hbm = f"HBM {format_rate(gpu.hbm_bytes_per_s)}"
        link = f"{self.link.kind} {format_rate(self.link.bytes_per_s)}"
        return f"{self.name!r}: {shortened(self.title)}; {gpu.num_sms} SMs, {hbm}, {link} one way"

    def _repr_html_(self) -> str:
        """Return what notebooks show of the machine: its main figures."""
        gpu = self.gpu
        rows = (
            ("GPUs", str(self.num_gpus)),
            ("SMs", str(gpu.num_sms)),
            ("shared memory per SM", format_bytes(gpu.shared_bytes_per_sm)),
            ("HBM", f"{format_bytes(gpu.hbm_bytes)}, {format_rate(gpu.hbm_bytes_per_s)}"),
            ("link, one way", f"{self.link.kind} {format_rate(self.link.bytes_per_s)}"),
        )
        return html_table(f"{self.name}: {self.title}", (), rows)


def usual_element_type(element_bytes: int) -> ElementType:
    """Return the type assumed for matrix elements of this size if nothing states it; fp32 is not rounded to tf32."""
    return next(element_type for least, element_type in _USUAL_TYPES if element_bytes >= least)


def machine_names(*, variants: bool = True) -> list[str]:
    """Return the names of the shipped machines, sorted; without `variants`, those that differ from another one in some
    figures only are left out.
    """
    return sorted([*shipped_names("machines"), *(shipped_names(VARIANTS) if variants else ())])


def load_machine(name_or_path: Path | str) -> Machine:
    """Load a shipped machine by name, or a user's own from a path that ends in `.toml`.

    Raises `MachineError` for an unknown name, and for a file with a missing or absurd figure.
    """
    require_kind(name_or_path, (str, Path), "load_machine takes a name or a path", f"Known: {', '.join(machine_names())}.")
    path = Path(name_or_path)
    if path.suffix.lower() == ".toml":
        return read_toml(path, Machine, MachineError)
    name, names = str(name_or_path).lower(), machine_names()
    if name not in names:
        raise MachineError(
            f"Unknown machine '{shown(name_or_path)}'. Known: {', '.join(names)}; or give the path of a machine "
            "file (.toml)."
        )
    return _shipped(name)


@cache
def _shipped(name: str) -> Machine:
    return msgspec.convert(_shipped_figures(name), Machine)


def _shipped_figures(name: str) -> dict[str, Any]:
    """Return the tables of a shipped machine. A variant's file holds only what differs from the machine that it calls
    `base`, and in `without` the names of figures that only the base has.
    """
    if name not in shipped_names(VARIANTS):
        return msgspec.toml.decode(shipped_text(f"machines/{name}.toml"), type=dict[str, Any])
    own = msgspec.toml.decode(shipped_text(f"{VARIANTS}/{name}.toml"), type=dict[str, Any])
    base = _shipped_figures(own.pop("base"))
    for name_of_figure in own.pop("without", []):
        table, _, figure = name_of_figure.partition(".")
        del base[table][figure], base["sources"][name_of_figure]
    return base | {key: base[key] | value if isinstance(value, dict) else value for key, value in own.items()}


def save_machine(machine: Machine, path: Path | str) -> None:
    """Write a machine file. Raises `MachineError` if it cannot be written, if `load_machine` would not read that path, or if
    the file holds something else.
    """
    save_toml(path, machine, MACHINE, MachineError)


def save_template(name_or_path: Path | str, path: Path | str) -> None:
    """Write a machine's file as a template; a shipped one keeps its comments. Raises what `save_machine` raises, and
    `MachineError` instead of replacing a template that was edited.
    """
    check_suffix(Path(path), MACHINE, MachineError)
    machine = load_machine(name_or_path)
    is_whole = Path(name_or_path).suffix.lower() != ".toml" and machine.name not in shipped_names(VARIANTS)
    text = TEMPLATE_HEAD + shipped_text(f"machines/{machine.name}.toml") if is_whole else write_toml(machine)
    save_text(path, text, copy_output(MACHINE.name, text), MachineError)


@cache
def machine_for_device(device_name: str) -> Machine | None:
    """Return the shipped machine whose GPU reports the name `device_name`, or None."""
    for name in machine_names():
        machine = load_machine(name)
        if device_name in machine.device_names:
            return machine
    return None


def machine_of_limits(num_sms: int, warp_size: int, memory_bytes: int) -> Machine | None:
    """Return the only shipped machine whose GPU has so many SMs, such warps and, to 5 %, such a memory, or None.

    Some ROCm releases give a GPU no name, but always its limits.
    """
    machines = [load_machine(name) for name in machine_names()]
    alike = [
        machine
        for machine in machines
        if (machine.gpu.num_sms, machine.gpu.warp_size) == (num_sms, warp_size)
        and abs(machine.gpu.hbm_bytes - memory_bytes) <= MEMORY_TOLERANCE * machine.gpu.hbm_bytes
    ]
    return alike[0] if len(alike) == 1 else None
