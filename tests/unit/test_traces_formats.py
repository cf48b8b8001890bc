"""Traces are known by their content, whatever they are called; a new format is a module and a line in one table."""

import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest

from counterpoint.errors import TraceError
from counterpoint.job import load_job
from counterpoint.traces import formats, kineto, read_trace
from counterpoint.traces.activity import ActivityTrace
from counterpoint.traces.formats import TraceFormat, is_trace
from helpers.command import counterpoint, refusal
from helpers.trace_builder import small_trace

TEXT = small_trace().text()
PACKED = gzip.compress(TEXT, mtime=0)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", TEXT),
        ("a.json", PACKED),
        ("a.json.gz", TEXT),
        ("A.JSON", TEXT),
        ("A.Json.GZ", PACKED),
        ("a.txt", TEXT),
        ("a", PACKED),
        ("a.json", b"\xef\xbb\xbf" + TEXT),
    ],
)
def test_a_trace_is_read_by_its_content(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert is_trace(str(tmp_path / name))
    step = load_job(str(tmp_path / name)).step
    assert step.name.lower() == "a" if name != "a.txt" else "a.txt"
    assert len(step.operations) == len(read_trace(tmp_path / name).step.operations)


@pytest.mark.parametrize("content", [b"", b"name = 'x'", PACKED[:7], b"\x1f\x8b\xff\xff", b"\x00" * 100])
def test_other_content_under_another_name_is_no_trace(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "notes").write_bytes(content)
    assert not is_trace(str(tmp_path / "notes"))
    assert "is neither a trace (.json, .json.gz, .sqlite) nor a workload file (.toml)" in refusal(
        "tune", "notes", cwd=tmp_path
    )


def test_a_new_format_is_one_line_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(path: Path, pieces: Iterator[bytes]) -> ActivityTrace:
        assert b"".join(pieces) == b"ROC\n"
        return kineto.read(path, iter([TEXT]))

    line = TraceFormat(name="made up", suffixes=(".rpd",), knows=lambda head: head.startswith(b"ROC"), read=read)
    monkeypatch.setattr(formats, "FORMATS", (*formats.FORMATS, line))
    (tmp_path / "a.bin").write_bytes(b"ROC\n")
    assert is_trace(str(tmp_path / "a.bin"))
    assert len(read_trace(tmp_path / "a.bin").step.operations) > 0
    monkeypatch.undo()
    with pytest.raises(TraceError):
        read_trace(tmp_path / "a.bin")


def test_an_address_is_refused_as_it_was_written() -> None:
    assert "'https://host/a.json' is an address, but only files can be read." in refusal("tune", "https://host/a.json")


def test_small_manners_of_the_command_line(tmp_path: Path) -> None:
    assert "Usage: counterpoint tune" in counterpoint("tune", "-h").stdout
    assert "'-' cannot be used as a file" in refusal("tune", "cb_ar_opt2", "-o", "-", cwd=tmp_path)
    assert not (tmp_path / "-").exists()
    lines = counterpoint("tune", "cb_ar_opt2").stdout.splitlines()
    assert [line for line in lines if line != line.rstrip()] == []


def test_a_workload_may_be_named_in_any_case(tmp_path: Path) -> None:
    shipped = Path(formats.__file__).parents[1] / "workloads" / "cb_ar_opt2.toml"
    (tmp_path / "OWN.TOML").write_bytes(shipped.read_bytes())
    assert load_job(str(tmp_path / "OWN.TOML")).step == load_job("CB_AR_OPT2").step
