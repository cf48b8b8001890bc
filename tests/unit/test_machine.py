"""Shipped machine files are complete and sourced; absurd ones are refused in one line."""

from importlib import resources
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from counterpoint.errors import MachineError
from counterpoint.footprints import communication_footprint, known_on
from counterpoint.links import Link
from counterpoint.machine import Gpu, Machine, load_machine, machine_for_device, machine_names

WHOLE = ["a100", "a40", "b200", "h100", "h200", "l40s", "mi250x", "mi300x"]
VARIANTS = {  # with the base of each
    "a100_40gb": "a100",
    "a100_pcie": "a100",
    "a10g": "a40",
    "a800": "a100",
    "b300": "b200",
    "gb200": "b200",
    "gb300": "gb200",
    "gh200": "h200",
    "h100_nvl": "h100",
    "h100_pcie": "h100",
    "h20": "h200",
    "h800": "h100",
    "l4": "l40s",
    "mi210": "mi250x",
    "mi325x": "mi300x",
    "mi350x": "mi355x",
    "mi355x": "mi300x",
    "rtx_3090": "a40",
    "rtx_4090": "l40s",
    "rtx_a6000": "a40",
}
NAMES = sorted([*WHOLE, *VARIANTS])
H200 = load_machine("h200")


def shipped_text(name: str) -> str:
    return resources.files("counterpoint").joinpath("machines", f"{name}.toml").read_text()


def figures(machine: Machine) -> set[str]:
    """Names of everything in a machine that is a figure and not a label."""
    names = {"num_gpus", "device_names"}
    names |= {f"gpu.{field}" for field in Gpu.__struct_fields__ if field != "vendor"}
    for part in ("link", "network"):
        link = getattr(machine, part)
        if link is not None:
            labels = {"kind", "topology"} if link.pairs else {"kind", "topology", "pairs"}
            labels |= {"has_peer_access"} if part == "network" else set()
            names |= {f"{part}.{field}" for field in Link.__struct_fields__ if field not in labels}
    return names


def test_the_usual_machines_are_shipped() -> None:
    assert machine_names() == NAMES
    assert machine_names(variants=False) == WHOLE


@pytest.mark.parametrize("name", VARIANTS)
def test_what_differs_from_the_base_has_a_source_of_its_own(name: str) -> None:
    base, variant = load_machine(VARIANTS[name]), load_machine(name)
    differs = {"num_gpus"} if base.num_gpus != variant.num_gpus else set()
    for part in ("gpu", "link", "network") if base.network else ("gpu", "link"):
        pairs = [(field, getattr(base, part), getattr(variant, part)) for field in getattr(base, part).__struct_fields__]
        differs |= {f"{part}.{field}" for field, old, new in pairs if getattr(old, field) != getattr(new, field)}
    labels = {"link.kind", "link.topology", "link.pairs", "gpu.compute_capability"}
    same = {figure for figure in differs - labels if variant.sources[figure] == base.sources[figure]}
    assert same <= {"link.per_peer_bytes_per_s", "network.per_peer_bytes_per_s"}  # "as link.bytes_per_s"


def test_a_variant_may_leave_out_what_only_its_base_has() -> None:
    assert load_machine("mi300x").gpu.tf32_flops_per_s is not None
    assert load_machine("mi355x").gpu.tf32_flops_per_s is load_machine("mi350x").gpu.tf32_flops_per_s is None
    assert load_machine("mi250x").link.pairs
    assert not load_machine("mi210").link.pairs


def test_a_variant_differs_from_its_base_in_the_figures_of_its_file_only() -> None:
    base, variant = load_machine("h100"), load_machine("h800")
    own = replace(base.gpu, hbm_bytes=variant.gpu.hbm_bytes, fp64_flops_per_s=1e12)
    assert (variant.num_gpus, variant.gpu, variant.network) == (base.num_gpus, own, base.network)
    assert variant.link == replace(base.link, bytes_per_s=2e11, per_peer_bytes_per_s=2e11)
    assert {name for name, source in variant.sources.items() if source != base.sources[name]} == {
        "device_names",
        "gpu.hbm_bytes",
        "gpu.fp64_flops_per_s",
        "link.bytes_per_s",
    }


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_of_a_shipped_machine_has_a_source_and_every_source_a_figure(name: str) -> None:
    machine = load_machine(name)
    assert machine.name == name
    assert set(machine.sources) == figures(machine)


@pytest.mark.parametrize("name", NAMES)
def test_every_source_names_a_document_with_its_year_or_says_measured_or_assumed(name: str) -> None:
    for figure, source in load_machine(name).sources.items():
        has_year = any(str(year) in source for year in range(2018, 2027))
        assert has_year or source.startswith(("assumed: ", "as link.bytes_per_s: ", "as network.bytes_per_s: ")), figure
        assert len(source) > 15, figure


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_machine_round_trips_through_toml(name: str) -> None:
    machine = load_machine(name)
    assert msgspec.toml.decode(msgspec.toml.encode(machine), type=Machine) == machine


