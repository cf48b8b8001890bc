"""The expert layers of Megatron-LM's core (read in 0.14 to 0.20): `MoELayer` with `MoEAlltoAllTokenDispatcher`.

Megatron-LM's dispatcher sorts tokens by expert, sends them, and sorts them again at their experts; results go back the same
way. While the switch is on, the dispatcher sorts tokens and adds up results on their own rank only, and the experts' forward
does everything between, by one operator. Megatron-LM multiplies an expert's activation by the token's probability, which
travels along. Here the result is multiplied by it, where it is added up, as in core 0.12.

Every weight of an expert is a parameter of its own (`separate_weights.py`). Nothing here imports Megatron-LM.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import nn

from counterpoint.integrations.expert_layouts import HIDES_ALREADY
from counterpoint.integrations.main_gradients import is_kept_elsewhere, main_gradient_of
from counterpoint.integrations.separate_weights import are_reversed, join, stacked, totals_of
from counterpoint.integrations.switched_hooks import Switch
from counterpoint.ops import expert_ffn, gated_silu
from counterpoint.ops.dispatch import PLAIN_TYPES
from counterpoint.ops.operator_call import expert_calls_of

DISPATCHER = "MoEAlltoAllTokenDispatcher"
GROUPED, SEQUENTIAL, MLP = "TEGroupedMLP", "SequentialMLP", "MLP"
HALVES = ("linear_fc1", "linear_fc2")
MEGATRON, DATA_PARALLEL = "megatron.core.", "megatron.core.distributed."
# the classes of linears that experts have
LINEARS = {
    GROUPED: ("TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"),
    SEQUENTIAL: ("ColumnParallelLinear", "RowParallelLinear", "TEColumnParallelLinear", "TERowParallelLinear"),
}
# methods of the dispatcher that are replaced, and those of the layer that call them, of which releases have some
REPLACED = (
    *("dispatch_preprocess", "preprocess", "_maybe_dtoh_and_synchronize", "token_dispatch", "dispatch_postprocess"),
    *("combine_preprocess", "token_combine", "combine_postprocess"),
)
CALLING = (
    *("forward", "route", "router_and_preprocess", "preprocess", "dispatch", "combine", "postprocess"),
    *("experts_compute", "routed_experts_compute"),
)
CAPTURED = "its calls are captured in CUDA graphs, but the host has to read counts. Leave it unchanged"
# Settings with which a layer does something else, the values with which it does not, and what to do
SETTINGS: dict[str, tuple[tuple[object, ...], str]] = {
    "overlap_moe_expert_parallel_comm": ((False,), HIDES_ALREADY),
    "fp8": ((None, False), "its matmuls are in fp8, and operators multiply in the type of the weights. Leave it unchanged"),
    "fp4": ((None, False), "its matmuls are in fp4, and operators multiply in the type of the weights. Leave it unchanged"),
    "moe_expert_capacity_factor": ((None,), "it drops or pads tokens. Leave out moe_expert_capacity_factor"),
    "moe_pad_expert_input_to_capacity": ((False,), "it pads tokens. Leave out moe_pad_expert_input_to_capacity"),
    "moe_router_padding_for_fp8": ((False,), "it pads tokens. Leave out moe_router_padding_for_fp8"),
    "moe_router_padding_for_quantization": ((False,), "it pads tokens. Leave out moe_router_padding_for_quantization"),
    "moe_apply_probs_on_input": ((False,), "it multiplies its inputs by probabilities. Leave out moe_apply_probs_on_input"),
    "moe_mlp_glu_interleave_size": ((None,), "its gate and up are interleaved. Leave out moe_mlp_glu_interleave_size"),
    "moe_paged_stash": ((False,), "its activations are kept elsewhere. Leave out moe_paged_stash"),
    "use_transformer_engine_op_fuser": ((False,), "TransformerEngine fuses it. Leave out use_transformer_engine_op_fuser"),
    "use_te_activation_func": ((False,), "TransformerEngine computes its activation. Leave out use_te_activation_func"),
    "delay_wgrad_compute": ((False,), "it computes weights' gradients later, and operators do not. Leave it unchanged"),
    "overlap_dispatch_backward_with_experts_wgrad": ((False,), HIDES_ALREADY),
    "fine_grained_activation_offloading": ((False,), "its activations are moved to the host. Leave it unchanged"),
    "cuda_graph_impl": (("none",), CAPTURED),
    "enable_cuda_graph": ((False,), CAPTURED),  # this one and the next in earlier releases
    "external_cuda_graph": ((False,), CAPTURED),
}


def refusal_of(layer: Any) -> str:
    """Return why a layer stays unchanged; nothing for one whose experts run by the operator."""
    dispatcher, experts, config = layer.token_dispatcher, layer.experts, layer.config
    if type(dispatcher).__name__ != DISPATCHER or hasattr(layer, "_inference_token_dispatcher"):
        return f"a {type(dispatcher).__name__} sends its tokens, but only {DISPATCHER} is supported. Leave it unchanged"
    if _kind_of(experts) not in LINEARS:
        return f"its experts are a {_kind_of(experts)}, but only {GROUPED} and {SEQUENTIAL} are supported"
    missing = [name for name in REPLACED if not hasattr(dispatcher, name)]
    if missing:
        return f"its dispatcher has no {missing[0]}, as it has in Megatron-LM's core 0.14 to 0.20. Leave it unchanged"
    for module, names in ((layer, CALLING), (dispatcher, ("__init__", *REPLACED)), (experts, ("forward",))):
        changed = next((name for name in names if not _is_own(module, name)), "")
        if changed:
            return f"{changed} of its {type(module).__name__} is not Megatron-LM's, and would not run. Leave it unchanged"
    if dispatcher.tp_size > 1:
        return "each expert is spread over ranks. Set expert_tensor_parallel_size=1"
    found = ((name, *each) for name, each in SETTINGS.items() if hasattr(config, name))
    reason = next((reason for name, values, reason in found if getattr(config, name) not in values), "")
    is_clamped = config.bias_activation_fusion and getattr(config, "activation_func_clamp_value", None) is not None
    if not reason and is_clamped and config.add_bias_linear:
        reason = "it clamps before it adds biases. Leave out bias_activation_fusion"
    return reason or _problem_of_modules(experts)


def _problem_of_modules(experts: Any) -> str:
    """Return why the modules of experts cannot be read for their weights alone, or nothing."""
    holders = _holders(experts)
    linears = [getattr(each, name) for each in holders for name in HALVES]
    others = [] if _kind_of(experts) == GROUPED else holders
    for modules, known in ((linears, LINEARS[_kind_of(experts)]), (others, (MLP,))):
        if problem := next((found for each in modules if (found := _problem_of_module(each, known))), ""):
            return problem
    singles = ("single_grouped_weight", "single_grouped_bias", "te_quant_params")
    if any(getattr(linears[0], name, None) for name in singles):
        return "its experts' weights are no plain tensors for each. Leave out moe_single_grouped_weight, and 8 and 4 bits"
    return ""


def _problem_of_module(module: Any, known: Sequence[str]) -> str:
    kind = type(module).__name__
    if kind not in known or not _is_own(module, "forward"):
        return f"its experts have a {kind}, whose formula is unknown; known are {', '.join(known)}"
    if module._forward_hooks or module._backward_hooks or module._backward_pre_hooks:
        return "modules of its experts have hooks, which would not be called. Remove them"
    if any(not each.__module__.startswith(DATA_PARALLEL) for each in module._forward_pre_hooks.values()):
        return "modules of its experts have hooks other than Megatron-LM's, which would find no inputs. Remove them"
    return ""


def _is_own(module: Any, name: str) -> bool:
    """Return whether a method, if there is one, is Megatron-LM's: no subclass, patch or wrapper has changed it."""
    method = getattr(type(module), name, None)
    return method is None or (method.__module__.startswith(MEGATRON) and name not in vars(module))


