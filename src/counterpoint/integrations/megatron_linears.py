"""The tensor-parallel linears of Megatron-LM's core (read in 0.12 and 0.19); those that TransformerEngine multiplies are in
`engine_linears.py`.

Their weights are plain tensors, a rank's parts, and a process group says of which ranks. With sequence parallelism a
column-parallel linear gathers tokens, and a row-parallel one scatters their sum; without it tokens are whole on every rank.
Nothing here imports Megatron-LM.
"""

import sys
from typing import Any, TypeAlias, final

import torch
from torch import nn

from counterpoint.integrations.main_gradients import MainGradient, is_kept_elsewhere, main_gradient_of
from counterpoint.integrations.plain_linears import PlainLinear
from counterpoint.integrations.sequence_shards import Route, runs_originally
from counterpoint.integrations.switched_hooks import Switch

COLUMN, ROW = "ColumnParallelLinear", "RowParallelLinear"
HOME, PARALLEL_STATE = "megatron.core.tensor_parallel.layers", "megatron.core.parallel_state"
Output = tuple[torch.Tensor, torch.Tensor | None]  # and the bias, if the caller adds it


def is_split(module: nn.Module) -> bool:
    """Return whether a module is a linear of Megatron-LM's core that several ranks share."""
    return _home_class(module) is not None


def refusal_of(linear: Any) -> str:
    """Return why a linear that `is_split` stays unchanged; nothing for one that operators multiply."""
    home = _home_class(linear)
    assert home is not None, "only linears that are split come here"
    if not _has_own_formula(linear, home):
        return f"its forward is not that of Megatron-LM's {home.__name__}, and operators compute no other formula"
    if linear.explicit_expert_comm:
        return "Megatron-LM's experts send their tokens outside of it. Leave it unchanged"
    if getattr(linear, "gtp_remat_size", 1) > 1:
        return "its weight is spread once more (GTP), and operators do not gather weights. Leave it unchanged"
    if home.__name__ == ROW and not linear.input_is_parallel:
        return "its input is whole on every rank, but only this rank's features are supported. Set input_is_parallel"
    if home.__name__ == COLUMN and not (linear.sequence_parallel or linear.allreduce_dgrad):
        return "it neither gathers its input nor sums the gradient of it. Leave it unchanged"
    return ""


def forward_of(linear: Any, switch: Switch, schedule: str) -> "MegatronForward":
    """Return the object whose `run` replaces the forward of a linear of Megatron-LM."""
    home = _home_class(linear)
    assert home is not None, "only linears that are split come here"
    made = MegatronColumn if home.__name__ == COLUMN else MegatronRow
    return made(linear, switch, Route(_group_name_of(linear), _num_ranks(linear), schedule))


