"""What calls of the same shapes have in common is found once, told apart from what differs, and forgotten when it goes."""

from types import SimpleNamespace

import pytest

from counterpoint.plan import LEAVE_IT
from counterpoint.schedule import ScheduleDescription

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
ops = pytest.importorskip("counterpoint.ops")
operators = pytest.importorskip("counterpoint.ops.operators")
operator_call = pytest.importorskip("counterpoint.ops.operator_call")
runtime = pytest.importorskip("counterpoint.ops.runtime")

CHUNKED = ScheduleDescription(chunks=2)
CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("group_of_one")


@pytest.fixture
def first_calls(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows by the operation of every call that is checked and planned."""
    found: list[object] = []

    class Noted(operator_call.OperatorCall):  # type: ignore[misc, name-defined]  # torch is untyped here
        def __init__(self, torch_pass: object, operands: object) -> None:
            found.append(torch_pass.operation)  # type: ignore[attr-defined]
            super().__init__(torch_pass, operands)

    monkeypatch.setattr(operators, "OperatorCall", Noted)
    return found


def gather(left: object, weight: object) -> object:
    return ops.all_gather_matmul(left, weight, schedule=CHUNKED)


def test_a_call_is_checked_and_planned_once_and_counted_every_time(first_calls: list[object]) -> None:
    left, weight = torch.randn(4, 3), torch.randn(3, 2)
    counts = operator_call.calls_of(dist.group.WORLD.group_name)
    before = counts.num_by_copies + counts.num_by_library
    for number in range(1, 4):
        assert torch.equal(gather(left, weight), left @ weight)
        found = runtime.runtime_of(dist.group.WORLD.group_name, CPU)
        assert found.agreement.num_calls == number
        assert max(picked.last_call for picked in found.plans.values()) == number
    assert len(first_calls) == 1
    assert counts.num_by_copies + counts.num_by_library - before == 3


def test_shapes_strides_and_types_are_told_apart(first_calls: list[object]) -> None:
    left, weight = torch.randn(4, 3), torch.randn(3, 2)
    for one, other in [
        (left, weight),
        (left, weight.t().contiguous().t()),
        (left[:2], weight),
        (left.double(), weight.double()),
    ]:
        torch.testing.assert_close(gather(one, other), one @ other)
    assert len(first_calls) == 4
    with pytest.raises(runtime.OperatorError, match="operands of one type"):
        gather(left.double(), weight)


@pytest.mark.parametrize("forget", ["a plan", "release", "another group", "many calls"])
def test_what_is_known_goes_with_what_it_was_made_for(
    first_calls: list[object], monkeypatch: pytest.MonkeyPatch, forget: str
) -> None:
    left, weight = torch.randn(4, 3), torch.randn(3, 2)
    ops.all_gather_matmul(left, weight)
    if forget == "a plan":
        ops.use_plan(LEAVE_IT)
    elif forget == "release":
        ops.release()
        assert not runtime.known_calls()
    elif forget == "another group":
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        monkeypatch.setattr(operator_call, "MAX_KNOWN_CALLS", 1)
        ops.all_gather_matmul(left[:2], weight)
        assert len(runtime.known_calls()) == 1
    assert torch.equal(ops.all_gather_matmul(left, weight), left @ weight)
    assert len(first_calls) == (3 if forget == "many calls" else 2)


def test_by_its_name_a_custom_operator_runs_as_it_does_otherwise() -> None:
    """Code that torch.compile made calls it so, without gradients; whoever looks still sees it."""
    named = torch.ops.counterpoint.matmul_reduce_scatter.default
    left, weight, rest = torch.randn(4, 3), torch.randn(3, 2), (dist.group.WORLD.group_name, "")
    assert torch.equal(named(left, weight, *rest), left @ weight)
    wanted = left.clone().requires_grad_()
    named(wanted, weight, *rest).sum().backward()
    assert torch.equal(wanted.grad, torch.ones(4, 2) @ weight.t())
    seen = []

    class Looks(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc]  # torch is untyped here
        def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: object = None) -> object:
            seen.append(func)
            return func(*args, **(kwargs or {}))  # type: ignore[operator]

    with Looks():
        named(left, weight, *rest)
    assert named in seen
    assert {named: 1}[torch.ops.counterpoint.matmul_reduce_scatter.default] == 1, "its hash is as torch made it"


ACROSS = "the group spans 2 hosts, but copy engines reach only peers on the same host"


def test_calls_that_the_library_ran_across_hosts_are_counted_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.Runtime, "_open_transport", lambda self: (None, ACROSS))
    overlapped = pytest.importorskip("counterpoint.integrations.overlapped").Overlapped(is_on=True)
    name = dist.group.WORLD.group_name
    ops.all_gather_matmul(torch.randn(4, 3), torch.randn(3, 2))
    overlapped.take("up", torch.nn.Linear(2, 2), lambda: None, name)
    assert overlapped.library_reason == "", "calls from before count for nothing"
    for _ in range(2):
        ops.all_gather_matmul(torch.randn(4, 3), torch.randn(3, 2))
    assert operator_call.calls_of(name).by_reason[ACROSS] == 3
    assert overlapped.library_reason == ACROSS
    assert f"2 calls by the library ({ACROSS})" in str(overlapped)


def test_linears_and_experts_of_one_group_are_counted_apart() -> None:
    """Otherwise the one would prove that the other ran."""
    overlapped = pytest.importorskip("counterpoint.integrations.overlapped").Overlapped
    linears, experts = overlapped(is_on=True), overlapped(is_on=True, of_experts=True)
    name = dist.group.WORLD.group_name
    for each in (linears, experts):
        each.take("up", torch.nn.Linear(2, 2), lambda: None, name)
    ops.all_gather_matmul(torch.randn(4, 3), torch.randn(3, 2))
    operator_call.expert_calls_of(name).num_by_copies += 1
    assert (linears.num_by_copies, linears.num_by_library) == (0, 1)
    assert (experts.num_by_copies, experts.num_by_library) == (1, 0)


def test_of_two_models_in_one_group_the_first_counts_the_calls_of_both() -> None:
    overlapped = pytest.importorskip("counterpoint.integrations.overlapped").Overlapped
    first, second = overlapped(is_on=True), overlapped(is_on=True)
    for each in (first, second):
        each.take("up", torch.nn.Linear(2, 2), lambda: None, dist.group.WORLD.group_name)
    second.leave_counts_to([first])
    ops.all_gather_matmul(torch.randn(4, 3), torch.randn(3, 2))
    assert (first.num_by_library, second.num_by_library) == (1, 0)


def test_calls_that_were_replayed_are_counted_among_those_by_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    overlapped = pytest.importorskip("counterpoint.integrations.overlapped").Overlapped(is_on=True)
    job_paths = pytest.importorskip("counterpoint.integrations.job_paths")
    overlapped.take("up", torch.nn.Linear(2, 2), lambda: None, dist.group.WORLD.group_name)
    left, weight = torch.randn(4, 3), torch.randn(3, 2)
    ops.all_gather_matmul(left, weight)
    (known,) = runtime.known_calls().values()
    replays = iter([False, True, True])
    prepared = SimpleNamespace(run=lambda *_: next(replays), is_by_library=False, num_sent_bytes=5)
    monkeypatch.setattr(known, "_picked", SimpleNamespace(prepared=prepared, last_call=0))
    for _ in range(3):
        ops.all_gather_matmul(left, weight)
    assert (overlapped.num_by_copies, overlapped.num_replayed) == (3, 2)
    assert "3 calls by copies (2 replayed from recordings), which sent 15 B" in str(overlapped)
    assert overlapped.num_in_operators == overlapped.num_by_library == 1, "the first call, on one rank"
    assert job_paths._tally_of(overlapped) == (3, 0, 2, 1, 1, 15)


def test_why_copies_did_not_do_it_is_logged_by_the_first_rank_of_the_group(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Which need not be rank 0 of the job."""
    lanes = pytest.importorskip("counterpoint.integrations.lane_collectives")
    group = object()
    for rank_in_group in (0, 1):
        monkeypatch.setattr(dist, "get_rank", lambda of=None, own=rank_in_group: own if of is group else 5)
        caplog.clear()
        tally = lanes.CollectiveCounts("a gradient bucket", 0, group)
        tally.count_library(ACROSS)
        tally.count_library(ACROSS)
        said = [record.getMessage() for record in caplog.records]
        line = f"counterpoint: The library runs a gradient bucket, not copies: {ACROSS}."
        assert said == ([line] if rank_in_group == 0 else [])
    lanes.CollectiveCounts("one of the job's own all-gathers", 0).count_library(ACROSS, group=group)
    assert len(caplog.records) == 0, "this process is the second of the group"
