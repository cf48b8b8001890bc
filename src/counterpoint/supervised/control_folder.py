"""The folder in which a supervised job's filters, its agent and `run` meet: made, locked while we live, removed at the end.

It is in shared memory where that has room, because the filter writes counters there and a disk may hold a writer up. A
process that is killed leaves its folder behind; the kernel drops its lock, and the next `run` of the same user removes
what is no longer locked, of the folders that bear this host's name: where hosts share TMPDIR, they may not see each other's
locks. The lock comes into the folder locked, so a folder without one is being made, or not ours.
"""

import fcntl
import hashlib
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from counterpoint.units import GIB

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "counterpoint-"
LOCK_FILE = "lock"
LEAST_SHARED_BYTES = GIB  # containers often have 64 MiB, which NCCL needs itself
LEAST_DESCRIPTORS = 16  # where a process may open fewer, the command's start needs them all


@contextmanager
def control_folder() -> Iterator[Path]:
    """A new folder, that nobody else may enter, for as long as the block lasts. Raises `OSError`."""
    _remove_abandoned()
    with tempfile.TemporaryDirectory(prefix=_own_prefix(), dir=_place(), ignore_cleanup_errors=True) as name:
        directory = Path(name)
        directory.chmod(0o700)  # a umask may have taken our own rights
        lock = _lock(directory)
        try:
            yield directory
        finally:
            if lock is not None:
                os.close(lock)


@contextmanager
def private_files() -> Iterator[None]:
    """Files made in the block are ours alone, and ours to read, whatever the umask, which the command inherits, says."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def make_readable(directory: Path) -> None:
    """Let us read what processes with another umask have written."""
    with suppress(OSError):
        for path in directory.iterdir():
            with suppress(OSError):
                path.chmod(0o600)


def _own_prefix() -> str:
    """How the names of this host's folders begin."""
    return f"{PREFIX}{hashlib.sha256(os.uname().nodename.encode()).hexdigest()[:8]}-"


def _place() -> Path | None:
    """Shared memory with room, else where temporary files go."""
    try:
        has_room = os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free >= LEAST_SHARED_BYTES
    except OSError:
        return None
    return SHARED_MEMORY if has_room else None


def _lock(directory: Path) -> int | None:
    """Lock the folder; None where that cannot be, and then it is only removed by ourselves."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < LEAST_DESCRIPTORS:
        return None
    partial, lock = directory / f".{LOCK_FILE}", None
    try:
        lock = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        partial.rename(directory / LOCK_FILE)
    except OSError:  # a file system without locks
        if lock is not None:
            os.close(lock)
        return None
    return lock


def _remove_abandoned() -> None:
    """Remove our user's folders whose process is gone."""
    places = {SHARED_MEMORY, Path(tempfile.gettempdir())}
    for place in places:
        with suppress(OSError):
            for folder in place.glob(f"{_own_prefix()}*"):
                with suppress(OSError):
                    if _is_abandoned(folder):
                        shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    """Whether nobody holds the lock of a folder of ours. Raises `OSError` where there is none."""
    if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
        return False
    lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
