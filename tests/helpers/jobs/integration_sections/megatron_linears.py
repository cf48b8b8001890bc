"""`tensor_parallel.overlap` on linears of Megatron-LM's core and of TransformerEngine, against the library's collectives."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from counterpoint.integrations import tensor_parallel
from counterpoint.integrations.overlapped import Overlapped
from integration_sections import megatron_double as double
from integration_sections.comparing import DEVICE, assert_close, assert_equal, refused

FEATURES, COLUMNS, TOKENS, BATCH = 16, 32, 12, 2
TIED = "weight that the caller gives"
Results = list[torch.Tensor]


def options(**changed: Any) -> SimpleNamespace:
    double.install()
    usual = {"is_sequence": True, "is_fused": False, "has_bias": False, "skips_bias": False, "norm": "RMSNorm"}
    return SimpleNamespace(**{**usual, "dtype": torch.float64, **changed})


class Megatron(nn.Module):
    """Of columns, of rows, and of columns whose weight is another's, as an output layer's."""

    def __init__(self, asked: SimpleNamespace) -> None:
        super().__init__()
        self.fc1 = double.ColumnParallelLinear(FEATURES, COLUMNS, asked)
        self.fc2 = double.RowParallelLinear(COLUMNS, FEATURES, asked)
        self.output = double.ColumnParallelLinear(FEATURES, COLUMNS, asked)
        self.output.bias, self.tied = None, self.output.weight
        self.output.weight = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        for linear in (self.fc1, self.fc2):
            tokens, bias = linear(tokens)
            tokens = torch.tanh(tokens if bias is None else tokens + bias)
        return self.output(tokens, weight=self.tied, runtime_gather_output=None)[0]


class Engine(nn.Module):
    """Of columns after a norm, and of rows: TransformerEngine's own, or Megatron-LM's around them."""

    def __init__(self, asked: SimpleNamespace, kind: type[double.Linear] = double.Linear) -> None:
        super().__init__()
        self.up = double.LayerNormLinear(FEATURES, COLUMNS, "column", asked)
        self.down = kind(COLUMNS, FEATURES, "row", asked)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        for linear in (self.up, self.down):
            given = linear(tokens)
            tokens, bias = given if isinstance(given, tuple) else (given, None)
            tokens = torch.tanh(tokens if bias is None else tokens + bias)
        return tokens


def tokens_of(asked: SimpleNamespace, seed: int = 0) -> torch.Tensor:
    """This rank's part of the sequence, or all of it."""
    whole = torch.randn(TOKENS, BATCH, FEATURES, dtype=asked.dtype, generator=torch.Generator().manual_seed(seed))
    part = whole.tensor_split(dist.get_world_size())[dist.get_rank()] if asked.is_sequence else whole
    return part.to(DEVICE).requires_grad_()


def give_main_gradients(model: nn.Module, asked: SimpleNamespace) -> None:
    for each in model.parameters():
        if asked.is_fused and each.dim() == 2:
            each.main_grad, each.grad_added_to_main_grad = torch.zeros_like(each, dtype=torch.float64), False


def results_of(model: nn.Module, asked: SimpleNamespace) -> Results:
    """The output, and the gradients of a pass: those of fused weights are what was added to their main gradients."""
    tokens = tokens_of(asked)
    for each in model.parameters():
        each.grad = None
        if hasattr(each, "main_grad"):
            each.main_grad.zero_()
    output = model(tokens)
    output.square().sum().backward()
    found = [output.detach(), tokens.grad]
    for each in model.parameters():
        if hasattr(each, "main_grad"):
            assert each.grad_added_to_main_grad, "Megatron-LM's hooks add a gradient again otherwise"
            assert each.grad is not None
            each.grad_added_to_main_grad = False
        found.append(each.main_grad.clone() if hasattr(each, "main_grad") else each.grad)
    return found


def num_calls_of(overlapped: Overlapped) -> int:
    return overlapped.num_by_copies + overlapped.num_in_operators


def overlapped_right(make: Callable[[SimpleNamespace], nn.Module], asked: SimpleNamespace, num_calls: int) -> None:
    """Results on, off and after `undo`."""
    model = make(asked)
    give_main_gradients(model, asked)
    wanted = results_of(model, asked)
    overlapped = tensor_parallel.overlap(model)
    limit = 1e-12 if asked.dtype == torch.float64 else 2e-2
    assert_close(results_of(model, asked), wanted, limit)
    assert num_calls_of(overlapped) == num_calls, (num_calls_of(overlapped), overlapped)
    overlapped.use(False)
    assert_equal(results_of(model, asked), wanted)
    refused(lambda: tensor_parallel.overlap(model), "already overlapped")
    overlapped.undo()
    assert_equal(results_of(model, asked), wanted)


