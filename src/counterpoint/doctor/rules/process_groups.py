"""Variables of torch's process groups that make the host wait, or that no longer have an effect."""

from counterpoint.doctor.job_context import Finding, JobContext, is_on


def blocking_wait(context: JobContext) -> Finding | None:
    """The host waits for collectives."""
    name = context.first(is_on, "TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
    if name is None:
        return None
    return Finding(
        severity="may defeat overlap",
        setting=name,
        found=context.found(name),
        fact="wait() then blocks the host until the collective has ended, instead of a stream, so nothing further "
        "is issued meanwhile.",
        source="PyTorch documentation, ProcessGroupNCCL environment variables; ray-project/ray issue 29419",
        remedy=f"Unset {name}; hangs are detected without it: TORCH_NCCL_ASYNC_ERROR_HANDLING is on by default.",
    )


def timed_collectives(context: JobContext) -> Finding | None:
    """Timed events around collectives, in one queue."""
    name = context.first(is_on, "TORCH_NCCL_ENABLE_TIMING", "NCCL_ENABLE_TIMING")
    queues = "CUDA_DEVICE_MAX_CONNECTIONS"
    if name is None or context.value(queues) != "1" or context.vendor == "amd":
        return None
    return Finding(
        severity="defeats overlap",
        setting=name,
        found=f"{context.found(name)}, with {queues}={context.found(queues)}",
        fact="The events that time each collective keep it from overlapping with kernels when all streams share one queue.",
        source="pytorch/pytorch issue 143890; NVIDIA/TransformerEngine issue 1353",
        remedy=f"Unset {name}, or allow more queues than one.",
    )


def checked_collectives(context: JobContext) -> Finding | None:
    """A barrier of all hosts before every collective."""
    name = "TORCH_DISTRIBUTED_DEBUG"
    if context.value(name).upper() != "DETAIL":
        return None
    return Finding(
        severity="may defeat overlap",
        setting=name,
        found=context.found(name),
        fact="Before each collective, the hosts of all ranks synchronize (Gloo) and compare their calls; the host "
        "no longer runs ahead of the GPU.",
        source="PyTorch documentation, torch.distributed, debugging; pytorch/pytorch pull request 124447",
        remedy=f"Set {name}=INFO, or unset it.",
    )


def record_streams(context: JobContext) -> Finding | None:
    """A switch without effect since torch 2.8."""
    name = "TORCH_NCCL_AVOID_RECORD_STREAMS"
    if not context.value(name) or not context.is_at_least(context.torch_version, 2, 8):
        return None
    return Finding(
        severity="note",
        setting=name,
        found=f"{context.found(name)}, torch {context.torch_version}",
        fact="It has had no effect since torch 2.8: streams are no longer recorded.",
        source="pytorch/pytorch pull requests 150398 and 194701",
        remedy="Leave it out.",
    )
