"""Host operators: which PyTorch operator launched a GPU operation, with what shapes, in which phase and module.

The profiler writes the number of the innermost operator with each GPU operation ("External id"), also for launches of
CUDA graphs. While a file is read, every operator is kept in a few bytes; those that launched something become values at the
end. The phase is that of the launch. It is backward in the engine's threads and while the engine evaluates a function,
optimizer within `Optimizer.step#...` and between that and the backward pass before it, and forward otherwise. The module is
the innermost recorded `nn.Module` or annotation around the launch; in the backward pass, the one around the forward operator
of the same sequence number. This module does not know GPU operations.
"""

import re
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

import msgspec

from counterpoint.step import MatmulSizes
from counterpoint.traces.activity import HostOperator, HostPhase
from counterpoint.traces.event_stream import Event

LEFT_OPERAND = {"aten::mm": 0, "aten::addmm": 1}  # number of the input that is the left matrix; the right one follows
# Operators that make views or allocate memory and launch nothing themselves: half of what a trace holds.
_VIEWS_AND_ALLOCATIONS = """
    _reshape_alias _unsafe_view alias as_strided chunk detach detach_ empty empty_like empty_strided expand flatten
    is_nonzero narrow new_empty new_empty_strided permute resize_ result_type select set_ slice split split_with_sizes
    squeeze swapaxes t transpose unbind unflatten unsqueeze view view_as
"""
LAUNCHES_NOTHING = frozenset(f"aten::{name}" for name in _VIEWS_AND_ALLOCATIONS.split())
ENGINE = "autograd::engine::evaluate_function"
MODULE = "nn.Module: "
OPTIMIZER = ("Optimizer.step#", "Optimizer.zero_grad#")
NO_MODULE = (
    "ProfilerStep#",
    "Optimizer.",
    "nccl:",
    "gloo:",
    "enumerate(DataLoader)",
    "## Call CompiledFxGraph",
    "DataParallel",
)
_FSDP_MODULE = re.compile(r"^FSDP::.*?(?:\(([^()]+)\)|for (\S+))$")

T = TypeVar("T")
Launch = tuple[int, float, str]  # the profiler's number of an operator, the time of the launch, the thread
_Key = tuple[str, bytes, bytes] | str  # name, shapes and types as the profiler wrote them, or the name alone


class _Arguments(msgspec.Struct, gc=False):
    """The arguments that the profiler writes with a host operation; shapes only if it recorded them."""

    external_id: int = msgspec.field(default=-1, name="External id")
    sequence: int = msgspec.field(default=-1, name="Sequence number")
    forward_thread: int = msgspec.field(default=0, name="Fwd thread id")
    dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Input type")


class _Windows:
    """Nested time ranges of one thread, each with a number."""

    def __init__(self) -> None:
        self.starts, self.ends, self.numbers = array("d"), array("d"), array("q")

    def add(self, start_us: float, end_us: float, number: int) -> None:
        self.starts.append(start_us)
        self.ends.append(end_us)
        self.numbers.append(number)

    def innermost(self, times_us: Iterable[float]) -> dict[float, int]:
        """Return the number of the innermost range around each time; times that lie in no range are left out."""
        order = sorted(range(len(self.starts)), key=lambda place: (self.starts[place], -self.ends[place]))
        found: dict[float, int] = {}
        open_places: list[int] = []
        next_place = 0
        for time_us in sorted(set(times_us)):
            while next_place < len(order) and self.starts[order[next_place]] <= time_us:
                open_places.append(order[next_place])
                next_place += 1
            while open_places and self.ends[open_places[-1]] < time_us:
                open_places.pop()
            if open_places:
                found[time_us] = self.numbers[open_places[-1]]
        return found


