"""What a job would run in, as values: settings, GPUs, versions and the command; and what a rule finds there.

Rules read a `JobContext` and nothing else. What could not be looked at is None or empty, with the reason under `unknown`;
rules must not take it for "off" or "absent". Only the severity "defeats overlap" makes `counterpoint check` exit with 1: the
setting keeps communication and computation apart, or stops the job. "may defeat overlap" depends on the job, or costs the
control its effect. A "note" only explains.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from counterpoint.errors import JobContextError
from counterpoint.value import Value, read_toml, require

HintKind = Literal[
    "cuda_graph",
    "data_parallel",
    "expert_overlap",
    "fsdp1",
    "fsdp2",
    "high_priority",
    "megatron",
    "megatron_fsdp",
    "megatron_tensor_parallel",
    "sm_carveout",
    "symmetric_memory",
    "zero_cta",
]
Severity = Literal["defeats overlap", "may defeat overlap", "note"]
SEVERITIES: tuple[Severity, ...] = ("defeats overlap", "may defeat overlap", "note")
SHARDED: tuple[HintKind, ...] = ("fsdp1", "fsdp2", "megatron_fsdp")
Version = tuple[int, ...]


class Hint(Value, frozen=True, kw_only=True):
    """Something the command or its script shows of the job, and where: "--use-torch-fsdp2", "train.py:12"."""

    kind: HintKind
    where: str


class JobCommand(Value, frozen=True, kw_only=True):
    """What the words of a command say. `options` are those of the job itself, by name with hyphens; a flag's value is ''.

    `num_nodes` and `num_processes_per_node` are None where the command does not say. `clears_environment`: behind
    `counterpoint run` it does. `container` is what starts one, `mounts` the words of its mounts.
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

    def number(self, option: str, default: int = 1) -> int:
        """An option's value as a count; `default` where it is absent or not a number."""
        number = whole_number(self.options.get(option, ""))
        return default if number is None else number


class FoundGpu(Value, frozen=True, kw_only=True):
    """A GPU that the job would see. `compute_capability` is as in "9.0"; empty on AMD, where no rule needs it."""

    name: str
    compute_capability: str = ""
    num_sms: int | None = None
    has_multicast: bool | None = None


class PreloadedLibrary(Value, frozen=True, kw_only=True):
    """A library that LD_PRELOAD names. `entry_points` are the driver's that it holds the names of; `is_ours`: our filter."""

    path: str
    is_found: bool
    is_ours: bool = False
    entry_points: tuple[str, ...] = ()


class JobContext(Value, frozen=True, kw_only=True):
    """All that the rules know. `origins` says for a variable where it was set, if not in the shell's environment.

    `cuda_version` is what the driver supports. `blocked_peers` are pairs of GPUs without peer access; None where unknown.
    `filter_folder` is where the launch filter is kept, `filter_file_system` what that lies on if hosts share it, and
    `filter_problem` why the filter cannot be loaded into the job's program.
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
            f"blocked_peers names GPUs by their number among gpus, and there are none; found {pairs}. Add a [[gpus]] for "
            "each, or leave blocked_peers out.",
        )
        require(
            all(0 <= number < len(self.gpus) for pair in pairs for number in pair),
            JobContextError,
            f"blocked_peers must name GPUs from 0 to {len(self.gpus) - 1}; found {pairs}. Correct it.",
        )

    def value(self, name: str) -> str:
        """A variable's value without blanks around it; '' where it is not set."""
        return self.environment.get(name, "").strip()

    def found(self, name: str) -> str:
        """A variable's value and its origin, for people."""
        origin = self.origins.get(name)
        return f"{self.value(name)} (in {origin})" if origin else self.value(name)

    def first(self, is_set: Callable[[str], bool], *names: str) -> str | None:
        """The first of these variables whose value `is_set` accepts."""
        return next((name for name in names if is_set(self.value(name))), None)

    def hint(self, *kinds: HintKind) -> Hint | None:
        """The first hint of one of these kinds."""
        hints = self.job.hints if self.job else ()
        return next((hint for kind in kinds for hint in hints if hint.kind == kind), None)

    def architecture(self) -> Version | None:
        """The greatest compute capability among the GPUs, or None where it is unknown or they are not NVIDIA's."""
        return max((version for gpu in self.gpus if (version := parse_version(gpu.compute_capability))), default=None)

    def is_older_than(self, version: str, *least: int) -> bool:
        """Whether a known version is below `least`; false where it is unknown."""
        known = parse_version(version)
        return known is not None and known < least

    def is_at_least(self, version: str, *least: int) -> bool:
        """Whether a known version is `least` or above; false where it is unknown."""
        known = parse_version(version)
        return known is not None and known >= least


def parse_version(text: str) -> Version | None:
    """The leading numbers of a version: "2.13.0+cu130" is (2, 13, 0); None without one."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in found[0].split(".")) if found else None


def whole_number(text: str) -> int | None:
    """A count written in digits, or None; nothing here counts beyond nine of them."""
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else None


def is_on(value: str) -> bool:
    """Whether torch takes the value of a switch for true."""
    return value.lower() in ("1", "y", "yes", "t", "true")


def is_nonzero(value: str) -> bool:
    """Whether CUDA, HIP and NCCL take the value of a switch for set."""
    return value.lower() not in ("", "0", "false", "no", "off")


def load_context(path: Path) -> JobContext:
    """Read context that `counterpoint check -o` wrote on another machine. Raises `JobContextError`.

    What a file that was edited leaves out, and does not call unknown, becomes unknown here.
    """
    read = read_toml(path, JobContext, JobContextError)
    unknown = [line for line in _left_out(read) if not any(said.startswith(line.split(":")[0]) for said in read.unknown)]
    return msgspec.structs.replace(read, unknown=(*read.unknown, *unknown))


def _left_out(read: JobContext) -> list[str]:
    """What rules need and a file does not give, each with what to add."""
    versions = {"torch_version": read.torch_version, "nccl_version": read.nccl_version}
    absent = [name for name, number in versions.items() if not number]
    fields = "name" if read.vendor == "amd" else "name and compute_capability"
    gpus = f"GPUs: the file gives none, so no rule that depends on them can speak; add a [[gpus]] with {fields} for each"
    missing = f"versions: the file gives no {' and no '.join(absent)}; add what the job has"
    return [line for line, is_left_out in ((gpus, not read.gpus), (missing, bool(absent))) if is_left_out]


class Finding(Value, frozen=True, kw_only=True):
    """One setting, the fact behind it, where that fact is from, and what to do.

    `setting` is a variable, a flag or a piece of the machine; `found` its value and, if not the shell, its origin.
    """

    severity: Severity
    setting: str
    found: str
    fact: str
    source: str
    remedy: str
