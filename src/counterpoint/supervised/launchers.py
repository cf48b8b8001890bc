"""How common launchers start a job under `counterpoint run`: what to write, and what cannot work.

One rule holds for all of them: `counterpoint run` belongs inside, directly in front of the job's processes, on each node
and in each container. There it creates its folder, keeps the filter's library on that host, and passes signals and the
exit status on. Outside of a launcher that starts processes on other hosts or in containers, its folder and library would
not be where the ranks are. Each launcher's text names the sources of its options.
"""

import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Literal, get_args

import msgspec

from counterpoint.doctor.command import OTHER_HOSTS, read_command, read_options
from counterpoint.errors import LaunchFilterError, package_version
from counterpoint.files import read_limited
from counterpoint.supervised.settings import DIRECTORY_VARIABLE
from counterpoint.traces.formats import SUFFIXES

Launcher = Literal["slurm", "kubernetes", "ray", "mpi", "container"]
LAUNCHERS: tuple[Launcher, ...] = get_args(Launcher)
JOB = ("torchrun", "--nnodes", "4", "--nproc-per-node", "8", "train.py")
# the example job, as Slurm's variables complete it
SLURM_TORCHRUN = (
    'torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node 8 --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" \\\n'
    '  --rdzv-endpoint "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):29500" train.py'
)
# programs whose containers do not get this process's environment; Apptainer's do, with the user's home folder
CLOSED_CONTAINERS = ("docker", "podman", "nerdctl", "enroot", "kubectl")
MPI_HOSTS = ("-H", "--H", "-host", "--host", "-hosts", "-hostfile", "--hostfile", "-machinefile", "--machinefile", "-f")
MPI = ("mpirun", "mpiexec", "orterun", "prun")
DEEPSPEED_HOSTS = "/job/hostfile"  # unless an option names another file
INSIDE = "Put `counterpoint run` after it, before the job's own command; `counterpoint env --for {}` prints the lines."
BY_DEEPSPEED = "Run `counterpoint run ... -- deepspeed --no_ssh --node_rank N --master_addr HOST ...` on each of them."
MOUNT = "/counterpoint"  # the folder of the plan in a container
SAVED_IN_CLAIM = "persistentVolumeClaim: {claimName: CLAIM}"


class LaunchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The job's command, the plan to apply (None to tune), and the Python that has Counterpoint.

    `step` is what the plan was made from, if the job needs it: the absolute path of a file, or a workload's name.
    """

    command: tuple[str, ...] = JOB
    plan: Path | None = None
    step: str | None = None
    python: str = sys.executable

    def mounted(self) -> dict[str, str]:
        """Return the files that `counterpoint run` reads, each with its path in a container."""
        files = {str(self.plan): f"{MOUNT}/plan.toml"} if self.plan is not None else {}
        if self.step is not None and os.path.isabs(self.step):
            suffix = next((each for each in (*SUFFIXES, ".toml") if self.step.lower().endswith(each)), "")
            files[self.step] = f"{MOUNT}/step{suffix}"
        return files

    def supervised(self, python: str | None = None, *, is_mounted: bool = False) -> tuple[str, ...]:
        """Return `counterpoint run` with the plan and the command, for this interpreter or another, on the host or in a
        container.
        """
        places = self.mounted() if is_mounted else {}
        given = [(name, str(value)) for name, value in (("--plan", self.plan), ("--step", self.step)) if value is not None]
        options = [word for name, value in given for word in (name, places.get(value, value))]
        if not options:
            options = ["--tune", "-o", f"{MOUNT}/plan.toml" if is_mounted else "plan.toml"]  # the position of the job
        return (python or self.python, "-m", "counterpoint", "run", *options, "--", *self.command)

    def ranks(self) -> tuple[str, str]:
        """Return how many ranks the command states for each node and in all, or placeholders for what it does not state."""
        job = read_command(self.command, {}).job
        per_node = job.num_processes_per_node
        total = per_node * job.num_nodes if per_node and job.num_nodes else None
        return str(per_node or "RANKS_PER_NODE"), str(total or "RANKS")


def describe_launch(launcher: Launcher, request: LaunchRequest) -> str:
    """Return the lines to paste, with comments, for one launcher."""
    texts: dict[Launcher, Callable[[LaunchRequest], str]] = {
        "slurm": _slurm,
        "kubernetes": _kubernetes,
        "ray": _ray,
        "mpi": _mpi,
        "container": _container,
    }
    return texts[launcher](request)


def check_outer_launcher(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Raise `LaunchFilterError` if the command itself starts the ranks on other hosts or in a container."""
    name = os.path.basename(command[0]) if command else ""
    if name in CLOSED_CONTAINERS:
        where, remedy = "in a container", INSIDE.format("kubernetes" if name == "kubectl" else "container")
    elif name in OTHER_HOSTS and not _stays_here(name, command, environment):
        where, remedy = "on other hosts", INSIDE.format("slurm" if name == "srun" else "mpi")
    elif name == "deepspeed" and _leaves_this_host(command):
        where, remedy = "on other hosts", BY_DEEPSPEED
    else:
        return
    raise LaunchFilterError(
        f"'{name}' starts processes {where}, where the folder and the library of this run do not exist. {remedy}"
    )


