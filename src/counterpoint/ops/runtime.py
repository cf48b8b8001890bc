"""The state that a group of ranks keeps between operator calls: its transport, and the chosen and prepared schedule of
each shape.

The first call for a shape compares with the other ranks, chooses (the schedule that the caller names, else the current
plan's, else that of `schedule/heuristic.py`), prepares and allocates; later calls look the result up. Runtimes live
until `release()`.
"""

import logging
from collections.abc import Hashable, Sequence
from functools import cache
from typing import Any, NoReturn, TypeAlias, final

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from counterpoint.errors import OperatorError, RefusedTogetherError, ScheduleError
from counterpoint.machine import DEFAULT_MACHINE, Machine, load_machine, machine_for_device
from counterpoint.ops.agreement import Agreement, CallNotice, exchange_values
from counterpoint.ops.collectives import Collectives, Ranks, Sequential
from counterpoint.ops.expert_group import ExpertGroup
from counterpoint.ops.graph_cache import is_capturing, refuse_in_capture
from counterpoint.ops.lane import AbstractLane
from counterpoint.ops.message_lane import MessageLane
from counterpoint.ops.message_watchdog import MessageWatchdog
from counterpoint.ops.messages import Messages
from counterpoint.ops.peer_access import RankLocation, location_of, obstacle_across, obstacle_on
from counterpoint.ops.plan_in_force import Choice, plan_in_force
from counterpoint.ops.tested_torch import note_newer
from counterpoint.ops.transport import AbstractCompiledSchedule, AbstractTransport
from counterpoint.schedule import SEQUENTIAL, Problem, ScheduleDescription, backward_description, make_schedule
from counterpoint.schedule.actions import Operation, Pass
from counterpoint.schedule.heuristic import Pick, pick_schedule
from counterpoint.units import format_count

MAX_SCHEDULES = 256  # most schedules of one group; each holds CUDA events, and a model has a few shapes
NUM_EVICTED = 64  # evicted at once, because it waits for the GPU
DEVICE_TYPES = ("cpu", "cuda")
LOGGER = logging.getLogger("counterpoint")
Group: TypeAlias = dist.ProcessGroup


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What one call asks for, apart from the numbers in its tensors; flat, because every call looks one up."""

    operation: Operation
    direction: Pass
    num_rows: int
    num_inner: int
    num_columns: int
    dtype: torch.dtype
    schedule: str = ""

    def problem(self, num_ranks: int) -> Problem:
        """Return the sizes, checked. Raises `ScheduleError`."""
        return Problem(
            operation=self.operation,
            num_ranks=num_ranks,
            num_rows=self.num_rows,
            num_inner=self.num_inner,
            num_columns=self.num_columns,
            element_bytes=self.dtype.itemsize,
        )

    def name(self, num_ranks: int) -> str:
        """Return the name that a plan's directives match, whatever schedule the call names."""
        return f"{self._sizes()} on {format_count(num_ranks, 'rank')}"

    def words(self) -> str:
        """Describe the operator and its sizes for messages."""
        return self._sizes() + (f" with {self.schedule}" if self.schedule else "")

    def _sizes(self) -> str:
        sizes = f"({self.num_rows}, {self.num_inner}) @ ({self.num_inner}, {self.num_columns})"
        passes = "" if self.direction == "forward" else " backward"
        return f"{self.operation}{passes} of {sizes} {str(self.dtype).removeprefix('torch.')}"


@final
class PickedSchedule:
    """The schedule that was picked for a request, and its compiled form."""

    def __init__(self, pick: Pick, prepared: AbstractCompiledSchedule) -> None:
        self.pick, self.prepared = pick, prepared
        self.last_call = 0  # its number


