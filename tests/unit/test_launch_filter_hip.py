"""The experimental filter for AMD before a double of HIP: never run on AMD hardware, of which these tests say nothing."""

from dataclasses import replace
from pathlib import Path

import pytest

from counterpoint.launch_filter.control_block import block_paths
from counterpoint.launch_filter.rules import FilterRule
from helpers.build_filter import Built, build_filter, build_for_hip
from helpers.filter_session import Session, session

STUB_APIS = ("hipLaunchKernel", "hipLaunchKernel_spt", "hipExtLaunchKernel", "hipLaunchKernelExC")
FUNCTION_APIS = ("hipModuleLaunchKernel", "hipExtModuleLaunchKernel", "hipDrvLaunchKernelEx")
COOPERATIVE_APIS = ("hipLaunchCooperativeKernel", "hipModuleLaunchCooperativeKernel")
EXTRA = {"hipExtLaunchKernel": 7 + 20 + 300 + 1000, "hipExtModuleLaunchKernel": 7 + 20 + 300 + 1000}
CAP = FilterRule(pattern="capped*", dynamic_shared_bytes=20_000, ctas_per_sm=3)


pytestmark = pytest.mark.xdist_group("filter for AMD")  # one worker, which builds it once


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build_for_hip(tmp_path_factory.mktemp("built"))


def reached(api: str, name: str, shared: int, *, grid_x: int = 12, grid_y: int = 3) -> str:
    extra = EXTRA.get(api, 7)
    return f"reached {api} {name} shared={shared} grid={grid_x},{grid_y},1 block=64,2,1 argument=42 extra={extra}"


@pytest.mark.parametrize("route", ["linked", "dlsym", "proc"])
@pytest.mark.parametrize("api", [*STUB_APIS, *FUNCTION_APIS])
def test_every_entry_point_gets_the_cap(built: Built, tmp_path: Path, route: str, api: str) -> None:
    items = (12 * 64, 6) if api == "hipExtModuleLaunchKernel" else (12, 3)
    with session(built, tmp_path, CAP) as client:
        client.ask(f"find {route}")
        client.ask(f"make capped 100 {'stub' if api in STUB_APIS else 'function'}")
        for shared in (0, 20_000):
            answer = client.ask(f"launch {api} capped {shared}")
            assert answer == [reached(api, "capped", 20_000, grid_x=items[0], grid_y=items[1]), "result 0"]
        state = client.state()
        assert (state.driver, state.num_launches) == ("hip", 2)
        (counters,) = state.counters
        assert (counters.num_matched, counters.num_capped, counters.residency_found) == (2, 2, 3)
        (seen,) = state.functions
        assert (seen.grid, seen.block, seen.static_shared_bytes, seen.registers_per_thread) == (
            (12, 3, 1),
            (64, 2, 1),
            100,
            64,
        )


def test_it_says_once_that_it_is_experimental(built: Built, tmp_path: Path) -> None:
    with session(built, tmp_path, CAP) as client:
        client.ask("find dlsym")
        client.ask("make capped 0 stub")
        for _ in range(2):
            client.ask("launch hipLaunchKernel capped 0")
    assert (
        client.stderr == "counterpoint: the launch filter for AMD GPUs is experimental: it has never run on AMD hardware.\n"
    )


def test_the_usual_build_leaves_launches_on_amd_alone(built: Built, tmp_path: Path) -> None:
    usual = replace(built, preload=build_filter(tmp_path))
    with session(usual, tmp_path, CAP) as client:
        client.ask("find dlsym")
        client.ask("make capped 0 stub")
        assert client.ask("launch hipLaunchKernel capped 5")[0].startswith("reached hipLaunchKernel capped shared=5 ")
    assert client.stderr == ""
    assert block_paths(tmp_path / "run") == []


@pytest.mark.parametrize("api", [*STUB_APIS, *FUNCTION_APIS, *COOPERATIVE_APIS])
def test_without_a_run_launches_are_as_they_were(built: Built, api: str) -> None:
    with Session(built, None) as client:
        client.ask("find dlsym")
        client.ask(f"make capped 0 {'stub' if 'Module' not in api and 'Drv' not in api else 'function'}")
        (line, result) = client.ask(f"launch {api} capped 5")
        assert line.startswith(f"reached {api} capped shared=5 ")
        assert result == "result 0"


