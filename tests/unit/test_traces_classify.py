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
    matmul_type,
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
    ("void rcclGenericKernel<1, false>(ncclDevKernelArgsStorage<4096ul>)", "nccl", "send_recv"),
    ("mscclKernel_Sum_hip_bfloat16_Simple_false(ncclDevComm*, mscclAlgo*, mscclWork*)", "nccl", "send_recv"),
    ("void hybrid_ep::dispatch_kernel<unsigned char, 8>(hybrid_ep::dispatch_kernel_param_t)", "deep_ep", "all_to_all"),
    ("ncclSymkDevKernel_AllGather_ST(ncclSymkDevWorkArgs)", "nccl", "all_gather"),
    ("void tensorrt_llm::kernels::mnnvl::twoshot_allreduce_kernel<8, __nv_bfloat16>(int)", "trtllm", "all_reduce"),
    ("tensorrt_llm::kernels::moeAllToAllKernel(MoeEpWorldInfo, MoeCommWorkspace)", "trtllm", "all_to_all"),
    ("void mori::moe::EpDispatchIntraNodeKernel<hip_bfloat16>(int)", "mori", "all_to_all"),
    ("EpCombineInterNodeV1Kernel_bf16", "mori", "all_to_all"),
    ("void a2a_dispatch_send_kernel<true, 16ul>(unsigned long)", "pplx", "all_to_all"),
    ("void aiter::allgather_lastdim<__hip_bfloat16, 8>(aiter::RankData*)", "custom_all_reduce", "all_gather"),
    ("void alltoall_on_stream_kernel<float>(int, float*, float const*, unsigned long)", "nvshmem", "all_to_all"),
    ("void fcollect_on_stream_kernel<float>(int, float*, float const*, unsigned long)", "nvshmem", "all_gather"),
    ("void rdxn_on_stream_kernel<float, (rdxn_ops)4>(int, float*)", "nvshmem", "all_reduce"),
    ("void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*)", "deep_ep", "all_to_all"),
    ("void deep_ep::internode_ll::combine<true, 7168, 9, 512>(void*)", "deep_ep", "all_to_all"),
    ("void deep_ep::elastic::dispatch_impl<true, 3, 14336, 256, 8>(void*)", "deep_ep", "all_to_all"),
    ("void fbgemm_gpu::two_shot_all_reduce<8, false, true>(int)", "custom_all_reduce", "all_reduce"),
    ("void fbgemm_gpu::reduce_scatter<8, true>(int)", "custom_all_reduce", "reduce_scatter"),
    (
        "void (anonymous namespace)::all_reduce_one_shot_push_kernel<__half, 4u, true>((anonymous namespace)::Data)",
        "custom_all_reduce",
        "all_reduce",
    ),
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
    ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float> >", "row_wise"),
    ("void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float> >", "streaming"),
    ("void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long)", "row_wise"),
    ("void at::native::(anonymous namespace)::max_pool_forward_nhwc<c10::BFloat16, int>(int)", "row_wise"),
    ("void at_cuda_detail::cub::detail::radix_sort::DeviceRadixSortOnesweepKernel<long>(int)", "row_wise"),
    ("triton_red_fused__to_copy_mean_3", "streaming"),
    ("triton_poi_fused_add_mul_1", "streaming"),
    ("void deep_ep::layout::get_dispatch_layout<256, 32, 8>(long const*, int*)", "other"),
    ("void deep_ep::internode::get_dispatch_layout<256, 32, 8>(long const*, int*)", "other"),
    ("void deep_ep::elastic::dispatch_copy_epilogue_impl<true>(void*)", "streaming"),
    ("void fbgemm_gpu::permute_2D_data_kernel<false, int, long>(int)", "other"),
    ("my_own_kernel", "other"),
    # Triton and hand-written matmuls: the tutorials', Inductor's, and those that people call by the operation
    ("mm", "matmul"),
    ("mm_kernel", "matmul"),
    ("_mm_kernel_0d1d2d", "matmul"),
    ("bmm", "matmul"),
    ("tile_mm(float const*, float const*, float*, int, int, int)", "matmul"),
    ("triton_mm", "matmul"),
    ("triton_bmm_3", "matmul"),
    ("triton_tem_fused_addmm_relu_2", "matmul"),
    ("triton_tem_fused__scaled_mm_0", "matmul"),
    ("matmul_kernel", "matmul"),
    ("_matmul_kernel", "matmul"),
    ("matmul_kernel_persistent", "matmul"),
    ("matmul_kernel_tma_persistent", "matmul"),
    ("grouped_matmul_kernel", "matmul"),
    ("_w8a8_block_fp8_matmul", "matmul"),
    ("fused_moe_kernel", "matmul"),
    ("gmm_kernel", "matmul"),
    ("void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 4096u, 7168u>(float*)", "matmul"),
    ("void marlin::Marlin<__nv_bfloat16, 256, 1, 8, 8, 4>(int4 const*)", "matmul"),
    ("Custom_Cijk_Alik_Bljk_HHS_BH_MT128x128x64", "matmul"),
    ("void ck_tile::kentry<256, 2, ck_tile::GemmKernel<int>>(int)", "matmul"),
    ("_chunk_scan_fwd_kernel", "matmul"),
    ("_chunk_state_fwd_kernel", "matmul"),
    ("_bmm_chunk_fwd_kernel", "matmul"),
    ("chunk_gated_delta_rule_fwd_kernel_h_blockdim64", "matmul"),
    ("chunk_fwd_kernel_o", "matmul"),
    # none of these multiplies matrices
    ("fma_kernel", "other"),
    ("fma_kernel(float*, int)", "other"),
    ("_rms_norm", "streaming"),
    ("_rms_norm_kernel", "streaming"),
    ("void vllm::rms_norm_kernel<c10::BFloat16, 8>(c10::BFloat16*)", "streaming"),
    ("_layer_norm_fwd_1pass_kernel", "streaming"),
    ("_layer_norm_fwd_fused", "streaming"),
    ("softmax_kernel", "streaming"),
    ("comm_kernel", "other"),
    ("summary_kernel", "other"),
    ("hammer", "other"),
    ("triton_poi_fused_addmm_relu_0", "streaming"),
    ("triton_red_fused_mm_3", "streaming"),
    ("triton_poi_fused__scaled_dot_product_flash_attention_1", "streaming"),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, float>(int)", "streaming"),
    ("void at::cuda::detail::prepare_grouped_gemm_data<cutlass::bfloat16_t>(int)", "other"),
    ("void selective_scan_fwd_kernel<Selective_Scan_fwd_kernel_traits<128, 16>>(SSMParamsBase)", "other"),
    ("_state_passing_fwd_kernel", "other"),
    ("void causal_conv1d_fwd_kernel<Causal_conv1d_fwd_kernel_traits<128, 4>>(int)", "streaming"),
    # attention, and what runs before and after it
    ("_attn_fwd", "attention"),
    ("_attn_bwd", "attention"),
    ("triton_tem_fused_flex_attention_0", "attention"),
    ("_fwd_grouped_kernel_stage1", "attention"),
    ("void flashinfer::BatchPrefillWithPagedKVCacheKernel<int>(int)", "attention"),
    ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<int>>>(int)", "attention"),
    ("_attn_bwd_preprocess", "streaming"),
    ("void flash::flash_bwd_dot_do_o_kernel<true, 1>(flash::Flash_bwd_params)", "streaming"),
    ("void flashinfer::norm::RMSNormKernel<8u, __nv_bfloat16>(int)", "streaming"),
    ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>(int)", "streaming"),
]


