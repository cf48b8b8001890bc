"""DDP, FSDP2, tensor and expert parallelism on copy engines against stock PyTorch, on CPUs over gloo; and ranks that die."""

import re
from pathlib import Path

import pytest

from helpers.gloo_ranks import JOBS, Ended, run_ranks

pytestmark = pytest.mark.xdist_group("ranks")  # one worker, for many of these read what one job printed

SECTIONS = (
    "all_reduces",
    "reduce_scatters",
    "bare_collectives_give_the_librarys_results",
    "bare_collectives_repeated",
    "bare_collectives_in_place",
    "bare_collectives_answer_as_the_librarys",
    "bare_collectives_left_to_the_library",
    "bare_collectives_leave_ddp_alone",
    "bare_collectives_without_memory",
    "ddp_gradients",
    "ddp_types",
    "ddp_among_ignored_parameters",
    "ddp_compression",
    "ddp_falls_back",
    "ddp_refuses",
    "ddp_switched_off_is_a_bare_job",
    "ddp_switches_between_steps",
    "ddp_refuses_a_second_hook",
    "ddp_models_that_come_and_go",
    "ddp_keeps_no_model",
    "ddp_checkpoints",
    "ddp_copies_of_a_model",
    "ddp_gives_way_to_a_hook_of_the_job",
    "ddp_in_join",
    "ddp_sparse_gradients",
    "ddp_without_memory",
    "ddp_in_place",
    "ddp_joins_buckets_in_place",
    "ddp_in_place_of_several_types",
    "ddp_in_place_refuses",
    "ddp_in_place_that_leaves_out_parameters",
    "ddp_in_place_by_turns",
    "ddp_in_place_among_other_passes",
    "ddp_in_place_among_passes_of_a_frozen_model",
    "ddp_in_place_among_hooks_of_the_job",
    "ddp_in_place_with_checkpoints",
    "ddp_in_place_without_memory",
    "ddp_in_place_without_room",
    "fsdp2_steps",
    "fsdp2_small_groups_stay",
    "fsdp2_refuses_a_buffer_in_use",
    "fsdp2_as_frameworks_use_it",
    "fsdp2_divides_gradients_as_told",
    "fsdp2_in_place",
    "fsdp2_on_a_mesh_of_two_dimensions",
    "fsdp2_switches_between_steps",
    "fsdp2_switches_while_parameters_are_gathered",
    "fsdp2_refuses_a_second_call",
    "fsdp2_undoes_modules_that_share_a_group",
    "fsdp2_leaves_collectives_of_the_job",
    "fsdp2_keeps_no_model",
    "fsdp2_two_models",
    "fsdp2_checkpoints",
    "fsdp2_without_memory",
    "tensor_parallel_blocks",
    "tensor_parallel_trains",
    "tensor_parallel_annotated",
    "tensor_parallel_hands_dtensors_on",
    "tensor_parallel_leaves_local_inputs",
    "tensor_parallel_lays_gradients_out_alike",
    "tensor_parallel_frozen",
    "tensor_parallel_refuses",
    "tensor_parallel_keeps_other_formulas",
    "tensor_parallel_left_to_dtensor",
    "tensor_parallel_neighbors_part",
    "tensor_parallel_neighbors_under_other_conditions",
    "tensor_parallel_with_fsdp2",
    "tensor_parallel_switches",
    "tensor_parallel_without_memory",
    "tensor_parallel_whole_activations",
    "tensor_parallel_whole_and_frozen",
    "tensor_parallel_whole_and_packed",
    "tensor_parallel_whole_and_left_to_dtensor",
    "tensor_parallel_whole_and_unused",
    "tensor_parallel_whole_and_distributed",
    "tensor_parallel_whole_neighbors_part",
    "tensor_parallel_whole_lists_part",
    "tensor_parallel_whole_on_two_meshes",
    "tensor_parallel_whole_under_autocast",
    "tensor_parallel_whole_with_fsdp2",
    "tensor_parallel_in_a_job",
    "tensor_parallel_compiled_with_fsdp2",
    "expert_parallel_layers",
    "expert_parallel_refuses",
    "expert_parallel_of_transformers",
    "expert_parallel_in_a_job",
    "expert_parallel_checkpointed",
    "expert_parallel_with_fsdp2",
    "expert_parallel_with_tensor_parallel",
    "expert_parallel_in_bf16",
    "memory_is_reported_and_given_back",
)
TWO_LEVELS = (  # test_two_levels.py runs them, also on eight ranks
    "two_levels_give_the_sequential_results",
    "two_levels_left_to_the_library",
    "two_levels_of_some_ranks",
    "two_levels_under_ddp",
    "two_levels_under_fsdp2",
    "two_levels_where_the_estimate_says_so",
    "two_levels_without_memory",
)
NUM_RANKS = 4
COMPILED = (  # two ranks are enough, and compile sooner
    "bare_collectives_compiled",
    "ddp_compiled",
    "tensor_parallel_compiled",
    "tensor_parallel_checkpointed",
)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    """All sections in one job, for starting ranks takes longer than most of them."""
    return run_ranks("integrations", NUM_RANKS, *SECTIONS, folder=tmp_path_factory.mktemp("ranks"), limit_s=600)


