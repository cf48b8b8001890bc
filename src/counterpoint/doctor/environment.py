"""Gathers the context of a job: variables, NCCL's files, GPUs, versions, preloaded libraries. It starts no part of the
job.

The GPUs are queried in a process with the job's variables, so CUDA_VISIBLE_DEVICES applies. Versions are those of the
interpreter that the command would run; if it is another one than this, it is asked for its packages and nothing else.
Both queries have a time limit. The command's first program must be on this machine, as for `counterpoint run`, unless it is
a launcher or wrapper whose words are known: then its absence is told. What a wrapper, a launcher or an interpreter starts
may be in a container or on other nodes, so it is not looked up.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from counterpoint.cuda.device_facts import kernel_module_version
from counterpoint.doctor import versions_query
from counterpoint.doctor.command import LAUNCHERS, WRAPPERS, ReadCommand, read_command
from counterpoint.doctor.driver_query import Answer
from counterpoint.doctor.job_context import JobCommand, JobContext, PreloadedLibrary, whole_number
from counterpoint.errors import CounterpointError, JobContextError, LaunchFilterError, shown
from counterpoint.files import cache_folder
from counterpoint.launch_filter.executable import check_command, find_executable
from counterpoint.launch_filter.places import file_system_of

QUERY_LIMIT_S = 60
RELEVANT = (
    "AMD_", "CUDA_", "DEBUG_HIP_", "GPU_", "HIP_", "HSA_", "LD_PRELOAD", "NCCL_", "PYTORCH_", "RCCL_", "ROCR_",
    "SLURM_JOB_NUM_NODES", "SLURM_NNODES", "TORCH_",
)  # fmt: skip
SHELL_KEYWORDS = ("time",)  # wrappers that are shell builtins: they need not be on the PATH
ENTRY_POINTS = ("cuLaunchKernel", "cuLaunchKernelEx", "cuGetProcAddress", "hipLaunchKernel", "hipModuleLaunchKernel")
# the name under which Counterpoint's launch filter is linked; its file name differs from build to build
OUR_FILTER = b"libcounterpoint_filter.so"
# a larger file is a whole runtime, not a filter; reading it would take long and tell little
LARGEST_PRELOADED_BYTES = 64 << 20
SYSTEM_NCCL_FILE = Path("/etc/nccl.conf")
Decoded = TypeVar("Decoded")


def gather(command: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> JobContext:
    """Inspect this machine, and `command` if there is one.

    Raises `JobContextError` for a command without a program, and for one whose first program cannot be started here.
    """
    outer = dict(os.environ if environment is None else environment)
    read = read_for(command, outer)
    absent = _check_program(read) if command else ()
    inner = {name: value for name, value in outer.items() if not _is_followed(name)} | read.environment
    relevant = _relevant(read.environment)
    answer, driver_unknown = ask_driver(inner)
    versions, versions_unknown = _versions(read.program_path, inner)
    nccl_file_settings, files_unknown = read_nccl_files(inner)
    origins = {name: file for name, (_, file) in nccl_file_settings.items() if name not in relevant}
    return JobContext(
        vendor="amd" if versions.get("torch_hip") and not answer.gpus else answer.vendor,
        environment={name: setting for name, (setting, _) in nccl_file_settings.items()} | relevant,
        origins=origins | _assigned_by_command(relevant, outer),
        gpus=answer.gpus,
        blocked_peers=answer.blocked_peers if answer.gpus else None,
        driver_version=kernel_module_version() if answer.vendor == "nvidia" else "",
        cuda_version=answer.driver_api_version,
        torch_version=versions.get("torch", ""),
        torch_cuda_version=versions.get("torch_cuda", ""),
        torch_hip_version=versions.get("torch_hip", ""),
        nccl_version=versions.get("nccl") or answer.nccl_version,
        preloaded=read_preloaded(inner),
        **_filter_facts(read),
        job=read.job if command else None,
        unknown=(
            *driver_unknown,
            *absent,
            *files_unknown,
            *versions_unknown,
            *_missing_versions(versions, answer),
            *read.unknown,
        ),
    )


def _filter_facts(read: ReadCommand) -> dict[str, str]:
    """Return where the launch filter would be stored, on which file system, and why the job's program could not load it."""
    try:
        folder = cache_folder()
    except CounterpointError:  # neither the setting nor a home folder exists: `run` reports that
        return {}
    system = file_system_of(folder)
    found = shutil.which(read.program_path, path=_searched(read.environment.get("PATH"))) if read.program_path else None
    problem = ""
    if found is not None and not read.job.container:
        try:
            check_command(Path(found))
        except LaunchFilterError as refused:
            problem = str(refused)
    shared = system.kind if system.is_shared else ""
    return {"filter_folder": str(folder), "filter_file_system": shared, "filter_problem": problem}


