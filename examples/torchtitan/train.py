"""torchtitan's own training, with the two lines that overlap its tensor parallelism and its experts.

torchrun --nproc-per-node 2 examples/torchtitan/train.py --job.config_file CONFIG.toml [torchtitan's options]
"""

import os
import sys
from importlib.metadata import version

import torch.distributed as dist
from torch import nn

from counterpoint.errors import CounterpointError
from counterpoint.integrations import expert_parallel, tensor_parallel

TESTED = "0.2."  # later versions have another configuration


def overlap(model: nn.Module) -> list[object]:
    """Both integrations; a model without split linears or without spread experts is refused, and stays as it is."""
    done: list[object] = []
    for integration in (tensor_parallel, expert_parallel):
        try:
            done.append(integration.overlap(model))
        except CounterpointError as problem:
            done.append(f"{integration.__name__.rpartition('.')[2]}: {problem}")
    return done


def main() -> None:
    """What torchtitan's main function does, with `overlap` before the first step."""
    try:
        from torchtitan.config import ConfigManager  # noqa: PLC0415  an extra package
        from torchtitan.train import Trainer, init_logger  # noqa: PLC0415
    except ImportError as problem:
        sys.exit(f"This example needs torchtitan ({problem}): pip install 'torchtitan==0.2.2'")
    if not version("torchtitan").startswith(TESTED):
        sys.exit(f"This example is for torchtitan {TESTED}x; found {version('torchtitan')}: pip install 'torchtitan==0.2.2'")
    if "RANK" not in os.environ:
        sys.exit("Start this with torchrun: torchrun --nproc-per-node 2 examples/torchtitan/train.py --job.config_file FILE")
    init_logger()
    trainer = Trainer(ConfigManager().parse_args())
    done = [each for part in trainer.model_parts for each in overlap(part)]
    trainer.train()
    if dist.get_rank() == 0:
        print(*done, sep="\n")
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
