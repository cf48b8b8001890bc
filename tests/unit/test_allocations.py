"""Reference allocations: the bytes set the residency that they are said to set, and the page is what the command writes."""

import re
from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace

from counterpoint.machine import load_machine, machine_names
from counterpoint.occupancy import residency
from counterpoint.paper.allocations import CASES, MachineAllocations, allocations_of
from counterpoint.report.allocations import allocations_page
from helpers.command import counterpoint, refusal

PAGE = Path(__file__).parents[2] / "docs" / "allocations.md"
CHANGE = re.compile(r"[+-]?\d+\.\d %")
# Simulated figures move when the simulator does; beyond this the page must be made again: points, and a share of the figure.
TOLERANCE, RELATIVE_TOLERANCE = 3.0, 0.1


@cache
def found(name: str) -> MachineAllocations:
    return allocations_of(load_machine(name))


@pytest.mark.parametrize("name", machine_names(variants=False))
def test_every_byte_of_a_row_sets_its_residency_and_the_next_one_does_not(name: str) -> None:
    gpu = load_machine(name).gpu
    for row in found(name).rows:

        def ctas(num_bytes: int, tile: str = row.tile) -> int:
            return residency(gpu, replace(found(name).matmuls[tile], dynamic_shared_bytes=num_bytes)).ctas_per_sm

        assert ctas(row.from_bytes) == ctas((row.from_bytes + row.to_bytes) // 2) == ctas(row.to_bytes) == row.ctas_per_sm
        assert ctas(row.to_bytes + 1) < row.ctas_per_sm
        assert not row.is_capped or ctas(row.from_bytes - 1) > row.ctas_per_sm


@pytest.mark.parametrize("name", machine_names(variants=False))
def test_what_is_left_is_what_the_matmuls_do_not_hold(name: str) -> None:
    gpu = load_machine(name).gpu
    for row in found(name).rows:
        assert 0 <= row.free_shared_bytes <= gpu.shared_bytes_per_sm - row.ctas_per_sm * row.from_bytes
        assert 0 <= row.free_registers < gpu.registers_per_sub_partition
        assert set(row.changes) == set(CASES)
        assert row.is_capped or not any(row.changes.values())
        assert not row.fits_library or row.free_shared_bytes >= found(name).library.shared_bytes


def test_the_page_is_what_the_command_writes() -> None:
    made = allocations_page([(load_machine(name), found(name)) for name in machine_names(variants=False)])
    stored = PAGE.read_text()
    remedy = "make it again: counterpoint bench allocations -o docs/allocations.md"
    assert CHANGE.sub("", stored) == CHANGE.sub("", made), remedy
    changes = [[float(each[:-2]) for each in CHANGE.findall(text)] for text in (stored, made)]
    for old, new in zip(*changes, strict=True):
        assert abs(old - new) <= TOLERANCE + RELATIVE_TOLERANCE * abs(old), remedy


def test_the_command_prints_one_machine_and_refuses_an_unknown_one() -> None:
    done = counterpoint("bench", "allocations", "a40")
    assert done.returncode == 0, done.stderr
    assert "## a40: " in done.stdout
    assert "## h100: " not in done.stdout
    assert "Unknown machine" in refusal("bench", "allocations", "nothing")
