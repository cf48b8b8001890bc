"""Routes one call of an expert layer: exchanges and checks the counts of rows, and picks what moves the rows.

All ranks decide from the same matrix of counts, so their decisions agree: whether counts add up, whether rows go by copies
or by the library's all-to-all, in how many pieces, and whether the symmetric memory must grow. If one rank cannot get
that memory, all ranks run this call by the library.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import NamedTuple, NoReturn, TypeAlias, final

import msgspec
import numpy as np
import torch

from counterpoint.errors import OperatorError, ScheduleError
from counterpoint.ops.expert_ahead import AheadDispatch
from counterpoint.ops.expert_exchange import AbstractExpertExchange, ExpertRegion, FirstRows, RowFormat, Rows
from counterpoint.ops.expert_memory import needed_bytes
from counterpoint.ops.expert_sorting import Sorting
from counterpoint.ops.graph_cache import refuse_in_capture
from counterpoint.ops.grouped_matmul import ExpertRows
from counterpoint.ops.operator_call import expert_calls_of
from counterpoint.ops.runtime import Runtime
from counterpoint.schedule import ScheduleDescription
from counterpoint.schedule.expert_choice import CallSize, first_share, num_groups_for, sent_ahead, size_for, size_of
from counterpoint.schedule.expert_layout import Counts, ExpertLayout, ExpertRange, Pairs, num_parts_of, pair_rows

NO_MEMORY = "a rank has no symmetric memory left for copies"
NOT_PICKED = "it is estimated to be faster, or the call asks for it"
NOT_WHOLE = -(2**40)  # among the counts that ranks exchange; a sum of many does not overflow
TokensPerExpert: TypeAlias = torch.Tensor | Sequence[int]


class Pieces(NamedTuple):
    """How a call's rows are cut: the number of groups of experts, and each rank's rows in its first one, if given."""

    number: int
    firsts: tuple[int, ...] = ()

    def beside(self, found: Counts) -> Counts:
        """Return what ranks have exchanged, and two columns that hold these."""
        num_ranks, width = found.shape
        whole = np.empty((num_ranks, width + 2), dtype=np.int64)
        whole[:, :-2], whole[:, -2], whole[:, -1] = found, self.number, self.firsts or 0
        return whole

    @classmethod
    def of_columns(cls, columns: Counts) -> "Pieces":
        """Return what the columns of `beside` hold."""
        numbers, firsts = columns.T.tolist()
        return cls(numbers[0], tuple(firsts) if any(firsts) else ())


class Counted(NamedTuple):
    """What ranks have exchanged, and what follows from it: the rows of each pair of ranks, the size of the call, and whether
    any rank's call has gradients.
    """

    found: Counts
    pairs: Pairs
    size: CallSize
    has_gradients: bool


@final
class ExpertRouting:
    """Where the rows of one call go; `dispatch_grouped_matmul` returns it for `grouped_matmul_combine`.

    `counts[source, destination, expert]`: rows from each rank for each of a rank's experts. `num_tokens`: rows of this
    rank's tokens. `num_rows`: rows that this rank's experts compute, by expert and then source. `num_pieces`: the most
    groups of experts per rank; 0 if rows go by the library's all-to-all. `size`: how much the ranks exchange.
    `has_gradients`: whether any rank's call has gradients. `gathered`: every rank's row of the exchange of
    counts, on the host, and behind it what else decides its groups, from which `route_again` makes this routing.
    """

    def __init__(self, runtime: Runtime, counted: Counted, on_device: torch.Tensor, pieces: Pieces) -> None:
        self.runtime, self.num_pieces = runtime, pieces.number
        found, pairs, self.size, self.has_gradients = counted
        whole = pieces.beside(found)
        self.gathered = torch.from_numpy(whole)
        self.counts = whole[:, :-3].reshape(len(whole), len(whole), -1)
        self.layout = ExpertLayout(self.counts, int(runtime.group.rank()), max(1, pieces.number), pairs, pieces.firsts)
        self.num_tokens, self.num_rows = self.layout.num_tokens, self.layout.num_rows
        self.ahead: AheadDispatch | None = None  # the first half, if it has begun before the host knew the counts
        self.was_dropped = False  # whether it has begun in vain: then copies follow its kernel
        self._sorting = Sorting(self.layout, on_device)
        self._rows_of: dict[int, ExpertRows] = {}  # by group
        self.learn: Callable[[], None] | None = None  # what a call that has been issued teaches

    @property
    def is_small(self) -> bool:
        """Whether so few tokens arrive that keeping them for backward costs less than sending them again."""
        return not size_for(self.size).num_groups

    def rows(self, rows: RowFormat) -> Rows:
        """Return the rows of this call in this format."""
        return Rows(self.layout, rows, self._sorting)

    # the following is read when the first copies are in transit

    @cached_property
    def experts(self) -> ExpertRows:
        """Number of rows of each of this rank's experts."""
        counts = self.counts[:, self.layout.rank].sum(0).tolist()
        return ExpertRows(tuple(counts), self._sorting.ends)

    def groups(self) -> Iterator[tuple[ExpertRange, ExpertRows]]:
        """Yield each group of this rank's experts with their rows. These are found group by group, because the GPU waits
        for the first ones.
        """
        for group in self.layout.groups:
            if group.number not in self._rows_of:
                self._rows_of[group.number] = self._rows_of_group(group)
            yield group, self._rows_of[group.number]

    def _rows_of_group(self, group: ExpertRange) -> ExpertRows:
        _, experts, rows, is_cut = group
        if not is_cut and experts == slice(0, self.layout.num_experts):
            return self.experts
        ends = self._sorting.ends[experts]
        if is_cut:
            ends = ends.clamp(max=rows.stop)
        return ExpertRows(_lengths(self.layout.group_ends[group.number]), ends - rows.start if rows.start else ends)

    def exchange(self, rows: Rows, regions: Sequence[ExpertRegion]) -> AbstractExpertExchange:
        """Return what moves the rows of a pass that uses these regions, with their memory reserved."""
        experts = self.runtime.experts()
        self.runtime.agreement.num_calls += 1
        if experts.copies is None:
            return experts.library
        if self.num_pieces:
            needed, was_refused = needed_bytes(rows, regions), experts.refused_bytes
            if self.ahead is not None and not (experts.is_refused(needed) or experts.copies.holds(needed)):
                self.drop()  # the memory of its rows is about to be replaced
            if experts.reserve(needed):
                return experts.copies
            if self.ahead is not None and self.ahead.first is not None and not self.ahead.first.sends_rest:
                self.drop()  # copies were to bring the other groups' rows
            experts.num_refused += bool(was_refused)
        experts.copies.drop_placed()
        return experts.library

    def begun(self, ahead: AheadDispatch | None) -> "ExpertRouting":
        """Keep what has begun of the call, if it has the rows; return itself."""
        if ahead is not None and ahead.settle(self.rows(ahead.format)):
            self.ahead = ahead
        self.was_dropped = ahead is not None and self.ahead is None
        return self

    def drop(self) -> None:
        """Give up what has begun of the call."""
        if self.ahead is not None:
            self.ahead.drop()
            self.ahead, self.was_dropped = None, True

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Compute the forward pass, which alone needs what has begun; give that up if an error ends it."""
        try:
            yield
        except BaseException:
            self.drop()
            raise
        finally:
            self.ahead, learn, self.learn = None, self.learn, None  # it holds this routing, and the call's tokens
            if learn is not None:
                learn()  # after an error, too: it may be this rank's alone, and all expect the same

    def count_kept(self, tensors: Sequence[torch.Tensor]) -> None:
        """Count what a forward call keeps for backward, and what a checkpoint may save of it."""
        storages = (each.untyped_storage() for each in tensors)  # some have more than the tensor needs, or are shared
        kept = {each.data_ptr(): each.nbytes() for each in storages}
        expert_calls_of(self.runtime.group.group_name).note_kept(sum(kept.values()))

    def count(self, exchange: AbstractExpertExchange, num_sent_bytes: int, *, is_ahead: bool) -> None:
        """Count a pass that has ended, as one by copies if its tokens were sent ahead."""
        calls = expert_calls_of(self.runtime.group.group_name)
        if exchange is self.runtime.experts().library and not is_ahead:
            experts = self.runtime.experts()
            calls.add_library(experts.obstacle or (NO_MEMORY if self.num_pieces else NOT_PICKED))
        else:
            calls.num_by_copies += 1
            calls.num_bytes += num_sent_bytes


def _lengths(ends: Sequence[int]) -> tuple[int, ...]:
    return tuple(end - start for start, end in itertools.pairwise([0, *ends]))


class Called(NamedTuple):
    """A call: the operator, its tokens, the number of tokens of each expert, and what all ranks must agree on: the sizes
    of experts, how many a rank holds first, the schedule, whether tokens are kept, whether something is computed beside, and
    whether matmuls are in fp8. `is_checkpointed`: whether it runs under activation checkpointing. `has_gradients`: whether
    it may have a backward pass.
    """

    operator: str
    tokens: torch.Tensor
    counts: TokensPerExpert
    sizes: tuple[int, ...]
    schedule: ScheduleDescription | None
    keeps_tokens: bool = False
    has_beside: bool = False
    is_fp8: bool = False
    has_gradients: bool = True
    is_checkpointed: bool = False

    def words(self) -> str:
        """Describe the call for the other ranks."""
        named = f" with {msgspec.json.encode(self.schedule).decode()}" if self.schedule else ""
        kept = " keeping tokens" * self.keeps_tokens + " beside something else" * self.has_beside
        kept += " in fp8" * self.is_fp8 + " under checkpointing" * self.is_checkpointed
        return f"{words_of(self.operator, self.sizes, self.tokens.dtype)}{named}{kept}"


def words_of(operator: str, sizes: tuple[int, ...], dtype: torch.dtype) -> str:
    """Describe an operator with its sizes of experts and type for the other ranks."""
    return f"{operator} of experts {sizes} {str(dtype).removeprefix('torch.')}"


def route(runtime: Runtime, call: Called, weights: Sequence[torch.Tensor], beside: Callable[[], None]) -> ExpertRouting:
    """Exchange the counts of a call with the other ranks; `beside` is called before the host waits for them. Raises
    `OperatorError` on every rank if those of one do not add up, or if ranks disagree.

    The call may begin before the host knows the counts. Then its rows are multiplied by `weights`, too; none if the first
    linears have to wait.
    """
    refuse_in_capture(f"{call.operator}, whose host waits for counts of rows,", runtime.device)
    require_experts_schedule(call.schedule)
    experts = runtime.experts()
    counts = _counts_given(runtime, call)
    runtime.agreement.num_calls += 1
    words = call.words()
    experts.agree(words)
    counts = _as_whole(counts.to(call.tokens.device)).contiguous()
    said = 2 * call.tokens.shape[0] + call.has_gradients  # as `split_last` reads it
    ahead = None if call.schedule else experts.ahead(words, call.tokens, weights)

    def before_the_wait(on_device: torch.Tensor) -> None:
        if ahead is not None:
            ahead.send(on_device)
        elif experts.copies is not None and not (call.schedule and call.schedule.is_sequential):
            experts.copies.place_ahead(call.tokens, on_device)
        beside()
        if ahead is not None:
            ahead.multiply()

    found, on_device = (experts.copies or experts.library).gather(counts, said, before_the_wait)
    first = ahead.first if ahead is not None else None
    given = Pieces(first.num_groups, first.numbers) if first is not None else None
    try:
        routing = _routing(runtime, call, found, on_device, given)
    except OperatorError:
        if ahead is not None:
            ahead.drop()
        elif experts.copies is not None:
            experts.copies.drop_placed()
        raise
    routing.learn = partial(_learn, words, routing, call, sum(each.shape[1] for each in weights))
    return routing.begun(ahead)


def _learn(kind: str, found: ExpertRouting, call: Called, num_columns: int) -> None:
    """Remember a call for the next one of its kind; `num_columns`: of the weights that multiply its tokens ahead. First
    groups are not given under checkpointing: a recomputation has to have the groups of its call, whatever calls came
    between.
    """
    layout, experts = found.layout, found.runtime.experts()
    number = layout.num_groups
    if layout.firsts:  # its groups were given; how many they would be otherwise
        number = max(1, pick_pieces(found.size, None, layout.num_experts, has_gradients=found.has_gradients))
    can_send_rest = experts.copies is not None and experts.copies.can_send_rest(RowFormat.of(call.tokens))
    share = first_share(num_columns, layout.num_ranks) if can_send_rest and num_columns else 0.0
    num_groups = 1 if call.is_checkpointed else number
    sent = sent_ahead(found.size, num_groups, share, has_beside=call.has_beside)
    if sent == "nothing":
        experts.expected.forget(kind)
    elif sent == "all":
        experts.expected.learn(kind, layout.most_grouped)
    else:
        share = share if sent == "parts" else 1 / num_parts_of(number)
        firsts = tuple(max(1, int(share * rows)) for rows in layout.grouped_rows)
        experts.expected.learn(kind, layout.most_grouped, FirstRows(firsts, number, sends_rest=sent == "parts"))


def _counts_given(runtime: Runtime, call: Called) -> torch.Tensor:
    """Return the counts of a call as a vector of numbers; others are refused on every rank."""
    try:
        counts = call.counts if isinstance(call.counts, torch.Tensor) else torch.as_tensor(call.counts, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError):
        counts = None
    if counts is None or counts.is_complex() or counts.layout != torch.strided:
        found = type(call.counts).__name__ if counts is None else counts.dtype if counts.is_complex() else counts.layout
        runtime.refuse(f"{call.operator} takes whole numbers as counts; found {found}. Count the rows of every expert.")
    num_experts = int(runtime.group.size()) * call.sizes[0]
    if counts.shape != (num_experts,):
        found = counts.shape[0] if counts.dim() == 1 else f"a shape of {tuple(counts.shape)}"
        runtime.refuse(
            f"{call.operator} needs a count for each of {num_experts} experts, {call.sizes[0]} on each rank; found "
            f"{found}. Count the rows of every expert."
        )
    return counts


def _as_whole(counts: torch.Tensor) -> torch.Tensor:
    """Return counts as integers; those of another type that are no whole number become `NOT_WHOLE`, which every rank finds
    without a wait of this one's host.
    """
    whole = counts.to(torch.int64)
    if not counts.is_floating_point():
        return whole
    given = counts if counts.itemsize > 1 else counts.float()  # types of 8 bits cannot be compared with others
    return torch.where(whole == given, whole, NOT_WHOLE)


def route_again(runtime: Runtime, call: Called, gathered: torch.Tensor) -> ExpertRouting:
    """Return the routing of an earlier call from what it gathered; no rank is asked."""
    found = gathered.numpy()
    return _routing(runtime, call, found[:, :-2], gathered.to(call.tokens.device), Pieces.of_columns(found[:, -2:]))


def _routing(runtime: Runtime, call: Called, found: Counts, on_device: torch.Tensor, pieces: Pieces | None) -> ExpertRouting:
    """Return the routing of all ranks' rows of the exchange of counts: rows for each expert, and last what `split_last`
    reads. `pieces` are picked unless they are given.
    """
    num_ranks = int(runtime.group.size())
    counts, (sums, has_gradients) = found[:, :-1], split_last(found)
    shaped = counts.reshape(num_ranks, num_ranks, -1)
    pairs = pair_rows(shaped)
    # negative counts are large as unsigned numbers; sums of small ones cannot wrap around
    if [sum(row) for row in pairs] != sums or counts.view(np.uint64).max() > max(sums):
        _refuse_sums(call.operator, counts, sums)
    is_copied = runtime.experts().copies is not None
    size = size_of(pairs, RowFormat.of(call.tokens).num_bytes)
    if pieces is None:
        number = pick_pieces(size, call.schedule, shaped.shape[2], has_gradients=has_gradients)
        pieces = Pieces(number if is_copied else 0)
    return ExpertRouting(runtime, Counted(found, pairs, size, has_gradients), on_device, pieces)


def split_last(found: Counts) -> tuple[list[int], bool]:
    """Return every rank's number of rows, and whether any rank's call has gradients, from the last column of what ranks
    exchange.
    """
    said = found[:, -1].tolist()
    return [each >> 1 for each in said], any(each & 1 for each in said)


def _refuse_sums(operator: str, counts: Counts, wanted: Sequence[int]) -> NoReturn:
    sums, least = [sum(row) for row in counts.tolist()], counts.min(1).tolist()
    rank = next(rank for rank, rows in enumerate(wanted) if sums[rank] != rows or least[rank] < 0)
    if least[rank] == NOT_WHOLE:
        raise OperatorError(
            f"Rank {rank} of the group: the counts of {operator} must be whole numbers; found one that is not. "
            "Count the rows of every expert."
        )
    raise OperatorError(
        f"Rank {rank} of the group: the counts of {operator} must be 0 or more and add up to its {wanted[rank]} rows of "
        f"tokens; found a sum of {sums[rank]} and a least count of {least[rank]}. Count the rows of every expert."
    )


def require_experts_schedule(schedule: object) -> None:
    """Raise `ScheduleError` unless experts can run by this schedule; None means the choice by size."""
    if schedule is None or (isinstance(schedule, ScheduleDescription) and schedule.is_sequential):
        return
    if not isinstance(schedule, ScheduleDescription):
        raise ScheduleError(
            f"schedule takes a ScheduleDescription; found a {type(schedule).__name__}. Make one: "
            'ScheduleDescription(pattern="all_peers", along="experts", chunks=2).'
        )
    if schedule.pattern != "all_peers" or schedule.along != "experts":
        raise ScheduleError(
            f"Experts take the pattern all_peers along experts, or sequential; found {schedule.pattern} along "
            f'{schedule.along}. Take ScheduleDescription(pattern="all_peers", along="experts", chunks={schedule.chunks}).'
        )


def pick_pieces(size: CallSize, schedule: ScheduleDescription | None, num_experts: int, *, has_gradients: bool) -> int:
    """Return in how many pieces each rank's experts are computed in calls of this size; 0 if rows go by the library's
    all-to-all. A schedule named by the caller decides.
    """
    if schedule is not None:
        return 0 if schedule.is_sequential else schedule.chunks
    return num_groups_for(size, num_experts, has_gradients=has_gradients)
