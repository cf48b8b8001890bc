"""Megatron-LM's and DeepSpeed's options: overlap that is off by default, a combination that is rejected, and more traffic
than needed.
"""

from counterpoint.doctor.job_context import SHARDED, Finding, JobContext
from counterpoint.units import format_count

USUAL_TOP = 2  # experts of a token, unless the command says otherwise
BY_ALL_GATHER = "allgather"
SPLITS = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size")


def megatron_without_data_parallel_overlap(context: JobContext) -> Finding | None:
    """Gradients reduced, or parameters gathered, without any overlap."""
    hint, job = context.hint("megatron"), context.job
    if hint is None or job is None or context.hint(*SHARDED) or _num_replicas(context) == 1:
        return None
    wanted = ["--overlap-grad-reduce", *(["--overlap-param-gather"] if "--use-distributed-optimizer" in job.options else [])]
    missing = [option for option in wanted if option not in job.options]
    if not missing:
        return None
    what = {
        "--overlap-grad-reduce": "gradients are reduced after the backward pass",
        "--overlap-param-gather": "parameters are gathered before the next step",
    }
    return Finding(
        severity="may defeat overlap",
        setting=" ".join(missing),
        found=f"not given, with {hint.where}",
        fact="Megatron-LM overlaps data-parallel communication only on request. Without it, "
        f"{' and '.join(what[option] for option in missing)}, fully exposed.",
        source="Megatron-LM, megatron/training/arguments.py; Megatron Bridge documentation, communication overlap",
        remedy=f"Add {' '.join(missing)}.",
    )


def _num_replicas(context: JobContext) -> int | None:
    """Return the number of data-parallel replicas, if the command gives the number of processes."""
    job = context.job
    if job is None or job.num_nodes is None or job.num_processes_per_node is None:
        return None
    ranks = job.num_nodes * job.num_processes_per_node
    for option in SPLITS:
        ranks //= max(1, job.number(option))
    return max(1, ranks)


def megatron_tp_overlap_without_sequence_parallel(context: JobContext) -> Finding | None:
    """Tensor-parallel overlap that Megatron-LM rejects."""
    job = context.job
    if job is None or "--tp-comm-overlap" not in job.options:
        return None
    is_split = job.number("--tensor-model-parallel-size") > 1
    if is_split and "--sequence-parallel" in job.options:
        return None
    return Finding(
        severity="defeats overlap",
        setting="--tp-comm-overlap",
        found="given without --sequence-parallel" if is_split else "given without --tensor-model-parallel-size above 1",
        fact="Megatron-LM overlaps tensor-parallel communication with GEMMs only under sequence parallelism, which "
        "needs tensor parallelism; otherwise it stops.",
        source="Megatron-LM, megatron/training/arguments.py, validate_args",
        remedy="Add --sequence-parallel." if is_split else "Leave it out, or set --tensor-model-parallel-size.",
    )


def megatron_experts_by_all_gather(context: JobContext) -> Finding | None:
    """Every token on every rank, where few of these have an expert for it."""
    job, option = context.job, "--moe-token-dispatcher-type"
    if job is None:
        return None
    ranks, top = job.number("--expert-model-parallel-size"), job.number("--moe-router-topk", USUAL_TOP)
    if ranks <= top or "--num-experts" not in job.options or job.options.get(option, BY_ALL_GATHER) != BY_ALL_GATHER:
        return None
    return Finding(
        severity="may defeat overlap",
        setting=option,
        found=BY_ALL_GATHER if option in job.options else f"not given, which is {BY_ALL_GATHER}",
        fact=f"Each rank then receives the tokens of all {ranks} expert-parallel ranks, {ranks - 1} times as many as its "
        f"own, and nothing hides that. With alltoall and {format_count(top, 'expert')} for each token it receives about "
        f"{top * (ranks - 1) / ranks:.2g} times as many, and expert_parallel.overlap hides them.",
        source="Megatron-LM, megatron/core/transformer/moe/token_dispatcher.py; NeMo RL 2004",
        remedy=f"Set {option} alltoall.",
    )


def zero_without_overlap(context: JobContext) -> Finding | None:
    """Gradients reduced by DeepSpeed while the computation waits."""
    hint = context.hint("zero_without_overlap")
    if hint is None:
        return None
    return Finding(
        severity="may defeat overlap",
        setting="overlap_comm",
        found=f"not true, with ZeRO {hint.where}",
        fact="In stages 1 and 2 DeepSpeed overlaps the reduction of gradients with the backward pass only on request. "
        "Without it, the computation waits for each bucket.",
        source="DeepSpeed 0.19, runtime/zero/config.py, stage_1_and_2.py",
        remedy='Set "overlap_comm": true under "zero_optimization".',
    )
