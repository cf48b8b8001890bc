"""JobContext gathered from a machine: a driver built for the test, NCCL's files, other interpreters, preloading."""

import subprocess
import sys
import venv
from pathlib import Path

import msgspec
import pytest

from counterpoint.doctor import environment
from counterpoint.doctor.driver_query import Answer
from counterpoint.doctor.environment import ask_driver, at_command, gather, read_nccl_files, read_preloaded
from counterpoint.doctor.job_context import FoundGpu, JobContext, load_context, parse_version
from counterpoint.doctor.versions_query import query_versions
from counterpoint.errors import JobContextError
from counterpoint.launch_filter.prebuilt import LINKED
from counterpoint.value import write_json, write_toml

# two GPUs with handles unlike their numbers; the first cannot reach the second; CUDA_VISIBLE_DEVICES=0 hides the second
DRIVER_SOURCE = r"""
#include <stdlib.h>
#include <string.h>
int cuInit(unsigned flags) { return getenv("TEST_REFUSES") ? 999 : 0; }
int cuDriverGetVersion(int *out) { *out = 13010; return 0; }
int cuDeviceGetCount(int *out) {
  const char *seen = getenv("CUDA_VISIBLE_DEVICES");
  *out = seen && !strcmp(seen, "0") ? 1 : 2;
  return 0;
}
int cuDeviceGet(int *out, int number) { *out = 10 + number; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "Test GPU", size); return device < 10; }
int cuDeviceGetAttribute(int *out, int attribute, int device) {
  switch (attribute) {
    case 75: *out = 9; return 0;
    case 76: *out = 0; return 0;
    case 16: *out = 132; return 0;
    case 132: *out = 1; return getenv("TEST_IS_OLD") ? 1 : 0;
  }
  return 1;
}
int cuDeviceCanAccessPeer(int *out, int one, int other) { *out = !(one == 10 && other == 11); return one == other; }
"""
NCCL_SOURCE = "int ncclGetVersion(int *out) { *out = 22809; return 0; }"
HIP_SOURCE = r"""
#include <string.h>
int hipGetDeviceCount(int *out) { *out = 2; return 0; }
int hipDeviceGetName(char *name, int size, int device) { strncpy(name, "Test AMD GPU", size); return 0; }
int hipDeviceCanAccessPeer(int *out, int one, int other) { *out = 1; return 0; }
"""


def build(folder: Path, **sources: str) -> Path:
    """Shared libraries by name, with dots for underscores: libcuda_so_1."""
    for name, source in sources.items():
        file = folder / f"{name}.c"
        file.write_text(source)
        library = folder / name.replace("_", ".")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, file], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("driver"), libcuda_so_1=DRIVER_SOURCE, libnccl_so_2=NCCL_SOURCE)


@pytest.fixture(autouse=True)
def no_system_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environment, "SYSTEM_NCCL_FILE", tmp_path / "system.conf")


def look(*command: str, libraries: Path | None = None, **variables: str) -> JobContext:
    """Gather with these variables alone, and these libraries before the machine's own."""
    own = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": "/nonexistent"}
    return gather(command, own | ({"LD_LIBRARY_PATH": str(libraries)} if libraries else {}) | variables)


def test_gpus_versions_and_peer_access_are_asked_of_the_driver(driver: Path) -> None:
    found = look(libraries=driver)
    gpu = FoundGpu(name="Test GPU", compute_capability="9.0", num_sms=132, has_multicast=True)
    assert (found.vendor, found.cuda_version, found.gpus) == ("nvidia", "13.1", (gpu, gpu))
    assert found.architecture() == (9, 0)


def test_blocked_pairs_are_asked_by_handle_and_named_by_number(driver: Path) -> None:
    assert look(libraries=driver).blocked_peers == ((0, 1),)


def test_the_variables_of_the_command_decide_which_gpus_are_seen(driver: Path) -> None:
    found = look("env", "CUDA_VISIBLE_DEVICES=0", "python", "train.py", libraries=driver)
    assert len(found.gpus) == 1
    assert found.blocked_peers == ()
    assert found.origins == {"CUDA_VISIBLE_DEVICES": "the command"}


def test_a_driver_without_multicast_leaves_it_unknown(driver: Path) -> None:
    assert look(libraries=driver, TEST_IS_OLD="1").gpus[0].has_multicast is None


