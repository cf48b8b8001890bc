"""The campaign of randomised launches, in small: no launch fails that would have succeeded without the filter."""

import pytest
from benchmarks.filter_campaign import Part, run


@pytest.mark.parametrize("sanitizer", [None, "address"])
def test_no_launch_fails_in_a_short_campaign(sanitizer: str | None) -> None:
    found = run(Part("short", 40_000, 3, sanitizer), seed=7)
    assert (found["exit_status"], found["reports"], found["failed"]) == (0, "", 0)
    assert int(str(found["launches"])) >= 40_000
    for name in ("swaps", "unloads", "forks", "limits_set", "launches_beyond_limits"):
        assert int(str(found[name])) > 0, name
