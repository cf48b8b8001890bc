"""The layers and the routings of the experts' benchmark: of published models, with balanced and with skewed experts."""

from typing import NamedTuple

import torch

ROUTINGS = ("balanced", "zipf", "one-hot")


class ExpertShape(NamedTuple):
    """Experts of a model: each token goes to `top` of `num_experts`, whose first matmul gives gate and up together."""

    model: str
    tokens: int
    dim: int
    hidden: int
    num_experts: int
    top: int

    @property
    def name(self) -> str:
        """The model and the tokens of each rank."""
        return f"{self.model} {self.tokens}"


# dim, hidden size of an expert, experts, experts for each token: from the models' published configurations
MODELS = {
    "DeepSeek-V3": (7168, 2048, 256, 8),
    "Qwen3-30B-A3B": (2048, 768, 128, 8),
    "Mixtral-8x7B": (4096, 14336, 8, 2),
    "gpt-oss-120b": (2880, 2880, 128, 4),
}
TOKENS = (2048, 8192, 16384, 32768)


def counts_of(shape: ExpertShape, routing: str, num_ranks: int) -> list[list[int]]:
    """How many rows each rank has for each expert, the same on every rank that asks.

    `zipf`: an expert's share falls as 1 over its place in a shuffled order. `one-hot`: all rows are for the last expert, so
    all go to one rank.
    """
    generator, number, rows = torch.Generator().manual_seed(23), shape.num_experts, shape.tokens * shape.top
    if routing == "one-hot":
        return [[*[0] * (number - 1), rows] for _ in range(num_ranks)]
    places = torch.randperm(number, generator=generator).double() + 1
    shares = torch.ones(number).double() if routing == "balanced" else 1 / places
    drawn = [torch.multinomial(shares, rows, replacement=True, generator=generator) for _ in range(num_ranks)]
    return [torch.bincount(each, minlength=number).tolist() for each in drawn]