def test_a_driver_that_refuses_is_reported_and_stops_nothing(driver: Path) -> None:
    found = look(libraries=driver, TEST_REFUSES="1")
    assert (found.gpus, found.blocked_peers) == ((), None)
    assert any("refuses to start (error 999)" in line for line in found.unknown)


def test_a_driver_without_a_needed_function_is_reported(tmp_path: Path) -> None:
    found = look(libraries=build(tmp_path, libcuda_so_1="int cuInit(unsigned flags) { return 0; }"))
    assert any("cuDeviceGetCount" in line for line in found.unknown)


def test_a_driver_that_crashes_ends_only_the_question(tmp_path: Path) -> None:
    crash = "#include <stdlib.h>\nint cuInit(unsigned flags) { abort(); }"
    found = look(libraries=build(tmp_path, libcuda_so_1=crash))
    assert any("ended with status -6" in line for line in found.unknown)


def test_a_driver_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "QUERY_LIMIT_S", 1)
    hang = "#include <unistd.h>\nint cuInit(unsigned flags) { for (;;) pause(); }"
    found = look(libraries=build(tmp_path, libcuda_so_1=hang))
    assert any("no answer within 1 s" in line for line in found.unknown)


def test_hip_is_asked_where_there_is_no_cuda(tmp_path: Path) -> None:
    if look().vendor == "nvidia":
        pytest.skip("this machine has NVIDIA's driver")
    found = look(libraries=build(tmp_path, libamdhip64_so=HIP_SOURCE))
    assert (found.vendor, found.gpus, found.blocked_peers) == ("amd", (FoundGpu(name="Test AMD GPU"),) * 2, ())


def test_without_a_driver_gpus_and_peer_access_are_unknown(tmp_path: Path) -> None:
    if look().vendor != "unknown":
        pytest.skip("this machine has a driver")
    found = look()
    assert found.blocked_peers is None
    assert any(line.startswith("GPUs, driver and peer access: neither") for line in found.unknown)


def test_only_variables_that_matter_are_kept() -> None:
    found = look(NCCL_DEBUG="INFO", AWS_SECRET="x", CUDA_LAUNCH_BLOCKING="1")
    assert found.environment == {"NCCL_DEBUG": "INFO", "CUDA_LAUNCH_BLOCKING": "1"}


def test_nccls_files_are_read_in_nccls_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system, chosen = tmp_path / "system.conf", tmp_path / "chosen.conf"
    monkeypatch.setattr(environment, "SYSTEM_NCCL_FILE", system)
    system.write_text("NCCL_NTHREADS=128\nNCCL_PROTO=LL\n")
    (tmp_path / ".nccl.conf").write_text(
        "# a comment\nNCCL_PROTO=Simple\nNCCL_SOCKET_IFNAME==eth0\nPATH=/evil\nno assignment\n"
    )
    settings = {
        "NCCL_PROTO": ("Simple", str(tmp_path / ".nccl.conf")),
        "NCCL_SOCKET_IFNAME": ("=eth0", str(tmp_path / ".nccl.conf")),
        "NCCL_NTHREADS": ("128", str(system)),
    }
    assert read_nccl_files({"HOME": str(tmp_path)}) == (settings, ())
    chosen.write_text("NCCL_PROTO=LL128\n")
    found = look(HOME=str(tmp_path), NCCL_CONF_FILE=str(chosen), NCCL_NTHREADS="256")
    assert found.found("NCCL_PROTO") == f"LL128 (in {chosen})"
    assert found.found("NCCL_NTHREADS") == "256", "the environment goes before files"


def test_a_chosen_file_of_nccl_that_cannot_be_read_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "SYSTEM_NCCL_FILE", tmp_path / "none.conf")
    for path, why in ((tmp_path / "none", "No such file or directory"), (tmp_path, "Is a directory")):
        settings, (unread,) = read_nccl_files({"NCCL_CONF_FILE": str(path)})
        assert not settings
        assert unread.startswith("settings of NCCL in /")
        assert unread.endswith(f": {why}")
    assert read_nccl_files({"HOME": str(tmp_path)}) == ({}, ())


