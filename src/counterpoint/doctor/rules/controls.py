"""Controls that are requested but cannot take effect: priority, zero-CTA collectives, symmetric memory, an SM carveout."""

from counterpoint.doctor.job_context import Finding, JobContext, is_on

PRIORITY = "TORCH_NCCL_HIGH_PRIORITY"
POLICY = "NCCL_CTA_POLICY"
HIP_PRIORITY = "DEBUG_HIP_IGNORE_STREAM_PRIORITY"
MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


def _asked_priority(context: JobContext) -> str:
    """Return where a high priority for collectives is requested, or ''."""
    if is_on(context.value(PRIORITY)):
        return f"{PRIORITY}={context.found(PRIORITY)}"
    hint = context.hint("high_priority")
    return hint.where if hint else ""


def priority_of_waited_collectives(context: JobContext) -> Finding | None:
    """Priority for collectives that run on the current stream since torch 2.8."""
    asked = _asked_priority(context)
    if not asked or not context.is_at_least(context.torch_version, 2, 8):
        return None
    fsdp2 = context.hint("fsdp2")
    of_fsdp2 = (
        " FSDP2's collectives are called this way: they run on its own streams, which torch makes with priority -1."
        if fsdp2
        else ""
    )
    return Finding(
        severity="note",
        setting="priority of collectives",
        found=f"{asked}, torch {context.torch_version}{f', {fsdp2.where}' if fsdp2 else ''}",
        fact="A collective called with async_op=False runs on the current stream, where the process group's priority "
        f"does not reach it.{of_fsdp2}",
        source="pytorch/pytorch pull request 150398 (torch 2.8); torch/distributed/fsdp/_fully_shard, torch 2.13",
        remedy="Leave it out for FSDP2. Elsewhere it works for collectives called with async_op=True, as DDP's are."
        if fsdp2
        else "Call with async_op=True and wait later, or give the launches a priority in a plan: `counterpoint tune`.",
    )


def priority_in_graphs(context: JobContext) -> Finding | None:
    """Priority of collectives captured in a graph that is instantiated without node priorities."""
    asked, graph = _asked_priority(context), context.hint("cuda_graph")
    is_old = context.is_older_than(context.torch_version, 2, 10)
    if not asked or graph is None or not (is_old or context.vendor == "amd"):
        return None
    reason = (
        "HIP has never applied priorities of graph nodes"
        if context.vendor == "amd"
        else "torch instantiates graphs with node priorities only since 2.10"
    )
    return Finding(
        severity="may defeat overlap",
        setting="priority in captured graphs",
        found=f"{asked}, {graph.where}, torch {context.torch_version or 'of unknown version'}",
        fact=f"{reason}, so the priority is lost in replays.",
        source="ROCm/rocm-systems pull request 11278" if context.vendor == "amd" else "pytorch/pytorch pull request 167346",
        remedy="Leave the priority out."
        if context.vendor == "amd"
        else "Use torch 2.10 or later, or let `counterpoint.apply` instantiate the graph with priorities.",
    )


def priority_ignored_by_hip(context: JobContext) -> Finding | None:
    """Priority on AMD, where HIP ignores it by default."""
    asked = _asked_priority(context)
    value = context.value(HIP_PRIORITY).lower()
    if context.vendor != "amd" or not asked or value in ("0", "false"):
        return None
    return Finding(
        severity="may defeat overlap",
        setting=HIP_PRIORITY,
        found=f"{context.found(HIP_PRIORITY) or 'not set'}, with {asked}",
        fact="HIP ignores stream priorities unless this is 0. That is the default since July 2026; older releases "
        "apply them.",
        source="ROCm/rocm-systems pull request 8485; not tried here on AMD hardware",
        remedy=f"Set {HIP_PRIORITY}=0, measure, and keep it only if it pays: AMD turned priorities off because they "
        "slowed RCCL.",
    )


def _zero_cta(context: JobContext) -> str:
    words = {word.strip().upper() for word in context.value(POLICY).split("|")}
    if words & {"ZERO", "2"}:
        return f"{POLICY}={context.found(POLICY)}"
    hint = context.hint("zero_cta")
    return hint.where if hint else ""


