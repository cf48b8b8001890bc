"""Names of real kernels against what they are, and the rule table against itself."""

import re
from pathlib import Path

import pytest

from counterpoint.errors import TraceError
from counterpoint.traces.classify import (
    classify_kernel,
    collective_kind,
    copy_direction,
    ctas_per_cluster,
    element_bytes,
    is_communication,
    load_rules,
    use_rules,
)

COMMUNICATION = [
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "nccl", "all_reduce"),
    ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "nccl", "all_gather"),
    ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "nccl", "reduce_scatter"),
    ("ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "nccl", "reduce"),
    ("ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "nccl", "broadcast"),
    ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "nccl", "send_recv"),
    ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", "nccl", "all_reduce"),
    ("ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)", "nccl", "send_recv"),
    ("ncclKernel_Generic(ncclDevComm*, channelMasks, ncclWork*)", "nccl", "send_recv"),
    ("ncclSymkDevKernel_AllGather_ST(ncclSymkDevWorkArgs)", "nccl", "all_gather"),
    ("void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*)", "deep_ep", "all_to_all"),
    ("void deep_ep::internode_ll::combine<true, 7168, 9, 512>(void*)", "deep_ep", "all_to_all"),
    ("void c10d::symmetric_memory::one_shot_all_reduce_kernel<c10::BFloat16, 16, 8>(...)", "symmetric_memory", "all_reduce"),
    ("void (anonymous namespace)::two_shot_all_reduce_kernel<float, 16, 4>(...)", "symmetric_memory", "all_reduce"),
    ("void (anonymous namespace)::multimem_one_shot_all_reduce_kernel<float, 16>(...)", "symmetric_memory", "all_reduce"),
    ("(anonymous namespace)::multimem_all_gather_kernel<16>(char*, char*)", "symmetric_memory", "all_gather"),
    (
        "c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int, int, unsigned long)",
        "symmetric_memory",
        "send_recv",
    ),
    ("void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>(vllm::RankData*)", "custom_all_reduce", "all_reduce"),
    ("void sglang::cross_device_reduce_1stage<half, 4>(sglang::RankData*)", "custom_all_reduce", "all_reduce"),
    ("void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<3>(...)", "trtllm", "all_reduce"),
    ("void tensorrt_llm::kernels::oneShotAllReduceKernel<__half, 8>(...)", "trtllm", "all_reduce"),
    ("void mscclpp::collective::allreduceAllPairs<0, float>(float*)", "mscclpp", "all_reduce"),
    ("void mscclpp::collective::allgather6<false>(void*)", "mscclpp", "all_gather"),
    ("userbuffers_fp16_sum_inplace_gpu_rw_ag<8>(int, int)", "userbuffers", "all_reduce"),
    ("void nvshmemi_transfer_alltoall<int>(int*)", "nvshmem", "all_to_all"),
    ("nvshmemi_proxy_rma_entrypoint(void*, void*, rma_bytesdesc_t, int)", "nvshmem", "send_recv"),
    ("void aiter::reduce_scatter_cross_device_store<bf16, 8>(aiter::RankData*)", "custom_all_reduce", "reduce_scatter"),
    ("void tensorrt_llm::kernels::moe_comm::moeA2ACombineKernel<__half, 8>(int)", "trtllm", "all_to_all"),
    ("nvshmemi_barrier_on_stream_kernel(int)", "nvshmem", "send_recv"),
    ("bytedance::flux::CudaIpcBarrierAllKernel(bytedance::flux::CudaIpcBarrierAllArgs)", "flux", "send_recv"),
    ("void bytedance::flux::ag_a2a_mode_kernel<true>(bytedance::flux::AllGatherParams)", "flux", "all_gather"),
    ("void bytedance::flux::bsr2dense_reduce_kernel<cutlass::bfloat16_t, 128, 128, 768>()", "flux", "reduce_scatter"),
    ("void bytedance::flux::all2all_v2<8>(bytedance::flux::All2allParams)", "flux", "all_to_all"),
]
COMPUTATION = [
    ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "matmul"),
    ("nvjet_sm100_tst_128x256_64x4_2x1_v_bz_NTN", "matmul"),
    ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8", "matmul"),
    ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<int>>", "matmul"),
    ("Cijk_Ailk_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64", "matmul"),
    ("triton_tem_fused_mm_0", "matmul"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x4x1_cga1x1x1_kernel0_0", "attention"),
    ("void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>", "attention"),
    ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention)", "attention"),
    ("void at::native::vectorized_elementwise_kernel<8, at::native::GeluCUDAKernelImpl>", "streaming"),
    ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16>", "streaming"),
    ("at::native::detail::split_with_sizes_copy_out_contiguous_no_cast_kernel(char**)", "streaming"),
    ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float> >", "streaming"),
    ("triton_red_fused__to_copy_mean_3", "streaming"),
    ("triton_poi_fused_add_mul_1", "streaming"),
    ("my_own_kernel", "other"),
]


@pytest.mark.parametrize(("name", "library", "collective"), COMMUNICATION)
def test_a_communication_kernel_is_known_by_its_name(name: str, library: str, collective: str) -> None:
    rule = classify_kernel(name)
    assert (rule.kind, rule.library, rule.collective) == ("communication", library, collective)


