"""DDP, FSDP2 and tensor parallelism on two GPUs: copy engines against stock PyTorch, and a rank that stays away."""

import re
import subprocess
from collections.abc import Callable

import pytest

Start = Callable[..., subprocess.CompletedProcess[str]]
JOBS = "../../helpers/jobs"  # the same that run on CPUs
GROUPS = {
    "collectives": ("all_reduces", "reduce_scatters"),
    "ddp": ("ddp_gradients", "ddp_types", "ddp_compression", "ddp_falls_back", "ddp_refuses"),
    "fsdp2": ("fsdp2_steps", "fsdp2_small_groups_stay", "fsdp2_refuses_a_buffer_in_use"),
    "the job's own collectives": (
        "bare_collectives_give_the_librarys_results",
        "bare_collectives_repeated",
        "bare_collectives_in_place",
        "bare_collectives_left_to_the_library",
        "bare_collectives_leave_ddp_alone",
        "bare_collectives_by_other_references",
        "bare_collectives_coalesced",
        "bare_collectives_compiled",
        "bare_collectives_without_memory",
    ),
    "ddp, switched": (
        "ddp_switched_off_is_a_bare_job",
        "ddp_switches_between_steps",
        "ddp_compiled",
        "ddp_refuses_a_second_hook",
        "ddp_models_that_come_and_go",
        "ddp_checkpoints",
        "ddp_copies_of_a_model",
        "ddp_gives_way_to_a_hook_of_the_job",
        "ddp_without_memory",
    ),
    "ddp, in place": (
        "ddp_in_place",
        "ddp_joins_buckets_in_place",
        "ddp_in_place_of_several_types",
        "ddp_in_place_refuses",
        "ddp_in_place_that_leaves_out_parameters",
        "ddp_in_place_by_turns",
        "ddp_in_place_among_other_passes",
        "ddp_in_place_among_hooks_of_the_job",
        "ddp_in_place_with_checkpoints",
        "ddp_in_place_without_memory",
        "ddp_in_place_without_room",
    ),
    "fsdp2, as frameworks use it": (
        "fsdp2_as_frameworks_use_it",
        "fsdp2_divides_gradients_as_told",
        "fsdp2_in_place",
        "fsdp2_on_a_mesh_of_two_dimensions",
    ),
    "fsdp2, switched": (
        "fsdp2_switches_between_steps",
        "fsdp2_refuses_a_second_call",
        "fsdp2_two_models",
        "fsdp2_checkpoints",
        "fsdp2_without_memory",
    ),
    "tensor parallel": ("tensor_parallel_blocks", "tensor_parallel_trains", "tensor_parallel_annotated"),
    "tensor parallel, switched": (
        "tensor_parallel_switches",
        "tensor_parallel_whole_activations",
        "tensor_parallel_whole_and_frozen",
        "tensor_parallel_whole_and_packed",
        "tensor_parallel_whole_and_small",
        "tensor_parallel_whole_and_unused",
        "tensor_parallel_whole_neighbors_part",
        "tensor_parallel_whole_lists_part",
        "tensor_parallel_in_a_job",
    ),
    "tensor parallel, compiled": (
        "tensor_parallel_compiled",
        "tensor_parallel_checkpointed",
        "tensor_parallel_compiled_with_fsdp2",
    ),
    "tensor parallel, by torchtitan 0.3": (
        "tensor_parallel_configured",
        "tensor_parallel_configured_with_fsdp",
        "tensor_parallel_configured_compiled",
        "tensor_parallel_configured_in_part",
        "tensor_parallel_configured_refused",
    ),
    "tensor parallel, by torchtitan 0.3 with plain tensors": (
        "tensor_parallel_plain",
        "tensor_parallel_plain_with_fsdp",
        "tensor_parallel_plain_compiled",
        "tensor_parallel_plain_in_part",
        "tensor_parallel_plain_refused",
    ),
    "Megatron-LM and TransformerEngine": (
        "megatron_linears",
        "megatron_linears_of_engine",
        "megatron_first_micro_batch",
        "megatron_whole_operators",
        "megatron_other_calls",
        "megatron_saved_tensors",
        "megatron_refusals",
    ),
    "the rest": (
        "tensor_parallel_refuses",
        "tensor_parallel_keeps_other_formulas",
        "tensor_parallel_left_to_dtensor",
        "tensor_parallel_neighbors_part",
        "tensor_parallel_neighbors_under_other_conditions",
        "tensor_parallel_with_fsdp2",
        "memory_is_reported_and_given_back",
    ),
}

TWO_LEVELS = {
    "collectives": (
        "two_levels_give_the_sequential_results",
        "two_levels_of_some_ranks",
        "two_levels_left_to_the_library",
        "two_levels_where_the_estimate_says_so",
        "two_levels_without_memory",
    ),
    "ddp": ("two_levels_under_ddp",),
    "fsdp2": ("two_levels_under_fsdp2",),
}


@pytest.mark.parametrize("group", GROUPS)
def test_the_integrations_do_what_pytorch_does(start_ranks: Start, group: str) -> None:
    done = start_ranks(f"{JOBS}/integrations", *GROUPS[group])
    print(done.stdout[-4000:], done.stderr[-3000:])
    assert done.returncode == 0
    assert all(f"{section}: ok" in done.stdout.splitlines() for section in GROUPS[group])


def test_transformer_engines_own_linears(start_ranks: Start) -> None:
    pytest.importorskip("transformer_engine")
    done = start_ranks("engine_linears")
    print(done.stdout[-4000:], done.stderr[-3000:])
    assert done.returncode == 0
    assert "engine_linears: ok" in done.stdout.splitlines()


@pytest.mark.parametrize("group", TWO_LEVELS)
def test_two_levels_do_what_one_collective_does(start_ranks: Start, four_ranks: tuple[str, ...], group: str) -> None:
    """Two hosts of two ranks are pretended, so NCCL is between some of the ranks, and copy engines between others."""
    done = start_ranks(f"{JOBS}/integrations", *TWO_LEVELS[group], torchrun=four_ranks)
    print(done.stdout[-4000:], done.stderr[-3000:])
    assert done.returncode == 0
    assert all(f"{section}: ok" in done.stdout.splitlines() for section in TWO_LEVELS[group])


@pytest.mark.parametrize("integration", ["ddp", "fsdp2", "collectives"])
def test_a_rank_that_stays_away_is_one_line_on_the_others_and_no_hang(start_ranks: Start, integration: str) -> None:
    done = start_ranks(f"{JOBS}/integration_faults", integration, limit_s=90)
    print(done.stdout[-4000:], done.stderr[-3000:])
    assert any("OperatorError" in line and "did not end on the GPU" in line for line in done.stdout.splitlines())


def test_asynchronous_and_captured_collectives_and_the_librarys_own_divisor(start_ranks: Start) -> None:
    done = start_ranks("bare_collectives")
    print(done.stdout[-4000:], done.stderr[-3000:])
    assert done.returncode == 0
    said = re.findall(r"rank 0: (\w+): ok", done.stdout)  # two ranks may write on one line
    assert said == ["overlapping", "streams", "captured", "given_back", "divisor"]
