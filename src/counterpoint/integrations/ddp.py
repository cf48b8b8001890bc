"""Averages DDP's gradients by copy engines, several buckets in flight.

    model = DistributedDataParallel(model)
    ddp.register(model)

Beside NCCL's kernels, matmuls lose SMs; beside copies, they run at full speed, and only the sum of a bucket needs SMs.
Where gradients are large enough, they are averaged where autograd leaves them, without buckets (`ddp_in_place.py`).
docs/integrations_measured.md has figures. This module knows about static graphs only what a communication hook is told. DDP
keeps a hook for good, so when copies are off, the hook does what DDP does without one, bit for bit. The exception: with 3,
5, 6 or 7 ranks, the last bit may differ for gradients that persist as views of buckets (`zero_grad(set_to_none=False)`),
because DDP divides them where it multiplies others. The model itself does not hold the hook's state, so it can be copied
and saved; a copy has no hook.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, Literal, final
from weakref import WeakKeyDictionary, WeakSet, finalize, ref

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from counterpoint.controls import ALL_REDUCES_IN_FLIGHT, LEAST_PART_BYTES
from counterpoint.cuda.block_sums import Pieces
from counterpoint.errors import IntegrationError, RefusedTogetherError
from counterpoint.integrations.compression import AbstractWire, AsBfloat16, AsIs, AsScaledFloat8
from counterpoint.integrations.ddp_in_place import AveragesInPlace, lack_of_memory, needs_buckets
from counterpoint.integrations.lane_collectives import (
    LEAST_PIECE_BYTES,
    MAX_BUFFER_BYTES,
    SWITCHED_OFF,
    CollectiveCounts,
    all_reduce,
    all_reduce_in_place,
    cut,
    future_of,
    require_buffer,
    require_in_flight,
    require_least_part,
    require_least_piece,
    require_switch,
    streams_of,
    uses_nccl,
    warn_from_first_rank,
)
from counterpoint.integrations.lanes import AcrossHosts, Lanes, require_across_hosts
from counterpoint.ops.collectives import library_all_reduce
from counterpoint.ops.lane import AbstractLane
from counterpoint.value import require

Compression = Literal["bf16", "fp8"]
WIRES: dict[Compression | None, type[AbstractWire]] = {None: AsIs, "bf16": AsBfloat16, "fp8": AsScaledFloat8}
WIDER_THAN_BFLOAT16 = (torch.float32, torch.float64)
IS_SPARSE = "its gradients are sparse"
NOT_SUMMABLE = "fp8 is summed within one host only"
OF_THE_JOB = "the job has registered a communication hook of its own"
IN_JOIN = "the model runs in join(), where ranks may take different numbers of steps"
Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]


@final
class BucketAverages:
    """State of the hook: lanes, wire format, switch, and counts of buckets by copies and by the library."""

    def __init__(
        self, model: DistributedDataParallel, lanes: Lanes, compression: Compression | None, limits: tuple[int, int, int]
    ) -> None:
        self._model, self._lanes = ref(model), lanes  # the model holds its hook
        least_part_bytes, least_piece_bytes, self._max_buffer_bytes = limits
        self._wire, self._as_is = WIRES[compression](), AsIs()
        self._compression = compression
        self._tally = CollectiveCounts("a gradient bucket", least_part_bytes, lanes.group)
        self._is_on = False
        self._in_place = AveragesInPlace(lanes.group.size(), least_part_bytes, least_piece_bytes)
        finalize(model, self._in_place.forget).atexit = False  # whoever keeps this object does not keep the parameters
        self._is_pass_in_place = False
        self._room: bool | None = None  # whether gradients can lie beside buckets, once that was looked at
        self._of_job: tuple[Hook, object] | None = None  # a hook that averages in place of this one, and its state

    def give_way(self, hook: Hook, state: object) -> None:
        """Leave all buckets to a hook of the job's own from now on. Call it between steps, on every rank."""
        self._of_job = hook, state

    def use(self, is_on: bool) -> None:
        """From the next backward pass on, average by copies, or by the library as DDP does without a hook. A pass in place
        whose forward pass has run stays one, for DDP was told so.

        Call it between steps, with the same argument on every rank. Raises `IntegrationError`.
        """
        require_switch(is_on=is_on)
        self._is_on = is_on
        if is_on:
            self._lanes.prepare()

    @property
    def is_in_join(self) -> bool:
        """Whether the job has joined the model, alone or with others: from then on its buckets are the library's."""
        model = self._model()
        return model is not None and bool(model._join_config.enable)

    @property
    def is_on(self) -> bool:
        """Whether buckets go by copies, unless something prevents it."""
        return self._is_on

    @property
    def num_by_copies(self) -> int:
        """The number of buckets that copies averaged."""
        return self._tally.num_by_copies

    @property
    def num_by_library(self) -> int:
        """The number of buckets that the library's collective averaged."""
        return self._tally.num_by_library

    @property
    def library_reason(self) -> str:
        """Why the library did most of these."""
        return self._tally.library_reason

    @property
    def num_in_place(self) -> int:
        """The number of those by copies that needed no bucket."""
        return self._tally.num_in_place

    @property
    def num_bytes(self) -> int:
        """The bytes that copies moved from this rank to others."""
        return self._tally.num_bytes

    def __repr__(self) -> str:
        """Describe the counts of buckets by copies and by the library, and whether copies are on."""
        return f"{self._tally}; copies are {'on' if self._is_on else 'off'}"

    def begin_pass(self, model: DistributedDataParallel) -> bool:
        """Return whether gradients of this forward pass are averaged without DDP's buckets; the same on all ranks.

        As in DDP, a forward pass that is not to be averaged does not affect an earlier one whose backward pass comes later.
        """
        self._is_pass_in_place = False
        if self._in_place.has_ended():
            self._in_place.disarm()
            if model.find_unused_parameters:
                model.reducer._reset_state()  # it has noted which parameters were used, to average them later
        if not model._has_rebuilt_buckets and not model.find_unused_parameters:  # else they stay as they were made
            self._in_place.forget()
        if not (torch.is_grad_enabled() and model.require_backward_grad_sync):
            return False
        self._in_place.require_finished(lambda: {each: name for name, each in model.module.named_parameters()})
        self._in_place.disarm()
        if not self._is_on:
            self._in_place.remove()
        self._is_pass_in_place = (
            self._is_on
            and self._in_place.is_possible()
            and self._of_job is None
            and not self.is_in_join
            and self._compression is None
            and self._lanes.num_hosts == 1
            and not needs_buckets(model)
            and not self._lanes.obstacle
            and (not model.gradient_as_bucket_view or self._has_room())
        )
        return self._is_pass_in_place

    def _has_room(self) -> bool:
        """Return whether all ranks have memory for gradients beside buckets; without views, they are there already."""
        if self._room is None:
            problem = lack_of_memory(self._lanes.device, self._in_place.num_bytes)
            refusal = self._lanes.refusal_of("gradients beside buckets", problem)
            if refusal:
                warn_from_first_rank("Gradients stay in DDP's buckets: %s.", refusal, group=self._lanes.group)
            self._room = not refusal
        return self._room

    def end_pass(self, model: DistributedDataParallel) -> bool:
        """Average in place in the next backward pass if `begin_pass` returned True; return the same."""
        if self._is_pass_in_place:
            self._in_place.arm(self._average_in_place, may_leave_out=model.find_unused_parameters)
        return self._is_pass_in_place

    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket; DDP calls this for every bucket."""
        flat = bucket.buffer()
        self._in_place.learn(bucket)
        if self._of_job is not None:
            hook, state = self._of_job
            self._tally.count_library(OF_THE_JOB)
            return hook(state, bucket)
        if self._is_librarys(flat):
            return _average_by_library(flat, self._lanes.group, self._num_averaged())
        return future_of(flat, self._average_parts(flat, self._wire_for(flat.dtype)))

    def _is_librarys(self, flat: torch.Tensor) -> bool:
        obstacle = self._obstacle_to(flat)
        part_bytes = 0 if obstacle else -(-flat.nbytes * self._lanes.num_hosts // self._lanes.group.size())
        return self._lanes.leave_to_library(self._tally, part_bytes, obstacle)

    def _obstacle_to(self, flat: torch.Tensor) -> str:
        """Return why the library should average this bucket, or nothing."""
        if self.is_in_join:
            return IN_JOIN
        if not self._is_on:
            return SWITCHED_OFF
        if flat.layout != torch.strided:
            return IS_SPARSE
        if self._lanes.num_hosts > 1 and not self._wire_for(flat.dtype).is_summable:
            return NOT_SUMMABLE
        return self._lanes.obstacle_to("all_reduce", flat.nbytes)

    def _num_averaged(self) -> int:
        """Return by how many ranks to divide: in join() the job may ask for those that still have inputs."""
        model, group = self._model(), self._lanes.group
        if not self.is_in_join or model is None or model._divide_by_initial_world_size:
            return int(group.size())
        # a rank without inputs calls the hook outside of a backward pass
        has_inputs = torch.tensor(float(torch._C._current_graph_task_id() >= 0), device=self._lanes.device)
        library_all_reduce(has_inputs, group=group)
        return int(has_inputs.item())

    def _wire_for(self, dtype: torch.dtype) -> AbstractWire:
        """Return the wire format of a bucket; one that bf16 would not shrink is sent unchanged."""
        return self._as_is if self._compression == "bf16" and dtype not in WIDER_THAN_BFLOAT16 else self._wire

    def _average_parts(self, flat: torch.Tensor, wire: AbstractWire) -> list[Any]:
        """Average the bucket in as many parts as the buffers require; return the streams on which that is done."""
        most = self._max_buffer_bytes // flat.itemsize
        parts, levels = [[part] for part in flat.split(most)], self._lanes.levels
        streams, num_done = self._on_lanes(parts, lambda lane, part: all_reduce(lane, levels, part[0], wire))
        if num_done < len(parts):
            group = self._lanes.group
            library_all_reduce(_scaled(flat[num_done * most :], group.size()), group=group)
            return [*streams, *streams_of(flat)]
        return streams

    def _average_in_place(self, gradients: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Begin to average these flat gradients; return what makes the current stream wait for that."""
        group, num_elements = self._lanes.group, sum(map(len, gradients))
        part_bytes = -(-num_elements * gradients[0].itemsize // group.size())
        if self._tally.is_librarys(part_bytes, self._lanes.obstacle):
            return _average_apart(gradients, group)
        most = self._max_buffer_bytes // gradients[0].itemsize
        parts, levels = cut(gradients, most, -(-num_elements // most)), self._lanes.levels
        streams, num_done = self._on_lanes(
            parts, lambda lane, part: all_reduce_in_place(lane, levels, part), is_in_place=True
        )
        rest = [piece for part in parts[num_done:] for piece in part]
        finish = _average_apart(rest, group) if rest else None

        def wait() -> None:
            for current in streams_of(gradients[0]):
                for stream in streams:
                    current.wait_stream(stream)
            if finish is not None:
                finish()

        return wait

    def _on_lanes(
        self, parts: Sequence[Pieces], reduce: Callable[[AbstractLane, Pieces], int], *, is_in_place: bool = False
    ) -> tuple[list[Any], int]:
        """Average parts on the next lanes. Return the streams on which that is done, and the number of parts: if memory runs
        out, all ranks agree on it, and the rest is the library's.
        """
        streams: list[Any] = []
        num_bytes = 0
        for number, part in enumerate(parts):
            lane = self._lanes.next()
            with lane.issuing():
                streams += streams_of(part[0])
                try:
                    num_bytes += reduce(lane, part)
                except RefusedTogetherError as refusal:
                    self._lanes.give_up(refusal)
                    self._tally.count_library(self._lanes.obstacle)
                    return streams, number
        self._tally.count_copies(num_bytes, self._lanes.num_hosts, is_in_place=is_in_place)
        return streams, len(parts)


def register(
    model: DistributedDataParallel,
    *,
    in_flight: int = ALL_REDUCES_IN_FLIGHT,
    compression: Compression | None = None,
    least_part_bytes: int = LEAST_PART_BYTES,
    least_piece_bytes: int = LEAST_PIECE_BYTES,
    max_buffer_bytes: int = MAX_BUFFER_BYTES,
    across_hosts: AcrossHosts = "auto",
    is_on: bool = True,
) -> BucketAverages:
    """Average the model's gradient buckets by copy engines from now on; call it on every rank, between two steps.

    `in_flight`: concurrent buckets, each with its own buffers. `compression`: the wire format (errors:
    `compression.py`). `least_part_bytes`: a bucket with less from each rank stays with the library; in place,
    buckets are joined until they have as much. `least_piece_bytes`: gradients that are smaller on average stay in buckets.
    `max_buffer_bytes`: larger buckets are sent in parts. `across_hosts`: whether buckets of several hosts are split into two
    levels. `is_on`: False leaves everything to the library until `use(True)`, and makes no buffers. Returns the hook's
    state, with switch and counts. DDP accepts only one hook, so to remove it, wrap the model
    again. Raises `IntegrationError`.
    """
    require(
        isinstance(model, DistributedDataParallel),
        IntegrationError,
        f"register() takes a model wrapped in DistributedDataParallel; found {type(model).__name__}. Wrap it first.",
    )
    require_in_flight(in_flight)
    require_least_part(least_part_bytes)
    require_least_piece(least_piece_bytes)
    require_buffer(max_buffer_bytes)
    require_across_hosts(across_hosts)
    require_switch(is_on=is_on)
    require(
        compression in list(WIRES),
        IntegrationError,
        f"compression must be None, 'bf16' or 'fp8'; found {compression!r}. Choose one.",
    )
    _require_types(model, compression)
    _require_no_hook(model)
    lanes = Lanes((model.process_group, model.device, "ddp"), in_flight, across_hosts)
    state = BucketAverages(model, lanes, compression, (least_part_bytes, least_piece_bytes, max_buffer_bytes))
    try:
        # a compiled step may call backward(), and dynamo would trace the hook
        model.register_comm_hook(state, torch.compiler.disable(BucketAverages.average))
    except RuntimeError as problem:  # one of torch's built-in hooks, which the model does not list
        raise IntegrationError(_has_hook("a built-in hook of torch")) from problem
    model._comm_hooks.pop()  # copies of the model would hold the state, and with it this process's groups and memory
    _registered()[model] = state
    _watch_passes()
    state.use(is_on)
    return state


@cache
def _registered() -> WeakKeyDictionary[DistributedDataParallel, BucketAverages]:
    """Return the hooks of this process's models."""
    return WeakKeyDictionary()


@cache
def _watch_passes() -> None:
    """Let forward passes of the models of `register` announce to DDP whether it is to average in the backward pass."""
    before_forward, after_forward = DistributedDataParallel._pre_forward, DistributedDataParallel._post_forward

    @wraps(before_forward)
    def _pre_forward(model: DistributedDataParallel, *inputs: Any, **named: Any) -> Any:
        averages = _registered().get(model)
        if averages is None or not averages.begin_pass(model):
            return before_forward(model, *inputs, **named)
        with _without_reducer(model):
            return before_forward(model, *inputs, **named)

    @wraps(after_forward)
    def _post_forward(model: DistributedDataParallel, output: Any) -> Any:
        averages = _registered().get(model)
        if averages is None or not averages.end_pass(model):
            return after_forward(model, output)
        with _without_reducer(model):
            output = after_forward(model, output)
        model.require_forward_param_sync = True  # of buffers, in the next forward pass
        return output

    # dynamo would trace the cached dictionary of models as a new one
    DistributedDataParallel._pre_forward = torch.compiler.disable(_pre_forward)
    DistributedDataParallel._post_forward = torch.compiler.disable(_post_forward)


@contextmanager
def _without_reducer(model: DistributedDataParallel) -> Iterator[None]:
    """Tell DDP, as `no_sync` does, that it is not to average."""
    model.require_backward_grad_sync = False
    try:
        yield
    finally:
        model.require_backward_grad_sync = True


@cache
def watch_job() -> None:
    """Let a hook that a job that nobody edits registers from now on take over a model of `register`. All ranks register it
    between the same steps.
    """
    register_for_job = DistributedDataParallel.register_comm_hook

    @wraps(register_for_job)
    def register_comm_hook(model: DistributedDataParallel, state: object, hook: Hook) -> None:
        averages = _registered().get(model)
        if averages is None or model._comm_hooks:
            register_for_job(model, state, hook)
            return
        model._check_comm_hook(hook)
        model._comm_hooks.append((hook, state))
        averages.give_way(hook, state)

    DistributedDataParallel.register_comm_hook = register_comm_hook


@cache
def watch_joins() -> WeakSet[DistributedDataParallel]:
    """Return the models that may be in join(): those that enter it from the first call on are added."""
    found = WeakSet[DistributedDataParallel]()
    join_hook = DistributedDataParallel.join_hook

    @wraps(join_hook)
    def noted_join_hook(model: DistributedDataParallel, **choices: Any) -> Any:
        found.add(model)
        return join_hook(model, **choices)

    DistributedDataParallel.join_hook = noted_join_hook
    return found


def _require_types(model: DistributedDataParallel, compression: Compression | None) -> None:
    # without those that the job told DDP to ignore
    dtypes = {parameter.dtype for parameter in model._module_parameters if parameter.requires_grad}
    require(
        compression != "bf16" or any(dtype in WIDER_THAN_BFLOAT16 for dtype in dtypes),
        IntegrationError,
        f"compression='bf16' saves nothing: the gradients are {_names(dtypes)}. Leave it out, or use 'fp8'.",
    )
    require(
        all(dtype.is_floating_point for dtype in dtypes),
        IntegrationError,
        f"Only floating-point gradients can be averaged; found {_names(dtypes)}. Keep them out of DDP.",
    )


def _require_no_hook(model: DistributedDataParallel) -> None:
    require(
        not model._use_python_reducer,
        IntegrationError,
        "torch._dynamo's optimize_ddp is 'python_reducer', which has no gradient buckets. Set it to 'ddp_optimizer'.",
    )
    require(
        model not in _registered(),
        IntegrationError,
        "register() was already called for this model. Switch the object that it returned, by use(True) and use(False).",
    )
    require(  # in its first forward pass
        not any(hasattr(parameter, "_in_backward_optimizers") for parameter in model._module_parameters),
        IntegrationError,
        _has_hook("with which DDP runs optimizers within the backward pass"),
    )
    for hook, _ in model._comm_hooks:
        raise IntegrationError(_has_hook(getattr(hook, "__qualname__", type(hook).__name__)))


def _has_hook(name: str) -> str:
    return (
        f"The model already has a communication hook, {name}, and DDP accepts only one. Remove that hook to let copies "
        "average the gradients."
    )


def _average_by_library(
    flat: torch.Tensor, group: dist.ProcessGroup, num_averaged: int
) -> torch.futures.Future[torch.Tensor]:
    """Average over so many ranks as DDP does without a hook, bit for bit."""
    is_power_of_two = num_averaged == group.size() and group.size() & (group.size() - 1) == 0
    # NCCL's mean multiplies its input by 1 / ranks. For powers of two that is exact, and it saves a pass over the
    # bucket.
    if is_power_of_two and flat.layout == torch.strided and uses_nccl(group, flat.device):
        work = library_all_reduce(flat, op=dist.ReduceOp.AVG, group=group, async_op=True)
    else:
        work = library_all_reduce(_scaled(flat, num_averaged), group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


def _average_apart(pieces: Sequence[torch.Tensor], group: dist.ProcessGroup) -> Callable[[], None]:
    """Begin to average pieces of memory by the library, in a bucket; return what waits and copies the averages back."""
    flat = torch.cat(list(pieces))
    future = _average_by_library(flat, group, group.size())

    def wait() -> None:
        future.wait()
        torch._foreach_copy_(list(pieces), flat.split([len(piece) for piece in pieces]))

    return wait


def _scaled(flat: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Divide the bucket by a number of ranks: DDP multiplies dense gradients while it copies them in, and divides
    sparse ones.
    """
    return flat.mul_(1.0 / num_ranks) if flat.layout == torch.strided else flat.div_(num_ranks)


def _names(dtypes: set[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
