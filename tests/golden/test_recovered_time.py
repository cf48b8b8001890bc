"""What the analysis promises for a change, against what the change recovered on 2 H200s in the same run.

Recorded by `benchmarks/recovered_time.py`. Of the folder's third job, `serial`, far too much is promised (docs/analyze.md).
"""

from pathlib import Path

import pytest
from benchmarks.recovered_time import compare

FOLDER = Path(__file__).parents[1] / "data" / "recovered_time"
WITHIN = 0.3


def test_the_analysis_names_every_change_as_the_benchmark_does() -> None:
    assert all(row["simulated_ms"] > 0 for row in compare(FOLDER))


@pytest.mark.parametrize("job", ["starved", "tp8b"])
def test_what_is_promised_is_within_30_percent_of_the_quartiles_of_what_was_recovered(job: str) -> None:
    row = next(row for row in compare(FOLDER) if row["job"] == job)
    low_ms, high_ms = row["quartiles_ms"]
    assert (1 - WITHIN) * low_ms <= row["simulated_ms"] <= (1 + WITHIN) * high_ms
