"""The operations of one transformer layer on one rank, forward and backward, in the order in which a framework issues them.

A layer's work is divided by the tensor- and context-parallel sizes; each rank has the same share, so one rank stands for
all. Tensor-parallel collectives hold the computation up, unless the step says that they run beside weight gradients.
"""

from counterpoint.cluster.description import Configuration
from counterpoint.cluster.kernels import fused_attention, matmul, memory_pass
from counterpoint.cluster.pass_builder import EXPERT_GROUP, TENSOR_GROUP, PassBuilder
from counterpoint.machine import ElementType
from counterpoint.step import CollectiveKind

# floating-point operations of a fused attention's backward pass over the forward's (FlashAttention 2)
BACKWARD_ATTENTION = 2.5
# of scores through memory, forward: product, scale, mask and softmax, dropout with its mask, second product
SCORE_PASSES = 7
BACKWARD_SCORE_PASSES = 10
# Megatron-LM's kernel that scales, masks and normalizes scores at once takes only multiples of 4 heads x sequences
# (megatron/model/fused_softmax.py, is_kernel_available); else these are kernels of their own
FUSED_SOFTMAX_MULTIPLE = 4
NUM_SOFTMAX_KERNELS = 5  # cast, scale, mask, softmax, cast
CAUSAL = 0.5  # share of a fused attention's products that a causal mask leaves