@pytest.mark.parametrize(("name", "library", "collective"), COMMUNICATION)
def test_a_communication_kernel_is_known_by_its_name(name: str, library: str, collective: str) -> None:
    rule = classify_kernel(name)
    assert (rule.kind, rule.library, rule.collective) == ("communication", library, collective)


@pytest.mark.parametrize(("name", "character"), COMPUTATION)
def test_a_computation_kernel_has_its_character(name: str, character: str) -> None:
    rule = classify_kernel(name)
    assert (rule.kind, rule.character) == ("computation", character)


@pytest.mark.parametrize(
    ("name", "operand", "element_type"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "", "bf16"),
        ("nvjet_sm90_hsh_256x128_64x4_1x2_h_bz_coopA_TNT", "", "fp16"),
        ("nvjet_sm90_qqtst_128x256_128x4_2x1_v_bz_TNT", "c10::BFloat16", "fp8"),
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn", "", "bf16"),
        ("sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize96x64x32", "", "bf16"),
        ("turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_tn", "", "fp16"),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x128x16", "float", "tf32"),
        ("cutlass_80_tensorop_s1688gemm_128x128_16x5_nn_align4", "float", "tf32"),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_nt_n_tilesize32x64x8_stage3_ffma", "float", "fp32"),
        ("ampere_sgemm_128x64_tn", "", "fp32"),
        ("cutlass_80_tensorop_d884gemm_64x64_16x4_nn_align1", "double", "fp64"),
        ("Cijk_Ailk_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64", "", "bf16"),
        ("Cijk_Ailk_Bljk_HHS_BH_MT128x128x64", "", "fp16"),
        ("triton_tem_fused_mm_0", "c10::Half", "fp16"),
        ("matmul_kernel", "float", "fp32"),
        ("matmul_kernel", "", None),
    ],
)
def test_a_matmuls_type_is_in_its_kernels_name_or_that_of_its_operands(
    name: str, operand: str, element_type: str | None
) -> None:
    assert matmul_type(name, operand) == element_type


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
        ("[[rule]]\nsource = 'x'\npattern = '('", "is not a regular expression"),
        ("[[rule]]\nsource = 'x'\npattern = 'x'\nis_waiting = true", "only a communication kernel can be waiting"),
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
