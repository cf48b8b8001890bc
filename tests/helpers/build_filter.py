"""Builds the double of libcuda, the program that launches, and the launch filter, plain or under sanitizers."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from counterpoint.launch_filter.library import FLAGS
from counterpoint.launch_filter.prebuilt import HOLD_PTX, SOURCES, VERSIONS, build_command, c_sources

HELPERS = Path(__file__).parent
CLIENT = HELPERS / "filter_client.c"
COMPILER = ["cc"]
SANITIZERS = {
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread",),
}


@dataclass(frozen=True)
class Built:
    """Where the parts are; `preload` is None where the filter is linked into the client."""

    folder: Path
    client: Path
    preload: Path | None


def compile_c(folder: Path, *arguments: str, cwd: Path | None = None) -> None:
    """Run the C compiler; warnings are errors."""
    command = [*COMPILER, "-g", "-O1", "-Wall", "-Wextra", "-Werror", *arguments]
    ended = subprocess.run(command, cwd=cwd or folder, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stderr


def build_double(folder: Path, *flags: str) -> None:
    """The double as `libcuda.so.1`, and the name that the linker looks for."""
    double = str(HELPERS / "libcuda_double.c")
    compile_c(
        folder,
        *flags,
        "-shared",
        "-fPIC",
        "-Wl,-soname,libcuda.so.1",
        "-Wl,--default-symver,-Bsymbolic",
        "-o",
        "libcuda.so.1",
        double,
        "-pthread",
        "-ldl",
    )
    (folder / "libcuda.so").symlink_to("libcuda.so.1")


def build_preloaded(folder: Path, *, client: Path = CLIENT) -> Built:
    """The filter as it is shipped, and a client that knows nothing of it."""
    build_double(folder)
    linked = ("-L.", "-lcuda", "-Wl,-rpath,$ORIGIN", "-pthread", "-ldl")
    compile_c(folder, "-o", "client", str(client), *linked)
    return Built(folder=folder, client=folder / "client", preload=build_filter(folder))


def build_for_hip(folder: Path) -> Built:
    """The filter before a double of AMD's runtime."""
    soname = "-Wl,-soname,libamdhip64.so.6,-Bsymbolic"
    compile_c(folder, "-shared", "-fPIC", soname, "-o", "libamdhip64.so.6", str(HELPERS / "hip_double.c"), "-ldl")
    (folder / "libamdhip64.so").symlink_to("libamdhip64.so.6")
    compile_c(folder, "-o", "client", str(HELPERS / "hip_client.c"), "-L.", "-lamdhip64", "-Wl,-rpath,$ORIGIN", "-ldl")
    return Built(folder=folder, client=folder / "client", preload=build_filter(folder, with_amd=True))


def build_filter(folder: Path, *, with_amd: bool = False) -> Path:
    """The filter as it is shipped."""
    library = folder / "filter.so"
    command = build_command([*COMPILER, *FLAGS], library, with_amd=with_amd)
    ended = subprocess.run(
        [*command, "-Werror"], cwd=HOLD_PTX.parent, capture_output=True, text=True, check=False, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    return library


def build_sanitized(folder: Path, sanitizer: str, *, client: Path = CLIENT) -> Built:
    """The filter linked into the client, all but its look-ups under a sanitizer.

    A sanitizer's own start calls dlsym, which is the filter's, before the sanitizer can watch anything.
    """
    flags = SANITIZERS[sanitizer]
    build_double(folder, *flags)
    objects = []
    for source in c_sources():
        watched = () if source.name == "lookup.c" else flags
        target = folder / f"{source.stem}.o"
        common = ("-std=c11", "-fPIC", "-fvisibility=hidden", f'-DHOLD_PTX="{HOLD_PTX.name}"')
        compile_c(folder, *watched, *common, "-c", "-o", str(target), str(source), cwd=HOLD_PTX.parent)
        objects.append(str(target))
    linked = ("-L.", "-lcuda", "-Wl,-rpath,$ORIGIN", "-pthread", "-ldl", "-rdynamic", f"-Wl,--version-script={VERSIONS}")
    compile_c(folder, *flags, "-DFILTER_LINKED_IN", f"-I{SOURCES}", "-o", "client", str(client), *objects, *linked)
    return Built(folder=folder, client=folder / "client", preload=None)


def environment(
    built: Built, directory: Path | None, *, before: tuple[Path, ...] = (), behind: tuple[Path, ...] = ()
) -> dict[str, str]:
    """The client's environment: what is preloaded, in order, and where the filter's files lie."""
    found = {
        name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "COUNTERPOINT_FILTER_DIRECTORY")
    }
    preloaded = [*before, *([built.preload] if built.preload else []), *behind]
    if preloaded:
        found["LD_PRELOAD"] = ":".join(map(str, preloaded))
    if directory is not None:
        found["COUNTERPOINT_FILTER_DIRECTORY"] = str(directory)
    found["RANK"] = "3"
    found["ASAN_OPTIONS"] = "detect_leaks=0:abort_on_error=0:exitcode=66"
    found["TSAN_OPTIONS"] = "exitcode=66:halt_on_error=1"
    return found