def test_preloaded_libraries_are_searched_for_the_drivers_launches(tmp_path: Path) -> None:
    build(tmp_path, libhook_so="int cuLaunchKernel(void) { return 0; }", libother_so="int nothing(void) { return 0; }")
    hook, other = tmp_path / "libhook.so", tmp_path / "libother.so"
    found = read_preloaded({"LD_PRELOAD": f"{hook}:{other} /no/such.so libc.so.6"})
    assert [(library.is_found, library.entry_points) for library in found] == [
        (True, ("cuLaunchKernel",)),
        (True, ()),
        (False, ()),
        (True, ()),
    ]


def test_our_own_filter_is_known_by_the_name_it_is_linked_with(tmp_path: Path) -> None:
    name = environment.OUR_FILTER.decode()
    assert any(name in flag for flag in LINKED), "the filter is linked with it"
    source, library = tmp_path / "filter.c", tmp_path / "filter-1234.so"
    source.write_text("int cuLaunchKernel(void) { return 0; }")
    subprocess.run(["cc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", library, source], check=True, capture_output=True)
    (found,) = read_preloaded({"LD_PRELOAD": str(library)})
    assert found.is_ours
    assert found.entry_points == ("cuLaunchKernel",)


def test_a_preloaded_library_does_not_disturb_the_question(driver: Path, tmp_path: Path) -> None:
    crash = build(tmp_path, libcrash_so="#include <stdlib.h>\n__attribute__((constructor)) void now(void) { abort(); }")
    assert look(libraries=driver, LD_PRELOAD=str(crash / "libcrash.so")).gpus


def test_what_the_environment_prints_before_the_answer_is_passed_over(tmp_path: Path) -> None:
    usual = ask_driver({})
    (tmp_path / "sitecustomize.py").write_text("print('{welcome}')\n")
    assert ask_driver({"PYTHONPATH": str(tmp_path)}) == usual
    (tmp_path / "sitecustomize.py").write_text("import atexit\natexit.register(print, 'bye')\n")
    answer, unknown = ask_driver({"PYTHONPATH": str(tmp_path)})
    assert answer == Answer()
    assert "the query printed" in unknown[0]


def test_versions_are_those_of_the_python_that_the_command_runs(tmp_path: Path) -> None:
    venv.create(tmp_path / "other", with_pip=False)
    python = tmp_path / "other" / "bin" / "python"
    packages = next((tmp_path / "other" / "lib").glob("python*/site-packages"))
    (packages / "torch").mkdir()
    (packages / "torch" / "__init__.py").write_text("raise ImportError('torch must not be imported')\n")
    (packages / "torch" / "version.py").write_text(
        "__version__ = '2.9.1+cu130'\ncuda: str | None = '13.0'\nhip: str | None = None\n"
    )
    for cuda, version in (("12", "2.27.3"), ("13", "2.28.9")):
        metadata = packages / f"nvidia_nccl_cu{cuda}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nvidia-nccl-cu{cuda}\nVersion: {version}\n")
    found = look(str(python), "train.py")
    assert (found.torch_version, found.torch_cuda_version, found.nccl_version) == ("2.9.1+cu130", "13.0", "2.28.9")
    torchrun = tmp_path / "elsewhere" / "torchrun"
    torchrun.parent.mkdir()
    torchrun.write_text(f"#!{python}\nraise SystemExit('the command must not run')\n")
    torchrun.chmod(0o755)
    assert look(str(torchrun), "train.py").torch_version == "2.9.1+cu130"


def program(file: Path, content: str = "#!/bin/sh\n") -> str:
    """A file that may be executed."""
    file.parent.mkdir(exist_ok=True)
    file.write_text(content)
    file.chmod(0o755)
    return str(file)


def test_a_launcher_that_is_not_on_the_path_is_said_where_a_wrapper_starts_it(tmp_path: Path) -> None:
    program(tmp_path / "srun")
    found = look("srun", "accelerate", "launch", "train.py", PATH=str(tmp_path))
    assert any("accelerate: it is not on the PATH" in line for line in found.unknown)


