"""Steps of torchtitan 0.3.0's models with and without an overlap: what the benchmarks of its experts and linears share.

First the loss and gradients of one batch are compared: bare, bare again, and with the operators. Then come blocks of steps
in the order off, on, on, off, each after a warm-up: both ways meet the same clocks, temperatures and data.
"""

import argparse
import faulthandler
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks import conditions, on_gpus
from benchmarks.on_gpus import is_first, log
from benchmarks.torchtitan03_model import BACKENDS, Built, Sizes, local
from benchmarks.torchtitan_experts import figure
from counterpoint import ops
from counterpoint.integrations.overlapped import Overlapped

LIMIT_S = 300  # of everything; a hang shows all stacks and ends
JOIN_TIMEOUT = timedelta(seconds=90)
NORM_LIMIT = 2**-7  # of relative differences of gradients' norms: two roundings to bf16
LOSS_LIMIT = 2**-9  # of the relative difference of the first losses: a rounding to bf16
NUM_BATCHES = 8
LEARNING = {"lr": 2.2e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}


Overlap = Callable[[torch.nn.Module], Overlapped]


class Blocks(NamedTuple):
    """How often the order off, on, on, off is run, and the steps of a block."""

    rounds: int
    steps: int
    warm_ups: int


class Job:
    """Training steps on random words, which repeat after `NUM_BATCHES`; tensor-parallel ranks have the same words."""

    def __init__(self, built: Built, sizes: Sizes, device: torch.device) -> None:
        from torchtitan.components.loss import cross_entropy_loss  # noqa: PLC0415  its folder is known only now
        from torchtitan.distributed.utils import clip_grad_norm_  # noqa: PLC0415

        self.model, self.device = built.model, device
        self._context, self._num_words = built.context, sizes.words
        self._loss, self._clip = cross_entropy_loss, clip_grad_norm_
        self._num_alike, self._has_experts = built.dims.tp, built.dims.ep > 1
        generator = torch.Generator().manual_seed(1000 + dist.get_rank() // self._num_alike)
        shape = (NUM_BATCHES, sizes.sequences, sizes.tokens + 1)
        self._batches = torch.randint(0, sizes.words, shape, generator=generator).to(device)
        self._positions = torch.arange(sizes.tokens, device=device).expand(sizes.sequences, -1)
        self._num_tokens = sizes.sequences * sizes.tokens * dist.get_world_size() // self._num_alike
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **LEARNING, fused=True)
        self._num_steps = 0

    def forward_backward(self, number: int) -> torch.Tensor:
        """This rank's share of the loss of a batch; gradients are added up."""
        batch = self._batches[number % NUM_BATCHES]
        with self._context():
            predicted = self.model(batch[:, :-1], positions=self._positions, attention_masks=None)
            whole = self._loss(predicted, batch[:, 1:], global_vocab_size=self._num_words)
            loss: torch.Tensor = whole / self._num_tokens
            del predicted  # backward needs the memory
            loss.backward()
        return loss.detach()

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.forward_backward(self._num_steps)
        self._clip(self.model.parameters(), 1.0, foreach=True, ep_enabled=self._has_experts)
        self.optimizer.step()
        self._num_steps += 1
        return loss

    def mean_of_ranks(self, loss: torch.Tensor) -> float:
        """The mean loss of all tokens, of the ranks' shares."""
        loss = loss.clone()
        dist.all_reduce(loss)
        return loss.item() / self._num_alike

    def loss_and_gradients(self) -> tuple[float, dict[str, torch.Tensor]]:
        """Of the first batch: the mean loss of all ranks, and this rank's parts of the gradients."""
        self.optimizer.zero_grad()
        loss = self.forward_backward(0)
        gradients = {name: each.grad for name, each in self.model.named_parameters()}
        found = {name: local(each).detach().clone() for name, each in gradients.items() if each is not None}
        self.optimizer.zero_grad()
        return self.mean_of_ranks(loss), found

    def notes(self) -> dict[str, Any]:
        """What else is to say of the model after a pass."""
        return {}

    def notes_at_end(self, overlapped: Overlapped) -> dict[str, Any]:
        """What else is to say when all blocks ran."""
        return {}


