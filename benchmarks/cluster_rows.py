"""Published step times as configurations of the cluster estimator: what each table says, and what had to be assumed.

Assumed where a table is silent: links of 8 x 400 Gb/s a node on H100 and of 8 x 200 Gb/s on A100; Megatron-LM's micro-
batches and chunks (`scaling.csv`; as few layers a chunk as divide evenly); pipeline 6 at every size of the strong scaling.
"""

import csv
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from counterpoint.cluster.description import Configuration
from counterpoint.cluster.training import Model, Parallelism, Software, Training
from counterpoint.machine import load_machine
from counterpoint.sim.calibration import Calibration, load_calibration
from counterpoint.sim.network import Cluster, Fabric, Level
from counterpoint.units import US_PER_S

DATA = Path(__file__).parent / "data" / "cluster"
GBIT = 1e9 / 8
A100_40GB_BYTES_PER_S = 1.555e12 / 2.039e12  # NVIDIA A100 datasheet, 2021: memory of the 40 GB card over the 80 GB card's
TORCHTITAN_H100_BYTES_PER_S = 2.4e12 / 3.35e12  # its benchmarks ran on H100s of 96 GB HBM2e, 2.4 TB/s
MOST_CHUNKS = 24
MPT = {  # hidden, heads, layers: scripts/train/yamls/pretrain/mpt-*.yaml
    "1b": (2048, 16, 24), "3b": (2560, 20, 32), "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 56, 48),
    "70b": (8192, 64, 80),
}  # fmt: skip
MEGATRON = {  # hidden, heads, layers
    "1.7b": (2048, 16, 24), "7.1b": (4096, 32, 30), "16b": (6144, 48, 32), "32b": (7168, 56, 48), "70b": (8192, 64, 84),
    "119b": (10240, 80, 92), "177b": (12288, 96, 96), "314b": (16384, 128, 96), "462b": (18432, 144, 112),
}  # fmt: skip


class Constants(NamedTuple):
    """What is fitted. Speeds are relative to the simulator's calibration; `latency_us` is of one message between nodes."""

    matmul_speed: float = 1.0
    memory_speed: float = 1.0
    host_us: float = 0.0
    efficiency: float = 0.9
    latency_us: float = 10.0
    per_doubling: float = 1.0
    send_efficiency: float = 0.3  # so that MegaScale's gain by pipeline overlap comes out within a point; see the results

    def levels(self, level: Level, num_nodes: int) -> tuple[Level, ...]:
        """One kind of switch as a Clos network, in which each doubling of nodes costs some of the efficiency."""
        found = []
        for doublings in range(max(1, math.ceil(math.log2(max(2, num_nodes)))) + 1):
            found.append(
                msgspec.structs.replace(
                    level,
                    num_nodes=1 << doublings,
                    efficiency=max(0.05, self.efficiency * self.per_doubling**doublings),
                    send_efficiency=self.send_efficiency,
                    latency_us=self.latency_us,
                )
            )
        return tuple(found)


class Row(NamedTuple):
    """One published row: its family, those it is compared with, and the step it describes without fitted constants."""

    family: str
    group: str
    gpus: int
    measured: float
    configuration: Configuration

    def with_constants(self, constants: Constants) -> Configuration:
        """The row's step with fitted constants."""
        configuration = self.configuration
        before = configuration.fabric.cluster
        cluster = msgspec.structs.replace(before, levels=constants.levels(before.levels[0], before.num_nodes))
        own = configuration.software
        return msgspec.structs.replace(
            configuration,
            fabric=msgspec.structs.replace(configuration.fabric, cluster=cluster),
            software=Software(
                matmul_speed=own.matmul_speed * constants.matmul_speed,
                memory_speed=own.memory_speed * constants.memory_speed,
                host_us_per_operation=constants.host_us,
            ),
        )


