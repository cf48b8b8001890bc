"""A step to tune on GPUs: torchrun --nproc-per-node 4 -m counterpoint tune examples.captured_step.step:make_step

Eight layers of a backward pass: each layer's weight gradient is averaged over the ranks while the next layer computes. The
elementwise kernels keep every SM busy, so the all-reduce has to wait for them unless a plan says otherwise.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

NUM_LAYERS = 8
WIDTH = 8192


def make_step() -> Callable[[], None]:
    """Called once, with the GPU chosen and the process group ready; returns the step."""
    options = {"device": "cuda", "dtype": torch.bfloat16}
    activations = torch.randn(8 * WIDTH, WIDTH, **options)
    weight = torch.randn(WIDTH, WIDTH, **options)
    gradients = [torch.empty(WIDTH, WIDTH, **options) for _ in range(NUM_LAYERS)]
    result = torch.empty_like(activations)
    communication = torch.cuda.Stream()

    def step() -> None:
        current = torch.cuda.current_stream()
        for gradient in gradients:
            torch.mm(activations[:WIDTH].t(), weight, out=gradient)
            communication.wait_stream(current)
            with torch.cuda.stream(communication):
                dist.all_reduce(gradient, op=dist.ReduceOp.AVG)
            for _ in range(2):
                torch.mul(activations, 0.5, out=result)
        current.wait_stream(communication)

    return step
