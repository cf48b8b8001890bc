"""Ranks on CPUs that run the operators of experts in the way named by the argument and print `NAME: ok` for what holds."""

import gc
import itertools
import os
import random
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from counterpoint import ops
from counterpoint.errors import CounterpointError, RefusedTogetherError
from counterpoint.integrations import expert_parallel
from counterpoint.ops import expert_passes, expert_routing
from counterpoint.ops.expert_ahead import AheadDispatch
from counterpoint.ops.expert_exchange import ExpertRegion, Needed
from counterpoint.ops.expert_messages import ExpertMessages, Mail
from counterpoint.ops.operator_call import expert_calls_of
from counterpoint.ops.runtime import all_runtimes
from counterpoint.schedule import SEQUENTIAL, ScheduleDescription, expert_choice
from counterpoint.schedule.actions import ExpertOperation, Pass
from counterpoint.schedule.checks import check_schedule
from counterpoint.schedule.expert_choice import expert_description
from counterpoint.schedule.expert_schedules import ExpertProblem, make_expert_schedule
from counterpoint.schedule.routing import Routing
from helpers.exchange_counter import Sent
from helpers.experts_definition import DIM, HIDDEN, Experts, both_halves, check_fp8, compare, silu, whole_layer, with_shared
from helpers.gloo_sections import report, run_sections

D = ScheduleDescription
HALVES: tuple[ExpertOperation, ...] = ("dispatch_grouped_matmul", "grouped_matmul_combine")
COPIES = D(pattern="all_peers", along="experts")
SCHEDULES = (None, COPIES, *(D(pattern="all_peers", along="experts", chunks=chunks) for chunks in (2, 3, 5)))


def random_routings() -> None:
    """1,000 routings, each of sizes and skew of its own: right, and the same bits as the sequential form gives."""
    chance = random.Random(5)
    for number in range(int(os.environ.get("NUM_ROUTINGS", "1000"))):
        experts, schedule = Experts(chance, torch.float64), chance.choice(SCHEDULES)
        found = experts.found(schedule)
        compare(found, experts.expected(), 1e-12)
        if number % 4 == 0 and schedule in (None, COPIES):  # in pieces, silu takes numbers in other vectors
            assert all(map(torch.equal, found, experts.found(SEQUENTIAL)))
        if number % 20 == 0:
            compare(experts.found_by_halves(schedule), experts.expected(), 1e-12)
    held = ops.pool_report()[0].num_bytes
    assert 0 < held < 3 * 1.25 * 40 * 9 * DIM * 8 * experts.size, held
    counted = expert_calls_of(dist.group.WORLD.group_name)
    assert counted.num_by_copies > number
    assert counted.num_by_library
    report("random routings")


def types() -> None:
    """Half precision within its rounding, and the same bits as sequential."""
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.03), (torch.float16, 0.004)):
        experts = Experts(random.Random(3), dtype, kind="random", num_local=3)
        found = experts.found(COPIES)
        assert all(map(torch.equal, found, experts.found(SEQUENTIAL)))
        compare(found, experts.expected(), tolerance)
    report("types")


def partly_frozen() -> None:
    """Gradients that nobody wants are left out, and the others are the same."""
    experts = Experts(random.Random(4), torch.float64, kind="random")
    wanted = experts.expected()
    for frozen in range(4):
        tokens, weights = experts.own()
        operands = [tokens, *weights]
        operands[frozen].requires_grad_(False)
        result = ops.expert_ffn(tokens, experts.counts[experts.rank], *weights, schedule=COPIES)
        result.backward(experts.gradients[experts.rank])
        assert operands[frozen].grad is None
        rest = [place for place in range(4) if place != frozen]
        compare([operands[place].grad for place in rest], [wanted[1 + place] for place in rest], 1e-12)
    report("partly frozen")


