"""Pipeline schedules: the order in which a stage works on micro-batches, and when everything is done.

1F1B and its interleaved form follow Megatron-LM's order (Narayanan et al., arXiv 2104.04473). zero_bubble splits the
backward pass into gradients of inputs and of weights, and fills waits with the latter. It holds no more activations in
memory than 1F1B (ZB-H1 of Qi et al., arXiv 2401.10241, in its handcrafted order). Times are those of one stage's passes;
this module knows nothing of GPUs.
"""

from collections.abc import Sequence
from typing import Literal

from counterpoint.value import Value

Action = tuple[Literal["F", "B", "W"], int, int]  # what, which chunk, which micro-batch
NEVER = float("inf")


class StageTimes(Value, frozen=True, kw_only=True):
    """Microseconds of one chunk of one stage: forward, backward, and, of the backward, the gradients of weights."""

    forward_us: float
    backward_us: float
    weights_us: float = 0.0


class Bubbles(Value, frozen=True, kw_only=True):
    """When each stage has done its last backward pass, and how long it computed, in microseconds."""

    ends_us: tuple[float, ...]
    busy_us: tuple[float, ...]


def run_pipeline(
    chunks: Sequence[Sequence[StageTimes]], num_micro_batches: int, send_us: float, *, is_sending_hidden: bool, kind: str
) -> Bubbles:
    """Run a schedule; `chunks[stage][chunk]` are times, `send_us` is what activations take from stage to stage.

    Unless `is_sending_hidden`, a stage also waits until what it sent has arrived, as blocking sends and receives do.
    """
    blocked_us = 0.0 if is_sending_hidden else send_us
    stages, parts = len(chunks), len(chunks[0])
    if kind == "zero_bubble":
        orders = [zero_bubble_order(stage, stages, num_micro_batches) for stage in range(stages)]
    else:
        orders = [action_order(stage, stages, parts, num_micro_batches) for stage in range(stages)]
    return _Runner(chunks, num_micro_batches, send_us, blocked_us, is_split=kind == "zero_bubble").run(orders)


def zero_bubble_order(stage: int, num_stages: int, num_micro_batches: int) -> list[Action]:
    """Return one stage's order in ZB-H1: gradients of weights wait for as many micro-batches as stages precede it."""
    warmup = min(num_stages - stage, num_micro_batches)
    order: list[Action] = [("F", 0, number) for number in range(warmup)]
    for number in range(num_micro_batches):
        order.append(("B", 0, number))
        if number >= stage:
            order.append(("W", 0, number - stage))
        if warmup + number < num_micro_batches:
            order.append(("F", 0, warmup + number))
    return order + [("W", 0, number) for number in range(max(0, num_micro_batches - stage), num_micro_batches)]


def action_order(stage: int, num_stages: int, num_chunks: int, num_micro_batches: int) -> list[Action]:
    """Return the order of one stage: warm-up, one forward and one backward in turn, cool-down."""
    total = num_micro_batches * num_chunks
    warmup = min(_num_warmup(stage, num_stages, num_chunks), total)
    forwards = [_work(number, num_stages, num_chunks, is_backward=False) for number in range(total)]
    backwards = [_work(number, num_stages, num_chunks, is_backward=True) for number in range(total)]
    order: list[Action] = [("F", *work) for work in forwards[:warmup]]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += [("F", *forward), ("B", *backward)]
    return order + [("B", *work) for work in backwards[total - warmup :]]


def most_held(stage: int, num_stages: int, num_chunks: int, num_micro_batches: int) -> float:
    """Return of how many micro-batches a stage at most holds the activations of all its chunks for the backward pass."""
    return min(_num_warmup(stage, num_stages, num_chunks) + 1, num_micro_batches * num_chunks) / num_chunks


def _num_warmup(stage: int, num_stages: int, num_chunks: int) -> int:
    """Return how many forward passes of a chunk a stage runs before forward and backward passes take turns."""
    if num_chunks == 1:
        return num_stages - stage - 1
    return 2 * (num_stages - stage - 1) + (num_chunks - 1) * num_stages


def _work(number: int, num_stages: int, num_chunks: int, *, is_backward: bool) -> tuple[int, int]:
    """Return the chunk and micro-batch of a stage's n-th pass in one direction; groups have a micro-batch per stage."""
    if num_chunks == 1:
        return 0, number
    group, place = divmod(number, num_stages * num_chunks)
    chunk, within = divmod(place, num_stages)
    return (num_chunks - 1 - chunk if is_backward else chunk), group * num_stages + within


class _Runner:
    """Runs every action as soon as its inputs have arrived."""

    def __init__(
        self,
        chunks: Sequence[Sequence[StageTimes]],
        num_micro_batches: int,
        send_us: float,
        blocked_us: float,
        *,
        is_split: bool,
    ) -> None:
        self._chunks, self._send_us, self._blocked_us, self._is_split = chunks, send_us, blocked_us, is_split
        self._stages, self._parts = len(chunks), len(chunks[0])
        depth = self._stages * self._parts
        self._forward = [[NEVER] * num_micro_batches for _ in range(depth)]  # when done, by virtual stage and micro-batch
        self._backward = [[NEVER] * num_micro_batches for _ in range(depth)]
        self._free = [0.0] * self._stages
        self._busy = [0.0] * self._stages

    def _ready_us(self, stage: int, action: Action) -> float:
        """Return when the inputs of an action have arrived; infinite while it is not known."""
        what, chunk, number = action
        place = chunk * self._stages + stage
        if what == "W":
            return self._backward[place][number]
        if what == "F":
            return self._forward[place - 1][number] + self._hop(place - 1, place) if place else 0.0
        own = self._forward[place][number]
        if place + 1 == self._stages * self._parts:
            return own
        return max(own, self._backward[place + 1][number] + self._hop(place + 1, place))

    def _hop(self, sender: int, receiver: int) -> float:
        return self._send_us if sender % self._stages != receiver % self._stages else 0.0

    def _duration_us(self, stage: int, action: Action) -> float:
        times = self._chunks[stage][action[1]]
        if action[0] == "F":
            return times.forward_us
        if action[0] == "W":
            return times.weights_us
        return times.backward_us - (times.weights_us if self._is_split else 0.0)

    def _do(self, stage: int, action: Action, ready_us: float, duration_us: float) -> None:
        what, chunk, number = action
        end = max(self._free[stage], ready_us) + duration_us
        place = chunk * self._stages + stage
        self._busy[stage] += duration_us
        self._free[stage] = end
        if what == "F":
            self._forward[place][number] = end
            is_sent = place + 1 < self._stages * self._parts
        elif what == "B":
            self._backward[place][number] = end
            is_sent = place > 0
        else:
            is_sent = False
        if is_sent and self._stages > 1:
            self._free[stage] += self._blocked_us

    def run(self, orders: Sequence[Sequence[Action]]) -> Bubbles:
        """Run each stage in its order."""
        places = [0] * self._stages
        is_moving = True
        while is_moving:
            is_moving = False
            for stage, order in enumerate(orders):
                while places[stage] < len(order):
                    action = order[places[stage]]
                    ready_us = self._ready_us(stage, action)
                    if ready_us == NEVER:
                        break
                    self._do(stage, action, ready_us, self._duration_us(stage, action))
                    places[stage] += 1
                    is_moving = True
        assert all(place == len(order) for place, order in zip(places, orders, strict=True)), (
            "the order of a stage deadlocks"
        )
        return Bubbles(ends_us=tuple(self._free), busy_us=tuple(self._busy))
