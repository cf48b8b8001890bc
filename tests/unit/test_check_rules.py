"""Rules of `counterpoint check`: each fires where it should and is silent where it should be; none fails on odd values."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.doctor.command import FLAG_SIGNS, SIZE_SIGNS, read_command
from counterpoint.doctor.job_context import (
    SEVERITIES,
    Finding,
    FoundGpu,
    Hint,
    HintKind,
    JobCommand,
    JobContext,
    PreloadedLibrary,
)
from counterpoint.doctor.rules import RULES, controls, find, frameworks, launchers, launches, nccl, process_groups, queues
from counterpoint.doctor.script import NAME_SIGNS

H200 = FoundGpu(name="NVIDIA H200", compute_capability="9.0", num_sms=132, has_multicast=True)
B200 = FoundGpu(name="NVIDIA B200", compute_capability="10.0", num_sms=148, has_multicast=True)
H200_PCIE = FoundGpu(name="NVIDIA H200 NVL", compute_capability="9.0", num_sms=132, has_multicast=False)
MI300X = FoundGpu(name="AMD Instinct MI300X")
DEFEATS, MAY, NOTE = SEVERITIES


def hints(*kinds: HintKind) -> JobCommand:
    return JobCommand(
        programs=("torchrun",), script="train.py", hints=tuple(Hint(kind=kind, where=f"of {kind}") for kind in kinds)
    )


def megatron(words: str) -> JobCommand:
    return read_command(["torchrun", *words.split()], {}).job


def on(*gpus: FoundGpu, job: JobCommand | None = None, **more: Any) -> JobContext:
    """JobContext with GPUs; names in capitals are variables."""
    variables = {name: value for name, value in more.items() if name.isupper()}
    fields = {name: value for name, value in more.items() if not name.isupper()}
    vendor = "amd" if MI300X in gpus else "nvidia" if gpus else "unknown"
    return JobContext(**({"vendor": vendor} | fields), gpus=gpus, environment=variables, job=job)


TWO = (H200, H200)
EXPERTS = "a.py --num-experts 64 --expert-model-parallel-size 8"
FSDP2, TP = hints("fsdp2"), hints("megatron_tensor_parallel")
PRELOADED = PreloadedLibrary(path="/opt/libvgpu.so", is_found=True, entry_points=("cuLaunchKernel",))
OURS = PreloadedLibrary(path="/cache/filter.so", is_found=True, is_ours=True, entry_points=("cuLaunchKernel",))
HARMLESS = PreloadedLibrary(path="/usr/lib/libjemalloc.so", is_found=True)

Rule = Callable[[JobContext], Finding | None]


def command(words: str) -> JobCommand:
    return read_command(words.split(), {}).job


RUN = "counterpoint run --plan p.toml --"
FIRES: list[tuple[Rule, JobContext, str]] = [
    (launches.blocking_launches, on(CUDA_LAUNCH_BLOCKING="1"), DEFEATS),
    (launches.blocking_launches, on(MI300X, AMD_SERIALIZE_KERNEL="3"), DEFEATS),
    (launches.serializing_profiler, on(job=JobCommand(programs=("ncu", "python"))), DEFEATS),
    (launches.uncached_memory, on(PYTORCH_NO_CUDA_MEMORY_CACHING="1"), DEFEATS),
    (launches.preloaded_interceptor, on(preloaded=(HARMLESS, PRELOADED)), MAY),
    (launches.preloaded_but_missing, on(preloaded=(PreloadedLibrary(path="/no/such.so", is_found=False),)), NOTE),
    (launchers.container_behind_run, on(job=command(f"{RUN} docker run --gpus all image torchrun train.py")), MAY),
    (launchers.container_behind_run, on(job=command(f"{RUN} srun -N 1 --container-image=image torchrun train.py")), MAY),
    (
        launchers.container_behind_run,
        on(job=command("apptainer exec --bind /data:/data image.sif torchrun train.py"), preloaded=(OURS,)),
        MAY,
    ),
    (launchers.hosts_behind_run, on(job=command(f"{RUN} srun -N 4 torchrun train.py")), MAY),
    (launchers.hosts_behind_run, on(job=command(f"{RUN} mpirun -np 8 python train.py")), MAY),
    (launchers.cleared_environment, on(job=command(f"{RUN} env -i PATH=/usr/bin torchrun train.py")), MAY),
    (launchers.filter_not_loadable, on(filter_problem="it uses another C library"), MAY),
    (launchers.filter_on_shared_files, on(filter_folder="/home/me/.cache/counterpoint", filter_file_system="nfs4"), NOTE),
    (launchers.occupied_plugin_slot, on(NCCL_PROFILER_PLUGIN="/inspector/libnccl-profiler-inspector.so"), NOTE),
    (launchers.occupied_plugin_slot, on(NCCL_TUNER_PLUGIN="libnccl-ofi-tuner.so"), NOTE),
    (queues.one_queue_for_sharded_data_parallel, on(H200, job=FSDP2, CUDA_DEVICE_MAX_CONNECTIONS="1"), DEFEATS),
    (queues.one_queue_for_sharded_data_parallel, on(B200, job=hints("fsdp1"), CUDA_DEVICE_MAX_CONNECTIONS="1"), DEFEATS),
    (queues.one_queue_for_sharded_data_parallel, on(H200, job=hints("fsdp"), CUDA_DEVICE_MAX_CONNECTIONS="1"), DEFEATS),
    (queues.several_queues_for_megatron, on(H200, job=TP), DEFEATS),
    (queues.several_queues_for_megatron, on(H200, job=TP, CUDA_DEVICE_MAX_CONNECTIONS="8"), DEFEATS),
    (queues.several_queues_for_megatron, on(job=TP), MAY),
    (queues.one_queue_for_expert_overlap, on(H200, job=hints("expert_overlap"), CUDA_DEVICE_MAX_CONNECTIONS="1"), MAY),
    (queues.one_queue_on_blackwell, on(B200, job=TP, CUDA_DEVICE_MAX_CONNECTIONS="1"), MAY),
    (queues.one_queue_for_unknown_job, on(H200, CUDA_DEVICE_MAX_CONNECTIONS="1"), MAY),
    (queues.one_queue_for_unknown_job, on(H200, job=hints("data_parallel"), CUDA_DEVICE_MAX_CONNECTIONS="1"), MAY),
    (queues.queues_out_of_range, on(CUDA_DEVICE_MAX_CONNECTIONS="64"), NOTE),
    (queues.queues_out_of_range, on(CUDA_DEVICE_MAX_CONNECTIONS="one"), NOTE),
    (queues.one_hip_queue, on(MI300X, GPU_MAX_HW_QUEUES="1"), MAY),
    (controls.priority_of_waited_collectives, on(torch_version="2.8.0", TORCH_NCCL_HIGH_PRIORITY="1"), NOTE),
    (controls.priority_of_waited_collectives, on(torch_version="2.11.0", job=FSDP2, TORCH_NCCL_HIGH_PRIORITY="true"), NOTE),
    (controls.priority_of_waited_collectives, on(torch_version="2.11.0+cu130", job=hints("high_priority")), NOTE),
    (controls.priority_in_graphs, on(torch_version="2.9.1", job=hints("high_priority", "cuda_graph")), MAY),
    (controls.priority_in_graphs, on(MI300X, job=hints("cuda_graph"), TORCH_NCCL_HIGH_PRIORITY="1"), MAY),
    (controls.priority_ignored_by_hip, on(MI300X, TORCH_NCCL_HIGH_PRIORITY="1"), MAY),
    (controls.zero_cta_of_reductions, on(nccl_version="2.28.9", NCCL_CTA_POLICY="2"), MAY),
    (controls.zero_cta_of_reductions, on(nccl_version="2.29.2", NCCL_CTA_POLICY="efficiency|zero"), MAY),
    (controls.zero_cta_of_reductions, on(nccl_version="2.27.5", job=hints("zero_cta")), MAY),
    (controls.zero_cta_not_understood, on(nccl_version="2.28.9", NCCL_CTA_POLICY="ZERO"), MAY),
    (
        controls.symmetric_memory_without_peer_access,
        on(*TWO, job=hints("symmetric_memory"), blocked_peers=((0, 1), (1, 0))),
        DEFEATS,
    ),
    (controls.symmetric_memory_without_multicast, on(H200, TORCH_SYMM_MEM_DISABLE_MULTICAST="1"), NOTE),
    (controls.sm_carveout, on(job=hints("sm_carveout")), MAY),
    (nccl.peer_to_peer_off, on(*TWO, blocked_peers=(), NCCL_P2P_DISABLE="1"), MAY),
    (nccl.peer_to_peer_off, on(NCCL_P2P_LEVEL="loc"), MAY),
    (nccl.no_peer_access, on(*TWO, blocked_peers=((0, 1),)), NOTE),
    (nccl.few_ctas, on(NCCL_MAX_CTAS="8"), MAY),
    (nccl.few_ctas, on(NCCL_MAX_CTAS="32", NCCL_MAX_NCHANNELS="4"), MAY),
    (nccl.many_ctas, on(H200, NCCL_MIN_CTAS="64"), MAY),
    (nccl.number_of_threads, on(NCCL_NTHREADS="128"), NOTE),
    (nccl.number_of_threads, on(NCCL_NTHREADS="100"), NOTE),
    (nccl.nvlink_sharp_off, on(*TWO, NCCL_NVLS_ENABLE="0"), NOTE),
    (nccl.forced_algorithm, on(NCCL_PROTO="LL"), NOTE),
    (nccl.network_by_sockets, on(job=JobCommand(num_nodes=2), NCCL_IB_DISABLE="1"), MAY),
    (nccl.network_by_sockets, on(NCCL_NET="Socket"), NOTE),
    (nccl.serialized_communicators, on(cuda_version="12.2", NCCL_LAUNCH_ORDER_IMPLICIT="1"), MAY),
    (nccl.serialized_communicators, on(cuda_version="13.0", torch_cuda_version="12.1", NCCL_LAUNCH_ORDER_IMPLICIT="1"), MAY),
    (process_groups.blocking_wait, on(TORCH_NCCL_BLOCKING_WAIT="1"), MAY),
    (process_groups.blocking_wait, on(NCCL_BLOCKING_WAIT="yes"), MAY),
    (process_groups.timed_collectives, on(TORCH_NCCL_ENABLE_TIMING="1", CUDA_DEVICE_MAX_CONNECTIONS="1"), DEFEATS),
    (process_groups.checked_collectives, on(TORCH_DISTRIBUTED_DEBUG="detail"), MAY),
    (process_groups.record_streams, on(torch_version="2.13.0", TORCH_NCCL_AVOID_RECORD_STREAMS="1"), NOTE),
    (frameworks.megatron_without_data_parallel_overlap, on(job=megatron("a.py --tensor-model-parallel-size 2")), MAY),
    (
        frameworks.megatron_without_data_parallel_overlap,
        on(job=megatron("a.py --use-distributed-optimizer --overlap-grad-reduce")),
        MAY,
    ),
    (
        frameworks.megatron_tp_overlap_without_sequence_parallel,
        on(job=megatron("a.py --tp-comm-overlap --tensor-model-parallel-size=4")),
        DEFEATS,
    ),
    (
        frameworks.megatron_tp_overlap_without_sequence_parallel,
        on(job=megatron("a.py --tp-comm-overlap --sequence-parallel")),
        DEFEATS,
    ),
    (frameworks.megatron_experts_by_all_gather, on(job=megatron(EXPERTS)), MAY),
    (
        frameworks.megatron_experts_by_all_gather,
        on(job=megatron(f"{EXPERTS} --moe-router-topk 6 --moe-token-dispatcher-type allgather")),
        MAY,
    ),
    (frameworks.zero_without_overlap, on(job=hints("zero_without_overlap")), MAY),
]
SILENT: list[tuple[Rule, JobContext]] = [
    (launches.blocking_launches, on(CUDA_LAUNCH_BLOCKING="0")),
    (launches.serializing_profiler, on(job=JobCommand(programs=("nsys", "python")))),
    (launches.uncached_memory, on(PYTORCH_NO_CUDA_MEMORY_CACHING="")),
    (launches.preloaded_interceptor, on(preloaded=(HARMLESS, OURS))),
    (launches.preloaded_but_missing, on(preloaded=(HARMLESS,))),
    (launchers.container_behind_run, on(job=command("docker run image counterpoint run --plan p -- torchrun train.py"))),
    (launchers.container_behind_run, on(job=command("docker run image torchrun train.py"))),
    (
        launchers.container_behind_run,
        on(job=command("docker run -v /cache:/cache image torchrun train.py"), preloaded=(OURS,)),
    ),
    (launchers.hosts_behind_run, on(job=command(f"srun -N 4 {RUN} torchrun train.py"))),
    (launchers.hosts_behind_run, on(job=command(f"{RUN} torchrun --nnodes 4 train.py"))),
    (launchers.cleared_environment, on(job=command(f"env -i PATH=/usr/bin {RUN} torchrun train.py"))),
    (launchers.filter_not_loadable, on()),
    (launchers.filter_on_shared_files, on(filter_folder="/local")),
    (launchers.occupied_plugin_slot, on(NCCL_TUNER_PLUGIN="none")),
    (queues.one_queue_for_sharded_data_parallel, on(H200, job=FSDP2, CUDA_DEVICE_MAX_CONNECTIONS="32")),
    (queues.one_queue_for_sharded_data_parallel, on(H200, job=TP, CUDA_DEVICE_MAX_CONNECTIONS="1")),
    (queues.several_queues_for_megatron, on(H200, job=TP, CUDA_DEVICE_MAX_CONNECTIONS="1")),
    (queues.several_queues_for_megatron, on(B200, job=TP)),
    (queues.several_queues_for_megatron, on(H200, job=hints("megatron_tensor_parallel", "fsdp2"))),
    (queues.several_queues_for_megatron, on(MI300X, job=TP)),
    (queues.several_queues_for_megatron, on(H200, job=hints("data_parallel"))),
    (queues.one_queue_for_expert_overlap, on(H200, job=hints("expert_overlap"), CUDA_DEVICE_MAX_CONNECTIONS="32")),
    (queues.one_queue_on_blackwell, on(H200, job=TP, CUDA_DEVICE_MAX_CONNECTIONS="1")),
    (queues.one_queue_on_blackwell, on(B200, job=FSDP2, CUDA_DEVICE_MAX_CONNECTIONS="1")),
    (queues.one_queue_for_unknown_job, on(H200, job=TP, CUDA_DEVICE_MAX_CONNECTIONS="1")),
    (queues.one_queue_for_unknown_job, on(H200, CUDA_DEVICE_MAX_CONNECTIONS="8")),
    (queues.queues_out_of_range, on(CUDA_DEVICE_MAX_CONNECTIONS="32")),
    (queues.one_hip_queue, on(MI300X, GPU_MAX_HW_QUEUES="2")),
    (queues.one_hip_queue, on(H200, GPU_MAX_HW_QUEUES="1")),
    (controls.priority_of_waited_collectives, on(torch_version="2.7.1", TORCH_NCCL_HIGH_PRIORITY="1")),
    (controls.priority_of_waited_collectives, on(torch_version="", TORCH_NCCL_HIGH_PRIORITY="1")),
    (controls.priority_of_waited_collectives, on(torch_version="2.11.0", TORCH_NCCL_HIGH_PRIORITY="0")),
    (controls.priority_in_graphs, on(torch_version="2.10.0", job=hints("high_priority", "cuda_graph"))),
    (controls.priority_in_graphs, on(torch_version="2.9.1", job=hints("cuda_graph"))),
    (controls.priority_in_graphs, on(torch_version="2.9.1", job=hints("high_priority"))),
    (controls.priority_ignored_by_hip, on(MI300X, TORCH_NCCL_HIGH_PRIORITY="1", DEBUG_HIP_IGNORE_STREAM_PRIORITY="0")),
    (controls.priority_ignored_by_hip, on(H200, TORCH_NCCL_HIGH_PRIORITY="1")),
    (controls.priority_ignored_by_hip, on(MI300X)),
    (controls.zero_cta_of_reductions, on(nccl_version="2.28.9", NCCL_CTA_POLICY="1")),
    (controls.zero_cta_not_understood, on(nccl_version="2.29.2", NCCL_CTA_POLICY="ZERO")),
    (controls.zero_cta_not_understood, on(nccl_version="2.28.9", NCCL_CTA_POLICY="2")),
    (controls.zero_cta_not_understood, on(NCCL_CTA_POLICY="ZERO")),
    (controls.symmetric_memory_without_peer_access, on(*TWO, job=hints("symmetric_memory"), blocked_peers=())),
    (controls.symmetric_memory_without_peer_access, on(job=hints("symmetric_memory"))),
    (controls.symmetric_memory_without_peer_access, on(*TWO, NCCL_CTA_POLICY="2", blocked_peers=((0, 1), (1, 0)))),
    (controls.symmetric_memory_without_peer_access, on(*TWO, blocked_peers=((0, 1), (1, 0)))),
    (controls.symmetric_memory_without_multicast, on(TORCH_SYMM_MEM_DISABLE_MULTICAST="1")),
    (controls.sm_carveout, on(job=hints("fsdp2"))),
    (nccl.peer_to_peer_off, on(H200, NCCL_P2P_DISABLE="1")),
    (nccl.peer_to_peer_off, on(*TWO, blocked_peers=((0, 1), (1, 0)), NCCL_P2P_DISABLE="1")),
    (nccl.peer_to_peer_off, on(*TWO, NCCL_P2P_DISABLE="0", NCCL_P2P_LEVEL="NVL")),
    (nccl.no_peer_access, on(*TWO, blocked_peers=())),
    (nccl.no_peer_access, on(*TWO)),
    (nccl.few_ctas, on(NCCL_MAX_CTAS="16")),
    (nccl.many_ctas, on(H200, NCCL_MIN_CTAS="32")),
    (nccl.number_of_threads, on(NCCL_NTHREADS="512")),
    (nccl.nvlink_sharp_off, on(*TWO, NCCL_NVLS_ENABLE="2")),
    (nccl.nvlink_sharp_off, on(FoundGpu(name="A100", compute_capability="8.0"), NCCL_NVLS_ENABLE="0")),
    (nccl.nvlink_sharp_off, on(H200_PCIE, H200_PCIE, NCCL_NVLS_ENABLE="0")),
    (nccl.forced_algorithm, on()),
    (nccl.network_by_sockets, on(job=JobCommand(num_nodes=1), NCCL_IB_DISABLE="1")),
    (nccl.network_by_sockets, on(job=JobCommand(num_nodes=2), NCCL_IB_DISABLE="0")),
    (nccl.serialized_communicators, on(cuda_version="12.3", torch_cuda_version="13.0", NCCL_LAUNCH_ORDER_IMPLICIT="1")),
    (nccl.serialized_communicators, on(NCCL_LAUNCH_ORDER_IMPLICIT="1")),
    (process_groups.blocking_wait, on(TORCH_NCCL_BLOCKING_WAIT="0")),
    (process_groups.timed_collectives, on(TORCH_NCCL_ENABLE_TIMING="1")),
    (process_groups.checked_collectives, on(TORCH_DISTRIBUTED_DEBUG="INFO")),
    (process_groups.record_streams, on(torch_version="2.7.0", TORCH_NCCL_AVOID_RECORD_STREAMS="1")),
    (
        frameworks.megatron_without_data_parallel_overlap,
        on(job=megatron("--nproc-per-node 8 a.py --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2")),
    ),
    (
        frameworks.megatron_without_data_parallel_overlap,
        on(job=megatron("a.py --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather")),
    ),
    (frameworks.megatron_without_data_parallel_overlap, on(job=megatron("a.py --lr 1"))),
    (
        frameworks.megatron_tp_overlap_without_sequence_parallel,
        on(job=megatron("a.py --tp-comm-overlap --sequence-parallel --tensor-model-parallel-size 4")),
    ),
    (frameworks.megatron_tp_overlap_without_sequence_parallel, on(job=megatron("a.py --sequence-parallel"))),
    (frameworks.megatron_experts_by_all_gather, on(job=megatron(f"{EXPERTS} --moe-token-dispatcher-type alltoall"))),
    (frameworks.megatron_experts_by_all_gather, on(job=megatron(f"{EXPERTS} --moe-router-topk 8"))),
    (frameworks.megatron_experts_by_all_gather, on(job=megatron("a.py --num-experts 64"))),
    (frameworks.megatron_experts_by_all_gather, on()),
    (frameworks.zero_without_overlap, on(job=hints("fsdp2"))),
]


@pytest.mark.parametrize(("rule", "context", "severity"), FIRES)
def test_a_rule_fires_with_its_severity(rule: Rule, context: JobContext, severity: str) -> None:
    finding = rule(context)
    assert finding is not None
    assert finding.severity == severity
    assert finding in find(context), "the report holds it, too"


@pytest.mark.parametrize(("rule", "context"), SILENT)
def test_a_rule_is_silent_where_its_reason_is_absent_or_unknown(rule: Rule, context: JobContext) -> None:
    assert rule(context) is None


def test_every_rule_is_tried_both_ways() -> None:
    assert {rule for rule, *_ in FIRES} == set(RULES) == {rule for rule, _ in SILENT}


def test_nothing_known_finds_nothing() -> None:
    assert find(JobContext()) == ()
    assert find(on(*TWO, blocked_peers=(), torch_version="2.11.0", nccl_version="2.28.9", cuda_version="13.0")) == ()


def test_the_worst_comes_first() -> None:
    found = find(on(*TWO, NCCL_PROTO="LL", NCCL_P2P_DISABLE="1", CUDA_LAUNCH_BLOCKING="1"))
    assert [finding.severity for finding in found] == [DEFEATS, MAY, NOTE]


def test_a_finding_names_where_a_value_was_set() -> None:
    file = "/etc/nccl.conf"
    finding = nccl.peer_to_peer_off(JobContext(environment={"NCCL_P2P_DISABLE": "1"}, origins={"NCCL_P2P_DISABLE": file}))
    assert finding is not None
    assert finding.found == "1 (in /etc/nccl.conf)"


@pytest.mark.parametrize(
    ("rule", "context", "said", "unsaid"),
    [
        (
            controls.zero_cta_of_reductions,
            on(nccl_version="2.28.3", NCCL_CTA_POLICY="2"),
            "Only all-gather",
            "came with 2.28",
        ),
        (
            controls.zero_cta_of_reductions,
            on(nccl_version="2.27.7", NCCL_CTA_POLICY="2"),
            "came with 2.28",
            "Only all-gather",
        ),
        (controls.zero_cta_of_reductions, on(NCCL_CTA_POLICY="2"), "Only all-gather", "came with 2.28"),
        (
            controls.priority_of_waited_collectives,
            on(torch_version="2.8.0", job=hints("high_priority")),
            "async_op",
            "FSDP2",
        ),
        (
            controls.priority_of_waited_collectives,
            on(torch_version="2.8.0", job=hints("high_priority", "fsdp2")),
            "FSDP2",
            "DTensor",
        ),
        (nccl.number_of_threads, on(NCCL_NTHREADS="100"), "64, 128, 256 or 512", "shared memory"),
        (nccl.number_of_threads, on(NCCL_NTHREADS="256"), "shared memory", "64, 128"),
        (nccl.many_ctas, on(H200, NCCL_MIN_CTAS="40"), "40 of 132 SMs", "None"),
        (
            frameworks.megatron_without_data_parallel_overlap,
            on(job=megatron("a.py --use-distributed-optimizer --overlap-grad-reduce")),
            "parameters are gathered",
            "gradients",
        ),
    ],
)
def test_a_fact_fits_the_case(rule: Rule, context: JobContext, said: str, unsaid: str) -> None:
    finding = rule(context)
    assert finding is not None
    assert said in finding.fact
    assert unsaid not in finding.fact


def test_tensor_parallel_and_fsdp_together_are_told_to_measure() -> None:
    both = hints("fsdp2", "megatron_tensor_parallel")
    for gpu, is_told in ((H200, True), (B200, False)):
        finding = queues.one_queue_for_sharded_data_parallel(on(gpu, job=both, CUDA_DEVICE_MAX_CONNECTIONS="1"))
        assert finding is not None
        assert ("measure both" in finding.remedy) is is_told


NAMES = sorted({name for _, context, _ in FIRES for name in context.environment})
ODD_VALUES = st.sampled_from(["", "0", "1", "2", "-1", "ZERO|", "²", "1e3", "99999999999999999999", "on", " 1 "]) | st.text(
    max_size=8
)


@given(
    environment=st.dictionaries(st.sampled_from(NAMES), ODD_VALUES),
    gpus=st.lists(st.sampled_from([H200, B200, MI300X, FoundGpu(name="?", compute_capability="odd")]), max_size=3),
    version=st.sampled_from(["", "2.7.1", "2.9", "2.13.0+cpu", "unknown"]),
    kinds=st.lists(
        st.sampled_from(sorted({*FLAG_SIGNS.values(), *NAME_SIGNS.values(), *SIZE_SIGNS.values(), "megatron"})),
        max_size=4,
    ),
    vendor=st.sampled_from(["nvidia", "amd", "unknown"]),
)
def test_no_value_makes_a_rule_fail_and_every_finding_is_complete(
    environment: dict[str, str],
    gpus: list[FoundGpu],
    version: str,
    kinds: list[HintKind],
    vendor: Any,
) -> None:
    context = JobContext(
        vendor=vendor,
        environment=environment,
        gpus=tuple(gpus),
        torch_version=version,
        nccl_version=version,
        job=hints(*kinds),
    )
    for finding in find(context):
        for text in (finding.setting, finding.found, finding.fact, finding.source, finding.remedy):
            assert text.strip()
        for text in (finding.fact, finding.remedy):
            assert text.endswith(".")
            assert "\n" not in text
            assert "  " not in text


def test_the_document_lists_every_setting_that_rules_judge() -> None:
    document = (Path(__file__).parents[2] / "docs" / "check.md").read_text()
    for name in NAMES:
        assert f"`{name}`" in document, name
    for rule in RULES:
        assert f"`{rule.__name__}`" in document, rule.__name__
