"""What a line of ours takes from somebody else's error."""

import pytest

from counterpoint.errors import cause_of


@pytest.mark.parametrize(
    ("text", "cause"),
    [("", ""), ("  \n ", ""), ("one", "one"), ("\n first line \nsecond", "first line "), ("x" * 30, "x" * 20)],
)
def test_a_cause_is_the_first_line_cut_and_nothing_where_nothing_is_said(text: str, cause: str) -> None:
    assert cause_of(RuntimeError(text), 20) == cause


def test_a_cause_is_whole_unless_a_length_is_given() -> None:
    assert cause_of(ValueError("x" * 500)) == "x" * 500
