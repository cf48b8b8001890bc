"""Copy engines and operators for existing models: DDP's gradient buckets (`ddp`), FSDP2's parameters and gradients
(`fsdp2`), linears of tensor-parallel models (`tensor_parallel`). A training script changes by one call.

Each module needs torch and is imported by name: `from counterpoint.integrations import ddp`.
"""

from importlib import import_module

from counterpoint.errors import MissingPackageError

__all__ = ["collectives", "ddp", "expert_parallel", "fsdp2", "tensor_parallel"]


def __getattr__(name: str) -> object:
    """Import a module when it is first read, so that `integrations.ddp` works without an import of its own."""
    if name not in __all__:
        raise AttributeError(f"module 'counterpoint.integrations' has no attribute '{name}'")
    try:
        return import_module(f"counterpoint.integrations.{name}")
    except ModuleNotFoundError as problem:
        raise MissingPackageError.of_missing(f"counterpoint.integrations.{name}", problem) from problem


def __dir__() -> list[str]:
    return sorted(__all__)
