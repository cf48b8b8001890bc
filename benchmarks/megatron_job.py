"""A GPT of Megatron-LM's core with its distributed optimizer, data-parallel, tensor-parallel or expert-parallel, to see what
`counterpoint run` does to it, and what the lines of an integration do.

    torchrun --nproc-per-node 2 -m benchmarks.megatron_job
    counterpoint run --tune -- torchrun --nproc-per-node 2 -m benchmarks.megatron_job --steps 300
    torchrun --nproc-per-node 2 -m benchmarks.megatron_job --tensor-parallel 2 --engine --way switched
    UB_SKIPMC=1 torchrun --nproc-per-node 2 -m benchmarks.megatron_job --tensor-parallel 2 --engine --way userbuffers
    torchrun --nproc-per-node 2 -m benchmarks.megatron_job --engine --way switched --width 2048 --experts 32 --balanced

6 layers of width 4,096 with 32,000 words (1.5 B parameters), 4,096 tokens per rank, bf16, Adam, gradients and parameters
overlapped as Megatron-LM's users do. It needs `megatron-core`. With `--engine`, TransformerEngine multiplies, normalizes and
attends, as in most such jobs; tensor parallelism then splits the sequence as well, weight gradients are added to single
precision within matmuls, and micro-batches have `--tokens` tokens in all. With `--experts` every layer has experts, spread
over all ranks.

`bare` does not know Counterpoint. `userbuffers` is TransformerEngine's own overlap (`tp_comm_overlap`). `overlap` has the
operators in force throughout. `switched` switches them in turns of 5 steps, in the order ABBA, after 12 steps, and prints ms
per step by way.
"""

import argparse
import json
import os
import statistics
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.jobs.stock_jobs import require_steps, train

WAYS = ("bare", "userbuffers", "overlap", "switched")
WORDS, HEAD = 32_000, 128
TURN, WARM_UP = 5, 12
ONE_QUEUE = "CUDA_DEVICE_MAX_CONNECTIONS"


def provide_fused_gradients() -> None:
    """Stand in for Apex, without which Megatron-LM's own linears refuse to add gradients within matmuls."""

    def add(activation: torch.Tensor, gradient: torch.Tensor, total: torch.Tensor) -> None:
        torch.addmm(total, gradient.t(), activation, out_dtype=total.dtype, out=total)

    module: Any = types.ModuleType("fused_weight_gradient_mlp_cuda")
    module.wgrad_gemm_accum_fp32 = add
    sys.modules.setdefault(module.__name__, module)


def settings_of_experts(options: argparse.Namespace) -> dict[str, Any]:
    """Return how Megatron-LM is told of expert layers, if there are any."""
    if not options.experts:
        return {}
    return {
        "num_moe_experts": options.experts,
        "moe_router_topk": options.top,
        "moe_ffn_hidden_size": options.expert_width,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
        "moe_permute_fusion": True,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-2,
        "moe_router_force_load_balancing": options.balanced,
        "expert_model_parallel_size": dist.get_world_size(),
        "expert_tensor_parallel_size": 1,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "bias_activation_fusion": True,
        "add_bias_linear": False,
    }


def model_of(options: argparse.Namespace) -> tuple[Any, torch.nn.Module]:
    """Return the model, and the configuration that it shares with what trains it."""
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs  # noqa: PLC0415
    from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: PLC0415

    of_engine = {"normalization": "RMSNorm", "add_bias_linear": False, "gradient_accumulation_fusion": True}
    config = TransformerConfig(
        num_layers=options.layers,
        hidden_size=options.width,
        num_attention_heads=options.width // HEAD,
        bf16=True,
        params_dtype=torch.bfloat16,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=options.tensor_parallel,
        sequence_parallel=options.engine and options.tensor_parallel > 1,
        tp_comm_overlap=options.way == "userbuffers",
        **{**(of_engine if options.engine else {"gradient_accumulation_fusion": False}), **settings_of_experts(options)},
    )
    if options.way == "userbuffers":
        from transformer_engine.pytorch.module import base  # noqa: PLC0415

        shape = [options.tokens, options.width]
        base.initialize_ub(shape=shape, tp_size=options.tensor_parallel, bootstrap_backend="nccl")
    as_specified = f"get_gpt_layer_{'with_transformer_engine' if options.engine else 'local'}_spec"
    of_layer = {"num_experts": options.experts, "moe_grouped_gemm": True} if options.experts else {}
    model = GPTModel(
        config=config,
        transformer_layer_spec=getattr(gpt_layer_specs, as_specified)(**of_layer),
        vocab_size=WORDS,
        max_sequence_length=options.tokens,
    )
    return config, model.to("cuda", torch.bfloat16)