class HostOperators:
    """Collects the operators of a file, event by event."""

    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(_Arguments)
        self._list_decoder = msgspec.json.Decoder(list[_Arguments])
        self._keys: dict[_Key, int] = {}
        self._external_ids, self._key_numbers = array("q"), array("i")
        self._sequences, self._times, self._sequence_threads = array("q"), array("d"), array("i")
        self._threads: dict[int | str, int] = {}
        self._operator_threads: set[int | str] = set()
        self._starts: list[tuple[float, bool]] | None = None  # starts of backward functions and, with True, of the optimizer
        self._names: dict[str, int] = {}
        self._engine: dict[str, _Windows] = {}
        self._optimizer: dict[str, _Windows] = {}
        self._steps: dict[str, _Windows] = {}
        self._modules: dict[str, _Windows] = {}
        self._annotations: dict[str, _Windows] = {}

    def add_operators(self, events: list[Event]) -> None:
        """Keep `cpu_op` events; skip those whose arguments cannot be read, because shapes and names are optional."""
        keys, numbers = self._keys, []
        self._operator_threads |= {event.tid for event in events}
        kept, arguments = decode_arguments(events, self._decoder, self._list_decoder)
        forward: list[tuple[Event, int]] = []
        for event, found in zip(kept, arguments, strict=True):
            sequence, dims = found.sequence, found.dims
            if sequence >= 0:
                if event.name.startswith(ENGINE):
                    windows = self._engine.setdefault(str(event.tid), _Windows())
                    windows.add(event.ts, event.ts + event.dur, _small(sequence))
                elif found.forward_thread == 0:
                    forward.append((event, sequence))
            key = (event.name, bytes(dims), bytes(found.types)) if dims else event.name
            numbers.append(keys.setdefault(key, len(keys)))
        self._key_numbers.extend(array("i", numbers))
        self._add_forward(forward)
        try:
            self._external_ids.extend(array("q", [found.external_id for found in arguments]))
        except OverflowError:
            self._external_ids.extend([_small(found.external_id) for found in arguments])

    def _add_forward(self, operators: list[tuple[Event, int]]) -> None:
        """Keep when, and in which thread, the forward operators of these sequence numbers ran."""
        threads = self._threads
        self._times.extend(array("d", [event.ts for event, _ in operators]))
        self._sequences.extend(array("q", [_small(sequence) for _, sequence in operators]))
        numbers = [threads.setdefault(event.tid, len(threads)) for event, _ in operators]
        self._sequence_threads.extend(array("i", numbers))

    @property
    def threads(self) -> set[str]:
        """The threads that ran operators."""
        return set(map(str, self._operator_threads))

    def add_annotation(self, event: Event) -> None:
        """Keep a `user_annotation` event, or the `python_function` event of an `nn.Module`."""
        thread, name = str(event.tid), event.name
        kept, module = self._annotations, name
        if name.startswith(MODULE):
            kept, module = self._modules, name.removeprefix(MODULE)
        elif name.startswith(OPTIMIZER):
            kept = self._optimizer
        elif name.startswith("ProfilerStep#"):
            kept = self._steps
        elif found := _FSDP_MODULE.match(name):
            module = found[1] or found[2]
        elif name.startswith(NO_MODULE) or name.startswith("FSDP::") or "DataParallel" in name:
            return
        number = self._names.setdefault(module, len(self._names))
        kept.setdefault(thread, _Windows()).add(event.ts, event.ts + event.dur, number)

    def operators_of(self, launches: Sequence[Launch | None]) -> tuple[tuple[HostOperator, ...], list[int | None]]:
        """Return the operators that launched something, and for each launch the index of its operator among them."""
        wanted = {launch[0] for launch in launches if launch is not None}
        keys = list(self._keys)
        key_of = {
            external_id: keys[number]
            for external_id, number in zip(self._external_ids, self._key_numbers, strict=True)
            if external_id in wanted
        }
        by_thread: dict[str, list[float]] = {}
        for launch in launches:
            if launch is not None:
                by_thread.setdefault(launch[2], []).append(launch[1])
        phases = {thread: self._phases(thread, times) for thread, times in by_thread.items()}
        modules = {thread: self._modules_at(thread, times) for thread, times in by_thread.items()}
        found: dict[tuple[_Key, str, HostPhase, str], int] = {}
        numbers: list[int | None] = []
        for launch in launches:
            key = None if launch is None else key_of.get(launch[0])
            if launch is None or key is None:
                numbers.append(None)
                continue
            _, time_us, thread = launch
            known = (key, thread, phases[thread][time_us], modules[thread].get(time_us, ""))
            numbers.append(found.setdefault(known, len(found)))
        return tuple(_operator(*each) for each in found), numbers

    def sizes_of(self, external_ids: set[int]) -> dict[int, MatmulSizes]:
        """Return rows, inner size and columns of these operators' matrix multiplications, if shapes were recorded."""
        shaped = ((key, number) for key, number in self._keys.items() if not isinstance(key, str))
        sizes = {number: _matmul_sizes(*key[:2]) for key, number in shaped if key[0] in LEFT_OPERAND}
        if not sizes:
            return {}
        return {
            external_id: known
            for external_id, number in zip(self._external_ids, self._key_numbers, strict=True)
            if external_id in external_ids and (known := sizes.get(number)) is not None
        }

    def _phases(self, thread: str, times: list[float]) -> dict[float, HostPhase]:
        """Return the phase of each launch of a thread."""
        engine, optimizer = self._engine.get(thread), self._optimizer.get(thread, _Windows()).innermost(times)
        if engine is not None and thread not in self._steps:
            return {time_us: "optimizer" if time_us in optimizer else "backward" for time_us in times}
        backward = engine.innermost(times) if engine is not None else {}
        found: dict[float, HostPhase] = {}
        for time_us in times:
            is_optimizer = time_us in optimizer or self._is_before_optimizer(time_us)
            found[time_us] = "backward" if time_us in backward else "optimizer" if is_optimizer else "forward"
        return found if self._engine or self._optimizer else dict.fromkeys(times, "unknown")

    def _is_before_optimizer(self, time_us: float) -> bool:
        """Return whether a time lies between a backward pass and the optimizer: jobs clip gradients there."""
        if self._starts is None:
            marks = [(start, False) for each in self._engine.values() for start in each.starts]
            marks += [(start, True) for each in self._optimizer.values() for start in each.starts]
            self._starts = sorted(marks)
        place = bisect_left(self._starts, (time_us, False))
        return 0 < place < len(self._starts) and self._starts[place][1] and not self._starts[place - 1][1]

    def _modules_at(self, thread: str, times: list[float]) -> dict[float, str]:
        """Return the innermost module or annotation around each launch of a thread."""
        names = list(self._names)
        found: dict[float, str] = {}
        for kept in (self._annotations, self._modules):  # the name of a module replaces that of an annotation
            inside = kept.get(thread, _Windows()).innermost(times)
            found |= {time_us: names[number] for time_us, number in inside.items()}
        if self._modules and thread in self._engine:
            forward = self._forward_modules()
            sequences = self._engine[thread].innermost(times)
            found |= {time_us: forward[sequence] for time_us, sequence in sequences.items() if sequence in forward}
        return found

    def _forward_modules(self) -> dict[int, str]:
        """Return the module of the forward operator of each sequence number."""
        names, found = list(self._names), {}
        for thread, number in self._threads.items():
            places = [place for place, each in enumerate(self._sequence_threads) if each == number]
            inside = self._modules.get(str(thread), _Windows()).innermost(self._times[place] for place in places)
            for place in places:
                if self._times[place] in inside:
                    found[self._sequences[place]] = names[inside[self._times[place]]]
        return found