@final
class Runtime:
    """One group of ranks on one kind of device."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        note_newer()
        self.group, self.device = group, device
        self.plans: dict[Request, PickedSchedule] = {}  # an LRU cache, in the order of first calls
        self.requests: dict[Request, None] = {}  # requests without a named schedule, in the order of first calls
        self._prepared: dict[tuple[Request, ScheduleDescription], AbstractCompiledSchedule] = {}
        self._lanes: dict[str, AbstractLane] = {}
        self._experts: ExpertGroup | None = None
        self.agreement = Agreement(group, f"{device.type}")
        self._watchdog = MessageWatchdog(group, self.agreement.overheard)
        self.machine, self.machine_name = _machine_of(device)
        self.locations = exchange_values(self.agreement, location_of(device, self.machine_name), RankLocation)
        self.transport, self.obstacle = self._open_transport()

    @property
    def num_hosts(self) -> int:
        """The number of hosts on which the group has ranks."""
        return len({each.host for each in self.locations})

    def plan(self, request: Request, sequential: Sequential) -> PickedSchedule:
        """Return the plan for a request, agreed with the other ranks on first use; it may be to run `sequential`."""
        self.agreement.num_calls += 1
        found = self.plans.get(request)
        if found is None:
            found = self._make(request, sequential)
        found.last_call = self.agreement.num_calls
        return found

    def refuse(self, problem: str) -> NoReturn:
        """Tell the other ranks of a call that cannot be made, so that none waits for it; raises `OperatorError` at once."""
        self.agreement.num_calls += 1
        self._refuse_counted(problem)

    def _refuse_counted(self, problem: str) -> NoReturn:
        if is_capturing(self.device):
            raise OperatorError(problem)
        self.agreement.refuse(problem)

    def _make(self, request: Request, sequential: Sequential) -> PickedSchedule:
        try:
            problem = request.problem(self.group.size())
        except ScheduleError as refusal:
            self._refuse_counted(f"{request.operation}: {refusal}")
        refuse_in_capture(request.words(), self.device)
        choice = self._agree(request)
        self._make_room()
        try:
            plan = self.plans[request] = self._prepare_picked(request, self._pick(request, problem, choice), sequential)
        except ScheduleError as refusal:
            if choice is None:
                raise
            raise OperatorError(
                f"Directive {choice.number} of the plan is not for {request.words()}: {refusal}"
            ) from refusal
        if not request.schedule:
            self.requests[request] = None
        return plan

    def _prepare_picked(self, request: Request, pick: Pick, sequential: Sequential) -> PickedSchedule:
        """Prepare what was picked. If a rank has no memory for it, the call runs the library's collective on all ranks."""
        try:
            return PickedSchedule(pick, self._prepared_once(request, pick.description, sequential))
        except RefusedTogetherError as refusal:
            LOGGER.warning("%s runs the library's collective: %s", request.words(), refusal)
            pick = Pick(description=SEQUENTIAL, reason=str(refusal))
            return PickedSchedule(pick, self._prepared_once(request, SEQUENTIAL, sequential))

    def _make_room(self) -> None:
        """Evict the least recently called shapes. All ranks evict the same ones in the same call, because all make the
        same calls in the same order.
        """
        if max(len(self.plans), len(self._prepared)) < MAX_SCHEDULES:
            return
        known_calls().clear()
        for request in sorted(self.plans, key=lambda each: self.plans[each].last_call)[:NUM_EVICTED]:
            del self.plans[request]
            self.requests.pop(request, None)
        in_use = {plan.prepared for plan in self.plans.values()}
        gone = {key: prepared for key, prepared in self._prepared.items() if prepared not in in_use}
        for key in gone:
            del self._prepared[key]
        if self.transport is not None:
            self.transport.forget(list(gone.values()), keeps_memory=True)

    def _agree(self, request: Request) -> Choice | None:
        """Compare with the other ranks; return what the current plan says, unless the call names a schedule."""
        if request.schedule:
            self.agreement.compare(CallNotice(request=request.words()))
            return None
        in_force = plan_in_force()
        unfit = in_force.problem_on(self.machine_name)
        self.agreement.compare(CallNotice(request=request.words(), problem=unfit, plan=in_force.fingerprint))
        return in_force.choice(request.name(self.group.size()))

    def _pick(self, request: Request, problem: Problem, choice: Choice | None) -> Pick:
        if self.transport is None:
            return Pick(description=SEQUENTIAL, reason=self.obstacle)
        if request.schedule:
            description = msgspec.json.decode(request.schedule, type=ScheduleDescription)
            if request.direction == "backward":
                description = backward_description(request.operation, description)
            return Pick(description=description, reason="named by the caller")
        if choice is not None:
            return Pick(description=choice.schedule, reason=choice.reason)
        return pick_schedule(problem, self.machine, request.direction)

    def _prepared_once(
        self, request: Request, description: ScheduleDescription, sequential: Sequential
    ) -> AbstractCompiledSchedule:
        key = msgspec.structs.replace(request, schedule=""), description
        if key not in self._prepared:
            self._prepared[key] = self.prepare(request, description, sequential)
        return self._prepared[key]

    def prepare(
        self, request: Request, description: ScheduleDescription, sequential: Sequential
    ) -> AbstractCompiledSchedule:
        """Prepare a schedule for a request, all ranks together. Raises `ScheduleError` if it does not fit."""
        if description.is_sequential or self.transport is None:
            return Collectives(
                Ranks(self.group, self.agreement, self._watchdog), (request.operation, request.num_rows), sequential
            )
        problem = request.problem(self.group.size())
        return self.transport.prepare(make_schedule(problem, description, request.direction), request.dtype)

    def forget(self, prepared: Sequence[AbstractCompiledSchedule]) -> None:
        """Free schedules that `prepare` created, all ranks together."""
        if self.transport is not None:
            self.transport.forget(prepared)

    def pick_anew(self) -> None:
        """Let the next call of every shape choose again, with the other ranks; prepared schedules stay."""
        known_calls().clear()
        for request in [request for request in self.plans if not request.schedule]:
            del self.plans[request]

    def propose(self, what: str, problem: str = "") -> None:
        """Raise `OperatorError` on every rank unless all ranks are about to do the same, and can do it."""
        self.agreement.compare(CallNotice(request=what, problem=problem))

    def text_of_first(self, text: str) -> str:
        """Return rank 0's text, on every rank; all of them call it together."""
        return self.agreement.exchange(text.encode())[0].decode()

    def _open_transport(self) -> tuple[AbstractTransport | None, str]:
        """Return the transport, or None and why there is none, with the same result on all ranks."""
        if self.device.type == "cpu":
            return Messages(self.group, self.agreement, self._watchdog), ""
        if self.num_hosts > 1:
            return None, obstacle_across(self.num_hosts)
        obstacle = obstacle_on(self.device, [each.gpu for each in self.locations])
        obstacles = [content.decode() for content in self.agreement.exchange(obstacle.encode())]
        first = next((f"rank {rank}: {text}" for rank, text in enumerate(obstacles) if text), "")
        if first:
            return None, first
        from counterpoint.ops.copy_engines import CopyEngines  # noqa: PLC0415  needs cuda-bindings

        return CopyEngines(self.group, self.device, self.agreement), ""

    def lane(self, name: str) -> AbstractLane | None:
        """Return the lane of that name, created by all ranks together on first use; None without a transport."""
        if name not in self._lanes and self.transport is not None:
            refuse_in_capture(f"A collective on a lane named {name}", self.device)
            self.agreement.compare(CallNotice(request=f"a lane named {name}"))
            self._lanes[name] = self._open_lane(name)
        return self._lanes.get(name)

    def _open_lane(self, name: str) -> AbstractLane:
        if self.device.type == "cpu":
            return MessageLane(self.group, self.agreement)
        from counterpoint.ops.copy_lane import CopyLane  # noqa: PLC0415  needs cuda-bindings

        return CopyLane(self.group, self.device, self.agreement, name)

    def experts(self) -> ExpertGroup:
        """Return what moves the rows of experts, created by all ranks together on first use."""
        if self._experts is None:
            refuse_in_capture("An expert layer", self.device)
            self.agreement.compare(CallNotice(request="an expert layer"))
            ranks = Ranks(self.group, self.agreement, self._watchdog)
            self._experts = ExpertGroup(ranks, self.device, self.obstacle)
        return self._experts

    def num_symmetric_bytes(self) -> int:
        """Return the bytes of symmetric memory held on this rank."""
        held = sum(lane.num_symmetric_bytes() for lane in self._lanes.values())
        return held + sum(each.num_symmetric_bytes() for each in (self.transport, self._experts) if each is not None)

    def num_recordings(self) -> int:
        """Number of calls recorded as CUDA graphs on this rank."""
        of_lanes = sum(lane.num_recordings() for lane in self._lanes.values())
        return of_lanes + (self.transport.num_recordings() if self.transport else 0)

    def close(self) -> None:
        """Free all memory."""
        known_calls().clear()
        self._watchdog.stop()
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()
        if self._experts is not None:
            self._experts.close()
        self.plans.clear()
        self.requests.clear()
        self._prepared.clear()
        if self.transport is not None:
            self.transport.close()


