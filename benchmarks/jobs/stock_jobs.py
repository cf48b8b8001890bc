"""Stock DDP, FSDP, DeepSpeed, tensor-parallel and sequence-parallel training of a transformer, to see what `counterpoint
run` does to it.

    torchrun --nproc-per-node 4 benchmarks/jobs/stock_jobs.py ddp
    counterpoint run --tune -- torchrun --nproc-per-node 4 benchmarks/jobs/stock_jobs.py fsdp2 --steps 300

The sizes are those of the traces in `examples/traces` (6 layers, 1.2 B parameters, 4,096 tokens per rank, bf16). It does not
know Counterpoint. `--device cpu --width 64 --tokens 32` runs anywhere.

`sequence` splits each sequence over the ranks, under DDP: all-to-alls give a rank all tokens of some heads before attention,
and its own tokens of all heads after it, as in DeepSpeed-Ulysses. Those of q and k run beside the next projection.
`zero1`, `zero2` and `zero3` are DeepSpeed's stages of ZeRO, and need DeepSpeed. `fsdp1` is FullyShardedDataParallel.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

LOSS_STEP = 50
ZERO = ("zero1", "zero2", "zero3")
ZERO_BUCKET = 50_000_000  # elements, 100 MB, as DDP's buckets here
Trained = tuple[nn.Module, Callable[[torch.Tensor], object], Callable[[], object]]  # a model, its backward pass, its step


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.head = head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        split = [project(x).view(batch, tokens, -1, self.head).transpose(1, 2) for project in (self.q, self.k, self.v)]
        mixed = functional.scaled_dot_product_attention(*split, is_causal=True)
        return self.o(mixed.transpose(1, 2).reshape(batch, tokens, -1))


class Exchange(torch.autograd.Function):
    """Sends block p of a (ranks, ...) tensor to rank p, and appends a handle to `handles`; `wait` for it before the result
    is used.
    """

    @staticmethod
    def forward(ctx: object, blocks: torch.Tensor, handles: list[object]) -> torch.Tensor:
        """Begin it."""
        arrived = torch.empty_like(blocks)
        handles.append(dist.all_to_all_single(arrived, blocks, async_op=True))
        return arrived

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Send the gradients back."""
        sent = gradient.contiguous()
        returned = torch.empty_like(sent)
        dist.all_to_all_single(returned, sent)
        return returned, None


class SequenceAttention(Attention):
    """Causal self-attention over a sequence that is split over the ranks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        ranks = dist.get_world_size()
        handles: list[object] = []
        split = []
        for project in (self.q, self.k, self.v):
            by_rank = project(x).view(batch * tokens, ranks, width // ranks).transpose(0, 1).contiguous()
            split.append(Exchange.apply(by_rank, handles))
        for handle in handles:
            handle.wait()
        heads = [each.view(batch, ranks * tokens, -1, self.head).transpose(1, 2) for each in split]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
        last: list[object] = []
        by_heads = Exchange.apply(mixed.reshape(ranks, batch * tokens, width // ranks), last)
        last[0].wait()
        return self.o(by_heads.transpose(0, 1).reshape(batch, tokens, width))


class FeedForward(nn.Module):
    """Two layers, four times as wide between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, width: int, head: int, attention: type[Attention] = Attention) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.feed_forward = attention(width, head), FeedForward(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


def parallelize(job: str, model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    """As each kind of parallelism is set up in PyTorch's own tutorials."""
    if job in ("ddp", "sequence"):
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=100)
    if job == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: PLC0415
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy  # noqa: PLC0415

        policy, device = ModuleWrapPolicy({Block}), next(model.parameters()).device
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=device, use_orig_params=True)
    if job == "fsdp2":
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

        for block in model:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    from torch.distributed.tensor.parallel import (  # noqa: PLC0415
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    column = {f"attention.{name}": ColwiseParallel() for name in "qkv"} | {"feed_forward.up": ColwiseParallel()}
    row = {"attention.o": RowwiseParallel(), "feed_forward.down": RowwiseParallel()}
    for block in model:
        parallelize_module(block, mesh, column | row)
    return model


def make_optimizer(job: str, model: nn.Module, learning_rate: float = 1e-3) -> torch.optim.Optimizer:
    """Plain SGD."""
    # torch 2.11 cannot update plain and distributed parameters, which tensor parallelism mixes, in one kernel
    return torch.optim.SGD(model.parameters(), lr=learning_rate, foreach=job != "tp")


def with_deepspeed(job: str, model: nn.Module) -> Trained:
    """Return DeepSpeed's model, backward pass and step at a stage of ZeRO, with its defaults but for smaller buckets."""
    import deepspeed  # noqa: PLC0415

    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=make_optimizer(job, model),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": next(model.parameters()).dtype == torch.bfloat16},
            "zero_optimization": {"stage": int(job[-1]), "overlap_comm": True, "reduce_bucket_size": ZERO_BUCKET},
            "zero_allow_untested_optimizer": True,
        },
    )
    return engine, engine.backward, engine.step


