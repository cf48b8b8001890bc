"""A cluster file: a cluster and the requested training step, in TOML; and the conditions between its parts.

The format is documented in `docs/scale.md`. Without `[model]` the file describes only the cluster, for traces and workloads.
"""

from functools import cached_property
from pathlib import Path

import msgspec

from counterpoint.cluster.training import Compression, Model, Parallelism, Skew, Software, Training
from counterpoint.errors import MachineError, shown
from counterpoint.sim.network import Cluster, Fabric
from counterpoint.value import Value, read_toml, require

WHOLE_GRADIENTS = ("powersgd", "topk")


class ClusterFile(Value, frozen=True, kw_only=True):
    """The tables of a cluster file. `[model]` and `[training]` are given together or not at all."""

    cluster: Cluster
    model: Model | None = None
    training: Training | None = None
    parallelism: Parallelism = msgspec.field(default_factory=Parallelism)
    compression: Compression = msgspec.field(default_factory=Compression)
    skew: Skew = msgspec.field(default_factory=Skew)
    software: Software = msgspec.field(default_factory=Software)

    def __post_init__(self) -> None:
        require(
            (self.model is None) == (self.training is None),
            MachineError,
            "[model] and [training] belong together; found only one of them. Add the other, or leave both out.",
        )

    def configuration(self) -> "Configuration":
        """Return the step that the file describes. Raises `MachineError` if there is none, or if its parts do not fit."""
        if self.model is None or self.training is None:
            raise MachineError(
                f"The file of cluster '{shown(self.cluster.name)}' describes no model. Add [model] and [training], or name "
                "a trace or a workload as STEP."
            )
        return Configuration(
            fabric=self.cluster.load(),
            model=self.model,
            training=self.training,
            parallelism=self.parallelism,
            compression=self.compression,
            skew=self.skew,
            software=self.software,
        )


class Configuration(Value, frozen=True, kw_only=True, dict=True):
    """A training step on a cluster whose parts fit each other."""

    fabric: Fabric
    model: Model
    training: Training
    parallelism: Parallelism = msgspec.field(default_factory=Parallelism)
    compression: Compression = msgspec.field(default_factory=Compression)
    skew: Skew = msgspec.field(default_factory=Skew)
    software: Software = msgspec.field(default_factory=Software)

    def __post_init__(self) -> None:
        sizes, model, training = self.parallelism, self.model, self.training
        used = sizes.tensor * sizes.context * sizes.pipeline
        _check_multiple("the number of GPUs", self.fabric.num_gpus, "tensor x context x pipeline", used)
        _check_multiple("the data-parallel size", self.data_size, "expert", sizes.expert)
        _check_multiple("model.num_layers", model.num_layers, "pipeline x num_chunks", sizes.pipeline * sizes.num_chunks)
        _check_multiple("model.num_heads", model.num_heads, "tensor", sizes.tensor)
        _check_multiple("model.sequence", model.sequence, "context x tensor", sizes.context * self._sequence_shards)
        per_rank = self.data_size * training.micro_batch
        _check_multiple("training.global_batch", training.global_batch, "data x micro_batch", per_rank)
        _check_multiple("the data-parallel size", self.data_size, "shard_size", sizes.shard_size or 1)
        if sizes.schedule == "interleaved":
            _check_multiple("the number of micro-batches", self.num_micro_batches, "pipeline", sizes.pipeline)
        if sizes.expert > 1:
            _check_multiple("model.num_experts", model.num_experts or 1, "expert", sizes.expert)
            same = self._expert_ranks
            _check_multiple(
                "the number of ranks that hold the same experts", same, "shard_size", min(sizes.shard_size or 1, same)
            )
        method = self.compression.method
        require(
            method not in WHOLE_GRADIENTS or sizes.sharding == "none",
            MachineError,
            f"compression '{method}' needs whole gradients, so sharding must be 'none'; found '{sizes.sharding}'.",
        )
        require(
            method == "none" or training.overlap_data,
            MachineError,
            f"compression '{method}' is simulated in the backward pass, so overlap_data must be true; found false.",
        )
        rates = self.fabric.machine.gpu.matmul_rates()
        needed = model.matmul_type or model.element_type
        require(
            needed in rates,
            MachineError,
            f"machine '{self.fabric.machine.name}' has no {needed} matmuls, only {', '.join(rates)}. Choose one of these.",
        )

    @property
    def _sequence_shards(self) -> int:
        return self.parallelism.tensor if self.parallelism.is_sequence_parallel else 1

    @cached_property
    def data_size(self) -> int:
        """Ranks of data parallelism."""
        sizes = self.parallelism
        return self.fabric.num_gpus // (sizes.tensor * sizes.context * sizes.pipeline)

    @cached_property
    def num_micro_batches(self) -> int:
        """Micro-batches that each pipeline runs in one step."""
        return self.training.global_batch // (self.data_size * self.training.micro_batch)

    @property
    def layers_per_stage(self) -> int:
        """Layers of one pipeline rank."""
        return self.model.num_layers // self.parallelism.pipeline

    @property
    def layers_per_chunk(self) -> int:
        """Layers of one model chunk of a pipeline rank."""
        return self.layers_per_stage // self.parallelism.num_chunks

    @property
    def shard_ranks(self) -> int:
        """Ranks over which parameters are sharded in the forward pass; 1 where they are not."""
        if self.parallelism.sharding == "full":
            return self.data_size * self.parallelism.context
        return self.parallelism.shard_size or 1

    @property
    def optimizer_ranks(self) -> int:
        """Ranks over which the optimizer's state is sharded."""
        if self.parallelism.sharding == "optimizer":
            return self.data_size * self.parallelism.context
        return self.shard_ranks

    @property
    def expert_shard_ranks(self) -> int:
        """Ranks over which the parameters of experts are sharded in the forward pass.

        They are as many as for other parameters, but no more than hold the same experts.
        """
        return min(self.shard_ranks, self._expert_ranks)

    @property
    def expert_optimizer_ranks(self) -> int:
        """Ranks over which the optimizer's state of experts is sharded."""
        return min(self.optimizer_ranks, self._expert_ranks)

    @property
    def _expert_ranks(self) -> int:
        """Ranks that hold the same experts."""
        return self.data_size * self.parallelism.context // self.parallelism.expert


def load_cluster(path: Path | str) -> ClusterFile:
    """Read a cluster file (.toml). Raises `MachineError`, one line, for whatever is wrong with it."""
    return read_toml(path, ClusterFile, MachineError)


def _check_multiple(what: str, number: int, of_what: str, divisor: int) -> None:
    require(
        number >= divisor and number % divisor == 0,
        MachineError,
        f"{what} must be a multiple of {of_what} = {divisor:,}; found {number:,}. Change one of them.",
    )
