"""Experts' operators against NCCL's all-to-all and torch's grouped matmul, on GPUs.

torchrun --nproc-per-node 2 -m benchmarks.expert_layers -o experts.json

Of each layer and routing two operations: dispatch + grouped matmul (gate and up in one), and grouped matmul + combine. Every
variant exchanges the counts and waits for them on the host, as a job does. Variants:
`permuted`: NCCL's all-to-all, rows sorted by expert, one grouped matmul, as torchtitan does, with indices made beforehand.
`torchtitan`, with --torchtitan DIR: the same by its own function, which computes the indices in every call. `ours`: without
a schedule; `library` and `copies N`: with one that takes NCCL, or copies and each rank's experts in N groups. Parts alone:
`matmul`, `nccl` and `engines` (the rows, by NCCL and by copy engines). The ideal is the larger of the matmul and the
faster way. `pick` says what backward takes without a schedule. The layer, forward and backward, is timed for some.
"""

import argparse
import importlib.util
import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.expert_shapes import MODELS, ROUTINGS, TOKENS, ExpertShape, counts_of
from benchmarks.on_gpus import join, log, run_and_leave, save
from benchmarks.ops_timing import time_interleaved
from counterpoint import ops
from counterpoint.ops.expert_exchange import ExpertRegion, RowFormat
from counterpoint.ops.expert_passes import Pass
from counterpoint.ops.expert_routing import pick_pieces
from counterpoint.schedule import SEQUENTIAL, ScheduleDescription
from counterpoint.schedule.expert_choice import size_of

PIECES = (1, 2, 4)
OURS = ("ours", "library", "copies")
silu = torch.nn.functional.silu
Call = Callable[[], object]


