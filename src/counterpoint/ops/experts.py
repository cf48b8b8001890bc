"""Operators for a mixture of experts that are spread over ranks: tokens travel to their experts' ranks while the first
matmuls run, and results return while the last ones run.

A row is a token's copy for one expert; rows are sorted by expert. Counts say how many rows each expert gets; the ranks
exchange them in every call. `expert_passes.py` has the order of computation, `expert_functions.py` what autograd and
checkpointing see of a call.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist

from counterpoint.errors import OperatorError
from counterpoint.ops.arguments import problem_of_layouts, problem_of_pair, runtime_for
from counterpoint.ops.expert_functions import Combine, Dispatch, ExpertCall, ExpertFfn
from counterpoint.ops.expert_passes import Totals
from counterpoint.ops.expert_routing import Called, ExpertRouting, TokensPerExpert, words_of
from counterpoint.ops.gated_activation import Activation
from counterpoint.ops.grouped_matmul import obstacle_to_fp8
from counterpoint.ops.runtime import Runtime
from counterpoint.schedule import ScheduleDescription

Group: TypeAlias = dist.ProcessGroup
Biases: TypeAlias = Sequence[torch.Tensor | None]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the host waits for counts within
def expert_ffn(
    tokens: torch.Tensor,
    tokens_per_expert: TokensPerExpert,
    w1: torch.Tensor,
    w2: torch.Tensor,
    w3: torch.Tensor | None = None,
    *,
    group: Group | None = None,
    biases: Biases | None = None,
    is_fp8: bool = False,
    activation: Activation | None = None,
    schedule: ScheduleDescription | None = None,
    beside: Callable[[], None] | None = None,
    keeps_tokens: bool = False,
    totals: Sequence[Totals | None] = (),
) -> torch.Tensor:
    """Run the experts' feed-forward layers on this rank's tokens, each on the rank that holds its expert: (T, dim) ->
    (T, dim).

    `tokens` are sorted by expert; each of W ranks holds E experts. `tokens_per_expert` are W * E numbers of rows that
    add up to T, which may differ between ranks. w1 and w3 are (E, hidden, dim), w2 is (E, dim, hidden). A token's result
    is `silu(w1 x) * (w3 x)` times w2; without w3, `silu(w1 x)` times w2. `biases` holds one bias for each weight, in the
    same order, (E, hidden) and (E, dim), or None. Weights may be views whose last or last but one dimension is dense;
    such views are not copied.

    `activation` replaces silu. It is called with `w1 x`, and with `w3 x` after it if there is a w3: matrices (n, hidden).
    It works row by row, and autograd differentiates it. If it takes one matrix, it may return another width. So w1
    (E, N, dim) can hold gate and up, with w2 (E, dim, hidden); `ops.gated_silu` is such a function, one kernel on GPUs.

    With `is_fp8` the matmuls of the forward pass round their bf16 operands to fp8 (e4m3); each token and each output
    feature of a weight has its own scale. Gradients are computed in bf16, as if nothing had been rounded.

    `beside` is called once, in forward, before the host waits for the counts: its computation on the current stream hides
    that wait and the tokens in transit, and has its own gradients. With `keeps_tokens` a rank keeps the tokens that its
    experts got, for the gradients of w1 and w3; otherwise they are sent again in backward, unless they are few.

    `totals` has a function for each weight, or None. Backward calls it for the `ExpertTotals` to which it adds gradients, in
    the totals' type; autograd then gets none for this weight.

    Without a `schedule`, `expert_choice.py` decides whether rows go by copies and in how many pieces. A call like those
    before it may send and multiply its tokens before the host knows the counts. All ranks call it together, with the same
    sizes of experts and the same options. The host waits for the counts, in forward only. The same tensors must need
    gradients on all ranks. Raises `OperatorError`.
    """
    weights = [w1, w2] if w3 is None else [w1, w2, w3]
    runtime = _runtime_for("expert_ffn", tokens, weights, group)
    added: Biases = [None] * len(weights) if biases is None else biases
    is_joined = activation is not None and w3 is None
    problem = _problem_of_ffn(tokens, weights, is_joined=is_joined) or _problem_of_biases("expert_ffn", weights, added)
    problem = problem or _problem_of_functions(activation, totals, weights)
    if problem := problem or (_problem_in_fp8(weights) if is_fp8 else ""):
        runtime.refuse(problem)
    sizes = (w1.shape[0], len(weights), *w1.shape[1:], *_sizes_of_biases(added), *(w2.shape[2:] if is_joined else ()))
    has_beside, has_gradients = beside is not None, _have_gradients(tokens, *weights, *added)
    called = Called(
        "expert_ffn", tokens, tokens_per_expert, sizes, schedule, keeps_tokens, has_beside, is_fp8, has_gradients
    )
    call = ExpertCall(runtime, called, activation=activation, beside=beside, is_fp8=is_fp8, totals=totals)
    found: torch.Tensor = ExpertFfn.apply(call, tokens, *weights, *added)
    return found


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the host waits for counts within
def dispatch_grouped_matmul(
    tokens: torch.Tensor,
    tokens_per_expert: TokensPerExpert,
    weights: torch.Tensor,
    group: Group | None = None,
    *,
    bias: torch.Tensor | None = None,
    schedule: ScheduleDescription | None = None,
    keeps_tokens: bool = False,
) -> tuple[tuple[torch.Tensor, ...], ExpertRouting]:
    """Run the first half of `expert_ffn`: all ranks' tokens for this rank's experts, times these experts' weights, plus the
    bias.

    (T, dim), (E, N, dim), (E, N) -> (rows, N) of each group of experts that was computed together; (0, N) if no rows came.
    Rows are in the order of experts, and within an expert in the order of source ranks. The routing says how many there
    are, and `grouped_matmul_combine` uses it to bring rows back. `keeps_tokens` as in `expert_ffn`. Raises `OperatorError`.
    """
    runtime = _runtime_for("dispatch_grouped_matmul", tokens, [weights], group)
    name = "dispatch_grouped_matmul"
    problem = _problem_of(name, tokens, weights, tokens.shape[-1] if tokens.dim() else 0)
    problem = problem or _problem_of_biases(name, [weights], [bias])
    if problem:
        runtime.refuse(problem)
    sizes = (*weights.shape, *_sizes_of_biases([bias]))
    has_gradients = _have_gradients(tokens, weights, bias)
    called = Called(name, tokens, tokens_per_expert, sizes, schedule, keeps_tokens, has_gradients=has_gradients)
    call = ExpertCall(runtime, called)
    found: tuple[torch.Tensor, ...] = Dispatch.apply(call, tokens, weights, bias)
    return found, call.routing


@torch.compiler.disable  # type: ignore[untyped-decorator]  # as the first half
def grouped_matmul_combine(
    inputs: Sequence[torch.Tensor], weights: torch.Tensor, routing: ExpertRouting, *, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Run the second half of `expert_ffn`: rows of this rank's experts times their weights, plus the bias, sent back to the
    tokens' ranks.

    (rows, K) of each group, (E, dim, K), (E, dim) -> (T, dim): groups as `dispatch_grouped_matmul` returned them, results
    in the order of its tokens. Raises `OperatorError`.
    """
    if not isinstance(routing, ExpertRouting):
        raise OperatorError(
            "grouped_matmul_combine takes the routing that dispatch_grouped_matmul returns; found a value of type "
            f"{type(routing).__name__}. Pass it."
        )
    problem = _problem_of_combine(inputs, weights, routing)
    problem = problem or _problem_of_biases("grouped_matmul_combine", [weights], [bias])
    if problem:
        routing.runtime.refuse(problem)
    sizes = (*weights.shape, *_sizes_of_biases([bias]))
    routing.runtime.agreement.num_calls += 1
    routing.runtime.experts().agree(words_of("grouped_matmul_combine", sizes, weights.dtype))
    found: torch.Tensor = Combine.apply(routing, weights, bias, *inputs)
    return found