def without_gradients() -> None:
    """A call without gradients keeps nothing for them, frees its tokens at once, and holds no memory for tokens that are
    sent again.
    """
    experts, counted = Experts(random.Random(4), torch.float64, kind="random"), expert_calls_of(dist.group.WORLD.group_name)
    wanted, held, kept = experts.expected()[:1], [], []
    for schedule, keeps_tokens, has_gradients in itertools.product((COPIES, None), (False, True), (False, True)):
        ops.release()
        counted.most_kept_bytes = 0
        with torch.set_grad_enabled(has_gradients):
            for layer in (whole_layer, both_halves):
                tokens, weights = experts.own()
                compare([layer(experts, weights, tokens, schedule=schedule, keeps_tokens=keeps_tokens)], wanted, 1e-12)
        held.append(ops.pool_report()[0].num_bytes)
        kept.append(counted.most_kept_bytes)
    gc.disable()
    tokens, weights = experts.own()
    rows = tokens.detach().clone()
    known = weakref.ref(rows)
    with torch.no_grad():
        ops.expert_ffn(rows, experts.counts[experts.rank], *weights)
    del rows
    for _ in range(100):  # a thread of gloo may hold what it has sent a little longer
        if known() is None:
            break
        time.sleep(0.05)
    assert known() is None, "only Python's search for cycles would free it"
    gc.enable()
    assert not any(kept[::2]), kept
    assert all(kept[1::2]), kept
    assert held[0] == held[2] == held[3] < held[1], "only tokens that are sent again need more"
    report("without gradients")


def after_inference() -> None:
    """Calls in inference mode get the memory that later calls in training write to."""
    experts = Experts(random.Random(4), torch.float64, kind="random")
    (tokens, weights), wanted = experts.own(), experts.expected()
    for schedule in (COPIES, None):
        ops.release()
        for _ in range(2):
            with torch.inference_mode():
                compare([both_halves(experts, weights, tokens, schedule=schedule)], wanted[:1], 1e-12)
            compare(experts.found_by_halves(schedule), wanted, 1e-12)
    report("after inference")


def activations() -> None:
    """Without w3, and a function of the caller's."""
    experts = Experts(random.Random(6), torch.float64, kind="random")
    tokens, (w1, w2, w3) = experts.own()
    counts = experts.counts[experts.rank]
    plain = ops.expert_ffn(tokens, counts, w1, w2)
    torch.testing.assert_close(plain, ops.expert_ffn(tokens, counts, w1, w2, activation=silu))
    ops.expert_ffn(tokens, counts, w1, w2, w3, activation=lambda a, b: silu(a) * b).backward(experts.gradients[experts.rank])
    compare([each.grad for each in (tokens, w1, w2, w3)], experts.expected()[1:], 1e-12)
    report("activations")


def biases() -> None:
    """Biases, all of them or some, in the layer and in both halves; gate and up in one weight, as gpt-oss has them."""
    for kind in ("random", "sparse", "one rank"):
        experts = Experts(random.Random(10), torch.float64, kind=kind)
        counts, gradient = experts.counts[experts.rank], experts.gradients[experts.rank]
        wanted = experts.expected(has_biases=True)
        bits = []
        for schedule in (SEQUENTIAL, *SCHEDULES):
            (tokens, (w1, w2, w3)), (b1, b2, b3) = experts.own(), experts.own_biases()
            leaves = [tokens, w1, w2, w3, b1, b2, b3]
            result = ops.expert_ffn(tokens, counts, w1, w2, w3, biases=(b1, b2, b3), schedule=schedule)
            result.backward(gradient)
            found = [result.detach(), *(each.grad for each in leaves)]
            compare(found, wanted, 1e-12)
            bits.append(found)
        assert all(map(torch.equal, bits[0], bits[2])), "sequential and copies in one group"
        biases_by_halves(experts, wanted)
        biases_of_joined(experts, wanted)
    report("biases")


