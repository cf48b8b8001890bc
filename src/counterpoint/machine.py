"""A machine: its GPUs, their per-SM limits and the links between them; loaded by name from `machines/*.toml`.

A machine knows nothing of what runs on it. Every figure in a shipped file carries its source in the file's `[sources]`
table. On AMD a compute unit is modelled as an SM, a workgroup as a CTA and a wavefront as a warp.
"""

from importlib import resources
from pathlib import Path
from typing import Literal

import msgspec

from counterpoint.errors import MachineError
from counterpoint.value import Value, read_toml, require

MAX_ABSURD_FACTOR = 1e18


class Gpu(Value, frozen=True, kw_only=True):
    """One GPU: what an SM holds, what the memory and the copy engines deliver.

    `sms_per_gpc` lists the SMs of each cluster domain (GPC, or XCD on AMD) and adds up to `num_sms`.
    `carveout_steps_bytes` are the shared-memory sizes an SM can be configured to, ascending; the last is
    `shared_bytes_per_sm`. Rates are bytes or operations per second at the peak the vendor states; what is really reached
    is in the simulator's calibration. `priority_is_effective` is false where the driver ignores stream priority unless told.
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
    hbm_bytes: int
    hbm_bytes_per_s: float
    l2_bytes: int
    bf16_flops_per_s: float
    fp32_flops_per_s: float
    num_copy_engines: int
    greatest_priority: int
    priority_is_effective: bool = True

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            number = getattr(self, name)
            if name in ("greatest_priority", "reserved_shared_bytes_per_cta") or not isinstance(number, int | float):
                continue
            require(
                isinstance(number, bool) or 0 < number < MAX_ABSURD_FACTOR,
                MachineError,
                f"gpu.{name} must be above 0 and below 1e18; found {number}.",
            )
        require(
            sum(self.sms_per_gpc) == self.num_sms and min(self.sms_per_gpc, default=0) > 0,
            MachineError,
            f"gpu.sms_per_gpc must be positive and add up to num_sms = {self.num_sms}; found {list(self.sms_per_gpc)}.",
        )
        steps = self.carveout_steps_bytes
        require(
            list(steps) == sorted(set(steps)) and bool(steps) and steps[-1] == self.shared_bytes_per_sm,
            MachineError,
            f"gpu.carveout_steps_bytes must rise and end at shared_bytes_per_sm = {self.shared_bytes_per_sm}; "
            f"found {list(steps)}.",
        )
        require(
            self.max_shared_bytes_per_cta <= self.shared_bytes_per_sm,
            MachineError,
            f"gpu.max_shared_bytes_per_cta must not exceed shared_bytes_per_sm = {self.shared_bytes_per_sm}; "
            f"found {self.max_shared_bytes_per_cta}.",
        )
        require(
            self.greatest_priority <= 0,
            MachineError,
            f"gpu.greatest_priority is the driver's number, 0 or lower; found {self.greatest_priority}.",
        )


class Link(Value, frozen=True, kw_only=True):
    """How the GPUs of a node (or the nodes) are connected.

    `bytes_per_s` is what one GPU can send in one direction to all its peers together; `per_peer_bytes_per_s` to one peer.
    They are equal behind a switch and differ on a mesh.
    """

    kind: Literal["nvlink", "xgmi", "pcie", "network"]
    bytes_per_s: float
    per_peer_bytes_per_s: float
    latency_us: float

    def __post_init__(self) -> None:
        for name in ("bytes_per_s", "per_peer_bytes_per_s", "latency_us"):
            number = getattr(self, name)
            require(
                0 < number < MAX_ABSURD_FACTOR, MachineError, f"link {name} must be above 0 and below 1e18; found {number}."
            )
        require(
            self.per_peer_bytes_per_s <= self.bytes_per_s,
            MachineError,
            f"link per_peer_bytes_per_s must be at most {self.bytes_per_s}; found {self.per_peer_bytes_per_s}.",
        )


class Machine(Value, frozen=True, kw_only=True):
    """A usual node: `num_gpus` equal GPUs joined by `link`; nodes, if there are several, by `network`.

    `device_names` are the names a profiler or the driver prints for this GPU. `sources` says where each figure is from.
    """

    name: str
    title: str
    gpu: Gpu
    num_gpus: int
    link: Link
    device_names: tuple[str, ...] = ()
    network: Link | None = None
    sources: dict[str, str] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        require(1 <= self.num_gpus <= 1024, MachineError, f"num_gpus must be from 1 to 1024; found {self.num_gpus}.")


def machine_names() -> list[str]:
    """Names of the shipped machines, sorted."""
    files = resources.files("counterpoint").joinpath("machines").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def load_machine(name_or_path: str) -> Machine:
    """Load a shipped machine by name, or a user's own from a path that ends in `.toml`.

    Raises `MachineError` for an unknown name and for a file with a missing or absurd figure.
    """
    path = Path(name_or_path)
    if path.suffix == ".toml":
        return read_toml(path, Machine, MachineError)
    names = machine_names()
    if name_or_path.lower() not in names:
        raise MachineError(
            f"Unknown machine '{name_or_path}'. Known: {', '.join(names)}; or give the path of a machine file (.toml)."
        )
    with resources.as_file(resources.files("counterpoint").joinpath("machines", f"{name_or_path.lower()}.toml")) as file:
        return read_toml(file, Machine, MachineError)


def machine_for_device(device_name: str) -> Machine | None:
    """The shipped machine whose GPU calls itself `device_name`, or None."""
    for name in machine_names():
        machine = load_machine(name)
        if device_name in machine.device_names:
            return machine
    return None
