"""Training steps on GPUs: what copy engines do for DDP, FSDP2 and eager tensor parallelism, against NCCL's figures.

torchrun --nproc-per-node 4 -m benchmarks.training_steps -o results.json
torchrun --nproc-per-node 4 -m benchmarks.training_steps --families ddp,fsdp2 --rounds 9

Families, each interleaved within itself: `ddp` (1.2 B parameters in bf16), `ddp32` (the same with single-precision gradients
under autocast, where compression to bf16 makes sense), `fsdp2`, `tp8b` and `tp70b` (Llama-like blocks, sequence-parallel).
In each, `no communication` is the same computation alone. Gradients are compared with the library's in the same run. A
variant that fails prints one line and is left out.
"""

import argparse
import gc
import statistics
import traceback
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from benchmarks.on_gpus import join_with_options, largest, log, run_and_leave, save, shared_rounds
from benchmarks.training_models import GPT_1B, LLAMA, Sizes, blocks, sequence_parallel_plan
from counterpoint import ops
from counterpoint.errors import cause_of
from counterpoint.integrations import ddp, fsdp2, tensor_parallel
from counterpoint.integrations.lane_collectives import LEAST_PIECE_BYTES
from counterpoint.ops.collectives import library_all_gather, library_reduce_scatter

TOKENS = 4096
TP_TOKENS = 8192
GPT_BLOCKS = 6
TP_BLOCKS = {"8B": 4, "70B": 2}
WARM_UP_STEPS = 3
STEPS_BEFORE = 1  # of the same variant, untimed: what ran before it leaves the card in another state
STEPS_TIMED = 4
NEVER = 1 << 62  # bytes of a piece
Step = Callable[[], None]


class Variant:
    """One way to run a step, and its parameters."""

    def __init__(self, model: nn.Module, given: torch.Tensor, *, is_autocast: bool = False) -> None:
        self.model, self._given, self._is_autocast = model, given, is_autocast

    def backward(self) -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=self._is_autocast):
            output = self.model(self._given)
        local = output.to_local() if isinstance(output, DTensor) else output
        local.float().pow(2).mean().backward()

    def step(self) -> None:
        self.backward()
        self.model.zero_grad(set_to_none=True)

    def gradients(self) -> list[torch.Tensor]:
        self.backward()
        torch.cuda.synchronize()
        found = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        local = [_whole(each).float().cpu() if each.numel() < 1 << 20 else _whole(each)[:64].float().cpu() for each in found]
        self.model.zero_grad(set_to_none=True)
        return local


def _whole(gradient: torch.Tensor) -> torch.Tensor:
    """A sharded gradient's local part; a partial sum is made whole."""
    if not isinstance(gradient, DTensor):
        return gradient
    is_partial = any(placement.is_partial() for placement in gradient.placements)
    return gradient.full_tensor() if is_partial else gradient.to_local()


Builds = dict[str, Callable[[], Variant]]


def tokens_of_this_rank() -> torch.Tensor:
    torch.manual_seed(100 + dist.get_rank())
    return torch.randn(1, TOKENS, GPT_1B.features, device="cuda", dtype=torch.bfloat16)


def ddp_variants() -> Builds:
    given = tokens_of_this_rank()

    def build(bucket_mb: int, *, has_views: bool = True, **options: object) -> Variant:
        model = blocks(GPT_1B, GPT_BLOCKS, torch.bfloat16)
        wrapped = DistributedDataParallel(model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=has_views)
        if options:
            ddp.register(wrapped, least_part_bytes=0, **options)  # type: ignore[arg-type]
        return Variant(wrapped, given)

    return {
        "no communication": lambda: Variant(blocks(GPT_1B, GPT_BLOCKS, torch.bfloat16), given),
        "nccl 100 MB": lambda: build(100),
        "nccl 25 MB": lambda: build(25),
        "nccl 25 MB, not views": lambda: build(25, has_views=False),
        "copies 100 MB, buckets": lambda: build(100, least_piece_bytes=NEVER),
        "copies 25 MB, buckets": lambda: build(25, least_piece_bytes=NEVER),
        "copies 100 MB": lambda: build(100, in_flight=3),
        "copies 25 MB": lambda: build(25, in_flight=3),
        "copies 25 MB, not views": lambda: build(25, has_views=False, in_flight=3),
        "copies 100 MB, fp8": lambda: build(100, compression="fp8"),
    }


