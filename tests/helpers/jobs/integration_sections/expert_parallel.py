"""`expert_parallel.overlap` against the bare job: experts spread as torchtitan does it, with FSDP2, tensor parallelism and
activation checkpointing."""

import copy
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import checkpoint as checkpoint_by_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from counterpoint.integrations import expert_parallel
from counterpoint.units import format_bytes
from integration_sections.comparing import DEVICE, assert_close, assert_equal, refused
from integration_sections.spread_experts import (
    DeepEPExpertParallel,
    ExpertTensorParallel,
    GroupedExperts,
    Mixtures,
    MoE,
    SquaredExperts,
    results_of,
    spread,
    tokens_of_rank,
)
from integration_sections.transformers_double import AutoEP, Experts, GptOssExperts, NormedExperts, spread_experts, step_of

NUM_BLOCKS, PER_RANK = 2, 2
LIMIT = 1e-12


def whole_mesh() -> DeviceMesh:
    return init_device_mesh(DEVICE.type, (dist.get_world_size(),), mesh_dim_names=("ep",))


def spread_model(seed: int = 0) -> nn.Module:
    return spread(Mixtures(NUM_BLOCKS, PER_RANK * dist.get_world_size(), seed), whole_mesh())


def num_calls(overlapped: expert_parallel.Overlapped) -> int:
    return overlapped.num_by_copies + overlapped.num_by_library


def expert_parallel_layers() -> None:
    """Outputs and gradients are the bare job's; off, and after `undo`, to the bit."""
    model = spread_model()
    wanted = results_of(model)
    overlapped = expert_parallel.overlap(model, is_on=False)
    assert overlapped.taken == ["blocks.0.experts", "blocks.1.experts"]
    assert not overlapped.refused
    assert_equal(results_of(model), wanted)
    assert num_calls(overlapped) == 0
    for turn in range(1, 3):
        overlapped.use(True)
        found = results_of(model)
        assert_close(found, wanted, LIMIT)
        assert num_calls(overlapped) == 2 * NUM_BLOCKS * (2 * turn - 1), "forward and backward"
        assert_equal(results_of(model), found)  # the same bits in every run
        overlapped.use(False)
        assert_equal(results_of(model), wanted)
    words = str(overlapped)
    assert words.startswith("overlap: off for 2 expert layers: blocks.*.experts (2)"), words
    refused(lambda: expert_parallel.overlap(model), "blocks.0.experts is already overlapped")
    overlapped.undo()
    refused(lambda: overlapped.use(True), "was undone, so it has no expert layers")
    assert_equal(results_of(model), wanted)
    expert_parallel.overlap(model).undo()
    assert_equal(results_of(model), wanted)


def expert_parallel_refuses() -> None:
    """Experts of another style or formula stay as they are, with the reason; so do models without any."""
    num_experts = PER_RANK * dist.get_world_size()
    refused(lambda: expert_parallel.overlap(nn.Linear(2, 2), keeps_tokens=1), "keeps_tokens must be True or False; found 1")
    refused(
        lambda: expert_parallel.overlap(nn.Linear(2, 2)),
        "has no experts that torchtitan, transformers or Megatron-LM spread",
    )
    refused(lambda: expert_parallel.overlap(None), "found one of type NoneType")  # type: ignore[arg-type]
    refused(lambda: expert_parallel.overlap(Mixtures(1, num_experts)), "Parallelize it first")
    deep = spread(Mixtures(1, num_experts), whole_mesh(), DeepEPExpertParallel)
    refused(lambda: expert_parallel.overlap(deep), "DeepEP's kernels send its tokens")
    model = spread_model()
    model.blocks.append(spread(MoE(num_experts, SquaredExperts).to(DEVICE, torch.float64), whole_mesh()))
    wanted = results_of(model)
    overlapped = expert_parallel.overlap(model)
    assert list(overlapped.refused) == ["blocks.2.experts"]
    assert "SquaredExperts, whose formula is unknown" in str(overlapped)
    assert_close(results_of(model), wanted, LIMIT)
    assert len(expert_parallel.waiting_experts(model)) == 0


