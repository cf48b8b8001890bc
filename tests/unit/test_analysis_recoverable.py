"""What can be recovered: no more than controls can do, and nothing of what was waited for other ranks."""

from pathlib import Path

import pytest

from counterpoint.analysis.combine import combine
from counterpoint.analysis.rank import analyze_rank
from counterpoint.analysis.recoverable import find_recoverable
from counterpoint.analysis.values import Recoverable
from counterpoint.job import load_job
from counterpoint.traces.formats import read_activity
from helpers.command import TRACES

DDP = [TRACES / f"ddp.rank{rank}.json.gz" for rank in (0, 1)]


def recovered(source: Path, *files: Path) -> tuple[Recoverable, ...]:
    """Of the step in `source`, with the traces of `files` beside each other."""
    analysis = combine([analyze_rank(read_activity(file)) for file in files])
    return find_recoverable(analysis, load_job(str(source)), str(source))


def test_entries_come_by_value_with_lines_to_paste_and_marks_on_what_the_replay_cannot_tell() -> None:
    found = recovered(TRACES / "fsdp2.rank0.json.gz", TRACES / "fsdp2.rank0.json.gz")
    assert [each.recovers_us for each in found] == sorted((each.recovers_us for each in found), reverse=True)
    copies = next(each for each in found if each.what == "copy engines, reductions too")
    assert copies.recovers_us == pytest.approx(7190, rel=0.15)
    assert "fsdp2.use_copy_engines(model)" in copies.apply
    assert copies.saved_us == pytest.approx(2427 + 1464, abs=2)  # FSDP's copies out of and into flat buffers
    assert not copies.is_within_replay_error


def test_the_order_of_the_files_changes_nothing() -> None:
    assert recovered(DDP[1], *DDP) == recovered(DDP[1], *reversed(DDP))


def test_waits_that_other_ranks_show_are_not_recovered() -> None:
    alone, together = (sum(each.recovers_us for each in recovered(DDP[1], *files)) for files in (DDP[1:], DDP))
    assert together <= alone