def set_up(job: str, model: nn.Sequential, mesh: DeviceMesh) -> Trained:
    """Return the model that is trained, its backward pass, and what ends a step."""
    if job in ZERO:
        return with_deepspeed(job, model)
    parallel = parallelize(job, model, mesh)
    optimizer = make_optimizer(job, parallel)

    def end_step() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return parallel, torch.Tensor.backward, end_step


def print_last_half(times_ms: list[float], of_what: str = "times ten steps") -> None:
    """The line that `benchmarks.supervised_jobs` reads: the median of the second half, and its quartiles."""
    if not times_ms:
        print("too few steps to time any; give more", flush=True)
        return
    half = times_ms[len(times_ms) // 2 :]
    low, median, high = statistics.quantiles(half, n=4, method="inclusive") if len(half) > 1 else half * 3
    print(f"last half: {median:.3f} ms per step, quartiles {low:.3f} to {high:.3f}, {len(half)} {of_what}", flush=True)


def train(step: Callable[[], torch.Tensor], num_steps: int) -> None:
    """Take steps, each of which returns its loss, and print the loss after 50 and the time of a step."""
    is_first = dist.get_rank() == 0
    times_ms: list[float] = []
    start = time.perf_counter()
    for number in range(1, num_steps + 1):
        loss = step()
        if number % 10 == 0:
            shown = loss.item()
            now = time.perf_counter()
            times_ms.append((now - start) * 100)
            start = now
            if is_first and number == LOSS_STEP:
                print(f"loss after {LOSS_STEP} steps {shown!r}", flush=True)
    if is_first:
        print_last_half(times_ms)


def require_steps(parser: argparse.ArgumentParser, num_steps: int) -> None:
    """End the program if there are too few steps for a loss."""
    if num_steps < LOSS_STEP:
        parser.error(f"--steps is {LOSS_STEP} or more, since the loss after so many is printed; found {num_steps}")


def main() -> None:
    """Train on one batch, and print the loss after 50 steps and the time of a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=("ddp", "fsdp1", "fsdp2", *ZERO, "tp", "sequence"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=4096)
    options = parser.parse_args()
    require_steps(parser, options.steps)
    rank, on_gpu = int(os.environ["RANK"]), options.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    mesh = init_device_mesh(options.device, (dist.get_world_size(),))
    kind = torch.bfloat16 if on_gpu else torch.float32
    torch.manual_seed(0)
    attention = SequenceAttention if options.job == "sequence" else Attention
    sizes = options.width, min(128, options.width // 4)
    blocks = nn.Sequential(*(Block(*sizes, attention) for _ in range(options.layers)))
    model, backward, end_step = set_up(options.job, blocks.to(options.device, kind), mesh)
    torch.manual_seed(0 if options.job == "tp" else 1 + rank)  # tensor parallel ranks share their batch
    batch = torch.randn(1, options.tokens, options.width, device=options.device, dtype=kind)

    def step() -> torch.Tensor:
        loss = model(batch).float().square().mean()
        backward(loss)
        end_step()
        return loss

    train(step, options.steps)
    dist.barrier()
    if not on_gpu:
        os._exit(0)  # torch 2.13 aborts now and then when a process with gloo threads ends by itself
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