def expert_parallel_of_transformers() -> None:
    """Experts that transformers spreads, with the usual gate and in gpt-oss' form, give what they gave before."""
    for kind in (Experts, GptOssExperts):
        model = spread_experts(kind, whole_mesh())
        wanted = step_of(model)
        overlapped = expert_parallel.overlap(model)
        assert overlapped.taken == ["experts"], overlapped.refused
        assert_close(step_of(model), wanted, LIMIT)
        assert num_calls(overlapped) == 2
        overlapped.undo()
        assert_equal(step_of(model), wanted)
    refused(lambda: expert_parallel.overlap(spread_experts(NormedExperts, whole_mesh())), "has_post_expert_norm=True")
    serving = spread_experts(Experts, whole_mesh(), AutoEP)
    overlapped = expert_parallel.overlap(serving)
    with torch.no_grad():
        step_of(serving, has_backward=False)
    assert overlapped.num_by_copies == 0
    assert overlapped.num_by_library == 1
    assert "AutoEP sums by all-reduces without gradients" in str(overlapped)


def expert_parallel_in_a_job() -> None:
    """Checkpoints are the bare job's; a second model, evaluation and copies do no harm."""
    bare, model, teacher = spread_model(), spread_model(), spread_model(seed=1).eval()
    overlapped = expert_parallel.overlap(model)
    saved, of_bare = model.state_dict(), bare.state_dict()
    assert list(saved) == list(of_bare)
    assert_equal(
        [each.to_local() if isinstance(each, DTensor) else each for each in saved.values()],
        [each.to_local() if isinstance(each, DTensor) else each for each in of_bare.values()],
    )
    bare.load_state_dict(saved)
    wanted_of_teacher = teacher(tokens_of_rank())
    of_teacher = expert_parallel.overlap(teacher)
    with torch.no_grad():
        assert_close([teacher(tokens_of_rank())], [wanted_of_teacher], LIMIT)
    of_teacher.use(False)
    wanted = results_of(bare)
    assert_close(results_of(model), wanted, LIMIT)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for each in (*copied.parameters(), *bare.parameters()):
            each.mul_(0.5)
    assert_close(results_of(copied), results_of(bare), LIMIT)
    assert_close(results_of(model), wanted, LIMIT)
    overlapped.undo()
    assert_equal(results_of(copied), results_of(bare))


def expert_parallel_checkpointed() -> None:
    """Activation checkpointing, plain and selective: torchtitan's policy saves all-to-alls and every other matmul. Neither
    looks into an operator, which runs again unless the policy saves it."""
    wanted = results_of(spread_model())

    def contexts(*saved: object) -> object:
        counts = {False: 0, True: 0}

        def decide(context: object, operator: object, *_: object, **__: object) -> CheckpointPolicy:
            if operator == torch.ops.aten.mm.default:
                is_again = bool(vars(context).get("is_recompute"))
                counts[is_again] += 1
                return CheckpointPolicy.MUST_SAVE if counts[is_again] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
            return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(decide)

    exchanged = torch.ops._c10d_functional.all_to_all_single.default
    ways = {
        "plain": checkpoint_wrapper,
        "selective": lambda block: checkpoint_wrapper(block, context_fn=lambda: contexts(exchanged)),
        "saved": lambda block: checkpoint_wrapper(block, context_fn=lambda: contexts(exchanged, *expert_parallel.OPERATORS)),
    }
    calls = {}
    for way, wrap in ways.items():
        model = spread_model()
        overlapped = expert_parallel.overlap(model, keeps_tokens=way == "saved")
        for number, block in enumerate(model.blocks):
            model.blocks[number] = wrap(block)
        assert_close(results_of(model), wanted, LIMIT)
        calls[way] = num_calls(overlapped)
        overlapped.use(False)
        assert_close(results_of(model), wanted, LIMIT)
    assert calls == {"plain": 3 * NUM_BLOCKS, "selective": 3 * NUM_BLOCKS, "saved": 2 * NUM_BLOCKS}, calls
    assert f"a call makes up to {format_bytes(overlapped.most_kept_bytes)} for its backward pass" in repr(overlapped)
    assert overlapped.most_kept_bytes > 0
    for is_reentrant in (False, True):
        for part in ("experts", ""):  # without hooks, and inside of those that came before
            model = spread_model()
            expert_parallel.overlap(model)
            for block in model.blocks:
                inner = block.get_submodule(part)
                inner.forward = partial(checkpoint, inner.forward, use_reentrant=is_reentrant)
            assert_close(results_of(model), wanted, LIMIT, f"{part}, reentrant: {is_reentrant}")
    model = spread_model()
    expert_parallel.overlap(model)
    for block in model.blocks:
        checkpoint_by_hooks(block)
    assert_close(results_of(model), wanted, LIMIT)


