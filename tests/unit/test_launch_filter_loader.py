"""The filter beside the dynamic loader: a library whose constructor launches while another thread launches a new kernel."""

import subprocess
from pathlib import Path

import pytest

from counterpoint.launch_filter.rules import FilterRule
from helpers.build_filter import Built, compile_c, environment
from helpers.filter_session import run_directory

END_LIMIT_S = 30
LAUNCH = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
void *double_make(const char *, int, int, int);
static int launch(const char *name) {
    int argument = 0;
    void *parameters[] = {&argument};
    return cuLaunchKernel(double_make(name, 0, 32, 0), 1, 1, 1, 1, 1, 1, 0, 0, parameters, 0);
}
"""
CONSTRUCTOR = """
extern int is_in_constructor, is_other_launching;
__attribute__((constructor)) static void launch_now(void) {
    __atomic_store_n(&is_in_constructor, 1, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&is_other_launching, __ATOMIC_ACQUIRE)) usleep(1000);
    usleep(200000);  // the other thread waits for the loader's lock by now, which this one holds
    printf("constructor %d\\n", launch("_Z14in_constructorv"));
}
"""
PROGRAM = """
int is_in_constructor, is_other_launching;
static void *other(void *nothing) {
    while (!__atomic_load_n(&is_in_constructor, __ATOMIC_ACQUIRE)) usleep(1000);
    __atomic_store_n(&is_other_launching, 1, __ATOMIC_RELEASE);
    printf("other %d\\n", launch("_Z6kernelv"));
    return nothing;
}
int main(void) {
    pthread_t thread;
    setvbuf(stdout, 0, _IONBF, 0);
    printf("main %d\\n", launch("warm"));
    pthread_create(&thread, 0, other, 0);
    void *library = dlopen("./constructor.so", RTLD_NOW);
    pthread_join(thread, 0);
    printf("loaded %d\\n", library != 0);
    return 0;
}
"""
HOLD_ALL = (FilterRule(pattern="nccl*", is_collective=True), FilterRule(pattern="_Z*", hold_us=5.0))


@pytest.mark.parametrize("rules", [(), HOLD_ALL], ids=["demangling", "a driver that loads"])
def test_a_constructor_that_launches_waits_for_nobody_who_waits_for_the_loader(
    built: Built, tmp_path: Path, rules: tuple[FilterRule, ...]
) -> None:
    (tmp_path / "constructor.c").write_text(LAUNCH + CONSTRUCTOR)
    (tmp_path / "program.c").write_text(LAUNCH + PROGRAM)
    driver = (f"-L{built.folder}", "-lcuda", f"-Wl,-rpath,{built.folder}", "-pthread", "-ldl")
    compile_c(tmp_path, "-shared", "-fPIC", "-o", "constructor.so", "constructor.c", *driver)
    compile_c(tmp_path, "-rdynamic", "-o", "program", "program.c", *driver)
    ended = subprocess.run(
        [str(tmp_path / "program")],
        cwd=tmp_path,
        env=environment(built, run_directory(tmp_path, *rules), behind=(Path("libstdc++.so.6"),)),
        capture_output=True,
        text=True,
        check=False,
        timeout=END_LIMIT_S,
    )
    assert sorted(ended.stdout.splitlines()) == ["constructor 0", "loaded 1", "main 0", "other 0"]
    assert (ended.returncode, ended.stderr) == (0, "")
