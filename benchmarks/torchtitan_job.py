"""One rank of a torchtitan job: Llama 3, or DeepSeek-V3 with 6 layers, unmodified or with the lines of an integration.

    torchrun --nproc-per-node 2 -m benchmarks.torchtitan_job --torchtitan DIR --way switched --steps 60
    torchrun --nproc-per-node 2 -m benchmarks.torchtitan_job --torchtitan DIR --model llama_tp --way overlap --compile.enable
    torchrun --nproc-per-node 2 -m benchmarks.torchtitan_job --torchtitan DIR --model llama_tp --way bare --compile.enable

DIR has the sources of torchtitan v0.2.2; options that are none of these go to torchtitan. The loss is logged in every step,
so the host waits for each step; `--metrics.log_freq 10` is as in torchtitan's own configurations of 8 B and more. `llama_tp`
is Llama 3 with dimension 4,096, 8 layers, 32 heads, 8 key-value heads and 32,768 words, one sequence of 8,192 tokens, tensor
parallel over all ranks in bf16 without checkpointing; `llama_fsdp2` the same with FSDP2 and selective checkpointing of
operators.
`deepseek` is the 16 B flavor (dim 2,048, 64 experts, top 6, two shared experts) with 6 layers and 32,768 words; 4 x 4,096
tokens on each rank; expert parallelism over all ranks, FSDP2, bf16, selective checkpointing of operators, as the debug
configuration has it. Data are random words; every run has the same seed and the same data.

`overlap` has the operators in force throughout. `switched` begins so for 12 steps, and then switches in turns of 5 steps, in
the order ABBA: both ways meet the same clocks, temperatures and data. At its end rank 0 prints one line of JSON: ms per step
by way (CUDA events at the ends of the optimizer's steps, without the first 12 steps and the first of each turn), losses,
peak memory, and what `overlap` counted. With `--wait-for FILE` it loads all that it needs, and begins when FILE is there.
"""

import argparse
import dataclasses
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.jobs.stock_jobs import print_last_half

WAYS = ("bare", "overlap", "switched")
TURN, WARM_UP = 5, 12
NUM_LOSSES = 10  # that are printed in lines of their own
NUM_LINES, WORDS_PER_LINE = 600, 400
CONFIGURATION = "torchtitan/models/{}/train_configs/debug_model.toml"
LLAMA = {"--training.local_batch_size": "1", "--training.seq_len": "8192"}
# the model's folder, and what is asked of torchtitan; "{}" is the number of ranks
MODELS: dict[str, tuple[str, dict[str, str]]] = {
    "deepseek": (
        "deepseek_v3",
        {
            "--training.local_batch_size": "4",
            "--training.seq_len": "4096",
            "--parallelism.expert_parallel_degree": "{}",
        },
    ),
    "llama_tp": (
        "llama3",
        {
            **LLAMA,
            "--training.dtype": "bfloat16",
            "--parallelism.tensor_parallel_degree": "{}",
            "--parallelism.data_parallel_shard_degree": "1",
            "--activation_checkpoint.mode": "none",
        },
    ),
    "llama_fsdp2": ("llama3", {**LLAMA, "--activation_checkpoint.selective_ac_option": "op"}),
}
FLAVOR = "benchmark"
SCHEDULED_STEPS = 400  # of the learning rate, so that trainings of other lengths learn alike


class Clock:
    """Ends of the optimizer's steps, in the GPU's own order; switches what is in force between turns."""

    def __init__(self, way: str, overlapped: list[Any]) -> None:
        self._is_switched, self._overlapped = way == "switched", overlapped
        self._now = way != "bare"
        self._optimizer: object | None = None
        self._events: list[torch.cuda.Event] = []
        self._is_ours: list[bool] = []  # in the step that ends with the event of the same place

    def step_ended(self, optimizer: object, *_: object) -> None:
        """Called after an optimizer's step; torchtitan's container of optimizers is one itself, and the first counts."""
        if self._optimizer is None:
            self._optimizer = optimizer
        if optimizer is not self._optimizer:
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)
        self._is_ours.append(self._now)
        number = len(self._events) - WARM_UP
        if self._is_switched and number >= 0 and number % TURN == 0:
            self._now = number // TURN % 4 in (1, 2)
            for each in self._overlapped:
                each.use(self._now)

    def times(self) -> dict[str, list[float]]:
        """ms per step by way."""
        torch.cuda.synchronize()
        found: dict[str, list[float]] = {"bare": [], "overlap": []}
        for place in range(WARM_UP, len(self._events)):
            if not (self._is_switched and (place - WARM_UP) % TURN == 0):
                lasted = self._events[place - 1].elapsed_time(self._events[place])
                found["overlap" if self._is_ours[place] else "bare"].append(round(lasted, 3))
        return found


