"""Settings with which kernels cannot run concurrently, and libraries between a job and the driver."""

from counterpoint.doctor.job_context import Finding, JobContext, is_nonzero

BLOCKING = ("CUDA_LAUNCH_BLOCKING", "HIP_LAUNCH_BLOCKING", "AMD_SERIALIZE_KERNEL")
# programs that run one kernel at a time while they measure
SERIALIZING = {
    "ncu": "Nsight Compute, Kernel Profiling Guide: kernel launches are serialized",
    "rocprof-compute": "ROCm Compute Profiler documentation, profile mode: dispatches are serialized across streams",
}


def blocking_launches(context: JobContext) -> Finding | None:
    """Every launch waits for its kernel."""
    name = context.first(is_nonzero, *BLOCKING)
    if name is None:
        return None
    return Finding(
        severity="defeats overlap",
        setting=name,
        found=context.found(name),
        fact="The host waits for each kernel before it issues the next one, so two kernels never run at the same time.",
        source="CUDA Programming Guide and HIP documentation, environment variables (for debugging only)",
        remedy=f"Unset {name}.",
    )


def serializing_profiler(context: JobContext) -> Finding | None:
    """A profiler that measures one kernel at a time."""
    programs = context.job.programs if context.job else ()
    name = next((name for name in programs if name in SERIALIZING), None)
    if name is None:
        return None
    return Finding(
        severity="defeats overlap",
        setting="command",
        found=name,
        fact="This profiler runs kernels one after the other to measure each alone, so collectives and kernels do "
        "not overlap.",
        source=SERIALIZING[name],
        remedy="Profile overlap with torch.profiler or nsys instead.",
    )


def uncached_memory(context: JobContext) -> Finding | None:
    """Every tensor is allocated and freed by the driver."""
    name = context.first(is_nonzero, "PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING")
    if name is None:
        return None
    return Finding(
        severity="defeats overlap",
        setting=name,
        found=context.found(name),
        fact="The driver frees each tensor, and first waits for the whole GPU, including collectives in flight.",
        source="PyTorch documentation, CUDA environment variables; CUDA Runtime API, cudaFree: implicit synchronization",
        remedy=f"Unset {name}.",
    )


def preloaded_interceptor(context: JobContext) -> Finding | None:
    """Another library that intercepts the driver's launches."""
    for library in context.preloaded:
        if library.entry_points and not library.is_ours:
            return Finding(
                severity="may defeat overlap",
                setting="LD_PRELOAD",
                found=library.path,
                fact=f"The library contains the names {', '.join(library.entry_points)}: it may delay launches, or "
                "hide them from other filters.",
                source="the names are in the file; the loader finds a preloaded library's definitions before the "
                "driver's: ld.so(8)",
                remedy="Run once without it and compare. With `counterpoint run`, check in the proof at the end that "
                "launches are seen.",
            )
    return None


def preloaded_but_missing(context: JobContext) -> Finding | None:
    """A preloaded library that does not exist."""
    missing = next((library.path for library in context.preloaded if not library.is_found), None)
    if missing is None:
        return None
    return Finding(
        severity="note",
        setting="LD_PRELOAD",
        found=missing,
        fact="The file cannot be read here. The loader skips it with one line on standard error, and the job runs "
        "without it.",
        source="ld.so(8)",
        remedy="Correct the path, or leave it out.",
    )