def test_h200_figures_are_those_the_driver_reports() -> None:
    gpu = H200.gpu
    assert (gpu.num_sms, gpu.max_warps_per_sm, gpu.max_ctas_per_sm) == (132, 64, 32)
    assert (gpu.shared_bytes_per_sm, gpu.max_shared_bytes_per_cta) == (233_472, 232_448)
    assert gpu.registers_per_sub_partition * gpu.num_sub_partitions == 65_536
    assert (gpu.greatest_priority, gpu.num_copy_engines, gpu.l2_bytes) == (-5, 3, 62_914_560)
    assert H200.link.bytes_per_s == 450e9


@pytest.mark.parametrize("name", NAMES)
def test_peak_fp32_rate_is_near_lanes_times_clock(name: str) -> None:
    # An independent check of SM count, clock and rate against each other: 64 or 128 lanes per SM, an fma is 2 operations,
    # and MI300X counts packed and dual-issued fp32 (256 lanes).
    gpu = load_machine(name).gpu
    lanes = 64 if gpu.compute_capability in ("8.0", "gfx90a") else 128
    assert gpu.fp32_flops_per_s in [
        pytest.approx(gpu.num_sms * lanes * issues * 2 * gpu.clock_mhz * 1e6, rel=0.03) for issues in (1, 2)
    ]


def test_priority_is_ineffective_exactly_on_amd() -> None:
    for name in NAMES:
        gpu = load_machine(name).gpu
        assert gpu.priority_is_effective == (gpu.vendor == "nvidia")


def test_a_mesh_gives_one_peer_less_than_all_and_a_switch_the_same() -> None:
    for name in NAMES:
        link = load_machine(name).link
        assert (link.per_peer_bytes_per_s < link.bytes_per_s) == (link.topology == "direct")
        assert (link.topology == "direct") == (link.kind == "xgmi" or name == "gh200")


@pytest.mark.parametrize(
    ("device_name", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA B200", "b200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI250X", "mi250x"),
        ("NVIDIA H800", "h800"),
        ("NVIDIA A100-SXM4-40GB", "a100_40gb"),
        ("AMD Instinct MI325X", "mi325x"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("NVIDIA A800-SXM4-80GB", "a800"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("AMD Instinct MI355X", "mi355x"),
        ("NVIDIA GeForce RTX 4090", "rtx_4090"),
        ("NVIDIA A10G", "a10g"),
    ],
)
def test_a_machine_is_found_by_the_name_its_driver_prints(device_name: str, name: str) -> None:
    found = machine_for_device(device_name)
    assert found is not None
    assert found.name == name


def test_a_card_that_only_resembles_a_known_one_is_not_taken_for_it() -> None:
    assert machine_for_device("NVIDIA H20-3e") is None
    assert machine_for_device("NVIDIA A100-PCIE-40GB") is None


def test_a_name_is_taken_in_either_case() -> None:
    assert load_machine("H200") == H200


def test_an_unknown_machine_lists_the_known_ones() -> None:
    with pytest.raises(MachineError, match=r"Unknown machine 'h900'\. Known: a100, a100_40gb, .*machine file \(\.toml\)\."):
        load_machine("h900")


def test_a_missing_figure_names_file_and_field_in_one_line(tmp_path: Path) -> None:
    lines = [line for line in shipped_text("h200").splitlines() if not line.startswith("num_sms")]
    path = tmp_path / "mine.toml"
    path.write_text("\n".join(lines))
    with pytest.raises(MachineError, match=r"mine\.toml: .*gpu lacks 'num_sms'") as caught:
        load_machine(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "absurd", "message"),
    [
        ("num_sms = 132", "num_sms = 131", r"gpu\.sms_per_gpc must be positive and add up to num_sms = 131"),
        (
            "clock_mhz = 1980.0",
            "clock_mhz = 1.98",
            r"gpu\.clock_mhz must be from 100 to 10,000; found 1\.98\. Check its unit",
        ),
        ("hbm_bytes_per_s = 4.8e12", "hbm_bytes_per_s = 4800.0", r"gpu\.hbm_bytes_per_s must be from .*; found 4,800\.0"),
        ("hbm_bytes_per_s = 4.8e12", "hbm_bytes_per_s = nan", r"gpu\.hbm_bytes_per_s must be above 0 .*; found nan"),
        ("hbm_bytes_per_s = 4.8e12", "hbm_bytes_per_s = 0.0", r"gpu\.hbm_bytes_per_s must be above 0 .*; found 0\.0"),
        (
            "max_warps_per_sm = 64",
            "max_warps_per_sm = 62",
            r"gpu\.max_warps_per_sm must be a multiple of num_sub_part.*found 62",
        ),
        ("max_warps_per_sm = 64", "max_warps_per_sm = 28", r"gpu\.max_threads_per_cta must not exceed the SM's 896 threads"),
        (
            "max_ctas_per_sm = 32",
            "max_ctas_per_sm = 65",
            r"gpu\.max_ctas_per_sm must not exceed max_warps_per_sm = 64; found 65",
        ),
        (
            "registers_per_sub_partition = 16_384",
            "registers_per_sub_partition = 16_000",
            r"gpu\.registers_per_sub_partition must be a multiple of register_allocation_unit = 256; found 16000",
        ),
        (
            "max_shared_bytes_per_cta = 232_448",
            "max_shared_bytes_per_cta = 233_472",
            r"gpu\.max_shared_bytes_per_cta must not exceed 232448, .* found 233472",
        ),
        (
            "shared_bytes_per_sm = 233_472",
            "shared_bytes_per_sm = 228",
            r"gpu\.carveout_steps_bytes must rise .* = 228; found",
        ),
        ("greatest_priority = -5", "greatest_priority = 5", r"gpu\.greatest_priority must be from -1,000 to 0; found 5"),
        ("named_barriers_per_sm = 64", "named_barriers_per_sm = 8", r"gpu\.named_barriers_per_cta must not exceed .* = 8"),
        (
            "reserved_shared_bytes_per_cta = 1024",
            "reserved_shared_bytes_per_cta = -1",
            r"gpu\.reserved_shared_bytes_per_cta must be 0 or more; found -1",
        ),
        ("num_gpus = 8", "num_gpus = 0", r"num_gpus must be from 1 to 1024; found 0"),
        ("latency_us = 1.0", "latency_us = -1.0", r"link latency_us must be above 0 .* found -1\.0"),
        (
            "per_peer_bytes_per_s = 4.5e11",
            "per_peer_bytes_per_s = 1e-300",
            r"link per_peer_bytes_per_s must be at least 1e\+06",
        ),
        ("\nbytes_per_s = 4.5e11", "\nbytes_per_s = 1e11", r"link per_peer_bytes_per_s must be at most 1000.*; found 4500"),
        (
            'compute_capability = "9.0"',
            'compute_capability = "abc"',
            r'gpu\.compute_capability of an nvidia GPU must be as in "9\.0"; found \'abc\'',
        ),
        ('vendor = "nvidia"', 'vendor = "amd"', r'gpu\.compute_capability of an amd GPU must be as in "gfx942"'),
        ('vendor = "nvidia"', 'vendor = "intel"', r"gpu\.vendor must be one of 'amd', 'nvidia'; found 'intel'"),
        ("num_sms = 132", 'num_sms = "many"', r"gpu\.num_sms must be a whole number; found 'many'"),
        ("num_sms = 132", "num_sms = 132\nnum_tpcs = 66", r"gpu has an unknown field 'num_tpcs'\. Did you mean 'num_\w+'\?"),
    ],
)
def test_an_absurd_figure_is_refused_in_one_line_that_names_file_field_limit_and_value(
    tmp_path: Path, line: str, absurd: str, message: str
) -> None:
    text = shipped_text("h200")
    assert line in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(line, absurd, 1))
    with pytest.raises(MachineError, match=message) as caught:
        load_machine(str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_absent_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"Cannot read .*absent\.toml: No such file"):
        load_machine(str(tmp_path / "absent.toml"))


