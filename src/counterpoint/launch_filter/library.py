"""The launch filter as a file to preload: built from its C sources on first use, and kept.

Building needs a C compiler and no CUDA. The library lies in the cache folder under a name that changes with the sources, the
machine and the C library.
"""

import hashlib
import os
import platform
import shlex
import shutil
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


def filter_library() -> Path:
    """The library to preload, built if it is not there yet. Raises `LaunchFilterError` where it cannot be."""
    check_platform()
    path = cache_folder() / f"launch-filter-{_fingerprint()}.so"
    if path.exists():
        return path
    compiler = _compiler()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".launch-filter-") as folder:
            built = Path(folder) / path.name
            _build(compiler, built)
            built.replace(path)  # two that build at once both end with a whole file
    except OSError as problem:
        raise LaunchFilterError(
            f"Cannot keep the launch filter in {path.parent}: {problem.strerror}; set COUNTERPOINT_CACHE_DIR to another "
            "folder."
        ) from problem
    return path


def build_command(compiler: list[str], sources: list[Path], output: Path) -> list[str]:
    """The command that builds a library from `sources`; it is run in the folder of the head start kernel."""
    defined, versions = f'-DHOLD_PTX="{HOLD_PTX.name}"', f"-Wl,--version-script={VERSIONS}"
    return [*compiler, *FLAGS, defined, "-shared", "-o", str(output), *map(str, sources), *LINKED, versions]


def c_sources() -> list[Path]:
    """The filter's C files, in a fixed order."""
    return sorted(SOURCES.glob("*.c"))


def _fingerprint() -> str:
    digest = hashlib.sha256(repr((FLAGS, LINKED, platform.machine(), platform.libc_ver(), os.environ.get("CC"))).encode())
    for path in (*c_sources(), *sorted(SOURCES.glob("*.h")), VERSIONS, HOLD_PTX):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _compiler() -> list[str]:
    chosen = shlex.split(os.environ.get("CC", ""))
    found = shutil.which(chosen[0]) if chosen else next(filter(None, map(shutil.which, COMPILERS)), None)
    if found is None:
        missing = f"CC names '{chosen[0]}', which was not found" if chosen else f"none of {', '.join(COMPILERS)} was found"
        raise LaunchFilterError(
            f"The launch filter is built on first use and needs a C compiler, but {missing}. "
            "Install one, as in apt-get install gcc, or name it in CC."
        )
    return [found, *chosen[1:]]


def _build(compiler: list[str], output: Path) -> None:
    command = build_command(compiler, c_sources(), output)
    try:
        ended = subprocess.run(
            command,
            cwd=HOLD_PTX.parent,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=BUILD_LIMIT_S,
            check=False,
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
