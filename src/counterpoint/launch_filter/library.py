"""The launch filter as a file to preload: built from its C sources on first use, and kept.

Building needs a C compiler and no CUDA. The library lies in the cache folder under a name that changes with the sources, the
machine and the C library. `check_command` looks at what would be run before it is run: the dynamic linker leaves a preloaded
library out of a static program without a word, and out of one for another machine or C library with a warning only.
"""

import hashlib
import os
import platform
import shlex
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from counterpoint.cuda.plan_cache import cache_folder
from counterpoint.errors import LaunchFilterError
from counterpoint.value import Value

SOURCES = Path(__file__).parent
HOLD_PTX = SOURCES.parent / "cuda" / "hold.ptx"
FLAGS = ("-std=c11", "-O2", "-g", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
VERSIONS = SOURCES / "versions.map"
LINKED = ("-pthread", "-ldl", "-Wl,-z,defs", "-Wl,-z,now", "-Wl,-soname,libcounterpoint_filter.so")
COMPILERS = ("cc", "gcc", "clang")
BUILD_LIMIT_S = 120
ELF_MACHINES = {"x86_64": 62, "aarch64": 183}
MAX_INTERPRETERS = 4  # a script's interpreter may be a script
PT_INTERP = 3


class Program(Value, frozen=True, kw_only=True):
    """What an ELF file says of itself: its machine's number, and the dynamic linker that loads it ("" for a static one)."""

    machine: int
    interpreter: str


def filter_library() -> Path:
    """The library to preload, built if it is not there yet. Raises `LaunchFilterError` where it cannot be."""
    _check_platform()
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


def check_command(executable: Path) -> None:
    """Raise `LaunchFilterError` where the dynamic linker would not preload the filter into this program."""
    _check_platform()
    for _ in range(MAX_INTERPRETERS):
        content = _read_start(executable)
        if not content.startswith(b"#!"):
            break
        found = _interpreter(content)
        if found is None:
            return  # running it says why it cannot be run
        executable = found
    else:
        return
    if not content.startswith(b"\x7fELF"):
        return  # a script without a first line: the shell that runs it is dynamic wherever the job's python is
    _check_program(executable, _read_program(executable))


def _check_program(executable: Path, program: Program) -> None:
    wanted = ELF_MACHINES[platform.machine()]
    if program.machine != wanted:
        raise LaunchFilterError(
            f"'{executable}' is built for another machine (ELF machine {program.machine}; the launch filter's is {wanted}). "
            "Run a program of this machine, or run without a plan."
        )
    if not program.interpreter:
        raise LaunchFilterError(
            f"'{executable}' is statically linked, so nothing can be preloaded into it. "
            "Link it dynamically, or run without a plan."
        )
    if "ld-musl" in program.interpreter:
        raise LaunchFilterError(
            f"'{executable}' uses another C library ({program.interpreter}), and the launch filter is built for the GNU C "
            "library. Run a program of this machine's C library, or run without a plan."
        )
    found = executable.stat()
    changes_user = found.st_mode & stat.S_ISUID and found.st_uid != os.geteuid()
    if changes_user or (found.st_mode & stat.S_ISGID and found.st_gid != os.getegid()):
        raise LaunchFilterError(
            f"'{executable}' changes its user or group when it starts, and such programs ignore preloaded libraries. "
            "Run the program behind it, or run without a plan."
        )


def _check_platform() -> None:
    machine, libc = platform.machine(), platform.libc_ver()[0]
    if sys.platform != "linux" or machine not in ELF_MACHINES or libc != "glibc":
        raise LaunchFilterError(
            f"The launch filter is for Linux with the GNU C library on x86_64 or aarch64; found {sys.platform}, "
            f"{libc or 'another C library'}, {machine}. Run without a plan, or capture the step instead."
        )


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


def _read_start(path: Path, size: int = 4096) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError as problem:
        raise LaunchFilterError(f"Cannot read '{path}': {problem.strerror}; name a program that you may read.") from problem


def _interpreter(content: bytes) -> Path | None:
    """What runs a script, through `env` too."""
    words = content[2:].split(b"\n", 1)[0].decode(errors="replace").split()
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    found = shutil.which(words[0]) if words else None
    return Path(found) if found else None


def _read_program(path: Path) -> Program:
    """Read the ELF header and the program headers (as in elf.h) of a 64-bit little-endian file."""
    content = _read_start(path, 1 << 16)
    is_64_bit_little = content[4:6] == b"\x02\x01"
    if len(content) < 64 or not is_64_bit_little:
        return Program(machine=0, interpreter="")
    (machine,) = struct.unpack_from("<H", content, 18)
    (offset,) = struct.unpack_from("<Q", content, 32)
    size, count = struct.unpack_from("<HH", content, 54)
    interpreter = ""
    for index in range(count):
        start = offset + index * size
        if start + 56 > len(content):
            break
        kind, _, place, _, _, length = struct.unpack_from("<IIQQQQ", content, start)
        if kind == PT_INTERP:
            interpreter = content[place : place + length].rstrip(b"\0").decode(errors="replace")
    return Program(machine=machine, interpreter=interpreter)