def biases_by_halves(experts: Experts, wanted: list[torch.Tensor]) -> None:
    (tokens, (w1, w2, w3)), (b1, b2, b3) = experts.own(), experts.own_biases()
    num_hidden = w1.shape[1]
    both, routing = ops.dispatch_grouped_matmul(
        tokens, experts.counts[experts.rank], torch.cat([w1, w3], 1), bias=torch.cat([b1, b3], 1), schedule=COPIES
    )
    hidden = [silu(each[:, :num_hidden]) * each[:, num_hidden:] for each in both]
    result = ops.grouped_matmul_combine(hidden, w2, routing, bias=b2)
    result.backward(experts.gradients[experts.rank])
    compare([result.detach(), *(each.grad for each in (tokens, w1, w2, w3, b1, b2, b3))], wanted, 1e-12)


def biases_of_joined(experts: Experts, wanted: list[torch.Tensor]) -> None:
    """Gate and up interleaved in one weight that lies transposed, and only some operands with gradients."""
    (tokens, (w1, w2, w3)), (b1, b2, b3) = experts.own(), experts.own_biases()
    joined = torch.stack([w1, w3], 2).flatten(1, 2).detach().mT.contiguous().requires_grad_()
    bias = torch.stack([b1, b3], 2).flatten(1).detach().requires_grad_()

    def gated(both: torch.Tensor) -> torch.Tensor:
        return silu(both[:, ::2]) * both[:, 1::2]

    b2.requires_grad_(False)
    down = w2.detach().mT.contiguous().requires_grad_()
    counts, activation = experts.counts[experts.rank], {"activation": gated, "schedule": COPIES}
    result = ops.expert_ffn(tokens, counts, joined.mT, down.mT, biases=(bias, b2), **activation)
    result.backward(experts.gradients[experts.rank])
    assert b2.grad is None
    of_joined = joined.grad.mT
    found = [result.detach(), tokens.grad, of_joined[:, ::2], down.grad.mT, of_joined[:, 1::2]]
    compare([*found, bias.grad[:, ::2], bias.grad[:, 1::2]], [*wanted[:6], wanted[7]], 1e-12)


def in_order() -> None:
    """Both passes issue what their schedules say, in that order, and backward gives the bits of the sequential form."""
    experts = Experts(random.Random(12), torch.float64, kind="random", num_local=4)
    counts, gradient = experts.counts[experts.rank], experts.gradients[experts.rank]
    issued = watch_issues()
    for schedule in (COPIES, *SCHEDULES[2:]):
        bits = []
        for each in (SEQUENTIAL, schedule):
            tokens, (w1, w2, _) = experts.own()
            issued.clear()
            hidden, routing = ops.dispatch_grouped_matmul(tokens, counts, w1, schedule=each)
            forward = [issued.copy()]
            issued.clear()
            result = ops.grouped_matmul_combine([each.relu() for each in hidden], w2, routing)
            forward.append(issued.copy())
            issued.clear()
            result.backward(gradient)
            bits.append([result.detach(), tokens.grad, w1.grad, w2.grad])
        assert all(map(torch.equal, *bits)), schedule
        by_halves = [planned(experts, half, "backward", schedule) for half in HALVES[::-1]]
        assert issued == [*by_halves[0], *by_halves[1]], schedule
        for half, found in zip(HALVES, forward, strict=True):
            assert found == planned(experts, half, "forward", schedule), (half, schedule)
        tokens, (w1, w2, _) = experts.own()
        issued.clear()
        result = ops.expert_ffn(tokens, counts, w1, w2, schedule=schedule)
        assert issued == planned(experts, "expert_ffn", "forward", schedule)
        issued.clear()
        result.backward(gradient)
        assert issued == planned(experts, "expert_ffn", "backward", schedule)
    report("in order")


