"""The training: the shapes of a model, the parallel sizes, the batch, and the assumptions about the job's software.

Sizes follow Megatron-LM's words. Ranks are numbered tensor first, then context, then data, then pipeline, so tensor groups
are neighbors and data groups have strides. Expert groups lie inside the data ranks.
"""

from typing import Literal

from counterpoint.errors import MachineError
from counterpoint.machine import ELEMENT_BYTES, ElementType
from counterpoint.sim.network import check_range
from counterpoint.value import Value, require

MAX_SIZE = 1 << 24
MAX_GLOBAL_BATCH = 1 << 30
Sharding = Literal["none", "optimizer", "full", "hybrid"]
PipelineKind = Literal["1f1b", "interleaved", "zero_bubble"]
Recompute = Literal["none", "selective", "full"]
ControlName = Literal["priority", "shaping", "copy_engines", "operators"]
CompressionMethod = Literal["none", "bf16", "fp8", "powersgd", "topk"]


class Model(Value, frozen=True, kw_only=True):
    """A transformer by its shapes. `attention`: flash keeps no scores in memory, materialized writes them.

    `ffn` None means 4 x hidden; `num_kv_heads` None means as many as heads. With experts, each has `expert_ffn` (None: ffn).
    """

    num_layers: int
    hidden: int
    num_heads: int
    vocabulary: int
    sequence: int
    num_kv_heads: int | None = None
    ffn: int | None = None
    is_gated: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int | None = None
    attention: Literal["flash", "materialized"] = "flash"
    element_type: ElementType = "bf16"
    matmul_type: ElementType | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden", "num_heads", "vocabulary", "sequence"):
            check_range("model", name, getattr(self, name), 1, MAX_SIZE)
        for name in ("num_kv_heads", "ffn", "expert_ffn"):
            check_range("model", name, getattr(self, name) or 1, 1, MAX_SIZE)
        _check_divides("model.hidden", self.hidden, "num_heads", self.num_heads)
        _check_divides("model.num_heads", self.num_heads, "num_kv_heads", self.kv_heads)
        require(
            (self.num_experts == 0) == (self.experts_per_token == 0) and 0 <= self.experts_per_token <= self.num_experts,
            MachineError,
            f"model: experts_per_token must be from 1 to num_experts, or both 0; found {self.experts_per_token} of "
            f"{self.num_experts}.",
        )

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def kv_size(self) -> int:
        """Columns of the keys, and of the values."""
        return self.kv_heads * (self.hidden // self.num_heads)

    @property
    def feed_forward(self) -> int:
        """Columns between the two matmuls of a dense feed-forward block, or of one expert."""
        usual = self.ffn or 4 * self.hidden
        return (self.expert_ffn or usual) if self.num_experts else usual

    @property
    def num_up_matrices(self) -> int:
        """Matrices before the activation: 2 where it is gated."""
        return 2 if self.is_gated else 1

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation or a parameter in the forward pass."""
        return ELEMENT_BYTES[self.element_type]

    @property
    def attention_parameters(self) -> int:
        """Parameters of a layer's attention and norms."""
        return self.hidden * (2 * self.hidden + 2 * self.kv_size) + 4 * self.hidden

    @property
    def feed_forward_parameters(self) -> int:
        """Parameters of a layer's feed-forward block, all experts and the router together."""
        one = (self.num_up_matrices + 1) * self.hidden * self.feed_forward
        return one * self.num_experts + self.hidden * self.num_experts if self.num_experts else one

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, with separate input and output embeddings."""
        layer = self.attention_parameters + self.feed_forward_parameters
        return self.num_layers * layer + 2 * self.vocabulary * self.hidden

    @property
    def forward_flops_per_token(self) -> float:
        """Floating-point operations of the forward pass, with the full (not causal) attention, as MFU is usually counted."""
        active = (self.num_up_matrices + 1) * self.hidden * self.feed_forward * max(1, self.experts_per_token)
        layer = 2 * (self.attention_parameters + active) + 4 * self.sequence * self.hidden
        return float(self.num_layers * layer + 2 * self.vocabulary * self.hidden)


class Parallelism(Value, frozen=True, kw_only=True):
    """Parallel sizes. Data parallelism takes the GPUs that are left; experts are spread over `expert` of the data ranks.

    `sharding`: optimizer is ZeRO-1, full is ZeRO-3 or FSDP, hybrid shards over `shard_size` ranks and replicates beyond, and
    experts over as many of the ranks that hold the same ones.
    `num_chunks` are the model chunks of each pipeline rank; more than 1 needs the interleaved schedule.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    sharding: Sharding = "none"
    shard_size: int | None = None
    is_sequence_parallel: bool = False
    schedule: PipelineKind = "1f1b"
    num_chunks: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "context", "expert", "num_chunks"):
            check_range("parallelism", name, getattr(self, name), 1, MAX_SIZE)
        check_range("parallelism", "shard_size", 1 if self.shard_size is None else self.shard_size, 1, MAX_SIZE)
        require(
            (self.sharding == "hybrid") == (self.shard_size is not None),
            MachineError,
            "parallelism: shard_size is required for sharding 'hybrid' and allowed only there; found "
            f"{self.shard_size} with '{self.sharding}'.",
        )
        require(
            (self.num_chunks > 1) == (self.schedule == "interleaved"),
            MachineError,
            "parallelism: num_chunks above 1 and schedule 'interleaved' belong together; found "
            f"{self.num_chunks} and '{self.schedule}'.",
        )
        require(
            self.schedule == "1f1b" or self.pipeline > 1,
            MachineError,
            f"parallelism: schedule '{self.schedule}' needs a pipeline of 2 stages or more; found {self.pipeline}.",
        )


