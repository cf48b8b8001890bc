"""Writes `docs/allocations.md`, the reference allocations, as a Markdown page."""

from collections.abc import Iterator, Sequence

from counterpoint.footprints import known_footprints
from counterpoint.machine import Machine
from counterpoint.paper.allocations import CASES, LIGHT, SHAPED_TILES, Allocation, MachineAllocations
from counterpoint.paper.launches import compiled_launches
from counterpoint.step import Footprint
from counterpoint.units import format_change
from counterpoint.value import text_output

ALLOCATIONS = text_output("page", (".md",), "# Reference allocations\n")
INTRODUCTION = """# Reference allocations

How much dynamic shared memory per CTA sets each residency of the first paper's matmuls, what that leaves of an SM for the
collective, and how the step's time changes: for every shipped GPU. `counterpoint bench allocations -o docs/allocations.md`
made this page, without a GPU.

- **Bytes.** A kernel launched with any number of bytes of dynamic shared memory from the first to the last of a row has that
  residency. One byte more begins the next row, so the rows show how sensitive the result is to the bytes. The first row of a
  tile is the kernel as it is.
- **What is left** of an SM that holds so many CTAs, under the largest carveout: bytes of shared memory, and registers of the
  fullest sub-partition. *Library*: whether one CTA of NCCL or RCCL fits beside. *Light*: how many CTAs of a light kernel do,
  as a captured step can have in a collective's place: {light}.
- **Time** is simulated, relative to the kernel as it is, both with the greatest priority for collectives where the driver
  heeds it. The shipped workloads run four iterations on four ranks. Only the H200 (up to 4 GPUs) and the H100 (up to 2) were
  compared with hardware; on other GPUs neither the times nor the launches were ever measured.
- The matmuls are those of `paper/workloads.py` in bf16. Their registers and shared memory were compiled, not measured:
  {source}.
- How much slower a matmul of fewer CTAs per SM is, was fitted on an H200 (`saturation_bytes_in_flight` in
  [simulator.md](simulator.md)). Before Hopper the same tile keeps fewer bytes in shared memory: its slowdown is uncertain.
"""
NONE = "none"


def allocations_page(found: Sequence[tuple[Machine, MachineAllocations]]) -> str:
    """Return the whole page."""
    light = f"{LIGHT.threads_per_cta} threads, {LIGHT.registers_per_thread} registers per thread, no shared memory"
    lines = [INTRODUCTION.format(light=light, source=compiled_launches().source)]
    lines += ["## The reference allocation of each workload", "", *_summary([each for _, each in found]), ""]
    for machine, each in found:
        lines += [f"## {each.machine}: {each.title}", "", *_machine(machine, each), ""]
    return "\n".join(lines).rstrip() + "\n"


def _summary(found: Sequence[MachineAllocations]) -> Iterator[str]:
    """Yield, by machine and workload, the cap with the shortest simulated time, if any is faster than no cap."""
    names = [f"{case}_{tile}" for case in CASES for tile in SHAPED_TILES]
    yield "The bytes per CTA with the shortest simulated time, and the change against no cap. *none*: no cap saves 1 %, the"
    yield "least that a simulation can tell."
    yield ""
    yield f"| machine | {' | '.join(names)} |"
    yield f"|---|{'---|' * len(names)}"
    for each in found:
        cells = [_reference(each, case, tile) for case in CASES for tile in SHAPED_TILES]
        yield f"| {each.machine} | {' | '.join(cells)} |"


def _reference(found: MachineAllocations, case: str, tile: str) -> str:
    best = found.reference(case, tile)
    return NONE if best is None else f"{best[0].from_bytes:,} ({format_change(best[1])})"


def _machine(machine: Machine, found: MachineAllocations) -> Iterator[str]:
    name = "RCCL" if machine.gpu.vendor == "amd" else "NCCL"
    capability = machine.gpu.compute_capability
    known = next(
        each for each in known_footprints() if each.library == name.lower() and capability in each.compute_capabilities
    )
    yield f"A CTA of {name} takes {_launch(found.library)} ({known.status}; the source is in `footprints.toml`)."
    yield ""
    yield f"| tile | CTAs per SM | bytes | left: bytes | registers | library | light | {' | '.join(CASES)} |"
    yield f"|---|---|---|---|---|---|---|{'---|' * len(CASES)}"
    for row in found.rows:
        tile = "" if row.is_capped else f"{row.tile}: {_launch(found.matmuls[row.tile])}"
        yield f"| {tile} | {_figures(row)} | {' | '.join(_change(row, case) for case in CASES)} |"


def _launch(footprint: Footprint) -> str:
    launch = f"{footprint.threads_per_cta} threads x {footprint.registers_per_thread} registers"
    return f"{launch}, {footprint.shared_bytes:,} bytes"


def _figures(row: Allocation) -> str:
    fits = "fits" if row.fits_library else "no"
    return (
        f"{row.ctas_per_sm} | {row.from_bytes:,} to {row.to_bytes:,} | {row.free_shared_bytes:,} | {row.free_registers:,} | "
        f"{fits} | {row.num_light}"
    )


def _change(row: Allocation, case: str) -> str:
    return format_change(row.changes[case]) if row.is_capped else ""
