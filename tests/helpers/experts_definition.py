"""A layer of experts on every rank, the routing of one call, and what one process that has everything makes of it."""

import random
from collections.abc import Sequence

import torch
import torch.distributed as dist

from counterpoint import ops
from counterpoint.schedule import ScheduleDescription

DIM, HIDDEN = 6, 10
silu = torch.nn.functional.silu


class Experts:
    """A layer of random weights on every rank, and the routing of one call, drawn alike on all ranks."""

    def __init__(
        self, chance: random.Random, dtype: torch.dtype, *, kind: str = "", num_local: int = 0, scale: int = 1
    ) -> None:
        """On the GPU where the group has one. `scale` multiplies rows and widths."""
        self.size, self.rank = dist.get_world_size(), dist.get_rank()
        self.device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend() else "cpu"
        dim, hidden = DIM * scale, HIDDEN * scale
        self.num_local = num_local or chance.randint(1, 4)
        kind = kind or chance.choice(("random", "random", "sparse", "one rank", "one expert", "nothing", "one source"))
        self.counts = [[number * scale for number in self._drawn(chance, kind, source)] for source in range(self.size)]
        generator = torch.Generator().manual_seed(chance.randrange(2**31))

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.device, dtype)

        num_experts = self.size * self.num_local
        self.tokens = [draw(sum(row), dim) for row in self.counts]
        self.gradients = [draw(sum(row), dim) for row in self.counts]
        self.weights = [draw(num_experts, *shape) for shape in ((hidden, dim), (dim, hidden), (hidden, dim))]
        self.biases = [draw(num_experts, number) for number in (hidden, dim, hidden)]

    def _drawn(self, chance: random.Random, kind: str, source: int) -> list[int]:
        num_experts = self.size * self.num_local
        if kind == "one rank":
            return [chance.randint(0, 9) * (expert < self.num_local) for expert in range(num_experts)]
        if kind == "one expert":
            return [17 * (expert == num_experts - 1) for expert in range(num_experts)]
        if kind == "nothing" or (kind == "one source" and source):
            return [0] * num_experts
        return [chance.randint(0, 9) * (kind != "sparse" or chance.random() < 0.3) for _ in range(num_experts)]

    @property
    def part(self) -> slice:
        """This rank's experts."""
        return slice(self.rank * self.num_local, (self.rank + 1) * self.num_local)

    def own(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """This rank's tokens and weights, as leaves."""
        tokens = self.tokens[self.rank].clone().requires_grad_()
        return tokens, [weight[self.part].clone().requires_grad_() for weight in self.weights]

    def own_biases(self) -> list[torch.Tensor]:
        """This rank's biases, as leaves."""
        return [bias[self.part].clone().requires_grad_() for bias in self.biases]

    def expected(self, *, has_biases: bool = False) -> list[torch.Tensor]:
        """Results and gradients of this rank, from one process that has everything; those of biases last."""
        tokens = [each.double().clone().requires_grad_() for each in self.tokens]
        w1, w2, w3 = weights = [weight.double().clone().requires_grad_() for weight in self.weights]
        b1, b2, b3 = biases = [(has_biases * bias.double()).clone().requires_grad_() for bias in self.biases]

        def expert(e: int, x: torch.Tensor) -> torch.Tensor:
            return (silu(x @ w1[e].T + b1[e]) * (x @ w3[e].T + b3[e])) @ w2[e].T + b2[e]

        results = [
            torch.cat([expert(e, x) for e, x in enumerate(rows.split(row))])
            for rows, row in zip(tokens, self.counts, strict=True)
        ]
        torch.autograd.backward(results, [each.double() for each in self.gradients])
        parameters = (*weights, *biases) if has_biases else weights
        return [results[self.rank], tokens[self.rank].grad, *(each.grad[self.part] for each in parameters)]

    def found(self, schedule: ScheduleDescription | None, *, has_biases: bool = False) -> list[torch.Tensor]:
        """The same by the operator."""
        (tokens, weights), biases = self.own(), self.own_biases() if has_biases else []
        options = {"schedule": schedule, "biases": biases or None}
        result = ops.expert_ffn(tokens, self.counts[self.rank], *weights, **options)
        result.backward(self.gradients[self.rank])
        return [result.detach(), tokens.grad, *(each.grad for each in (*weights, *biases))]

    def found_by_halves(self, schedule: ScheduleDescription | None) -> list[torch.Tensor]:
        """The same by both halves."""
        tokens, (w1, w2, w3) = self.own()
        num_hidden = w1.shape[1]
        counts = torch.tensor(self.counts[self.rank], dtype=torch.float32)
        both, routing = ops.dispatch_grouped_matmul(tokens, counts, torch.cat([w1, w3], 1), schedule=schedule)
        hidden = [silu(each[:, :num_hidden]) * each[:, num_hidden:] for each in both]
        result = ops.grouped_matmul_combine(hidden, w2, routing)
        result.backward(self.gradients[self.rank])
        return [result.detach(), tokens.grad, w1.grad, w2.grad, w3.grad]


def whole_layer(experts: Experts, weights: list[torch.Tensor], tokens: torch.Tensor, **options: object) -> torch.Tensor:
    """The layer in one call."""
    w1, w2, w3 = weights
    return ops.expert_ffn(tokens * 1, experts.counts[experts.rank], w1, w2, w3, **options)


def with_shared(experts: Experts, weights: list[torch.Tensor], tokens: torch.Tensor, **options: object) -> torch.Tensor:
    """The layer, and a shared expert that runs while tokens are in transit."""
    rows, made = tokens * 1, []
    w1, w2, w3 = weights

    def beside() -> None:
        made.append(silu(rows @ w1[0].T) @ w2[0].T)

    routed = ops.expert_ffn(rows, experts.counts[experts.rank], w1, w2, w3, beside=beside, **options)
    (shared,) = made
    return routed + shared


def both_halves(experts: Experts, weights: list[torch.Tensor], tokens: torch.Tensor, **options: object) -> torch.Tensor:
    """The layer by its halves."""
    w1, w2, w3 = weights
    num_hidden = w1.shape[1]
    both, routing = ops.dispatch_grouped_matmul(tokens * 1, experts.counts[experts.rank], torch.cat([w1, w3], 1), **options)
    hidden = [silu(each[:, :num_hidden]) * each[:, num_hidden:] for each in both]
    return ops.grouped_matmul_combine(hidden, w2, routing)


def compare(found: list[torch.Tensor], wanted: list[torch.Tensor], tolerance: float) -> None:
    """Raise unless all are equal within the tolerance, relative to the largest number of each."""
    for place, (each, other) in enumerate(zip(found, wanted, strict=True)):
        if not other.numel():
            assert each.shape == other.shape
            continue
        difference = float(
            (each.detach().double() - other.detach()).abs().max() / other.detach().abs().max().clamp(min=1e-30)
        )
        assert difference <= tolerance, f"number {place}: {difference:.3g} apart, {tolerance:g} allowed"


def check_fp8(experts: Experts, schedules: Sequence[ScheduleDescription]) -> None:
    """In fp8 all schedules give the same bits, which are those of operands rounded by row and output feature; gradients are
    those of a layer in bf16.
    """
    counts, found = experts.counts[experts.rank], []
    for schedule in schedules:
        (tokens, (w1, w2, w3)), (b1, b2, b3) = experts.own(), experts.own_biases()
        options = {"biases": (b1, b2, b3), "is_fp8": True, "schedule": schedule}
        result = ops.expert_ffn(tokens, counts, w1, w2, w3, **options)
        result.backward(experts.gradients[experts.rank])
        found.append([result.detach(), *(each.grad for each in (tokens, w1, w2, w3, b1, b2, b3))])
    assert all(all(map(torch.equal, found[0], each)) for each in found[1:])
    rows, part = experts.tokens[experts.rank].split(counts), range(*experts.part.indices(len(counts)))
    start = sum(counts[: part.start])
    for expert in part:  # its own tokens for its own experts, from nothing but the definition
        (u1, u2, u3), (c1, c2, c3) = ([each[expert] for each in kind] for kind in (experts.weights, experts.biases))
        first, second = (rounded(rows[expert]) @ rounded(u).T for u in (u1, u3))
        hidden = silu(first.bfloat16() + c1) * (second.bfloat16() + c3)
        wanted = (rounded(hidden) @ rounded(u2).T).bfloat16() + c2
        compare([found[0][0][start : start + counts[expert]]], [wanted], 0.02)
        start += counts[expert]
    compare(found[0], experts.expected(has_biases=True), 0.15)


def rounded(values: torch.Tensor) -> torch.Tensor:
    """Each row as fp8 holds it when its largest number is 448."""
    scale = values.float().abs().amax(1, keepdim=True) / 448
    return (values.float() / scale).to(torch.float8_e4m3fn).float() * scale
