"""DDP, FSDP2, tensor and expert parallelism on copy engines against stock PyTorch, on CPUs over gloo; and ranks that die."""

import re
from collections.abc import Callable
from functools import cache
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
COMPILED = ("bare_collectives_compiled", "ddp_compiled", "tensor_parallel_compiled")
COMPILED_TOO = (  # compiling takes half a minute of each rank
    "tensor_parallel_checkpointed",
    "tensor_parallel_compiled_with_fsdp2",
    "tensor_parallel_configured_compiled",
    "tensor_parallel_plain_compiled",
)
MODULES = sorted((JOBS / "integration_sections").glob("*.py"))
DEFINED = [name for each in MODULES for name in re.findall(r"^def ([a-z]\w*)\(\) -> None:", each.read_text(), re.MULTILINE)]
TWO_LEVELS = [name for name in DEFINED if name.startswith("two_levels_")]  # run by test_two_levels.py
OTHERS = [name for name in DEFINED if name not in (*ON_FOUR, *COMPILED, *COMPILED_TOO, *TWO_LEVELS)]
JOBS_OF_SECTIONS = {
    "on four": (4, ON_FOUR),
    "compiled": (2, COMPILED),
    "others": (2, OTHERS),
    "compiled too": (2, COMPILED_TOO),
}
Run = Callable[[str], list[Ended]]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """What the ranks of a job left behind: many sections in one, for starting ranks takes longer than most of them."""

    @cache
    def run(job: str) -> list[Ended] | TimeoutError:
        num_ranks, sections = JOBS_OF_SECTIONS[job]
        try:
            return run_ranks("integrations", num_ranks, *sections, folder=tmp_path_factory.mktemp("ranks"), limit_s=600)
        except TimeoutError as late:
            return late

    def ended_of(job: str) -> list[Ended]:
        found = run(job)
        if isinstance(found, TimeoutError):
            raise found
        return found

    return ended_of


@pytest.mark.parametrize(
    ("job", "section"),
    [
        pytest.param(job, section, marks=[pytest.mark.slow] * (job == "compiled too"), id=section)
        for job, (_, sections) in JOBS_OF_SECTIONS.items()
        for section in sections
    ],
)
def test_the_integrations_do_what_pytorch_does(ended: Run, job: str, section: str) -> None:
    first = ended(job)[0]
    assert f"{section}: ok" in first.output.splitlines(), first.output + first.errors[-3000:]


@pytest.mark.parametrize("job", [job for job in JOBS_OF_SECTIONS if job != "compiled too"])
def test_every_section_ran_in_turn_and_every_rank_ended_well(ended: Run, job: str) -> None:
    first, *_ = ranks = ended(job)
    found = [line.partition(":")[0] for line in first.output.splitlines() if line.endswith(": ok")]
    assert found == list(JOBS_OF_SECTIONS[job][1])
    assert {rank.status for rank in ranks} == {0}


def test_what_only_an_odd_number_of_ranks_shows(tmp_path: Path) -> None:
    """Dividing by 3 and multiplying by a third differ in the last bit."""
    sections = ("ddp_switched_off_is_a_bare_job", "bare_collectives_in_place")
    first, *others = run_ranks("integrations", 3, *sections, folder=tmp_path, limit_s=60)
    assert first.output.splitlines() == [f"{section}: ok" for section in sections], first.output + first.errors[-3000:]
    assert all(rank.status == 0 for rank in others)


def test_what_the_library_does_instead_is_said_once(ended: Run) -> None:
    said = [line for line in ended("others")[0].errors.splitlines() if "The library runs a gradient bucket" in line]
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
