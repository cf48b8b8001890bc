"""Describes the visible GPUs as a machine, from the driver's figures and measured copy rates, and compares it with a
shipped machine.

Figures that no query returns (sub-partitions, carveout steps, what a GPC holds) come from the shipped machine of the same
compute capability, which `sources` states. A machine holds peak rates, so a measured copy replaces a stated link only if it
contradicts it: copy engines reach 0.80 of a link and copies 0.90 of HBM (measured on H200, 2026-11-21). Other nodes are not
probed; the network is the shipped machine's.
"""

import statistics
from datetime import date

from counterpoint.cuda.device_facts import QUERIED, Measured, Queried
from counterpoint.errors import INSTALL, DeviceError
from counterpoint.links import Link, Topology
from counterpoint.machine import Gpu, Machine, load_machine, machine_for_device, machine_names
from counterpoint.value import Value

COPY_ENGINE_FRACTION = 0.80
HBM_FRACTION = 0.90
MEASURED_TOLERANCE = 0.10
RATES = tuple(name for name in Gpu.__struct_fields__ if name.endswith(("flops_per_s", "ops_per_s")))
DIRECT_RATIO = 1.5  # assumption: GPUs that send this much more to all peers than to one have direct links
# the driver and the data sheets round differently; figures not named here must be equal
TOLERANCES = {
    "gpu.hbm_bytes": 0.01,
    "gpu.hbm_bytes_per_s": 0.02,
    **dict.fromkeys((f"gpu.{name}" for name in RATES), 0.02),
    "link.bytes_per_s": MEASURED_TOLERANCE,
    "link.per_peer_bytes_per_s": MEASURED_TOLERANCE,
    "measured.hbm_copy_bytes_per_s": MEASURED_TOLERANCE,
}
Figure = bool | int | float | str | tuple[int, ...] | None


class Difference(Value, frozen=True, kw_only=True):
    """A figure that differs from the shipped machine file by more than rounding or the spread of a measurement."""

    figure: str
    shipped: Figure
    found: Figure


class Probed(Value, frozen=True, kw_only=True):
    """The probed machine, its measured rates, and its differences from the shipped machine named `shipped`."""

    machine: Machine
    measured: Measured
    shipped: str
    differences: tuple[Difference, ...]


def probe() -> Probed:
    """Query the driver about the visible GPUs, and measure copies within and between them, in about a second.

    Allocates 512 MiB on each GPU, and frees it. Raises `DeviceError` without cuda-bindings, a GPU or a recent driver, if
    the visible GPUs differ, and for a compute capability that no shipped machine has.
    """
    try:
        from counterpoint.cuda.device_query import measure_copies, query_devices  # noqa: PLC0415  needs cuda-bindings
    except ImportError as problem:
        raise DeviceError(f"'cuda-bindings' is needed to probe GPUs and is not installed. {INSTALL}") from problem
    queried = query_devices()
    shipped = shipped_machine(queried[0])
    return describe(shipped, queried, measure_copies(len(queried)), date.today())


def shipped_machine(queried: Queried) -> Machine:
    """Return the shipped machine of this GPU, else the first of its compute capability. Raises `DeviceError` without one."""
    machine = machine_for_device(queried.device_name)
    if machine is not None:
        return machine
    shipped = [load_machine(name) for name in machine_names(variants=False)]
    capability = _capability(queried)
    for machine in shipped:
        if machine.gpu.vendor == "nvidia" and machine.gpu.compute_capability == capability:
            return machine
    known = sorted({each.gpu.compute_capability for each in shipped if each.gpu.vendor == "nvidia"}, key=float)
    raise DeviceError(
        f"'{queried.device_name}' has compute capability {capability}; carveout steps and sub-partitions are known for "
        f"{', '.join(known)}. Write a machine file for it: 'counterpoint machines h200 --json' shows the figures."
    )


