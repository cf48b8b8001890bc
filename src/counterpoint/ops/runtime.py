"""What a group of ranks keeps between operator calls: its transport, and for each shape the schedule that was chosen
and prepared.

The first call for a shape compares notes with the other ranks, chooses (`schedule/heuristic.py`, unless the caller
names a schedule), prepares and allocates; later calls look the result up. Runtimes live until `release()`.
"""

import socket
from functools import cache
from importlib.util import find_spec
from typing import NoReturn, final

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from counterpoint.errors import OperatorError, ScheduleError
from counterpoint.machine import Machine, load_machine, machine_for_device
from counterpoint.ops.agreement import Agreement, Proposal
from counterpoint.ops.captures import is_capturing, refuse_in_capture
from counterpoint.ops.collectives import Collectives
from counterpoint.ops.lane import AbstractLane
from counterpoint.ops.message_lane import MessageLane
from counterpoint.ops.messages import Messages
from counterpoint.ops.transport import AbstractPrepared, AbstractTransport
from counterpoint.schedule import SEQUENTIAL, Problem, ScheduleDescription, backward_description, make_schedule
from counterpoint.schedule.actions import Operation, Pass
from counterpoint.schedule.heuristic import Pick, pick_schedule

DEFAULT_MACHINE = "h200"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What one call asks for, apart from the numbers in its tensors; flat, because every call looks one up."""

    operation: Operation
    direction: Pass
    num_rows: int
    num_inner: int
    num_columns: int
    dtype: torch.dtype
    schedule: str

    def problem(self, num_ranks: int) -> Problem:
        """The sizes, checked. Raises `ScheduleError`."""
        return Problem(
            operation=self.operation,
            num_ranks=num_ranks,
            num_rows=self.num_rows,
            num_inner=self.num_inner,
            num_columns=self.num_columns,
            element_bytes=self.dtype.itemsize,
        )

    def words(self) -> str:
        """For messages: the operator and its sizes."""
        sizes = f"({self.num_rows}, {self.num_inner}) @ ({self.num_inner}, {self.num_columns})"
        passes = "" if self.direction == "forward" else " backward"
        schedule = f" with {self.schedule}" if self.schedule else ""
        return f"{self.operation}{passes} of {sizes} {str(self.dtype).removeprefix('torch.')}{schedule}"


@final
class Plan:
    """The schedule that was picked for a request, and how it is run."""

    def __init__(self, pick: Pick, prepared: AbstractPrepared) -> None:
        self.pick, self.prepared = pick, prepared


@final
class Runtime:
    """One group of ranks on one kind of device."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.plans: dict[Request, Plan] = {}
        self._lanes: dict[str, AbstractLane] = {}
        self._agreement = Agreement(group, f"{device.type}")
        self._machine = _machine_of(device)
        self.transport, self.obstacle = self._open_transport()

    def plan(self, request: Request) -> Plan:
        """The plan for a request; made with the other ranks when it is first asked for."""
        found = self.plans.get(request)
        return found if found is not None else self._make(request)

    def refuse(self, problem: str) -> NoReturn:
        """Tell the other ranks of a call that cannot be made, so that none waits for it; raises `OperatorError`."""
        if not is_capturing(self.device):
            self._agreement.compare(Proposal(problem=problem))
        raise OperatorError(problem)

    def _make(self, request: Request) -> Plan:
        try:
            problem = request.problem(self.group.size())
        except ScheduleError as refusal:
            self.refuse(f"{request.operation}: {refusal}")
        refuse_in_capture(request.words(), self.device)
        self._agreement.compare(Proposal(request=request.words()))
        pick = self._pick(request, problem)
        plan = self.plans[request] = Plan(pick, self._prepare(pick, request, problem))
        return plan

    def _pick(self, request: Request, problem: Problem) -> Pick:
        if self.transport is None:
            return Pick(description=SEQUENTIAL, reason=self.obstacle)
        if request.schedule:
            description = msgspec.json.decode(request.schedule, type=ScheduleDescription)
            if request.direction == "backward":
                description = backward_description(request.operation, description)
            return Pick(description=description, reason="named by the caller")
        return pick_schedule(problem, self._machine, request.direction)

    def _prepare(self, pick: Pick, request: Request, problem: Problem) -> AbstractPrepared:
        if pick.description.is_sequential or self.transport is None:
            return Collectives(self.group, request.operation, request.direction, request.num_rows)
        return self.transport.prepare(make_schedule(problem, pick.description, request.direction), request.dtype)

    def _open_transport(self) -> tuple[AbstractTransport | None, str]:
        """The transport, or None and why there is none, which all ranks find alike."""
        if self.device.type == "cpu":
            return Messages(self.group), ""
        found = [content.decode() for content in self._agreement.exchange(_whereabouts(self.device).encode())]
        hosts = {entry.split("/")[0] for entry in found}
        if len(hosts) > 1:
            return None, f"the group spans {len(hosts)} hosts, and copy engines reach peers of one host only"
        obstacle = _obstacle(self.device, found)
        obstacles = [content.decode() for content in self._agreement.exchange(obstacle.encode())]
        first = next((f"rank {rank}: {text}" for rank, text in enumerate(obstacles) if text), "")
        if first:
            return None, first
        from counterpoint.ops.copy_engines import CopyEngines  # noqa: PLC0415  needs cuda-bindings

        return CopyEngines(self.group, self.device, self._agreement), ""

    def lane(self, name: str) -> AbstractLane | None:
        """The lane of that name, made by all ranks together when first asked for; None without a transport."""
        if name not in self._lanes and self.transport is not None:
            refuse_in_capture(f"A collective on a lane named {name}", self.device)
            self._agreement.compare(Proposal(request=f"a lane named {name}"))
            self._lanes[name] = self._open_lane(name)
        return self._lanes.get(name)

    def _open_lane(self, name: str) -> AbstractLane:
        if self.device.type == "cpu":
            return MessageLane(self.group)
        from counterpoint.ops.copy_lane import CopyLane  # noqa: PLC0415  needs cuda-bindings

        return CopyLane(self.group, self.device, self._agreement, name)

    def num_symmetric_bytes(self) -> int:
        """Bytes of symmetric memory held on this rank."""
        of_lanes = sum(lane.num_symmetric_bytes() for lane in self._lanes.values())
        return of_lanes + (self.transport.num_symmetric_bytes() if self.transport else 0)

    def num_recordings(self) -> int:
        """Calls recorded as CUDA graphs on this rank."""
        return self.transport.num_recordings() if self.transport else 0

    def close(self) -> None:
        """Give back all memory."""
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()
        self.plans.clear()
        if self.transport is not None:
            self.transport.close()