class Layer:
    """Operands of one rank, and the baselines on them."""

    def __init__(self, shape: ExpertShape, routing: str, device: torch.device) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.num_local = shape.num_experts // self.size
        counts = torch.tensor(counts_of(shape, routing, self.size))
        self.counts = counts[self.rank].to(device)
        generator = torch.Generator(device).manual_seed(self.rank)

        def draw(*sizes: int, scale: float = 1.0) -> torch.Tensor:
            found = torch.empty(sizes, dtype=torch.bfloat16, device=device)
            return found.normal_(0, scale, generator=generator)

        self.tokens = draw(int(self.counts.sum()), shape.dim)
        self.up = draw(self.num_local, 2 * shape.hidden, shape.dim, scale=shape.dim**-0.5)
        self.down = draw(self.num_local, shape.dim, shape.hidden, scale=shape.hidden**-0.5)
        own = counts[:, self.rank * self.num_local : (self.rank + 1) * self.num_local]
        self.hidden = draw(int(own.sum()), shape.hidden)
        # rows as they arrive, by source and expert, in the order of experts
        keys = torch.arange(self.num_local).repeat(self.size).repeat_interleave(own.flatten())
        self.order = torch.argsort(keys, stable=True).to(device)
        self.back = torch.argsort(self.order)
        self.ends = own.sum(0).cumsum(0).to(device, torch.int32)
        self.pairs: list[list[int]] = counts.view(self.size, self.size, -1).sum(-1).tolist()
        self.sent, self.received = self.pairs[self.rank], [row[self.rank] for row in self.pairs]
        self.call_size = size_of(self.pairs, shape.dim * 2)

    def exchange_counts(self) -> tuple[list[int], list[int], torch.Tensor]:
        """As torchtitan does: one all-to-all, and one copy to the host that is waited for. The last are on the GPU."""
        arriving = torch.empty_like(self.counts)
        dist.all_to_all_single(arriving, self.counts)
        sent = self.counts.view(self.size, -1).sum(1).to("cpu", non_blocking=True)
        received = arriving.view(self.size, -1).sum(1).to("cpu")
        return sent.tolist(), received.tolist(), arriving

    def all_to_all(self, rows: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
        found = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(found, rows, received, sent)
        return found

    def permuted_dispatch(self) -> torch.Tensor:
        sent, received, _ = self.exchange_counts()
        rows = self.all_to_all(self.tokens, received, sent)
        return grouped(rows[self.order], self.up, self.ends)

    def torchtitan_dispatch(self) -> torch.Tensor:
        """The counts of every expert stay on the GPU for its `_permute`, which pads each expert's rows to whole tiles."""
        sent, received, arriving = self.exchange_counts()
        rows = self.all_to_all(self.tokens, received, sent)
        _, rows, _, numbers = torchtitan_permute()(rows, arriving, self.size, self.num_local)
        return grouped(rows, self.up, numbers.cumsum(0, dtype=torch.int32))

    def permuted_combine(self) -> torch.Tensor:
        """On rows in the order of experts, as the dispatch above gives them; counts are those of the dispatch."""
        rows = grouped(self.hidden, self.down, self.ends)
        return self.all_to_all(rows[self.back], self.sent, self.received)

    def permuted_layer(
        self, tokens: torch.Tensor, first: torch.Tensor, down: torch.Tensor, third: torch.Tensor
    ) -> torch.Tensor:
        """The whole layer with gradients, gate and up apart, as torchtitan has them."""
        sent, received, _ = self.exchange_counts()
        rows = _AllToAll.apply(tokens, received, sent)[self.order]
        hidden = silu(grouped(rows, first, self.ends)) * grouped(rows, third, self.ends)
        rows = grouped(hidden, down, self.ends)
        return _AllToAll.apply(rows[self.back], sent, received)


@cache
def torchtitan_permute() -> Callable[..., tuple[Any, ...]] | None:
    """torchtitan's own function, if it can be imported."""
    if importlib.util.find_spec("torchtitan") is None:
        return None
    return importlib.import_module("torchtitan.models.moe.utils")._permute  # type: ignore[no-any-return]


def grouped(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """torch's grouped matmul; nothing where there are no rows, which it refuses."""
    if not rows.shape[0]:
        return rows.new_empty(0, weights.shape[1])
    return torch._grouped_mm(rows, weights.mT, offs=ends)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
        ctx.splits = received, sent
        found = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(found, rows.contiguous(), received, sent)
        return found

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        received, sent = ctx.splits
        found = gradient.new_empty(sum(sent), gradient.shape[1])
        dist.all_to_all_single(found, gradient.contiguous(), sent, received)
        return found, None, None


def variants(run: Callable[[ScheduleDescription | None], Call]) -> dict[str, Call]:
    """Ours without a schedule, and by every schedule."""
    return {"ours": run(None), "library": run(SEQUENTIAL), **{f"copies {number}": run(_cut(number)) for number in PIECES}}


def dispatch_calls(layer: Layer) -> dict[str, Call]:
    """The variants of dispatch + grouped matmul, and its parts."""

    def ours(schedule: ScheduleDescription | None) -> Call:
        return lambda: ops.dispatch_grouped_matmul(layer.tokens, layer.counts, layer.up, schedule=schedule)

    routing = ops.dispatch_grouped_matmul(layer.tokens, layer.counts, layer.up, schedule=_cut(1))[1]
    sorted_rows = layer.tokens.new_empty(routing.num_rows, layer.tokens.shape[1]).normal_()

    def engines() -> None:
        work = Pass(routing, RowFormat.of(layer.tokens), [ExpertRegion.DISPATCH])
        dispatch = work.dispatch(ExpertRegion.DISPATCH, layer.tokens)
        dispatch.group(0)
        work.finish()

    return {
        "permuted": layer.permuted_dispatch,
        **({"torchtitan": layer.torchtitan_dispatch} if torchtitan_permute() else {}),
        **variants(ours),
        "matmul": lambda: grouped(sorted_rows, layer.up, layer.ends),
        "nccl": lambda: layer.all_to_all(layer.tokens, layer.received, layer.sent),
        "engines": engines,
    }


def combine_calls(layer: Layer) -> dict[str, Call]:
    """The variants of grouped matmul + combine, and its parts; the routing is the dispatch's."""

    def ours(schedule: ScheduleDescription | None) -> Call:
        routing = ops.dispatch_grouped_matmul(layer.tokens, layer.counts, layer.up, schedule=schedule)[1]
        inputs = [layer.hidden[group.rows] for group in routing.layout.groups]
        return lambda: ops.grouped_matmul_combine(inputs, layer.down, routing)

    results = layer.tokens.new_empty(sum(layer.received), layer.tokens.shape[1])
    return {
        "permuted": layer.permuted_combine,
        **variants(ours),
        "matmul": lambda: grouped(layer.hidden, layer.down, layer.ends),
        "nccl": lambda: layer.all_to_all(results, layer.sent, layer.received),
    }


def layer_calls(layer: Layer) -> dict[str, Call]:
    """The whole layer, forward and backward."""
    num_hidden = layer.down.shape[2]
    gradient = torch.ones_like(layer.tokens)
    tokens, down = layer.tokens.detach().requires_grad_(), layer.down.detach().requires_grad_()
    first, third = (part.contiguous().requires_grad_() for part in layer.up.detach().split(num_hidden, 1))

    def step(run: Callable[[], torch.Tensor], leaves: tuple[torch.Tensor, ...]) -> Call:
        def once() -> None:
            run().backward(gradient)
            for leaf in leaves:
                leaf.grad = None

        return once

    def ours(schedule: ScheduleDescription | None) -> Call:
        run = lambda: ops.expert_ffn(tokens, layer.counts, first, down, third, schedule=schedule)  # noqa: E731
        return step(run, (tokens, first, down, third))

    return {
        "permuted": step(lambda: layer.permuted_layer(tokens, first, down, third), (tokens, first, down, third)),
        **variants(ours),
    }


def _cut(number: int) -> ScheduleDescription:
    return ScheduleDescription(pattern="all_peers", chunks=number, along="experts")


def summary(operation: str, found: dict[str, dict[str, float]], pick: str) -> dict[str, object]:
    """Ratios of medians. `gain`: the usual way over what is picked; `best_gain`: over the fastest of ours."""
    times = {name: each["median_us"] for name, each in found.items()}
    usual, best = times["permuted"], min((time, name) for name, time in times.items() if name.startswith(OURS))
    ratios: dict[str, object] = {
        "pick": pick,
        "gain": round(usual / times["ours"], 3),
        **({"gain_on_torchtitan": round(times["torchtitan"] / times["ours"], 3)} if "torchtitan" in times else {}),
        "best": best[1],
        "best_gain": round(usual / best[0], 3),
    }
    if operation != "layer":
        ways = [times[name] for name in ("nccl", "engines") if name in times]
        ratios["over_ideal"] = round(times["ours"] / max(times["matmul"], min(ways)), 3)
        ratios["communication_share"] = round(times["nccl"] / usual, 3)
    return ratios


def run_case(shape: ExpertShape, routing: str, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Both operations of one layer under one routing, and the whole layer where asked for."""
    layer = Layer(shape, routing, torch.device("cuda", torch.cuda.current_device()))
    made: dict[str, Callable[[], dict[str, Call]]] = {
        "dispatch": lambda: dispatch_calls(layer),
        "combine": lambda: combine_calls(layer),
    }
    if shape.tokens in arguments.layer_tokens and routing != "one-hot":
        made["layer"] = lambda: layer_calls(layer)
    rows = []
    for operation, make in made.items():
        calls = make()
        chosen = pick_pieces(layer.call_size, None, layer.num_local, has_gradients=operation == "layer")
        pick = f"copies {chosen}" if chosen else "library"
        timed = time_interleaved(calls, arguments.rounds, arguments.warm_ups)
        found = {name: each.as_dict() for name, each in timed.items()}
        rows.append(
            {
                "shape": shape._asdict(),
                "routing": routing,
                "operation": operation,
                "most_bytes_of_a_pair": layer.call_size.pair_bytes,
                "most_bytes_of_a_port": layer.call_size.port_bytes,
                "variants": found,
                **summary(operation, found, pick),
            }
        )
        del calls
    return rows


def line_of(row: dict[str, object]) -> str:
    """One line for people."""
    times = " ".join(f"{name} {each['median_us']:.0f}" for name, each in row["variants"].items())  # type: ignore[attr-defined]
    shape = ExpertShape(**row["shape"])  # type: ignore[arg-type]
    ideal = f", on torchtitan's {row['gain_on_torchtitan']}" if "gain_on_torchtitan" in row else ""
    ideal += f" over ideal {row['over_ideal']} share {row['communication_share']}" if "over_ideal" in row else ""
    gains = f"gain {row['gain']} ({row['pick']}), best {row['best_gain']} ({row['best']})"
    return f"{shape.name} {row['routing']} {row['operation']}: {gains}{ideal} | {times}"


def table(rows: list[dict[str, object]]) -> str:
    """Geometric means, and how often ours loses beyond the spread."""
    lines = []
    titan = [row["gain_on_torchtitan"] for row in rows if "gain_on_torchtitan" in row]
    if titan:
        mean = math.exp(statistics.mean(map(math.log, titan)))
        lines.append(f"dispatch: gain on torchtitan's {mean:.3f}, {min(titan):.3f} to {max(titan):.3f}")
    for operation in ("dispatch", "combine", "layer"):
        chosen = [row for row in rows if row["operation"] == operation]
        if not chosen:
            continue
        heavy = [row for row in chosen if row.get("communication_share", 1.0) >= 0.2]
        means = [
            math.exp(statistics.mean(math.log(row["gain"]) for row in part)) if part else math.nan
            for part in (chosen, heavy)
        ]
        slower = sum(row["gain"] < 1 - _spread(row) for row in chosen)
        ideal = sorted(row["over_ideal"] for row in chosen if "over_ideal" in row)
        near = sum(each <= 1.1 for each in ideal)
        lines.append(
            f"{operation}: {len(chosen)} cases, gain {means[0]:.3f}, where communication is 20 % {means[1]:.3f} "
            f"({len(heavy)}), slower beyond the spread {slower}, within 10 % of the ideal {near} of {len(ideal)}"
        )
    return "\n".join(lines)


def _spread(row: dict[str, object]) -> float:
    """Of the usual way and of ours, together."""
    found = row["variants"]
    return sum(found[name]["spread"] for name in ("permuted", "ours"))  # type: ignore[index]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="", help="comma-separated beginnings of names; all without")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), help="of each rank")
    parser.add_argument("--routings", nargs="*", default=list(ROUTINGS))
    parser.add_argument("--layer-tokens", type=int, nargs="*", default=[8192])
    parser.add_argument("--torchtitan", type=Path, metavar="DIR", help="sources of torchtitan v0.2.2, for a baseline")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--warm-ups", type=int, default=2)
    parser.add_argument("--stop-after-s", type=float, default=90.0)
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    if arguments.torchtitan is not None:
        sys.path.insert(0, str(arguments.torchtitan.resolve()))
    began = time.monotonic()
    join(int(arguments.stop_after_s) + 60)
    rows: list[dict[str, object]] = []
    chosen = [
        (ExpertShape(model, tokens, *sizes), routing)
        for tokens in arguments.tokens
        for model, sizes in MODELS.items()
        for routing in arguments.routings
        if model.startswith(tuple(arguments.models.split(",")))
    ]
    left_out = 0
    for shape, routing in chosen:
        late = torch.tensor([time.monotonic() - began > arguments.stop_after_s], device="cuda", dtype=torch.int32)
        dist.all_reduce(late, dist.ReduceOp.MAX)
        if late.item():
            left_out += 1
            continue
        rows += run_case(shape, routing, arguments)
        for row in rows[-3:]:
            if row["shape"] == shape._asdict() and row["routing"] == routing:
                log(line_of(row))
        save(arguments.output, rows, left_out=left_out)
        torch.cuda.empty_cache()
    log(table(rows))
    log(f"left out for want of time: {left_out} of {len(chosen)}; symmetric memory {ops.pool_report()[0].num_bytes} bytes")
    save(arguments.output, rows, left_out=left_out, symmetric_bytes=ops.pool_report()[0].num_bytes)


if __name__ == "__main__":
    run_and_leave(main)
