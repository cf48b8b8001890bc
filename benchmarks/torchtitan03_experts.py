"""What `expert_parallel.overlap` makes of a step of torchtitan 0.3.0's DeepSeek-V3, on the GPUs at hand; as JSON.

    pip install --no-deps --target DIR torchtitan==0.3.0 spmd_types==0.2.3 tyro docstring_parser typeguard
    torchrun --nproc-per-node 2 -m benchmarks.torchtitan03_experts --torchtitan DIR -o torchtitan03_moe_2x_h200.json
    torchrun --nproc-per-node 2 -m benchmarks.torchtitan03_experts --torchtitan DIR --cpu -o FILE

The model is the 16B flavor with 6 layers and 32,768 words, and `JOB` says how it is trained, on 4 x 4,096 random words of
each rank in a step. `benchmarks.torchtitan03_model` builds it, with stand-ins for what torch 2.11 lacks. torchtitan sums the
experts' results with its own scatter; one took 1.4 ms on an H200 with torch 2.11.

`benchmarks.torchtitan03_steps` says what is compared and timed. Gradients are not the same bit by bit even in two bare
passes, so their norms may differ by two roundings to bf16. `--cpu` has small sizes, and shows only that the benchmark runs.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.torchtitan03_model import Built, Sizes, build, local
from benchmarks.torchtitan03_steps import Blocks, Job, join, measuring_conditions, parser_of, run
from counterpoint.cuda.ranks import run_and_leave
from counterpoint.integrations import expert_parallel
from counterpoint.integrations.overlapped import Overlapped

JOB = (
    "DeepSeek-V3 of torchtitan, random words, expert parallel and FSDP2 over all ranks, spmd_backend {}, bf16 "
    "with fp32 parameters and reductions, eager, no activation checkpointing, PyTorch's attention, AdamW (fused), gradients "
    "clipped, load balancing by torchtitan's hook; blocks of {} steps off/on/on/off, each after {} of warm-up; ms of rank 0"
)

ON_GPUS = Sizes("16B", layers=6, words=32768, sequences=4, tokens=4096), Blocks(rounds=3, steps=10, warm_ups=5)
ON_CPUS = Sizes("debugmodel", layers=3, words=2048, sequences=2, tokens=64), Blocks(rounds=2, steps=2, warm_ups=1)


class ExpertsJob(Job):
    """It balances the loads of the experts, too."""

    def __init__(self, built: Built, sizes: Sizes, device: torch.device) -> None:
        from torchtitan.components.optimizer import register_moe_load_balancing_hook  # noqa: PLC0415

        super().__init__(built, sizes, device)
        register_moe_load_balancing_hook(self.optimizer, [self.model], built.dims)

    def loads(self) -> list[list[float]]:
        """The largest load of an expert, and of a rank's experts, over the mean, by layer, since the last step."""
        found = []
        for layer in self.model.layers.values():
            if layer.moe_enabled:
                counts = local(layer.moe.tokens_per_expert_E).clone()
                dist.all_reduce(counts)
                of_ranks = counts.view(dist.get_world_size(), -1).sum(1)
                found.append([round((each.max() / each.mean()).item(), 3) for each in (counts, of_ranks)])
        return found

    def notes(self) -> dict[str, Any]:
        return {"loads_of_experts_and_ranks": self.loads()}

    def notes_at_end(self, overlapped: Overlapped) -> dict[str, Any]:
        self.optimizer.zero_grad()
        self.forward_backward(0)  # so that the loads are those of one batch
        most = overlapped.most_kept_bytes
        return {"most_kept_bytes_of_a_call": most, "loads_of_experts_and_ranks_at_end": self.loads()}


def kind_of(name: str) -> str:
    """The kind of a parameter."""
    return "experts" if "inner_experts" in name else "router" if "router" in name else "others"


def shapes_of(built: Built, sizes: Sizes) -> dict[str, int]:
    config, experts = built.config, built.config.layers[-1].moe
    return {
        "layers": len(config.layers),
        "dim": config.dim,
        "words": config.vocab_size,
        "experts": experts.num_experts,
        "top": experts.router.top_k,
        "hidden": experts.routed_experts.inner_experts.hidden_dim,
        "shared_hidden": experts.shared_experts.w1.out_features,
        "sequences_per_rank": sizes.sequences,
        "tokens_per_sequence": sizes.tokens,
    }


def main() -> None:
    options = parser_of(__doc__).parse_args()
    sys.path[:0] = [str(folder.resolve()) for folder in options.torchtitan]
    device = join(has_gpus=not options.cpu)
    sizes, blocks = ON_CPUS if options.cpu else ON_GPUS
    built = build(sizes, device, options.backend)
    job = ExpertsJob(built, sizes, device)
    words = JOB.format(options.backend, blocks.steps, blocks.warm_ups)
    stated = measuring_conditions(built, shapes_of(built, sizes), words, device)
    run(job, blocks, expert_parallel.overlap, kind_of=kind_of, stated=stated, output=options.output)


if __name__ == "__main__":
    run_and_leave(main)
