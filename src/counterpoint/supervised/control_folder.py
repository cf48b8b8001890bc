"""The folder that a supervised job's filters, its agent and `run` share: created, locked while `run` lives, then
removed.

It is in shared memory if that has room, because the filter writes counters there and a disk may stall the writer. A
process that is killed leaves its folder behind; the kernel releases its lock, and the next `run` of the same user
removes unlocked folders with this host's name. Folders of other hosts are left alone, because hosts that share TMPDIR
may not see each other's locks. The folder's lock file is locked before it is put into the folder, so a folder without
one is still being created, or is not Counterpoint's.
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
LEAST_SHARED_BYTES = GIB  # containers often have 64 MiB, which NCCL itself needs
LEAST_DESCRIPTORS = 16  # with a lower limit on open files, the command's start needs them all


@contextmanager
def control_folder() -> Iterator[Path]:
    """Create a folder that no other user may enter, for as long as the block lasts. Raises `OSError`."""
    _remove_abandoned()
    with tempfile.TemporaryDirectory(prefix=_own_prefix(), dir=_place(), ignore_cleanup_errors=True) as name:
        directory = Path(name)
        directory.chmod(0o700)  # a umask may have removed the owner's own rights
        lock = _lock(directory)
        try:
            yield directory
        finally:
            if lock is not None:
                os.close(lock)


@contextmanager
def private_files() -> Iterator[None]:
    """Give files created in the block to this user alone, whatever the umask, which the command inherits."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def make_readable(directory: Path) -> None:
    """Make files readable that processes with another umask have written."""
    with suppress(OSError):  # whoever reads the files reports what is missing
        for path in directory.iterdir():
            with suppress(OSError):
                path.chmod(0o600)


def _own_prefix() -> str:
    """Return the prefix of this host's folders."""
    return f"{PREFIX}{hashlib.sha256(os.uname().nodename.encode()).hexdigest()[:8]}-"


def _place() -> Path | None:
    """Return shared memory if it has room, otherwise the folder for temporary files."""
    try:
        has_room = os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free >= LEAST_SHARED_BYTES
    except OSError:
        return None
    return SHARED_MEMORY if has_room else None


def _lock(directory: Path) -> int | None:
    """Lock the folder; return None if that is impossible, and then only this process removes it."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < LEAST_DESCRIPTORS:
        return None
    partial, lock = directory / f".{LOCK_FILE}", None
    try:
        lock = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        partial.rename(directory / LOCK_FILE)
    except OSError:  # the file system has no locks
        if lock is not None:
            os.close(lock)
        return None
    return lock


def _remove_abandoned() -> None:
    """Remove this user's folders whose process is gone."""
    places = {SHARED_MEMORY}
    with suppress(OSError):  # no folder for temporary files can be written, but shared memory may have room
        places.add(Path(tempfile.gettempdir()))
    for place in places:
        with suppress(OSError):  # the next run tries again
            for folder in place.glob(f"{_own_prefix()}*"):
                with suppress(OSError):
                    if _is_abandoned(folder):
                        shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    """Return whether no process holds the lock of a folder of this user. Raises `OSError` if there is none."""
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