@final
class MegatronColumn:
    """A column-parallel linear of Megatron-LM: all-gather + matmul; or, with whole tokens, a matmul and the sum of its
    input's gradient.
    """

    def __init__(self, linear: Any, switch: Switch, route: Route) -> None:
        self.linear, self.route = linear, route
        self._forward, self._switch, self._plain = linear.forward, switch, PlainLinear(route)

    def run(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> Output:
        """Return this rank's columns for all tokens; Megatron-LM's own forward runs where more than that is asked for."""
        linear, used, is_on = self.linear, self.linear.weight if weight is None else weight, self._switch.holds
        is_gathered = linear.sequence_parallel  # Megatron-LM's inference changes it from call to call
        is_summed = linear.allreduce_dgrad and torch.is_grad_enabled() and input_.requires_grad
        gathers_output = linear.gather_output if runtime_gather_output is None else runtime_gather_output
        is_asked = is_on and (is_gathered or is_summed) and used is not None and _fits(used, linear)
        obstacle = "an output that is gathered" if gathers_output else _obstacle(linear, used) if is_asked else ""
        if not is_asked or runs_originally((input_.shape, 0, 1), self.route, obstacle):
            output, bias = self._forward(input_, weight, runtime_gather_output)
            return output if is_on else self._switch.watch(output), bias
        return _with_bias(linear, self._plain.columns(input_, used, _main_of(linear, used), is_gathered=is_gathered))


@final
class MegatronRow:
    """A row-parallel linear of Megatron-LM: matmul + reduce-scatter; or, with whole tokens, matmul + all-reduce."""

    def __init__(self, linear: Any, switch: Switch, route: Route) -> None:
        self.linear, self.route = linear, route
        self._forward, self._switch, self._plain = linear.forward, switch, PlainLinear(route)

    def run(self, input_: torch.Tensor) -> Output:
        """Return the sum of all ranks' products: this rank's tokens of it, or all."""
        linear, weight, is_on = self.linear, self.linear.weight, self._switch.holds
        is_scattered = linear.sequence_parallel
        num_parts = self.route.num_ranks if is_scattered else 1
        if not is_on or runs_originally((input_.shape, 0, num_parts), self.route, _obstacle(linear, weight)):
            output, bias = self._forward(input_)
            return output if is_on else self._switch.watch(output), bias
        return _with_bias(linear, self._plain.rows(input_, weight, _main_of(linear, weight), is_scattered=is_scattered))


MegatronForward: TypeAlias = MegatronColumn | MegatronRow


def _home_class(module: nn.Module) -> type | None:
    """Return the class of Megatron-LM's core of which a module is a linear that several ranks share; None of any other."""
    found = (each for each in type(module).__mro__ if each.__module__ == HOME and each.__name__ in (COLUMN, ROW))
    home = next(found, None)
    return home if home is not None and _num_ranks(module) > 1 else None


def _has_own_formula(linear: Any, home: type) -> bool:
    """Return whether a linear computes what its class of Megatron-LM does, which neither it nor a patch has changed."""
    forward = vars(home)["forward"]
    if getattr(linear.forward, "__func__", None) is not forward or forward.__module__ != HOME:
        return False
    implemented = vars(home).get("_forward_impl")  # earlier releases set it in each call
    return implemented is None or getattr(linear._forward_impl, "__func__", None) is implemented


def _num_ranks(linear: Any) -> int:
    """Return how many ranks share a linear of Megatron-LM's core, which splits its columns or rows into equal parts."""
    part = getattr(linear, "output_size_per_partition", 0)
    found: int = linear.output_size // part if part else linear.input_size // linear.input_size_per_partition
    return found


def _group_name_of(linear: Any) -> str:
    """Return the name of the process group of a linear, which older releases look up in each call."""
    group = getattr(linear, "tp_group", None) or sys.modules[PARALLEL_STATE].get_tensor_model_parallel_group()
    name: str = group.group_name
    return name


def _obstacle(linear: Any, weight: torch.Tensor) -> str:
    """Return what Megatron-LM does besides multiplying the input; or nothing."""
    config = linear.config
    if getattr(linear, "grad_output_buffer", None) is not None and config.defer_embedding_wgrad_compute:
        return "a weight whose gradient Megatron-LM computes later"
    if getattr(config, "_cpu_offloading_context", None) is not None:
        return "activations that Megatron-LM moves to the host"
    if is_kept_elsewhere(weight):
        return "a weight that sharded data parallelism keeps"
    if linear.gradient_accumulation_fusion and getattr(weight, "main_grad", None) is None:
        return "a weight without main_grad"
    return ""


def _main_of(linear: Any, weight: torch.Tensor) -> MainGradient | None:
    """Return what takes the gradient of a weight; None if autograd does."""
    return main_gradient_of(weight) if linear.gradient_accumulation_fusion else None


def _fits(weight: torch.Tensor, linear: Any) -> bool:
    """Return whether a weight that the caller gave has the sizes of the linear; its own forward refuses any other."""
    return tuple(weight.shape) == (linear.output_size_per_partition, linear.input_size)


def _with_bias(linear: Any, product: torch.Tensor) -> Output:
    """Add the bias in its own type, or return it for the caller to add."""
    bias = linear.bias
    if linear.skip_bias_add or bias is None:
        return product, bias
    return product + bias, None
