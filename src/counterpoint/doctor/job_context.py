"""The context of a job as values: settings, GPUs, versions and the command; and a rule's finding.

Rules read a `JobContext` and nothing else. What could not be checked is None or empty, with the reason under `unknown`;
rules must not read that as "off" or "absent". Only the severity "defeats overlap" makes `counterpoint check` exit with
1: the setting prevents overlap or stops the job. "may defeat overlap" depends on the job, or removes a control's effect.
A "note" only explains.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from counterpoint.errors import JobContextError
from counterpoint.value import Value, read_toml, require, toml_output

CONTEXT = toml_output("context")

HintKind = Literal[
    "context_parallel",
    "cuda_graph",
    "data_parallel",
    "deepspeed",
    "expert_overlap",
    "fsdp",
    "fsdp1",
    "fsdp2",
    "high_priority",
    "megatron",
    "megatron_fsdp",
    "megatron_tensor_parallel",
    "pipeline_parallel",
    "sm_carveout",
    "symmetric_memory",
    "tensor_parallel",
    "zero_cta",
    "zero_without_overlap",
]
Severity = Literal["defeats overlap", "may defeat overlap", "note"]
SEVERITIES: tuple[Severity, ...] = ("defeats overlap", "may defeat overlap", "note")
# "fsdp" stands for either version, where the words do not tell which
SHARDED: tuple[HintKind, ...] = ("fsdp1", "fsdp2", "megatron_fsdp", "fsdp")
Version = tuple[int, ...]


class Hint(Value, frozen=True, kw_only=True):
    """Something that the command or its script tells about the job, and where: "--use-torch-fsdp2", "train.py:12"."""

    kind: HintKind
    where: str


class JobCommand(Value, frozen=True, kw_only=True):
    """What the words of a command tell. `options` are those of the job itself, by name with hyphens; a flag's value is
    ''.

    `num_nodes` and `num_processes_per_node` are None if the command does not give them. `clears_environment`: it does so
    after `counterpoint run`. `container` is the program that starts one, `mounts` are the words of its mounts.
    """

    programs: tuple[str, ...] = ()
    script: str = ""
    num_nodes: int | None = None
    num_processes_per_node: int | None = None
    options: dict[str, str] = msgspec.field(default_factory=dict)
    clears_environment: bool = False
    container: str = ""
    mounts: tuple[str, ...] = ()
    hints: tuple[Hint, ...] = ()

    def number(self, option: str, usual: int = 1) -> int:
        """Return an option's value as a count; the usual one if it is absent or not a number."""
        number = whole_number(self.options.get(option, ""))
        return usual if number is None else number


class FoundGpu(Value, frozen=True, kw_only=True):
    """A GPU that the job would see. `compute_capability` is as in "9.0"; empty on AMD, where no rule needs it."""

    name: str
    compute_capability: str = ""
    num_sms: int | None = None
    has_multicast: bool | None = None


class PreloadedLibrary(Value, frozen=True, kw_only=True):
    """A library in LD_PRELOAD. `entry_points` are the driver functions whose names it contains; `is_ours`:
    Counterpoint's filter.
    """

    path: str
    is_found: bool
    is_ours: bool = False
    entry_points: tuple[str, ...] = ()