def _runtime_for(operator: str, tokens: object, weights: Sequence[object], group: Group | None) -> Runtime:
    """Return the runtime of a call; operands that are no tensors are refused on every rank."""
    runtime = runtime_for((tokens, *weights), group)
    wrong = [type(each).__name__ for each in (tokens, *weights) if not isinstance(each, torch.Tensor)]
    if wrong:
        runtime.refuse(f"{operator} takes tensors as tokens and weights; found a value of type {wrong[0]}. Pass a tensor.")
    return runtime


def _problem_of_ffn(tokens: torch.Tensor, weights: Sequence[torch.Tensor], *, is_joined: bool) -> str:
    """Return what is wrong with a layer's operands, in one line, or nothing. `is_joined`: w1 and w2 may differ in hidden
    features.
    """
    w1, w2, *w3 = weights
    dim = tokens.shape[-1] if tokens.dim() else 0
    found = next((each for each in (_problem_of("expert_ffn", tokens, up, dim) for up in (w1, *w3)) if each), "")
    if found:
        return found
    num_experts, hidden, _ = w1.shape
    fits = w2.dim() == w1.dim() and w2.shape[:2] == (num_experts, dim)
    if not fits or not (is_joined or (w2.shape[2] == hidden and all(up.shape == w1.shape for up in w3))):
        ups = "w1 of (E, N, dim)" if is_joined else "w1 and w3 of (E, hidden, dim)"
        shapes = [tuple(each.shape) for each in weights]
        return f"expert_ffn takes {ups} and w2 of (E, dim, hidden); found {shapes}. Change one."
    return _problem_of("expert_ffn", tokens, w2, w2.shape[2])