def random_words(folder: Path) -> None:
    """A data set for torchtitan, the same in every run."""
    source = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(source.choices(letters, k=source.randint(2, 8))) for _ in range(2000)]
    with (folder / "data.json").open("w") as file:
        for _ in range(NUM_LINES):
            file.write(json.dumps({"text": " ".join(source.choices(words, k=WORDS_PER_LINE))}) + "\n")


def make_known() -> None:
    """Add the flavors to torchtitan's."""
    import torchtitan.train  # noqa: F401, PLC0415  all that a training loads
    from torchtitan.models import deepseek_v3, llama3  # noqa: PLC0415  their folder is known only now

    large = deepseek_v3.deepseekv3_args["16B"]
    flavor = dataclasses.replace(large, n_layers=6, vocab_size=32768, attn_type="sdpa", attn_mask_type="causal")
    deepseek_v3.deepseekv3_args[FLAVOR] = flavor
    llama3.llama3_args[FLAVOR] = dataclasses.replace(
        llama3.llama3_args["8B"], dim=4096, n_layers=8, n_heads=32, n_kv_heads=8, vocab_size=32768
    )


def train(way: str, model: str, words: list[str]) -> None:
    """One training as torchtitan's own main function does it; what was measured of it is printed."""
    from torchtitan.config import ConfigManager  # noqa: PLC0415  its folder is known only now
    from torchtitan.train import Trainer  # noqa: PLC0415

    overlapped: list[Any] = []
    losses: list[float] = []
    trainer = Trainer(ConfigManager().parse_args(words))
    if way != "bare":
        from counterpoint.integrations import expert_parallel, tensor_parallel  # noqa: PLC0415  a bare job knows neither

        integration = tensor_parallel if model == "llama_tp" else expert_parallel
        overlapped += [integration.overlap(part) for part in trainer.model_parts]
    log = trainer.metrics_processor.log

    def keep(step: int, loss: float, *others: Any, **named: Any) -> None:
        losses.append(loss)
        log(step, loss, *others, **named)

    trainer.metrics_processor.log = keep
    clock = Clock(way, overlapped)
    handle = register_optimizer_step_post_hook(clock.step_ended)
    try:
        trainer.train()
    finally:
        handle.remove()
    counted = [str(each) for each in overlapped]
    found = {"way": way, "ms": clock.times(), "losses": losses, "counted": counted}
    found["peak_bytes"] = torch.cuda.max_memory_allocated()
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
        print(*(f"loss {loss:.5f}" for loss in losses[:: max(1, len(losses) // NUM_LOSSES)]), sep="\n", flush=True)
        print_last_half(found["ms"]["bare" if way == "bare" else "overlap"], "steps")
    trainer.close()
    dist.destroy_process_group()


def words_for(model: str, folder: Path, steps: int, num_ranks: int, others: Sequence[str] = ()) -> list[str]:
    """What torchtitan is asked for; `others` are its own options, and go before ours."""
    name, of_model = MODELS[model]
    asked = {
        "--job.config_file": CONFIGURATION.format(name),
        "--model.flavor": FLAVOR,
        "--training.dataset_path": str(folder),
        "--training.steps": str(steps),
        "--lr_scheduler.total_steps": str(SCHEDULED_STEPS),
        "--metrics.log_freq": "1",
        "--debug.seed": "7",
        **{option: value.format(num_ranks) for option, value in of_model.items()},
    }
    return [word for pair in asked.items() if pair[0] not in others for word in pair] + list(others)


def parse(arguments: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torchtitan", type=Path, required=True, metavar="DIR")
    parser.add_argument("--model", choices=tuple(MODELS), default="deepseek")
    parser.add_argument("--way", choices=WAYS, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--wait-for", type=Path, metavar="FILE")
    options, others = parser.parse_known_args(arguments)
    if options.way != "bare" and options.model == "llama_fsdp2":
        parser.error(f"--way {options.way} overlaps matmuls or experts, and {options.model} has no such. Give --way bare.")
    return options, others


def main() -> None:
    options, others = parse()
    folder = Path(tempfile.mkdtemp(prefix="words"))
    random_words(folder)
    sources = options.torchtitan.resolve()
    sys.path.insert(0, str(sources))
    os.chdir(sources)
    sys.argv = sys.argv[:1]  # torchtitan reads it when it is imported
    make_known()
    while options.wait_for is not None and not options.wait_for.exists():
        time.sleep(0.2)
    train(options.way, options.model, words_for(options.model, folder, options.steps, int(os.environ["WORLD_SIZE"]), others))


if __name__ == "__main__":
    main()
