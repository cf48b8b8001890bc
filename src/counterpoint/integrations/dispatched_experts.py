"""The routed experts of torchtitan 0.3, whose token dispatcher sends tokens: what takes the place of its functions.

While the switch is on, the dispatcher only sorts a rank's tokens by expert, and adds up results, as without expert
parallelism. In between one operator sends tokens, multiplies them as they arrive, and brings results back. Code under
torch.compile keeps torchtitan's own functions, because a block is one graph there and the operator's host waits for counts.
Read and run with torchtitan 0.3.0, on 2 and 4 H200s with its backend `partial_dtensor`.
"""

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
import torch.distributed as dist

from counterpoint.integrations.deferred_inputs import checks_types
from counterpoint.integrations.expert_layouts import DISPATCHED_WEIGHTS, local_dispatcher
from counterpoint.integrations.sequence_shards import part_of
from counterpoint.integrations.switched_hooks import Switch
from counterpoint.ops import expert_ffn


@final
class DispatchedExperts:
    """A `RoutedExperts`: its token dispatcher and its `GroupedExperts`."""

    def __init__(self, routed: Any, switch: Switch, options: Mapping[str, Any]) -> None:
        """`options` are those of `expert_ffn`."""
        self.dispatcher, self.experts = routed.token_dispatcher, routed.inner_experts
        self._local: Any = local_dispatcher(self.dispatcher)
        self._forward: Callable[..., torch.Tensor] = routed.forward
        self._multiply: Callable[..., torch.Tensor] = self.experts.forward
        self._dispatch, self._combine = self.dispatcher.dispatch, self.dispatcher.combine
        self._switch, self._options = switch, options
        self._counts: Any | None = None  # those of the call whose tokens were only sorted

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that share the experts."""
        group: dist.ProcessGroup = self.dispatcher.ep_mesh.get_group()
        return group

    def replacements(self) -> tuple[tuple[dict[str, Any], str, Callable[..., Any]], ...]:
        """Return what to exchange besides `forward`: where, under which name, by what."""
        held: dict[str, Any] = vars(self.dispatcher)
        return (
            (vars(self.experts), "forward", self.multiply),
            (held, "dispatch", self.dispatch),
            (held, "combine", self.combine),
        )

    def run(self, *inputs: Any, **named: Any) -> Any:
        """Run the module as it was; its parts do what is different."""
        return self._forward(*inputs, **named)

    def dispatch(self, tokens: torch.Tensor, *routing: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Return tokens (T, D) sorted by the experts of all ranks, how many each gets, and what `combine` needs."""
        if torch.compiler.is_compiling() or not self._switch.holds or checks_types():
            found: tuple[torch.Tensor, torch.Tensor, Any] = self._dispatch(tokens, *routing)
            return found
        rows, counts, metadata = self._local.dispatch(self.dispatcher, tokens, *routing)
        self._counts = counts
        return rows, counts, metadata

    def multiply(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return the experts' results for rows in the order of `dispatch`, in the same order."""
        if torch.compiler.is_compiling() or self._counts is not counts:
            return self._switch.watch(self._multiply(rows, counts))
        self._counts = None
        # torchtitan multiplies in bf16 whatever the types are
        operands = [part_of(each).bfloat16() for each in (rows, *(getattr(self.experts, n) for n in DISPATCHED_WEIGHTS))]
        return expert_ffn(operands[0], counts, *operands[1:], group=self.group, **self._options).type_as(rows)

    def combine(self, rows: torch.Tensor, metadata: Any, tokens: torch.Tensor) -> torch.Tensor:
        """Return each token's results (T, D), added up by their scores."""
        is_local = not torch.compiler.is_compiling() and type(metadata).__name__ == "LocalDispatchMetadata"
        combined: torch.Tensor = (
            self._local.combine(self.dispatcher, rows, metadata, tokens)
            if is_local
            else self._combine(rows, metadata, tokens)
        )
        return combined