def _whereabouts(device: torch.device) -> str:
    return f"{socket.gethostname()}/{torch.cuda.get_device_properties(device).uuid}"


def _obstacle(device: torch.device, found: list[str]) -> str:
    """Why this rank cannot use copy engines, or nothing. GPUs that are not visible here are taken to be reachable."""
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        return "cuda-bindings is not installed: pip install torch cuda-bindings"
    wanted = {entry.split("/")[1] for entry in found}
    for number in range(torch.cuda.device_count()):
        is_wanted = str(torch.cuda.get_device_properties(number).uuid) in wanted
        if is_wanted and number != device.index and not torch.cuda.can_device_access_peer(device.index, number):
            return f"GPU {device.index} cannot reach the memory of GPU {number}"
    return ""


def _machine_of(device: torch.device) -> Machine:
    """The machine whose figures the heuristic takes: this GPU's, or where none is shipped the default."""
    found = machine_for_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return found or load_machine(DEFAULT_MACHINE)


@cache
def _runtimes() -> dict[tuple[str, torch.device], Runtime]:
    """The runtimes of this process: what the operators, which take a group's name, find theirs by."""
    return {}


def runtime_of(group_name: str, device: torch.device) -> Runtime:
    """The runtime of a group on a device; made, by all ranks together, when first asked for."""
    group = distributed_c10d._resolve_process_group(group_name)
    runtimes = _runtimes()
    found = runtimes.get((group_name, device))
    if found is None or found.group is not group:  # a group may be destroyed and another one get its name
        refuse_in_capture("What this group does by copy engines", device)
        if found is not None:
            runtimes.pop((group_name, device)).close()
        found = runtimes[group_name, device] = Runtime(group, device)
    return found


def all_runtimes() -> list[Runtime]:
    """Every runtime of this process."""
    return list(_runtimes().values())


def forget_runtimes() -> None:
    """Close all runtimes."""
    runtimes = _runtimes()
    while runtimes:
        runtimes.popitem()[1].close()