def _machine_of(device: torch.device) -> tuple[Machine, str]:
    """Return the machine whose figures the heuristic uses (this GPU's, or the default if none is shipped), and the name
    that plans use for this GPU's machine: its shipped name, or else the GPU's own. A CPU has none.
    """
    gpu_name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    found = machine_for_device(gpu_name) if gpu_name else None
    return found or load_machine(DEFAULT_MACHINE), found.name if found else gpu_name


@cache
def known_calls() -> dict[Hashable, Any]:
    """Return the cache of `operator_call.py` for calls of all groups; it is cleared whenever a plan is."""
    return {}


@cache
def _runtimes() -> dict[tuple[str, torch.device], Runtime]:
    """Return the runtimes of this process, in which operators find theirs by the group's name."""
    return {}


def runtime_of(group_name: str, device: torch.device) -> Runtime:
    """Return the runtime of a group on a device; created by all ranks together on first use."""
    group = distributed_c10d._resolve_process_group(group_name)
    runtimes = _runtimes()
    found = runtimes.get((group_name, device))
    if found is None or found.group is not group:  # a group may be destroyed and another one get its name
        if device.type not in DEVICE_TYPES:
            runtime_of_group(group).refuse(f"Operators run on GPUs and CPUs; found a tensor on '{device}'. Move it to one.")
        refuse_in_capture("Copying by copy engines in this group", device)
        if found is not None:
            runtimes.pop((group_name, device)).close()
        found = runtimes[group_name, device] = Runtime(group, device)
    return found


