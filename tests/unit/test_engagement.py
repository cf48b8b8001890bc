"""The proof that controls took effect: counted for a report, and an error where it is asked to be strict."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.engagement import Engagement, EngagementRow, State, require_engaged, summarize_engagements
from counterpoint.errors import CounterpointError, EngagementError

VERIFIED = Engagement(control="priority", target="ncclDevKernel", state="verified", asked="priority -5", found="priority -5")
FAILED = Engagement(
    control="residency_cap",
    target="matmul",
    state="failed",
    asked="at most 2 CTAs per SM",
    found="4 CTAs per SM",
    reason="the driver holds another value",
)
REFUSED = Engagement(
    control="transport", target="ncclDevKernel", state="refused", asked="copy_engine", reason="it keeps its transport"
)


def test_equal_engagements_are_counted_in_the_order_of_their_first() -> None:
    rows = summarize_engagements([FAILED, VERIFIED, FAILED, REFUSED, FAILED, VERIFIED])
    assert rows == (
        EngagementRow(engagement=FAILED, count=3),
        EngagementRow(engagement=VERIFIED, count=2),
        EngagementRow(engagement=REFUSED, count=1),
    )


def test_engagements_that_differ_in_what_was_found_are_not_added_up() -> None:
    other = Engagement(control="residency_cap", target="matmul", state="verified", asked="at most 2 CTAs per SM", found="2")
    assert [row.count for row in summarize_engagements([FAILED, other, FAILED])] == [2, 1]


@given(st.lists(st.sampled_from([VERIFIED, FAILED, REFUSED])))
def test_no_engagement_is_lost_or_made_up(engagements: list[Engagement]) -> None:
    rows = summarize_engagements(engagements)
    assert {row.engagement: row.count for row in rows} == {each: engagements.count(each) for each in engagements}


def test_strict_is_content_with_verified_controls_and_with_none() -> None:
    require_engaged([])
    require_engaged([VERIFIED, VERIFIED])


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("bad", [FAILED, REFUSED], ids=["failed", "refused"])
def test_strict_finds_the_one_control_without_effect(bad: Engagement, place: int) -> None:
    engagements = [VERIFIED, VERIFIED]
    engagements.insert(place, bad)
    with pytest.raises(EngagementError):
        require_engaged(engagements)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (FAILED, ("residency_cap", "matmul", "failed", "at most 2 CTAs per SM", "4 CTAs per SM", "another value")),
        (REFUSED, ("transport", "ncclDevKernel", "refused", "copy_engine", "nothing", "it keeps its transport")),
    ],
    ids=["failed", "refused"],
)
def test_the_error_of_strict_is_one_line_with_what_was_asked_and_what_was_found(
    bad: Engagement, words: tuple[str, ...]
) -> None:
    with pytest.raises(CounterpointError) as caught:
        require_engaged([bad])
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("state", ["failed", "refused"])
def test_a_kernel_name_of_templates_does_not_flood_the_error(state: State) -> None:
    long = Engagement(control="priority", target="void kernel<" * 100, state=state, asked="priority -5", reason="no")
    with pytest.raises(EngagementError) as caught:
        require_engaged([long])
    assert len(str(caught.value)) < 200
