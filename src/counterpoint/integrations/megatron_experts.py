"""The expert layers of Megatron-LM's core (read in 0.14 to 0.19): `MoELayer` with `MoEAlltoAllTokenDispatcher`.

Megatron-LM's dispatcher sorts tokens by expert, sends them, and sorts them again at their experts; results go back the same
way. While the switch is on, the dispatcher sorts tokens and adds up results on their own rank only, and the experts' forward
does everything between, by one operator. Megatron-LM multiplies an expert's activation by the token's probability, which
travels along. Here the result is multiplied by it, where it is added up, as Megatron-LM did before 0.11.

Every weight of an expert is a parameter of its own (`separate_weights.py`). Nothing here imports Megatron-LM.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import nn

from counterpoint.integrations.expert_layouts import HIDES_ALREADY, OF_MEGATRON
from counterpoint.integrations.main_gradients import is_kept_elsewhere, main_gradient_of
from counterpoint.integrations.separate_weights import are_reversed, stacked, totals_of
from counterpoint.integrations.switched_hooks import Switch
from counterpoint.ops import expert_ffn, gated_silu
from counterpoint.ops.arguments import runtime_for
from counterpoint.ops.dispatch import PLAIN_TYPES
from counterpoint.ops.operator_call import expert_calls_of

DISPATCHER = "MoEAlltoAllTokenDispatcher"
GROUPED, SEQUENTIAL = "TEGroupedMLP", "SequentialMLP"
# the classes of linears that experts have
LINEARS = {
    GROUPED: ("TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"),
    SEQUENTIAL: ("ColumnParallelLinear", "RowParallelLinear", "TEColumnParallelLinear", "TERowParallelLinear"),
}
# methods of the dispatcher that are replaced
REPLACED = (
    *("dispatch_preprocess", "preprocess", "_maybe_dtoh_and_synchronize", "token_dispatch", "dispatch_postprocess"),
    *("combine_preprocess", "token_combine", "combine_postprocess"),
)
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
    "cuda_graph_impl": (
        ("none",),
        "its calls are captured in CUDA graphs, but the host has to read counts. Leave it unchanged",
    ),
    "enable_cuda_graph": ((False,), "its calls are captured in CUDA graphs, but the host reads counts. Leave it unchanged"),
    "external_cuda_graph": (
        (False,),
        "its calls are captured in CUDA graphs, but the host reads counts. Leave it unchanged",
    ),
}


def refusal_of(layer: Any) -> str:
    """Return why a layer stays unchanged; nothing for one whose experts run by the operator."""
    dispatcher, experts, config = layer.token_dispatcher, layer.experts, layer.config
    if not _is_own(dispatcher, (DISPATCHER,), ("__init__",)) or hasattr(layer, "_inference_token_dispatcher"):
        return f"a {type(dispatcher).__name__} sends its tokens, but only {DISPATCHER} is supported. Leave it unchanged"
    if any(
        getattr(getattr(dispatcher, name, None), "__func__", None) is not vars(type(dispatcher)).get(name)
        for name in REPLACED
    ):
        return f"its {DISPATCHER} is not that of Megatron-LM's core 0.14 to 0.19. Leave it unchanged"
    if not _is_own(experts, (GROUPED, SEQUENTIAL), ("forward",)):
        return f"its experts are a {type(experts).__name__}, but only {GROUPED} and {SEQUENTIAL} are supported"
    if dispatcher.tp_size > 1:
        return "each expert is spread over ranks. Set expert_tensor_parallel_size=1"
    found = ((name, *each) for name, each in SETTINGS.items() if hasattr(config, name))
    reason = next((reason for name, values, reason in found if getattr(config, name) not in values), "")
    return reason or _problem_of_linears(experts)


def _problem_of_linears(experts: Any) -> str:
    wanted = LINEARS[_kind_of(experts)]
    for linear in _linears_of(experts):
        if type(linear).__name__ not in wanted or not type(linear).__module__.startswith("megatron.core."):
            return f"its experts have a {type(linear).__name__}, whose formula is unknown; known are {', '.join(wanted)}"
        if linear._forward_hooks or linear._backward_hooks or linear._backward_pre_hooks:
            return "its experts' linears have hooks, which would not be called. Remove them"
        if getattr(linear, "single_grouped_weight", False) or getattr(linear, "te_quant_params", None) is not None:
            return "its experts' weights are no plain tensors. Leave out moe_single_grouped_weight, and 8 and 4 bits"
    return ""


def _is_own(module: Any, names: Sequence[str], methods: Sequence[str]) -> bool:
    """Return whether a module is of one of these classes of Megatron-LM, and has their methods as they are."""
    kind = type(module)
    is_theirs = kind.__name__ in names and kind.__module__.startswith(OF_MEGATRON)
    return is_theirs and all(vars(kind)[name].__module__ == kind.__module__ and name not in vars(module) for name in methods)


def _kind_of(experts: nn.Module) -> str:
    return type(experts).__name__


def _linears_of(experts: Any) -> list[Any]:
    """Return all linears of experts."""
    if _kind_of(experts) == GROUPED:
        return [experts.linear_fc1, experts.linear_fc2]
    return [linear for each in experts.local_experts for linear in (each.linear_fc1, each.linear_fc2)]


class Half(NamedTuple):
    """The first or the second linear of every expert on this rank: a module for each, or one for all."""

    linears: Sequence[Any]
    number: int
    is_grouped: bool

    @classmethod
    def of(cls, experts: Any, name: str) -> "Half":
        """Return the linears of this name."""
        if _kind_of(experts) == GROUPED:
            return cls([getattr(experts, name)], experts.num_local_experts, is_grouped=True)
        return cls([getattr(each, name) for each in experts.local_experts], experts.num_local_experts, is_grouped=False)

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

    def obstacle(self) -> str:
        """Return what else is done with these weights now; or nothing."""
        first = self.parameters("weight")[0]
        if type(first) not in PLAIN_TYPES:
            return "weights that are not plain"
        if is_kept_elsewhere(first):
            return "weights that sharded data parallelism keeps"
        if self.is_fused and getattr(first, "main_grad", None) is None:
            return "weights without main_grad"
        return ""


@final
class MegatronExperts:
    """One expert layer: what replaces the layer's and the experts' forward, and methods of the dispatcher."""

    def __init__(self, layer: Any, switch: Switch, options: Mapping[str, Any]) -> None:
        """`options`: those of `expert_ffn`."""
        self._layer, self._experts, self._dispatcher = layer, layer.experts, layer.token_dispatcher
        self._forward, self._forward_experts = layer.forward, layer.experts.forward
        self._methods = {name: getattr(self._dispatcher, name) for name in REPLACED}
        self._switch, self._options = switch, options
        self._first, self._second = Half.of(self._experts, "linear_fc1"), Half.of(self._experts, "linear_fc2")
        self.group: dist.ProcessGroup = self._dispatcher.ep_group
        self._activation = _activation_of(layer.config)
        self._order: torch.Tensor | None = None  # of all experts, if every rank's are reversed
        self._is_ours = self._is_reversed = False  # in the pass that runs
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

    def dispatch_preprocess(self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor) -> Any:
        """Return this rank's tokens, sorted by expert, and their probabilities."""
        self._is_ours = self._switch.holds
        obstacle = (self._first.obstacle() or self._second.obstacle()) if self._is_ours else ""
        if obstacle:
            expert_calls_of(self.group.group_name).add_library(obstacle, is_original=True)
            self._is_ours = False
        if self._is_ours:
            self._is_reversed = are_reversed(self._first.parameters("weight"))
            if self._is_reversed:
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
            shared.wait_current_stream()
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
        # ranks whose experts are in another order would get each other's tokens
        order = "from last to first" if self._is_reversed else "from first to last"
        runtime_for((tokens,), self.group).experts().agree(f"Megatron-LM's experts of a rank {order}")
        (w1, b1, total1), (w2, b2, total2) = (self._operands(each) for each in (self._first, self._second))
        options = {"group": self.group, "activation": self._activation, **self._options}
        results = expert_ffn(tokens, tokens_per_expert, w1, w2, biases=(b1, b2), totals=(total1, total2), **options)
        return results, None

    def _prepare_weights(self) -> None:
        """Call what data parallelism does before a linear's forward: it waits until weights are gathered."""
        for module in self._experts.modules():
            if module is not self._experts:
                for key, hook in module._forward_pre_hooks.items():
                    hook(module, (), *[{}] * (key in module._forward_pre_hooks_with_kwargs))

    def _operands(self, half: Half) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
        """Return the weights of a linear, its biases, and what takes the gradients of its weights."""
        step = -1 if self._is_reversed else 1
        weights, is_first = half.parameters("weight")[::step], half.is_first
        mains = [main_gradient_of(each, is_first=is_first) if half.is_fused else None for each in weights]
        has_bias = self._layer.config.add_bias_linear
        biases = torch.stack(half.parameters("bias")[::step]) if has_bias else None
        for linear in half.linears:
            if hasattr(linear, "is_first_microbatch"):
                linear.is_first_microbatch = False
        return stacked(weights, mains), biases, totals_of(mains)

    def combine_preprocess(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows as they are."""
        return rows if self._is_ours else self._methods["combine_preprocess"](rows)

    def token_combine(self, rows: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        """Send nothing: results are back. End what Megatron-LM computes beside the combine."""
        if not self._is_ours:
            return self._methods["token_combine"](rows, *given, **named)
        shared = self._dispatcher.shared_experts
        if shared is not None:
            shared.wait_current_stream()
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


def _activation_of(config: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the activation between an expert's linears, without the token's probability."""
    function: Callable[[torch.Tensor], torch.Tensor] = config.activation_func
    most = getattr(config, "activation_func_clamp_value", None)
    offset = getattr(config, "glu_linear_offset", 0.0)
    if not config.gated_linear_unit:
        return function
    if function is torch.nn.functional.silu and most is None and not offset:
        return gated_silu

    def gated(both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, -1)
        if most is not None:
            gate, up = gate.clamp(max=most), up.clamp(-most, most)
        return function(gate) * (up + offset)

    return gated