@pytest.mark.parametrize(("name", "character"), COMPUTATION)
def test_a_computation_kernel_has_its_character(name: str, character: str) -> None:
    rule = classify_kernel(name)
    assert (rule.kind, rule.character) == ("computation", character)


WAITING = (
    "bytedance::flux::CudaIpcBarrierAllKernel(bytedance::flux::CudaIpcBarrierAllArgs)",
    "c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int, int, unsigned long)",
    "void deep_ep::intranode::barrier<8>(int**, int)",
    "void barrier_on_stream_kernel_threadgroup<(threadgroup_t)2>(int, int)",
    "nvshmemi_long_wait_until_on_stream_kernel(long volatile*, int, long)",
    "kuserbuffers_pushrecv(int, int, int*, int*, int)",
)


def test_kernels_that_only_wait_are_known_as_such() -> None:
    moving = [name for name, _, _ in COMMUNICATION if name not in WAITING and "barrier" not in name]
    assert [classify_kernel(name).is_waiting for name in WAITING] == [True] * len(WAITING)
    assert not any(classify_kernel(name).is_waiting for name in moving)


def test_a_users_rules_hold_before_the_shipped_ones_until_they_are_taken_away(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    rule = "names = ['my_gather*']\nkind = 'communication'\nlibrary = 'mine'\ncollective = 'all_gather'"
    own.write_text(f"[[rule]]\n{rule}\nsource = 'ours'\n")
    before = classify_kernel("my_gather_kernel")
    use_rules(own)
    try:
        found = classify_kernel("my_gather_kernel")
        assert (found.kind, found.library, found.collective) == ("communication", "mine", "all_gather")
        assert classify_kernel(COMMUNICATION[0][0]).library == "nccl"
    finally:
        use_rules(None)
    assert classify_kernel("my_gather_kernel") == before
    assert load_rules(own).rule[1:] == load_rules().rule


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[rule]]\nsource = 'x'", "neither 'names' nor 'pattern'"),
        ("[[rule]]\nsource = 'x'\npattern = '('", "is no regular expression"),
        ("[[rule]]\nsource = 'x'\npattern = 'x'\nis_waiting = true", "only communication can be waiting"),
        ("[[rule]]\nsource = 'x'\npattern = 'x'\nkind = 'talk'", "must be one of 'communication', 'computation'"),
        ("[[rule]]\nname = 'x'", "rule[0]"),
        ("", "is empty"),
    ],
)
def test_a_bad_file_of_rules_is_refused_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "own.toml").write_text(text)
    with pytest.raises(TraceError) as caught:
        use_rules(tmp_path / "own.toml")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_rule_compiles_and_names_its_source() -> None:
    for rule in load_rules().rule:
        re.compile(rule.pattern)
        assert len(rule.source) > 10


def test_every_communication_rule_is_reached_by_some_known_name() -> None:
    reached = {classify_kernel(name) for name, _, _ in COMMUNICATION}
    unreached = [rule.names for rule in load_rules().rule if rule.kind == "communication" and rule not in reached]
    assert len(unreached) <= 4, unreached


def test_a_cluster_of_two_is_read_from_a_cublas_name() -> None:
    rule = classify_kernel("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN")
    assert (rule.is_work_sharing, ctas_per_cluster(rule, 9, 132)) == (True, 2)


def test_nccl_runs_in_clusters_of_four_on_compute_capability_9_only() -> None:
    rule = classify_kernel(COMMUNICATION[0][0])
    assert [ctas_per_cluster(rule, major, 24) for major in (8, 9)] == [1, 4]
    assert ctas_per_cluster(rule, 9, 22) == 1


def test_the_traced_collective_name_goes_before_the_kernel_name() -> None:
    rule = classify_kernel("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)")
    assert collective_kind("all_to_allv", rule) == ("all_to_all", True)
    assert collective_kind("_allgather_base", rule) == ("all_gather", True)
    assert collective_kind(None, rule) == ("send_recv", True)
    assert collective_kind("teleport", rule) == ("send_recv", False)


@pytest.mark.parametrize(
    ("name", "direction"),
    [
        ("Memcpy DtoD (Device -> Device)", "device_to_device"),
        ("Memcpy HtoD (Pinned -> Device)", "host_to_device"),
        ("Memcpy DtoH (Device -> Pageable)", "device_to_host"),
        ("Memcpy PtoP (Device -> Device)", "peer_to_peer"),
        ("Memset (Device)", "set"),
        ("CopyHostToDevice", "host_to_device"),
    ],
)
def test_a_copys_direction_is_in_its_name(name: str, direction: str) -> None:
    assert copy_direction(name) == direction
    assert is_communication("memcpy", name) == (direction == "peer_to_peer")


def test_element_sizes_follow_pytorchs_type_names() -> None:
    sizes = {"BFloat16": 2, "Float": 4, "Double": 8, "Float8_e4m3fn": 1, "Long": 8, "Nonsense": None}
    assert {name: element_bytes(name) for name in sizes} == sizes
