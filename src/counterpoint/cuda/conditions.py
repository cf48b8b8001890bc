"""Conditions of a measurement on GPUs, stored with every result.

Times depend on the GPUs, the driver and the libraries, and NCCL's times on whether it uses NVLS. A result without these
conditions cannot be compared with another.
"""

import os
from datetime import date

import torch

from counterpoint.cuda.device_facts import kernel_module_version
from counterpoint.cuda.driver import driver_version
from counterpoint.cuda.rendezvous import num_ranks

NVLS_VARIABLE = "NCCL_NVLS_ENABLE"
HOST_VARIABLE = "NCCL_HOSTID"  # NCCL refuses two ranks on one GPU of a host, unless this gives each rank a host of its own


def torch_version() -> str:
    """Return torch's version as a str: `torch.__version__` is a TorchVersion, which msgspec does not write."""
    return str(torch.__version__)


def measuring_conditions(**more: object) -> dict[str, object]:
    """Return the date, the GPUs and the versions by name, together with `more`.

    `driver` is the version of the kernel module, `cuda` the newest CUDA that it supports, `nvls` the value of
    `NCCL_NVLS_ENABLE` or "default".
    """
    return {
        "date": date.today().isoformat(),
        "gpus": _gpus(),
        "driver": kernel_module_version() or "unknown",
        "cuda": driver_version(),
        "torch": torch_version(),
        "nccl": ".".join(str(part) for part in torch.cuda.nccl.version()),
        "nvls": os.environ.get(NVLS_VARIABLE, "default"),
        **more,
    }


def _gpus() -> str:
    """Return the number and the name of the GPUs: one for each rank, unless the ranks of this host share one."""
    number, name = num_ranks(), torch.cuda.get_device_name()
    if HOST_VARIABLE in os.environ and torch.cuda.device_count() < number:
        return f"{torch.cuda.device_count()} x {name}, shared by {number} ranks"
    return f"{number} x {name}"
