"""Small trainings on CPUs that do not know Counterpoint, or call an integration by hand; each prints one line.

    torchrun --nproc-per-node 2 paths.py KIND[:VARIANT]...

KIND is ddp, fsdp1, fsdp2, tp, 2d (tensor parallel within FSDP2), experts (on other ranks, within FSDP2), bare, parts (each
rank updates a part of the parameters) or exchanged (a DDP model that calls all-to-alls itself). VARIANT is nothing, `hand`
(an integration from the second step on, as `run` does it), `hook` (a communication hook of its own), `evaluates` (with a
second model), `held` (two other modules hold the model), `late` (wrapped in DDP again, with a new optimizer, after some
steps), `broken` (rank 1 cannot look for models), `killed` (after some steps), `joins` (DDP's join() around all steps),
`uneven` (join() around the later steps, of which rank 1 has more), `hooked` (`hook`, and join() around the later steps),
`rejoined` (`late`, and `uneven` from then on), `probed` (rank 0 alone trains another model between two steps), `features`
(on what all ranks compute then), `alone` (under DDP of this rank), `adapted` (each rank trains another model before each
step, rank 1 for more steps), `halves` (each half of the ranks trains a model, the second for more steps), `marked` (without
an optimizer; it marks its steps), `replaces` (calls `collectives.replace()` before it makes its model), `replaces_later`
(after it made its optimizer) or `penalized` (gradients are differentiated again).
A line has the sums of the ranks' parameters, exactly, and the names in a checkpoint.
"""

import contextlib
import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager as coalescing
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.nn.functional import all_to_all_single as exchange
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "jobs"))
import stock_jobs
from integration_sections import spread_experts

NUM_STEPS, KILLED_AFTER, WRAPPED_AFTER = 8, 5, 3  # counts are kept after steps 1, 2, 4 and 8
PROBED_AFTER, NUM_PROBE_STEPS = 3, 30  # the guard of a plan switches paths after 10 steps
WIDTHS, TOKENS = {2: 448, 4: 640}, 8  # a rank's part of a block is just above the 4 MiB that copies take
# collectives that a job of that kind calls itself; FSDP1 gathers lists of tensors on CPUs
OWN_KINDS = {
    "bare": ("all_gather", "all_reduce"),
    "parts": ("all_gather", "reduce_scatter"),
    "exchanged": ("all_to_all",),
    "fsdp1": ("reduce_scatter",),
}
PART = 1 << 20  # elements: 4 MiB from each rank, which copies take
GATHER, SCATTER = dist.all_gather_into_tensor, dist.reduce_scatter_tensor  # DeepSpeed keeps such references


class Row(nn.Module):
    """Parameters whose gradients the job itself reduces and gathers."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, num_ranks * PART))

    def learn(self, batch: torch.Tensor) -> None:
        (self.weight * batch).square().mean().backward()
        gradient = self.weight.grad
        assert gradient is not None
        dist.all_reduce(gradient)
        gathered = torch.empty_like(gradient)
        dist.all_gather_into_tensor(gathered, gradient[:PART].contiguous())
        gradient += gathered / 8


class Parts(Row):
    """Parameters of which each rank updates a part and gathers the others', as ZeRO does."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__(num_ranks)
        self.part = self.weight.detach()[PART * dist.get_rank() :][:PART].clone()

    def learn(self, batch: torch.Tensor) -> None:
        (self.weight * batch).square().mean().backward()
        assert self.weight.grad is not None
        self.part.grad = torch.empty_like(self.part)
        with coalescing(async_ops=True) as reduced:  # as Megatron-LM does
            SCATTER(self.part.grad, self.weight.grad)
        reduced.wait()
        self.weight.grad = None

    def gather(self) -> None:
        GATHER(self.weight.data, self.part)