def _problem_of_functions(activation: object, totals: Sequence[object], weights: Sequence[object]) -> str:
    """Return what is wrong with the functions that a layer is given, or nothing."""
    if activation is not None and not callable(activation):
        return f"expert_ffn takes a function as activation; found one of type {type(activation).__name__}. Pass one."
    if len(totals) not in (0, len(weights)):
        return f"expert_ffn takes totals for each of {len(weights)} weights, or none; found {len(totals)}. Give as many."
    return ""


def _problem_in_fp8(weights: Sequence[torch.Tensor]) -> str:
    obstacle = next((obstacle for each in weights if (obstacle := obstacle_to_fp8(each))), "")
    return f"expert_ffn in fp8 {obstacle}." if obstacle else ""


def _have_gradients(*operands: torch.Tensor | None) -> bool:
    """Return whether autograd records a call with these operands."""
    return torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in operands)


def _problem_of_biases(operator: str, weights: Sequence[torch.Tensor], biases: object) -> str:
    """Return what is wrong with biases, one or None for each weight, or nothing. The weights were checked before."""
    wanted = [tuple(each.shape[:2]) for each in weights]
    if not isinstance(biases, Sequence) or len(biases) != len(weights):
        found = f"{len(biases)}" if isinstance(biases, Sequence) else f"a {type(biases).__name__}"
        return f"{operator} takes {len(weights)} biases, one for each weight or None; found {found}. Give as many."
    for bias, weight, shape in zip(biases, weights, wanted, strict=True):
        if bias is None:
            continue
        if not isinstance(bias, torch.Tensor):
            return f"{operator} takes tensors as biases; found one of type {type(bias).__name__}. Give one, or None."
        if tuple(bias.shape) != shape or bias.dtype != weight.dtype or bias.device != weight.device:
            given = f"{tuple(bias.shape)} {bias.dtype} on {bias.device}"
            return f"{operator} adds a bias of {shape} {weight.dtype} on {weight.device}; found {given}. Change it."
    return ""


def _sizes_of_biases(biases: Biases) -> tuple[int, ...]:
    """Return which biases there are, for ranks to compare; nothing if there are none."""
    found = tuple(int(each is not None) for each in biases)
    return found if any(found) else ()


def _problem_of_combine(inputs: Sequence[torch.Tensor], weights: torch.Tensor, routing: ExpertRouting) -> str:
    name, layout = "grouped_matmul_combine", routing.layout
    wanted = [group.rows.stop - group.rows.start for group in layout.groups]
    if not isinstance(inputs, Sequence) or not isinstance(weights, torch.Tensor):
        wrong = weights if isinstance(inputs, Sequence) else inputs
        return f"{name} takes a list of matrices and a tensor; found a value of type {type(wrong).__name__}. Pass both."
    found = [each.shape[0] if isinstance(each, torch.Tensor) and each.dim() == 2 else None for each in inputs]
    if found != wanted:
        return f"{name} takes matrices of {wanted} rows for this routing; found {found}. Pass those of the dispatch."
    if weights.dim() == 3 and weights.shape[0] != layout.num_experts:
        return f"{name} takes weights of {layout.num_experts} experts; found {weights.shape[0]}. Pass all of them."
    return next((problem for each in inputs if (problem := _problem_of(name, each, weights, each.shape[1]))), "")


def _problem_of(operator: str, rows: torch.Tensor, weights: torch.Tensor, num_inner: int) -> str:
    """Return what is wrong with rows and weights that are to be multiplied along `num_inner` numbers."""
    problem = problem_of_layouts(operator, (rows, weights)) or problem_of_pair(operator, rows, weights)
    if problem:
        return problem
    if not rows.dtype.is_floating_point or rows.dtype.itemsize == 1:
        return f"{operator} multiplies floating-point numbers of 16 bits or more; found {rows.dtype}. Convert both operands."
    if rows.dim() != 2 or weights.dim() != 3 or weights.shape[2] != num_inner or not weights.shape[0]:
        shapes = f"{tuple(rows.shape)} and {tuple(weights.shape)}"
        return f"{operator} multiplies (rows, K) by (experts, columns, K); found {shapes}. Change one."
    return ""