def zero_cta_of_reductions(context: JobContext) -> Finding | None:
    """Collectives without SMs; only all-gather and all-to-all can be."""
    asked = _zero_cta(context)
    if not asked or context.vendor == "amd":
        return None
    is_missing = context.is_older_than(context.nccl_version, 2, 28)
    fact = (
        "This NCCL has no collectives without SMs; they came with 2.28."
        if is_missing
        else "Only all-gather and all-to-all on buffers in symmetric windows run without SMs. Reduce-scatter, "
        "all-reduce and ordinary buffers use SM kernels, without any message."
    )
    return Finding(
        severity="may defeat overlap",
        setting="zero-CTA collectives",
        found=f"{asked}, NCCL {context.nccl_version or 'of unknown version'}",
        fact=fact,
        source="NCCL documentation, communicator CTA policy flags; NCCL 2.28.9, src/ce_coll.cc",
        remedy="Do not rely on it for DDP's or FSDP's gradients. Register all-gather buffers in symmetric windows, "
        "and check in a trace.",
    )


def zero_cta_not_understood(context: JobContext) -> Finding | None:
    """A policy given by name to an NCCL that reads only numbers."""
    value = context.value(POLICY)
    if not value or value.isdigit() or not context.is_older_than(context.nccl_version, 2, 29):
        return None
    return Finding(
        severity="may defeat overlap",
        setting=POLICY,
        found=f"{context.found(POLICY)}, NCCL {context.nccl_version}",
        fact="NCCL accepts names such as ZERO and EFFICIENCY since 2.29; before, the variable must be a number.",
        source="NCCL documentation, environment variables, NCCL_CTA_POLICY",
        remedy=f"Write {POLICY}=1 for EFFICIENCY or {POLICY}=2 for ZERO.",
    )


def symmetric_memory_without_peer_access(context: JobContext) -> Finding | None:
    """Symmetric memory between GPUs that cannot access each other's memory."""
    hint = context.hint("symmetric_memory")
    if hint is None or not context.blocked_peers:
        return None
    one, other = context.blocked_peers[0]
    return Finding(
        severity="defeats overlap",
        setting="symmetric memory",
        found=f"{hint.where}; no peer access from GPU {one} to GPU {other}",
        fact="Peers read and write symmetric memory directly; these GPUs cannot.",
        source="asked of the driver (cuDeviceCanAccessPeer); PyTorch documentation, symmetric memory",
        remedy="Run on GPUs joined by NVLink or on one PCIe switch, or leave symmetric memory out.",
    )


def symmetric_memory_without_multicast(context: JobContext) -> Finding | None:
    """Multicast switched off on GPUs that have it."""
    has_multicast = any(gpu.has_multicast for gpu in context.gpus)
    if not is_on(context.value(MULTICAST)) or not has_multicast:
        return None
    return Finding(
        severity="note",
        setting=MULTICAST,
        found=context.found(MULTICAST),
        fact="torch's symmetric memory then does not use the NVSwitch's multicast, which these GPUs have, so its "
        "multimem reductions are not available.",
        source="PyTorch, torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryUtils.cpp; multicast asked of the "
        "driver here",
        remedy="Unset it, unless rendezvous fails on this machine without it.",
    )


def sm_carveout(context: JobContext) -> Finding | None:
    """torch's experimental SM carveout, which matrix products ignore."""
    hint = context.hint("sm_carveout")
    if hint is None:
        return None
    return Finding(
        severity="may defeat overlap",
        setting="torch._C._set_sm_carveout_experimental",
        found=hint.where,
        fact="It changed nothing for torch.mm in bf16: with 8 to 32 SMs set aside, cuBLAS still launched a CTA on each "
        "of 132 SMs.",
        source="measured: H200, torch 2.11, CUDA 13.0",
        remedy="Leave it out. A head start or a priority in a plan places collectives first: `counterpoint tune`.",
    )
