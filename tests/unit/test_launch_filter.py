"""The launch filter in a process of its own before a double of libcuda: how launches are found, and what becomes of them."""

from pathlib import Path

import pytest

from counterpoint.launch_filter.control_block import RuleCounters
from counterpoint.launch_filter.rules import FilterRule
from helpers.build_filter import Built
from helpers.filter_session import Launched, Session, session

ROUTES = ("linked", "dlsym", "dlvsym", "proc", "proc_v2", "proc_of_proc", "old_proc_of_proc", "default", "next", "program")
PER_THREAD_ROUTES = ("proc_per_thread", "twin")
CAP = FilterRule(pattern="cap*", dynamic_shared_bytes=60_000, ctas_per_sm=3, carveout_percent=100)
PRIORITY = FilterRule(pattern="nccl*", priority=-5)
COLLECTIVE = FilterRule(pattern="nccl*", is_collective=True)
HOLD = FilterRule(pattern="gemm", hold_us=5.0)
COLLECTIVE_STREAM, GEMM_STREAM = 9, 7


def shapes(launched: Launched) -> list[tuple[str, int, int]]:
    return [(reached.name, reached.shared, reached.priority) for reached in launched.reached]


# --- how launches are found


@pytest.mark.parametrize("route", [*ROUTES, *PER_THREAD_ROUTES])
def test_every_way_to_find_launches_leads_through_the_filter(built: Built, tmp_path: Path, route: str) -> None:
    with session(built, tmp_path, CAP, PRIORITY) as client:
        assert client.find(route)
        client.make("capped")
        client.make("ncclDevKernel_AllReduce", is_kernel=True)
        suffix = "_ptsz" if route in PER_THREAD_ROUTES else ""
        for how, api in (("", "cuLaunchKernel"), ("ex", "cuLaunchKernelEx")):
            capped = client.launch("capped", 1000, how=how)
            assert (capped.result, capped.last.api, capped.last.shared) == (0, api + suffix, 60_000)
            assert (capped.last.argument, capped.last.grid, capped.last.block, capped.last.stream) == (42, 132, 128, 7)
            raised = client.launch("ncclDevKernel_AllReduce", how=how)
            assert (raised.result, raised.last.api, raised.last.priority) == (0, "cuLaunchKernelEx" + suffix, -5)
        together = client.launch("capped", command="cooperative")
        assert (together.last.api, together.last.shared) == ("cuLaunchCooperativeKernel" + suffix, 0)
        assert client.state().num_launches == 5
        assert client.state().num_launches_ex == 2


def test_the_twins_for_either_default_stream_are_kept_apart(built: Built, tmp_path: Path) -> None:
    with session(built, tmp_path, CAP) as client:
        client.make("capped")
        for route, api in (
            ("proc", "cuLaunchKernel"),
            ("proc_per_thread", "cuLaunchKernel_ptsz"),
            ("proc", "cuLaunchKernel"),
        ):
            client.find(route)
            assert (client.launch("capped").last.api, client.launch("capped", how="ex").last.api) == (
                api,
                api.replace("Kernel", "KernelEx"),
            )


@pytest.mark.parametrize("route", [*ROUTES, *PER_THREAD_ROUTES])
def test_without_a_run_launches_are_as_they_were(built: Built, route: str) -> None:
    with Session(built, None) as client:
        assert client.find(route)
        client.make("capped")
        launched = client.launch("capped", 1000, how="ex priority=-1")
        assert (launched.last.shared, launched.last.priority, launched.last.attributes) == (1000, -1, 1)
    assert client.stderr == ""


def test_a_folder_without_a_template_changes_nothing(built: Built, tmp_path: Path) -> None:
    with Session(built, tmp_path) as client:
        client.find()
        client.make("capped")
        assert client.launch("capped").last.shared == 0
    assert list(tmp_path.iterdir()) == []
    assert client.stderr == ""


# --- caps


