"""A GPT of Megatron-LM's core under its data parallelism and distributed optimizer, to see what `counterpoint run` does to
it.

    torchrun --nproc-per-node 2 -m benchmarks.megatron_job
    counterpoint run --tune -- torchrun --nproc-per-node 2 -m benchmarks.megatron_job --steps 300

6 layers of width 4,096 with 32,000 words (1.5 B parameters), 4,096 tokens per rank, bf16, Adam, gradients and parameters
overlapped as Megatron-LM's users do. It does not know Counterpoint, and needs `megatron-core`, without TransformerEngine.
"""

import argparse
import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.jobs.stock_jobs import require_steps, train

WORDS, HEAD = 32_000, 128


def set_up(options: argparse.Namespace) -> Callable[[], torch.Tensor]:
    """Return what takes a step and returns its loss, as Megatron-LM's training loop does with one micro-batch."""
    from megatron.core import parallel_state, tensor_parallel  # noqa: PLC0415
    from megatron.core.distributed import (  # noqa: PLC0415
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel  # noqa: PLC0415
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: PLC0415
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: PLC0415
    from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: PLC0415

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=options.layers,
        hidden_size=options.width,
        num_attention_heads=options.width // HEAD,
        bf16=True,
        params_dtype=torch.bfloat16,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=WORDS,
        max_sequence_length=options.tokens,
    ).to("cuda", torch.bfloat16)
    parallel = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
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
    torch.manual_seed(1 + dist.get_rank())
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

    return step


def main() -> None:
    """Train on one batch, and print the loss after 50 steps and the time of a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--bucket", type=int, default=40_000_000, help="parameters; Megatron-LM's default for 2 ranks")
    options = parser.parse_args()
    require_steps(parser, options.steps)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    train(set_up(options), options.steps)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
