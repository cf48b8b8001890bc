"""A line of ours: what it takes from somebody else's error, and how it is said."""

import io
import sys

import pytest

from counterpoint.errors import cause_of, say


@pytest.mark.parametrize(
    ("text", "cause"),
    [("", ""), ("  \n ", ""), ("one", "one"), ("\n first line \nsecond", "first line "), ("x" * 30, "x" * 20)],
)
def test_a_cause_is_the_first_line_cut_and_nothing_where_nothing_is_said(text: str, cause: str) -> None:
    assert cause_of(RuntimeError(text), 20) == cause


def test_a_cause_is_whole_unless_a_length_is_given() -> None:
    assert cause_of(ValueError("x" * 500)) == "x" * 500


class Descriptor(io.RawIOBase):
    """Keeps what each write was given."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, content: bytes) -> int:
        self.writes.append(bytes(content))
        return len(content)


def test_a_line_is_one_write_where_nothing_is_buffered(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = Descriptor()
    unbuffered = io.TextIOWrapper(descriptor, encoding="utf-8", write_through=True)  # as `python -u` has it
    monkeypatch.setattr(sys, "stderr", unbuffered)
    say("what went wrong.")
    assert [content for content in descriptor.writes if content] == [b"counterpoint: what went wrong.\n"]


def test_nothing_happens_where_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    say("what went wrong.")