def watch_issues() -> list[str]:
    """Names of what this rank sends and multiplies from now on, in the order in which it is issued."""
    issued: list[str] = []

    def watch(owner: object, name: str, say: Callable[..., str]) -> None:
        method = getattr(owner, name)

        def call(*arguments: object, **named: object) -> object:
            issued.append(say(*arguments))
            return method(*arguments, **named)

        setattr(owner, name, call)

    watch(Mail, "send", lambda mail, peer, *_: f"copy {'back' if mail.region == ExpertRegion.COMBINE else 'there'} {peer}")
    watch(expert_passes, "multiply", lambda *_: "matmul")
    watch(expert_passes, "weight_gradient", lambda *_: "weight_gradient")
    return issued


def planned(experts: Experts, operation: ExpertOperation, direction: Pass, description: ScheduleDescription) -> list[str]:
    """The same names from the schedule as a value."""
    routing = Routing(counts=tuple(map(tuple, experts.counts)))
    sizes = {"num_inner": DIM, "num_hidden": HIDDEN, "is_gated": False, "element_bytes": 8, "direction": direction}
    asked = ExpertProblem(operation=operation, routing=routing, **sizes)
    made = make_expert_schedule(asked, expert_description(description.chunks))
    check_schedule(made)
    names = []
    for action in (made.actions[position] for position in made.of_rank(experts.rank)):
        if action.kind == "copy":
            way = "back" if action.reads[0].buffer == "partial" else "there"
            names.append(f"copy {way} {action.writes[0].rank}")
        elif action.kind in ("matmul", "weight_gradient"):
            names.append(action.kind)
    return names


def in_fp8() -> None:
    """Forward, operands are rounded to fp8 by row and output feature; the same bits as sequential; gradients are there."""
    check_fp8(Experts(random.Random(11), torch.bfloat16, kind="random", num_local=2, scale=16), (SEQUENTIAL, COPIES))
    report("in fp8")


def keeps_matmuls(_context: object, operator: object, *_arguments: object, **_named: object) -> CheckpointPolicy:
    """A policy that knows nothing of experts."""
    is_matmul = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_matmul else CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed() -> None:
    """Under activation checkpointing results stay the same bits, and only what a policy saves is not sent again."""
    experts, sent = Experts(random.Random(7), torch.float64, kind="random"), Sent()
    counted = expert_calls_of(dist.group.WORLD.group_name)
    counted.most_kept_bytes = 0
    again = {"context_fn": lambda: create_selective_checkpoint_contexts(keeps_matmuls)}
    saved = {"context_fn": lambda: create_selective_checkpoint_contexts(list(expert_parallel.OPERATORS))}
    for schedule, layer in itertools.product((COPIES, SCHEDULES[-1], SEQUENTIAL), (whole_layer, with_shared, both_halves)):
        wanted = None
        for contexts, keeps_tokens, expected in (
            (None, False, (1, 5)),
            (None, True, (1, 4)),
            ({}, False, (2, 7)),
            ({}, True, (2, 6)),
            (again, False, (2, 7)),
            (saved, False, (1, 5)),
            (saved, True, (1, 4)),
        ):
            tokens, weights = experts.own()
            run = partial(layer, experts, weights, schedule=schedule, keeps_tokens=keeps_tokens)
            result = run(tokens) if contexts is None else checkpoint(run, tokens, use_reentrant=False, **contexts)
            result.backward(experts.gradients[experts.rank])
            found = [result.detach(), tokens.grad, *(each.grad for each in weights)]
            wanted = wanted or found
            assert all(map(torch.equal, found, wanted)), (schedule, layer, contexts, keeps_tokens)
            assert sent.taken() == expected, (schedule, layer, contexts, keeps_tokens)
        if layer is not with_shared:
            compare(wanted, experts.expected(), 1e-12)
    num_rows = sum(row[place] for row in experts.counts for place in range(*experts.part.indices(len(row))))
    num_own = len(experts.tokens[experts.rank])
    of_results, of_inputs, of_tokens = num_own * DIM, num_rows * 2 * HIDDEN, num_rows * DIM
    assert counted.most_kept_bytes == 8 * (of_results + of_inputs + of_tokens)
    report("checkpointed")


