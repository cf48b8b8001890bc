"""Stores a grid measured on GPUs: one file holds workloads that were measured one after the other, in several runs.

The file holds the captured step of each result with its lone times, so that the simulator can predict it later.
"""

from pathlib import Path
from typing import Any

import msgspec

from counterpoint.errors import CounterpointError, shown_path
from counterpoint.files import read_limited
from counterpoint.paper.values import PaperResult
from counterpoint.step import Step
from counterpoint.value import Value, check_continued, decode_json, json_output, require, write_json, write_whole

RESULTS = json_output("results", "conditions", "result")
KEPT_CONDITIONS = ("driver", "cuda", "torch", "nccl")  # these are the same for all workloads of a file
REMEDY = "Give a file that `bench paper -o` wrote on GPUs, or a new name"


class StoredGrid(Value, frozen=True, kw_only=True):
    """The contents of a file: conditions, a result for each workload, and captured steps by workload."""

    conditions: dict[str, Any]
    result: tuple[PaperResult, ...] = ()
    steps: dict[str, Step] = msgspec.field(default_factory=dict)

    def measured(self, num_ranks: int) -> frozenset[str]:
        """Return the workloads that the file holds for so many ranks."""
        return frozenset(found.workload for found in self.result if found.num_ranks == num_ranks)

    def with_result(self, result: PaperResult, step: Step, conditions: dict[str, Any]) -> "StoredGrid":
        """Return the grid with one workload added, or replaced by a new measurement; its date is added to the others."""
        others = tuple(found for found in self.result if found.workload != result.workload)
        kept = {**conditions, **self.conditions} if others else conditions
        if others and str(conditions["date"]) not in str(self.conditions.get("date", "")):
            kept["date"] = f"{self.conditions.get('date', 'unknown')}; {result.workload}: {conditions['date']}"
        return StoredGrid(conditions=kept, result=(*others, result), steps=self.steps | {result.workload: step})

    def save(self, path: Path) -> None:
        """Write the file. Raises `OSError`."""
        write_whole(path, f"{write_json(self)}\n".encode())


def read_grid(path: Path | None, conditions: dict[str, Any], num_ranks: int) -> StoredGrid:
    """Return the grid that a file holds, or an empty one without a file.

    Raises `CounterpointError` for a file of something else, of other ranks, or of other versions than `conditions`.
    """
    if path is None or not path.exists():
        return StoredGrid(conditions=conditions)
    content = bytes(read_limited(path, CounterpointError, REMEDY))
    found = decode_json(
        content, StoredGrid, CounterpointError, f"{shown_path(path)} holds no grid of the paper", f"{REMEDY}."
    )
    others = sorted({result.num_ranks for result in found.result} - {num_ranks})
    require(
        not others,
        CounterpointError,
        f"{shown_path(path)} was measured on {', '.join(map(str, others))} ranks, and these are {num_ranks}. {REMEDY}.",
    )
    if found.result:
        check_continued(path, KEPT_CONDITIONS, (found.conditions, conditions), REMEDY)
    return found
