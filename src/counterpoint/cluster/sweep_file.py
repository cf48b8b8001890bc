"""A sweep file: a cluster file, and under `[sweep]` the values to try; every combination that is possible is estimated."""

import hashlib
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from counterpoint.cluster.description import ClusterFile, Configuration
from counterpoint.cluster.training import (
    MAX_GLOBAL_BATCH,
    MAX_SIZE,
    CompressionMethod,
    ControlName,
    PipelineKind,
    Recompute,
    Sharding,
)
from counterpoint.errors import CounterpointError, MachineError, package_version
from counterpoint.machine import load_machine
from counterpoint.sim.calibration import load_calibration
from counterpoint.sim.network import MAX_NODES, Algorithm, check_range
from counterpoint.value import Value, all_fields, read_toml, require

MOST_COMBINATIONS = 1_000_000
TABLE_OF = {  # where a swept value belongs in a cluster file
    "machine": "cluster",
    "num_nodes": "cluster",
    "algorithm": "cluster",
    "tensor": "parallelism",
    "pipeline": "parallelism",
    "context": "parallelism",
    "expert": "parallelism",
    "sharding": "parallelism",
    "schedule": "parallelism",
    "num_chunks": "parallelism",
    "micro_batch": "training",
    "global_batch": "training",
    "recompute": "training",
    "controls": "training",
    "compression": "compression",
}
MOST = {"num_nodes": MAX_NODES, "global_batch": MAX_GLOBAL_BATCH} | dict.fromkeys(
    ("tensor", "pipeline", "context", "expert", "num_chunks", "micro_batch"), MAX_SIZE
)


class Axes(Value, frozen=True, kw_only=True):
    """Values to try; an axis that is empty keeps what the file's tables say."""

    machine: tuple[str, ...] = ()
    num_nodes: tuple[int, ...] = ()
    algorithm: tuple[Algorithm, ...] = ()
    tensor: tuple[int, ...] = ()
    pipeline: tuple[int, ...] = ()
    context: tuple[int, ...] = ()
    expert: tuple[int, ...] = ()
    sharding: tuple[Sharding, ...] = ()
    schedule: tuple[PipelineKind, ...] = ()
    num_chunks: tuple[int, ...] = ()
    micro_batch: tuple[int, ...] = ()
    global_batch: tuple[int, ...] = ()
    recompute: tuple[Recompute, ...] = ()
    controls: tuple[tuple[ControlName, ...], ...] = ()
    compression: tuple[CompressionMethod, ...] = ()

    def __post_init__(self) -> None:
        found = [len(getattr(self, name)) for name in self.names]
        require(bool(found), MachineError, f"[sweep] holds no values to try; name some of {', '.join(TABLE_OF)}.")
        total = math.prod(found)
        require(
            total <= MOST_COMBINATIONS,
            MachineError,
            f"[sweep] must hold at most {MOST_COMBINATIONS:,} combinations; found {total:,}. Name fewer values.",
        )
        for name in self.names:
            values = getattr(self, name)
            require(
                len(set(values)) == len(values),
                MachineError,
                f"[sweep] {name} must name each value once; found {', '.join(str(value) for value in values)}.",
            )
            for value in values if name in MOST else ():
                check_range("sweep", name, value, 1, MOST[name])

    @property
    def names(self) -> tuple[str, ...]:
        """Axes that hold values."""
        return tuple(name for name in TABLE_OF if getattr(self, name))

    def points(self) -> Iterator[dict[str, Any]]:
        """Yield every combination; the last axis changes fastest."""
        for values in itertools.product(*(getattr(self, name) for name in self.names)):
            yield dict(zip(self.names, values, strict=True))


class SweepFile(Value, frozen=True, kw_only=True):
    """A cluster file with `[sweep]`. `base` is what the axes change; `machines` are digests of what their files hold."""

    base: ClusterFile
    axes: Axes
    machines: tuple[str, ...]

    def key(self, point: dict[str, Any]) -> str:
        """Return the digest of a combination, of the file's other tables, of all machines, and of Counterpoint's version."""
        return _digest((all_fields(self.base), self.machines, sorted(point.items()), package_version()))

    def configuration(self, point: dict[str, Any]) -> Configuration:
        """Return the step of a combination. Raises `MachineError` if it is impossible."""
        changes: dict[str, dict[str, Any]] = {}
        for name, value in point.items():
            changes.setdefault(TABLE_OF[name], {})["method" if name == "compression" else name] = value
        tables = {name: msgspec.structs.replace(getattr(self.base, name), **change) for name, change in changes.items()}
        return msgspec.structs.replace(self.base, **tables).configuration()


def load_sweep(path: Path | str) -> SweepFile:
    """Read a sweep file (.toml). Raises `MachineError`, one line, for whatever is wrong with it."""
    whole = read_toml(path, _WholeFile, MachineError)
    tables = {name: getattr(whole, name) for name in ClusterFile.__struct_fields__}
    try:
        base = ClusterFile(**tables)
        require(base.model is not None, MachineError, "a sweep needs [model] and [training]. Add them.")
        # an unknown machine is a mistake, not an impossible combination
        machines = [load_machine(name) for name in whole.sweep.machine or (base.cluster.machine,)]
        digests = tuple(_digest((all_fields(machine), all_fields(load_calibration(machine)))) for machine in machines)
    except CounterpointError as problem:
        raise MachineError(f"{path}: {problem}") from problem
    return SweepFile(base=base, axes=whole.sweep, machines=digests)


def _digest(content: object) -> str:
    """Return sixteen hexadecimal digits of content whose `repr` is the same in every process."""
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


class _WholeFile(ClusterFile, frozen=True, kw_only=True):
    sweep: Axes
