"""Which kernels communicate is said once, in `traces/rules.toml`: the classifier and the launch filter agree on every name.

Names are tried as the driver reports them (mangled, as nvcc does it) and as profilers print them (demangled, here by the
C++ library itself).
"""

import ctypes
import ctypes.util
import re
from pathlib import Path

import pytest

from counterpoint.controls import Priority, ResidencyCap
from counterpoint.launch_filter import layout
from counterpoint.launch_filter.rules import FilterRule, translate
from counterpoint.plan import Directive, Match, Plan
from counterpoint.traces.classify import Rule, _covers, classify_kernel, communication_patterns, load_rules
from helpers.build_filter import Built
from helpers.filter_session import Session, run_directory

# nvcc names an anonymous namespace after the file; demanglers print "(anonymous namespace)".
ANONYMOUS = "_GLOBAL__N__6a4a0a3c_26_CUDASymmetricMemoryOps_cu_f5b0a8d9_2048"
NCCL_ARGUMENTS = "24ncclDevKernelArgsStorageILm4096EE"


def mangled(*names: str, rest: str) -> str:
    """The name of a function in namespaces; `rest` holds template arguments and parameters."""
    parts = "".join(f"{len(name)}{name}" for name in names)
    return f"_ZN{parts}{rest}" if len(names) > 1 else f"_Z{parts}{rest}"


