"""The memory of FSDP2's gathered parameters when copies fill it directly.

FSDP frees a group's memory on the computation's stream as soon as the group's computation is issued. What is allocated next
may get that memory, and would have to wait for that computation. So memory that copies filled is freed when FSDP has freed
`MOST_RETIRED` more groups, and is allocated on a stream of its own, which waits for the former users. No rank's host waits.
A model of so few groups gains nothing by that, and frees its memory at once.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, final

import torch
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, alloc_storage, free_storage
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

MOST_RETIRED = 2  # as many as FSDP's own gathers hold: two gathered buffers beside the parameters in use


@final
class ParameterMemory:
    """The memory of one model's gathered parameters on one device."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._device, self._num_groups = device, 0
        self._in_use: dict[int, torch.Tensor] = {}  # filled by copies, by identity
        self._leaving: dict[int, torch.Tensor] = {}  # of the group that FSDP freed last
        self._leaving_group = 0
        self._user: Any = None  # the stream that used them
        self._retired: deque[tuple[dict[int, torch.Tensor], Any]] = deque()  # groups, and the events of their last use

    def adopt(self, parameters: FSDPParamGroup) -> None:
        """Free these parameters' memory later than FSDP does, if copies filled it."""
        self._num_groups += 1
        for parameter in parameters.fsdp_params:
            parameter.free_unsharded_param = partial(self._free, parameter, self._num_groups)

    def _free(self, parameter: FSDPParam, number: int) -> None:
        """Free the memory of a parameter of the group with this number."""
        for tensor in chain(parameter.all_gather_outputs, parameter._unsharded_inner_tensors):
            name = id(tensor)
            if name in self._in_use:
                self._leave(self._in_use.pop(name), number)
            elif not any(name in group for group in (self._leaving, *(group for group, _ in self._retired))):
                free_storage(tensor)  # FSDP filled it; it also frees parameters that it has freed before

    def _leave(self, tensor: torch.Tensor, number: int) -> None:
        if number != self._leaving_group:  # at the end of a backward pass groups leave, and none is gathered
            self._retire()
        self._leaving_group = number
        self._user = torch.cuda.current_stream(self._device) if self._stream is not None else None
        if self._num_groups <= MOST_RETIRED:
            self._free_after_use(tensor)
            return
        self._leaving[id(tensor)] = tensor
        while len(self._retired) >= MOST_RETIRED:
            self._release()

    def _free_after_use(self, tensor: torch.Tensor) -> None:
        """Free memory now; the allocator gives it to others when its last use has ended."""
        if self._user is not None:
            tensor.record_stream(self._user)
        free_storage(tensor)

    def allocate(self, outputs: Callable[[], Sequence[torch.Tensor]]) -> Sequence[torch.Tensor]:
        """Allocate the tensors that `outputs` returns; the current stream follows their memory's former users."""
        self._retire()
        with torch.cuda.stream(self._stream):  # without effect on CPUs
            tensors = outputs()
            self._take_back(tensors)
            for tensor in tensors:
                alloc_storage(tensor)
                self._in_use[id(tensor)] = tensor
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return tensors

    def leave_to_fsdp(self, parameters: Iterable[FSDPParam]) -> None:
        """Free at once what still waits to be freed of these parameters: FSDP is about to fill them itself."""
        self._retire()
        self._take_back(chain.from_iterable(parameter.all_gather_outputs for parameter in parameters))

    def _retire(self) -> None:
        """Note when the last use of what FSDP freed last ends."""
        if self._leaving:
            self._retired.append((self._leaving, self._user.record_event() if self._user is not None else None))
            self._leaving = {}

    def _take_back(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let tensors whose memory still waits to be freed have other memory, which need not be waited for."""
        for tensor in tensors:
            for group, _ in self._retired:
                if group.pop(id(tensor), None) is not None:
                    self._free_after_use(tensor)

    def _release(self) -> None:
        """Free the memory of the group that was retired first, after its last use."""
        group, used = self._retired.popleft()
        if used is not None:
            self._stream.wait_event(used)
        for tensor in group.values():
            free_storage(tensor)

    def undo(self, groups: Iterable[FSDPParamGroup]) -> None:
        """Let FSDP free the memory of these groups of parameters again. Between steps."""
        self._retire()
        while self._retired:
            self._release()
        if self._stream is not None:
            for tensor in self._in_use.values():
                tensor.record_stream(torch.cuda.current_stream(self._device))
        self._in_use.clear()
        self._num_groups = 0
        for parameter in chain.from_iterable(group.fsdp_params for group in groups):
            del parameter.free_unsharded_param
