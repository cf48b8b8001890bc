"""Reads how torchtitan 0.3 spread a module over ranks (read in 0.3.0).

`Module.parallelize` puts a function in place of `forward`. It redistributes inputs, calls the original, and redistributes
outputs. Its closure holds the dimensions of parallelism, and the module's `_sharding_config` says the layouts: for each
input and for the output where it comes from (`src`) and what it becomes (`dst`). Nothing here imports torchtitan.
"""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from counterpoint.integrations.closures import closure_of

PLAIN = "spmd_types"  # torchtitan's backend whose weights and activations are plain tensors, a rank's parts
BACKENDS = "partial_dtensor", PLAIN  # the other one has DTensors on meshes of several dimensions
AXIS = "tp"  # torchtitan's name of the tensor-parallel dimension
WHOLE = ("R", "I")  # torchtitan's names of layouts that are the same on every rank; the gradient of R is still to be summed

Kind = int | str | None  # the sharded dimension; or R, I, P (partial) or V (varying); None where a layout is silent


def parallel_dims_of(module: nn.Module) -> Any | None:
    """Return the dimensions of parallelism for which torchtitan 0.3 spread a module; None if it did not."""
    found = closure_of(vars(module).get("forward"))
    return found["parallel_dims"] if {"parallel_dims", "fn"} <= found.keys() else None


def tensor_parallel_mesh_of(module: nn.Module) -> DeviceMesh | None:
    """Return the mesh of the tensor-parallel ranks; None if torchtitan did not spread the module over them."""
    dims: Any = parallel_dims_of(module)
    mesh = dims.get_optional_mesh(AXIS) if getattr(dims, "spmd_backend", None) in BACKENDS else None
    return mesh if isinstance(mesh, DeviceMesh) else None


def refusal_of_backend(module: nn.Module) -> str:
    """Return why a linear that another backend of torchtitan split stays unchanged; or nothing."""
    dims = parallel_dims_of(module)
    backend = getattr(dims, "spmd_backend", "of another release")
    if dims is None or backend in BACKENDS or getattr(dims, "tp", 0) == 1:
        return ""
    supported = " and ".join(BACKENDS)
    return (
        f"torchtitan split it by its backend {backend}, but only {supported} are supported. Leave it unchanged, or "
        "set parallelism.spmd_backend to one of them"
    )


def has_plain_tensors(module: nn.Module) -> bool:
    """Return whether torchtitan spread a module over tensor-parallel ranks and gave it plain weights."""
    backend = getattr(parallel_dims_of(module), "spmd_backend", None)
    return backend == PLAIN and tensor_parallel_mesh_of(module) is not None


def weights_of(module: nn.Module) -> set[Kind]:
    """Return how torchtitan split the weights of a module that has plain ones."""
    return {kind_of(each) for each in getattr(config_of(module), "state_shardings", {}).values()}


def config_of(module: nn.Module) -> Any | None:
    """Return the layouts of a module that torchtitan spread over ranks; None of any other."""
    config = None if parallel_dims_of(module) is None else getattr(module, "_sharding_config", None)
    is_known = all(hasattr(config, f"{side}_{end}_shardings") for side in ("in", "out") for end in ("src", "dst"))
    return config if is_known else None


def kind_of(layout: Any) -> Kind:
    """Return what a layout says of the tensor-parallel ranks."""
    found = None if layout is None or isinstance(layout, tuple) else layout.per_axis_spmd_types().get(AXIS)
    kind: Kind = getattr(found, "dim", getattr(found, "value", None))
    return kind


def inputs_of(config: Any) -> dict[str, tuple[Kind, Kind]]:
    """Return how each input comes and what it becomes. What only one of the two names stays as it is."""
    sources, targets = config.in_src_shardings or {}, config.in_dst_shardings or {}
    found = {name: (kind_of(sources.get(name)), kind_of(targets.get(name))) for name in {**sources, **targets}}
    return {name: (source, source if target is None else target) for name, (source, target) in found.items()}


def output_of(config: Any) -> tuple[Kind, Kind]:
    """Return how the original forward gives its output, and what it becomes."""
    source, target = kind_of(config.out_src_shardings), kind_of(config.out_dst_shardings)
    return source, source if target is None else target