def norms(parts: Iterable[torch.Tensor]) -> list[float]:
    """The norms of tensors of which each rank has another part."""
    squares = torch.stack([each.double().square().sum() for each in parts])
    dist.all_reduce(squares)
    found: list[float] = squares.sqrt().tolist()
    return found


def compare(
    wanted: dict[str, torch.Tensor], found: dict[str, torch.Tensor], kind_of: Callable[[str], str]
) -> dict[str, Any]:
    """The largest relative differences of gradients: of their norms, and the norm of the difference, also by kind of
    parameter.
    """
    assert wanted.keys() == found.keys(), wanted.keys() ^ found.keys()
    bare = [max(norm, 1e-12) for norm in norms(wanted.values())]
    ours, apart = norms(found.values()), norms(found[name].double() - each.double() for name, each in wanted.items())
    of_norms = {name: abs(our - base) / base for name, our, base in zip(wanted, ours, bare, strict=True)}
    of_difference = {name: far / base for name, far, base in zip(wanted, apart, bare, strict=True)}
    kinds: dict[str, float] = {}
    for name, value in of_difference.items():
        kind = kind_of(name)
        kinds[kind] = max(kinds.get(kind, 0.0), value)
    worst, farthest = (max(each, key=each.__getitem__) for each in (of_norms, of_difference))
    return {
        "num_parameters": len(wanted),
        "largest_difference_of_norms": of_norms[worst],
        "of_parameter": worst,
        "largest_norm_of_difference": of_difference[farthest],
        "that_of_parameter": farthest,
        "largest_norm_of_difference_by_kind": kinds,
    }


def check(job: Job, overlap: Overlap, kind_of: Callable[[str], str]) -> tuple[Overlapped, dict[str, Any]]:
    """Overlap the model; say how far loss and gradients are from those before, and those before from each other."""
    bare, wanted = job.loss_and_gradients()
    again, found = job.loss_and_gradients()
    noise = compare(wanted, found, kind_of)
    overlapped = overlap(job.model)
    ours, found = job.loss_and_gradients()
    differences = compare(wanted, found, kind_of)
    distance = abs(bare - ours) / abs(bare)
    return overlapped, {
        "loss_off": bare,
        "loss_off_again": again,
        "loss_on": ours,
        "loss_is_equal": bare == ours,
        "loss_difference": distance,
        "off_again_against_off": noise,
        "on_against_off": differences,
        "limit": NORM_LIMIT,
        "agrees": distance <= LOSS_LIMIT and differences["largest_difference_of_norms"] <= NORM_LIMIT,
        "overlapped": str(overlapped),
    }