class Exchanging(nn.Module):
    """Parameters, and all-to-alls that the model itself calls, forward and backward."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, num_ranks * PART))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        products = self.weight * batch
        return exchange(torch.empty_like(products), products) + batch


def by_hand(kind: str, model: Any) -> Any:
    """What docs/integrations.md says to write."""
    from counterpoint.integrations import collectives, ddp, expert_parallel, fsdp2, tensor_parallel  # noqa: PLC0415
    from counterpoint.schedule import ScheduleDescription  # noqa: PLC0415

    if kind == "ddp":
        return ddp.register(model)
    if kind == "fsdp2":
        return fsdp2.use_copy_engines(model)
    if kind in OWN_KINDS:
        replaced = collectives.replace()
        replaced.use(True, OWN_KINDS[kind])
        return replaced
    if kind == "experts":
        return expert_parallel.overlap(model, schedule=ScheduleDescription(pattern="all_peers", along="experts", chunks=2))
    assert kind in ("tp", "2d")
    return tensor_parallel.overlap(model, schedule=ScheduleDescription(pattern="ring"))


def model_of(kind: str, num_ranks: int, *, is_sharded: bool = True) -> nn.Module:
    torch.manual_seed(0)
    if kind == "bare":
        return Row(num_ranks)
    if kind == "parts":
        return Parts(num_ranks)
    if kind == "exchanged":
        return DistributedDataParallel(Exchanging(num_ranks))
    if kind == "experts":
        mesh = init_device_mesh("cpu", (num_ranks // 2, 2), mesh_dim_names=("dp", "ep"))
        spread = spread_experts.spread(spread_experts.Mixtures(2, 4), mesh["ep"])
        for each in spread.modules():
            if is_sharded and isinstance(each, spread_experts.GroupedExperts):
                fully_shard(each, mesh=mesh["dp"])
        return spread
    block = nn.Sequential(stock_jobs.Block(WIDTHS[num_ranks], WIDTHS[num_ranks] // num_ranks))
    if kind == "fsdp1":
        return FullyShardedDataParallel(block, device_id=torch.device("cpu"))
    if kind == "2d":
        mesh = init_device_mesh("cpu", (2, num_ranks // 2), mesh_dim_names=("dp", "tp"))
        return stock_jobs.parallelize("fsdp2", stock_jobs.parallelize("tp", block, mesh["tp"]), mesh["dp"])
    return stock_jobs.parallelize(kind, block, init_device_mesh("cpu", (num_ranks,)))


def of_half(model: Any) -> nn.Module:
    """Wrap the model of a DDP model again, for the ranks of this half alone."""
    ranks = list(range(dist.get_world_size()))
    middle = len(ranks) // 2
    halves = [dist.new_group(each) for each in (ranks[:middle], ranks[middle:])]
    return DistributedDataParallel(model.module, process_group=halves[dist.get_rank() >= middle])


def train_probe(variant: str, model: nn.Module, batch: torch.Tensor, num_steps: int) -> None:
    """Train a model of rank 0 alone; with `features`, all ranks compute something before each of its steps."""
    is_trained = variant == "adapted" or (variant in ("probed", "features", "alone") and dist.get_rank() == 0)
    probe: nn.Module = nn.Linear(4, 4)
    if variant == "alone" and num_steps:
        group = dist.new_group([0])
        probe = DistributedDataParallel(probe, process_group=group) if is_trained else probe
    optimizer = torch.optim.SGD(probe.parameters(), 0.1)
    for _ in range(num_steps):
        if variant == "features" and isinstance(model, Row):
            dist.all_reduce(torch.ones(1))  # a metric
        elif variant == "features":
            with torch.no_grad():
                model(batch)
        if is_trained:
            probe(torch.ones(1, 4)).sum().backward()
            optimizer.step()


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if isinstance(model, Parts):
        return torch.optim.SGD([model.part], 0.1)
    return stock_jobs.make_optimizer("tp" if kind in ("2d", "experts") else kind, model, 0.1)


def end_step(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Step; without an optimizer, do what one does and mark the step."""
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if isinstance(model, Parts):
            model.gather()
        return
    import counterpoint  # noqa: PLC0415  other jobs do not know it

    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None
    counterpoint.step()


