"""One mixture-of-experts layer whose experts are spread over the ranks: our operator beside torch's collectives and matmuls.

torchrun --nproc-per-node 2 examples/experts/layer.py
"""

import os
import sys

import torch
import torch.distributed as dist

from counterpoint import ops


def plain(tokens: torch.Tensor, counts: torch.Tensor, weights: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """What the operator does, without it: every rank gathers all rows, computes its experts' rows, and sums are shared."""
    rank, num_ranks, w1, w2, w3 = dist.get_rank(), dist.get_world_size(), *weights
    every = [torch.empty_like(tokens) for _ in range(num_ranks)]
    every_count = [torch.empty_like(counts) for _ in range(num_ranks)]
    dist.all_gather(every, tokens)
    dist.all_gather(every_count, counts)
    results = [torch.zeros_like(each) for each in every]
    for source, found in enumerate(every_count):
        ends = found.cumsum(0).tolist()
        for number in range(len(w1)):
            expert = rank * len(w1) + number
            rows = slice(ends[expert] - int(found[expert]), ends[expert])
            x = every[source][rows]
            results[source][rows] = (torch.nn.functional.silu(x @ w1[number].T) * (x @ w3[number].T)) @ w2[number].T
    for each in results:
        dist.all_reduce(each)
    return results[rank]


def main() -> None:
    """Random tokens, sorted by expert."""
    if "RANK" not in os.environ:
        sys.exit("Start this with torchrun: torchrun --nproc-per-node 2 examples/experts/layer.py")
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    options = {"device": "cuda", "dtype": torch.bfloat16} if on_gpu else {"device": "cpu", "dtype": torch.float32}
    num_tokens, dim, hidden, num_experts = (98304, 2048, 1408, 32) if on_gpu else (64, 16, 32, 4)  # experts of each rank
    torch.manual_seed(dist.get_rank())
    expert_of = torch.randint(num_experts * dist.get_world_size(), (num_tokens,), device=options["device"])
    counts = expert_of.bincount(minlength=num_experts * dist.get_world_size())
    tokens = torch.randn(num_tokens, dim, **options)
    w1, w3 = (torch.randn(num_experts, hidden, dim, **options) / dim**0.5 for _ in range(2))
    w2 = torch.randn(num_experts, dim, hidden, **options) / hidden**0.5

    found, expected = ops.expert_ffn(tokens, counts, w1, w2, w3), plain(tokens, counts, (w1, w2, w3))
    is_equal = torch.allclose(found, expected, rtol=0.02, atol=0.02 * expected.abs().max().item())
    if dist.get_rank() == 0:
        print(
            f"{num_tokens} rows, {len(counts)} experts on {dist.get_world_size()} ranks: equal within rounding: {is_equal}"
        )
    ops.release()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