class LayerWriter:
    """Writes layers into a pass."""

    def __init__(self, configuration: Configuration, builder: PassBuilder) -> None:
        self._builder = builder
        self._model, self._sizes = configuration.model, configuration.parallelism
        self._training, self._gpu = configuration.training, configuration.fabric.machine.gpu
        self._tokens = self._training.micro_batch * self._model.sequence // self._sizes.context
        self._shard = self._tokens // self._sizes.tensor if self._sizes.is_sequence_parallel else self._tokens
        self._type: ElementType = self._model.matmul_type or self._model.element_type
        self._bytes = self._model.element_bytes

    def forward(self, is_again: bool = False) -> None:
        """Write a forward pass. With `is_again` it is recomputed in the backward pass, where the last sum is not needed."""
        builder, hidden, tensor = self._builder, self._model.hidden, self._sizes.tensor
        self._pass("norm", 2 * self._shard * hidden)
        self._gather()
        self._matmul("qkv", hidden, (hidden + 2 * self._model.kv_size) // tensor)
        self._attend(is_backward=False)
        self._matmul("projection", hidden // tensor, hidden)
        self._sum()
        self._pass("residual", 3 * self._shard * hidden)
        self._pass("norm", 2 * self._shard * hidden)
        self._feed_forward()
        if not is_again:
            self._sum()
            self._pass("residual", 3 * self._shard * hidden)
            builder.end_layer()

    def backward(self) -> None:
        """Write a backward pass, with recomputation if the step has it."""
        hidden, tensor = self._model.hidden, self._sizes.tensor
        if self._training.recompute == "full":
            self.forward(is_again=True)
        elif self._training.recompute == "selective":
            self._attend(is_backward=False)
        self._pass("residual.gradient", 3 * self._shard * hidden)
        self._feed_forward_backward()
        self._pass("norm.gradient", 4 * self._shard * hidden)
        self._pass("residual.gradient", 3 * self._shard * hidden)
        self._gather()
        self._matmul_backward("projection", hidden // tensor, hidden)
        self._attend(is_backward=True)
        self._matmul_backward("qkv", hidden, (hidden + 2 * self._model.kv_size) // tensor, is_summed=True)
        self._pass("norm.gradient", 4 * self._shard * hidden)
        self._builder.end_layer()

    def _pass(self, name: str, num_elements: float) -> None:
        self._builder.compute(memory_pass(name, num_elements * self._bytes))

    def _matmul(self, name: str, inner: int, columns: int, *, tokens: int | None = None, batch: int = 1) -> None:
        sizes = (self._tokens if tokens is None else tokens, inner, columns)
        self._builder.compute(matmul(self._gpu, name, sizes, self._type, batch))

    def _matmul_backward(
        self, name: str, inner: int, columns: int, *, tokens: int | None = None, batch: int = 1, is_summed: bool = False
    ) -> None:
        """Write the gradients of input and weight. The first one's sum over tensor ranks may run beside the second."""
        rows = self._tokens if tokens is None else tokens
        self._builder.compute(matmul(self._gpu, f"{name}.input", (rows, columns, inner), self._type, batch))
        is_beside = is_summed and self._training.overlap_tensor
        number = self._sum(is_waited_for=not is_beside) if is_summed else None
        self._builder.compute(matmul(self._gpu, f"{name}.weight", (inner, rows, columns), self._type, batch))
        if is_beside:
            self._builder.wait_for(number)

    def _gather(self) -> None:
        """Gather the tokens of all tensor ranks, if the sequence is divided over them."""
        if self._sizes.is_sequence_parallel:
            self._builder.communicate("all_gather", self._activation_bytes, TENSOR_GROUP, is_waited_for=True)

    def _sum(self, *, is_waited_for: bool = True) -> int | None:
        """Sum over the tensor ranks; return the collective, None where there is one rank."""
        kind: CollectiveKind = "reduce_scatter" if self._sizes.is_sequence_parallel else "all_reduce"
        return self._builder.communicate(kind, self._activation_bytes, TENSOR_GROUP, is_waited_for=is_waited_for)

    @property
    def _activation_bytes(self) -> float:
        return float(self._tokens * self._model.hidden * self._bytes)

    def _attend(self, *, is_backward: bool) -> None:
        model, sizes = self._model, self._sizes
        name = "attention.gradient" if is_backward else "attention"
        if sizes.context > 1:  # keys and values of the others come, and their gradients go back
            moved = 2 * model.sequence * self._training.micro_batch * model.kv_size / sizes.tensor * self._bytes
            self._builder.exchange_context(moved * (2 if is_backward else 1))
        flops = 4.0 * self._tokens * model.sequence * model.hidden / sizes.tensor
        if model.attention == "flash":
            flops *= CAUSAL * (BACKWARD_ATTENTION if is_backward else 1.0)
            moved = (4 if is_backward else 2) * self._tokens * (model.hidden + model.kv_size) / sizes.tensor
            kernel = fused_attention(self._gpu, name, flops, moved * self._bytes, model.element_type)
            self._builder.compute(kernel)
        else:
            self._materialized(name, is_backward)
        if sizes.context > 1:
            self._builder.wait_for_context()

    def _materialized(self, name: str, is_backward: bool) -> None:
        model, tensor = self._model, self._sizes.tensor
        heads = self._training.micro_batch * model.num_heads // tensor
        size, sequence = model.hidden // model.num_heads, model.sequence
        rows = sequence // self._sizes.context  # of scores: a rank's own queries, and all keys
        products = 4 if is_backward else 2
        for number in range(products // 2):
            shape = (rows, size, sequence)
            self._builder.compute(matmul(self._gpu, f"{name}.scores{number}", shape, model.element_type, heads))
        passes = BACKWARD_SCORE_PASSES if is_backward else SCORE_PASSES
        scores = float(heads) * rows * sequence
        # the products' own passes count with theirs
        kernels = 1 if heads % FUSED_SOFTMAX_MULTIPLE == 0 else NUM_SOFTMAX_KERNELS
        for _ in range(kernels):
            self._pass(f"{name}.softmax", (passes - products) * scores / kernels)
        for number in range(products // 2):
            shape = (rows, sequence, size)
            self._builder.compute(matmul(self._gpu, f"{name}.values{number}", shape, model.element_type, heads))

    def _feed_forward(self) -> None:
        model, tensor = self._model, self._sizes.tensor
        width, ups = model.feed_forward // tensor, model.num_up_matrices
        if model.num_experts:
            self._experts(is_backward=False)
            return
        self._gather()
        self._matmul("up", model.hidden, ups * width)
        self._pass("activation", (ups + 1) * self._tokens * width)
        self._matmul("down", width, model.hidden)

    def _feed_forward_backward(self) -> None:
        model, tensor = self._model, self._sizes.tensor
        width, ups = model.feed_forward // tensor, model.num_up_matrices
        if model.num_experts:
            self._experts(is_backward=True)
            return
        self._gather()
        self._matmul_backward("down", width, model.hidden)
        self._pass("activation.gradient", (2 * ups + 1) * self._tokens * width)
        self._matmul_backward("up", model.hidden, ups * width, is_summed=True)

    def _experts(self, *, is_backward: bool) -> None:
        """Write router, dispatch, experts and combine. Every expert gets equally many tokens, as from no real router."""
        model, sizes = self._model, self._sizes
        routed = self._tokens * model.experts_per_token
        local = max(1, model.num_experts // sizes.expert)
        each, width, ups = max(1, routed // local), model.feed_forward // sizes.tensor, model.num_up_matrices
        moved = float(routed // (sizes.tensor if sizes.is_sequence_parallel else 1)) * model.hidden * self._bytes
        self._gather()
        if not is_backward:
            self._matmul("router", model.hidden, model.num_experts)
        self._pass("permute", 2 * routed * model.hidden)
        self._builder.communicate("all_to_all", moved, EXPERT_GROUP, is_waited_for=True)
        if is_backward:
            self._matmul_backward("experts.down", width, model.hidden, tokens=each, batch=local)
            self._pass("activation.gradient", (2 * ups + 1) * routed * width)
            self._matmul_backward("experts.up", model.hidden, ups * width, tokens=each, batch=local)
        else:
            self._matmul("experts.up", model.hidden, ups * width, tokens=each, batch=local)
            self._pass("activation", (ups + 1) * routed * width)
            self._matmul("experts.down", width, model.hidden, tokens=each, batch=local)
        self._builder.communicate("all_to_all", moved, EXPERT_GROUP, is_waited_for=True)
        self._pass("unpermute", 2 * routed * model.hidden)
        if is_backward:
            self._matmul_backward("router", model.hidden, model.num_experts, is_summed=True)
