"""The launch filter's library: it comes with the wheel, or is built from its C sources on first use and cached.

A wheel holds the compiled library (`prebuilt.py`), so a node needs no compiler. Without it, the library is built, which
needs a C compiler and no CUDA. The cache folder holds it under a name that changes with the sources, the machine and the C
library. If hosts share that folder's file system, or nothing can be loaded from it, a copy in a folder of this host is
preloaded. Every process of a job runs the library's code, so only this user or root may own the file and its folder and
write to them. The file ends in a digest of the rest; a damaged file is made again.

The part for AMD is experimental, has never run on AMD hardware, and is built on request only.
"""

import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from counterpoint.errors import LaunchFilterError
from counterpoint.files import cache_folder
from counterpoint.launch_filter.executable import check_platform
from counterpoint.launch_filter.places import file_system_of, local_places
from counterpoint.launch_filter.prebuilt import HOLD_PTX, LINKED, build_command, prebuilt_library, whole_source

FLAGS = ("-std=c11", "-O2", "-g", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
COMPILERS = ("cc", "gcc", "clang")
BUILD_LIMIT_S = 120
LIBRARY_PREFIX = "launch-filter-"
AMD_VARIABLE = "COUNTERPOINT_EXPERIMENTAL_AMD"
DIGEST_BYTES = 32
FOLDER_MODE, FILE_MODE = 0o700, 0o600
PRIVATE_UMASK = 0o077


def filter_library() -> Path:
    """Return the library to preload; make it if it does not exist. Raises `LaunchFilterError` if that is impossible."""
    check_platform()
    prebuilt = None if has_amd() else prebuilt_library()
    folder = cache_folder()
    try:
        _make_private(folder, needs_compiler=prebuilt is None)
        folder = folder.resolve()
        _check_private(folder)
        path = folder / f"{LIBRARY_PREFIX}{_fingerprint(prebuilt)}.so"
        if not _is_kept(path):
            if prebuilt is not None:
                _keep(folder, path, prebuilt.read_bytes())
            else:
                _build_in(folder, path)
    except OSError as problem:
        raise LaunchFilterError(
            f"Cannot store the launch filter in {folder}: {problem.strerror}; set COUNTERPOINT_CACHE_DIR to another folder."
        ) from problem
    system = file_system_of(folder)
    return _local_copy(path, system.kind) if system.is_shared or not system.may_execute else path


def _local_copy(path: Path, kind: str) -> Path:
    """Copy the library to a folder of this host alone; return the copy. Raises `LaunchFilterError` if none can hold it."""
    content = path.read_bytes()[:-DIGEST_BYTES]
    reason = "this host has no folder that is writable and allows loading libraries"
    for place in local_places():
        folder = place / f"counterpoint-filter-{os.geteuid()}"
        copy = folder / path.name
        try:
            _make_private(folder, needs_compiler=False)
            _check_private(folder)
            if not _is_kept(copy):
                _keep(folder, copy, content)
        except (OSError, LaunchFilterError) as problem:  # the folder is full, or another user owns a folder of this name
            reason = f"{folder}: {problem}"
            continue
        return copy
    raise LaunchFilterError(
        f"The launch filter is not loaded from {path.parent} ({kind}), because hosts share that file system or "
        f"nothing can be loaded from it, and it cannot be copied to this host ({reason}). Set TMPDIR to a "
        "folder on this host without noexec."
    )


def has_amd() -> bool:
    """Return whether the experimental part for AMD was requested."""
    return os.environ.get(AMD_VARIABLE, "") not in ("", "0")


def _make_private(folder: Path, *, needs_compiler: bool) -> None:
    """Make the folder and its missing parents, accessible to this user alone whatever the umask is."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    if not missing:
        return
    if needs_compiler:
        _compiler()  # raises before any folder is made if there is no compiler
    for each in reversed(missing):
        each.mkdir(FOLDER_MODE, exist_ok=True)
        each.chmod(FOLDER_MODE)


def _check_private(folder: Path) -> None:
    found = folder.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(0, "it is not a folder")
    if not _is_private(found):
        raise LaunchFilterError(
            f"The launch filter is not stored in {folder}, because other users may write there (owner "
            f"{found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}): every process of the job would run what "
            "they put there. Remove their write permission, or set COUNTERPOINT_CACHE_DIR to a folder of this "
            "user's."
        )


def _is_private(found: os.stat_result) -> bool:
    """Return whether only this user and root can change it."""
    return found.st_uid in (os.geteuid(), 0) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_kept(path: Path) -> bool:
    """Return whether the library exists, is undamaged, and belongs to nobody else."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    with os.fdopen(file, "rb") as opened:
        found = os.fstat(opened.fileno())
        if not stat.S_ISREG(found.st_mode) or not _is_private(found):
            return False
        content = opened.read()
    return content[-DIGEST_BYTES:] == _digest(content[:-DIGEST_BYTES])


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _build_in(folder: Path, path: Path) -> None:
    compiler = _compiler()
    with _partial(folder, path) as built:
        _build(compiler, built)
        _finish(built, path, built.read_bytes())


def _keep(folder: Path, path: Path, content: bytes) -> None:
    """Store a library that was compiled elsewhere."""
    with _partial(folder, path) as copied:
        _finish(copied, path, content)


@contextmanager
def _partial(folder: Path, path: Path) -> Iterator[Path]:
    """Yield a temporary path for making a library, so that nobody sees it before it is complete."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{LIBRARY_PREFIX}") as name:
        os.chmod(name, FOLDER_MODE)
        yield Path(name) / path.name


def _finish(made: Path, path: Path, content: bytes) -> None:
    made.write_bytes(content + _digest(content))
    made.chmod(FILE_MODE)
    made.replace(path)  # if two processes do this at once, both end with a complete file


def _fingerprint(prebuilt: Path | None) -> str:
    if prebuilt is not None:
        return hashlib.sha256(prebuilt.read_bytes()).hexdigest()[:16]
    built_by = repr((FLAGS, LINKED, platform.machine(), platform.libc_ver(), os.environ.get("CC")))
    return hashlib.sha256(built_by.encode() + whole_source(with_amd=has_amd())).hexdigest()[:16]


def _compiler() -> list[str]:
    try:
        chosen = shlex.split(os.environ.get("CC", ""))
    except ValueError as problem:
        raise LaunchFilterError(
            f"CC is not a command ({os.environ['CC'][:60]!r}): {problem}. Correct it, or unset it to use a "
            "compiler from PATH."
        ) from problem
    found = shutil.which(chosen[0]) if chosen else next(filter(None, map(shutil.which, COMPILERS)), None)
    if found is None:
        missing = f"CC names '{chosen[0]}', which was not found" if chosen else f"none of {', '.join(COMPILERS)} was found"
        raise LaunchFilterError(
            f"The launch filter is built on first use and needs a C compiler, but {missing}. "
            "Install one, as in apt-get install gcc, or name it in CC."
        )
    return [found, *chosen[1:]]


def _build(compiler: list[str], output: Path) -> None:
    command = build_command([*compiler, *FLAGS], output, with_amd=has_amd())
    try:
        ended = subprocess.run(
            command,
            cwd=HOLD_PTX.parent,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=BUILD_LIMIT_S,
            check=False,
            umask=PRIVATE_UMASK,
        )
    except subprocess.TimeoutExpired as problem:
        raise LaunchFilterError(
            f"Building the launch filter with '{compiler[0]}' took more than {BUILD_LIMIT_S} s. Try again, or name another "
            "compiler in CC."
        ) from problem
    if ended.returncode:
        lines = ended.stderr.splitlines() or ["nothing"]
        said = next((line for line in lines if "error" in line.lower()), lines[0])
        raise LaunchFilterError(
            f"The launch filter could not be built with '{compiler[0]}', which says: {said[:200]}. Name another "
            "compiler in CC, or install the C library's headers, as in apt-get install libc6-dev."
        )
    if not output.exists() or not output.read_bytes().startswith(b"\x7fELF"):
        raise LaunchFilterError(
            f"'{compiler[0]}' exited with 0 but built no library, so it is not a C compiler. Name one in CC, or unset CC."
        )