def at_command(elsewhere: JobContext, command: Sequence[str]) -> JobContext:
    """Return a context that was gathered on another machine, for a command that would start there."""
    read = read_for(command, elsewhere.environment)
    relevant = _relevant(read.environment)
    set_by_command = _assigned_by_command(relevant, elsewhere.environment)
    origins = {name: origin for name, origin in elsewhere.origins.items() if name in relevant} | set_by_command
    return msgspec.structs.replace(
        elsewhere, environment=relevant, origins=origins, job=read.job, unknown=(*elsewhere.unknown, *read.unknown)
    )


def read_for(command: Sequence[str], outer: Mapping[str, str]) -> ReadCommand:
    """Return the command with its relevant variables and its PATH; without a command, only those."""
    followed = {name: value for name, value in outer.items() if _is_followed(name)}
    if not command:
        return ReadCommand(job=JobCommand(), environment=followed, first_word="")
    read = read_command(command, followed)
    nodes = read.job.num_nodes or _slurm_nodes(read.environment)
    kept = {name: value for name, value in read.environment.items() if _is_followed(name)}
    return msgspec.structs.replace(read, job=msgspec.structs.replace(read.job, num_nodes=nodes), environment=kept)


def _check_program(read: ReadCommand) -> tuple[str, ...]:
    """Return that a launcher or wrapper is not on this machine, unless what is said of the versions will tell.

    Raises `JobContextError` if another program cannot be started here, with the message of `counterpoint run`, which names
    the PATH if the command changed it.
    """
    word, path = read.first_word, read.first_path
    if word in SHELL_KEYWORDS:
        return ()
    is_own = os.sep in word or path == os.environ.get("PATH")
    try:
        find_executable((word,), None if is_own else _searched(path))
        return ()
    except LaunchFilterError as problem:
        if word in (*LAUNCHERS, *WRAPPERS) and not os.path.exists(word):
            return () if word == read.program_path else (f"{word}: it is not on the PATH of this machine",)
        elsewhere = "" if os.path.exists(word) else " For a command of another machine, add --context FILE."
        raise JobContextError(f"{problem}{elsewhere}") from problem


def _searched(path: str | None) -> str:
    """Return where programs are searched with this PATH; without one, the C library has a default."""
    return os.defpath if path is None else path


def _is_followed(name: str) -> bool:
    """Return whether a variable is tracked through the command: those that matter to overlap, and PATH, which is not
    kept.
    """
    return name.startswith(RELEVANT) or name == "PATH"


def _relevant(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(RELEVANT)}


def _slurm_nodes(environment: Mapping[str, str]) -> int | None:
    stated = environment.get("SLURM_JOB_NUM_NODES", environment.get("SLURM_NNODES", ""))
    return whole_number(stated)


def _assigned_by_command(inner: Mapping[str, str], outer: Mapping[str, str]) -> dict[str, str]:
    return {name: "the command" for name, value in inner.items() if outer.get(name) != value}


def ask_driver(environment: Mapping[str, str]) -> tuple[Answer, tuple[str, ...]]:
    """Return what the driver shows to a process with these variables, and what stayed unknown."""
    # a preloaded library is meant for the job, and could disturb the query
    asking = {name: value for name, value in environment.items() if name != "LD_PRELOAD"}
    # -P: a file in the current folder must not be imported as a module
    command = [sys.executable, "-P", "-m", "counterpoint.doctor.driver_query"]
    output, problem = _run(command, asking)
    if problem:
        return Answer(), (f"GPUs, driver and peer access: {problem}",)
    answer, problem = _decoded(output, Answer)
    if answer is None:
        return Answer(), (f"GPUs, driver and peer access: {problem}",)
    return answer, (f"GPUs, driver and peer access: {answer.reason}",) if answer.reason else ()


