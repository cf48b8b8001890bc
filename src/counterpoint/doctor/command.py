"""Parses a command without running it: the variables it sets, how it is launched, what its options tell about
parallelism.

It knows `env` and NAME=VALUE words, srun, mpirun, profilers and other wrappers, torchrun (also as `python -m
torch.distributed.run`) and the launchers of accelerate, DeepSpeed, Lightning, torchtune, Composer and ColossalAI. Of another
program it reads the first argument that ends in .py. It also knows the options of the job by the names that Megatron-LM,
torchtitan, accelerate, transformers and Lightning use. Of configuration files it reads DeepSpeed's, but no shell scripts,
and no modules that the script imports. What it finds and does not read, it names.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from counterpoint.doctor.deepspeed_config import read_deepspeed
from counterpoint.doctor.job_context import Hint, HintKind, JobCommand, whole_number
from counterpoint.doctor.script import read_script, strategy_sign
from counterpoint.errors import JobContextError
from counterpoint.value import Value

ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
PYTHON = re.compile(r"python(\d+(\.\d+)*)?$")
# each with the word after it that starts a script, if there is one
LAUNCHERS = {
    "torchrun": "", "deepspeed": "", "composer": "", "accelerate-launch": "", "accelerate": "launch", "fabric": "run",
    "lightning": "run", "tune": "run", "colossalai": "run",
}  # fmt: skip
ACCELERATE = ("accelerate", "accelerate-launch")
WITH_TORCHRUN_OPTIONS = ("torchrun", "tune")  # torchtune/_cli/run.py: tune run [TORCHRUN-OPTIONS] <recipe>
ON_ONE_NODE = ("torchrun", "tune", "fabric", "lightning")  # unless an option says otherwise
CONTAINERS = ("docker", "podman", "nerdctl", "apptainer", "singularity", "enroot")
# programs that start processes on other hosts; mpirun only if it is given hosts
OTHER_HOSTS = ("srun", "mpirun", "mpiexec", "orterun", "prun", "jsrun", "aprun", "pdsh", "clush")
MOUNTS = ("-v", "--volume", "--mount", "-B", "--bind", "--container-mounts")
WRAPPERS = (
    *CONTAINERS, *OTHER_HOSTS, "nsys", "ncu", "rocprof-compute", "rocprofv3", "compute-sanitizer", "numactl", "taskset",
    "nice", "nohup", "setsid", "time", "timeout", "stdbuf", "counterpoint",
)  # fmt: skip
SHELLS = ("sh", "bash", "zsh", "dash")
# torchrun's options that take no value; every other one takes the next word (torch/distributed/run.py, torch 2.13)
TORCHRUN_FLAGS = ("--standalone", "--no-python", "--run-path", "--use-env", "-m", "--module", "--help", "-h")
PYTHON_VALUES = ("-W", "-X", "--check-hash-based-pycs")
TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
NODE_OPTIONS = ("--nnodes", "--nodes", "-N", "--num-machines", "--num-nodes")
PROCESS_OPTIONS = ("--nproc-per-node", "--ntasks-per-node", "--num-gpus")
MEGATRON_OPTIONS = (
    "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size",
    "--use-distributed-optimizer", "--overlap-grad-reduce", "--tp-comm-overlap", "--use-megatron-fsdp",
    "--expert-model-parallel-size",
)  # fmt: skip
CONFIGURATIONS = (".yaml", ".yml", ".toml")
STRATEGY_OPTIONS = ("--strategy", "--trainer.strategy")  # fabric run, LightningCLI
DEEPSPEED_OPTIONS = ("--deepspeed", "--deepspeed-config", "--deepspeed-config-file")  # of jobs, and of accelerate
# an option of a job, and what its presence tells
FLAG_SIGNS: dict[str, HintKind] = {
    "--use-torch-fsdp2": "fsdp2",
    "--use-megatron-fsdp": "megatron_fsdp",
    "--use-custom-fsdp": "megatron_fsdp",
    "--use-fsdp": "fsdp",
    "--fsdp": "fsdp",
    "--use-deepspeed": "deepspeed",
    "--deepspeed": "deepspeed",
    "--overlap-moe-expert-parallel-comm": "expert_overlap",
    "--tp-comm-overlap": "symmetric_memory",
    "--parallelism.enable-async-tensor-parallel": "symmetric_memory",
    "--high-priority-stream-groups": "high_priority",
    "--enable-cuda-graph": "cuda_graph",
    "--external-cuda-graph": "cuda_graph",
}
# an option with a number of ranks, and what more than one tells
SIZE_SIGNS: dict[str, HintKind] = {
    "--tensor-model-parallel-size": "megatron_tensor_parallel",
    "--context-parallel-size": "megatron_tensor_parallel",
    "--parallelism-config-dp-shard-size": "fsdp",
    "--parallelism-config-tp-size": "tensor_parallel",
    "--parallelism-config-cp-size": "context_parallel",
}


class ReadCommand(Value, frozen=True, kw_only=True):
    """A command's job, the variables it runs with, and what could not be read.

    `first_word` is the first program as written, after assignments and `env`; `first_path` is the PATH in which it is
    searched, None if there is none. `program_path` is the program that starts the job's Python, behind wrappers too.
    """

    job: JobCommand
    environment: dict[str, str]
    first_word: str
    first_path: str | None = None
    program_path: str = ""
    unknown: tuple[str, ...] = ()


def read_command(words: Sequence[str], environment: Mapping[str, str]) -> ReadCommand:
    """Read a command that would start with these variables. Raises `JobContextError` if it names no program."""
    reader = _Reader(words, environment)
    reader.read_wrappers()
    reader.read_program()
    if not reader.first_word:
        raise JobContextError(f"'{' '.join(words)}' names no program. Give the command that starts the job after --.")
    return reader.result()


class _Reader:
    """Reads the words once; `_rest` holds the words not read yet."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        self.programs: list[str] = []
        self.first_word = ""
        self._first_path: str | None = None
        self._rest = list(words)
        self._environment = dict(environment)
        self._launch_options: dict[str, str] = {}
        self._unknown: list[str] = []
        self._program_path = ""
        self._script = ""
        self._is_module = False
        self._clears_environment = False
        self._mounts: list[str] = []

    def result(self) -> ReadCommand:
        """Return what was read, with the hints from the options and the script."""
        options = read_options(self._rest)
        hints = self._script_hints() if self._script else ()
        is_on_one_node = "srun" not in self.programs and any(name in self.programs for name in ON_ONE_NODE)
        job = JobCommand(
            programs=tuple(self.programs),
            script=self._script,
            num_nodes=self._count(NODE_OPTIONS, 1 if is_on_one_node else None),
            num_processes_per_node=self._count(PROCESS_OPTIONS, None),
            options=options,
            clears_environment=self._clears_environment,
            container=self._container(),
            mounts=tuple(self._mounts),
            hints=(
                *_option_hints(options | self._launch_options),
                *self._deepspeed_hints(options),
                *hints,
            ),
        )
        return ReadCommand(
            job=job,
            environment=self._environment,
            first_word=self.first_word,
            first_path=self._first_path,
            program_path=self._program_path,
            unknown=tuple(self._unknown),
        )

    def _script_hints(self) -> tuple[Hint, ...]:
        """Return what the script tells, and note what of it was not read."""
        found = read_script(_path_of_module(self._script) if self._is_module else self._script)
        if isinstance(found, str):
            what = "module" if self._is_module else "script"
            self._unknown.append(f"the {what} {self._script} was not read: {found}")
            return ()
        if found.imported:
            self._unknown.append(
                f"what {_name(self._script)} imports: only the script itself was read, not {', '.join(found.imported)}"
            )
        return found.hints

    def _deepspeed_hints(self, options: dict[str, str]) -> tuple[Hint, ...]:
        """Return what DeepSpeed's configuration tells, if the command names its file."""
        named = {
            name: value for name, value in (self._launch_options | options).items() if name in DEEPSPEED_OPTIONS and value
        }
        found: list[Hint] = []
        for option, path in named.items():
            try:
                found += read_deepspeed(path)
            except JobContextError as problem:
                self._unknown.append(f"the file of {option} was not read: {problem}")
        return tuple(found)

    def read_wrappers(self) -> None:
        """Read assignments, `env` and wrappers, up to the program that starts the job."""
        while self._rest:
            word = self._rest[0]
            if ASSIGNMENT.match(word):
                self._assign(self._rest.pop(0))
            elif _name(word) == "env":
                self._rest.pop(0)
                self._read_env()
            elif _name(word) in WRAPPERS:
                self._take_program()
                self._read_wrapper()
            else:
                return

    def _container(self) -> str:
        """Return what starts a container for the job: a program, or Slurm's option (pyxis); empty if nothing does."""
        found = next((name for name in self.programs if name in CONTAINERS), "")
        return found or ("srun --container-image" if "--container-image" in self._launch_options else "")

    def _take_program(self) -> str:
        """Read the next word, which names a program. Variables set by a wrapper come after the wrapper itself was found."""
        word = self._rest.pop(0)
        if not self.programs:
            self.first_word, self._first_path = word, self._environment.get("PATH")
        self.programs.append(_name(word))
        return word

    def _assign(self, word: str) -> None:
        name, _, value = word.partition("=")
        self._environment[name] = value

    def _read_env(self) -> None:
        while self._rest and self._rest[0].startswith("-"):
            option = self._rest.pop(0)
            if option in ("-", "-i", "--ignore-environment"):
                self._environment.clear()
                self._clears_environment = self._clears_environment or "counterpoint" in self.programs
            elif option in ("-u", "--unset") and self._rest:
                self._environment.pop(self._rest.pop(0), None)
            elif option.startswith("--unset="):
                self._environment.pop(option.partition("=")[2], None)
            elif option == "--":
                return
            else:
                raise JobContextError(
                    f"env's option '{option}' is not supported; the supported ones are -i and -u NAME. Write "
                    "the command without it."
                )

    def _read_wrapper(self) -> None:
        """Skip a wrapper's own words up to the next known program; keep the variables they set."""
        while self._rest and not _is_known(self._rest):
            word = self._rest.pop(0)
            following = self._rest[0] if self._rest else ""
            if word in ("-x", "--export") and "=" in following:
                self._assign_all(self._rest.pop(0))
            elif word.startswith("--export="):
                self._assign_all(word.partition("=")[2])
            elif word.startswith("-"):
                self._keep_launch_option(word, following)
            name, has_value, value = word.partition("=")
            if name in MOUNTS:
                self._mounts.append(value if has_value else following)
        if not self._rest:
            self._unknown.append(f"what {self.programs[-1]} starts: its words name no python and no launcher known here")

    def _assign_all(self, list_of_assignments: str) -> None:
        for word in list_of_assignments.split(","):
            if ASSIGNMENT.match(word):
                self._assign(word)

    def _keep_launch_option(self, word: str, following: str) -> None:
        name, has_value, value = word.partition("=")
        self._launch_options[_hyphens(name)] = value if has_value else "" if following.startswith("-") else following

    def read_program(self) -> None:
        """Read the program, its own options, and the script; the job's options remain."""
        if not self._rest:
            return
        is_launcher = _is_launcher(self._rest)
        self._name_configurations()
        word = self._take_program()
        name = _name(word)
        self._program_path = word if PYTHON.match(name) or is_launcher else ""
        if is_launcher and LAUNCHERS[name]:
            self._rest.pop(0)
        if name in SHELLS:
            self._unknown.append(f"what {name} runs: shell scripts are not read. Give the command inside it")
            self._rest = []
        elif PYTHON.match(name):
            self._read_python()
        elif is_launcher and name in WITH_TORCHRUN_OPTIONS:
            self._read_torchrun()
        elif is_launcher:
            self._read_other_launcher()
        elif _is_script(name):
            self._script = word
        else:
            self._read_unknown_program()

    def _name_configurations(self) -> None:
        """List the files of settings that the job's words name; DeepSpeed's are JSON, and are read."""
        files = [word.rpartition("=")[2] for word in self._rest if word.endswith(CONFIGURATIONS)]
        self._unknown += [
            f"the file {file} was not read: of configurations, only DeepSpeed's are" for file in dict.fromkeys(files)
        ]

    def _read_python(self) -> None:
        while self._rest and self._rest[0].startswith("-"):
            option = self._rest.pop(0)
            if option == "-c":
                self._unknown.append("the code that python -c runs")
                self._rest = self._rest[1:]
                return
            if option == "-m" and self._rest:
                self._script, self._is_module = self._rest.pop(0), True
                break
            if option in PYTHON_VALUES and self._rest:
                self._rest.pop(0)
        if self._script in TORCHRUN_MODULES:
            self._script, self._is_module = "", False
            self.programs[-1] = "torchrun"
            self._read_torchrun()
        elif self._rest and not self._script:
            self._script = self._rest.pop(0)

    def _read_torchrun(self) -> None:
        while self._rest and self._rest[0].startswith("-"):
            option = self._rest.pop(0)
            hyphens = _hyphens(option)
            self._is_module = self._is_module or hyphens in ("-m", "--module")
            if "=" in option or hyphens in TORCHRUN_FLAGS:
                self._keep_launch_option(option, "-")
            elif self._rest:
                self._keep_launch_option(option, self._rest.pop(0))
        if "--no-python" in self._launch_options:
            self._unknown.append("the program that torchrun --no-python starts")
            self._rest = self._rest[1:]
        elif self._rest:
            self._script = self._rest.pop(0)

    def _read_other_launcher(self, module_options: Sequence[str] = ("-m", "--module")) -> None:
        """Read a launcher with options of its own: every word before the first script or module belongs to it."""
        while self._rest and not _is_script(self._rest[0]) and not self._is_module:
            word = self._rest.pop(0)
            following = self._rest[0] if self._rest else "-"
            if word.startswith("-"):
                self._keep_launch_option(word, following)
            self._is_module = word in module_options and not following.startswith("-")
        if self._rest:
            self._script = self._rest.pop(0)
        else:
            self._unknown.append(f"what {self.programs[-1]} starts: none of its words ends in .py")
        if self.programs[-1] in ACCELERATE and "--config-file" not in self._launch_options:
            self._unknown.append("what `accelerate config` saved, if anything: the command names no such file")

    def _read_unknown_program(self) -> None:
        """Name the program, and take its first argument that ends in .py for its script."""
        name, script = self.programs[-1], next((word for word in self._rest if _is_script(word)), "")
        taken = f", so {script} was taken for its script" if script else ", so what it starts was not read"
        self._unknown.append(f"how {name} starts a job is not known here{taken}")
        if script:
            self._read_other_launcher(module_options=())

    def _count(self, options: Sequence[str], default: int | None) -> int | None:
        """Return the last number of the first option given: "1:4" nodes means up to 4."""
        for option in options:
            last = self._launch_options.get(option, "").rpartition(":")[2]
            if (number := whole_number(last)) is not None:
                return number
        return default


