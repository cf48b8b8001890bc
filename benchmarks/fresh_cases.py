"""Cases like those of validation that nobody has looked at: pairs that other seeds draw, and further matmuls and steps.

    torchrun --nproc-per-node 2 -m benchmarks.fresh_cases --seeds 105 106 -o fresh.json
    python -m benchmarks.fresh_cases --families beside --seeds 201 202 -o fresh.json     # one GPU
    python -m benchmarks.fresh_cases fresh.json ...     # without a GPU: the simulator's figures, by family

Every case runs captured, under all controls that validation tries. Families: `pairs` (16 for each seed), `types` (ten
matmuls in a chain with a collective), `training`, `alone` (collectives after one tiny kernel), and on one GPU `beside`
(eight for each seed: kernels on two streams, which also run eagerly and are traced).
"""

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from benchmarks.conditions import compare_or_measure, measured_in
from counterpoint.errors import CounterpointError
from counterpoint.machine import load_machine
from counterpoint.units import MIB
from counterpoint.validation.cases import (
    COLLECTIVE_MIB,
    COLLECTIVES,
    DIMENSIONS,
    Case,
    CollectiveWork,
    Elementwise,
    Entry,
    Matmul,
    chain,
    data_parallel,
    drawn_pairs,
    drawn_side_by_side,
    experts,
    sharded,
)
from counterpoint.validation.figures import PredictedRow, figures_of
from counterpoint.validation.outcome import ORIGINS, Origin, predict_case

FAMILIES = ("pairs", "types", "training", "alone")
ON_ONE_GPU = "beside"
SEEDED = ("pairs", ON_ONE_GPU)
TYPES = ("bf16", "fp16", "bf16", "fp8", "bf16")


def cases_of(family: str, seed: int) -> Iterator[Case]:
    """The cases of a family, each named after it; a seed changes pairs, and kernels beside each other, only."""
    if family == ON_ONE_GPU:
        for case in drawn_side_by_side(random.Random(seed)):
            yield replace(case, name=f"{family} {seed}: {case.name}", is_traced=True)
        return
    found: list[tuple[str, list[Entry]]] = []
    if family == "pairs":
        family, found = f"pairs {seed}", [(case.name, list(case.entries)) for case in drawn_pairs(random.Random(seed))]
    elif family == "training":
        for name, make, sizes in (
            ("DDP", data_parallel, ((3, 5120, 8192), (4, 4096, 4096))),
            ("FSDP", sharded, ((3, 4096, 4096), (3, 6144, 4096))),
            ("experts", experts, ((2, 5120, 8192), (3, 3072, 8192))),
        ):
            found += [(f"{name} {each}", make(*each)) for each in sizes]
    elif family == "types":
        drawn = random.Random(77)
        for number in range(10):
            m, n = drawn.choice((2048, 4096, 6144, 8192)), drawn.choice(DIMENSIONS) * drawn.choice((1, 2))
            shape = Matmul(m=m, n=n, k=drawn.choice(DIMENSIONS), dtype=TYPES[number % len(TYPES)])
            kind, mib = COLLECTIVES[number % len(COLLECTIVES)], drawn.choice(COLLECTIVE_MIB)
            exchange = CollectiveWork(collective=kind, num_bytes=mib * MIB)
            found.append((f"{shape.dtype} {m}x{n}x{shape.k}, {kind} {mib}, chain", chain([shape], exchange, 3)))
    else:
        for kind in COLLECTIVES:
            for mib in (16, 64, 160, 384):
                exchange = CollectiveWork(collective=kind, num_bytes=mib * MIB)
                found.append((f"{kind} {mib}", chain([Elementwise(num_bytes=4 * MIB)], exchange, 4)))
    for name, entries in found:
        yield Case(name=f"{family}: {name}", family="pairs", entries=tuple(entries))


def measure(options: argparse.Namespace) -> None:
    """Measure all cases on these GPUs, and save after each one."""
    import torch.distributed as dist  # noqa: PLC0415  figures need no GPU

    from benchmarks.on_gpus import join, largest, log, saving  # noqa: PLC0415
    from counterpoint.validation.on_gpu import measure_cases  # noqa: PLC0415

    began = time.monotonic()
    join(int(options.stop_after_s) + 60)
    is_one = options.families == [ON_ONE_GPU]
    if is_one == dist.is_initialized():
        raise CounterpointError(
            f"Cases need two ranks or more (torchrun --nproc-per-node 2), and those of {ON_ONE_GPU} one; found "
            f"{dist.get_world_size() if is_one else 1}."
        )
    seeds = [(family, seed) for family in options.families for seed in (options.seeds if family in SEEDED else [0])]

    def is_over() -> bool:
        over = float(time.monotonic() - began > options.stop_after_s)
        return bool(over if is_one else largest([over])[0])

    def in_time() -> Iterator[Case]:
        for case in (case for each in seeds for case in cases_of(*each)):
            if is_over():
                log(f"{case.name} is left out for want of time")
            else:
                yield case

    save = saving(options.output)
    measure_cases(
        in_time(),
        "fresh",
        options.output,
        save,
        lambda each: each.measure() if is_one else each.measure_captured(with_limits=True),
    )


def predicted(path: Path, origin: Origin = "captured steps") -> Iterator[tuple[str, PredictedRow]]:
    """Every row of a file with its family, as today's simulator predicts it; `alone` not from sizes."""
    measured = measured_in(path)
    for found in measured.cases:
        family, _, seed = found.name.split(":")[0].partition(" ")
        if origin == "captured steps" or family != "alone":
            (case,) = (each for each in cases_of(family, int(seed or 0)) if each.name == found.name)
            for row in predict_case(origin, case, found, path, load_machine(measured.machine)):
                yield family, row


def table(rows: Sequence[tuple[str, PredictedRow]]) -> Iterator[str]:
    """The figures of each family, and of all but `alone`."""
    for name in (*FAMILIES, ON_ONE_GPU, "all but alone"):
        chosen = [row for family, row in rows if family == name or (name == "all but alone" and family != "alone")]
        if chosen:
            each = figures_of(chosen)
            clear = 0.0 if each.clear_sign is None else each.clear_sign
            yield (
                f"{name}: {each.num_groups} cases, {each.num_rows} rows, error {each.mean_error:.1%} "
                f"({each.p90_error:.1%} at the 90th percentile), bias {each.bias:+.1%}, clear signs {clear:.1%} of "
                f"{each.num_clear}, regret {each.mean_regret:.1%} ({each.worst_regret:.1%} at worst)"
            )


def compared(options: argparse.Namespace) -> Iterator[str]:
    """A table for each origin of the predictions, over all files."""
    for origin in ORIGINS:
        rows = [row for path in options.files for row in predicted(path, origin)]
        yield from (f"from {origin}", *table(rows)) if rows else ()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=(*FAMILIES, ON_ONE_GPU), default=list(FAMILIES))
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[101, 102], help="of pairs, and of kernels beside each other"
    )
    parser.add_argument("--stop-after-s", type=float, default=200.0)
    compare_or_measure(parser, compared, measure)


if __name__ == "__main__":
    main()
