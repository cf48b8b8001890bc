"""What goes wrong around the filter: no space, no driver, other preloaded libraries, forks, kills. Launches go on."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from counterpoint.launch_filter.control_block import INITIAL_BLOCK, ControlBlock, block_in_use, block_paths
from counterpoint.launch_filter.rules import FilterRule
from helpers.build_filter import HELPERS, Built, compile_c, environment
from helpers.filter_session import Session, run_directory

CAP = FilterRule(pattern="cap*", dynamic_shared_bytes=60_000, carveout_percent=100)
NO_SPACE = "int posix_fallocate(int f, long at, long n) { return (void)f, (void)at, (void)n, 28; }\n"  # ENOSPC
LOOK_UPS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
int main(void) {
    void *launch = dlsym(RTLD_DEFAULT, "cuLaunchKernel");
    printf("%d %d ", launch != NULL, dlerror() != NULL);
    void *next = dlsym(RTLD_NEXT, "cuLaunchKernelEx");
    printf("%d ", next != NULL);
    void *unload = dlvsym(RTLD_DEFAULT, "cuModuleUnload", "ANY");
    printf("%d %d\\n", dlsym(RTLD_DEFAULT, "printf") == (void *)printf, unload != NULL);
    return 0;
}
"""

PLUGIN = """
void *double_make(const char *, int, int, int);
int double_attribute(void *, int);
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
int launch(void) {
    int value = 0;
    void *kernel = double_make("capped", 0, 32, 0), *parameters[] = {&value};
    const int error = cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, (void *)0, parameters, (void **)0);
    return error ? -1 : double_attribute(kernel, 8);
}
"""
LOADER = """
#include <dlfcn.h>
#include <stdio.h>
int main(void) {
    void *plugin = dlopen("./plugin.so", RTLD_NOW | RTLD_LOCAL);
    int (*launch)(void) = plugin ? (int (*)(void))dlsym(plugin, "launch") : 0;
    printf("%d\\n", launch ? launch() : -2);
    return 0;
}
"""


def other(folder: Path, *flags: str) -> Path:
    """Another library that takes launches."""
    compile_c(folder, *flags, "-shared", "-fPIC", "-o", "other.so", str(HELPERS / "other_preload.c"), "-ldl")
    return folder / "other.so"


@pytest.mark.parametrize("cause", ["limit", "disk"])
def test_without_room_for_the_block_the_job_runs_as_if_there_were_no_filter(
    built: Built, tmp_path: Path, cause: str
) -> None:
    directory = run_directory(tmp_path, CAP)
    before: tuple[Path, ...] = ()
    prefix = ("sh", "-c", 'ulimit -f 1; exec "$0"') if cause == "limit" else ()
    if cause == "disk":
        (tmp_path / "full.c").write_text(NO_SPACE)
        compile_c(tmp_path, "-shared", "-fPIC", "-o", "full.so", "full.c")
        before = (tmp_path / "full.so",)
    with Session(built, directory, before=before, prefix=prefix) as client:
        assert client.find()
        client.make("capped")
        assert [client.launch("capped", 9).last.shared for _ in range(3)] == [9, 9, 9]
    assert [path.name for path in directory.iterdir()] == [INITIAL_BLOCK]
    reason = "File too large" if cause == "limit" else "No space left on device"
    assert client.stderr.count("\n") == 1
    assert client.stderr.startswith("counterpoint: cannot reserve ")
    assert client.stderr.endswith(f"{reason}; no plan is applied here.\n")


def test_a_template_of_another_version_is_one_line_and_no_filter(built: Built, tmp_path: Path) -> None:
    directory = run_directory(tmp_path, CAP)
    (directory / INITIAL_BLOCK).write_bytes(b"something else")
    with Session(built, directory) as client:
        client.find()
        client.make("capped")
        assert client.launch("capped").last.shared == 0
    assert (
        client.stderr
        == "counterpoint: initial.block is not of this filter's version; start the job again. No plan is applied here.\n"
    )
    assert block_paths(directory) == []


def test_a_forked_child_has_a_block_of_its_own(built: Built, tmp_path: Path) -> None:
    directory = run_directory(tmp_path, CAP)
    with Session(built, directory) as client:
        client.find()
        client.make("capped")
        client.launch("capped")
        children = []
        for _ in range(2):
            (line, *_) = client.ask("fork capped")
            _, child, status = line.split()
            assert status == "0"
            children.append(directory / f"{child}.block")
        client.launch("capped")
        assert client.state().num_launches == 2
    for path in children:
        block = ControlBlock(path)
        state = block.state()
        assert (f"{state.pid}.block", state.rank, state.num_launches, state.counters[0].num_capped) == (path.name, 3, 1, 1)
        block.close()


