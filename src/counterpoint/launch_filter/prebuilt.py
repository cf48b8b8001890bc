"""Compiles the launch filter for x86-64 and AArch64 before a wheel is built, so that a node needs no compiler.

`make wheel` calls this module. It compiles with Zig (the package `ziglang`), which brings the stubs of every C library since
2.17, and refuses a library that would need a newer one. The files go into wheels only: a checkout or an editable install
builds with the local compiler. They carry the fingerprint of the sources, so files of other sources are never loaded.
"""

import hashlib
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from counterpoint.errors import LaunchFilterError
from counterpoint.launch_filter.executable import ELF_MACHINES

SOURCES = Path(__file__).parent
HOLD_PTX = SOURCES.parent / "cuda" / "hold.ptx"
VERSIONS = SOURCES / "versions.map"
AMD_SOURCE, WITH_AMD = "hip.c", "-DWITH_HIP"
FOLDER = SOURCES / "prebuilt_libraries"  # hatch_build.py puts the libraries there in a wheel
FINGERPRINT_FILE = "sources.sha256"
OLDEST_GLIBC = (2, 17)  # RHEL 7; manylinux2014 stands for this version (PEP 599)
FLAGS = ("-std=c11", "-O2", "-s", "-fPIC", "-fvisibility=hidden", "-fno-sanitize=undefined", "-Wall", "-Wextra", "-Werror")
LINKED = ("-pthread", "-ldl", "-Wl,-z,defs", "-Wl,-z,now", "-Wl,-soname,libcounterpoint_filter.so")
BUILD_LIMIT_S = 300


def sources_fingerprint() -> str:
    """Return a digest of all files that are compiled, as hexadecimal digits."""
    return hashlib.sha256(whole_source()).hexdigest()


def whole_source(*, with_amd: bool = False) -> bytes:
    """Return the names and contents of all files that are compiled."""
    paths = (*c_sources(with_amd=with_amd), *sorted(SOURCES.glob("*.h")), VERSIONS, HOLD_PTX)
    return b"".join(path.name.encode() + b"\0" + path.read_bytes() for path in paths)


def c_sources(*, with_amd: bool = False) -> list[Path]:
    """Return the filter's C files, in a fixed order; include those for AMD, which are experimental, on request."""
    return sorted(path for path in SOURCES.glob("*.c") if with_amd or path.name != AMD_SOURCE)


def build_command(compiler: Sequence[str], output: Path, *, with_amd: bool = False) -> list[str]:
    """Return the command that builds the library with a compiler and its flags; run it in the folder of `HOLD_PTX`."""
    defined = [f'-DHOLD_PTX="{HOLD_PTX.name}"', *([WITH_AMD] if with_amd else [])]
    sources, versions = map(str, c_sources(with_amd=with_amd)), f"-Wl,--version-script={VERSIONS}"
    return [*compiler, *defined, "-shared", "-o", str(output), *sources, *LINKED, versions]


def prebuilt_library(folder: Path = FOLDER) -> Path | None:
    """Return this machine's library that came with the package, or None if there is none or it is of other sources."""
    path = folder / f"{platform.machine()}.so"
    try:
        is_ours = (folder / FINGERPRINT_FILE).read_text().strip() == sources_fingerprint()
    except OSError:
        return None
    return path if is_ours and path.is_file() else None


def newest_glibc(library: Path) -> tuple[int, ...]:
    """Return the newest version of the GNU C library that a library needs, by `readelf`. Raises `LaunchFilterError`."""
    listed = subprocess.run(["readelf", "-V", str(library)], capture_output=True, text=True, check=False)
    needed = listed.stdout.partition("Version needs section")[2]
    found = re.findall(r"Name: GLIBC_([0-9.]+)", needed)
    if listed.returncode or not found:
        raise LaunchFilterError(f"readelf finds no C library version that {library} needs. Build it again.")
    return max(tuple(map(int, version.split("."))) for version in found)


def build_for_wheel(folder: Path) -> list[Path]:
    """Compile the library for every machine into `folder`. Raises `LaunchFilterError` if that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    built = [_build_for(machine, folder / f"{machine}.so") for machine in ELF_MACHINES]
    (folder / FINGERPRINT_FILE).write_text(sources_fingerprint() + "\n")
    return built


def _build_for(machine: str, output: Path) -> Path:
    target = f"{machine}-linux-gnu.{'.'.join(map(str, OLDEST_GLIBC))}"
    command = build_command([sys.executable, "-m", "ziglang", "cc", "-target", target, *FLAGS], output.resolve())
    ended = subprocess.run(command, cwd=HOLD_PTX.parent, capture_output=True, text=True, timeout=BUILD_LIMIT_S, check=False)
    if ended.returncode:
        said = next((line for line in ended.stderr.splitlines() if "error" in line.lower()), ended.stderr.strip()[-200:])
        raise LaunchFilterError(
            f"The launch filter for {machine} could not be compiled with Zig, which says: {said[:200]}. Install it: pip "
            "install ziglang."
        )
    newest = newest_glibc(output)
    if newest > OLDEST_GLIBC:
        raise LaunchFilterError(
            f"The launch filter for {machine} needs GNU C library {'.'.join(map(str, newest))}, but wheels "
            f"promise {'.'.join(map(str, OLDEST_GLIBC))}. Avoid what the sources use of the newer one."
        )
    return output


if __name__ == "__main__":
    for path in build_for_wheel(Path(sys.argv[1])):
        print(f"{path}: {path.stat().st_size:,} bytes, needs glibc {'.'.join(map(str, newest_glibc(path)))}")
