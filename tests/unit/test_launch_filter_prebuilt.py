"""The library that comes with a wheel needs no compiler; one that lies where hosts share files is copied to this host."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from counterpoint.errors import LaunchFilterError
from counterpoint.launch_filter import library, places, prebuilt
from counterpoint.launch_filter.library import filter_library
from counterpoint.launch_filter.places import file_system_of
from helpers.build_filter import build_filter

MOUNTS = """\
22 1 0:21 / / rw,relatime shared:1 - ext4 /dev/root rw
30 22 0:26 / /home rw,relatime shared:9 master:1 - nfs4 server:/home rw
31 30 0:27 / /home/with\\040space rw,nosuid - fuse.juicefs JuiceFS rw
32 22 0:28 / /dev/shm rw,nosuid,nodev,noexec - tmpfs shm rw
33 22 0:29 / /local rw - ext4 /dev/nvme0 rw
34 33 0:30 / /local rw,noexec - xfs /dev/nvme1 rw
damaged line
"""


@pytest.fixture(autouse=True)
def cache(cc_remembers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COUNTERPOINT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as a wheel has it, compiled for this machine, and no compiler on the PATH."""
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    build_filter(folder).rename(folder / f"{platform.machine()}.so")
    (folder / prebuilt.FINGERPRINT_FILE).write_text(prebuilt.sources_fingerprint() + "\n")
    monkeypatch.setattr(library, "prebuilt_library", lambda: prebuilt.prebuilt_library(folder))
    monkeypatch.setenv("PATH", "/nowhere")
    return folder


def loads(path: Path) -> bool:
    command = [sys.executable, "-c", "print(open('/proc/self/maps').read())"]
    ended = subprocess.run(command, env={"LD_PRELOAD": str(path)}, capture_output=True, text=True, check=True, timeout=60)
    return str(path) in ended.stdout and not ended.stderr


def test_a_wheels_library_needs_no_compiler(shipped: Path, cache: Path) -> None:
    path = filter_library()
    assert path.parent == cache
    assert loads(path)
    path.write_bytes(b"damaged")
    assert loads(filter_library()), "it is copied again"


def test_a_library_of_other_sources_or_for_amd_is_not_taken(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COUNTERPOINT_EXPERIMENTAL_AMD", "1")
    with pytest.raises(LaunchFilterError, match="needs a C compiler"):
        filter_library()
    monkeypatch.delenv("COUNTERPOINT_EXPERIMENTAL_AMD")
    (shipped / prebuilt.FINGERPRINT_FILE).write_text("0" * 64)
    with pytest.raises(LaunchFilterError, match="needs a C compiler"):
        filter_library()


def test_the_newest_version_of_the_c_library_is_that_of_the_symbols_needed_not_of_those_defined(tmp_path: Path) -> None:
    """The filter defines dlsym@@GLIBC_2.34, and needs what this host's compiler took."""
    newest = prebuilt.newest_glibc(build_filter(tmp_path))
    assert (2, 2) < newest <= tuple(map(int, platform.libc_ver()[1].split(".")))
    with pytest.raises(LaunchFilterError, match="finds no C library version"):
        prebuilt.newest_glibc(Path(__file__))


@pytest.mark.parametrize(
    ("path", "kind", "is_shared", "may_execute"),
    [
        ("/home/me/.cache", "nfs4", True, True),
        ("/home/with space/x", "fuse.juicefs", True, True),
        ("/homes", "ext4", False, True),
        ("/dev/shm/x", "tmpfs", False, False),
        ("/local/x", "xfs", False, False),
    ],
)
def test_a_path_is_of_the_longest_and_latest_mount(
    tmp_path: Path, path: str, kind: str, is_shared: bool, may_execute: bool
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    found = file_system_of(Path(path), mounts)
    assert (found.kind, found.is_shared, found.may_execute) == (kind, is_shared, may_execute)


@pytest.mark.parametrize("options", ["rw - nfs server:/x", "rw,noexec - ext4 /dev/x"])
def test_a_library_on_a_shared_or_closed_file_system_is_copied_to_this_host_by_its_digest(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str
) -> None:
    mounts, scratch = tmp_path / "mountinfo", tmp_path / "scratch"
    mounts.write_text(f"1 0 0:1 / / rw - ext4 /dev/root rw\n2 1 0:2 / {cache} {options} rw\n")
    scratch.mkdir()
    monkeypatch.setattr(places, "MOUNTS", mounts)
    monkeypatch.setattr(library, "local_places", lambda: iter((mounts, scratch)))
    path = filter_library()
    assert path.parent.parent == scratch
    assert (cache / path.name).read_bytes() == path.read_bytes()
    assert loads(path)
    assert filter_library() == path
    monkeypatch.setattr(library, "local_places", lambda: iter(()))
    with pytest.raises(LaunchFilterError, match=r"cannot be copied to this host .* Set TMPDIR"):
        filter_library()
