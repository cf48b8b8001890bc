"""The number of hardware queues that streams share: CUDA_DEVICE_MAX_CONNECTIONS by architecture and parallelism; HIP's
queues.

With one queue, kernels start in the order in which the host issued them. That is right if a collective is issued just
before a kernel that would take every SM (Megatron's tensor parallelism), and wrong if streams should run independently
(FSDP). On Blackwell, Megatron no longer needs it.
"""

from counterpoint.doctor.job_context import SHARDED, Finding, JobContext, whole_number

NAME = "CUDA_DEVICE_MAX_CONNECTIONS"
MOST_QUEUES = 32
BLACKWELL = (10,)
ARGUMENTS = "Megatron-LM, megatron/training/arguments.py, validate_args"
HEAD_START = "A head start in a plan does the same for single kernels: see docs/planner.md."


def _has_one_queue(context: JobContext) -> bool:
    return context.value(NAME) == "1" and context.vendor != "amd"


def _is_blackwell(context: JobContext) -> bool:
    return (context.architecture() or (0,)) >= BLACKWELL


def one_queue_for_sharded_data_parallel(context: JobContext) -> Finding | None:
    """FSDP with one queue."""
    hint = context.hint(*SHARDED)
    if hint is None or not _has_one_queue(context):
        return None
    both = context.hint("megatron_tensor_parallel") and not _is_blackwell(context)
    advice = "Tensor or context parallelism in the same job needs 1 before Blackwell: measure both. " if both else ""
    return Finding(
        severity="defeats overlap",
        setting=NAME,
        found=f"{context.found(NAME)}, with {hint.where}",
        fact="With one queue, FSDP's prefetched all-gathers and its reduce-scatters wait behind the computation.",
        source=f"{ARGUMENTS}; Megatron-FSDP documentation; verl-project/verl pull request 6976; pytorch/torchtitan issue "
        "1147",
        remedy=f"{advice}Unset it, or set it to 16 or 32.",
    )


def several_queues_for_megatron(context: JobContext) -> Finding | None:
    """Megatron-LM's tensor or context parallelism without the single queue that it requires before Blackwell."""
    hint = context.hint("megatron_tensor_parallel")
    is_exempt = context.hint(*SHARDED, "expert_overlap") is not None or context.vendor == "amd"
    if hint is None or is_exempt or context.value(NAME) == "1" or _is_blackwell(context):
        return None
    is_known = context.architecture() is not None
    return Finding(
        severity="defeats overlap" if is_known else "may defeat overlap",
        setting=NAME,
        found=f"{context.found(NAME) or 'not set'}, with {hint.where}",
        fact="Before Blackwell, Megatron-LM stops unless this is 1: a GEMM that starts before an earlier-issued "
        "collective would take every SM.",
        source=f"{ARGUMENTS}; NVIDIA/Megatron-LM issue 5105",
        remedy=f"Set {NAME}=1{'' if is_known else ' if the GPUs are Hopper or older'}. {HEAD_START}",
    )


def one_queue_for_expert_overlap(context: JobContext) -> Finding | None:
    """Megatron-LM's overlapped all-to-all of experts with one queue."""
    hint = context.hint("expert_overlap")
    if hint is None or not _has_one_queue(context):
        return None
    return Finding(
        severity="may defeat overlap",
        setting=NAME,
        found=f"{context.found(NAME)}, with {hint.where}",
        fact="Overlapping expert-parallel all-to-alls needs more than one queue.",
        source=f"{ARGUMENTS}; NVIDIA/Megatron-LM pull request 2730",
        remedy=f"Set {NAME}=32; with tensor or context parallelism on Hopper and older, measure 1 and 32.",
    )


def one_queue_on_blackwell(context: JobContext) -> Finding | None:
    """One queue on an architecture that no longer needs it."""
    if not _has_one_queue(context) or not _is_blackwell(context) or context.hint(*SHARDED, "expert_overlap"):
        return None
    return Finding(
        severity="may defeat overlap",
        setting=NAME,
        found=f"{context.found(NAME)}, on {context.gpus[0].name}",
        fact="Since Blackwell, Megatron-LM no longer needs one queue; it only makes independent streams wait for "
        "each other.",
        source=f"{ARGUMENTS}; NVIDIA/Megatron-LM issue 5105",
        remedy="Unset it.",
    )


def one_queue_for_unknown_job(context: JobContext) -> Finding | None:
    """One queue in a job that is not known to need it."""
    is_judged = context.hint(*SHARDED, "expert_overlap", "megatron_tensor_parallel") is not None
    if not _has_one_queue(context) or is_judged or _is_blackwell(context):
        return None
    return Finding(
        severity="may defeat overlap",
        setting=NAME,
        found=context.found(NAME),
        fact="One queue runs all streams in the order of the host's launches: right for Megatron-LM's tensor "
        "parallelism, wrong for FSDP.",
        source="NVIDIA/Megatron-LM issue 533; verl-project/verl pull request 6976; pytorch/torchtitan issue 1147",
        remedy=f"Unset it unless Megatron-LM asks for it. {HEAD_START}",
    )


def queues_out_of_range(context: JobContext) -> Finding | None:
    """A number of queues that the driver rejects."""
    value = context.value(NAME)
    if not value or 1 <= (whole_number(value) or 0) <= MOST_QUEUES:
        return None
    return Finding(
        severity="note",
        setting=NAME,
        found=context.found(NAME),
        fact=f"The variable must be a number from 1 to {MOST_QUEUES}; the default is 8.",
        source="CUDA Programming Guide, CUDA environment variables",
        remedy=f"Unset it, or give a number from 1 to {MOST_QUEUES}.",
    )


def one_hip_queue(context: JobContext) -> Finding | None:
    """All of HIP's streams in one hardware queue."""
    name = "GPU_MAX_HW_QUEUES"
    if context.vendor == "nvidia" or context.value(name) != "1":
        return None
    return Finding(
        severity="may defeat overlap",
        setting=name,
        found=context.found(name),
        fact="All streams of one priority share a single hardware queue, so kernels of different streams run one after "
        "the other.",
        source="ROCm documentation, HIP environment variables (the default is 4); not tried here on AMD hardware",
        remedy="Unset it, or set it to 2 as AMD's guide for MI300X training does.",
    )