def test_a_block_of_the_same_process_number_is_kept(built: Built, tmp_path: Path) -> None:
    directory = run_directory(tmp_path, CAP)
    earlier = ("sh", "-c", f'echo earlier > "{directory}/$$.block"; exec "$0"')
    with Session(built, directory, prefix=earlier) as client:
        client.find()
        client.make("capped")
        assert client.launch("capped").last.shared == 60_000
        second, first = block_paths(directory)
        assert first.read_text() == "earlier\n"
        assert second.stem == f"{first.stem}-1"


def test_the_block_in_use_is_told_from_that_of_the_program_before_exec(built: Built, tmp_path: Path) -> None:
    directory = run_directory(tmp_path, CAP)
    earlier = ("sh", "-c", f'cp "{directory}/initial.block" "{directory}/$$.block"; exec "$0"')
    with Session(built, directory, prefix=earlier) as client:
        client.make("capped")
        (first,) = block_paths(directory)
        pid = int(first.stem)
        assert block_in_use(directory, pid) is None, "the filter has not started"
        client.find()
        client.launch("capped")
        found = block_in_use(directory, pid)
        assert found == directory / f"{pid}-1.block"
        block = ControlBlock(found)
        block.swap(())
        assert client.launch("capped").last.shared == 0
        assert block.state().num_launches == 2
        block.close()


def test_a_killed_process_leaves_its_counts(built: Built, tmp_path: Path) -> None:
    directory = run_directory(tmp_path, CAP)
    client = Session(built, directory)
    client.find()
    client.make("capped")
    client.launch("capped")
    os.kill(client.state().pid, signal.SIGKILL)
    with pytest.raises(AssertionError, match="ended at"):
        client.launch("capped")
    state = client.state()
    assert (state.num_launches, state.counters[0].num_capped, bool(state.driver)) == (1, 1, True)
    client.block().close()


@pytest.mark.parametrize("place", ["before", "behind"])
@pytest.mark.parametrize("flags", [(), ("-DOTHER_DLSYM",)], ids=["launch", "dlsym"])
@pytest.mark.parametrize("route", ["linked", "dlsym", "default", "next"])
def test_another_preloaded_library_sees_no_less_than_without_the_filter(
    built: Built, tmp_path: Path, place: str, flags: tuple[str, ...], route: str
) -> None:
    library = (other(tmp_path, *flags),)
    without_filter = replace(built, preload=None)
    with Session(without_filter, None, before=library) as alone:
        alone.find(route)
        alone.make("capped")
        alone.launch("capped")
    with Session(built, run_directory(tmp_path, CAP), **{place: library}) as client:
        assert client.find(route)
        client.make("capped")
        launched = client.launch("capped")
        assert (launched.result, [reached.shared for reached in launched.reached]) == (0, [60_000])
        assert client.state().num_launches == 1
    assert (client.stderr, alone.stderr) in [
        (f"other saw {more}\n", f"other saw {less}\n") for less in (0, 1) for more in range(less, 2)
    ]


def test_where_there_is_no_driver_nothing_is_found(built: Built, tmp_path: Path) -> None:
    (tmp_path / "look.c").write_text(LOOK_UPS)
    compile_c(tmp_path, "-o", "look", "look.c", "-ldl")
    for directory in (None, run_directory(tmp_path, CAP)):
        for variables in ({}, environment(built, directory)):
            ended = subprocess.run(
                [str(tmp_path / "look")], env=variables, capture_output=True, text=True, check=True, timeout=60
            )
            # RTLD_NEXT from the program finds what is behind it, and that is the filter's own, which answers with an error
            assert ended.stdout.split() == ["0", "1", "1" if variables else "0", "1", "0"]
            assert ended.stderr == ""
    assert block_paths(tmp_path / "run") == []


def test_a_driver_that_only_one_library_can_see_is_reached(built: Built, tmp_path: Path) -> None:
    (tmp_path / "plugin.c").write_text(PLUGIN)
    (tmp_path / "loader.c").write_text(LOADER)
    driver = (f"-L{built.folder}", "-lcuda", f"-Wl,-rpath,{built.folder}")
    compile_c(tmp_path, "-shared", "-fPIC", "-o", "plugin.so", "plugin.c", *driver)
    compile_c(tmp_path, "-o", "loader", "loader.c", "-ldl")
    directory = run_directory(tmp_path, CAP)
    for variables, limit in (
        (environment(replace(built, preload=None), None), "49152"),
        (environment(built, directory), "60000"),
    ):
        command = [str(tmp_path / "loader")]
        ended = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
        assert ended.stdout.strip() == limit, ended.stderr


def test_a_program_without_a_gpu_runs_as_before(built: Built, tmp_path: Path) -> None:
    directory = run_directory(tmp_path, CAP)
    command = [
        sys.executable,
        "-c",
        "import ctypes, json, sqlite3, subprocess; print(subprocess.check_output(['echo', 'x']))",
    ]
    plain = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    filtered = subprocess.run(
        command, env=environment(built, directory), capture_output=True, text=True, check=True, timeout=60
    )
    assert (filtered.stdout, filtered.stderr) == (plain.stdout, plain.stderr)
    assert block_paths(directory) == []