class Compression(Value, frozen=True, kw_only=True):
    """What becomes of gradients before they travel. `rank` is PowerSGD's; `ratio` is the share of elements top-k keeps."""

    method: CompressionMethod = "none"
    rank: int = 4
    ratio: float = 0.01

    def __post_init__(self) -> None:
        check_range("compression", "rank", self.rank, 1, 4096)
        check_range("compression", "ratio", self.ratio, 1e-6, 1.0)


class Skew(Value, frozen=True, kw_only=True):
    """Ranks that are not alike. `sigma` is the relative standard deviation of a rank's time of a step, normally distributed.

    `slow_ranks` ranks take `slow_factor` times as long for their computation; one is enough to hold everybody.
    """

    sigma: float = 0.0
    slow_ranks: int = 0
    slow_factor: float = 1.0

    def __post_init__(self) -> None:
        check_range("skew", "sigma", self.sigma, 0.0, 1.0)
        check_range("skew", "slow_ranks", self.slow_ranks, 0, MAX_SIZE)
        check_range("skew", "slow_factor", self.slow_factor, 1.0, 100.0)


class Software(Value, frozen=True, kw_only=True):
    """What is assumed of the job's code. Speeds are relative to what the simulator's calibration says of the GPU.

    `host_us_per_operation`: how long the host takes to issue one operation of the description, which stands for several
    kernels of an eager framework; 0 for captured or compiled steps.
    """

    matmul_speed: float = 1.0
    memory_speed: float = 1.0
    host_us_per_operation: float = 0.0
    source: str = "assumed"

    def __post_init__(self) -> None:
        check_range("software", "matmul_speed", self.matmul_speed, 0.05, 2.0)
        check_range("software", "memory_speed", self.memory_speed, 0.05, 2.0)
        check_range("software", "host_us_per_operation", self.host_us_per_operation, 0.0, 10_000.0)


class Training(Value, frozen=True, kw_only=True):
    """One step: batches in sequences, and what overlaps. `gradient_bytes` are of one element on the wire.

    `overlap_data`: data-parallel collectives run beside the backward pass, gathers of parameters beside the forward pass.
    `overlap_tensor`: reductions of the backward pass run beside the matmuls of weight gradients. `overlap_pipeline`:
    activations travel beside the computation of the next micro-batch. `controls` are Counterpoint's.
    """

    micro_batch: int
    global_batch: int
    recompute: Recompute = "none"
    gradient_bytes: int = 4
    overlap_data: bool = True
    overlap_tensor: bool = True
    overlap_pipeline: bool = True
    controls: tuple[ControlName, ...] = ()

    def __post_init__(self) -> None:
        check_range("training", "micro_batch", self.micro_batch, 1, MAX_SIZE)
        check_range("training", "global_batch", self.global_batch, 1, MAX_GLOBAL_BATCH)
        check_range("training", "gradient_bytes", self.gradient_bytes, 1, 8)
        require(
            len(set(self.controls)) == len(self.controls),
            MachineError,
            f"training: controls must differ; found {', '.join(self.controls)}.",
        )


def _check_divides(what: str, number: int, by_what: str, divisor: int) -> None:
    require(
        number % divisor == 0,
        MachineError,
        f"{what} must be a multiple of {by_what} = {divisor}; found {number}.",
    )
