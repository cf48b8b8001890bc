"""torchtitan 0.3.0's models as its trainer builds them: DeepSeek-V3 with expert parallelism and FSDP2 over all ranks, and
Llama 3 with tensor and sequence parallelism over all ranks.

torchtitan 0.3.0 uses three things that torch 2.11 lacks and 2.13 has. `build` puts stand-ins where one is missing, and
names them in its result. A class is only imported; a question about tracing is always answered with no. And since
`fully_shard` has one mesh for all parameters of a unit there, each layer's experts are a unit of their own. torch 2.15 needs
none of them, and it runs torchtitan's backend `spmd_types`, too.

The trainer itself is not imported: it needs data sets, tokenizers and checkpoints, and no step here does. Functions import
torchtitan, because its folder is known only when the command line was read. `_fit_to_cpus` says what differs on CPUs.
"""

import dataclasses
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

BACKENDS = "partial_dtensor", "spmd_types"
SEED = 7
CLASS_STAND_IN = "torch.distributed.fsdp.DataParallelMeshDims: a stand-in class, never made with partial_dtensor"
TRACING_STAND_IN = "torch.compiler._is_non_strict_tracing: always False"
SHARDING_STAND_IN = (
    "apply_fsdp_to_mtp_decoder: experts are an FSDP unit of their own on the efsdp mesh, as in torchtitan 0.2"
)


class Sizes(NamedTuple):
    """How large the model is, and what a rank trains it on in a step."""

    flavor: str  # of torchtitan
    layers: int
    words: int
    sequences: int
    tokens: int  # of a sequence


class Built(NamedTuple):
    """The model on this rank, the configuration and the dimensions of parallelism that torchtitan has for it."""

    model: Any
    config: Any
    dims: Any
    context: Callable[[], AbstractContextManager[None]]  # that of a step
    stand_ins: list[str]


def build(sizes: Sizes, device: torch.device, backend: str = BACKENDS[0]) -> Built:
    """DeepSeek-V3 with random weights on this rank's device, ready to train."""
    stand_ins = _prepare(device, backend)
    from torchtitan.config import ParallelismConfig  # noqa: PLC0415

    stand_ins += _stand_in_for_sharding()
    num_ranks = dist.get_world_size()
    parallelism = ParallelismConfig(
        data_parallel_shard_degree=num_ranks, expert_parallel_degree=num_ranks, spmd_backend=backend
    )
    return _built(_specification(sizes), parallelism, sizes, device)._replace(stand_ins=stand_ins)


def build_tensor_parallel(
    sizes: Sizes, device: torch.device, backend: str = BACKENDS[0], *, is_compiled: bool = False, is_async: bool = False
) -> Built:
    """Llama 3, likewise; compiled block by block, with PyTorch's async tensor parallelism or without."""
    stand_ins = _prepare(device, backend)
    from torchtitan.config import ParallelismConfig  # noqa: PLC0415
    from torchtitan.models.llama3 import model_registry  # noqa: PLC0415
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config  # noqa: PLC0415

    parallelism = ParallelismConfig(tensor_parallel_degree=dist.get_world_size(), spmd_backend=backend)
    spec = _sized(model_registry(sizes.flavor), sizes)
    set_llama3_sharding_config(spec.model, enable_sp=True)
    compiled = {"enable": is_compiled, "enable_async_tensor_parallel": is_async}
    return _built(spec, parallelism, sizes, device, compiled)._replace(stand_ins=stand_ins)


def _prepare(device: torch.device, backend: str) -> list[str]:
    """Let torchtitan be imported; return the stand-ins."""
    stand_ins = _stand_in_for_names()
    if device.type == "cpu":
        torch._utils._get_available_device_type = lambda: "cpu"  # torchtitan would take GPUs, though there are none
        dist.all_to_all = _all_to_all  # spmd_types exchanges tokens by it
    from torchtitan.distributed.utils import set_spmd_backend  # noqa: PLC0415

    set_spmd_backend(backend)
    return stand_ins


def _built(
    spec: Any, parallelism: Any, sizes: Sizes, device: torch.device, compiled: dict[str, bool] | None = None
) -> Built:
    from torchtitan.config import CompileConfig, TrainingConfig  # noqa: PLC0415
    from torchtitan.distributed import ParallelDims  # noqa: PLC0415
    from torchtitan.distributed.utils import get_spmd_context  # noqa: PLC0415

    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    torch.manual_seed(SEED)
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=TrainingConfig(seq_len=sizes.tokens, local_batch_size=sizes.sequences),
        parallelism=parallelism,
        compile_config=CompileConfig(**compiled or {}),
        ac_config=None,  # no activation checkpointing
        dump_folder=tempfile.gettempdir(),
    )
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
        if device.type == "cpu":
            _fit_to_cpus(model)
    return Built(model.train(), spec.model, dims, get_spmd_context(parallel_dims=dims), [])


