"""A Llama of transformers under accelerate's DDP; one call lets copy engines average its gradients.

torchrun --nproc-per-node 2 examples/huggingface/train.py
"""

import os
import sys

import torch

from counterpoint.integrations import ddp


def main() -> None:
    """Ten steps on random words; on CPUs a small model."""
    try:
        from accelerate import Accelerator, DistributedDataParallelKwargs  # noqa: PLC0415  extra packages
        from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415
    except ImportError as missing:
        sys.exit(f"This example needs {missing.name}: pip install transformers accelerate")
    if "RANK" not in os.environ:
        sys.exit("Start this with torchrun: torchrun --nproc-per-node 2 examples/huggingface/train.py")
    on_gpu = torch.cuda.is_available()
    accelerator = Accelerator(
        cpu=not on_gpu,
        mixed_precision="bf16" if on_gpu else "no",
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    width = 2048 if on_gpu else 256
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=8 if on_gpu else 2,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        vocab_size=32_000,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = accelerator.prepare(model, optimizer)
    averages = ddp.register(model)  # after prepare, which wraps the model in DDP

    words = torch.randint(config.vocab_size, (1, 2048 if on_gpu else 32), device=accelerator.device)
    for _ in range(10):
        loss = model(input_ids=words, labels=words).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(f"loss {loss.item():.6f}", averages, sep="\n")
    accelerator.end_training()


if __name__ == "__main__":
    main()
