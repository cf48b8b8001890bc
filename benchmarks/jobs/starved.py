"""A training job whose long kernels starve its collectives: what `counterpoint run` is for. It does not know Counterpoint.

    torchrun --nproc-per-node 2 benchmarks/jobs/starved.py
    counterpoint run --tune -o plan.toml -- torchrun --nproc-per-node 2 benchmarks/jobs/starved.py
    counterpoint run --plan plan.toml -- torchrun --nproc-per-node 2 benchmarks/jobs/starved.py

Each layer is a linear regression: an error, a gradient, and the gradient's average over ranks in small buckets, started at
once and needed only by the optimizer. Both matmuls are Triton kernels of thousands of short CTAs that keep every SM full, so
a bucket gets in only when a matmul has placed its last CTA: one bucket per kernel, and the others are left for the end. The
last layer of a step is frozen, as the first of a fine-tuned network: it has an error and nothing to average. With `--device
cpu` the same loop runs on plain torch operators at a small size.
"""

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist

STEPS_PER_LINE = 10


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """On 2 H200s a layer computes for 2 ms, and its buckets alone take 1.2 ms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=8192, help="rows and columns of a weight")
    parser.add_argument("--tokens", type=int, default=2048, help="rows of a batch")
    parser.add_argument("--buckets", type=int, default=12, help="all-reduces per layer")
    parser.add_argument(
        "--frozen", type=int, default=1, help="layers, the last of a step, that have an error but no gradient"
    )
    options = parser.parse_args(arguments)
    if options.steps < STEPS_PER_LINE:
        parser.error(f"--steps is {STEPS_PER_LINE} or more, since times are of so many; found {options.steps}")
    if options.device == "cuda" and (options.width % 512 or options.tokens % 512):
        parser.error(f"the GPU's matmul takes multiples of 512; found --width {options.width} --tokens {options.tokens}")
    return options


def make_matmul(device: str):
    """C = A B for any strides: on GPUs one CTA of 128 threads per 64 x 64 tile."""
    if device == "cpu":
        return lambda a, b, c: torch.matmul(a, b, out=c)
    import triton  # noqa: PLC0415  only where there is a GPU
    import triton.language as tl  # noqa: PLC0415

    @triton.jit
    def starving_matmul(  # noqa: PLR0917  Triton passes by position
        a, b, c, n, k, a_row, a_column, b_row, b_column, tm: tl.constexpr, tn: tl.constexpr, tk: tl.constexpr
    ):
        tiles_n = n // tn
        group = tl.program_id(0) // (8 * tiles_n)
        within = tl.program_id(0) % (8 * tiles_n)
        row, column = group * 8 + within % 8, within // 8
        rows, columns, inner = row * tm + tl.arange(0, tm), column * tn + tl.arange(0, tn), tl.arange(0, tk)
        at_a = a + rows[:, None] * a_row + inner[None, :] * a_column
        at_b = b + inner[:, None] * b_row + columns[None, :] * b_column
        total = tl.zeros((tm, tn), tl.float32)
        for _ in range(0, k, tk):
            total = tl.dot(tl.load(at_a), tl.load(at_b), total)
            at_a += tk * a_column
            at_b += tk * b_row
        tl.store(c + rows[:, None] * n + columns[None, :], total.to(c.dtype.element_ty))

    def matmul(a, b, c):
        (m, k), n = a.shape, b.shape[1]
        tiles = (m // 64) * (n // 64)
        starving_matmul[(tiles,)](a, b, c, n, k, *a.stride(), *b.stride(), 64, 64, 32, num_warps=4, num_stages=2)

    return matmul


class Layer:
    """One regression: find W with A W = T, from this rank's A and T."""

    def __init__(self, options: argparse.Namespace, seed: int) -> None:
        generator = torch.Generator(device=options.device).manual_seed(seed)
        self.kind = torch.float32 if options.device == "cpu" else torch.bfloat16
        make = {"generator": generator, "device": options.device}
        self.inputs = torch.randn(options.tokens, options.width, **make).to(self.kind)
        self.targets = torch.randn(options.tokens, options.width, **make).to(self.kind)
        self.weight = torch.nn.Parameter(torch.zeros(options.width, options.width, device=options.device))
        self.error = torch.empty_like(self.targets)
        self.weight.grad = torch.empty_like(self.weight)
        self.buckets = self.weight.grad.view(-1).chunk(options.buckets)

    def look(self, matmul) -> None:
        """The error."""
        matmul(self.inputs, self.weight.detach().to(self.kind), self.error)
        self.error.sub_(self.targets)

    def backward(self, matmul, group=None) -> list[dist.Work]:
        """The error and the gradient, and its average over ranks on the way, in the default group or in another."""
        self.look(matmul)
        matmul(self.inputs.t(), self.error, self.weight.grad)
        return [dist.all_reduce(bucket, group=group, async_op=True) for bucket in self.buckets]


def train_step(layers: list[Layer], frozen: list[Layer], matmul, group=None) -> None:
    """Gradients of all layers, averaged; only at the end does anything wait."""
    under_way = [work for layer in layers for work in layer.backward(matmul, group)]
    for layer in frozen:
        layer.look(matmul)
    for work in under_way:
        work.wait()


def print_last_half(times_ms: list[float]) -> None:
    """The line that `benchmarks.supervised_jobs` reads: the median of the second half, and its quartiles."""
    half = times_ms[len(times_ms) // 2 :]
    low, median, high = statistics.quantiles(half, n=4, method="inclusive") if len(half) > 1 else half * 3
    print(f"last half: {median:.3f} ms per step, quartiles {low:.3f} to {high:.3f}, {len(half)} times ten steps", flush=True)


def main() -> None:
    """Train, and print the loss and the time of each ten steps."""
    options = parse()
    rank, on_gpu = int(os.environ["RANK"]), options.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    every_layer = [Layer(options, seed=1000 * rank + number) for number in range(options.layers + options.frozen)]
    layers, frozen = every_layer[: options.layers], every_layer[options.layers :]
    optimizer = torch.optim.SGD([layer.weight for layer in layers], lr=0.5 / options.width / dist.get_world_size())
    matmul = make_matmul(options.device)
    times_ms: list[float] = []
    start = time.perf_counter()
    for step in range(1, options.steps + 1):
        train_step(layers, frozen, matmul)
        optimizer.step()
        if step % STEPS_PER_LINE == 0:
            loss = torch.stack([layer.error.float().square().mean() for layer in every_layer]).sum().item()
            now = time.perf_counter()
            times_ms.append((now - start) * 1000 / STEPS_PER_LINE)
            start = now
            if rank == 0:
                print(f"step {step}  loss {loss!r}  {times_ms[-1]:.3f} ms per step", flush=True)
    if rank == 0:
        print_last_half(times_ms)
    dist.barrier()
    if not on_gpu:
        os._exit(0)  # torch 2.13 aborts now and then when a process with gloo threads ends by itself
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