@pytest.fixture(scope="module")
def ended_compiled(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    return run_ranks("integrations", 2, *COMPILED, folder=tmp_path_factory.mktemp("ranks"), limit_s=600)


@pytest.mark.parametrize("section", SECTIONS)
def test_the_integrations_do_what_pytorch_does(ended: list[Ended], section: str) -> None:
    output = ended[0].output
    assert f"{section}: ok" in output.splitlines(), output + ended[0].errors[-3000:]


@pytest.mark.parametrize("section", COMPILED)
def test_what_is_compiled_does_what_it_does_eagerly(ended_compiled: list[Ended], section: str) -> None:
    output = ended_compiled[0].output
    assert f"{section}: ok" in output.splitlines(), output + ended_compiled[0].errors[-3000:]


def test_no_section_is_left_out(ended: list[Ended]) -> None:
    found = [line.partition(":")[0] for line in ended[0].output.splitlines() if line.endswith(": ok")]
    assert found == list(SECTIONS)
    listed = re.findall(r"^        (\w+),$", (JOBS / "integrations.py").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(SECTIONS + COMPILED + TWO_LEVELS)
    assert {rank.status for rank in ended} == {0}


def test_what_only_an_odd_number_of_ranks_shows(tmp_path: Path) -> None:
    """Dividing by 3 and multiplying by a third differ in the last bit."""
    sections = ("ddp_switched_off_is_a_bare_job", "bare_collectives_in_place")
    first, *others = run_ranks("integrations", 3, *sections, folder=tmp_path, limit_s=60)
    assert first.output.splitlines() == [f"{section}: ok" for section in sections], first.output + first.errors[-3000:]
    assert all(rank.status == 0 for rank in others)


def test_what_the_library_does_instead_is_said_once(ended: list[Ended]) -> None:
    said = [line for line in ended[0].errors.splitlines() if "The library runs a gradient bucket" in line]
    assert len(said) == 1
    assert "below 4 MiB" in said[0]


@pytest.mark.parametrize("integration", ["ddp", "fsdp2", "collectives"])
def test_a_rank_that_dies_is_one_line_on_the_others_and_no_hang(integration: str, tmp_path: Path) -> None:
    first, dead = run_ranks("integration_faults", 2, integration, folder=tmp_path, limit_s=60)
    assert dead.status == 9
    assert first.status == 2, first.errors
    (line,) = first.output.splitlines()
    assert line.startswith("OperatorError: A rank of the group did not exchange its blocks")
    assert line.endswith("start all ranks again.")