def innermost_ranges(ranges: list[Event], moments: Iterable[tuple[float, str]]) -> dict[tuple[float, str], int]:
    """Return, for each moment of a thread, the place in `ranges` of the innermost range around it; skip those in none."""
    windows: dict[str, _Windows] = {}
    for place, event in enumerate(ranges):
        windows.setdefault(str(event.tid), _Windows()).add(event.ts, event.ts + event.dur, place)
    times: dict[str, list[float]] = {}
    for time_us, thread in moments:
        times.setdefault(thread, []).append(time_us)
    return {
        (time_us, thread): place
        for thread, of_thread in times.items()
        for time_us, place in windows.get(thread, _Windows()).innermost(of_thread).items()
    }


def decode_arguments(
    events: list[Event], decoder: msgspec.json.Decoder[T], list_decoder: msgspec.json.Decoder[list[T]]
) -> tuple[list[Event], list[T]]:
    """Decode the arguments of events together; if that fails, one by one, and drop events with other arguments."""
    try:
        return events, list_decoder.decode(b"[" + b",".join([event.args for event in events]) + b"]")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        kept, arguments = [], []
        for event in events:
            with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                arguments.append(decoder.decode(event.args))
                kept.append(event)
        return kept, arguments


def _small(number: int) -> int:
    """Return a number of the profiler, or -1 for a value that the profiler never writes."""
    return number if -1 <= number < 2**62 else -1


def _operator(key: _Key, thread: str, phase: HostPhase, module: str) -> HostOperator:
    name, dims, types = (key, b"", b"") if isinstance(key, str) else key
    return HostOperator(
        name=name,
        shapes=dims.decode(errors="replace"),
        dtype=_first_type(types),
        thread=thread,
        phase=phase,
        module=module,
    )


def _first_type(types: bytes) -> str:
    """Return the type of the first tensor among the inputs, or "" if none was recorded."""
    try:
        names = msgspec.json.decode(types, type=list[object]) if types else []
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return next((name for name in names if isinstance(name, str) and name not in ("", "Scalar", "ScalarList")), "")


def _matmul_sizes(name: str, dims: bytes) -> MatmulSizes | None:
    left = LEFT_OPERAND[name]
    try:
        found = msgspec.json.decode(dims, type=list[list[int]])[left : left + 2]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    match found:
        case [[rows, inner], [other, columns]] if inner == other and min(rows, inner, columns) > 0:
            return rows, inner, columns
    return None