def describe(shipped: Machine, queried: tuple[Queried, ...], measured: Measured, today: date) -> Probed:
    """Build the machine from the queried and measured figures, and compare it with the shipped one."""
    first = queried[0]
    by_driver = f"probed: CUDA {first.cuda_version[0]}.{first.cuda_version[1]} driver, {first.device_name}, {today}"
    gpu, sources = _gpu(shipped, first, by_driver)
    link, link_sources = _link(shipped, measured, f"measured with copies of 256 MiB, {today}")
    sources |= link_sources | {"num_gpus": by_driver, "device_names": by_driver}
    if shipped.network is not None:
        sources |= {name: _from(shipped, name) for name in shipped.sources if name.startswith("network.")}
    machine = Machine(
        name=f"probed-{shipped.name}",
        title=f"{len(queried)} x {first.device_name}, probed {today}",
        gpu=gpu,
        num_gpus=len(queried),
        link=link,
        device_names=(first.device_name,),
        network=shipped.network,
        sources=sources,
    )
    differences = (*_compare(shipped, machine), *_compare_measured(shipped, measured))
    return Probed(machine=machine, measured=measured, shipped=shipped.name, differences=differences)


def _capability(queried: Queried) -> str:
    attributes = queried.attributes
    return f"{attributes['COMPUTE_CAPABILITY_MAJOR']}.{attributes['COMPUTE_CAPABILITY_MINOR']}"


def _from(shipped: Machine, figure: str) -> str:
    """Return the source of a figure that was not probed."""
    return f"not probed, from machine '{shipped.name}': {shipped.sources.get(figure, 'no source given')}"


def _gpu(shipped: Machine, queried: Queried, by_driver: str) -> tuple[Gpu, dict[str, str]]:
    """Return the GPU, and the source of each of its figures."""
    like, attributes = shipped.gpu, queried.attributes
    figures: dict[str, object] = {figure: attributes[attribute] for figure, attribute in QUERIED.items()}
    figures |= {
        "compute_capability": _capability(queried),
        "clock_mhz": attributes["CLOCK_RATE"] / 1000,
        "max_warps_per_sm": attributes["MAX_THREADS_PER_MULTIPROCESSOR"] // attributes["WARP_SIZE"],
        "hbm_bytes": queried.hbm_bytes,
        "greatest_priority": queried.greatest_priority,
    }
    if attributes["MEMORY_CLOCK_RATE"] > 0 and attributes["GLOBAL_MEMORY_BUS_WIDTH"] > 0:
        # two transfers per clock on each wire of the bus; some drivers report neither figure
        figures["hbm_bytes_per_s"] = 2e3 * attributes["MEMORY_CLOCK_RATE"] * attributes["GLOBAL_MEMORY_BUS_WIDTH"] / 8
    sources = dict.fromkeys((f"gpu.{name}" for name in figures), by_driver)
    figures["registers_per_sub_partition"] = attributes["MAX_REGISTERS_PER_MULTIPROCESSOR"] // like.num_sub_partitions
    sources["gpu.registers_per_sub_partition"] = f"{by_driver}: the SM's registers in {like.num_sub_partitions} parts"
    scale = attributes["MULTIPROCESSOR_COUNT"] * attributes["CLOCK_RATE"] / (like.num_sms * like.clock_mhz * 1000)
    for name in RATES:
        rate = getattr(like, name)
        figures[name] = None if rate is None else rate * scale
        sources[f"gpu.{name}"] = f"{_from(shipped, f'gpu.{name}')}; by {scale:g} for SMs and clock"
    if attributes["MULTIPROCESSOR_COUNT"] != like.num_sms:
        figures["sms_per_gpc"] = spread_sms(attributes["MULTIPROCESSOR_COUNT"], len(like.sms_per_gpc))
        sources["gpu.sms_per_gpc"] = f"assumed: as many GPCs as machine '{shipped.name}' has, as even as pairs of SMs allow"
    for name in Gpu.__struct_fields__:
        figures.setdefault(name, getattr(like, name))
        sources.setdefault(f"gpu.{name}", _from(shipped, f"gpu.{name}"))
    return Gpu(**figures), sources  # type: ignore[arg-type]


def spread_sms(num_sms: int, num_gpcs: int) -> tuple[int, ...]:
    """Spread pairs of SMs evenly over GPCs, the larger GPCs first; an odd SM goes to the last. Leaves out empty GPCs."""
    pairs, odd = divmod(num_sms, 2)
    least, larger = divmod(pairs, num_gpcs)
    sizes = [2 * (least + (index < larger)) for index in range(num_gpcs)]
    sizes[-1] += odd
    return tuple(size for size in sizes if size)