COMMUNICATION = (
    *(
        mangled(f"ncclDevKernel_{name}", rest=NCCL_ARGUMENTS)
        for name in (
            "AllReduce_Sum_bf16_RING_LL", "AllGather_RING_LL", "ReduceScatter_Sum_f32_RING_LL", "Broadcast_RING_LL",
            "Reduce_Sum_f32_RING_LL", "SendRecv", "Generic_1", "AllReduce_Sum_f32_NVLS", "AllToAllPivot_RING_i8",
        )
    ),
    mangled("ncclSymkDevKernel_ReduceScatter_LDMC_sum_bf16", rest="19ncclSymkDevWorkArgs"),
    mangled("ncclKernel_AllReduce_RING_LL_Sum_float", rest="P11ncclDevCommmP8ncclWork"),
    mangled("deep_ep", "intranode", "dispatch", rest="ILi8ELi768ELi8192EEEvP4int4Pf"),
    mangled("deep_ep", "intranode", "notify_dispatch", rest="ILi8EEEvPKiPi"),
    mangled("deep_ep", "intranode", "barrier", rest="ILi8EEEvPPii"),
    mangled("deep_ep", "internode_ll", "combine", rest="ILb1ELi7168ELi9ELi512EEEvPv"),
    mangled("deep_ep", "elastic", "hybrid_dispatch_impl", rest="ILb1EEEvPv"),
    mangled("deep_ep", "elastic", "combine_impl", rest="ILb1EEEvPv"),
    mangled("fbgemm_gpu", "one_shot_all_reduce_pipelined", rest="ILi8ELb0EEEviii"),
    mangled("fbgemm_gpu", "reduce_scatter", rest="ILi8ELb1EEEviii"),
    mangled(ANONYMOUS, "all_reduce_one_shot_push_kernel", rest="ILj8ELb1EEEvPv"),
    mangled(ANONYMOUS, "all_reduce_two_shot_kernel", rest="ILj8ELb1EEEvPv"),
    mangled("rcclGenericKernel", rest="ILi1ELb0EEv24ncclDevKernelArgsStorageILm4096EE"),
    mangled("mscclKernel_Sum_hip_bfloat16_Simple_false", rest="P11ncclDevCommP9mscclAlgoP9mscclWork"),
    mangled("hybrid_ep", "dispatch_kernel", rest="IhLi8EEEvPT_"),
    mangled("hybrid_ep", "combine_kernel", rest="ILi8EEEvPv"),
    mangled("hybrid_ep", "device_sync_kernel", rest="EPji"),
    mangled("internode_ll", "dispatch", rest="ILb1EEEvPv"),
    mangled("intranode", "combine", rest="ILi8EEEvPv"),
    mangled(ANONYMOUS, "multimem_all_reduce_kernel", rest="IN3c108BFloat16ELi16EEEvPT_mPPjmm"),
    mangled(ANONYMOUS, "multimem_one_shot_all_reduce_kernel", rest="IfLi16EEEvPT_S2_mPPjmm"),
    mangled(ANONYMOUS, "multimem_all_gather_kernel", rest="ILi16EEEvPcS1_mPPjmm"),
    mangled(ANONYMOUS, "one_shot_all_reduce_kernel", rest="IfLi16ELi8ELb0EEEvPPT_S2_S2_mmPPjmm"),
    mangled(ANONYMOUS, "two_shot_all_reduce_kernel", rest="IfLi16ELi8EEEvPPT_S2_mmmmPPjmm"),
    mangled(ANONYMOUS, "two_shot_all_reduce_kernel_inplace", rest="IfLi16ELi8EEEvPPT_mmPPjmm"),
    mangled(ANONYMOUS, "reduce_scatter_out_kernel", rest="IfLi16ELi8EEEvPPT_S2_mmPPjmm"),
    mangled("c10d", "symmetric_memory", ANONYMOUS, "barrier_kernel", rest="EPPjiiim"),
    mangled("c10d", "symmetric_memory", "put_signal_kernel", rest="EPPjiiim"),
    mangled("c10d", "symmetric_memory", "wait_signal_kernel", rest="EPPjiiim"),
    mangled("barrier_kernel", rest="PPjiiim"),
    mangled("vllm", "cross_device_reduce_1stage", rest="IfLi2EEEvPNS_8RankDataE"),
    mangled("sglang", "cross_device_reduce_2stage", rest="I6__halfLi8EEEvPNS_8RankDataE"),
    mangled("flashinfer", "trtllm_allreduce_fusion", "allreduce_fusion_kernel_oneshot_lamport", rest="ILi3E6__halfEEvi"),
    mangled("tensorrt_llm", "kernels", "ar_fusion", "allreduce_fusion_kernel_twoshot_sync", rest="ILi3E6__halfEEvi"),
    mangled("tensorrt_llm", "kernels", "oneShotAllReduceKernel", rest="I6__halfLi8ELb0EEEvNS0_15AllReduceParamsE"),
    mangled("tensorrt_llm", "kernels", "twoShotAllReduceKernel", rest="I6__halfLi8ELb0EEEvNS0_15AllReduceParamsE"),
    mangled("tensorrt_llm", "kernels", "lamport_style_one_shot_all_reduce_norm_kernel", rest="I6__halfLi8EEEvi"),
    mangled("flashinfer", "trtllm_mnnvl_allreduce", "oneshotAllreduceFusionKernel", rest="ILh8E6__halfEEvi"),
    mangled("quickreduce", "allreduce_prototype_twoshot", rest="IfLi8EEEvPKT_i"),
    mangled("quick_reduce", "allreduce_prototype_twoshot", rest="IfLi8EEEvPKT_i"),
    mangled("userbuffers_fp16_sum_inplace_gpu_rr_rs_oop", rest="ILi8EEvi"),
    mangled("kuserbuffers_pushrecv", rest="iiPiS_i"),
    mangled("aiter", "reduce_scatter_cross_device_store", rest="IfLi8EEEvPNS_8RankDataE"),
    mangled("barrier_on_stream_kernel_threadgroup", rest="iii"),
    mangled("transformer_engine", "userbuffers_pushrecv_multiatomic", rest="Eii"),
    mangled("mscclpp", "collective", "allreduceAllPairs", rest="ILi0EfEEvPf"),
    mangled("mscclpp", "collective", "allgather6", rest="ILb0EEEvPv"),
    mangled("nvshmemi_barrier_on_stream_kernel", rest="i"),
    mangled("tensorrt_llm", "kernels", "moe_comm", "moeA2ADispatchKernel", rest="ILi8ELb0EEEvPKi"),
    mangled("tensorrt_llm", "kernels", "moeAllToAllKernel", rest="E14MoeEpWorldInfo"),
    mangled("tensorrt_llm", "kernels", "mnnvl", "twoshot_allreduce_kernel", rest="ILh8E6__halfEEvPT0_"),
    mangled("mori", "moe", "EpDispatchIntraNodeKernel", rest="IfEEvNS0_21EpDispatchCombineArgsIT_EE"),
    mangled("a2a_dispatch_send_kernel", rest="ILb1ELm16EEvm"),
    mangled("aiter", "allgather_lastdim", rest="IfLi8EEEvPNS_8RankDataE"),
    mangled("alltoall_on_stream_kernel", rest="IfEviPT_PKS0_m"),
    mangled("fcollect_on_stream_kernel", rest="IfEviPT_PKS0_m"),
    mangled("rdxn_on_stream_kernel", rest="IfL8rdxn_ops4EEviPT_"),
    mangled("nvshmemi_proxy_rma_entrypoint", rest="PvS_i"),
    mangled("nvshmemi_transfer_alltoall", rest="IiEvPT_"),
    mangled("bytedance", "flux", "CudaIpcBarrierAllKernel", rest="ENS0_21CudaIpcBarrierAllArgsE"),
    mangled("bytedance", "flux", "CudaIpcBarrierAllRingModeKernel", rest="ENS0_21CudaIpcBarrierAllArgsE"),
    mangled("bytedance", "flux", "local_copy_and_reset_kernel", rest="I4int4fLb0EEEvPT_S3_"),
    mangled("bytedance", "flux", "ag_a2a_mode_kernel", rest="ILb1EEEvNS0_15AllGatherParamsE"),
    mangled("bytedance", "flux", "packed_ring_reduction", rest="IfLi256EEEvPT_S2_iiii"),
    mangled("bytedance", "flux", "bsr2dense_reduce_kernel", rest="IfLi128ELi128ELi768EEEvPT_S2_iii"),
    mangled("bytedance", "flux", "all2all", rest="ILi8EEEvNS0_13All2allParamsE"),
    mangled("bytedance", "flux", "all2all_v2", rest="ILi8EEEvNS0_13All2allParamsE"),
    mangled("bytedance", "flux", "a2a_single_kernel_v2", rest="ILi8EEEvNS0_19All2AllSingleParamsE"),
    mangled("bytedance", "flux", "post_attn_all2all_transpose_kernel", rest="ILi8EEEvNS0_21PostAttnAll2AllParamsE"),
    mangled("bytedance", "flux", "dis_scatter_backward_kernel", rest="IfLi1024EEEvNS0_24DisScatterBackwardParamsE"),
    mangled("c10d", "nvshmem_extension", "allToAllV", rest="EPvS1_Pl"),
    mangled("all_to_all_v_2d_kernel", rest="PvS_Pl"),
    "NVSHMEM_barrier", "MSCCLPP_allreduce", "nvshmem_barrier_all_kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
)  # fmt: skip
COMPUTATION = (
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT",
    mangled("cutlass", "device_kernel", rest="IN9bytedance4flux29Sm90GemmReduceScatterKernelV2EEEvNT_6ParamsE"),
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8",
    "triton_red_fused__to_copy_mean_3",
    "triton_poi_fused_all_reduce_add_0",  # what Inductor calls a pointwise kernel beside a collective
    mangled("at", "native", "reduce_kernel", rest="ILi512ELi1EfEEvT1_"),
    mangled("at", "native", ANONYMOUS, "vectorized_layer_norm_kernel", rest="IN3c108BFloat16EEEvi"),
    mangled("at", "native", "index_elementwise_kernel", rest="ILi128EEEvi"),
    mangled("flash", "flash_fwd_kernel", rest="ILi128EEEvi"),
    mangled("grid_barrier_kernel", rest="Pj"),
    mangled("my_own_kernel", rest="Pf"),
)