def ahead() -> None:
    """Calls like earlier ones send their tokens before the host knows the counts; others begin again in the usual way."""
    ops.release()  # what other sections have taught
    begun = Counter[str]()

    def count(owner: type, name: str) -> None:
        method = getattr(owner, name)

        def call(*arguments: object) -> object:
            begun[name] += 1
            return method(*arguments)

        setattr(owner, name, call)

    count(ExpertMessages, "send_ahead")
    count(ExpertMessages, "await_ahead")
    count(AheadDispatch, "drop")

    def check(experts: Experts, *, sent: int, dropped: int = 0, has_biases: bool = False) -> None:
        begun.clear()
        found = experts.found(None, has_biases=has_biases)
        assert (begun["send_ahead"], begun["drop"]) == (sent, dropped), begun
        compare(found, experts.expected(has_biases=has_biases), 1e-12)

    few, many = (Experts(random.Random(21), torch.float64, kind="random", num_local=3) for _ in range(2))
    many.counts = [[3 * number for number in row] for row in many.counts]
    many.tokens, many.gradients = ([each.repeat(3, 1) for each in kind] for kind in (many.tokens, many.gradients))
    check(few, sent=0)
    check(few, sent=1)
    check(many, sent=1, dropped=1)
    check(many, sent=1)
    check(few, sent=1)
    check(few, sent=0, has_biases=True)  # another kind of call
    check(few, sent=1, has_biases=True)
    halves = few.expected()
    for _ in range(2):
        compare(few.found_by_halves(None), halves, 1e-12)
    saved = {"context_fn": lambda: create_selective_checkpoint_contexts(list(expert_parallel.OPERATORS))}
    for contexts, layer in itertools.product(({}, saved), (whole_layer, with_shared, both_halves)):
        found = []
        for run in (partial(checkpoint, use_reentrant=False, **contexts), lambda run, tokens: run(tokens)):
            tokens, weights = few.own()
            result = run(partial(layer, few, weights), tokens)
            result.backward(few.gradients[few.rank])
            found.append([result.detach(), tokens.grad, *(each.grad for each in weights)])
        assert all(map(torch.equal, *found)), (contexts, layer)
    begun.clear()
    (tokens, weights), counts = few.own(), list(few.counts[few.rank])
    counts[0] += few.rank
    with suppress(CounterpointError):
        ops.expert_ffn(tokens, counts, *weights)
        report("refused")
    assert (begun["send_ahead"], begun["drop"]) == (1, 1)
    check(few, sent=1)
    begun.clear()
    with suppress(ZeroDivisionError):
        ops.expert_ffn(tokens, few.counts[few.rank], *weights, activation=lambda *_: 1 // 0)
    assert (begun["send_ahead"], begun["drop"]) == (1, 1), "an error of the caller's on every rank leaves nothing behind"
    check(few, sent=1)
    with patch.object(expert_routing, "pick_pieces", lambda *_, **__: 3):
        check(few, sent=1, dropped=1)  # memory for what returns replaces that of the tokens
        check(few, sent=1)
        compare(few.found_by_halves(None), halves, 1e-12)
        for limit, num_parts in (("FIRST_AHEAD_FROM_BYTES", 1), ("PARTS_AHEAD_FROM_BYTES", 2)):
            with patch.object(expert_choice, limit, 0):
                for _ in range(3):  # first rows are sent ahead; then the rest, too
                    check(few, sent=1)
                    compare(few.found_by_halves(None), halves, 1e-12)
                check(many, sent=1, dropped=2 - num_parts)  # its memory stays
                check(many, sent=1)
                check(few, sent=1)
                assert begun["await_ahead"] == num_parts
                layers = [(each, *each.own()) for each in (few, many)]  # a call is run again when others came between
                found = [checkpoint(partial(both_halves, each, of), rows, use_reentrant=False) for each, rows, of in layers]
                torch.autograd.backward(found, [each.gradients[each.rank] for each, *_ in layers])
                compare([rows.grad for _, rows, _ in layers], [each.expected()[1] for each, *_ in layers], 1e-12)
    ops.release()
    with patch.object(expert_routing, "pick_pieces", lambda *_, **__: 3), without_memory_for_results():
        check(few, sent=0)
        check(few, sent=1)  # the library returns the results
    ops.release()
    report("ahead")


@contextmanager
def without_memory_for_results() -> Iterator[None]:
    """No rank has symmetric memory for results that return; it has for tokens."""
    reserve = ExpertMessages.reserve

    def reserved(exchange: ExpertMessages, needed: Needed) -> None:
        if ExpertRegion.COMBINE in needed:
            raise RefusedTogetherError("Rank 1 of the group: there is no more")
        reserve(exchange, needed)

    with patch.object(ExpertMessages, "reserve", reserved):
        yield


def error_of_one_rank() -> None:
    """What an error leaves behind in the first half of one rank, whose rows have travelled: all expect the same calls."""
    ops.release()
    small, large = (Experts(random.Random(21), torch.float64, kind=kind, num_local=3) for kind in ("sparse", "random"))
    multiply = expert_passes.multiply
    for experts, has_error in ((small, False), (large, True), (small, False), (large, False)):
        tokens, (weights, *_) = experts.own()
        expert_passes.multiply = (lambda *_: 1 // 0) if has_error and not experts.rank else multiply
        with suppress(ZeroDivisionError):
            ops.dispatch_grouped_matmul(tokens, experts.counts[experts.rank], weights)
    report("error of one rank")


def error_beside() -> None:
    """An error of one rank in what it computes beside its rows is raised there, when the rows are through; all go on."""
    experts = Experts(random.Random(21), torch.float64, kind="random")
    tokens, (w1, w2, w3) = experts.own()

    def beside() -> None:
        if experts.rank == 0:
            raise ArithmeticError("beside the rows")

    for schedule in (COPIES, SEQUENTIAL):
        raised = False
        try:
            ops.expert_ffn(tokens, experts.counts[experts.rank], w1, w2, w3, beside=beside, schedule=schedule)
        except ArithmeticError:
            raised = True
        assert raised == (experts.rank == 0)
        compare(experts.found(schedule), experts.expected(), 1e-12)
    report("error beside")


def no_memory() -> None:
    """Where symmetric memory cannot be had on one rank, the call runs by the library on all, and the next ones may not."""
    small = Experts(random.Random(8), torch.float64, kind="random")
    large = Experts(random.Random(8), torch.float64, kind="random")
    large.counts = [[40 * number for number in row] for row in large.counts]
    large.tokens = [each.repeat(40, 1) for each in large.tokens]
    large.gradients = [each.repeat(40, 1) for each in large.gradients]
    small.found(COPIES)
    (runtime,), counted = all_runtimes(), expert_calls_of(dist.group.WORLD.group_name)
    exchange = runtime.experts().copies
    reserve, before = exchange.reserve, counted.num_by_library

    def refuse(*_: object) -> None:
        raise RefusedTogetherError("Rank 1 of the group: there is no more")

    exchange.reserve = refuse
    compare(large.found(COPIES), large.expected(), 1e-12)
    assert counted.num_by_library == before + 2
    exchange.reserve = reserve
    compare(large.found(COPIES), large.expected(), 1e-12)
    assert counted.num_by_library == before + 4
    assert runtime.experts().num_refused == 3  # after the first
    compare(small.found(COPIES), small.expected(), 1e-12)
    assert counted.num_by_library == before + 4
    report("no memory")


if __name__ == "__main__":
    run_sections(globals())