def expert_parallel_with_fsdp2() -> None:
    """As torchtitan does it: experts are sharded over what their mesh leaves, the rest over all ranks. `overlap` comes
    before `fully_shard` or after it, and trains like the bare job."""
    num_ranks = dist.get_world_size()
    if num_ranks % 2:
        return
    mesh = init_device_mesh(DEVICE.type, (num_ranks // 2, 2), mesh_dim_names=("efsdp", "ep"))
    whole = init_device_mesh(DEVICE.type, (num_ranks,), mesh_dim_names=("fsdp",))
    results = []
    for way in ("bare", "before", "after"):
        model = spread(Mixtures(NUM_BLOCKS, 4), mesh["ep"])
        overlapped = expert_parallel.overlap(model) if way == "before" else None
        for block in model.blocks:
            assert isinstance(block, MoE)
            fully_shard(block.experts, mesh=mesh["efsdp"])
            fully_shard(block, mesh=whole)
        fully_shard(model, mesh=whole)
        overlapped = expert_parallel.overlap(model) if way == "after" else overlapped
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        found: list[torch.Tensor] = []
        for _ in range(3):
            found += results_of(model)
            optimizer.step()
        results.append(found)
        if overlapped is not None:
            assert num_calls(overlapped) == 3 * 2 * NUM_BLOCKS
            overlapped.use(False)
            results_of(model)
            assert num_calls(overlapped) == 3 * 2 * NUM_BLOCKS
    assert_close(results[1], results[0], LIMIT)
    assert_equal(results[2], results[1])


def expert_parallel_with_tensor_parallel() -> None:
    """Every expert's hidden features are split over ranks that have the same tokens."""
    num_ranks = dist.get_world_size()
    if num_ranks % 2:
        return
    mesh = init_device_mesh(DEVICE.type, (num_ranks // 2, 2), mesh_dim_names=("ep", "etp"))
    results = []
    for is_ours in (False, True):
        model = spread(Mixtures(1, PER_RANK * num_ranks), mesh, ExpertTensorParallel)
        overlapped = expert_parallel.overlap(model) if is_ours else None
        results.append(results_of(model, rank=dist.get_rank() // 2))
        assert overlapped is None or num_calls(overlapped) == 2
    assert_close(results[1], results[0], LIMIT)


def expert_parallel_in_bf16() -> None:
    """Where torchtitan uses grouped matmuls it multiplies in bf16, whatever the weights are; so do we."""
    results = []
    for is_ours in (False, True):
        model = spread_model().float()
        for each in model.modules():
            if isinstance(each, GroupedExperts):
                each.use_grouped_mm = True
        if is_ours:
            expert_parallel.overlap(model)
        given = tokens_of_rank().float()
        results.append([model(given).detach()])
        assert results[-1][0].dtype == torch.float32
    assert_close(results[1], results[0], 2e-2)