def megatron_linears() -> None:
    """With and without sequence parallelism, fused gradients, and biases that are added or returned."""
    for is_sequence, is_fused, (has_bias, skips_bias) in itertools.product(
        (True, False), (True, False), ((False, False), (True, False), (True, True))
    ):
        asked = options(is_sequence=is_sequence, is_fused=is_fused, has_bias=has_bias, skips_bias=skips_bias)
        overlapped_right(Megatron, asked, 6 if is_sequence else 3)  # whole tokens: one sum forward, two of gradients


def megatron_linears_of_engine() -> None:
    """TransformerEngine's linears, by themselves and within Megatron-LM's."""
    for is_sequence, is_fused, norm, (has_bias, skips_bias) in itertools.product(
        (True, False), (True, False), ("RMSNorm", "LayerNorm"), ((False, False), (True, False), (True, True))
    ):
        kept = {"is_sequence": is_sequence, "is_fused": is_fused, "norm": norm}
        asked = options(**kept, has_bias=has_bias, skips_bias=skips_bias)
        overlapped_right(Engine, asked, 4 if is_sequence else 2)
        overlapped_right(lambda each: Engine(each, double.TELinear), asked, 4 if is_sequence else 2)


def megatron_first_micro_batch() -> None:
    """The first micro-batch replaces what main gradients hold, and later ones add to it."""
    asked = options(is_fused=True)
    model = Engine(asked)
    give_main_gradients(model, asked)
    weights = model.up.weight, model.down.weight

    def totals() -> Results:
        for each in weights:
            each.main_grad.fill_(7)
        for is_first in (True, False, None):
            between = model.up(tokens_of(asked, 3), is_first_microbatch=is_first)
            model.down(between, is_first_microbatch=is_first).square().sum().backward()
        return [each.main_grad.clone() for each in weights]

    wanted = totals()
    overlapped = tensor_parallel.overlap(model)
    assert_close(totals(), wanted, 1e-12)
    overlapped.undo()
    wrapped = Engine(asked, double.TELinear)
    give_main_gradients(wrapped, asked)
    tensor_parallel.overlap(wrapped)
    wrapped(tokens_of(asked)).sum().backward()
    assert not wrapped.down.is_first_microbatch


def megatron_whole_operators() -> None:
    """While something has to see operators whole, gradients go to main gradients, too."""
    for is_sequence in (True, False):
        asked = options(is_fused=True, is_sequence=is_sequence)
        model = Megatron(asked)
        give_main_gradients(model, asked)
        wanted = results_of(model, asked)
        tensor_parallel.overlap(model)
        with FlopCounterMode(display=False) as counted:
            assert_close(results_of(model, asked), wanted, 1e-12)
        assert counted.get_total_flops() > 0
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
            assert_close(results_of(model, asked), wanted, 1e-12)
        name = "all_gather_matmul_backward" if is_sequence else "column_parallel_matmul_backward"
        assert f"counterpoint::{name}" in {each.name for each in profiled.events()}


def megatron_other_calls() -> None:
    """What the frameworks do beyond multiplying is left to them."""
    asked = options(is_fused=True)
    model = Megatron(asked)
    overlapped = tensor_parallel.overlap(model)
    give_main_gradients(model, asked)
    whole = model.fc1(tokens_of(asked), runtime_gather_output=True)[0]
    assert whole.shape == (TOKENS, BATCH, COLUMNS)
    model.fc1.config._cpu_offloading_context = object()
    model.fc1(tokens_of(asked))
    model.fc1.config._cpu_offloading_context = None
    model.fc1.sequence_parallel = False  # and no sum of gradients: as Megatron-LM's inference has it
    model.fc1(tokens_of(asked))
    model.fc1.sequence_parallel = True
    del model.fc1.weight.main_grad
    model.fc1(tokens_of(asked))
    assert num_calls_of(overlapped) == 0
    assert overlapped.num_by_library == 3, "the one that sends nothing does not count"
    give_main_gradients(model, asked)
    model.fc1(tokens_of(asked)[:0])
    assert overlapped.num_by_library == 4
    model.fc1.weight.get_main_grad = lambda: None  # as Megatron-FSDP's
    model.fc1(tokens_of(asked))
    del model.fc1.weight.get_main_grad
    assert overlapped.num_by_library == 5
    engine = Engine(asked)
    overlapped = tensor_parallel.overlap(engine)
    give_main_gradients(engine, asked)
    before = num_calls_of(overlapped)
    engine.up.return_layernorm_output = True
    engine.up(tokens_of(asked))
    engine.up.return_layernorm_output = False
    engine.up(tokens_of(asked), None, True)
    for name in ("is_fp8", "is_offloading"):
        setattr(double.Engine, name, True)
        engine(tokens_of(asked))
        setattr(double.Engine, name, False)
    engine.down(engine.up(tokens_of(asked), fp8_output=True).detach(), fp8_output=True)
    assert num_calls_of(overlapped) == before
    assert "8 or 4 bits" in repr(overlapped)
    engine(tokens_of(asked))
    assert num_calls_of(overlapped) == before + 2