def ddp32_variants() -> Builds:
    given = tokens_of_this_rank()

    def build(**options: object) -> Variant:
        model = blocks(GPT_1B, GPT_BLOCKS, torch.float32)
        wrapped = DistributedDataParallel(model, bucket_cap_mb=200, gradient_as_bucket_view=True)
        if options:
            ddp.register(wrapped, **options)  # type: ignore[arg-type]
        return Variant(wrapped, given, is_autocast=True)

    def nccl_bf16() -> Variant:
        variant = build()
        variant.model.register_comm_hook(None, bf16_compress_hook)
        return variant

    return {
        "no communication": lambda: Variant(blocks(GPT_1B, GPT_BLOCKS, torch.float32), given, is_autocast=True),
        "nccl": build,
        "nccl, bf16": nccl_bf16,
        "copies, buckets": lambda: build(least_piece_bytes=NEVER),
        "copies": lambda: build(in_flight=3),
        "copies, bf16": lambda: build(in_flight=3, compression="bf16"),
        "copies, fp8": lambda: build(in_flight=3, compression="fp8"),
    }


def fsdp2_variants() -> Builds:
    given = tokens_of_this_rank()
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))

    def build(*, least_piece_bytes: int = LEAST_PIECE_BYTES, **by_copies: bool) -> Variant:
        model = blocks(GPT_1B, GPT_BLOCKS, torch.bfloat16)
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if by_copies:
            fsdp2.use_copy_engines(model, least_piece_bytes=least_piece_bytes).use(**by_copies)
        return Variant(model, given)

    return {
        "no communication": lambda: Variant(blocks(GPT_1B, GPT_BLOCKS, torch.bfloat16), given),
        "nccl": build,
        "copies": lambda: build(gathers=True, reduces=True),
        "gathers by copies": lambda: build(gathers=True, reduces=False),
        "copies, flat buffers": lambda: build(gathers=True, reduces=True, least_piece_bytes=NEVER),
    }


def tp_variants(name: str, num_tokens: int) -> Builds:
    sizes, num_blocks, num_ranks = LLAMA[name], TP_BLOCKS[name], dist.get_world_size()
    torch.manual_seed(1)
    whole = torch.randn(1, num_tokens, sizes.features, device="cuda", dtype=torch.bfloat16)
    shard = whole.chunk(num_ranks, 1)[dist.get_rank()].contiguous()
    mesh = init_device_mesh("cuda", (num_ranks,))

    def build(*, is_ours: bool) -> Variant:
        model = blocks(sizes, num_blocks, torch.bfloat16)
        parallelize_module(model, mesh, sequence_parallel_plan())
        if is_ours:
            tensor_parallel.overlap(model)
        return Variant(model, shard)

    return {
        "no communication": lambda: Variant(blocks(sizes, num_blocks, torch.bfloat16, num_ranks), whole),
        "nccl": lambda: build(is_ours=False),
        "copies": lambda: build(is_ours=True),
        "communication alone": lambda: _Collectives(sizes, num_blocks, num_tokens),
    }


class _Collectives(Variant):
    """The collectives of sequence-parallel blocks, forward and backward: four all-gathers and four reduce-scatters each."""

    def __init__(self, sizes: Sizes, num_blocks: int, num_tokens: int) -> None:
        super().__init__(nn.Module(), torch.empty(0))
        self._whole = torch.randn(num_tokens, sizes.features, device="cuda", dtype=torch.bfloat16)
        self._shard = self._whole.chunk(dist.get_world_size())[dist.get_rank()].clone()
        self._num_times = 4 * num_blocks

    def backward(self) -> None:
        for _ in range(self._num_times):
            library_all_gather(self._whole, self._shard)
            library_reduce_scatter(self._shard, self._whole)


FAMILIES: dict[str, Callable[[int], Builds]] = {
    "ddp": lambda _: ddp_variants(),
    "ddp32": lambda _: ddp32_variants(),
    "fsdp2": lambda _: fsdp2_variants(),
    "tp8b": lambda num_tokens: tp_variants("8B", num_tokens),
    "tp70b": lambda num_tokens: tp_variants("70B", num_tokens),
}