def demangled(name: str) -> str:
    """As the C++ library prints it."""
    library = ctypes.CDLL("libstdc++.so.6")
    library.__cxa_demangle.restype = ctypes.c_void_p
    status = ctypes.c_int()
    text = library.__cxa_demangle(name.encode(), None, None, ctypes.byref(status))
    assert status.value == 0, name
    return ctypes.string_at(text).decode()


def forms(name: str) -> list[str]:
    return [name, demangled(name)] if name.startswith("_Z") else [name]


def is_marked(name: str) -> bool:
    """Whether a pattern of the filter fits, by the patterns' definition."""
    marks = [
        "".join({"*": ".*", "?": "."}.get(letter, re.escape(letter)) for letter in mark) for mark in communication_patterns()
    ]
    return any(re.fullmatch(mark, name) for mark in marks)


@pytest.mark.parametrize("name", COMMUNICATION)
def test_a_kernel_that_communicates_is_known_to_both_mangled_and_printed(name: str) -> None:
    for form in forms(name):
        assert classify_kernel(form).kind == "communication", form
        assert is_marked(form), form
    assert len({classify_kernel(form) for form in forms(name)}) == 1


@pytest.mark.parametrize("name", COMPUTATION)
def test_a_kernel_that_computes_is_marked_by_neither(name: str) -> None:
    for form in forms(name):
        assert classify_kernel(form).kind == "computation", form
        assert not is_marked(form), form


def test_an_anonymous_namespace_is_printed_as_such() -> None:
    assert demangled(mangled(ANONYMOUS, "multimem_all_reduce_kernel", rest="IfLi16EEEvPT_")) == (
        "void (anonymous namespace)::multimem_all_reduce_kernel<float, 16>(float*)"
    )


@pytest.mark.parametrize(
    "rule", [rule for rule in load_rules().rule if rule.kind == "communication"], ids=lambda rule: rule.names[0]
)
def test_every_communication_rule_has_names_and_a_known_kernel(rule: Rule) -> None:
    assert rule.names
    assert not rule.pattern
    assert not any(letter in name for name in rule.names for letter in "[]\\")
    assert rule in {classify_kernel(form) for name in COMMUNICATION for form in forms(name)}


def test_patterns_that_another_covers_are_left_out_and_room_stays_for_a_plan() -> None:
    patterns = communication_patterns()
    assert "nccl*Kernel*" in patterns
    assert "nccl*Kernel_AllReduce*" not in patterns
    assert not any(_covers(one, other) for one in patterns for other in patterns if one != other)
    assert len(patterns) <= layout.MAX_RULES // 3


def test_a_rule_for_computation_never_reaches_a_kernel_that_communicates(built: Built, tmp_path: Path) -> None:
    controls = (Priority(priority=-2), ResidencyCap(ctas_per_sm=3, dynamic_shared_bytes=60_000))
    plan = Plan(directives=(Directive(match=Match(kind="computation"), controls=controls, reason="test"),))
    rules: tuple[FilterRule, ...] = translate(plan).rules
    for behind in ((), (Path("libstdc++.so.6"),)):
        folder = tmp_path / f"with{len(behind)}"
        folder.mkdir()
        with Session(built, run_directory(folder, *rules), behind=behind) as client:
            client.find()
            for names, changed in ((COMMUNICATION, (0, 1)), (COMPUTATION, (60_000, -2))):
                for name in names:
                    client.make(name)
                    reached = client.launch(name).last
                    assert (reached.shared, reached.priority) == changed, name
                    client.ask(f"unload {name}")