def test_cooperative_launches_are_left_alone(built: Built, tmp_path: Path) -> None:
    with session(built, tmp_path, CAP) as client:
        client.ask("find dlsym")
        client.ask("make capped_stub 0 stub")
        client.ask("make capped_function 0 function")
        launches = [*((api, "capped_function" if "Module" in api else "capped_stub", "") for api in COOPERATIVE_APIS)]
        launches += [
            ("hipLaunchKernelExC", "capped_stub", "cooperative"),
            ("hipDrvLaunchKernelEx", "capped_function", "cooperative"),
        ]
        for api, name, how in launches:
            (line, _) = client.ask(f"launch {api} {name} 8 {how}")
            assert f"{name} shared=8 " in line
        (counters,) = client.state().counters
        assert (counters.num_matched, counters.num_capped, counters.num_refused) == (4, 0, 4)
        assert counters.refusal.startswith("the launch is cooperative")


def test_what_hip_cannot_do_is_refused_with_what_to_do(built: Built, tmp_path: Path) -> None:
    large = FilterRule(pattern="large", dynamic_shared_bytes=65_000)
    priority, hold = FilterRule(pattern="nccl*", priority=-1), FilterRule(pattern="gemm", hold_us=5.0)
    carveout = FilterRule(pattern="tiled", dynamic_shared_bytes=0, carveout_percent=60)
    with session(built, tmp_path, large, priority, hold, carveout) as client:
        client.ask("find dlsym")
        for name in ("large", "ncclDevKernel", "gemm", "tiled"):
            client.ask(f"make {name} 1000 stub")
            (line, _) = client.ask(f"launch hipLaunchKernel {name} 8")
            assert f"{name} shared=8 " in line
        refusals = [counters.refusal for counters in client.state().counters]
        assert refusals[0] == "66,000 bytes exceed the 65,536 that a workgroup may use"
        assert "DEBUG_HIP_IGNORE_STREAM_PRIORITY=0" in refusals[1]
        assert "a kernel compiled for each GPU" in refusals[2]
        assert refusals[3].startswith("AMD GPUs have no carveout")
        assert all(counters.num_refused == 1 for counters in client.state().counters)


def test_a_refused_cap_is_launched_as_it_was_and_not_tried_again(built: Built, tmp_path: Path) -> None:
    with session(built, tmp_path, CAP) as client:
        client.ask("find dlsym")
        client.ask("make capped 0 function")
        client.ask("refuse capped 10000")
        for _ in range(3):
            assert client.ask("launch hipModuleLaunchKernel capped 9") == [
                reached("hipModuleLaunchKernel", "capped", 9),
                "result 0",
            ]
        assert client.ask("launch hipModuleLaunchKernel capped 12000") == ["result 701"]  # the caller's own error
        (counters,) = client.state().counters
        assert (counters.num_capped, counters.num_retried, counters.num_refused) == (0, 1, 4)


def test_shared_memory_is_never_lowered_and_captures_get_proven_caps_only(built: Built, tmp_path: Path) -> None:
    with session(built, tmp_path, CAP) as client:
        client.ask("find dlsym")
        client.ask("make capped 0 stub")
        client.ask("capture 1")
        assert client.ask("launch hipLaunchKernel capped 1") == [reached("hipLaunchKernel", "capped", 1), "result 0"]
        client.ask("capture 0")
        assert client.ask("launch hipLaunchKernel capped 30000") == [
            reached("hipLaunchKernel", "capped", 30_000),
            "result 0",
        ]
        assert client.ask("launch hipLaunchKernel capped 1") == [reached("hipLaunchKernel", "capped", 20_000), "result 0"]
        client.ask("capture 1")
        assert client.ask("launch hipLaunchKernel capped 1") == [reached("hipLaunchKernel", "capped", 20_000), "result 0"]
        client.ask("unload")
        client.block().swap([])
        assert client.ask("launch hipLaunchKernel capped 1") == [reached("hipLaunchKernel", "capped", 1), "result 0"]