def set_up(options: argparse.Namespace) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """Return the model, and what takes a step and returns its loss, as Megatron-LM's training loop does with one
    micro-batch.
    """
    from megatron.core import parallel_state, tensor_parallel  # noqa: PLC0415
    from megatron.core.distributed import (  # noqa: PLC0415
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: PLC0415

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=options.tensor_parallel,
        expert_model_parallel_size=dist.get_world_size() if options.experts else 1,
        expert_tensor_parallel_size=1 if options.experts else None,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    config, model = model_of(options)
    parallel = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=options.engine,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            use_distributed_optimizer=True,
            bucket_size=options.bucket,
        ),
        model,
    )
    parallel.broadcast_params()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-4, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True),
        [parallel],
    )
    config.grad_sync_func, config.no_sync_func = parallel.start_grad_sync, parallel.no_sync
    torch.manual_seed(1 + parallel_state.get_data_parallel_rank())  # tensor-parallel ranks share their batch
    tokens = torch.randint(0, WORDS, (1, options.tokens + 1), device="cuda")
    places = torch.arange(options.tokens, device="cuda")[None]

    def step() -> torch.Tensor:
        parallel.zero_grad_buffer()
        optimizer.zero_grad()
        loss: torch.Tensor = parallel(tokens[:, :-1], places, None, labels=tokens[:, 1:]).float().mean()
        loss.backward()
        finalize_model_grads([parallel])
        optimizer.step()
        return loss

    return model, step


def take_turns(step: Callable[[], torch.Tensor], use: Callable[[bool], None], num_steps: int) -> dict[str, Any]:
    """Take steps with and without operators in turns, and return ms per step of both, and their losses."""
    times: dict[bool, list[float]] = {False: [], True: []}
    losses: dict[bool, list[float]] = {False: [], True: []}
    for number in range(num_steps):
        turn, place = divmod(number - WARM_UP, TURN)
        is_on = turn >= 0 and turn % 4 in (1, 2)
        if number < WARM_UP:
            is_on = number >= WARM_UP // 2  # both ways prepare what they need
        use(is_on)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        loss = step()
        end.record()
        if number >= WARM_UP:
            losses[is_on].append(loss.item())
        if number >= WARM_UP and place:
            end.synchronize()
            times[is_on].append(start.elapsed_time(end))
    shown = {}
    for is_on, name in ((False, "bare"), (True, "overlap")):
        low, median, high = statistics.quantiles(times[is_on], n=4, method="inclusive")
        shown[name] = {"ms": round(median, 3), "quartiles": [round(low, 3), round(high, 3)], "last_loss": losses[is_on][-1]}
    return shown


def main() -> None:
    """Train on one batch, and print the loss after 50 steps and the time of a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=WAYS, default="bare")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="RANKS")
    parser.add_argument("--experts", type=int, default=0, help="of each layer, over all ranks; 0: none")
    parser.add_argument("--top", type=int, default=8, help="experts of each token")
    parser.add_argument("--expert-width", type=int, default=768, metavar="FEATURES")
    parser.add_argument("--balanced", action="store_true", help="give all experts about as many tokens")
    parser.add_argument("--engine", action="store_true", help="use TransformerEngine, which must be installed")
    parser.add_argument("--bucket", type=int, default=40_000_000, help="parameters; Megatron-LM's default for 2 ranks")
    options = parser.parse_args()
    require_steps(parser, options.steps)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    provide_fused_gradients()
    model, step = set_up(options)
    overlapped = None
    if options.way in ("overlap", "switched"):
        from counterpoint.integrations import expert_parallel, tensor_parallel  # noqa: PLC0415

        overlapped = (expert_parallel if options.experts else tensor_parallel).overlap(model)
    if options.way == "switched" and overlapped is not None:
        shown = take_turns(step, overlapped.use, options.steps)
        if dist.get_rank() == 0:
            print(json.dumps({**shown, ONE_QUEUE: os.environ.get(ONE_QUEUE), "tokens": options.tokens}), flush=True)
    else:
        train(step, options.steps)
    if dist.get_rank() == 0 and overlapped is not None:
        print(overlapped, flush=True)
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