def loss_of(model: nn.Module, batch: torch.Tensor, *, is_penalized: bool) -> torch.Tensor:
    loss = model(batch).float().square().mean()
    if is_penalized:
        loss = loss + torch.autograd.grad(loss, next(model.parameters()), create_graph=True)[0].square().mean()
    return loss


def train(kind: str, variant: str) -> None:
    """Train, and print."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    in_use: Any = by_hand("bare", None) if variant == "replaces" else None
    model = model_of(kind, num_ranks, is_sharded=variant != "penalized")  # FSDP2 frees what a second derivative needs
    model = of_half(model) if variant == "halves" else model
    torch.manual_seed({"tp": 0, "2d": 1 + rank // 2}.get(kind, 1 + rank))
    batch = (
        torch.full((num_ranks * PART,), 1.0 + rank)
        if kind in ("bare", "parts", "exchanged")
        else torch.randn(1, TOKENS, WIDTHS[num_ranks])
    )
    batch = spread_experts.tokens_of_rank() if kind == "experts" else batch
    if variant in ("hook", "hooked"):
        model.register_comm_hook(None, allreduce_hook)
    second = DistributedDataParallel(nn.Linear(8, 8)) if variant == "evaluates" else None
    holders = [nn.ModuleList([model]) for _ in range(2)] if variant == "held" else []
    optimizer: Any = None if variant == "marked" else optimizer_of(kind, model)
    in_use = by_hand("bare", None) if variant == "replaces_later" else in_use
    if variant == "broken" and rank == 1:
        job_paths = importlib.import_module("counterpoint.integrations.job_paths")
        vars(job_paths)["modules_of_process"] = lambda: {}["a module"]
    joined = contextlib.ExitStack()
    num_more = 12 if (variant, 2 * rank // num_ranks) in (("uneven", 1), ("rejoined", 1), ("halves", 1)) else 0
    for step in range(1, NUM_STEPS + 1 + num_more):
        if (variant, step) in (("joins", 1), ("uneven", 3), ("hooked", 3), ("rejoined", WRAPPED_AFTER + 1)):
            joined.enter_context(model.join())
        if variant == "hand" and step == 2:
            in_use = by_hand(kind, model)
        train_probe(variant, model, batch, 1 + NUM_PROBE_STEPS * rank if variant == "adapted" else 0)
        if isinstance(model, Row):
            model.learn(batch)
        else:
            loss_of(model, batch, is_penalized=variant == "penalized").backward()
        end_step(model, optimizer)
        if second is not None:
            with torch.no_grad():
                second(torch.ones(2, 8))
        train_probe(variant, model, batch, NUM_PROBE_STEPS if step == PROBED_AFTER else 0)
        if variant in ("late", "rejoined") and step == WRAPPED_AFTER:
            model = DistributedDataParallel(model.module)
            optimizer = stock_jobs.make_optimizer(kind, model, 0.1)
        if variant == "killed" and step == KILLED_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)
    joined.close()
    holders.clear()
    calls = "" if in_use is None else f" {in_use.num_by_copies} {in_use.num_bytes}"
    if kind in OWN_KINDS and in_use is not None:
        in_use.undo()
    own = [each.to_local() if isinstance(each, DTensor) else each for each in (each.detach() for each in model.parameters())]
    sums = [torch.zeros((), dtype=torch.float64) for _ in range(num_ranks)]
    dist.all_gather(sums, torch.stack([each.double().sum() * (1 + place) for place, each in enumerate(own)]).sum())
    names = sorted(model.state_dict())  # FSDP1 gathers on every rank
    if rank == 0:
        total = ",".join(each.item().hex() for each in sums)
        print(f"{kind}:{variant} {total} {','.join(names)}{calls}", flush=True)


def main() -> None:
    """Train each that the command line names."""
    dist.init_process_group("gloo")
    for name in sys.argv[1:]:
        kind, _, variant = name.partition(":")
        train(kind, variant)
    dist.barrier()
    os._exit(0)  # torch 2.13 aborts now and then when a process with gloo threads ends by itself


if __name__ == "__main__":
    main()