def _fabric(machine_name: str, gpus: int, gbit_per_rail: float, num_rails: int) -> Fabric:
    """Nodes of 8 behind one kind of switch; fewer GPUs are one smaller node."""
    machine = load_machine(machine_name)
    nodes = max(1, gpus // 8)
    if gpus < 8:
        machine, num_rails = msgspec.structs.replace(machine, num_gpus=gpus), min(gpus, num_rails)
    level = Level(name="network", num_nodes=nodes, bytes_per_s=gbit_per_rail * GBIT, latency_us=10.0)
    cluster = Cluster(name=machine_name, machine=machine_name, num_nodes=nodes, num_rails=num_rails, levels=(level,))
    return Fabric(cluster=cluster, machine=machine)


def _read(name: str) -> Iterator[dict[str, str]]:
    with (DATA / name).open() as file:
        yield from csv.DictReader(file)


def vtrain(is_multi: bool) -> list[Row]:
    """vTrain's rows, measured in milliseconds; 4 x 200 Gb/s a node (its config/validation: 800 Gb/s).

    Its files say that activations are recomputed. On one node they cannot have been: a layer with a hidden size of 2,048
    takes 16.3 ms for 8 sequences, in which its matmuls with recomputation would need 97 % of the peak beside the least
    traffic of its scores. On several nodes they must have been, for memory.
    """
    rows = []
    for entry in _read(f"vtrain_{'multi' if is_multi else 'single'}_node.csv"):
        figures = [float(each) for each in entry.values()]
        gpus, batch, micro, hidden, heads, layers, sequence, tensor, _, pipeline = (int(each) for each in figures[-11:-1])
        configuration = Configuration(
            fabric=_fabric("a100", gpus, 200, 4),
            model=Model(
                num_layers=layers,
                hidden=hidden,
                num_heads=heads,
                vocabulary=51200,
                sequence=sequence,
                attention="materialized",
                element_type="fp16",
            ),
            training=Training(
                micro_batch=micro,
                global_batch=batch,
                recompute="full" if is_multi else "none",
                gradient_bytes=2,
                overlap_data=False,
                overlap_tensor=False,
                overlap_pipeline=False,
            ),
            parallelism=Parallelism(tensor=tensor, pipeline=pipeline),
        )
        group = f"{hidden} x {layers}, {gpus} GPUs, batch {batch}"
        rows.append(Row("vtrain", group, gpus, figures[-1], configuration))
    return rows


@cache
def a100_calibration(num_ranks: int) -> Calibration:
    """The H200's constants with all-reduces as vTrain's authors measured them on so many A100s of one node."""
    base = load_calibration(load_machine("a100"))
    times = {
        int(row["bytes"]): float(row["time_us"]) for row in _read("vtrain_all_reduce.csv") if int(row["gpus"]) == num_ranks
    }
    share = 2 * (num_ranks - 1) / num_ranks
    small, large = 1 << 28, 1 << 30
    rate = share * (large - small) / (times[large] - times[small]) * US_PER_S
    latencies = tuple(
        (float(size), times[size] - share * size / rate * US_PER_S) for size in (1 << 20, 1 << 22, 1 << 23, 1 << 24, 1 << 25)
    )
    constants = msgspec.structs.replace(
        base.collectives["all_reduce"],
        link_fraction=rate / 3e11,
        link_fraction_of_more=None,
        latency_us=times[1 << 26] - share * (1 << 26) / rate * US_PER_S,
        latency_us_by_bytes=latencies,
        source="vTrain, trace/a100",
    )
    return msgspec.structs.replace(base, collectives={**base.collectives, "all_reduce": constants})


def calibration_for(row: Row) -> Calibration | None:
    """A100 rows of vTrain have measured all-reduces, those of the size of the tensor group; others the GPU's own."""
    if row.family != "vtrain":
        return None
    tensor = row.configuration.parallelism.tensor
    return a100_calibration(8 if tensor >= 8 else 4 if tensor == 4 else 2)


def llm_foundry() -> list[Row]:
    """MPT under FSDP. SHARD_GRAD_OP keeps gathered parameters, so they are gathered once, as ZeRO-1 does."""
    rows = []
    for entry in _read("llm_foundry.csv"):
        gpus, is_h100 = int(entry["gpus"]), entry["gpu"] == "h100"
        hidden, heads, layers = MPT[entry["model"]]
        configuration = Configuration(
            fabric=_fabric(entry["gpu"], gpus, 400 if is_h100 else 200, 8),
            model=Model(num_layers=layers, hidden=hidden, num_heads=heads, vocabulary=50368, sequence=2048),
            training=Training(
                micro_batch=int(entry["micro_batch"]),
                global_batch=int(entry["global_batch"]),
                recompute="full" if entry["recompute"] == "full" else "none",
                gradient_bytes=4 if is_h100 else 2,
            ),
            parallelism=Parallelism(sharding="full" if entry["sharding"] == "FULL_SHARD" else "optimizer"),
            software=Software(memory_speed=1.0 if is_h100 else A100_40GB_BYTES_PER_S),
        )
        part = "128 and more" if is_h100 and gpus >= 128 else "up to 64" if is_h100 else ""
        group = f"llm-foundry {entry['gpu']} {entry['model']} {part}".strip()
        rows.append(Row("llm-foundry", group, gpus, float(entry["tokens_per_s_per_gpu"]), configuration))
    return rows


def scaling() -> list[Row]:
    """torchtitan's and Megatron-LM's rows."""
    rows = []
    for entry in _read("scaling.csv"):
        is_torchtitan = entry["family"].startswith("torchtitan")
        build = _torchtitan if is_torchtitan else _megatron
        family = "torchtitan" if is_torchtitan else "megatron"
        measured = float(entry["tokens_per_s_per_gpu_or_tflops"])
        rows.append(Row(family, entry["family"], int(entry["gpus"]), measured, build(entry)))
    return rows


def _torchtitan(entry: dict[str, str]) -> Configuration:
    is_h200, is_fp8 = "h200" in entry["family"], "float8" in entry["family"]
    return Configuration(
        fabric=_fabric("h200" if is_h200 else "h100", int(entry["gpus"]), 400, 8),
        model=Model(
            num_layers=32,
            hidden=4096,
            num_heads=32,
            num_kv_heads=8,
            ffn=14336,
            is_gated=True,
            vocabulary=128256,
            sequence=8192,
            matmul_type="fp8" if is_fp8 else None,
        ),
        training=Training(
            micro_batch=int(entry["micro_batch"]), global_batch=int(entry["global_batch"]), recompute="selective"
        ),
        parallelism=Parallelism(sharding="full"),
        software=Software(memory_speed=1.0 if is_h200 else TORCHTITAN_H100_BYTES_PER_S),
    )


def _megatron(entry: dict[str, str]) -> Configuration:
    hidden, heads, layers = MEGATRON[entry["model"]]
    tensor, pipeline = int(entry["tensor"]), int(entry["pipeline"])
    each = layers // pipeline
    chunks = max(number for number in range(1, MOST_CHUNKS + 1) if each % number == 0) if pipeline > 1 else 1
    return Configuration(
        fabric=_fabric("h100", int(entry["gpus"]), 400, 8),
        model=Model(num_layers=layers, hidden=hidden, num_heads=heads, vocabulary=131072, sequence=4096),
        training=Training(
            micro_batch=int(entry["micro_batch"]),
            global_batch=int(entry["global_batch"]),
            controls=("operators",) if tensor > 1 else (),  # its README: tensor-parallel overlap is on
        ),
        parallelism=Parallelism(
            tensor=tensor,
            pipeline=pipeline,
            sharding="optimizer",
            is_sequence_parallel=tensor > 1,
            schedule="interleaved" if chunks > 1 else "1f1b",
            num_chunks=chunks,
        ),
    )


def megascale() -> list[tuple[str, float, Configuration]]:
    """The ablation's steps: what overlaps in each, and its published MFU in percent."""
    base = Configuration(
        fabric=_fabric("a100", 256, 200, 8),
        model=Model(num_layers=96, hidden=12288, num_heads=128, vocabulary=64000, sequence=2048, element_type="bf16"),
        training=Training(
            micro_batch=1,
            global_batch=256,
            recompute="none",
            overlap_data=False,
            overlap_tensor=False,
            overlap_pipeline=False,
        ),
        parallelism=Parallelism(
            tensor=8,
            pipeline=8,
            sharding="optimizer",
            is_sequence_parallel=True,
            schedule="interleaved",
            num_chunks=6,
        ),
    )
    steps = [{}, {"overlap_tensor": True, "controls": ("operators",)}, {"overlap_pipeline": True}, {"overlap_data": True}]
    found, changes = [], {}
    for entry, change in zip(_read("megascale_ablation.csv"), steps, strict=True):
        changes |= change
        training = msgspec.structs.replace(base.training, **changes)
        found.append((entry["step"], float(entry["mfu_percent"]), msgspec.structs.replace(base, training=training)))
    return found
