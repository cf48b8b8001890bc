"""Steps: the stock training jobs of `benchmarks/jobs/stock_jobs.py`, ms per step under each way to let collectives win.

Each model is built twice, for the plain process group and for the one with high-priority streams. Head starts are given to
the kernels that hold every SM to their end, as `counterpoint run --tune` gives them first (2026-11-21: to all that can take
every SM). The optimizer's rate is 0, so that all steps are the same: losses must be bit-identical under all variants,
gradients equal but for attention's own noise.
"""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from benchmarks.jobs import stock_jobs
from benchmarks.on_gpus import largest, log
from benchmarks.race_variants import Case, Race, Variant, all_variants, measure
from counterpoint.supervised.candidates import HELD, propose_live
from counterpoint.supervised.torch_job import job_gpu

LAYERS, WIDTH, HEAD, TOKENS = 6, 4096, 128, 4096
FAMILIES = {"ddp": "DDP", "fsdp2": "FSDP2", "tp": "TP"}
NUM_UNTIMED, NUM_TIMED = 1, 2
WARM_UP_STEPS = 2
BUCKET_MB = 100
CHECKED_ROWS = 64
MOST_DIFFERENCE = 0.02  # of the largest gradient; attention's backward pass is not the same twice


class Trainee:
    """One model in one process group, with its optimizer and batch."""

    def __init__(self, job: str, group: dist.ProcessGroup) -> None:
        torch.manual_seed(0)
        with torch.device("cuda"):
            blocks = nn.Sequential(*(stock_jobs.Block(WIDTH, HEAD) for _ in range(LAYERS))).to(torch.bfloat16)
        self.model = self._parallelize(job, blocks, group)
        self._optimizer = stock_jobs.make_optimizer(job, self.model, learning_rate=0.0)
        torch.manual_seed(0 if job == "tp" else 1 + dist.get_rank())  # tensor parallel ranks share their batch
        self._batch = torch.randn(1, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)

    @staticmethod
    def _parallelize(job: str, blocks: nn.Sequential, group: dist.ProcessGroup) -> nn.Module:
        if job == "ddp":
            return nn.parallel.DistributedDataParallel(
                blocks, process_group=group, gradient_as_bucket_view=True, bucket_cap_mb=BUCKET_MB
            )
        return stock_jobs.parallelize(job, blocks, DeviceMesh.from_group(group, "cuda"))

    def backward(self) -> torch.Tensor:
        loss = self.model(self._batch).float().square().mean()
        loss.backward()
        return loss.detach()

    def step(self) -> torch.Tensor:
        loss = self.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss

    def gradients(self) -> list[torch.Tensor]:
        """The first rows of each gradient's local part."""
        self.backward()
        torch.cuda.synchronize()
        grads = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
        found = [grad[:CHECKED_ROWS].float().cpu() for grad in local]
        self._optimizer.zero_grad(set_to_none=True)
        return found


def tables_of_run(race: Race) -> tuple[Variant, ...]:
    """The variants with the head starts that `run --tune` would try on the kernels seen so far."""
    candidates = propose_live(race.seen(), job_gpu()).candidates
    head_starts = next(each for each in candidates if each.label == HELD)
    return all_variants(race.priority, [directive.match.name for directive in head_starts.directives])


class Course:
    """A family under all variants."""

    def __init__(self, race: Race, variants: tuple[Variant, ...], trainees: dict[bool, Trainee]) -> None:
        self._race, self.variants, self._trainees = race, variants, trainees
        self.losses: list[torch.Tensor] = []

    def run(self, candidate: int) -> float:
        """ms per step."""
        variant = self.variants[candidate]
        step = self._trainees[variant.has_option].step
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._race.begin(variant)
        for _ in range(NUM_UNTIMED):
            self.losses.append(step())
        start.record()
        for _ in range(NUM_TIMED):
            self.losses.append(step())
        end.record()
        self._race.end(variant, NUM_UNTIMED + NUM_TIMED)
        return start.elapsed_time(end) / NUM_TIMED

    def difference(self) -> float:
        """The largest difference of a gradient from the first variant's, relative to its largest element."""
        wanted: list[torch.Tensor] = []
        worst = 0.0
        for variant in self.variants:
            self._race.begin(variant)
            found = self._trainees[variant.has_option].gradients()
            self._race.end(variant, 1)
            wanted = wanted or found
            for a, b in zip(wanted, found, strict=True):
                worst = max(worst, ((a - b).abs().max() / a.abs().max().clamp_min(1e-20)).item())
        return largest([worst])[0]


def run_family(race: Race, number: int, job: str) -> Case:
    trainees = {has_option: Trainee(job, group) for has_option, group in race.groups.items()}
    for _ in range(WARM_UP_STEPS):
        for trainee in trainees.values():
            trainee.step()
    torch.cuda.synchronize()
    course = Course(race, tables_of_run(race), trainees)
    difference = course.difference()
    rows: list[float] = []
    for order in race.orders(len(course.variants), (number + 1) / len(FAMILIES)):
        times = {candidate: course.run(candidate) for candidate in order}
        rows.extend(times[candidate] for candidate in range(len(course.variants)))
    slowest = largest(rows)
    width = len(course.variants)
    timed = {"step": measure(course.variants, [slowest[start : start + width] for start in range(0, len(slowest), width)])}
    losses = torch.stack(course.losses)
    is_same = bool((losses == losses[0]).all()) and bool(losses.isfinite().all())
    is_wrong = largest([float(not is_same)])[0] > 0
    gradients = f"gradients differ by {difference:.1e}{' TOO MUCH' if difference > MOST_DIFFERENCE else ''}"
    checks = f"{'LOSSES DIFFER' if is_wrong else 'losses bit-identical'}, {gradients}"
    return Case(name=FAMILIES[job], timed=timed, alone_ms={}, checks=checks)


def run_steps(race: Race) -> list[Case]:
    """Every kind of parallelism, one after the other, each in memory alone."""
    cases: list[Case] = []
    for number, job in enumerate(FAMILIES):
        cases.append(run_family(race, number, job))
        log(f"... {cases[-1].name}: {cases[-1].checks}")
        gc.collect()
        torch.cuda.empty_cache()
    return cases
