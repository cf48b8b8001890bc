"""The tensor-parallel linears of TransformerEngine (read in 2.20), by themselves and as Megatron-LM's core uses them (read
in 0.12 and 0.19).

`Linear` and `LayerNormLinear` run by operators in bf16 and other types that torch multiplies. Calls in fp8 or fp4 stay as
they are. Megatron-LM's classes return a bias as well, and count micro-batches. Nothing here imports TransformerEngine
before it finds one of its linears.
"""

import sys
from typing import Any, final

import torch
from torch import nn

from counterpoint.integrations.main_gradients import MainGradient, is_kept_elsewhere, main_gradient_of
from counterpoint.integrations.plain_linears import PlainLinear
from counterpoint.integrations.sequence_shards import Route, cast_for_matmul, runs_originally
from counterpoint.integrations.switched_hooks import Switch
from counterpoint.ops.dispatch import PLAIN_TYPES

ENGINE = "transformer_engine.pytorch."
OF_MEGATRON = "megatron.core.extensions.transformer_engine"
KINDS, MLP = ("Linear", "LayerNormLinear"), "LayerNormMLP"
# forwards of Megatron-LM's classes that call TransformerEngine's, and return a bias as well
WRAPPED = ("TELinear.forward", "TELayerNormColumnParallelLinear.forward")
# attributes of linears that TransformerEngine overlaps itself; those in the last line are of releases before 2
OVERLAPPED = (
    *("ub_overlap_ag_fprop", "ub_overlap_rs_fprop", "ub_overlap_ag_dgrad", "ub_overlap_rs_dgrad"),
    *("ub_bulk_dgrad", "ub_bulk_wgrad", "ub_overlap_ag", "ub_overlap_rs"),
    *("ub_split_ag", "ub_split_rs", "ub_atomic_gemm_ag", "ub_atomic_gemm_rs"),
)


def is_split(linear: Any) -> bool:
    """Return whether a module is a linear of TransformerEngine that several ranks share."""
    names = {each.__name__ for each in type(linear).__mro__ if each.__module__.startswith(ENGINE)}
    is_parallel = getattr(linear, "parallel_mode", None) in ("column", "row")
    is_parallel_mlp = MLP in names and getattr(linear, "set_parallel_mode", False)  # of two linears
    return bool(names) and getattr(linear, "tp_size", 1) > 1 and (is_parallel or is_parallel_mlp)


def refusal_of(linear: Any) -> str:
    """Return why a linear that `is_split` stays unchanged; nothing for one that operators multiply."""
    home = _home_class(linear)
    if home is None:
        return f"only TransformerEngine's {' and '.join(KINDS)} are supported, and this is a {type(linear).__name__}"
    if getattr(linear.forward, "__func__", None) is not vars(home)["forward"] and not _is_of_megatron(linear):
        return f"its forward is not that of TransformerEngine's {home.__name__}, and operators compute no other formula"
    if any(getattr(linear, name, False) for name in OVERLAPPED):
        return "TransformerEngine overlaps it itself. Leave it unchanged, or set tp_comm_overlap=False"
    if list(linear.weight_names) != ["weight"]:
        return f"its weight is split into {len(linear.weight_names)}. Set parameters_split=None, or fuse_qkv_params=True"
    if not getattr(linear, "tp_group_initialized", False) or linear.tp_group is None:
        return "it has no group yet. Call its set_tensor_parallel_group first"
    if getattr(linear, "return_layernorm_output", False):
        return "it returns the output of its norm as well, and operators do not. Set return_layernorm_output=False"
    store = getattr(linear, "wgrad_store", None)
    if store is not None and store.delay_wgrad_compute():
        return "it computes its weight's gradient later, and operators do not. Set delay_wgrad_compute=False"
    if getattr(linear, "symmetric_ar_type", None) is not None:
        return "TransformerEngine sums its outputs in symmetric memory. Leave it unchanged, or set symmetric_ar_type=None"
    if getattr(linear, "te_quant_params", None) is not None:
        return "its types are set for it alone, and may be of 8 bits. Leave it unchanged"
    return ""


def forward_of(linear: Any, switch: Switch, schedule: str) -> "EngineForward":
    """Return the object whose `run` replaces the forward of a linear of TransformerEngine."""
    home = _home_class(linear)
    assert home is not None, "only linears that are not refused come here"
    return EngineForward(linear, home.__module__, switch, Route(linear.tp_group.group_name, linear.tp_size, schedule))


