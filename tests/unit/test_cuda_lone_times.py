"""What the profiler adds to kernels is taken out of captured steps' lone times."""

import pytest

from counterpoint.cuda.graph_reading import without_excess

# of an H200, 2026-11-29: multiplying, softmax, cumulative sums, a layer norm, GELU, and a fill of some bytes; in a row,
# without profiler and events, softmax takes 481 us and GELU 173
PROFILED_US = [186.2, 515.6, 593.8, 103.9, 177.2, 0.7]
BY_EVENTS_US = [193.3, 486.0, 599.3, 109.5, 175.4, 6.5]


def test_kernels_that_a_profiler_lengthens_get_their_times_without_it() -> None:
    found = without_excess(PROFILED_US, BY_EVENTS_US, [0, 1, 2, 3, 4])
    assert found == pytest.approx([186.2, 480.5, 593.8, 103.9, 169.9, 0.7], abs=0.1)


def test_a_step_of_such_kernels_alone_gets_the_times_between_events() -> None:
    assert without_excess([513.8, 516.3], [483.8, 482.1], [0, 1]) == [483.8, 482.1]


def test_short_kernels_and_other_operations_keep_their_profiled_times() -> None:
    assert without_excess([2.0, 300.0, 300.0], [1.0, 304.0, 200.0], [0, 1]) == [2.0, 300.0, 300.0]


def test_times_between_events_that_cannot_be_change_little() -> None:
    assert without_excess([100.0, 100.0, 100.0], [103.0, 103.0, 5.0], [0, 1, 2]) == [100.0, 100.0, 90.0]