def _kind_of(experts: nn.Module) -> str:
    return type(experts).__name__


def _holders(experts: Any) -> list[Any]:
    """Return the modules that have the linears: one for each expert, or one for all."""
    return [experts] if _kind_of(experts) == GROUPED else list(experts.local_experts)


class Half(NamedTuple):
    """The first or the second linear of every expert on this rank: a module for each, or one for all."""

    linears: Sequence[Any]
    number: int
    is_grouped: bool

    @classmethod
    def of(cls, experts: Any, name: str) -> "Half":
        """Return the linears of this name."""
        linears = [getattr(each, name) for each in _holders(experts)]
        return cls(linears, experts.num_local_experts, _kind_of(experts) == GROUPED)

    def parameters(self, name: str) -> list[torch.Tensor]:
        """Return the weight or the bias of each expert."""
        if not self.is_grouped:
            return [getattr(each, name) for each in self.linears]
        held = self.linears[0]._parameters  # a module finds an attribute in seven times the time
        return [held[f"{name}{number}"] for number in range(self.number)]

    @property
    def is_fused(self) -> bool:
        """Whether gradients are added to `main_grad` within matmuls."""
        first = self.linears[0]
        name = "fuse_wgrad_accumulation" if hasattr(first, "fuse_wgrad_accumulation") else "gradient_accumulation_fusion"
        return bool(getattr(first, name))

    @property
    def is_first(self) -> bool:
        """Whether this is the first micro-batch, whose gradients replace what is there."""
        first = self.linears[0]
        is_counted = not getattr(first, "disable_parameter_transpose_cache", True)
        return is_counted and bool(first.is_first_microbatch)

    def obstacle(self, weights: Sequence[torch.Tensor]) -> str:
        """Return what else is done with these weights now; or nothing."""
        trained = [each for each in weights if each.requires_grad]
        if any(type(each) not in PLAIN_TYPES for each in weights):
            return "weights that are not plain"
        if is_kept_elsewhere(weights[0]):
            return "weights that sharded data parallelism keeps"
        if self.is_fused and any(getattr(each, "main_grad", None) is None for each in trained):
            return "weights without main_grad"
        return ""


