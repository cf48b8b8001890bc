"""Names of kernels for people: the same from mangled and demangled names, and what is no name of C++ stays as it is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.kernel_names import LONGEST_NAME, base_name, readable, short_name

# of torch 2.9, as the driver gives them and as the C++ library demangles them
SILU = (
    "_ZN2at6native29vectorized_elementwise_kernelILi8EZZZNS0_62_GLOBAL__N__7d4ed096_23_ActivationSiluKernel_cu_751192d7_15595"
    "20silu_backward_kernelERNS_18TensorIteratorBaseEENKUlvE_clEvENKUlvE2_clEvEUlN3c108BFloat16ES8_E_St5arrayIPcLm3EEEEviT0_"
    "T1_"
)
NORMS = (
    "_ZN2at6native51_GLOBAL__N__d9d46141_18_ForeachReduceOp_cu_b83ec48c25multi_tensor_apply_kernelINS1_18TensorListMetadataI"
    "Li1EEENS0_13LpNormFunctorIN3c108BFloat16ELNS0_8NormTypeE1ES7_Li1ELi1ELi0EEEJPfiEEEvT_T0_DpT1_"
)
ROWS = "_ZN2at6native59_GLOBAL__N__4b0cc4ca_26_EmbeddingBackwardKernel_cu_5d1cf09b15sum_and_scatterIN3c108BFloat16ElEEvPKT0_"


@pytest.mark.parametrize(
    ("mangled", "demangled", "short", "base"),
    [
        (
            SILU,
            "void at::native::vectorized_elementwise_kernel<8, at::(anonymous namespace)::silu_backward_kernel(T&)>",
            "vectorized_elementwise_kernel (silu_backward_kernel)",
            "vectorized_elementwise_kernel",
        ),
        (
            NORMS,
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::LpNormFunctor<float> >(int)",
            "multi_tensor_apply_kernel (LpNormFunctor)",
            "multi_tensor_apply_kernel",
        ),
        (
            ROWS,
            "void at::native::(anonymous namespace)::sum_and_scatter<c10::BFloat16, long>(long const*, c10::BFloat16*)",
            "sum_and_scatter",
            "sum_and_scatter",
        ),
        (
            "_ZN7cutlass13device_kernelINS_4gemm6kernelEEEvNT_6ParamsE",
            "void cutlass::device_kernel<cutlass::gemm::kernel>(cutlass::gemm::Params)",
            "cutlass::device_kernel",
            "cutlass::device_kernel",
        ),
        (
            "_Z31ncclDevKernel_AllGather_RING_LL24ncclDevKernelArgsStorageILm4096EE",
            "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "ncclDevKernel_AllGather_RING_LL",
            "ncclDevKernel_AllGather_RING_LL",
        ),
    ],
)
def test_mangled_and_demangled_names_read_alike(mangled: str, demangled: str, short: str, base: str) -> None:
    for name in (mangled, demangled):
        assert readable(name) == short_name(name) == short
        assert base_name(name) == base


def test_a_name_that_was_cut_is_read_as_far_as_it_goes() -> None:
    assert readable(SILU[:60] + "*") == "vectorized_elementwise_kernel"


@pytest.mark.parametrize(
    "words",
    [
        "18 collectives",
        "experts' all_to_all",
        "tensor-parallel linears (57)",
        "Memcpy DtoD (Device -> Device)",
        "kernel[/bold]<:smile:>",
        "void at::native::*",
        "_Z*gemm*",
        "_Z",
        "",
    ],
)
def test_other_words_and_patterns_stay_as_they_are(words: str) -> None:
    assert readable(words) == base_name(words) == words


@given(st.text(max_size=200), st.sampled_from(["", "_Z", "_ZN", "void ", "at::"]))
def test_any_text_has_a_name_that_fits_a_line(text: str, start: str) -> None:
    assert len(readable(start + text)) <= LONGEST_NAME
    assert len(short_name(start + text)) <= LONGEST_NAME


def test_absurd_lengths_in_a_mangled_name_do_no_harm() -> None:
    assert len(readable(f"_ZN2at{'9' * 5000}x")) == LONGEST_NAME