def test_a_gpu_built_in_code_is_checked_too() -> None:
    with pytest.raises(MachineError, match=r"gpu\.num_copy_engines must be from 1 to 64; found 65"):
        replace(H200.gpu, num_copy_engines=65)


@pytest.mark.parametrize("name", NAMES)
def test_the_peak_rates_of_matmuls_keep_the_order_that_their_sizes_set(name: str) -> None:
    # Narrower types are never slower, and tf32 runs at half the rate of bf16 wherever there are units for it. Blackwell
    # Ultra has few units for int8.
    rates = load_machine(name).gpu.matmul_rates()
    for wider, narrower in (("fp64", "fp32"), ("fp32", "bf16"), ("fp16", "fp8"), ("bf16", "int8")):
        if {wider, narrower} <= set(rates) and (narrower != "int8" or name not in ("b300", "gb300")):
            assert rates[wider] <= 1.01 * rates[narrower], (wider, narrower)
    assert rates["fp16"] == rates["bf16"]
    if "tf32" in rates:
        assert rates["tf32"] == pytest.approx(rates["bf16"] / 2, rel=0.03)


def test_a_type_that_the_gpu_does_not_have_is_refused_in_one_line_that_names_those_it_has() -> None:
    with pytest.raises(MachineError) as caught:
        load_machine("a100").matmul_flops_per_s("fp8")
    assert str(caught.value) == (
        "Machine 'a100' has no rate for fp8 matrix multiplications, only for bf16, fp16, int8, tf32, fp32, fp64. "
        "Choose one of these, or state the rate in a machine file of your own."
    )


@pytest.mark.parametrize("name", NAMES)
def test_what_collectives_launch_is_measured_only_where_they_ran(name: str) -> None:
    known = known_on(load_machine(name).gpu, "nccl")
    assert known.status == ("measured" if load_machine(name).gpu.compute_capability == "9.0" else "assumed")
    assert ("H200" in known.source) or known.status == "assumed"
    assert known.footprint() == communication_footprint(load_machine(name).gpu, "nccl")