class Agreed(NamedTuple):
    """What the ranks have agreed on when they first ran a layer: whether each presents its experts from the last to the
    first, and whether any of them trains the first and the second linears.
    """

    is_reversed: bool
    trains: tuple[bool, bool]

    @classmethod
    def by(cls, group: dist.ProcessGroup, weights: Sequence[Sequence[torch.Tensor]]) -> "Agreed":
        """Ask all ranks of the group. A view of weights needs them in order in memory, and else they are copied. Those that
        are in no order are put into one.
        """
        for half in weights:
            join(half)
        trains = [any(each.requires_grad for each in half) for half in weights]
        own = torch.tensor([are_reversed(weights[0]), *(not each for each in trains)], device=weights[0][0].device).int()
        dist.all_reduce(own, op=dist.ReduceOp.MIN, group=group)
        is_reversed, *frozen = own.tolist()
        return cls(bool(is_reversed), (not frozen[0], not frozen[1]))


@final
class MegatronExperts:
    """One expert layer: what replaces the layer's and the experts' forward, and methods of the dispatcher."""

    def __init__(self, layer: Any, switch: Switch, options: Mapping[str, Any]) -> None:
        """`options`: those of `expert_ffn`."""
        self._layer, self._experts, self._dispatcher = layer, layer.experts, layer.token_dispatcher
        self._forward, self._forward_experts = layer.forward, layer.experts.forward
        self._methods = {name: getattr(self._dispatcher, name) for name in REPLACED}
        self._switch, self._options = switch, options
        self.group: dist.ProcessGroup = self._dispatcher.ep_group
        self._activation = _activation_of(layer.config)
        self._agreed: Agreed | None = None
        self._order: torch.Tensor | None = None  # of all experts, where ranks present theirs reversed
        self._is_ours = False  # whether the pass that runs is the operator's
        self._probs: torch.Tensor | None = None

    def replacements(self) -> list[tuple[dict[str, Any], str, Callable[..., Any]]]:
        """Return what to put into which object under which name."""
        methods = [(vars(self._dispatcher), name, getattr(self, name.lstrip("_"))) for name in REPLACED]
        return [(vars(self._experts), "forward", self.run_experts), *methods]

    def run(self, *given: Any, **named: Any) -> Any:
        """Return what the layer's own forward does, of which experts and dispatcher are others."""
        found = self._forward(*given, **named)
        if not self._switch.is_on:
            self._switch.watch(found[0] if isinstance(found, tuple) else found)
        return found

    @property
    def _halves(self) -> list[Half]:
        return [Half.of(self._experts, name) for name in HALVES]

    def _obstacle(self, tokens: torch.Tensor) -> str:
        """Return what a pass does besides sending tokens to experts and multiplying them; or nothing."""
        dispatcher = self._dispatcher
        if dispatcher.drop_and_pad or dispatcher.config.moe_expert_capacity_factor is not None:
            return "tokens that are dropped or padded"
        if torch.is_autocast_enabled(tokens.device.type):
            return "autocast"
        if problem := _problem_of_modules(self._experts):
            return problem
        return next((found for half in self._halves if (found := half.obstacle(half.parameters("weight")))), "")

    def dispatch_preprocess(self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor) -> Any:
        """Return this rank's tokens, sorted by expert, and their probabilities."""
        self._is_ours = self._switch.holds
        obstacle = self._obstacle(hidden_states) if self._is_ours else ""
        if obstacle:
            expert_calls_of(self.group.group_name).add_library(obstacle, is_original=True)
            self._is_ours = False
        if self._is_ours:
            if self._agreed is None:
                self._agreed = Agreed.by(self.group, [half.parameters("weight") for half in self._halves])
            if self._agreed.is_reversed:
                order = self._reverse_order(probs.device)
                routing_map, probs = routing_map.index_select(1, order), probs.index_select(1, order)
            self._probs = probs
        return self._methods["dispatch_preprocess"](hidden_states, routing_map, probs)

    def _reverse_order(self, device: torch.device) -> torch.Tensor:
        """Return the experts of all ranks, each rank's from its last to its first."""
        if self._order is None or self._order.device != device:
            numbers = torch.arange(self._dispatcher.num_experts, device=device)
            self._order = numbers.view(-1, self._dispatcher.num_local_experts).flip(1).flatten()
        return self._order

    def preprocess(self, routing_map: torch.Tensor) -> torch.Tensor:
        """Return how many of this rank's tokens each expert of all ranks gets."""
        if not self._is_ours:
            return self._methods["preprocess"](routing_map)
        self._dispatcher.num_out_tokens = routing_map.shape[0] * self._dispatcher.config.moe_router_topk
        return routing_map.sum(0)

    def maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: torch.Tensor | None = None) -> torch.Tensor | None:
        """Return counts as they are: the operator brings them to the host."""
        if self._is_ours:
            return tokens_per_expert
        return self._methods["_maybe_dtoh_and_synchronize"](point, tokens_per_expert)

    def token_dispatch(self, tokens: torch.Tensor, probs: torch.Tensor) -> Any:
        """Send nothing yet; begin what Megatron-LM computes beside the dispatch."""
        if not self._is_ours:
            return self._methods["token_dispatch"](tokens, probs)
        shared = self._dispatcher.shared_experts
        if shared is not None:
            _wait_for_current(shared)
            shared.linear_fc1_forward_and_act(tokens)
        return tokens, probs

    def dispatch_postprocess(self, tokens: torch.Tensor, probs: torch.Tensor) -> Any:
        """Return tokens as they are, with the counts of all experts."""
        if not self._is_ours:
            return self._methods["dispatch_postprocess"](tokens, probs)
        counts, self._dispatcher.tokens_per_expert = self._dispatcher.tokens_per_expert, None
        return tokens, counts, probs

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the host waits for counts within
    def run_experts(self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor, **named: Any) -> Any:
        """Return the experts' results for this rank's tokens (T, dim), sorted by the experts of all ranks, in this order."""
        if not self._is_ours:
            return self._forward_experts(tokens, tokens_per_expert, probs, **named)
        self._prepare_weights()
        agreed = self._agreed
        assert agreed is not None, "the pass began with it"
        both = zip(self._halves, agreed.trains, strict=True)
        step = -1 if agreed.is_reversed else 1
        (w1, b1, total1), (w2, b2, total2) = (self._operands(half, step, is_trained=each) for half, each in both)
        options = {"group": self.group, "activation": self._activation, **self._options}
        results = expert_ffn(tokens, tokens_per_expert, w1, w2, biases=(b1, b2), totals=(total1, total2), **options)
        return results, None

    def _prepare_weights(self) -> None:
        """Call what Megatron-LM's data parallelism does before a module's forward: it waits until weights are gathered."""
        for module in self._experts.modules():
            if module is not self._experts:
                for hook in module._forward_pre_hooks.values():
                    hook(module, ())

    def _operands(self, half: Half, step: int, *, is_trained: bool) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
        """Return the weights of a linear, its biases, and what takes the gradients of its weights. `step`: from an expert to
        the next, 1 or -1.
        """
        weights, is_first = half.parameters("weight")[::step], half.is_first
        mains = [main_gradient_of(each, is_first=is_first) if half.is_fused else None for each in weights]
        has_bias = self._layer.config.add_bias_linear
        biases = torch.stack(half.parameters("bias")[::step]) if has_bias else None
        for linear in half.linears:
            if hasattr(linear, "is_first_microbatch"):
                linear.is_first_microbatch = False
        whole = stacked(weights, mains)
        if is_trained and torch.is_grad_enabled() and not whole.requires_grad:
            whole.requires_grad_()  # as on the ranks that train theirs; nothing keeps this gradient
        return whole, biases, totals_of(mains)

    def combine_preprocess(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows as they are."""
        return rows if self._is_ours else self._methods["combine_preprocess"](rows)

    def token_combine(self, rows: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        """Send nothing: results are back. End what Megatron-LM computes beside the combine."""
        if not self._is_ours:
            return self._methods["token_combine"](rows, *given, **named)
        shared = self._dispatcher.shared_experts
        if shared is not None:
            _wait_for_current(shared)
            shared.linear_fc2_forward(rows)
            shared.post_forward_comm()
        return rows

    def combine_postprocess(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the sum of each token's results, weighted by its probabilities."""
        if not self._is_ours:
            return self._methods["combine_postprocess"](rows)
        dispatcher, probs, self._probs = self._dispatcher, self._probs, None
        added: torch.Tensor = sys.modules[type(dispatcher).__module__].unpermute(
            rows,
            dispatcher.reversed_local_input_permutation_mapping,
            restore_shape=dispatcher.hidden_shape_before_permute,
            probs=probs,
            routing_map=dispatcher.routing_map,
            fused=dispatcher.config.moe_permute_fusion,
        )
        output = added.view(dispatcher.hidden_shape)
        return output if dispatcher.shared_experts is None else output + dispatcher.shared_experts.get_output()


def _wait_for_current(shared: Any) -> None:
    """Let the stream of shared experts wait for the current one, where releases do that here (0.19)."""
    if hasattr(shared, "wait_current_stream"):
        shared.wait_current_stream()


def _activation_of(config: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the activation between an expert's linears, without the token's probability."""
    function: Callable[[torch.Tensor], torch.Tensor] = config.activation_func
    most = getattr(config, "activation_func_clamp_value", None)
    offset = getattr(config, "glu_linear_offset", 0.0)
    if not config.gated_linear_unit:
        return function
    is_plain = config.bias_activation_fusion or (most is None and not offset)  # its fused silu neither clamps nor shifts
    if function is torch.nn.functional.silu and is_plain:
        return gated_silu

    def gated(both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, -1)
        if most is not None:
            gate, up = gate.clamp(max=most), up.clamp(-most, most)
        return function(gate) * (up + offset)

    return gated
