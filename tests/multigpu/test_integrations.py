"""DDP, FSDP2 and tensor parallelism on two GPUs: copy engines against stock PyTorch, and a rank that stays away."""

import subprocess
from collections.abc import Callable

import pytest

Start = Callable[..., subprocess.CompletedProcess[str]]
JOBS = "../../helpers/jobs"  # the same that run on CPUs
GROUPS = {
    "collectives": ("all_reduces", "reduce_scatters"),
    "ddp": ("ddp_gradients", "ddp_types", "ddp_compression", "ddp_falls_back", "ddp_refuses"),
    "fsdp2": ("fsdp2_steps", "fsdp2_small_groups_stay", "fsdp2_refuses_a_buffer_in_use"),
    "tensor parallel": ("tensor_parallel_blocks", "tensor_parallel_trains", "tensor_parallel_annotated"),
    "tensor parallel, switched": ("tensor_parallel_switches", "tensor_parallel_whole_outputs", "tensor_parallel_in_a_job"),
    "tensor parallel, compiled": (
        "tensor_parallel_compiled",
        "tensor_parallel_checkpointed",
        "tensor_parallel_compiled_with_fsdp2",
    ),
    "the rest": (
        "tensor_parallel_refuses",
        "tensor_parallel_neighbors_part",
        "tensor_parallel_with_fsdp2",
        "memory_is_reported_and_given_back",
    ),
}


@pytest.mark.parametrize("group", GROUPS)
def test_the_integrations_do_what_pytorch_does(start_ranks: Start, group: str) -> None:
    done = start_ranks(f"{JOBS}/integrations", *GROUPS[group])
    print(done.stdout[-4000:], done.stderr[-3000:])
    assert done.returncode == 0
    assert all(f"{section}: ok" in done.stdout.splitlines() for section in GROUPS[group])


@pytest.mark.parametrize("integration", ["ddp", "fsdp2"])
def test_a_rank_that_stays_away_is_one_line_on_the_others_and_no_hang(start_ranks: Start, integration: str) -> None:
    done = start_ranks(f"{JOBS}/integration_faults", integration, limit_s=90)
    print(done.stdout[-4000:], done.stderr[-3000:])
    assert any("OperatorError" in line and "did not end on the GPU" in line for line in done.stdout.splitlines())