def warmed(builds: Builds) -> Iterator[tuple[str, Variant]]:
    """The variants that run, after their first steps."""
    for name, build in builds.items():
        try:
            variant = build()
            for _ in range(WARM_UP_STEPS):
                variant.step()
            torch.cuda.synchronize()
        except Exception as problem:
            traceback.print_exc()
            log(f"   {name} left out: {cause_of(problem, 200)}")
            continue
        yield name, variant


def time_variants(steps: dict[str, Step], num_rounds: int) -> dict[str, list[float]]:
    """Milliseconds per step of every round, the slowest rank's; a fresh order in each round, the same on all ranks."""
    names = list(steps)
    times: dict[str, list[float]] = {name: [] for name in steps}
    rounds = shared_rounds(len(names))
    for number in range(num_rounds):
        for name in (names[place] for place in rounds.order(number)):
            torch.cuda.synchronize()
            dist.barrier()
            for _ in range(STEPS_BEFORE):
                steps[name]()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(STEPS_TIMED):
                steps[name]()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / STEPS_TIMED)
    return dict(zip(steps, largest([times[name] for name in steps]), strict=True))


def differences(variants: dict[str, Variant]) -> dict[str, float]:
    """Largest difference of a gradient from NCCL's, relative to its largest element; NCCL's is between two runs of its own,
    for attention's backward pass is not the same twice."""
    baseline = next((name for name in variants if name.startswith("nccl")), None)
    if baseline is None:
        return {}
    wanted = variants[baseline].gradients()
    found: dict[str, float] = {}
    for name, variant in variants.items():
        if name in ("no communication", "communication alone"):
            continue
        pairs = zip(wanted, variant.gradients(), strict=True)
        worst = max(((a - b).abs().max() / a.abs().max().clamp_min(1e-20)).item() for a, b in pairs)
        (found[name],) = largest([worst])
    return found


def run_family(family: str, num_rounds: int, tp_tokens: int) -> dict[str, object]:
    variants = dict(warmed(FAMILIES[family](tp_tokens)))
    errors = differences(variants)
    held = ops.pool_report()
    timed = time_variants({name: variant.step for name, variant in variants.items()}, num_rounds)
    alone = statistics.median(timed["no communication"])
    rows = {}
    log(f"{family}: ms per step, median of {num_rounds} rounds of {STEPS_TIMED} steps")
    for name, values in timed.items():
        median = statistics.median(values)
        quarters = statistics.quantiles(values, n=4) if len(values) > 1 else [median] * 3
        rows[name] = {
            "median_ms": round(median, 3),
            "half_width_ms": round((quarters[2] - quarters[0]) / 2, 3),
            "difference": errors.get(name),
            "all_ms": [round(value, 3) for value in values],
        }
        error = f"gradients {errors[name]:.1e}" if name in errors else ""
        log(f"   {name:34}{median:8.2f} +- {rows[name]['half_width_ms']:.2f}  {median - alone:+7.2f} {error}")
    symmetric_bytes = sum(report.num_bytes for report in held)
    log(f"   symmetric memory {symmetric_bytes / 2**20:.0f} MiB per GPU")
    return {"family": family, "symmetric_bytes": symmetric_bytes, "variants": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--tp-tokens", type=int, default=TP_TOKENS, help="of tp8b and tp70b")
    arguments = join_with_options(parser, limit_s=240, rounds=7)
    results: list[dict[str, object]] = []
    for family in arguments.families.split(","):
        try:
            results.append(run_family(family, arguments.rounds, arguments.tp_tokens))
        except Exception as problem:
            traceback.print_exc()
            log(f"{family} left out: {cause_of(problem, 200)}")
        save(
            arguments.output,
            results,
            tokens={"ddp": TOKENS, "ddp32": TOKENS, "fsdp2": TOKENS, "tp": arguments.tp_tokens},
            blocks={"gpt": GPT_BLOCKS, **TP_BLOCKS},
        )
        ops.release()
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    run_and_leave(main)
