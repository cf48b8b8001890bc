"""DDP, FSDP2, tensor and expert parallelism on copy engines against stock PyTorch, on CPUs over gloo; and ranks that die."""

import re
from pathlib import Path

import pytest

from helpers.gloo_ranks import JOBS, Ended, run_ranks

pytestmark = pytest.mark.xdist_group("ranks")  # one worker, for many of these read what one job printed

ON_FOUR = (  # with two ranks these have no second peer, or no mesh of two dimensions; the others take half the time on two
    "bare_collectives_give_the_librarys_results",
    "bare_collectives_coalesced",
    "tensor_parallel_configured_with_fsdp",
    "ddp_gradients",
    "ddp_in_place",
    "ddp_switches_between_steps",
    "expert_parallel_layers",
    "expert_parallel_with_fsdp2",
    "expert_parallel_with_tensor_parallel",
    "all_reduces",
    "reduce_scatters",
    "megatron_linears",
    "tensor_parallel_plain_with_fsdp",
    "fsdp2_steps",
    "fsdp2_as_frameworks_use_it",
    "fsdp2_on_a_mesh_of_two_dimensions",
    "tensor_parallel_blocks",
    "tensor_parallel_with_fsdp2",
    "tensor_parallel_switches",
    "tensor_parallel_whole_with_fsdp2",
    "tensor_parallel_whole_on_two_meshes",
)
COMPILED = (
    "bare_collectives_compiled",
    "ddp_compiled",
    "tensor_parallel_compiled",
    "tensor_parallel_checkpointed",
    "tensor_parallel_configured_compiled",
    "tensor_parallel_plain_compiled",
)
MODULES = sorted((JOBS / "integration_sections").glob("*.py"))
DEFINED = [name for each in MODULES for name in re.findall(r"^def ([a-z]\w*)\(\) -> None:", each.read_text(), re.MULTILINE)]
TWO_LEVELS = [name for name in DEFINED if name.startswith("two_levels_")]  # run by test_two_levels.py, also on eight ranks
SECTIONS = [name for name in DEFINED if name not in (*ON_FOUR, *COMPILED, *TWO_LEVELS)]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    """Many sections in one job, for starting ranks takes longer than most of them."""
    return run_ranks("integrations", 2, *SECTIONS, folder=tmp_path_factory.mktemp("ranks"), limit_s=600)


@pytest.fixture(scope="module")
def ended_on_four(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    return run_ranks("integrations", 4, *ON_FOUR, folder=tmp_path_factory.mktemp("ranks"), limit_s=600)


@pytest.fixture(scope="module")
def ended_compiled(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    return run_ranks("integrations", 2, *COMPILED, folder=tmp_path_factory.mktemp("ranks"), limit_s=600)


@pytest.mark.parametrize("section", SECTIONS)
def test_the_integrations_do_what_pytorch_does(ended: list[Ended], section: str) -> None:
    output = ended[0].output
    assert f"{section}: ok" in output.splitlines(), output + ended[0].errors[-3000:]


@pytest.mark.parametrize("section", ON_FOUR)
def test_the_integrations_do_what_pytorch_does_on_four_ranks(ended_on_four: list[Ended], section: str) -> None:
    output = ended_on_four[0].output
    assert f"{section}: ok" in output.splitlines(), output + ended_on_four[0].errors[-3000:]


@pytest.mark.parametrize("section", COMPILED)
def test_what_is_compiled_does_what_it_does_eagerly(ended_compiled: list[Ended], section: str) -> None:
    output = ended_compiled[0].output
    assert f"{section}: ok" in output.splitlines(), output + ended_compiled[0].errors[-3000:]


def test_every_section_ran_in_turn_and_every_rank_ended_well(ended: list[Ended], ended_on_four: list[Ended]) -> None:
    for ranks, sections in ((ended, SECTIONS), (ended_on_four, list(ON_FOUR))):
        found = [line.partition(":")[0] for line in ranks[0].output.splitlines() if line.endswith(": ok")]
        assert found == sections
        assert {rank.status for rank in ranks} == {0}


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
