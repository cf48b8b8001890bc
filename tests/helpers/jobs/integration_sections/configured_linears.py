"""`tensor_parallel.overlap` on linears whose layouts are configured, as in torchtitan 0.3: the same classes in short."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from counterpoint.integrations import tensor_parallel
from counterpoint.integrations.overlapped import Overlapped
from counterpoint.integrations.paths import Paths
from counterpoint.integrations.prepared_overlaps import PreparedOverlaps
from counterpoint.schedule import ScheduleDescription
from integration_sections.comparing import DEVICE, assert_close, assert_equal, refused

FEATURES, BATCH = 32, 2
PLAIN = "spmd_types"


class Kind(Enum):
    R = "R"
    I = "I"  # noqa: E741  spmd_types calls it so
    P = "P"


@dataclass(frozen=True)
class S:
    dim: int


@dataclass(frozen=True)
class Layout:
    tp: Kind | S

    def per_axis_spmd_types(self) -> dict[str, Kind | S]:
        return {"dp": S(0), "tp": self.tp}


R, I, P, PARTS, COLUMNS = Layout(Kind.R), Layout(Kind.I), Layout(Kind.P), Layout(S(1)), Layout(S(-1))  # noqa: E741
PLACEMENTS: dict[Kind | S, Placement] = {Kind.R: Replicate(), Kind.I: Replicate(), Kind.P: Partial()}


def placements_of(layout: Layout, num_dims: int) -> tuple[Placement]:
    kind = layout.tp
    return (Shard(kind.dim % num_dims) if isinstance(kind, S) else PLACEMENTS[kind],)


def redistributed(given: DTensor, layout: Layout) -> DTensor:
    wanted = placements_of(layout, given.ndim)
    return given if given.placements == wanted else given.redistribute(placements=wanted, async_op=True)


def redistributed_plain(given: Any, dims: "Dims", source: Layout | None, target: Layout | None) -> Any:
    """A rank's part of another layout. The gradient of what becomes R differs on each rank, and is still to be summed."""
    if source is None or target is None or source == target or dims.mesh is None:
        return given
    spread = DTensor.from_local(given, dims.mesh, placements_of(source, given.ndim), run_check=False)
    changed = spread.redistribute(placements=placements_of(target, given.ndim))
    return changed.to_local(grad_placements=[Partial()] if target == R else None)


@dataclass
class Config:
    state_shardings: dict[str, Layout] = field(default_factory=dict)
    in_src_shardings: dict[str, Layout] | None = None
    in_dst_shardings: dict[str, Layout] | None = None
    out_src_shardings: Layout | None = None
    out_dst_shardings: Layout | None = None


class Dims:
    def __init__(self, mesh: DeviceMesh | None, backend: str = "partial_dtensor", tp: int = 2) -> None:
        self.mesh, self.spmd_backend, self.tp = mesh, backend, tp

    def get_optional_mesh(self, name: str) -> DeviceMesh | None:
        return self.mesh if name == "tp" else None