class JobContext(Value, frozen=True, kw_only=True):
    """Everything that rules may read. `origins` says where a variable was set, if not in the shell's environment.

    `cuda_version` is the version that the driver supports. `blocked_peers` are pairs of GPUs without peer access; None
    if unknown. `filter_folder` is where the launch filter is stored, `filter_file_system` its file system if hosts share
    it, and `filter_problem` why the filter cannot be loaded into the job's program.
    """

    vendor: Literal["nvidia", "amd", "unknown"] = "unknown"
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    origins: dict[str, str] = msgspec.field(default_factory=dict)
    gpus: tuple[FoundGpu, ...] = ()
    blocked_peers: tuple[tuple[int, int], ...] | None = None
    driver_version: str = ""
    cuda_version: str = ""
    torch_version: str = ""
    torch_cuda_version: str = ""
    torch_hip_version: str = ""
    nccl_version: str = ""
    preloaded: tuple[PreloadedLibrary, ...] = ()
    filter_folder: str = ""
    filter_file_system: str = ""
    filter_problem: str = ""
    job: JobCommand | None = None
    unknown: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        pairs = [list(pair) for pair in self.blocked_peers or ()]
        require(
            not pairs or bool(self.gpus),
            JobContextError,
            f"blocked_peers names GPUs by their number in gpus, but gpus is empty; found {pairs}. Add a "
            "[[gpus]] for each, or leave blocked_peers out.",
        )
        require(
            all(0 <= number < len(self.gpus) for pair in pairs for number in pair),
            JobContextError,
            f"blocked_peers must name GPUs from 0 to {len(self.gpus) - 1}; found {pairs}. Correct it.",
        )

    def value(self, name: str) -> str:
        """Return a variable's value without blanks around it; '' if it is not set."""
        return self.environment.get(name, "").strip()

    def found(self, name: str) -> str:
        """Return a variable's value and its origin, for people."""
        origin = self.origins.get(name)
        return f"{self.value(name)} (in {origin})" if origin else self.value(name)

    def first(self, is_set: Callable[[str], bool], *names: str) -> str | None:
        """Return the first of these variables whose value `is_set` accepts."""
        return next((name for name in names if is_set(self.value(name))), None)

    def hint(self, *kinds: HintKind) -> Hint | None:
        """Return the first hint of one of these kinds."""
        hints = self.job.hints if self.job else ()
        return next((hint for kind in kinds for hint in hints if hint.kind == kind), None)

    def architecture(self) -> Version | None:
        """Return the greatest compute capability among the GPUs; None if unknown or not NVIDIA."""
        return max((version for gpu in self.gpus if (version := parse_version(gpu.compute_capability))), default=None)

    def is_older_than(self, version: str, *least: int) -> bool:
        """Return whether a known version is below `least`; False if it is unknown."""
        known = parse_version(version)
        return known is not None and known < least

    def is_at_least(self, version: str, *least: int) -> bool:
        """Return whether a known version is `least` or above; False if it is unknown."""
        known = parse_version(version)
        return known is not None and known >= least


def parse_version(text: str) -> Version | None:
    """Return the leading numbers of a version: "2.13.0+cu130" is (2, 13, 0); None without one."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in found[0].split(".")) if found else None


def whole_number(text: str) -> int | None:
    """Return a count written in digits, or None; counts have at most nine digits here."""
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else None


def is_on(value: str) -> bool:
    """Return whether torch reads a switch's value as true."""
    return value.lower() in ("1", "y", "yes", "t", "true")


def is_nonzero(value: str) -> bool:
    """Return whether CUDA, HIP and NCCL read a switch's value as set."""
    return value.lower() not in ("", "0", "false", "no", "off")


def load_context(path: Path | str) -> JobContext:
    """Read context that `counterpoint check -o` wrote on another machine. Raises `JobContextError`.

    What an edited file leaves out, and does not list as unknown, becomes unknown here.
    """
    read = read_toml(path, JobContext, JobContextError)
    unknown = [line for line in _left_out(read) if not any(said.startswith(line.split(":")[0]) for said in read.unknown)]
    return msgspec.structs.replace(read, unknown=(*read.unknown, *unknown))


def _left_out(read: JobContext) -> list[str]:
    """Return what rules need and a file does not give, each with what to add."""
    versions = {"torch_version": read.torch_version, "nccl_version": read.nccl_version}
    absent = [name for name, number in versions.items() if not number]
    fields = "name" if read.vendor == "amd" else "name and compute_capability"
    gpus = (
        f"GPUs: the file gives none, so rules that depend on them cannot be checked; add a [[gpus]] with {fields} for each"
    )
    missing = f"versions: the file gives no {' and no '.join(absent)}; add what the job has"
    return [line for line, is_left_out in ((gpus, not read.gpus), (missing, bool(absent))) if is_left_out]


class Finding(Value, frozen=True, kw_only=True):
    """One setting, the fact behind it, the fact's source, and what to do.

    `setting` is a variable, a flag or a piece of the machine; `found` its value and, if not the shell, its origin.
    """

    severity: Severity
    setting: str
    found: str
    fact: str
    source: str
    remedy: str