def test_a_cap_raises_shared_memory_carveout_and_limit_and_is_verified_by_the_driver(built: Built, tmp_path: Path) -> None:
    with session(built, tmp_path, CAP) as client:
        client.find()
        client.make("capped", static=1024)
        client.launch("capped")
        assert client.launch("capped", 60_000).last.shared == 60_000  # what it has already is the cap
        assert client.attributes("capped") == (60_000, 100)
        assert client.state().counters == (RuleCounters(num_matched=2, num_capped=2, residency_found=3),)
        (seen,) = client.state().functions
        assert (seen.name, seen.num_launches, seen.num_changed, seen.residency_found) == ("capped", 2, 2, 3)
        assert (seen.grid, seen.block, seen.static_shared_bytes, seen.registers_per_thread) == (
            (132, 1, 1),
            (128, 1, 1),
            1024,
            32,
        )
        assert (seen.dynamic_shared_bytes, seen.pattern) == (60_000, "capped")


def test_a_cap_on_a_kernel_handle_reaches_its_function(built: Built, tmp_path: Path) -> None:
    with session(built, tmp_path, CAP) as client:
        client.find()
        client.make("capped", is_kernel=True)
        assert client.launch("capped").last.shared == 60_000
        assert client.attributes("capped") == (60_000, 100)


def test_shared_memory_is_never_lowered(built: Built, tmp_path: Path) -> None:
    with session(built, tmp_path, CAP) as client:
        client.find()
        client.make("capped")
        client.ask("limit capped 100000")
        assert client.launch("capped", 60_001).last.shared == 60_001
        assert client.launch("capped", 59_999).last.shared == 60_000  # another launch of it may still get the cap
        (counters,) = client.state().counters
        assert (counters.num_matched, counters.num_capped, counters.num_refused) == (2, 1, 1)
        assert counters.refusal == "the kernel uses 60,001 bytes of dynamic shared memory already, more than the cap"
        assert client.attributes("capped")[0] == 100_000


def test_a_carveout_leaves_shared_memory_as_it_is_and_is_taken_back_with_its_rule(built: Built, tmp_path: Path) -> None:
    with session(built, tmp_path, FilterRule(pattern="capped", dynamic_shared_bytes=0, carveout_percent=57)) as client:
        client.find()
        client.make("capped")
        before = client.attributes("capped")
        assert client.launch("capped", 40_000).last.shared == 40_000
        assert client.attributes("capped") == (before[0], 57)
        (counters,) = client.state().counters
        assert (counters.num_matched, counters.num_capped, counters.num_refused) == (1, 1, 0)
        client.block().swap([])
        client.launch("capped", 40_000)
        assert client.attributes("capped") == before


def test_a_cap_beyond_the_gpu_is_refused_and_leaves_no_trace(built: Built, tmp_path: Path) -> None:
    huge = FilterRule(pattern="capped", dynamic_shared_bytes=300_000, ctas_per_sm=1, carveout_percent=100)
    with session(built, tmp_path, huge) as client:
        client.find()
        client.make("capped")
        assert client.launch("capped", 5).last.shared == 5
        assert client.attributes("capped") == (49_152, -1)
        (counters,) = client.state().counters
        assert (counters.num_capped, counters.num_refused) == (0, 1)
        assert counters.refusal == "the driver does not allow the kernel so much shared memory (error 1)"


def test_cooperative_launches_are_left_alone(built: Built, tmp_path: Path) -> None:
    everything = FilterRule(pattern="*", dynamic_shared_bytes=60_000, priority=-5)
    with session(built, tmp_path, everything) as client:
        client.find()
        client.make("barrier")
        client.make("sometimes")
        assert shapes(client.launch("barrier", 8, how="cooperative")) == [("barrier", 8, 1)]
        assert shapes(client.launch("barrier", 8, command="cooperative")) == [("barrier", 8, 1)]
        assert shapes(client.launch("sometimes", 8)) == [("sometimes", 60_000, -5)]
        assert shapes(client.launch("sometimes", 8, how="cooperative")) == [("sometimes", 8, 1)]
        (counters,) = client.state().counters
        assert (counters.num_matched, counters.num_capped, counters.num_refused) == (4, 1, 6)
        assert counters.refusal.startswith("the launch is cooperative")
        assert client.state().functions[0].is_cooperative