@pytest.mark.parametrize(
    "command", ["torchrun --nnodes 2 train.py", "env A=1 accelerate launch train.py", "srun python it.py"]
)
def test_a_launcher_need_not_be_installed_where_its_words_are_checked(tmp_path: Path, command: str) -> None:
    found = look(*command.split(), PATH=str(tmp_path))
    assert found.job is not None
    launcher = command.removeprefix("env A=1 ").split()[0]
    assert [line for line in found.unknown if line.startswith(f"{launcher}: it is not on the PATH")]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("accelerat launch train.py", "'accelerat' was not found in its PATH, '{path}'. Check its name and the PATH."),
        ("env A=1 nosuch train.py", "'nosuch' was not found in its PATH, '{path}'."),
        ("./srun python train.py", "'./srun' was not found."),
        ("PATH=/nowhere job", "'job' was not found in its PATH, '/nowhere'."),
        ("env PATH=/nowhere job", "'job' was not found in its PATH, '/nowhere'."),
    ],
)
def test_a_first_program_that_is_not_in_the_jobs_path_is_refused(tmp_path: Path, command: str, words: str) -> None:
    program(tmp_path / "job")
    with pytest.raises(JobContextError) as problem:
        look(*command.split(), PATH=str(tmp_path))
    assert words.format(path=tmp_path) in str(problem.value)
    assert str(problem.value).endswith("For a command of another machine, add --context FILE.")


@pytest.mark.parametrize("command", ["env -i job", "env -u PATH job"])
def test_without_a_path_programs_are_where_the_system_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    program(tmp_path / "job")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JobContextError, match="'job' was not found in its PATH, '/bin:/usr/bin'"):
        look(*command.split(), PATH=str(tmp_path))


def test_the_path_that_the_command_sets_is_where_its_programs_are(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    program(here / "srun")
    program(there / "accelerate", f"#!{sys.executable}\n")
    for command in ("env PATH={there} accelerate launch train.py", "srun --export=PATH={there} accelerate launch train.py"):
        found = look(*command.format(there=there).split(), PATH=str(here))
        assert not any("not on the PATH" in line for line in found.unknown)
        assert "PATH" not in found.environment | found.origins
    absent = look("env", f"PATH={there}", "srun", "accelerate", "launch", "train.py", PATH=str(here)).unknown
    assert [line for line in absent if "not on the PATH" in line] == ["srun: it is not on the PATH of this machine"]


def test_what_shells_know_themselves_need_not_be_on_the_path(tmp_path: Path) -> None:
    job = look("time", "python", "train.py", PATH=str(tmp_path)).job
    assert job is not None
    assert job.programs == ("time", "python")


def test_a_command_of_another_machine_need_not_be_here() -> None:
    job = at_command(JobContext(), ["env", "PATH=/there", "nosuch", "train.py"]).job
    assert job is not None
    assert job.programs == ("nosuch",)
    assert at_command(JobContext(), ["env", "PATH=/there", "nosuch"]).environment == {}


def test_nccl_of_a_container_is_asked_for_its_version(driver: Path) -> None:
    if query_versions()["nccl"]:
        pytest.skip("NCCL is installed as a package here")
    assert look(libraries=driver).nccl_version == "2.28.9"


def test_slurm_says_how_many_nodes_there_are() -> None:
    job = look("python", "train.py", SLURM_JOB_NUM_NODES="4").job
    assert job is not None
    assert job.num_nodes == 4


def test_saved_surroundings_come_back_and_take_a_command(tmp_path: Path, driver: Path) -> None:
    found = look(libraries=driver, NCCL_DEBUG="INFO")
    file = tmp_path / "node.toml"
    file.write_text(write_toml(found))
    assert load_context(file) == found == msgspec.json.decode(write_json(found), type=JobContext)
    there = at_command(found, ["env", "-u", "NCCL_DEBUG", "NCCL_PROTO=LL", "python", "train.py"])
    assert (there.environment, there.origins) == ({"NCCL_PROTO": "LL"}, {"NCCL_PROTO": "the command"})
    assert there.gpus == found.gpus


@pytest.mark.parametrize("content", ["", "gpus = 3", "unknown_field = 1", "blocked_peers = [[0, 1]]", "vendor = 'intel'"])
def test_a_wrong_file_of_surroundings_is_one_line(tmp_path: Path, content: str) -> None:
    file = tmp_path / "node.toml"
    file.write_text(content)
    with pytest.raises(JobContextError) as problem:
        load_context(file)
    assert str(file) in str(problem.value)
    assert "\n" not in str(problem.value)


def test_an_answer_without_gpus_says_why() -> None:
    assert Answer(reason="none").gpus == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2.13.0+cu130", (2, 13, 0)), ("2.10.0a0", (2, 10, 0)), ("13.0", (13, 0)), ("", None), ("git", None)],
)
def test_versions_are_compared_by_their_leading_numbers(text: str, expected: tuple[int, ...] | None) -> None:
    assert parse_version(text) == expected