class Moment:
    """A point in the GPU's own order, or in time on CPUs."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record()
        self._clock_s = time.perf_counter()

    def ms_until(self, later: "Moment") -> float:
        if self._event is not None:
            return float(self._event.elapsed_time(later._event))
        return (later._clock_s - self._clock_s) * 1000


def run_block(job: Job, blocks: Blocks, *, is_on: bool) -> dict[str, Any]:
    """Steps one way: ms of each on this rank, the mean loss, and the most memory of PyTorch on a rank."""
    on_gpu = job.device.type == "cuda"
    gc.collect()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(blocks.warm_ups):
        job.step()
    synchronize(job.device)
    gc.disable()
    moments, losses = [Moment(job.device)], []
    for _ in range(blocks.steps):
        losses.append(job.step())
        moments.append(Moment(job.device))
    synchronize(job.device)
    gc.enable()
    return {
        "way": "on" if is_on else "off",
        "ms": [round(begin.ms_until(end), 3) for begin, end in pairwise(moments)],
        "mean_loss": round(job.mean_of_ranks(torch.stack(losses).mean()), 5),
        "peak_bytes": int(on_gpus.largest([torch.cuda.max_memory_allocated()])[0]) if on_gpu else 0,
    }


def synchronize(device: torch.device) -> None:
    """Wait for all ranks and their GPUs."""
    dist.barrier(device_ids=None if device.index is None else [device.index])
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(
    job: Job, overlapped: Overlapped, blocks: Blocks, keep: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    """Run all blocks; `keep` gets those that ran, after each."""
    ran: list[dict[str, Any]] = []
    for is_on in (False, True, True, False) * blocks.rounds:
        overlapped.use(is_on)
        ran.append(run_block(job, blocks, is_on=is_on))
        log(f"{ran[-1]['way']:3} {statistics.median(ran[-1]['ms']):.2f} ms, loss {ran[-1]['mean_loss']}")
        keep(ran)
    return ran


def summarize(ran: list[dict[str, Any]]) -> dict[str, Any]:
    """Median, quartiles and memory of both ways, and the change."""
    found: dict[str, Any] = {}
    for way in ("off", "on"):
        chosen = [block for block in ran if block["way"] == way]
        found[way] = figure([ms for block in chosen for ms in block["ms"]]) | {
            "medians_of_blocks_ms": [round(statistics.median(block["ms"]), 2) for block in chosen],
            "peak_bytes": max(block["peak_bytes"] for block in chosen),
        }
    off, on = found["off"], found["on"]
    found["change_percent"] = round(100 * (on["median_ms"] / off["median_ms"] - 1), 2)
    found["quartiles_are_apart"] = on["high_ms"] < off["low_ms"] or on["low_ms"] > off["high_ms"]
    return found


def measuring_conditions(built: Built, shapes: dict[str, int], job: str, device: torch.device) -> dict[str, object]:
    """Where and what was measured."""
    own = {
        "python": platform.python_version(),
        "torchtitan": version("torchtitan"),
        "spmd_types": version("spmd_types"),
        "ranks": dist.get_world_size(),
        "shapes": shapes | {"parameters": sum(each.numel() for each in built.model.parameters())},
        "job": job,
        "shims": built.stand_ins,
    }
    return conditions.conditions() | own if device.type == "cpu" else on_gpus.conditions(**own)


def run(
    job: Job,
    blocks: Blocks,
    overlap: Overlap,
    *,
    kind_of: Callable[[str], str],
    stated: dict[str, object],
    output: Path | None,
) -> None:
    """Check the model with the overlap and run all blocks; what was found so far is stored after each. `stated` are the
    conditions.
    """
    result: dict[str, Any] = {"conditions": stated}
    log(json.dumps(stated))
    overlapped, result["check"] = check(job, overlap, kind_of)
    result["check"] |= job.notes()
    log(json.dumps(result["check"], indent=1))
    log("agrees" if result["check"]["agrees"] else "DOES NOT AGREE within the limits")
    store(output, result)
    result["blocks"] = measure(job, overlapped, blocks, lambda ran: store(output, result | {"blocks": ran}))
    symmetric = {"symmetric_bytes": sum(each.num_bytes for each in ops.pool_report())}
    result["summary"] = summarize(result["blocks"]) | symmetric | job.notes_at_end(overlapped)
    result["overlapped"] = str(overlapped)
    log(json.dumps(result["summary"], indent=1))
    log(overlapped)
    store(output, result)
    synchronize(job.device)


def store(output: Path | None, result: dict[str, Any]) -> None:
    """Write what there is so far, on the first rank."""
    if output is not None and is_first():
        output.write_text(json.dumps(result, indent=1) + "\n")


def join(*, has_gpus: bool) -> torch.device:
    """Meet the other ranks as torchtitan does, which ties its group to no device."""
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpus else torch.device("cpu")
    if has_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpus else "gloo", timeout=JOIN_TIMEOUT)
    return device


def parser_of(description: str) -> argparse.ArgumentParser:
    """The options of both benchmarks."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = "a folder with torchtitan 0.3.0 or what it imports; may be given again; not needed if they are installed"
    parser.add_argument("--torchtitan", type=Path, action="append", default=[], metavar="DIR", help=where)
    backends = f"of torchtitan; {BACKENDS[1]} needs torch 2.14, which itself imports what is in DIR: put it in PYTHONPATH"
    parser.add_argument("--backend", choices=BACKENDS, default=BACKENDS[0], help=backends)
    parser.add_argument("--cpu", action="store_true", help="small sizes by gloo, without a GPU")
    parser.add_argument("-o", "--output", type=Path)
    return parser