def _run(command: Sequence[str], environment: Mapping[str, str]) -> tuple[bytes, str]:
    """Return standard output, or a short reason why there is none."""
    try:
        done = subprocess.run(command, env=dict(environment), capture_output=True, timeout=QUERY_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return b"", f"no answer within {QUERY_LIMIT_S} s"
    except OSError as problem:
        return b"", f"{command[0]} does not start ({problem.strerror})"
    if done.returncode != 0:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return b"", f"the query ended with status {done.returncode}{': ' + last[0] if last else ''}"
    return done.stdout, ""


def _versions(program_path: str, environment: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return versions of the interpreter beside the program, or else of this one."""
    found = shutil.which(program_path, path=_searched(environment.get("PATH"))) if program_path else None
    here = Path(sys.executable).parent
    if program_path and found is None:
        return versions_query.query_versions(), (
            f"{program_path}: it is not on the PATH, so versions are those of {sys.executable}",
        )
    if found is None or Path(found).parent.resolve() == here.resolve():
        return versions_query.query_versions(), ()
    interpreter = _interpreter_beside(Path(found))
    if interpreter is None:
        return versions_query.query_versions(), (
            f"the Python of {found}: none beside it, so versions are those of {sys.executable}",
        )
    output, problem = _run([str(interpreter), versions_query.__file__], environment)
    if problem:
        return {}, (f"versions of torch and NCCL in {interpreter}: {problem}",)
    versions, problem = _decoded(output, dict[str, str])
    return versions or {}, (f"versions of torch and NCCL in {interpreter}: {problem}",) if problem else ()


def _decoded(output: bytes, kind: type[Decoded]) -> tuple[Decoded | None, str]:
    """Return the object that a query printed last, or None and the reason; files that Python loads may print before it."""
    try:
        return msgspec.json.decode(output[output.rfind(b"\n{") + 1 :], type=kind), ""
    except msgspec.MsgspecError:
        return None, f"the query printed '{shown(output.decode(errors='replace'))}'"


def _interpreter_beside(program: Path) -> Path | None:
    """Return the Python of an environment's program; if it is elsewhere, a script's first line names it."""
    if program.name.startswith("python"):
        return program
    beside = next((path for name in ("python", "python3") if (path := program.with_name(name)).exists()), None)
    try:
        with program.open("rb") as file:
            first = file.readline(256).decode(errors="replace").removeprefix("#!").split()
    except OSError:
        return beside
    stated = Path(first[0]) if first else None
    return stated if stated is not None and stated.name.startswith("python") and stated.exists() else beside


def _missing_versions(versions: Mapping[str, str], answer: Answer) -> list[str]:
    names = {"torch": versions.get("torch"), "NCCL": versions.get("nccl") or answer.nccl_version}
    absent = [name for name, number in names.items() if not number]
    is_for_cpus = versions.get("torch") and not (versions.get("torch_cuda") or versions.get("torch_hip"))
    cpu_build = (
        [f"versions: torch {versions['torch']} is a CPU build, so the job must use another one"] if is_for_cpus else []
    )
    return [*cpu_build, *([f"versions: no {' and no '.join(absent)} is installed in the job's Python"] if absent else [])]


def read_nccl_files(environment: Mapping[str, str]) -> tuple[dict[str, tuple[str, str]], tuple[str, ...]]:
    """Return NCCL's settings from its files, each with the file, and the files that cannot be read. NCCL takes the first
    setting: the user's file, then the system's.
    """
    chosen = environment.get("NCCL_CONF_FILE")
    home = environment.get("HOME")
    user_file = Path(chosen) if chosen else Path(home) / ".nccl.conf" if home else None
    settings: dict[str, tuple[str, str]] = {}
    unread: list[str] = []
    for path in (user_file, SYSTEM_NCCL_FILE):
        try:
            assigned = [] if path is None else _assignments(path)
        except OSError as problem:
            if (chosen and path is user_file) or not isinstance(problem, FileNotFoundError):
                unread.append(f"settings of NCCL in {shown(str(path))}: {problem.strerror}")
            continue
        for name, value in assigned:
            settings.setdefault(name, (value, str(path)))
    return settings, tuple(unread)


def _assignments(path: Path) -> list[tuple[str, str]]:
    lines = path.read_text(errors="replace").splitlines()
    pairs = [line.split("=", maxsplit=1) for line in lines if "=" in line and not line.startswith("#")]
    return [(name.strip(), value.strip()) for name, value in pairs if name.strip().startswith(("NCCL_", "RCCL_"))]


def read_preloaded(environment: Mapping[str, str]) -> tuple[PreloadedLibrary, ...]:
    """Return the libraries in LD_PRELOAD. A library that intercepts the driver's launches contains their names as text."""
    paths = re.split(r"[: ]+", environment.get("LD_PRELOAD", "").strip(": "))
    return tuple(_preloaded(path) for path in paths if path)


def _preloaded(path: str) -> PreloadedLibrary:
    if "/" not in path:  # the loader searches for it, which is not repeated here
        return PreloadedLibrary(path=path, is_found=True)
    try:
        if Path(path).stat().st_size > LARGEST_PRELOADED_BYTES:
            return PreloadedLibrary(path=path, is_found=True)
        content = Path(path).read_bytes()
    except OSError:
        return PreloadedLibrary(path=path, is_found=False)
    return PreloadedLibrary(
        path=path,
        is_found=True,
        is_ours=OUR_FILTER in content,
        entry_points=tuple(name for name in ENTRY_POINTS if name.encode() + b"\0" in content),
    )