class Module(nn.Module):
    """`parallelize` distributes weights, and puts a function that redistributes inputs and outputs before `forward`."""

    _sharding_config: Config | None = None

    def _cache_pos_arg_names(self) -> list[str]:
        return ["input"] if isinstance(self, nn.Linear) else ["x"]

    def parallelize(self, parallel_dims: Dims) -> None:
        for each in self.children():
            if isinstance(each, Module):
                each.parallelize(parallel_dims)
        config, mesh = self._sharding_config, parallel_dims.mesh
        if config is None:
            return
        for name, own in list(self.named_parameters(recurse=False)):
            if mesh is not None:
                spread = distribute_tensor(own.data, mesh, placements_of(config.state_shardings[name], own.ndim))
                is_plain = parallel_dims.spmd_backend == PLAIN
                setattr(self, name, nn.Parameter(spread.to_local().contiguous() if is_plain else spread))
        fn = self.forward

        def forward_with_redistribution(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self._redistribute_inputs(parallel_dims, args, kwargs)
            return self._redistribute_outputs(parallel_dims, fn(*args, **kwargs))

        self.forward = forward_with_redistribution

    def _redistribute_inputs(
        self, parallel_dims: Dims, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        config = self._sharding_config
        assert config is not None
        sources, targets = config.in_src_shardings or {}, config.in_dst_shardings or {}
        names = [name for name in self._cache_pos_arg_names() if name not in kwargs]
        given = dict(zip(names, args, strict=False)) | kwargs
        for name in given:
            value = given[name]
            if parallel_dims.spmd_backend == PLAIN:
                given[name] = redistributed_plain(value, parallel_dims, sources.get(name), targets.get(name))
                continue
            if name in sources:
                wanted = placements_of(sources[name], value.ndim)
                if not isinstance(value, DTensor):
                    value = DTensor.from_local(value, parallel_dims.mesh, wanted, run_check=False)
                if value.placements != wanted:
                    raise ValueError(f"the input has placements {value.placements}, but in_src_shardings expects {wanted}")
            if name in targets:
                value = redistributed(value, targets[name])
            given[name] = value
        return tuple(given.pop(name) for name in names), given

    def _redistribute_outputs(self, parallel_dims: Dims, outputs: Any) -> Any:
        config = self._sharding_config
        assert config is not None
        source, target = config.out_src_shardings, config.out_dst_shardings
        if parallel_dims.spmd_backend == PLAIN:
            return redistributed_plain(outputs, parallel_dims, source, target)
        if source is not None and outputs.placements != placements_of(source, outputs.ndim):
            raise ValueError(f"the output has placements {outputs.placements}, but out_src_shardings expects {source}")
        return outputs if target is None else redistributed(outputs, target)


class Linear(nn.Linear, Module):
    pass


class Doubled(Linear):
    """A linear of another formula, as quantized ones are."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def column(features: int, *, bias: bool = False, kind: type[Linear] = Linear) -> Linear:
    made = kind(FEATURES, features, bias=bias)
    weights = {"weight": Layout(S(0)), "bias": Layout(S(0))}
    made._sharding_config = Config(state_shardings=weights, out_src_shardings=COLUMNS)
    return made


def row(features: int, output: Layout, *, bias: bool = False) -> Linear:
    made = Linear(features, FEATURES, bias=bias)
    weights = {"weight": Layout(S(1)), "bias": R}
    made._sharding_config = Config(state_shardings=weights, out_src_shardings=P, out_dst_shardings=output)
    return made


class Projections(Module):
    """It has no configuration of its own, as torchtitan's has none."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = column(64, bias=True), column(64), column(64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        heads = x.shape[0], x.shape[1], -1, 8
        return tuple(linear(x).view(heads) for linear in (self.wq, self.wk, self.wv))


class Attention(Module):
    def __init__(self, activations: Layout) -> None:
        super().__init__()
        self.qkv_linear, self.wo = Projections(), row(64, activations, bias=True)
        self._sharding_config = Config(in_src_shardings={"x": activations}, in_dst_shardings={"x": R})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv_linear(x)
        return self.wo((torch.tanh(q) * k + v).flatten(2))


class FeedForward(Module):
    def __init__(self, activations: Layout) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = column(96), row(96, activations), column(96)
        self._sharding_config = Config(in_src_shardings={"x": activations}, in_dst_shardings={"x": R})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Block(Module):
    def __init__(self, activations: Layout) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(activations), FeedForward(activations)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.feed_forward(x)


TAKEN = ["attention.qkv_linear.wq", "attention.qkv_linear.wk", "attention.qkv_linear.wv", "attention.wo"]
TAKEN += [f"feed_forward.{name}" for name in ("w1", "w2", "w3")]


@cache
def whole_mesh() -> DeviceMesh:
    """One object, for torch.compile tells equal meshes apart."""
    return init_device_mesh(DEVICE.type, (dist.get_world_size(),), mesh_dim_names=("tp",))


def block_of(activations: Layout, mesh: DeviceMesh | None = None) -> Block:
    torch.manual_seed(0)
    block = Block(activations).to(DEVICE, torch.float64)
    block.parallelize(Dims(mesh or whole_mesh()))
    return block


def results_of(
    module: nn.Module,
    activations: Layout,
    mesh: DeviceMesh | None = None,
    *,
    run: Callable[..., Any] | None = None,
    tokens: int = 4,
    is_plain: bool = False,
) -> list[torch.Tensor]:
    """Output, and gradients of the input and of the parameters: whole ones of DTensors, or this rank's parts with plain
    tensors.
    """
    mesh = mesh or whole_mesh()
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(BATCH, tokens * mesh.size(), FEATURES, generator=generator, dtype=torch.float64).to(DEVICE)
    given = distribute_tensor(whole, mesh, placements_of(activations, 3))
    given = (given.to_local().clone() if is_plain else given).requires_grad_()
    module.zero_grad()
    output = (module if run is None else run)(given)
    output.pow(2).sum().backward()
    found = [output.detach(), given.grad, *(each.grad for each in module.parameters())]
    if is_plain:
        return [each.to_local() if isinstance(each, DTensor) else each for each in found if each is not None]
    return [each.full_tensor() for each in found if isinstance(each, DTensor)]


def num_calls_of(overlapped: Overlapped) -> int:
    return overlapped.num_by_copies + overlapped.num_by_library


def forwards_of(module: nn.Module) -> list[object]:
    """What was put before classes' functions, and hooks."""
    names = ("forward", "_redistribute_inputs", "_forward_hooks", "_forward_pre_hooks")
    return [list(found.items()) if isinstance(found, dict) else found for found in _held(module, names)]


def _held(module: nn.Module, names: tuple[str, ...]) -> list[Any]:
    return [vars(each).get(name) for each in module.modules() for name in names]


def overlapped_right(
    block: Block, activations: Layout, wanted: list[torch.Tensor], num_calls: int, *, is_plain: bool = False
) -> Overlapped:
    """All linears of a block are taken, and results are those without us, the same bits again, and under checkpointing."""
    results = partial(results_of, block, activations, is_plain=is_plain)
    assert len(tensor_parallel.waiting_linears(block)) == 7
    overlapped = tensor_parallel.overlap(block)
    assert overlapped.taken == TAKEN, overlapped.refused
    found = results()
    assert_close(found, wanted, 1e-12)
    assert num_calls_of(overlapped) == num_calls, "neighbors share a gather, or a sum"
    assert overlapped.num_by_library == overlapped.num_in_operators
    assert_equal(results(), found)
    assert_close(results(run=lambda x: checkpoint(block, x, use_reentrant=False)), found, 1e-12)
    return overlapped


def undone_right(
    block: Block, activations: Layout, wanted: list[torch.Tensor], num_calls: int, *, is_plain: bool = False
) -> None:
    """Results are to the bit those before, and the block can be overlapped again, by copies."""
    assert_equal(results_of(block, activations, is_plain=is_plain), wanted)
    by_copies = tensor_parallel.overlap(block, schedule=ScheduleDescription(pattern="one_peer", chunks=2))
    assert_close(results_of(block, activations, is_plain=is_plain), wanted, 1e-12)
    assert by_copies.num_by_copies == num_calls


def tensor_parallel_configured() -> None:
    """Outputs and gradients are those without us, of parts of the sequence and whole; off, and after `undo`, to the bit."""
    for activations, num_calls in ((PARTS, 8), (I, 4)):
        block = block_of(activations)
        before, wanted = forwards_of(block), results_of(block, activations)
        overlapped = overlapped_right(block, activations, wanted, num_calls)
        assert not tensor_parallel.waiting_linears(block)
        refused(lambda block=block: tensor_parallel.overlap(block), "wq is already overlapped")
        overlapped.use(False)
        num_before = num_calls_of(overlapped)
        assert_equal(results_of(block, activations), wanted)
        assert num_calls_of(overlapped) == num_before
        overlapped.undo()
        assert forwards_of(block) == before
        undone_right(block, activations, wanted, num_calls)
    prepared, block = PreparedOverlaps(Paths(overlaps_matmuls=True)), block_of(PARTS)
    prepared.prepare([block])
    (offer,) = prepared.offers()
    assert offer.what == "7 tensor-parallel linears", "`run` takes them"
    uneven = block_of(PARTS)
    wanted = results_of(uneven, PARTS, tokens=1)
    tensor_parallel.overlap(uneven)
    assert_close(results_of(uneven, PARTS, tokens=1), wanted, 1e-12)


def overlapped_with_fsdp_right(build: Callable[[Layout, DeviceMesh], Block], *, is_plain: bool = False) -> None:
    mesh = init_device_mesh(DEVICE.type, (2, dist.get_world_size() // 2), mesh_dim_names=("fsdp", "tp"))
    results = []
    for when in ("never", "before", "after"):
        block = build(PARTS, mesh["tp"])
        if when == "before":
            assert tensor_parallel.overlap(block).taken == TAKEN
        fully_shard(block, mesh=mesh["fsdp"])
        if when == "after":
            overlapped = tensor_parallel.overlap(block)
            assert overlapped.taken == TAKEN
            refused(lambda block=block: tensor_parallel.overlap(block), "wq is already overlapped")
        results.append(results_of(block, PARTS, mesh["tp"], is_plain=is_plain))
    assert num_calls_of(overlapped) == 8
    assert_close(results[1], results[0], 1e-12)
    assert_equal(results[2], results[1])


def tensor_parallel_configured_with_fsdp() -> None:
    """`overlap` may come before `fully_shard` or after it."""
    overlapped_with_fsdp_right(block_of)


def tensor_parallel_configured_compiled() -> None:
    """A block is one graph, with operators and, after a switch, without them."""
    for activations in (PARTS, I):
        block = block_of(activations)
        wanted = results_of(block, activations)
        overlapped = tensor_parallel.overlap(block)
        block.compile(backend="aot_eager", fullgraph=True)  # as torchtitan does
        found = results_of(block, activations)
        assert_close(found, wanted, 1e-12)
        assert_equal(results_of(block, activations), found)
        num_calls = num_calls_of(overlapped)
        assert num_calls == 2 * (8 if activations == PARTS else 4)
        overlapped.use(False)
        assert_close(results_of(block, activations), wanted, 1e-12)
        assert num_calls_of(overlapped) == num_calls
        torch._dynamo.reset()


class Routed(FeedForward):
    """It gathers for a router, too, which asks for a whole input."""

    def __init__(self) -> None:
        super().__init__(PARTS)
        self.router = Linear(FEATURES, 8, bias=False)
        self.router._sharding_config = Config(state_shardings={"weight": R}, in_src_shardings={"input": R})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).sum(-1, keepdim=True)
        assert isinstance(weights, DTensor)
        # torch 2.11 cannot flatten the router's gradient as parts, so it is made whole on its way back
        return super().forward(x) * weights.redistribute(placements=[Shard(1)])


class Local(FeedForward):
    """It takes a rank's part of its whole input, which is all of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(x, DTensor)
        return super().forward(x) * x.to_local().square().mean().item()


class Mixed(FeedForward):
    """One of its linears has another formula."""

    def __init__(self) -> None:
        super().__init__(PARTS)
        self.w3 = column(96, kind=Doubled)


class Headed(Block):
    """Its head gets an input that is whole."""

    def __init__(self) -> None:
        super().__init__(PARTS)
        self.head = column(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        assert isinstance(found, DTensor)
        return self.head(found.redistribute(placements=[Replicate()]))


def tensor_parallel_configured_in_part() -> None:
    """What is refused stays unchanged, with the reason, and so does what gathers for it; the rest is taken."""
    for build, name, taken, reason in (
        (Routed, "w1", ["w2"], "the Routed around it gathers its input, but router within needs it whole"),
        (lambda: Local(PARTS), "w1", ["w2"], "but its forward takes a rank's part of DTensors"),
        (Mixed, "w1", ["w2"], "the Mixed around it gathers its input, but w3 within needs it whole"),
        (Mixed, "w3", ["w2"], "its forward is not that of torch.nn.Linear"),
        (Headed, "head", TAKEN, "its input arrives whole, and no module around it gathers it or sums its gradient"),
    ):
        torch.manual_seed(0)
        model = build().to(DEVICE, torch.float64)
        model.parallelize(Dims(whole_mesh()))
        wanted = results_of(model, PARTS)
        overlapped = tensor_parallel.overlap(model)
        assert overlapped.taken == taken
        assert reason in overlapped.refused[name], overlapped.refused
        assert_close(results_of(model, PARTS), wanted, 1e-12)


def tensor_parallel_configured_refused() -> None:
    """Layouts and backends that are not supported are refused in one line."""
    ends = Config(state_shardings={"weight": Layout(S(0))}, out_src_shardings=COLUMNS, out_dst_shardings=R)
    takes = Config(
        state_shardings={"weight": Layout(S(0))}, in_src_shardings={"input": PARTS}, in_dst_shardings={"input": R}
    )
    for config, reason in (
        (ends, r"makes its output R of -1, but only its own part is supported"),
        (takes, r"makes its input R of 1, which is not supported"),
        (Config(state_shardings={"weight": R}), r"its weight is R, neither column- nor row-parallel"),
        (Config(state_shardings={"weight": Layout(S(1))}, out_src_shardings=P), r"its output stays P, so it sends nothing"),
    ):
        model = nn.Sequential(Linear(FEATURES, 64, bias=False)).to(DEVICE)
        model[0]._sharding_config = config
        model[0].parallelize(Dims(whole_mesh()))
        refused(lambda model=model: tensor_parallel.overlap(model), reason)
        assert not tensor_parallel.waiting_linears(model)
    backend = "full_dtensor"
    block = Block(PARTS).to(DEVICE)
    block.parallelize(Dims(None, backend))
    refused(lambda: tensor_parallel.overlap(block), f"by its backend {backend}, but only partial_dtensor and spmd_types")
    prepared = PreparedOverlaps(Paths(overlaps_matmuls=True))
    prepared.prepare([block])
    (offer,) = prepared.offers()
    assert backend in offer.refusal, "`run` says why it takes nothing"
    for each in (backend, "spmd_types"):
        alone = Block(PARTS).to(DEVICE)
        alone.parallelize(Dims(None, each, tp=1))
        refused(lambda alone=alone: tensor_parallel.overlap(alone), "has no linear that parallelize_module has split")
        assert not tensor_parallel.why_none_waits(alone)
