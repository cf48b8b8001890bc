"""`expert_parallel.overlap` on expert layers of Megatron-LM's core, against the library's all-to-alls."""

import itertools
from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from counterpoint.integrations import expert_parallel
from counterpoint.schedule import ScheduleDescription
from integration_sections import megatron_experts_double as double
from integration_sections.comparing import DEVICE, assert_close, assert_equal, refused, said_of

TOKENS, BATCH, FEATURES, PER_RANK = 9, 2, 16, 3
USUAL = {
    **{"kind": "grouped", "width": 24, "top": 2, "is_fused": False, "shared": "", "recomputes": False},
    **{"gated_linear_unit": True, "activation_func": functional.silu, "activation_func_clamp_value": None},
    **{"glu_linear_offset": 0.0, "add_bias_linear": False, "moe_permute_fusion": False, "dtype": torch.float64},
    **{"bias_activation_fusion": False, "moe_expert_capacity_factor": None},
}


class Layers(nn.Module):
    def __init__(self, **changed: Any) -> None:
        super().__init__()
        double.install_experts()
        config = SimpleNamespace(
            **{**USUAL, "features": FEATURES, "num_experts": PER_RANK * dist.get_world_size(), **changed}
        )
        config.moe_router_topk = config.top
        self.layers = nn.ModuleList(double.MoELayer(config) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            tokens = tokens + layer(tokens)[0]
        return tokens


def tokens_of(dtype: torch.dtype = torch.float64, num_tokens: int = TOKENS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(num_tokens, BATCH, FEATURES, generator=generator).to(DEVICE, dtype).requires_grad_()


def experts_of(model: nn.Module) -> list[Any]:
    """The weights of experts, in Megatron-LM's order."""
    return [each for name, each in model.named_parameters() if ".experts." in name and each.dim() == 2]


def give_main_gradients(model: nn.Module) -> None:
    for each in experts_of(model):
        dtype = torch.float64 if each.dtype == torch.float64 else torch.float32
        each.main_grad, each.grad_added_to_main_grad = torch.zeros_like(each, dtype=dtype), False


def move_into_buffer(model: nn.Module, *, is_reversed: bool) -> None:
    """Put all weights of experts into one buffer, in this order or, as Megatron-LM does, in the reverse one."""
    weights = experts_of(model)
    buffer = torch.empty(sum(each.numel() for each in weights), dtype=weights[0].dtype, device=DEVICE)
    start = 0
    for each in weights[::-1] if is_reversed else weights:
        part = buffer[start : start + each.numel()].view(each.shape)
        start += each.numel()
        part.copy_(each.detach())
        each.data = part


def results_of(model: nn.Module, tokens: torch.Tensor) -> list[torch.Tensor]:
    """The output, and all gradients of a pass: those of fused weights are what was added to their main gradients."""
    for each in model.parameters():
        each.grad = None
        if hasattr(each, "main_grad"):
            each.main_grad.zero_()
    tokens.grad = None
    output = model(tokens)
    output.square().sum().backward()
    found = [output.detach(), tokens.grad.clone()]
    for each in model.parameters():
        has_main = hasattr(each, "main_grad")
        if has_main:
            assert each.grad_added_to_main_grad
            assert each.grad is not None
            each.grad_added_to_main_grad = False
        gradient = each.main_grad if has_main else torch.zeros_like(each) if each.grad is None else each.grad
        found.append(gradient.clone())
    return found


def overlapped_right(model: nn.Module, schedule: ScheduleDescription | None = None) -> None:
    """Results on, off and after `undo`."""
    tokens = tokens_of()
    wanted = results_of(model, tokens)
    overlapped = expert_parallel.overlap(model, schedule=schedule)
    assert overlapped.taken == ["layers.0", "layers.1"]
    found = results_of(model, tokens)
    assert_close(found, wanted, 1e-12)
    assert_equal(results_of(model, tokens), found)
    assert overlapped.num_by_copies + overlapped.num_in_operators >= 8, overlapped
    overlapped.use(False)
    before = overlapped.num_by_copies
    assert_equal(results_of(model, tokens), wanted)
    assert overlapped.num_by_copies == before
    refused(lambda: expert_parallel.overlap(model), "already overlapped")
    overlapped.undo()
    assert_equal(results_of(model, tokens), wanted)
    assert not any("forward" in vars(each) or "preprocess" in vars(each) for each in model.modules())


def megatron_expert_layers() -> None:
    """Experts of one module or of many, with weights in any order, fused gradients, biases, shared experts, recomputed."""
    forms: Sequence[dict[str, Any]] = (
        {},
        {"add_bias_linear": True},
        {"shared": "after"},
        {"shared": "beside"},
        {"recomputes": True},
        {"gated_linear_unit": False, "activation_func": functional.gelu},
        {"activation_func": torch.sigmoid, "activation_func_clamp_value": 0.5, "glu_linear_offset": 1.0},
    )
    for (kind, is_fused), form in itertools.product(itertools.product(("grouped", "sequential"), (False, True)), forms):
        model = Layers(kind=kind, is_fused=is_fused, **form)
        if is_fused:
            give_main_gradients(model)
        overlapped_right(model)


def megatron_expert_buffers() -> None:
    """Weights in a buffer are viewed, in its order; copies give the same."""
    for kind, is_fused, is_reversed in itertools.product(("grouped", "sequential"), (False, True), (False, True)):
        model = Layers(kind=kind, is_fused=is_fused)
        if is_fused:
            give_main_gradients(model)
        move_into_buffer(model, is_reversed=is_reversed)
        overlapped_right(model, ScheduleDescription(pattern="all_peers", along="experts", chunks=2))
        overlapped_right(model, ScheduleDescription(pattern="sequential"))
    model = Layers()
    tokens = tokens_of()
    overlapped = expert_parallel.overlap(model)  # and the buffer comes later
    wanted = results_of(model, tokens)
    move_into_buffer(model, is_reversed=True)
    assert_close(results_of(model, tokens), wanted, 1e-12)
    overlapped.undo()


def megatron_experts_in_half_precision() -> None:
    """With gradients in single precision, results are as near to those of double precision as without operators."""
    model, exact = Layers(dtype=torch.bfloat16, is_fused=True), Layers(is_fused=True)
    for one, other in zip(exact.parameters(), model.parameters(), strict=True):
        one.data.copy_(other.data)
    for each in (model, exact):
        give_main_gradients(each)
        move_into_buffer(each, is_reversed=True)
    tokens = tokens_of(torch.bfloat16)
    wanted = results_of(exact, tokens.detach().double().requires_grad_())

    def error(found: list[torch.Tensor]) -> float:
        pairs = zip(found, wanted, strict=True)
        errors = [(one.double() - other).norm() / other.norm().clamp_min(1e-3) for one, other in pairs]
        return torch.stack(errors).mean().item()

    without = error(results_of(model, tokens))
    overlapped = expert_parallel.overlap(model)
    found = error(results_of(model, tokens))
    assert without < 5e-2
    assert found < 1.5 * without, (found, without)
    overlapped.undo()


def megatron_expert_evaluation() -> None:
    """Without gradients, with frozen experts, with one expert that is, and with few tokens."""
    model = Layers(shared="beside")
    tokens = tokens_of()
    with torch.no_grad():
        wanted = model(tokens)
    few = tokens_of(num_tokens=1 if dist.get_rank() else 0)
    wanted_of_few = results_of(model, few)
    overlapped = expert_parallel.overlap(model)
    with torch.no_grad():
        assert_close([model(tokens)], [wanted], 1e-12)
    assert_close(results_of(model, few), wanted_of_few, 1e-12)
    order = ["wait", "first", "second", "sum", "output"]
    steps = [each for each in model.layers[0].shared_experts.steps if each != "wait"]
    assert steps == order[1:] * (len(steps) // 4), steps
    overlapped.undo()
    del double.SharedExperts.wait_current_stream  # as in 0.14 to 0.17
    try:
        overlapped_right(Layers(shared="beside"))
    finally:
        double.SharedExperts.wait_current_stream = quiet  # type: ignore[method-assign, assignment]
    frozen_here = slice(None) if dist.get_rank() else slice(0)  # and on one rank
    for which, is_fused in itertools.product((slice(None), slice(1), frozen_here), (False, True)):
        frozen = Layers(is_fused=is_fused)
        if is_fused:
            give_main_gradients(frozen)
        move_into_buffer(frozen, is_reversed=True)
        for each in experts_of(frozen)[which]:
            each.requires_grad_(False)
            each.data = each.data.clone()  # a buffer of gradients has no place for it
            vars(each).pop("main_grad", None)
        wanted = results_of(frozen, tokens)
        overlapped = expert_parallel.overlap(frozen, schedule=ScheduleDescription(pattern="all_peers", along="experts"))
        assert_close(results_of(frozen, tokens), wanted, 1e-12)
        assert overlapped.num_by_copies, overlapped
        overlapped.undo()


def megatron_expert_micro_batches() -> None:
    """The first micro-batch replaces what main gradients hold, and data parallelism is told of each pass."""
    model = Layers(is_fused=True)
    give_main_gradients(model)
    gathered: list[str] = []

    def hook(module: nn.Module, *_: object) -> None:
        gathered.append(type(module).__name__)

    hook.__module__ = "megatron.core.distributed.distributed_data_parallel"
    linears = [linear for layer in model.layers for linear in (layer.experts.linear_fc1, layer.experts.linear_fc2)]
    for linear in linears:
        linear.register_forward_pre_hook(hook)
    wanted = results_of(model, tokens_of())
    before = list(gathered)
    overlapped = expert_parallel.overlap(model)
    gathered.clear()
    for linear in linears:
        linear.disable_parameter_transpose_cache, linear.is_first_microbatch = False, True
    for each in experts_of(model):
        each.main_grad.fill_(7)
    model(tokens_of()).square().sum().backward()
    assert gathered == before
    assert_close([each.main_grad for each in experts_of(model)], wanted_of(model, wanted), 1e-12)
    model(tokens_of()).square().sum().backward()
    assert_close([each.main_grad / 2 for each in experts_of(model)], wanted_of(model, wanted), 1e-12)
    assert not any(each.is_first_microbatch for each in linears)
    overlapped.undo()


def wanted_of(model: nn.Module, found: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of what `results_of` found, that of the experts' weights."""
    parameters = [id(each) for each in model.parameters()]
    return [found[2 + parameters.index(id(each))] for each in experts_of(model)]


def megatron_experts_that_stay() -> None:
    """What the operator does not compute stays Megatron-LM's."""
    changes = {
        "in fp8": {"fp8": "hybrid"},
        "drops or pads": {"moe_expert_capacity_factor": 1.0},
        "overlaps the all-to-alls of one micro-batch": {"overlap_moe_expert_parallel_comm": True},
        "inputs by probabilities": {"moe_apply_probs_on_input": True},
        "CUDA graphs": {"cuda_graph_impl": "local"},
    }
    for word, change in changes.items():
        refused(lambda change=change: expert_parallel.overlap(Layers(**change)), word)
    for word, spoil in {
        "spread over ranks": lambda layer: setattr(layer.token_dispatcher, "tp_size", 2),
        "preprocess of its MoEAlltoAll": lambda layer: setattr(layer.token_dispatcher, "preprocess", print),
        "a NoDispatcher sends": lambda layer: setattr(layer.token_dispatcher, "__class__", NoDispatcher),
        "forward of its OtherLayer": lambda layer: setattr(layer, "__class__", OtherLayer),
        "forward of its TEGroupedMLP": lambda layer: setattr(layer.experts, "forward", print),
        "are a Sequential": lambda layer: setattr(layer, "experts", nn.Sequential()),
        "whose formula is unknown": lambda layer: setattr(layer.experts, "linear_fc1", nn.Linear(2, 2)),
        "modules of its experts have hooks, which": lambda layer: layer.experts.linear_fc2.register_forward_hook(print),
        "have hooks other than": lambda layer: layer.experts.linear_fc2.register_forward_pre_hook(quiet),
        "this release of their framework is not known": lambda layer: delattr(layer.experts, "linear_fc2"),
        "are no plain tensors for each": lambda layer: setattr(layer.experts.linear_fc1, "single_grouped_bias", True),
    }.items():
        model = Layers()
        for layer in model.layers:
            spoil(layer)
        refused(lambda model=model: expert_parallel.overlap(model), word)
    model, take = Layers(), expert_parallel._take

    def fail_at_second(overlapped: Any, name: str, *rest: Any) -> None:
        take(overlapped, name, *rest)
        if name.startswith("layers.1"):
            raise RuntimeError("as a release that is not known")

    with patch.object(expert_parallel, "_take", fail_at_second), suppress(RuntimeError):
        expert_parallel.overlap(model)
    assert len(expert_parallel.waiting_experts(model)) == 2, "what failed half way is undone"
    assert expert_parallel.why_none_waits(Layers(fp8="hybrid")).startswith("layers.0: its matmuls are in fp8")
    assert len(expert_parallel.waiting_experts(Layers())) == 2
    mixed = Layers()
    mixed.layers[1].token_dispatcher.tp_size = 2
    said = said_of(lambda: expert_parallel.overlap(mixed).undo())
    assert dist.get_rank() or any("layers.* stays unchanged: each expert is spread" in each for each in said), said


class NoDispatcher(double.MoEAlltoAllTokenDispatcher):
    pass


class OtherLayer(double.MoELayer):
    def forward(self, hidden_states: torch.Tensor) -> Any:
        return super().forward(2 * hidden_states)


def quiet(*_: object) -> None:
    pass


def megatron_experts_elsewhere() -> None:
    """Calls in which more happens than the operator computes run as before, and count."""
    model = Layers(is_fused=True)
    give_main_gradients(model)
    wanted = results_of(model, tokens_of())
    overlapped = expert_parallel.overlap(model)
    weight = model.layers[0].experts.linear_fc1.weight0
    weight.get_main_grad = lambda: None  # as Megatron-FSDP's
    assert_close(results_of(model, tokens_of()), wanted, 1e-12)
    assert overlapped.num_by_library - overlapped.num_in_operators == 1
    del weight.get_main_grad
    main = weight.main_grad
    del weight.main_grad
    with torch.no_grad():
        model(tokens_of())
    weight.main_grad = main
    model.layers[0].token_dispatcher.drop_and_pad = True
    with torch.no_grad():
        model(tokens_of())
    model.layers[0].token_dispatcher.drop_and_pad = False
    handle = model.layers[0].experts.linear_fc1.register_forward_hook(quiet)
    with torch.no_grad():
        model(tokens_of())
    handle.remove()
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16), torch.no_grad():
        model(tokens_of())
    assert overlapped.num_by_library - overlapped.num_in_operators == 6
    overlapped.undo()
