"""Files that users name: nothing endless, nothing that unpacks without limit, and one clear line for whatever is refused."""

import gzip
import os
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from counterpoint import files
from counterpoint.errors import PlanError, TraceError
from counterpoint.files import read_limited, read_pieces
from counterpoint.machine import load_machine
from counterpoint.plan import load_plan
from counterpoint.traces import read_trace
from counterpoint.units import GIB, MIB
from counterpoint.workloads import load_workload
from helpers.command import refusal


def unpacked(path: Path) -> bytes:
    return b"".join(read_pieces(path, PlanError, "-", most=4 * MIB, is_unpacked=True))


def failure(path: Path | str, read: Callable[[], object] | None = None) -> str:
    with pytest.raises(PlanError) as caught:
        read() if read else read_limited(path, PlanError, "give a .toml file")
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


def whole(path: Path) -> bytes:
    return bytes(read_limited(path, PlanError, "-"))


@pytest.mark.parametrize("read", [whole, unpacked])
def test_a_mark_of_the_encoding_is_left_out_or_refused_by_name(tmp_path: Path, read: Callable[[Path], bytes]) -> None:
    path = tmp_path / "plan.toml"
    for text in (b"a = 1", b""):
        path.write_bytes(b"\xef\xbb\xbf" + text)
        assert read(path) == text
    path.write_bytes("a = 1".encode("utf-16"))
    assert "is UTF-16 text, as PowerShell's redirection writes it; save it as UTF-8." in failure(path, lambda: read(path))


def bomb(path: Path, unpacked_bytes: int) -> Path:
    """Many members of spaces: quickly made, and unpacked as one."""
    path.write_bytes(gzip.compress(b" " * (16 * MIB), mtime=0) * (unpacked_bytes // (16 * MIB)))
    return path


def test_a_gzip_bomb_is_refused_early_and_in_little_memory(tmp_path: Path) -> None:
    path = bomb(tmp_path / "bomb.json.gz", 4 * GIB)
    tracemalloc.start()
    try:
        with pytest.raises(TraceError, match=r"unpacks to .* bytes from .*, more than 250 times its size, which no"):
            read_trace(path)
        assert tracemalloc.get_traced_memory()[1] < 200 * MIB
    finally:
        tracemalloc.stop()


def test_the_limit_holds_for_what_is_packed_and_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = tmp_path / "a.gz"
    packed.write_bytes(gzip.compress(os.urandom(3 * MIB), mtime=0))
    assert len(unpacked(packed)) == 3 * MIB
    monkeypatch.setattr(files, "MAX_PACKED_BYTES", MIB)
    assert "compressed bytes; the limit is 1,048,576 (1 MiB)" in failure(packed, lambda: unpacked(packed))
    dense = bomb(tmp_path / "b.gz", 16 * MIB)
    assert "bytes or more once unpacked" in failure(dense, lambda: unpacked(dense))


def test_a_file_that_is_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "large.toml"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert "has 1,099,511,627,776 bytes; the limit is 67,108,864 (64 MiB). Give a smaller file" in failure(path)


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/urandom", "/dev/null"])
def test_devices_are_refused_by_every_reader(device: str) -> None:
    assert failure(device) == f"{device} is a device, which may never end; give a file."
    assert "is a device" in refusal("simulate", "cb_ar_opt2", "--plan", device)


def test_a_pipe_is_read_to_its_end_or_to_the_limit_or_until_it_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "SILENCE_S", 0.2)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "Nothing arrived through the pipe" in failure(pipe)

    def write(content: bytes) -> None:
        try:
            pipe.write_bytes(content)
        except BrokenPipeError:
            return

    monkeypatch.setattr(files, "MAX_TEXT_BYTES", 100_000)
    for content in (b"verdict = 'NO_GAIN'", b"x" * 300_000):
        writer = threading.Thread(target=write, args=(content,))
        writer.start()
        if len(content) < 100_000:
            assert read_limited(pipe, PlanError, "-") == content
        else:
            assert "the limit is 100,000" in failure(pipe)
        writer.join()


def test_a_utf8_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_bytes(b"\xef\xbb\xbfverdict = 'NO_GAIN'\n")
    assert load_plan(tmp_path / "plan.toml").verdict == "NO_GAIN"


def test_every_loader_takes_text_and_paths(tmp_path: Path) -> None:
    from counterpoint.machine import save_machine  # noqa: PLC0415
    from counterpoint.plan import LEAVE_IT, save_plan  # noqa: PLC0415

    workload = Path(files.__file__).parent / "workloads" / "cb_ar_opt2.toml"
    for kind in (str, Path):
        plan, machine = kind(tmp_path / "plan.toml"), kind(tmp_path / "machine.toml")
        save_plan(LEAVE_IT, plan)
        assert load_plan(plan) == LEAVE_IT
        save_machine(load_machine("h200"), machine)
        assert load_machine(machine) == load_machine("h200")
        assert load_workload(kind(workload)) == load_workload("cb_ar_opt2")
