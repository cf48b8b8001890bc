"""How long kernels of many sizes take alone, on a cool GPU and under load, and what the simulator expects from sizes.

    torchrun --nproc-per-node 1 -m benchmarks.lone_times -o lone.json
    python -m benchmarks.lone_times lone.json       # without a GPU: the simulator's errors, by kind

Matmuls of cuBLAS in five types, attention of cuDNN, softmax and cumulative sums of PyTorch; no size is one of validation.
Six in a row are captured in a graph. *Cool*: the second of two replays after a pause; *warm*: a replay after 150 ms of them.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.conditions import compare_or_measure
from counterpoint.errors import CounterpointError
from counterpoint.machine import ElementType, load_machine
from counterpoint.sim import Simulator
from counterpoint.step import Kernel, Step
from counterpoint.validation.cases import Attention, Case, Entry, Matmul, Scan, Softmax, Work
from counterpoint.validation.described import described_step
from counterpoint.value import Value, decode_json

IN_A_ROW, PAUSE_S, LOAD_US = 6, 0.06, 150_000.0
SQUARE, THIN = (2048, 3072, 4096, 6144, 8192), (1024, 512, 256)
SHAPES = (
    *((size, size, size) for size in SQUARE),
    *((m, 8192, 8192) for m in THIN),
    *((8192, 8192, k) for k in (1024, 2048)),
    (2048, 8192, 4096),
    (8192, 2048, 4096),
    (4096, 14336, 4096),
    (4096, 4096, 14336),
    (16384, 4096, 4096),
    (4096, 11008, 4096),
    (2048, 5120, 13824),
    (2304, 9216, 2304),
    (7680, 2560, 7680),
)
OF_TYPES: dict[ElementType, tuple[tuple[int, int, int], ...]] = {
    "bf16": SHAPES,
    "fp16": SHAPES[2::2],
    "fp8": SHAPES[2::2],
    "tf32": SHAPES[1:5] + SHAPES[8:13],
    "fp32": SHAPES[:3] + SHAPES[9:11],
}
ATTENTIONS = ((2, 16, 8192), (1, 32, 4096), (4, 32, 2048), (8, 16, 1024), (1, 8, 16384))
SCANS = ((65536, 1024), (16384, 2048), (4096, 4096), (8192, 4096), (16384, 4096), (2048, 8192), (6144, 8192), (10240, 8192))


class Measured(Value, frozen=True, kw_only=True):
    """One kernel, as it was launched, and its times."""

    work: Work
    kernel: Kernel
    cool_us: float
    warm_us: float


class MeasuredFile(Value, frozen=True, kw_only=True):
    """What this benchmark writes."""

    conditions: dict[str, Any]
    result: list[Measured]


def works() -> Iterator[Work]:
    """The kernels: matmuls by type, attention, softmax in bf16 and cumulative sums in fp32."""
    for dtype, shapes in OF_TYPES.items():
        yield from (Matmul(m=m, n=n, k=k, dtype=dtype) for m, n, k in shapes)
    yield from (Attention(batch=batch, heads=heads, tokens=tokens) for batch, heads, tokens in ATTENTIONS)
    yield from (Softmax(rows=(100 << 20) // columns, columns=columns) for columns in (10240, 12288, 24576, 32768))
    yield from (Scan(rows=rows, columns=columns) for rows, columns in SCANS)


def kind_of(work: Work) -> str:
    """A matmul's type, or what the kernel is."""
    return f"{work.dtype} matmuls" if isinstance(work, Matmul) else type(work).__name__.lower()


def predicted_us(found: Measured) -> float:
    """What the simulator expects of the kernel alone, from its sizes."""
    case = Case(name="alone", family="types", entries=(Entry(work=found.work),))
    launched = Step(name="alone", num_ranks=1, operations=(found.kernel,))
    return Simulator().lone_times_us(described_step(case, launched), load_machine("h200"))[0]


def table(path: Path) -> Iterator[str]:
    """The errors of each kind as rows of a table: how many kernels, mean, worst."""
    measured = decode_json(path.read_bytes(), MeasuredFile, CounterpointError, str(path), "Name a file of this benchmark.")
    errors: dict[str, list[float]] = {}
    for found in measured.result:
        errors.setdefault(kind_of(found.work), []).append(predicted_us(found) / found.cool_us - 1)
    for kind, each in errors.items():
        mean, worst = statistics.fmean(map(abs, each)), max(each, key=abs)
        yield f"| {kind} | {len(each)} | {mean:.1%}, {worst:+.0%} |".replace("%", " %")


def measure(output: Path | None) -> None:
    """Time all kernels on this GPU."""
    import torch  # noqa: PLC0415  errors need no GPU

    from benchmarks.on_gpus import join, log, save  # noqa: PLC0415
    from counterpoint.cuda.capture import capture  # noqa: PLC0415
    from counterpoint.validation.steps_on_gpu import CaseOnGpu  # noqa: PLC0415

    join(400)
    results: list[Any] = []
    for work in works():
        on_gpu = CaseOnGpu(Case(name="alone", family="types", entries=(Entry(work=work),) * IN_A_ROW))
        captured = capture(on_gpu.step(), "alone")
        kernel = next(each for each in captured.read.step.operations if isinstance(each, Kernel))
        executable, stream = captured.graph.instantiate(), torch.cuda.current_stream()

        def replay_us(before: int, executable: Any = executable, stream: Any = stream) -> float:
            for _ in range(before):
                executable.launch(stream.cuda_stream)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            executable.launch(stream.cuda_stream)
            end.record()
            torch.cuda.synchronize()
            return start.elapsed_time(end) * 1000 / IN_A_ROW

        cool = []
        for _ in range(4):
            time.sleep(PAUSE_S)
            cool.append(replay_us(1))
        cool_us = statistics.median(cool)
        warm_us = replay_us(max(2, round(LOAD_US / cool_us / IN_A_ROW)))
        launched = msgspec.structs.replace(kernel, waits_for=())
        found = Measured(work=work, kernel=launched, cool_us=cool_us, warm_us=warm_us)
        results.append(msgspec.to_builtins(found))
        log(f"{kind_of(work)} {cool_us:.1f} us, warm {warm_us:.1f}, expected {predicted_us(found):.1f}: {work}")
        executable.close()
        captured.close()
        torch.cuda.empty_cache()
        save(output, results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    compare_or_measure(
        parser, lambda options: chain.from_iterable(map(table, options.files)), lambda options: measure(options.output)
    )


if __name__ == "__main__":
    main()