def _specification(sizes: Sizes) -> Any:
    """torchtitan's flavor with these sizes and PyTorch's own attention, and the layouts that the trainer would fill in."""
    from torchtitan.models.deepseek_v3 import model_registry  # noqa: PLC0415
    from torchtitan.models.deepseek_v3.sharding import set_deepseek_v3_sharding_config  # noqa: PLC0415

    spec = _sized(model_registry(sizes.flavor), sizes)
    set_deepseek_v3_sharding_config(spec.model, enable_sp=True, enable_ep=True)
    return spec


def _sized(spec: Any, sizes: Sizes) -> Any:
    from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: PLC0415

    config = spec.model
    config.layers = config.layers[: sizes.layers]
    config.vocab_size = sizes.words
    config.tok_embeddings = dataclasses.replace(config.tok_embeddings, num_embeddings=sizes.words)
    config.lm_head = dataclasses.replace(config.lm_head, out_features=sizes.words)
    for layer in config.layers:
        layer.attention.rope = dataclasses.replace(layer.attention.rope, max_seq_len=sizes.tokens)
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return spec


def _stand_in_for_names() -> list[str]:
    """Give torch the names that torchtitan imports or calls, if it lacks them; say which."""
    found = []
    if "DataParallelMeshDims" not in vars(fsdp):
        fsdp.DataParallelMeshDims = type("DataParallelMeshDims", (), {})
        found.append(CLASS_STAND_IN)
    if "_is_non_strict_tracing" not in vars(torch.compiler):
        torch.compiler._is_non_strict_tracing = lambda: False
        found.append(TRACING_STAND_IN)
    return found


def _stand_in_for_sharding() -> list[str]:
    """Let torchtitan call `shard` if its own function needs a later torch; say so."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common  # noqa: PLC0415  what torchtitan's own imports, too
    from torchtitan.models.deepseek_v3 import parallelize  # noqa: PLC0415

    if "ShardPlacementResult" in vars(_fsdp_common):
        return []
    parallelize.apply_fsdp_to_mtp_decoder = shard
    return [SHARDING_STAND_IN]


def shard(
    model: Any,
    mesh: DeviceMesh,
    *,
    edp_mesh: DeviceMesh,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    **_: object,
) -> None:
    """Shard the model with a unit for each layer, one for its experts, one for the embeddings and one for the head.

    torchtitan passes the arguments; the others are about pipelines and offloading, which this benchmark has not. Exchanging
    tokens makes the host wait, so each part says what to fetch ahead of the next one's turn, in both directions.
    """
    policy = fsdp.MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    make_unit: Callable[..., Any] = partial(fsdp.fully_shard, mp_policy=policy, reshard_after_forward=True)
    layers = [[layer, *_experts_of(layer)] for layer in model.layers.values()]
    parts = [[model.tok_embeddings], *layers, [model.norm, model.lm_head]]
    make_unit(model.tok_embeddings, mesh=mesh)
    for layer, *experts in layers:
        for each in experts:
            make_unit(each, mesh=edp_mesh)
        make_unit(layer, mesh=mesh)
    make_unit(parts[-1], mesh=mesh, reshard_after_forward=False)  # backward begins with it
    fsdp.fully_shard(model, mesh=mesh, mp_policy=policy)
    for unit in _units(model):
        unit.set_gradient_divide_factor(1.0)  # the loss is divided by the number of all tokens
    for earlier, later in pairwise(parts):
        earlier[0].set_modules_to_forward_prefetch(later)
        later[0].set_modules_to_backward_prefetch(earlier)


def _experts_of(layer: Any) -> list[Any]:
    """A layer's routed experts; nothing of a dense layer."""
    return [layer.moe.routed_experts.inner_experts] if layer.moe_enabled else []


def _units(model: Any) -> list[Any]:
    return [each for each in model.modules() if isinstance(each, fsdp.FSDPModule)]


def _fit_to_cpus(model: Any) -> None:
    """Let gloo reduce by sums, all it has, and draw weights anew: DTensor draws the same for every rank on CPUs."""
    for unit in _units(model):
        unit.set_force_sum_reduction_for_comms(True)
    generator = torch.Generator().manual_seed(SEED + dist.get_rank())
    for parameter in model.parameters():
        part = local(parameter)
        if part.ndim > 1 and part.numel() > 1:
            part.normal_(std=part.std().item(), generator=generator)


def _all_to_all(outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Exchange parts of different sizes, which gloo does for consecutive parts of one tensor only."""
    sizes = [[part.shape[0] for part in parts] for parts in (outputs, inputs)]
    joined = torch.cat(outputs)
    dist.all_to_all_single(joined, torch.cat(inputs), *sizes, group=group)
    for output, arrived in zip(outputs, joined.split(sizes[0]), strict=True):
        output.copy_(arrived)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
