"""Finds out what file system a folder is on: whether other hosts share it, and whether libraries can be loaded from it.

A library that thousands of processes map from a network file system is slow to load, and if the file is replaced there while
a job runs, the job's processes end (SIGBUS). So the launch filter is mapped from a folder of the host itself. Containers
often mount /dev/shm and /tmp so that nothing can be loaded from there (noexec). The source is /proc/self/mountinfo; see
proc(5).
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from counterpoint.value import Value

MOUNTS = Path("/proc/self/mountinfo")
# names as in Linux's /proc/filesystems; FUSE file systems are named by their program
SHARED_KINDS = frozenset(
    {
        "9p", "afs", "beegfs", "blobfuse2", "ceph", "ceph-fuse", "cifs", "cvmfs2", "gcsfuse", "gfs2", "glusterfs", "goofys",
        "gpfs", "juicefs", "lustre", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "quobyte", "s3fs", "smb3",
        "smbfs", "sshfs", "vastnfs", "virtiofs", "wekafs",
    }
)  # fmt: skip


class FileSystem(Value, frozen=True, kw_only=True):
    """The file system at `mount`; `kind` is Linux's name of it, or empty if it is unknown."""

    mount: str = ""
    kind: str = ""
    may_execute: bool = True

    @property
    def is_shared(self) -> bool:
        """Whether other hosts may see the same files."""
        return self.kind in SHARED_KINDS or self.kind.removeprefix("fuse.") in SHARED_KINDS


def file_system_of(path: Path, mounts: Path | None = None) -> FileSystem:
    """Return the file system that holds a path, or would hold it; nothing is known if `mounts` cannot be read."""
    real = os.path.realpath(path)
    best = FileSystem()
    try:
        lines = (mounts or MOUNTS).read_text(errors="replace").splitlines()
    except OSError:
        return best
    for line in lines:
        found = _parse(line)
        if found is None or not _is_under(real, found.mount):
            continue
        if len(found.mount) >= len(best.mount):  # of two mounts at one place, the later one hides the earlier one
            best = found
    return best


def local_places() -> Iterator[Path]:
    """Yield folders of this host that usually hold temporary files and from which libraries can be loaded."""
    named = (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/var/tmp", "/dev/shm")
    for name in dict.fromkeys(filter(None, named)):
        path = Path(name)
        system = file_system_of(path)
        if path.is_absolute() and os.access(path, os.W_OK | os.X_OK) and not system.is_shared and system.may_execute:
            yield path


def _parse(line: str) -> FileSystem | None:
    """Parse one line of mountinfo: mount point and options are the 5th and 6th word, the kind follows a lone hyphen."""
    words = line.split()
    try:
        hyphen = words.index("-", 6)
        mount, options, kind = words[4], words[5].split(","), words[hyphen + 1]
    except (ValueError, IndexError):
        return None
    return FileSystem(mount=_unescaped(mount), kind=kind, may_execute="noexec" not in options)


def _unescaped(text: str) -> str:
    for code, letter in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, letter)
    return text


def _is_under(path: str, folder: str) -> bool:
    return folder in ("/", path) or path.startswith(folder + "/")