def test_a_cap_that_no_cluster_would_survive_is_refused(built: Built, tmp_path: Path) -> None:
    small = FilterRule(pattern="small", dynamic_shared_bytes=100_000)
    large = FilterRule(pattern="large", dynamic_shared_bytes=200_000, carveout_percent=100)
    with session(built, tmp_path, small, large) as client:
        client.find()
        client.make("small")
        client.make("large")
        assert client.launch("small", how="cluster=4").last.shared == 100_000
        assert client.launch("large", how="cluster=4").last.shared == 0
        assert client.attributes("large") == (200_000, -1)
        assert client.state().counters[1].refusal == "no cluster of it would fit the GPU with so much shared memory"
        assert [seen.ctas_per_cluster for seen in client.state().functions] == [4, 4]


def test_a_cap_with_which_no_cta_fits_is_refused(built: Built, tmp_path: Path) -> None:
    with session(built, tmp_path, FilterRule(pattern="wide", dynamic_shared_bytes=1000)) as client:
        client.find()
        client.make("wide")
        assert client.launch("wide", 0, how="block=4096").last.shared == 0  # in the double 2048 threads live on an SM
        assert client.state().counters[0].refusal == "no CTA would fit an SM with so much shared memory"


def test_a_limit_that_the_program_lowers_again_is_raised_again(built: Built, tmp_path: Path) -> None:
    with session(built, tmp_path, CAP) as client:
        client.find()
        client.make("capped")
        for _ in range(3):  # as attention kernels do before each launch
            client.ask("limit capped 49152")
            assert client.launch("capped", 40_000).last.shared == 60_000
        (counters,) = client.state().counters
        assert (counters.num_capped, counters.num_retried, counters.num_refused) == (3, 2, 0)


# --- a driver that refuses


def test_a_refused_cap_is_launched_as_it_was_and_not_tried_again(built: Built, tmp_path: Path) -> None:
    with session(built, tmp_path, CAP) as client:
        client.find()
        client.make("capped")
        client.ask("refuse capped 719 50000 0")
        for _ in range(3):
            launched = client.launch("capped", 10)
            assert (launched.result, [reached.shared for reached in launched.reached]) == (0, [10])
        (counters,) = client.state().counters
        assert (counters.num_capped, counters.num_retried, counters.num_refused) == (0, 1, 3)
        assert "rejected the changed launch (error 719)" in counters.refusal


def test_a_refused_priority_is_launched_as_it_was(built: Built, tmp_path: Path) -> None:
    with session(built, tmp_path, PRIORITY) as client:
        client.find()
        client.make("ncclDevKernel")
        client.ask("refuse ncclDevKernel 0 0 801")
        assert [shapes(client.launch("ncclDevKernel")) for _ in range(2)] == [[("ncclDevKernel", 0, 1)]] * 2
        assert "(error 801)" in client.state().counters[0].refusal


@pytest.mark.parametrize("later", ["ncclDevKernel", "ncclDevKernel_later"])
def test_what_a_kernel_was_refused_is_not_held_against_the_next_one_on_its_handle(
    built: Built, tmp_path: Path, later: str
) -> None:
    with session(built, tmp_path, PRIORITY) as client:
        client.find()
        handle = client.make("ncclDevKernel")
        client.ask("refuse ncclDevKernel 0 0 801")
        client.launch("ncclDevKernel")
        client.ask("unload ncclDevKernel")
        assert client.make(later) == handle
        assert client.launch(later).last.priority == -5
        (counters,) = client.state().counters
        assert (counters.num_prioritized, counters.num_refused) == (1, 1)


def test_an_error_of_the_callers_own_is_the_callers(built: Built, tmp_path: Path) -> None:
    with session(built, tmp_path, CAP, PRIORITY) as client:
        client.find()
        client.make("plain")
        client.make("capped")
        client.make("ncclDevKernel")
        for name in ("plain", "capped", "ncclDevKernel"):
            assert client.launch(name, 90_000) == Launched(result=1, reached=())
        assert client.launch("unknown").result == 400  # a handle that is none
        client.launch("capped")
        assert client.state().counters[0].num_capped == 1
        assert sum(counters.num_retried for counters in client.state().counters) == 0


# --- priority


