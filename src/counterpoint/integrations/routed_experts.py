"""The routed experts of a layer: replacements of torchtitan's hooks and `forward` around `GroupedExperts`.

While the switch is on, the hooks pass their inputs through, and `forward` does all the work: it takes tokens sorted by
expert and their counts, and returns the experts' results in the same order. One operator sends tokens, multiplies them
by grouped matmuls as they arrive, and brings results back.
"""

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from counterpoint.integrations.expert_layouts import WEIGHTS, SpreadLayout
from counterpoint.integrations.sequence_shards import cast_for_matmul, part_of, recording
from counterpoint.integrations.switched_hooks import Switch
from counterpoint.ops import expert_ffn


@final
class TorchtitanExperts:
    """A `GroupedExperts` whose tokens torchtitan's hooks send; `shared` are the layer's shared experts, if it has any."""

    def __init__(
        self,
        experts: nn.Module,
        layout: SpreadLayout,
        rest: tuple[Switch, Mapping[str, Any], "SharedExperts | None"],
    ) -> None:
        """`rest`: the switch, options of `expert_ffn`, and the shared experts."""
        self._experts, self._forward = experts, experts.forward
        self._switch, self._options, self._shared = rest
        self._layout = layout

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that share the experts."""
        group: dist.ProcessGroup = self._layout.mesh.get_group()
        return group

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torchtitan compiles none of its dispatch either
    def run(self, tokens: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        """Return the experts' results for tokens (T, dim) sorted by the experts of all ranks, in the same order."""
        if not self._switch.holds:
            return self._switch.watch(self._forward(tokens, num_tokens_per_expert))
        given, tensor_mesh = tokens, self._layout.tensor_mesh
        if tensor_mesh is not None:  # every rank of the group contributes a part of the gradient, as in torchtitan
            shared = DTensor.from_local(tokens, tensor_mesh, (Replicate(),), run_check=False)
            given = shared.to_local(grad_placements=(Partial(),))
        weights = [part_of(getattr(self._experts, name)) for name in WEIGHTS]
        # torchtitan multiplies in bf16 wherever it uses grouped matmuls
        operands = [each.bfloat16() if self._experts.use_grouped_mm else cast_for_matmul(each) for each in (given, *weights)]
        rows, w1, w2, w3 = operands
        beside = None if self._shared is None else self._shared.compute
        named = {"group": self.group, "beside": beside, **self._options}
        return expert_ffn(rows, num_tokens_per_expert, w1, w2, w3, **named).type_as(tokens)


@final
class SharedExperts:
    """The shared experts of a layer, computed while tokens are in transit instead of after the routed ones.

    The layer passes the same tokens to both, and reads the shared experts' result after the routed experts': it is kept
    until then. For tokens other than the layer's it is computed again. If activation checkpointing begins between the layer
    and its experts, nothing is computed early: a reentrant checkpoint would drop the gradients of the shared experts, and
    another one would not find their activations when it runs the experts alone again.
    """

    def __init__(self, layer: nn.Module, shared: nn.Module) -> None:
        self._forward_layer: Callable[..., torch.Tensor] = layer.forward
        self._forward: Callable[[torch.Tensor], torch.Tensor] = shared.forward
        self._tokens: torch.Tensor | None = None  # tokens of the layer in the present forward pass
        self._recording: tuple[object, ...] | None = None  # how the layer's forward pass began; unknown in compiled code
        self._ready: tuple[torch.Tensor, torch.Tensor] | None = None

    def run_layer(self, *inputs: Any, **named: Any) -> torch.Tensor:
        """Run the layer, and record its tokens first; results left by an error are dropped, as where checkpointing ends a
        recomputation that has all it needs.

        No hook of the layer does that, because such a hook may run outside of a checkpoint that holds the layer.
        """
        self._ready = None
        given = inputs[0] if inputs else None
        self._tokens = given if isinstance(given, torch.Tensor) and not isinstance(given, DTensor) else None
        if torch.compiler.is_compiling():  # a graph cannot break within a try statement
            self._recording = None
            return self._forward_layer(*inputs, **named)
        self._recording = recording()
        try:
            return self._forward_layer(*inputs, **named)
        finally:
            self._ready = self._tokens = self._recording = None

    def compute(self) -> None:
        """Compute now what the layer will ask for."""
        if self._tokens is not None and self._recording in (None, recording()):
            rows, self._tokens = self._tokens.reshape(-1, self._tokens.shape[-1]), None
            self._ready = rows, self._forward(rows)

    def run(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the shared experts' result for these tokens."""
        ready, self._ready, self._tokens = self._ready, None, None
        if ready is not None:
            rows, result = ready
            if rows.data_ptr() == tokens.data_ptr() and rows.shape == tokens.shape and rows.dtype == tokens.dtype:
                return result
        return self._forward(tokens)
