"""What keeps the launch filter of `counterpoint run` from a job's processes, and NCCL's slots that another library holds."""

from counterpoint.doctor.command import OTHER_HOSTS
from counterpoint.doctor.job_context import Finding, JobContext

LOADER = "ld.so(8), LD_PRELOAD"
PLUGINS = {
    "NCCL_PROFILER_PLUGIN": "NCCL loads one profiler plugin into a process, so another one, such as NCCL Inspector, cannot "
    "be added to it. `counterpoint analyze` reads what Inspector writes.",
    "NCCL_TUNER_PLUGIN": "NCCL loads one tuner plugin into a process, so a file of `counterpoint plan export --nccl-tuner` "
    "needs this one replaced. With any tuner NCCL also skips its policy EFFICIENCY.",
}
FREE = ("", "none")  # none: NCCL is to load no plugin


def container_behind_run(context: JobContext) -> Finding | None:
    """`counterpoint run`, or its preloaded library, outside of a container."""
    job = context.job
    if job is None or not job.container:
        return None
    is_outside = _is_behind_run(context, job.container.split()[0])
    ours = next((library.path for library in context.preloaded if library.is_ours), "")
    if not is_outside and not ours:
        return None
    is_mounted = ours and any(mount.split(":")[0] in ours for mount in job.mounts if mount)
    if is_mounted and not is_outside:
        return None
    return Finding(
        severity="may defeat overlap",
        setting="command",
        found=f"{job.container}, behind {'counterpoint run' if is_outside else 'LD_PRELOAD=' + ours}",
        fact="Files of this host do not exist in the container unless they are mounted, and a daemon may start it with "
        "another environment. The dynamic linker leaves a library out that it does not find; the job runs without it.",
        source=LOADER,
        remedy="Put `counterpoint run` into the container, before the job's command: `counterpoint env --for container`.",
    )


def hosts_behind_run(context: JobContext) -> Finding | None:
    """A launcher of several hosts behind `counterpoint run`, which then stands on one of them."""
    job = context.job
    name = next((name for name in job.programs if name in OTHER_HOSTS), "") if job else ""
    if job is None or not name or job.num_nodes == 1 or not _is_behind_run(context, name):
        return None
    return Finding(
        severity="may defeat overlap",
        setting="command",
        found=f"{name}, behind counterpoint run",
        fact="The folder in which processes meet `counterpoint run`, and its library, are on this host alone; ranks of "
        "other hosts have no filter.",
        source="docs/launchers.md",
        remedy=f"Put `counterpoint run` behind {name}, before the job's command: `counterpoint env --for "
        f"{'slurm' if name == 'srun' else 'mpi'}`.",
    )


def cleared_environment(context: JobContext) -> Finding | None:
    """`env -i` between `counterpoint run` and the job."""
    if context.job is None or not context.job.clears_environment:
        return None
    return Finding(
        severity="may defeat overlap",
        setting="command",
        found="env -i, behind counterpoint run",
        fact="It clears LD_PRELOAD, through which the filter is loaded, and the variable of its folder, so the job runs "
        "without them.",
        source=f"env(1); {LOADER}",
        remedy="Put `counterpoint run` behind env -i: env -i NAME=VALUE counterpoint run ... -- COMMAND.",
    )


def filter_not_loadable(context: JobContext) -> Finding | None:
    """A program that the dynamic linker would not load the filter into: another C library, a static or set-user program."""
    if not context.filter_problem:
        return None
    return Finding(
        severity="may defeat overlap",
        setting="launch filter",
        found="it cannot be loaded into the job's program",
        fact=context.filter_problem,
        source=LOADER,
        remedy="Start the job by a dynamic program of the GNU C library (2.17 or later) where a plan is to be applied.",
    )


def filter_on_shared_files(context: JobContext) -> Finding | None:
    """The cache folder on a file system of several hosts."""
    if not context.filter_file_system:
        return None
    return Finding(
        severity="note",
        setting="COUNTERPOINT_CACHE_DIR",
        found=f"{context.filter_folder} on {context.filter_file_system}",
        fact="Hosts share this file system. A library that is mapped from there loads slowly for thousands of ranks, and "
        "one that is replaced ends them, so `counterpoint run` copies it to a folder of each host, by its digest.",
        source="mmap(2), SIGBUS; /proc/self/mountinfo",
        remedy="Nothing, if TMPDIR is a folder of the host; otherwise set it to one.",
    )


def occupied_plugin_slot(context: JobContext) -> Finding | None:
    """A profiler or tuner plugin that somebody has set, as managed platforms do."""
    name = context.first(lambda value: value.lower() not in FREE, *PLUGINS)
    if name is None:
        return None
    return Finding(
        severity="note",
        setting=name,
        found=context.found(name),
        fact=PLUGINS[name],
        source=f"NCCL documentation, environment variables, {name}; NCCL 2.28.9, src/enqueue.cc",
        remedy=f"Leave it, unless you need the slot; then unset {name} in the job's own environment.",
    )


def _is_behind_run(context: JobContext, program: str) -> bool:
    """Whether a program comes after `counterpoint` in the command."""
    programs = context.job.programs if context.job else ()
    return program in programs and "counterpoint" in programs[: programs.index(program)]