def saved_by(linear: nn.Module, tokens: torch.Tensor) -> list[torch.Tensor]:
    """What a linear saves for its backward pass."""
    saved: list[torch.Tensor] = []

    def save(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, save):
        linear(tokens)
    return saved


def megatron_saved_tensors() -> None:
    """Backward uses the weight as it is then. For it weights are kept themselves, and no tokens if they are frozen."""
    for is_sequence in (True, False):
        asked = options(is_sequence=is_sequence)
        model = Megatron(asked)
        wanted = results_of(model, asked)
        tensor_parallel.overlap(model)
        tokens = tokens_of(asked)
        output = model(tokens)
        for weight in (model.fc1.weight, model.fc2.weight):
            held, weight.data = weight.data, weight.data.clone()
            held.fill_(torch.nan)
        output.square().sum().backward()
        assert_close([tokens.grad], wanted[1:2], 1e-12)
        for weight in (model.fc1.weight, model.fc2.weight):
            weight.requires_grad_(False)
        kept = saved_by(model.fc1, tokens_of(asked)) + saved_by(model.fc2, model.fc1(tokens_of(asked))[0])
        weights = [each for each in kept if each is model.fc1.weight or each is model.fc2.weight]
        assert len(weights) == 2
        assert not sum(each.numel() for each in kept if not isinstance(each, nn.Parameter))
        assert_close(results_of(model, asked)[:2], wanted[:2], 1e-12)


def megatron_refusals() -> None:
    """Each with its reason, one line."""
    changes: tuple[tuple[type[nn.Module], str, str, Any, str], ...] = (
        (Megatron, "fc1", "explicit_expert_comm", True, "experts send their tokens"),
        (Megatron, "fc1", "gtp_remat_size", 2, "GTP"),
        (Megatron, "fc1", "sequence_parallel", False, "neither gathers"),
        (Megatron, "fc2", "input_is_parallel", False, "Set input_is_parallel"),
        (Megatron, "fc2", "forward", lambda tokens: (tokens, None), "no other formula"),
        (Megatron, "fc2", "explicit_expert_comm", None, "release of Megatron-LM"),
        (Engine, "up", "ub_overlap_ag_fprop", True, "tp_comm_overlap=False"),
        (Engine, "up", "return_layernorm_output", True, "output of its norm"),
        (Engine, "down", "weight_names", ["query_weight", "key_weight"], "split into 2"),
        (Engine, "down", "tp_group_initialized", False, "no group yet"),
        (Engine, "down", "tp_group", None, "no group yet"),
        (Engine, "up", "normalization", "GroupNorm", "release of Megatron-LM"),
        (Engine, "down", "wgrad_store", SimpleNamespace(delay_wgrad_compute=lambda: True), "delay_wgrad_compute"),
        (Engine, "down", "symmetric_ar_type", "one_shot", "symmetric memory"),
        (Engine, "down", "te_quant_params", object(), "8 bits"),
        (Engine, "down", "forward", lambda tokens: tokens, "no other formula"),
    )
    for kind, name, attribute, value, reason in changes:
        model = kind(options())
        if value is None and attribute != "tp_group":
            delattr(model.get_submodule(name), attribute)
        else:
            setattr(model.get_submodule(name), attribute, value)
        waiting = tensor_parallel.waiting_linears(model)
        assert waiting
        if attribute != "normalization":  # which shows when it is taken
            assert model.get_submodule(name) not in waiting
            assert reason in tensor_parallel.why_none_waits(model)
        overlapped = tensor_parallel.overlap(model)
        assert reason in overlapped.refused[name], overlapped.refused
        assert name not in overlapped.taken
        overlapped.undo()
    changed = Megatron(options())
    changed.fc1.__class__ = type("Patched", (double.ColumnParallelLinear,), {"_forward_impl": lambda *_: None})
    double.ColumnParallelLinear._forward_impl = lambda *_: None  # type: ignore[attr-defined]
    assert "no other formula" in tensor_parallel.overlap(changed).refused["fc1"]
    del double.ColumnParallelLinear._forward_impl  # type: ignore[attr-defined]
    head = Engine(options(), double.TELinear)
    double.TELinear.forward.__qualname__ = "TELMHeadColumnParallelLinear.forward"
    assert "no other formula" in tensor_parallel.overlap(head).refused["down"]
    double.TELinear.forward.__qualname__ = "TELinear.forward"
    mlp = Engine(options())
    mlp.up.__class__ = type(
        "LayerNormMLP", (double.LayerNormLinear,), {"__module__": double.NORMED, "forward": lambda *_: 0}
    )
    mlp.up.parallel_mode, mlp.up.set_parallel_mode = None, True
    assert "this is a LayerNormMLP" in tensor_parallel.overlap(mlp).refused["up"]
    other = Engine(options())
    type(other.down).__name__ = "GroupedLinear"
    try:
        assert "only TransformerEngine's Linear and LayerNormLinear" in tensor_parallel.overlap(other).refused["down"]
    finally:
        type(other.down).__name__ = "Linear"