@final
class EngineForward:
    """A linear of TransformerEngine: columns or rows, with whole tokens or a rank's, after a norm or without."""

    def __init__(self, linear: Any, home: str, switch: Switch, route: Route) -> None:
        self.linear, self._home, self.route = linear, home, route
        self._forward, self._switch, self._plain = linear.forward, switch, PlainLinear(route)
        self._is_of_megatron = _is_of_megatron(linear)
        self._norm = _norm_of(linear)

    def run(self, *given: Any, **named: Any) -> Any:
        """Return what the linear's own forward does, which runs where it is asked for more than a product."""
        linear, is_on, asked = self.linear, self._switch.holds, self._asked(given, named)
        is_scattered = linear.parallel_mode == "row" and linear.sequence_parallel
        num_parts = self.route.num_ranks if is_scattered else 1
        if (
            asked is None
            or not (is_on and self._sends(asked[0]))
            or runs_originally((asked[0].shape, 0, num_parts), self.route, self._obstacle(asked[0]))
        ):
            outputs = self._forward(*given, **named)
            if not is_on:
                self._switch.watch(outputs[0] if isinstance(outputs, tuple) else outputs)
            return outputs
        inp, is_first = asked
        main = self._main(is_first)
        if linear.parallel_mode == "row":
            product = self._plain.rows(inp, linear.weight, main, is_scattered=is_scattered)
        else:
            normed = inp if self._norm is None else self._normed(inp)
            product = self._plain.columns(normed, linear.weight, main, is_gathered=linear.sequence_parallel)
        return self._outputs(product)

    def _sends(self, inp: torch.Tensor) -> bool:
        """Return whether something is sent: for whole tokens of columns only their gradient is."""
        is_whole = self.linear.parallel_mode == "column" and not self.linear.sequence_parallel
        return not is_whole or (torch.is_grad_enabled() and inp.requires_grad)

    def _asked(self, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[torch.Tensor, bool | None] | None:
        """Return the input, and whether this is the first micro-batch; None for a call that asks for anything else."""
        linear, rest = self.linear, dict(named)
        inp = given[0] if given else rest.pop("x" if self._is_of_megatron else "inp", None)
        if self._is_of_megatron:
            is_first = None if linear.disable_parameter_transpose_cache else linear.is_first_microbatch
        else:
            is_first = given[1] if len(given) > 1 else rest.pop("is_first_microbatch", None)
        num_known = 1 if self._is_of_megatron else 2
        others = (*given[num_known:], *rest.values())
        is_plain = isinstance(inp, torch.Tensor) and all(each is None or each is False for each in others)
        return (inp, is_first) if is_plain else None

    def _obstacle(self, inp: torch.Tensor) -> str:
        """Return what TransformerEngine does besides multiplying by a plain weight; or nothing."""
        linear, engine = self.linear, sys.modules[self._home]
        if torch.compiler.is_compiling():
            return "a compiled call of TransformerEngine"
        if engine.FP8GlobalStateManager.is_fp8_enabled() or engine.FP8GlobalStateManager.is_fp8_calibration():
            return "a call in TransformerEngine's types of 8 or 4 bits"
        if type(linear.weight) not in PLAIN_TYPES or type(inp) not in PLAIN_TYPES:
            return "tensors that are not plain"
        if getattr(linear, "return_layernorm_output", False):
            return "a call that returns the output of the norm as well"
        if is_kept_elsewhere(linear.weight):
            return "a weight that sharded data parallelism keeps"
        if getattr(engine, "is_cpu_offload_enabled", bool)():
            return "activations that TransformerEngine moves to the host"
        if linear.fuse_wgrad_accumulation and getattr(linear.weight, "main_grad", None) is None:
            return "a weight without main_grad"
        return ""

    def _main(self, is_first: bool | None) -> MainGradient | None:
        """Return what takes the gradient of the weight; None if autograd does."""
        linear = self.linear
        return main_gradient_of(linear.weight, is_first=bool(is_first)) if linear.fuse_wgrad_accumulation else None

    def _normed(self, inp: torch.Tensor) -> torch.Tensor:
        """Return the input after TransformerEngine's own norm, with the parameters that the linear has now."""
        norm, linear = self._norm, self.linear
        if norm.weight is not linear.layer_norm_weight:
            norm.weight = linear.layer_norm_weight
            if linear.layer_norm_bias is not None:
                norm.bias = linear.layer_norm_bias
        normed: torch.Tensor = norm(inp)
        return normed

    def _outputs(self, product: torch.Tensor) -> Any:
        """Add the bias, or return it for the caller to add."""
        linear = self.linear
        bias = cast_for_matmul(linear.bias) if linear.use_bias else None
        if linear.apply_bias:
            product = product + bias
        if self._is_of_megatron:
            linear.is_first_microbatch = False
            return product, bias if linear.te_return_bias else None
        return (product, bias) if linear.return_bias else product


def _home_class(module: nn.Module) -> type | None:
    """Return the class of TransformerEngine whose forward a linear has; None of one that is not supported."""
    found = (each for each in type(module).__mro__ if each.__module__.startswith(ENGINE) and "forward" in vars(each))
    home = next(found, None)
    return home if home is not None and home.__name__ in KINDS else None


def _is_of_megatron(linear: Any) -> bool:
    """Return whether a linear is one of Megatron-LM's classes around TransformerEngine's."""
    forward: Any = getattr(linear.forward, "__func__", None)
    return getattr(forward, "__module__", "") == OF_MEGATRON and forward.__qualname__ in WRAPPED


def _norm_of(linear: Any) -> Any:
    """Return a norm of TransformerEngine like that of a linear, which lends its parameters in each call; None without."""
    if not hasattr(linear, "layer_norm_weight"):
        return None
    made = getattr(sys.modules[f"{ENGINE[:-1]}"], linear.normalization)
    kept = {"eps": linear.eps, "zero_centered_gamma": linear.zero_centered_gamma}
    return made(linear.layer_norm_weight.shape[0], device="meta", **kept)
