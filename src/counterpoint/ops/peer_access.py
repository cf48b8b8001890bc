"""Says where a group's ranks are, whether the copy engines of their GPUs can access each other's memory, and whether a wait
for a peer's flag guarantees that the peer's rows have arrived.

CUDA guarantees the latter only for a wait that flushes remote writes (CU_STREAM_WAIT_VALUE_FLUSH), which not every
platform supports. Without it, flags are used only on the one kind of link where results were compared bit for bit over
many calls: NVLink between H200s (docs/ops.md, "State"). H100s are assumed to be the same, because they have the same
link.
"""

import socket
from importlib.util import find_spec
from pathlib import Path

import torch

from counterpoint.errors import INSTALL
from counterpoint.units import format_choice
from counterpoint.value import Value

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PROVEN_WITHOUT_FLUSH = ("H100", "H200")  # if linked by NVLink


class RankLocation(Value, frozen=True, kw_only=True):
    """Where one rank is: its host, its GPU's UUID (empty on a CPU), and the name of its machine, as plans use it."""

    host: str
    gpu: str
    machine: str


def location_of(device: torch.device, machine_name: str) -> RankLocation:
    """Identify the host and the GPU for the other ranks. Hosts of the same name, such as localhost, have different boot
    ids (random(4)).
    """
    try:
        boot = BOOT_ID.read_text().strip()
    except OSError:
        boot = ""
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    return RankLocation(host=f"{socket.gethostname()} {boot}", gpu=gpu, machine=machine_name)


def obstacle_across(num_hosts: int) -> str:
    """Return why copy engines cannot reach all ranks of a group, or nothing."""
    return f"the group spans {num_hosts} hosts, but copy engines reach only peers on the same host" if num_hosts > 1 else ""


def obstacle_on(device: torch.device, gpus: list[str]) -> str:
    """Return why this rank cannot use copy engines with these GPUs of the host, or nothing. GPUs that are not visible here
    are assumed to be reachable.
    """
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        return f"cuda-bindings is not installed. {INSTALL}".rstrip(".")
    peers = [
        number
        for number in range(torch.cuda.device_count())
        if number != device.index and str(torch.cuda.get_device_properties(number).uuid) in gpus
    ]
    for number in peers:
        if not torch.cuda.can_device_access_peer(device.index, number):
            return f"GPU {device.index} cannot access the memory of GPU {number}"
    return "" if len(gpus) == 1 else _flush_obstacle(device, peers)


def _flush_obstacle(device: torch.device, peers: list[int]) -> str:
    """Return why rows might arrive after the flag that follows them, or nothing."""
    from counterpoint.ops.driver_calls import can_flush_remote_writes, is_nvlink_to  # noqa: PLC0415  needs cuda-bindings

    if can_flush_remote_writes(device.index):
        return ""
    name = torch.cuda.get_device_name(device)
    is_proven = any(each in name for each in PROVEN_WITHOUT_FLUSH)
    if is_proven and all(is_nvlink_to(device.index, number) for number in peers):
        return ""
    return (
        f"GPU {device.index} ({name}) cannot flush remote writes in a wait (CAN_FLUSH_REMOTE_WRITES is 0); "
        f"without that, copy engines are proven only on NVLink between {format_choice(PROVEN_WITHOUT_FLUSH)} GPUs"
    )