def group_or_world(group: Group | None) -> Group:
    """Return the given group; None means all ranks. Raises `OperatorError` if there is none."""
    found = group if group is not None else dist.group.WORLD
    if found is None:
        raise OperatorError("There is no process group. Call torch.distributed.init_process_group first, on every rank.")
    if not isinstance(found, dist.ProcessGroup):
        raise OperatorError(
            "A group must be a torch.distributed.ProcessGroup or None; found a value of type "
            f"{type(found).__name__}. Pass what new_group() or a mesh's get_group() returns, or leave it out "
            "for all ranks."
        )
    return found


def runtime_of_group(group: Group | None) -> Runtime:
    """Return the runtime of a group's calls so far, that on GPUs if there is one; without calls, one for where it can
    run.
    """
    found = group_or_world(group)
    known = [runtime for runtime in all_runtimes() if runtime.group is found]
    if known:
        return max(known, key=lambda runtime: runtime.device.type == "cuda")
    has_gpus = torch.cuda.is_available() and "nccl" in str(dist.get_backend(found))
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpus else torch.device("cpu")
    return runtime_of(found.group_name, device)


def all_runtimes() -> list[Runtime]:
    """Return every runtime of this process."""
    return list(_runtimes().values())


def forget_runtimes() -> None:
    """Close all runtimes."""
    runtimes = _runtimes()
    while runtimes:
        runtimes.popitem()[1].close()