def read_options(words: Sequence[str]) -> dict[str, str]:
    """Return a job's options by name, with hyphens for underscores; the value of a flag is ''."""
    options = {}
    for place, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, has_value, value = word.partition("=")
        following = words[place + 1] if place + 1 < len(words) else "-"
        options[_hyphens(name)] = value if has_value else "" if following.startswith("-") else following
    return options


def _option_hints(options: Mapping[str, str]) -> list[Hint]:
    hints = [
        Hint(kind=kind, where=option)
        for option, kind in FLAG_SIGNS.items()
        if options.get(option, "false").lower() != "false"
    ]
    hints += [Hint(kind="megatron", where=option) for option in MEGATRON_OPTIONS if option in options][:1]
    for option, kind in SIZE_SIGNS.items():
        if (whole_number(options.get(option, "")) or 1) > 1:
            hints.append(Hint(kind=kind, where=f"{option} {options[option]}"))
    for option in STRATEGY_OPTIONS:
        strategy = strategy_sign(options.get(option, ""))
        if strategy is not None:
            hints.append(Hint(kind=strategy, where=f"{option} {options[option]}"))
    if options.get("--cuda-graph-impl", "none") != "none":
        hints.append(Hint(kind="cuda_graph", where=f"--cuda-graph-impl {options['--cuda-graph-impl']}"))
    return hints


def _is_known(words: Sequence[str]) -> bool:
    """Return whether the first of these words is a program whose own words can be read."""
    name = _name(words[0])
    is_program = name in (*WRAPPERS, *SHELLS, "env") or bool(PYTHON.match(name)) or _is_script(words[0])
    return is_program or _is_launcher(words)


def _is_launcher(words: Sequence[str]) -> bool:
    """Return whether the first of these words is a launcher that is told to start a script."""
    subcommand = LAUNCHERS.get(_name(words[0]))
    return subcommand is not None and subcommand in ("", *words[1:2])


def _is_script(word: str) -> bool:
    return word.endswith(".py") and not word.startswith("-")


def _path_of_module(name: str) -> str:
    """Return the file that `python -m` runs for a module of the current folder; there may be none."""
    path = Path(*name.split("."))
    return str(path / "__main__.py" if path.is_dir() else path.with_suffix(".py"))


def _name(word: str) -> str:
    return word.rsplit("/", maxsplit=1)[-1]


def _hyphens(option: str) -> str:
    return option.replace("_", "-")