def test_priority_is_added_and_replaces_a_lesser_one_only(built: Built, tmp_path: Path) -> None:
    rule = FilterRule(pattern="nccl*", priority=-3)
    with session(built, tmp_path, rule) as client:
        client.find()
        client.make("ncclDevKernel")
        for how, priority, attributes in (
            ("", -3, 1),
            ("cluster=4", -3, 2),
            ("priority=-1 cluster=4", -3, 2),
            ("priority=-4", -4, 1),
        ):
            reached = client.launch("ncclDevKernel", how=how).last
            assert (reached.priority, reached.attributes) == (priority, attributes)
        assert client.state().counters[0].num_prioritized == 4


def test_a_launch_full_of_attributes_keeps_them(built: Built, tmp_path: Path) -> None:
    with session(built, tmp_path, PRIORITY) as client:
        client.find()
        client.make("ncclDevKernel")
        assert client.launch("ncclDevKernel", how="attributes=31").last.priority == -5
        for number in (32, 36):
            reached = client.launch("ncclDevKernel", how=f"attributes={number}").last
            assert (reached.priority, reached.attributes) == (1, number)
        assert client.state().counters[0].refusal == "the launch already has 32 attributes, so there is no room for one more"


def test_a_priority_that_the_gpu_does_not_have_is_refused(built: Built, tmp_path: Path) -> None:
    with session(built, tmp_path, FilterRule(pattern="*", priority=-6)) as client:
        client.find()
        client.make("any")
        assert client.launch("any").last.priority == 1
        assert client.state().counters[0].refusal == "the highest priority of this GPU is -5"


# --- head starts


def test_the_first_racing_kernel_after_a_collective_is_held_once(built: Built, tmp_path: Path) -> None:
    with session(built, tmp_path, COLLECTIVE, HOLD) as client:
        client.find()
        client.make("ncclDevKernel")
        client.make("gemm")
        assert len(client.launch("gemm", stream=GEMM_STREAM).reached) == 1  # nothing to race yet
        client.launch("ncclDevKernel", stream=COLLECTIVE_STREAM)
        held = client.launch("gemm", stream=GEMM_STREAM)
        assert [(reached.name, reached.stream, reached.hold_ns) for reached in held.reached] == [
            ("counterpoint_hold", GEMM_STREAM, 5000),
            ("gemm", GEMM_STREAM, 0),
        ]
        assert len(client.launch("gemm", stream=GEMM_STREAM).reached) == 1  # once for each collective
        counters = client.state().counters
        assert (counters[0].num_matched, counters[1].num_matched, counters[1].num_held) == (1, 3, 1)
        assert [seen.is_collective for seen in client.state().functions] == [False, True]


def test_only_collectives_are_raced(built: Built, tmp_path: Path) -> None:
    with session(built, tmp_path, COLLECTIVE, CAP, HOLD) as client:
        client.find()
        client.make("capped")
        client.make("gemm")
        client.make("ncclDevKernel")
        client.launch("capped", stream=COLLECTIVE_STREAM)
        assert client.launch("ncclDevKernel", 90_000, stream=COLLECTIVE_STREAM).result == 1  # it was not launched
        assert len(client.launch("gemm", stream=GEMM_STREAM).reached) == 1


def test_a_kernel_behind_the_collective_in_its_own_stream_does_not_race_it(built: Built, tmp_path: Path) -> None:
    with session(built, tmp_path, COLLECTIVE, HOLD) as client:
        client.find()
        client.make("ncclDevKernel")
        client.make("gemm")
        client.launch("ncclDevKernel", stream=GEMM_STREAM)
        assert len(client.launch("gemm", stream=GEMM_STREAM).reached) == 1
        assert len(client.launch("gemm", stream=COLLECTIVE_STREAM).reached) == 2


def test_the_default_streams_are_told_apart(built: Built, tmp_path: Path) -> None:
    with session(built, tmp_path, COLLECTIVE, HOLD) as client:
        client.find()
        client.make("ncclDevKernel")
        client.make("gemm")
        client.launch("ncclDevKernel", stream=0)
        assert len(client.launch("gemm", stream=1).reached) == 1  # CU_STREAM_LEGACY is the default stream
        client.find("proc_per_thread")
        assert len(client.launch("gemm", stream=0).reached) == 2