def _link(shipped: Machine, measured: Measured, by_copies: str) -> tuple[Link, dict[str, str]]:
    """Return the link between the GPUs: the stated one if the measured copies agree with it, else the one they imply."""
    stated = shipped.link
    if not measured.peers:
        return stated, {
            f"link.{name}": f"{_from(shipped, f'link.{name}')}; one GPU is visible" for name in Link.__struct_fields__
        }
    kind = "nvlink" if all(peer.has_native_atomics for peer in measured.peers) else "pcie"
    like = shipped if kind == stated.kind else _shipped_with(kind)
    sources = {
        "link.kind": "probed: the driver has native atomics between all GPUs"
        if kind == "nvlink"
        else "probed: the driver has no native atomics between some GPUs",
        "link.latency_us": _from(like, "link.latency_us"),
        "link.topology": f"probed: direct if copies to all peers together are {DIRECT_RATIO:g} times as fast as to one",
        "link.pairs": "assumed: every pair of GPUs has the same link",
        "link.has_peer_access": "probed: the driver's answer for every two GPUs",
    }
    to_one = statistics.median(peer.copy_bytes_per_s for peer in measured.peers)
    to_all = max(to_one, measured.all_peers_bytes_per_s or to_one)
    peaks = {}
    for name, reached in (("per_peer_bytes_per_s", to_one), ("bytes_per_s", to_all)):
        implied, peak = reached / COPY_ENGINE_FRACTION, getattr(stated, name)
        share = f"{reached / 1e9:.4g} GB/s {by_copies}; copy engines reach {COPY_ENGINE_FRACTION:g} of a link"
        if kind == stated.kind and _is_close(f"link.{name}", peak, implied):
            peaks[name], sources[f"link.{name}"] = peak, f"{shipped.sources.get(f'link.{name}', '')}; agrees with {share}"
        else:
            peaks[name], sources[f"link.{name}"] = implied, share
    peaks["bytes_per_s"] = max(peaks.values())
    topology: Topology = "direct" if peaks["bytes_per_s"] >= DIRECT_RATIO * peaks["per_peer_bytes_per_s"] else "switch"
    has_access = all(peer.has_access for peer in measured.peers)
    latency_us = like.link.latency_us
    found = Link(kind=kind, latency_us=latency_us, topology=topology, has_peer_access=has_access, **peaks)  # type: ignore[arg-type]
    return found, sources


def _shipped_with(kind: str) -> Machine:
    """Return the first shipped machine with that kind of link."""
    return next(machine for machine in map(load_machine, machine_names(variants=False)) if machine.link.kind == kind)


def _is_close(figure: str, shipped: Figure, found: Figure) -> bool:
    if isinstance(shipped, int | float) and isinstance(found, int | float):
        return abs(found - shipped) <= TOLERANCES.get(figure, 0.0) * abs(shipped)
    return shipped == found


def _compare(shipped: Machine, machine: Machine) -> tuple[Difference, ...]:
    """Return the figures of GPU, link and node that differ."""
    pairs: list[tuple[str, Figure, Figure]] = [("num_gpus", shipped.num_gpus, machine.num_gpus)]
    for prefix, one, other in (("gpu", shipped.gpu, machine.gpu), ("link", shipped.link, machine.link)):
        pairs.extend((f"{prefix}.{name}", getattr(one, name), getattr(other, name)) for name in one.__struct_fields__)
    return tuple(
        Difference(figure=figure, shipped=one, found=other)
        for figure, one, other in pairs
        if not _is_close(figure, one, other)
    )


def _compare_measured(shipped: Machine, measured: Measured) -> tuple[Difference, ...]:
    """Return the rate of the HBM copy if it differs from the rate expected from the shipped peak."""
    figure, expected = "measured.hbm_copy_bytes_per_s", shipped.gpu.hbm_bytes_per_s * HBM_FRACTION
    if _is_close(figure, expected, measured.hbm_copy_bytes_per_s):
        return ()
    return (Difference(figure=figure, shipped=expected, found=measured.hbm_copy_bytes_per_s),)
