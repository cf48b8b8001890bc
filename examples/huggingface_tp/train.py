"""A Llama that transformers splits among the ranks by `tp_plan="auto"`; one call overlaps its collectives.

torchrun --nproc-per-node 2 examples/huggingface_tp/train.py
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist

from counterpoint.integrations import tensor_parallel


def main() -> None:
    """Ten steps on random words, the same on all ranks; on CPUs a small model."""
    try:
        import accelerate  # noqa: F401, PLC0415  transformers needs it to load a part of a model
        from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  extra packages
    except ImportError as missing:
        sys.exit(f"This example needs {missing.name}: pip install transformers accelerate")
    if "RANK" not in os.environ:
        sys.exit("Start this with torchrun: torchrun --nproc-per-node 2 examples/huggingface_tp/train.py")
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    width, dtype = (4096, torch.bfloat16) if on_gpu else (256, torch.float32)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=7 * width // 2,
        num_hidden_layers=4 if on_gpu else 2,
        num_attention_heads=32 if on_gpu else 8,
        num_key_value_heads=8 if on_gpu else 4,
        vocab_size=32_000,
        use_cache=False,
    )
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        LlamaForCausalLM(config).to(dtype).save_pretrained(folder[0])
    dist.barrier()
    model = AutoModelForCausalLM.from_pretrained(folder[0], dtype=dtype, tp_plan="auto")
    overlapped = tensor_parallel.overlap(model)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    torch.manual_seed(1)
    words = torch.randint(config.vocab_size, (2, 4096 if on_gpu else 32), device=model.device)
    for _ in range(10):
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f}", overlapped, sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