def test_collectives_of_another_context_are_not_raced(built: Built, tmp_path: Path) -> None:
    with session(built, tmp_path, COLLECTIVE, HOLD) as client:
        client.find()
        client.make("ncclDevKernel")
        client.make("gemm")
        client.launch("gemm")
        client.launch("ncclDevKernel", stream=COLLECTIVE_STREAM)
        client.ask("context 1")
        assert len(client.launch("gemm").reached) == 1
        client.ask("context 0")
        assert len(client.launch("gemm").reached) == 2


def test_a_destroyed_context_takes_its_head_start_kernel_with_it(built: Built, tmp_path: Path) -> None:
    with session(built, tmp_path, COLLECTIVE, HOLD) as client:
        client.find()
        client.make("ncclDevKernel")
        client.make("gemm")
        client.launch("gemm")
        client.ask("destroy")
        client.launch("ncclDevKernel", stream=COLLECTIVE_STREAM)
        assert len(client.launch("gemm").reached) == 2
        client.ask("destroy")
        client.ask("refuse_modules 209")
        client.launch("ncclDevKernel", stream=COLLECTIVE_STREAM)
        assert len(client.launch("gemm").reached) == 1
        assert client.state().counters[1].refusal == "the head start kernel could not be loaded (error 209)"


# --- captures


def test_a_capture_gets_proven_changes_and_nothing_else(built: Built, tmp_path: Path) -> None:
    with session(built, tmp_path, CAP, PRIORITY, COLLECTIVE, HOLD) as client:
        client.find()
        for name in ("capped", "capped_late", "ncclDevKernel", "gemm"):
            client.make(name)
        client.launch("capped")
        client.launch("ncclDevKernel", stream=COLLECTIVE_STREAM)
        for stream in (GEMM_STREAM, COLLECTIVE_STREAM):
            client.ask(f"capture {stream} 1")
        assert client.launch("capped").last.shared == 60_000
        assert client.launch("capped_late").last.shared == 0  # a refusal would end the capture
        assert len(client.launch("gemm", stream=GEMM_STREAM).reached) == 1
        assert client.launch("ncclDevKernel", stream=COLLECTIVE_STREAM).last.priority == -5
        client.ask("limit capped 49152")
        assert client.launch("capped").last.shared == 0
        assert client.ask(f"broken {GEMM_STREAM}") == ["broken 0"]
        for stream in (GEMM_STREAM, COLLECTIVE_STREAM):
            client.ask(f"capture {stream} 0")
        assert len(client.launch("gemm", stream=GEMM_STREAM).reached) == 2  # for the collective before the capture
        client.ask(f"capture {COLLECTIVE_STREAM} 1")
        client.launch("ncclDevKernel", stream=COLLECTIVE_STREAM)
        client.ask(f"capture {COLLECTIVE_STREAM} 0")
        assert len(client.launch("gemm", stream=GEMM_STREAM).reached) == 1  # the captured one has not run
        cap, _, _, hold = client.state().counters
        assert (cap.num_capped, cap.num_refused, hold.num_refused) == (2, 2, 1)
        assert "captured in a CUDA graph" in cap.refusal


@pytest.mark.parametrize("later", ["ncclDevKernel", "ncclDevKernel_later"])
def test_what_a_kernel_has_proven_is_not_proven_of_the_next_one_on_its_handle(
    built: Built, tmp_path: Path, later: str
) -> None:
    with session(built, tmp_path, PRIORITY) as client:
        client.find()
        handle = client.make("ncclDevKernel")
        client.launch("ncclDevKernel")
        client.ask("unload ncclDevKernel")
        assert client.make(later) == handle
        client.ask(f"refuse {later} 0 0 801")
        client.ask(f"capture {COLLECTIVE_STREAM} 1")
        assert client.launch(later, stream=COLLECTIVE_STREAM).last.priority == 1
        assert client.ask(f"broken {COLLECTIVE_STREAM}") == ["broken 0"]
        assert "captured in a CUDA graph" in client.state().counters[0].refusal


def test_the_head_start_kernel_is_loaded_beside_another_threads_capture(built: Built, tmp_path: Path) -> None:
    with session(built, tmp_path, COLLECTIVE, HOLD) as client:
        client.find()
        client.make("gemm")
        client.ask("capture 20 1")
        client.launch("gemm")
        assert client.ask("broken 20") == ["broken 0"]
        assert client.state().counters[1].refusal == ""
