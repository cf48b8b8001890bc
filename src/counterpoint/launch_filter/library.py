"""The launch filter as a file to preload: built from its C sources on first use, and kept.

Building needs a C compiler and no CUDA. The library lies in the cache folder under a name that changes with the sources, the
machine and the C library. Every process of a job runs its code, so only this user or root may own it or the folder, and
nobody else may write to either. The file ends in a digest of the rest: one that was damaged is built again.

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
from pathlib import Path

from counterpoint.cuda.plan_cache import cache_folder
from counterpoint.errors import LaunchFilterError
from counterpoint.launch_filter.executable import check_platform

SOURCES = Path(__file__).parent
HOLD_PTX = SOURCES.parent / "cuda" / "hold.ptx"
FLAGS = ("-std=c11", "-O2", "-g", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
VERSIONS = SOURCES / "versions.map"
LINKED = ("-pthread", "-ldl", "-Wl,-z,defs", "-Wl,-z,now", "-Wl,-soname,libcounterpoint_filter.so")
COMPILERS = ("cc", "gcc", "clang")
BUILD_LIMIT_S = 120
AMD_VARIABLE = "COUNTERPOINT_EXPERIMENTAL_AMD"
AMD_SOURCE = "hip.c"
WITH_AMD = "-DWITH_HIP"
DIGEST_BYTES = 32
FOLDER_MODE, FILE_MODE = 0o700, 0o600
PRIVATE_UMASK = 0o077


def filter_library() -> Path:
    """The library to preload, built if it is not there yet. Raises `LaunchFilterError` where it cannot be."""
    check_platform()
    folder = cache_folder()
    try:
        _make_private(folder)
        folder = folder.resolve()
        _check_private(folder)
        path = folder / f"launch-filter-{_fingerprint()}.so"
        if not _is_kept(path):
            _build_in(folder, path)
    except OSError as problem:
        raise LaunchFilterError(
            f"Cannot keep the launch filter in {folder}: {problem.strerror}; set COUNTERPOINT_CACHE_DIR to another folder."
        ) from problem
    return path


def has_amd() -> bool:
    """Whether the experimental part for AMD was asked for."""
    return os.environ.get(AMD_VARIABLE, "") not in ("", "0")


def _make_private(folder: Path) -> None:
    """Make the folder and those above it that are missing, for this user alone whatever the umask is."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    if not missing:
        return
    _compiler()  # without one nothing is left behind
    for each in reversed(missing):
        each.mkdir(FOLDER_MODE, exist_ok=True)
        each.chmod(FOLDER_MODE)


def _check_private(folder: Path) -> None:
    found = folder.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(0, "it is no folder")
    if not _is_private(found):
        raise LaunchFilterError(
            f"The launch filter is not kept in {folder}, where others may write (owner {found.st_uid}, mode "
            f"{stat.S_IMODE(found.st_mode):o}): every process of the job would run what they put there. Remove their right "
            "to write, or set COUNTERPOINT_CACHE_DIR to a folder of this user's."
        )


def _is_private(found: os.stat_result) -> bool:
    """Whether nobody but this user and root can change it."""
    return found.st_uid in (os.geteuid(), 0) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_kept(path: Path) -> bool:
    """Whether the library is there, whole, and nobody else's."""
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
    with tempfile.TemporaryDirectory(dir=folder, prefix=".launch-filter-") as name:
        os.chmod(name, FOLDER_MODE)
        built = Path(name) / path.name
        _build(compiler, built)
        content = built.read_bytes()
        built.write_bytes(content + _digest(content))
        built.chmod(FILE_MODE)
        built.replace(path)  # two that build at once both end with a whole file


def build_command(compiler: list[str], sources: list[Path], output: Path) -> list[str]:
    """The command that builds a library from `sources`; it is run in the folder of the head start kernel."""
    defined = [f'-DHOLD_PTX="{HOLD_PTX.name}"', *([WITH_AMD] if AMD_SOURCE in (path.name for path in sources) else [])]
    versions = f"-Wl,--version-script={VERSIONS}"
    return [*compiler, *FLAGS, *defined, "-shared", "-o", str(output), *map(str, sources), *LINKED, versions]


def c_sources(*, with_amd: bool = False) -> list[Path]:
    """The filter's C files, in a fixed order; those for AMD, which are experimental, on request."""
    return sorted(path for path in SOURCES.glob("*.c") if with_amd or path.name != AMD_SOURCE)


def _fingerprint() -> str:
    digest = hashlib.sha256(repr((FLAGS, LINKED, platform.machine(), platform.libc_ver(), os.environ.get("CC"))).encode())
    for path in (*c_sources(with_amd=has_amd()), *sorted(SOURCES.glob("*.h")), VERSIONS, HOLD_PTX):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _compiler() -> list[str]:
    try:
        chosen = shlex.split(os.environ.get("CC", ""))
    except ValueError as problem:
        raise LaunchFilterError(
            f"CC is no command ({os.environ['CC'][:60]!r}): {problem}. Correct it, or unset it to use a compiler of PATH."
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
    command = build_command(compiler, c_sources(with_amd=has_amd()), output)
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
            f"The launch filter could not be built with '{compiler[0]}', which says: {said[:200]}. "
            "Name another compiler in CC, or install the C library's headers, as in apt-get install libc6-dev."
        )
    if not output.exists() or not output.read_bytes().startswith(b"\x7fELF"):
        raise LaunchFilterError(
            f"'{compiler[0]}' ended well but made no library, so it is no C compiler. Name one in CC, or unset CC."
        )
