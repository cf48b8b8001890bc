"""Settings that keep `counterpoint run`'s launch filter out of a job's processes, and NCCL plugin slots that are taken."""

from counterpoint.doctor.command import OTHER_HOSTS
from counterpoint.doctor.job_context import Finding, JobContext

LOADER = "ld.so(8), LD_PRELOAD"
PLUGINS = {
    "NCCL_PROFILER_PLUGIN": (
        "NCCL loads one profiler plugin per process, so another one, such as NCCL Inspector, cannot be added. "
        "`counterpoint analyze` reads what Inspector writes."
    ),
    "NCCL_TUNER_PLUGIN": (
        "NCCL loads one tuner plugin per process, so a file of `counterpoint plan export --nccl-tuner` must "
        "replace this one. With any tuner, NCCL also skips its policy EFFICIENCY."
    ),
}
FREE = ("", "none")  # "none" tells NCCL to load no plugin


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
        fact="Files of this host do not exist in the container unless they are mounted, and a daemon may start it "
        "with another environment. If the dynamic linker does not find a library, it skips it, and the job "
        "runs without it.",
        source=LOADER,
        remedy="Put `counterpoint run` inside the container, before the job's command: `counterpoint env --for container`.",
    )


def hosts_behind_run(context: JobContext) -> Finding | None:
    """A multi-host launcher after `counterpoint run`, which then runs on one host only."""
    job = context.job
    name = next((name for name in job.programs if name in OTHER_HOSTS), "") if job else ""
    if job is None or not name or job.num_nodes == 1 or not _is_behind_run(context, name):
        return None
    return Finding(
        severity="may defeat overlap",
        setting="command",
        found=f"{name}, after counterpoint run",
        fact="The folder that `counterpoint run` and the job's processes share, and the filter's library, are on "
        "this host only; ranks on other hosts have no filter.",
        source="docs/launchers.md",
        remedy=f"Put `counterpoint run` after {name}, before the job's command: `counterpoint env --for "
        f"{'slurm' if name == 'srun' else 'mpi'}`.",
    )


def cleared_environment(context: JobContext) -> Finding | None:
    """`env -i` between `counterpoint run` and the job."""
    if context.job is None or not context.job.clears_environment:
        return None
    return Finding(
        severity="may defeat overlap",
        setting="command",
        found="env -i, after counterpoint run",
        fact="It clears LD_PRELOAD, which loads the filter, and the variable with the filter's folder, so the job "
        "runs without both.",
        source=f"env(1); {LOADER}",
        remedy="Put `counterpoint run` after env -i: env -i NAME=VALUE counterpoint run ... -- COMMAND.",
    )


def filter_not_loadable(context: JobContext) -> Finding | None:
    """A program into which the dynamic linker would not load the filter: another C library, a static or set-user
    program.
    """
    if not context.filter_problem:
        return None
    return Finding(
        severity="may defeat overlap",
        setting="launch filter",
        found="it cannot be loaded into the job's program",
        fact=context.filter_problem,
        source=LOADER,
        remedy="To apply a plan, start the job with a dynamically linked program of the GNU C library (2.17 or later).",
    )


def filter_on_shared_files(context: JobContext) -> Finding | None:
    """A cache folder on a file system that several hosts share."""
    if not context.filter_file_system:
        return None
    return Finding(
        severity="note",
        setting="COUNTERPOINT_CACHE_DIR",
        found=f"{context.filter_folder} on {context.filter_file_system}",
        fact="Hosts share this file system. A library mapped from there loads slowly for thousands of ranks, and "
        "replacing it kills them. `counterpoint run` therefore copies it to a folder on each host, named by "
        "its digest.",
        source="mmap(2), SIGBUS; /proc/self/mountinfo",
        remedy="Nothing, if TMPDIR is a folder on the host; otherwise set it to one.",
    )


def occupied_plugin_slot(context: JobContext) -> Finding | None:
    """A profiler or tuner plugin that is already set, as managed platforms do."""
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
