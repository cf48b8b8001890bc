"""Checks, before anything runs, what a command would run and whether the launch filter can be preloaded into it.

The dynamic linker does not preload a library into a static program, and says nothing. It does not preload a library for
another machine or C library either, and only warns.
"""

import os
import platform
import shutil
import stat
import struct
import sys
from pathlib import Path

from counterpoint.errors import LaunchFilterError
from counterpoint.value import Value

ELF_MACHINES = {"x86_64": 62, "aarch64": 183}
MAX_INTERPRETERS = 4  # a script's interpreter may be a script
PT_INTERP = 3


class ElfHeader(Value, frozen=True, kw_only=True):
    """The properties of an ELF file: its machine's number, and the dynamic linker that loads it ("" if it is static)."""

    machine: int
    interpreter: str


def find_executable(command: tuple[str, ...], path: str | None = None) -> Path:
    """Return the file that a shell would run, looked for in `path`, or in this process's PATH if `path` is None.

    Raises `LaunchFilterError` if there is none, or if it may not be run.
    """
    if not command or not command[0]:
        raise LaunchFilterError(
            "There is no command to run. Write it after --, as in counterpoint run -- torchrun train.py."
        )
    name = command[0]
    found = shutil.which(name, path=path)
    if found is not None:
        return Path(found)
    if os.path.isdir(name):
        raise LaunchFilterError(f"'{name}' is a folder, not a command. Name a program after --.")
    if os.path.exists(name) and os.sep in name:
        raise LaunchFilterError(f"'{name}' is not executable. Make it executable, or start it with its interpreter.")
    if os.path.isfile(name):
        raise LaunchFilterError(f"The file '{name}' is not a command. Start it with its interpreter, as in python {name}.")
    where = "" if path is None else f" in its PATH, '{path}'"
    raise LaunchFilterError(f"The command '{name}' was not found{where}. Check its name and the PATH.")


def check_command(executable: Path) -> None:
    """Raise `LaunchFilterError` if the dynamic linker would not preload the filter into this program."""
    check_platform()
    for _ in range(MAX_INTERPRETERS):
        content = _read_start(executable)
        if not content.startswith(b"#!"):
            break
        found = _interpreter(content)
        if found is None:
            return  # the attempt to run it says why it cannot be run
        executable = found
    else:
        return
    if not content.startswith(b"\x7fELF"):
        return  # a script without a `#!` line runs in the shell, which is dynamic wherever the job's Python is
    _check_program(executable, _read_program(executable))


def _check_program(executable: Path, program: ElfHeader) -> None:
    wanted = ELF_MACHINES[platform.machine()]
    if program.machine != wanted:
        raise LaunchFilterError(
            f"'{executable}' is built for another machine (ELF machine {program.machine}; the launch filter's is {wanted}). "
            "Run a program of this machine, or run without a plan."
        )
    if not program.interpreter:
        raise LaunchFilterError(
            f"'{executable}' is statically linked, so no library can be preloaded into it. Link it dynamically, "
            "or run without a plan."
        )
    if "ld-musl" in program.interpreter:
        raise LaunchFilterError(
            f"'{executable}' uses another C library ({program.interpreter}), but the launch filter is built for "
            "the GNU C library. Run a program of this machine's C library, or run without a plan."
        )
    found = executable.stat()
    changes_user = found.st_mode & stat.S_ISUID and found.st_uid != os.geteuid()
    if changes_user or (found.st_mode & stat.S_ISGID and found.st_gid != os.getegid()):
        raise LaunchFilterError(
            f"'{executable}' changes its user or group when it starts, and such programs ignore preloaded "
            "libraries. Run the program that it starts, or run without a plan."
        )


def check_platform() -> None:
    """Raise `LaunchFilterError` if the filter cannot be built on this platform."""
    machine, libc = platform.machine(), platform.libc_ver()[0]
    if sys.platform != "linux" or machine not in ELF_MACHINES or libc != "glibc":
        raise LaunchFilterError(
            f"The launch filter needs Linux with the GNU C library on x86_64 or aarch64; found {sys.platform}, "
            f"{libc or 'another C library'}, {machine}. Run without a plan, or capture the step instead."
        )


def _read_start(path: Path, size: int = 4096) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError as problem:
        raise LaunchFilterError(f"Cannot read '{path}': {problem.strerror}; name a program that you may read.") from problem


def _interpreter(content: bytes) -> Path | None:
    """Return the interpreter of a script, also if it is run by `env`."""
    words = content[2:].split(b"\n", 1)[0].decode(errors="replace").split()
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    found = shutil.which(words[0]) if words else None
    return Path(found) if found else None


def _read_program(path: Path) -> ElfHeader:
    """Read the ELF header and the program headers (as in elf.h) of a 64-bit little-endian file."""
    content = _read_start(path, 1 << 16)
    is_64_bit_little = content[4:6] == b"\x02\x01"
    if len(content) < 64 or not is_64_bit_little:
        return ElfHeader(machine=0, interpreter="")
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
    return ElfHeader(machine=machine, interpreter=interpreter)