def _stays_here(name: str, command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether mpirun starts everything on this host: it names no hosts, and there is no allocation of several
    nodes.
    """
    if name not in MPI:
        return False
    has_hosts = any(word.partition("=")[0] in MPI_HOSTS for word in command[1:])
    nodes = environment.get("SLURM_JOB_NUM_NODES", environment.get("SLURM_NNODES", "1"))
    return not has_hosts and nodes == "1" and "PBS_NODEFILE" not in environment and "LSB_DJOB_HOSTFILE" not in environment


def _leaves_this_host(command: Sequence[str]) -> bool:
    """Return whether deepspeed starts ranks on hosts that a file names, over ssh (DeepSpeed 0.19, launcher/runner.py)."""
    options = read_options(list(takewhile(lambda word: not word.endswith(".py"), command)))
    if "--no-ssh" in options or options.get("--num-nodes") == "1":
        return False
    try:
        text = bytes(read_limited(options.get("--hostfile", DEEPSPEED_HOSTS), LaunchFilterError, "name a file of hosts"))
    except LaunchFilterError:
        return False  # deepspeed then starts ranks on this host
    hosts = [line for line in text.splitlines() if line.strip() and not line.strip().startswith(b"#")]
    return len(hosts) > 1


def _in_image() -> str:
    return f"python -m pip install /tmp/counterpoint-{package_version()}-*.whl"


def _image() -> str:
    return f"""\
# The image needs Counterpoint's wheel, which `make wheel` builds. It holds the filter, so the image needs no compiler:
#   COPY dist/counterpoint-{package_version()}-*.whl /tmp/
#   RUN {_in_image()}
"""


def _slurm(request: LaunchRequest) -> str:
    prefix = shlex.join(request.supervised()[: -len(request.command)])
    job = SLURM_TORCHRUN if request.command == JOB else shlex.join(request.command)
    per_node, _ = request.ranks()
    return f"""\
# In the batch script. One task per node; srun passes the environment on (sbatch(1), --export). Every node must see
# {request.python} and the plan{" with its trace" if request.step else ""}; the filter is copied to each node by itself.
#SBATCH --ntasks-per-node=1
srun --export=ALL {prefix} \\
  {job}

# Without torchrun, one task per rank. Ranks are then read from SLURM_PROCID:
#SBATCH --ntasks-per-node={per_node}
srun --export=ALL {prefix} {_python_job(request.command)}

# In a container (pyxis). The image needs Counterpoint's wheel, which `make wheel` builds: {_in_image()}
srun --export=ALL --container-image=IMAGE --container-mounts="$PWD:$PWD" --container-workdir="$PWD" \\
  {shlex.join(request.supervised(python="python")[: -len(request.command)])} {job}"""


def _mpi(request: LaunchRequest) -> str:
    inside = f"{shlex.join(request.supervised()[: -len(request.command)])} {_python_job(request.command)}"
    _, total = request.ranks()
    return f"""\
# One `counterpoint run` for each rank, behind mpirun's own words. Ranks are read from what the launcher sets
# (OMPI_COMM_WORLD_RANK, PMIX_RANK, PMI_RANK). For torch the job still sets MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE.

# Open MPI (mpirun(1): -x passes a variable on; LD_PRELOAD needs none, each `counterpoint run` sets it on its host):
mpirun -np {total} --hostfile HOSTS -x PATH -x PYTHONPATH -x COUNTERPOINT_CACHE_DIR \\
  {inside}

# MPICH, Intel MPI (mpiexec.hydra: -genvlist):
mpiexec -n {total} -f HOSTS -genvlist PATH,PYTHONPATH,COUNTERPOINT_CACHE_DIR \\
  {inside}"""


def _ray(request: LaunchRequest) -> str:
    words = shlex.join([*request.supervised()[: -len(request.command)], request.python])
    return f"""\
# Ray's own daemons start the workers, so neither this shell's LD_PRELOAD nor a wrapper around the driver reaches them.
# `py_executable` of a runtime environment is what a worker is started by (Ray documentation, runtime_env: py_executable).
# {request.python} must be on every node, with Ray and the job's packages.
import ray

ray.init(runtime_env={{"py_executable": {words!r}}})

# Ray Train, for its workers alone:
from ray.train import RunConfig

run_config = RunConfig(worker_runtime_env={{"py_executable": {words!r}}})"""


def _kubernetes(request: LaunchRequest) -> str:
    command = request.supervised(python="python", is_mounted=True)
    listed = "\n".join(f"            - {_yaml(word)}" for word in command)
    files = request.mounted()
    access, source = (", readOnly: true", "configMap: {name: counterpoint-plan}") if files else ("", SAVED_IN_CLAIM)
    volume = f"""
          volumeMounts:
            - {{name: counterpoint-plan, mountPath: {MOUNT}{access}}}
      volumes:
        - name: counterpoint-plan
          {source}"""
    sources = "".join(f" --from-file={os.path.basename(there)}={shlex.quote(here)}" for here, there in files.items())
    create = f"# kubectl create configmap counterpoint-plan{sources}\n"
    if not files:
        create = "# The plan is saved in the volume of CLAIM, to which the pods must be allowed to write.\n"
    if len(files) > 1:
        create += f"# A ConfigMap holds 1 MiB. With a larger trace, mount another volume at {MOUNT}.\n"
    return f"""\
{_image()}{create}\
# Then a patch of the pod template, for a Job, a JobSet's or a PyTorchJob's replicas alike (name: the container's own name).
# No library is mounted and no variable is set: `counterpoint run` does both in the container.
spec:
  template:
    spec:
      containers:
        - name: pytorch
          command:
{listed}{volume}"""


def _container(request: LaunchRequest) -> str:
    inside = shlex.join(request.supervised(python="python", is_mounted=True))
    mounts = [f"{shlex.quote(here)}:{there}:ro" for here, there in request.mounted().items()] or [f'"$PWD":{MOUNT}']
    mount = "".join(f" \\\n  -v {each}" for each in mounts)
    bind = "".join(f" --bind {each}" for each in mounts)
    return f"""\
{_image()}# Docker, Podman (--ipc=host or --shm-size: NCCL and this run need more than 64 MiB of /dev/shm):
docker run --gpus all --ipc=host{mount} IMAGE \\
  {inside}

# Apptainer, Singularity:
apptainer exec --nv{bind} IMAGE.sif \\
  {inside}

# An image that cannot be changed, and a plan of launches alone:
#   counterpoint env --for container --plan FILE --folder FOLDER"""


def describe_folder(folder: Path, library: Path, settings: Mapping[str, str]) -> str:
    """Return the variables and mounts of a folder that `fill_folder` filled, for containers whose image lacks
    Counterpoint; `settings` are variables that the plan asks for.
    """
    place = shlex.quote(str(folder))
    variables = {"LD_PRELOAD": str(folder / library.name), DIRECTORY_VARIABLE: str(folder), **settings}
    docker = " ".join(f"-e {name}={shlex.quote(value)}" for name, value in variables.items())
    apptainer = ",".join(f"{name}={value}" for name, value in variables.items())
    lines = "\n".join(f"  - {{name: {name}, value: {_yaml(value)}}}" for name, value in variables.items())
    return f"""\
# {folder} holds the filter and the plan's rules, for one node: fill one on each. Nobody guards this
# plan, and ranks do not report to each other. If the job has an LD_PRELOAD of its own, append it behind a colon.
docker run --gpus all -v {place}:{place} --user "$(id -u)" {docker} IMAGE {shlex.join(JOB)}
apptainer exec --nv --bind {place} --env {apptainer} IMAGE.sif {shlex.join(JOB)}

# Kubernetes: an init container that fills an emptyDir at {folder}, mounted by the job's container, which gets
env:
{lines}

# When the job has ended, what took effect:
counterpoint env --proof {place}"""


def _python_job(command: Sequence[str]) -> str:
    """Return the job's script run by Python, for a launcher that replaces torchrun."""
    script = next((place for place, word in enumerate(command) if word.endswith(".py")), None)
    return shlex.join(("python", *command[script:])) if script is not None else shlex.join(command)


def _yaml(word: str) -> str:
    """Write a word as a YAML string; a JSON string is valid YAML."""
    return json.dumps(word, ensure_ascii=False)
