"""Does the wheel's launch filter load and work with the C libraries of other Linux releases, and what does it ask of them?

    python -m benchmarks.filter_in_root_file_systems bullseye=/tmp/roots/bullseye sid=/tmp/roots/sid ...

Each NAME=FOLDER is a root file system, or what of one the package libc6 holds (`apt-get download libc6`, `dpkg-deb -x`).
One of another machine is run by qemu-user (`qemu-aarch64-static`). No compiler is in there: the filter, a program and the
double of the driver are cross-compiled here with Zig, against glibc 2.17, before the first of them runs.
"""

import json
import platform
import shutil
import sys
import tempfile
from pathlib import Path

from counterpoint.launch_filter.prebuilt import OLDEST_GLIBC, build_for_wheel, newest_glibc
from counterpoint.launch_filter.rules import FilterRule

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers import build_filter
from helpers.filter_session import Session, run_directory

RESULTS = Path(__file__).parent / "results" / "filter_in_root_file_systems.json"
LOADERS = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}
ROUTES = ("dlsym", "proc", "proc_v2", "proc_of_proc", "proc_per_thread", "default", "next", "linked")
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def loader_in(root: Path) -> tuple[str, Path]:
    """The machine of a root file system, and its dynamic linker."""
    for machine, name in LOADERS.items():
        found = sorted(path for path in root.rglob(name) if path.exists())
        if found:
            return machine, found[0]
    raise SystemExit(f"{root} holds no C library of {' or '.join(LOADERS)}")


def library_folders(root: Path) -> str:
    """Where the root's C library lies."""
    return ":".join(sorted({str(path.parent) for name in ("libc.so.6", "libdl.so.2") for path in root.rglob(name)}))


def glibc_version(root: Path) -> str:
    """The version that the C library says of itself."""
    library = next(path for path in root.rglob("libc.so.6") if path.exists())
    words = library.resolve().read_bytes().partition(b"GNU C Library ")[2][:200].decode(errors="replace")
    return words.partition("version ")[2].rstrip(".").split(".\n")[0].split("\n")[0].rstrip(".")


def build_for(machine: str, folder: Path, filters: Path) -> build_filter.Built:
    """The program and the double for one machine, and the filter of the wheel."""
    target = f"{machine}-linux-gnu.{'.'.join(map(str, OLDEST_GLIBC))}"
    build_filter.COMPILER[:] = [sys.executable, "-m", "ziglang", "cc", "-target", target, "-fno-sanitize=undefined"]
    double, client = str(build_filter.HELPERS / "libcuda_double.c"), str(build_filter.CLIENT)
    shared = ("-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-Wl,-Bsymbolic")
    build_filter.compile_c(folder, *shared, "-o", "libcuda.so.1", double, "-pthread", "-ldl")
    (folder / "libcuda.so").symlink_to("libcuda.so.1")
    build_filter.compile_c(folder, "-o", "client", client, "-L.", "-lcuda", "-Wl,-rpath,$ORIGIN", "-pthread", "-ldl")
    return build_filter.Built(folder=folder, client=folder / "client", preload=filters / f"{machine}.so")


def works(root: Path, built: build_filter.Built, folder: Path) -> str:
    """What the filter did under the root's C library: "works", or what went wrong."""
    machine, loader = loader_in(root)
    emulator = shutil.which(f"qemu-{machine}-static") or shutil.which(f"qemu-{machine}")
    if machine != platform.machine() and emulator is None:
        return f"not run: qemu-{machine} is not installed"
    prefix = [str(loader), "--library-path", f"{library_folders(root)}:{built.folder}"]
    prefix = [str(emulator), *prefix] if machine != platform.machine() else prefix
    directory = run_directory(folder, FilterRule(pattern=NCCL, priority=-5))
    with Session(built, directory, prefix=prefix) as session:
        session.make(NCCL)
        for route in ROUTES:
            if not session.find(route):
                return f"nothing was found by {route}"
            launched = session.launch(NCCL)
            if launched.result != 0 or launched.last.priority != -5:
                return f"by {route} a launch of NCCL's reached the driver with {launched}"
        state = session.state()
        if state.num_launches == 0 or state.counters[0].num_prioritized != state.num_launches:
            return f"it counted {state.num_launches} launches and {state.counters}"
    return f"works, {state.num_launches} of {state.num_launches} launches prioritized"


def main() -> None:
    """Print one line for each root file system, and keep them."""
    roots = [argument.split("=", 1) for argument in sys.argv[1:]]
    rows = []
    with tempfile.TemporaryDirectory() as name:
        filters = Path(name) / "filters"
        needs = {path.stem: ".".join(map(str, newest_glibc(path))) for path in build_for_wheel(filters)}
        print("newest version of glibc that the filter needs:", needs)
        for release, place in roots:
            machine, _ = loader_in(Path(place))
            folder = Path(name) / f"{release}-{machine}"
            folder.mkdir()
            outcome = works(Path(place), build_for(machine, folder, filters), folder)
            rows.append({"release": release, "machine": machine, "glibc": glibc_version(Path(place)), "outcome": outcome})
            print(" | ".join(rows[-1].values()))
    RESULTS.write_text(json.dumps({"newest_glibc_needed": needs, "releases": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
