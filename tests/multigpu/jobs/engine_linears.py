"""TransformerEngine's own linears on GPUs, with rows that go by copies: results and gradients by operators against its own,
also in main gradients. Without biases they have the same bits; a bias is added after the product, and not within it."""

import os
import sys

import torch
import torch.distributed as dist
import transformer_engine.pytorch as te
from torch import nn

from counterpoint.cuda.ranks import wait_until_all_leave
from counterpoint.integrations import tensor_parallel

FEATURES, COLUMNS, TOKENS = 2048, 4096, 4096
NUM_REPEATED = 6  # calls are recorded when they come the third time
ROUNDING = 1e-2  # of bf16, relative to the norm


class Pair(nn.Module):
    def __init__(self, norm: str, *, is_sequence: bool, is_fused: bool, has_bias: bool, returns_bias: bool) -> None:
        super().__init__()
        kept = {
            "params_dtype": torch.bfloat16,
            "sequence_parallel": is_sequence,
            "tp_group": dist.group.WORLD,
            "tp_size": dist.get_world_size(),
            "fuse_wgrad_accumulation": is_fused,
            "bias": has_bias,
            "return_bias": returns_bias,
        }
        centered = norm == "LayerNorm"
        self.up = te.LayerNormLinear(
            FEATURES, COLUMNS, parallel_mode="column", normalization=norm, zero_centered_gamma=centered, **kept
        )
        self.down = te.Linear(COLUMNS, FEATURES, parallel_mode="row", **kept)
        for each in self.parameters():
            each.data.add_(torch.randn_like(each) / 50)
            if is_fused and each.dim() == 2:
                each.main_grad, each.grad_added_to_main_grad = torch.zeros_like(each, dtype=torch.float32), False

    def forward(self, tokens: torch.Tensor, is_first: bool | None) -> torch.Tensor:
        for linear, activation in ((self.up, nn.functional.gelu), (self.down, nn.Identity())):
            given = linear(tokens, is_first_microbatch=is_first)
            tokens = activation(given[0] + given[1] if isinstance(given, tuple) else given)
        return tokens


def results_of(pair: Pair, tokens: torch.Tensor, *is_first: bool | None) -> list[torch.Tensor]:
    tokens.grad = None
    for each in pair.parameters():
        each.grad = None
        if hasattr(each, "main_grad") and is_first[0] is None:
            each.main_grad.zero_()
    for first in is_first:
        output = pair(tokens, first)
        output.float().square().mean().backward()
    of_weights = [each.main_grad if hasattr(each, "main_grad") else each.grad for each in pair.parameters()]
    return [output.detach(), tokens.grad, *[each.clone() for each in of_weights]]


def recorded_right(pair: Pair, tokens: torch.Tensor) -> None:
    """Calls that set main gradients and calls that add to them have the same addresses, and recordings of their own."""
    weights = [each for each in pair.parameters() if hasattr(each, "main_grad")]
    results_of(pair, tokens, None)
    once = [each.main_grad.clone() for each in weights]
    for _ in range(NUM_REPEATED):
        for is_first, times in ((True, 1), (False, 2)):
            results_of(pair, tokens, is_first)
            far = max(distance(each.main_grad, times * single) for each, single in zip(weights, once, strict=True))
            assert far < ROUNDING, (is_first, far)


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.float() - wanted.float()).norm() / wanted.float().norm().clamp_min(1e-30)).item()


def main() -> int:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    for is_sequence in (True, False):
        for is_fused in (True, False):
            for has_bias, returns_bias in ((False, False), (True, False), (True, True)):
                for norm in ("RMSNorm", "LayerNorm"):
                    torch.manual_seed(0)
                    asked = {"is_sequence": is_sequence, "is_fused": is_fused}
                    pair = Pair(norm, has_bias=has_bias, returns_bias=returns_bias, **asked)
                    torch.manual_seed(dist.get_rank() if is_sequence else 0)
                    num_rows = TOKENS // (dist.get_world_size() if is_sequence else 1)
                    tokens = torch.randn(num_rows, 1, FEATURES, device="cuda", dtype=torch.bfloat16, requires_grad=True)
                    passes = (None, None), (True, False, None)
                    wanted = [each for firsts in passes for each in results_of(pair, tokens, *firsts)]
                    overlapped = tensor_parallel.overlap(pair)
                    found = [each for firsts in passes for each in results_of(pair, tokens, *firsts)]
                    far = max(map(distance, found, wanted))
                    assert far < ROUNDING, (asked, norm, far)
                    assert has_bias > returns_bias or far == 0, (asked, norm, far)
                    assert overlapped.num_by_copies > 0
                    assert overlapped.num_by_library == 0
                    if is_fused:
                        del found
                        recorded_right(pair, tokens)
                        assert overlapped.num_replayed > 0
                    overlapped.use(False)
                    again = [each for firsts in passes for each in results_of(pair, tokens, *firsts)]
                    assert all(map(torch.equal, again, wanted))
                    overlapped.undo()
    if dist.get_rank() == 0:
        print("engine_linears: ok", flush=True)
    return 0


if __name__ == "__main__":
    code = main()
    wait_until_all_leave()
    sys.stdout.flush()
    os._exit(code)
