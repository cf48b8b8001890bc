"""What can let an eager collective win, as tables of the launch filter and process groups; and what the filter counted.

The tables are made from plans, as `counterpoint run` makes them. Swaps happen at the same place on all ranks, when nothing
runs. What the counters cannot show is the process-group option, for it is torch's: the group is asked whether it has it.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.on_gpus import largest, shared_rounds
from counterpoint.controls import Control, HeadStart, Priority
from counterpoint.launch_filter.control_block import ControlBlock, RuleCounters, SeenFunction
from counterpoint.launch_filter.rules import FilterRule, translate
from counterpoint.measurement.values import Measurement, summarize_rounds
from counterpoint.plan import Directive, Match, Plan
from counterpoint.planner.candidates import HOLDS_US
from counterpoint.step import OperationKind
from counterpoint.supervised.settings import add_counters

LEAST_ROUNDS = 3
NOTHING = "nothing"


class Variant(NamedTuple):
    """One way to run a case. `has_option`: in the process group with high-priority streams."""

    name: str
    rules: tuple[FilterRule, ...] = ()
    has_option: bool = False


class Case(NamedTuple):
    """What was timed of one case: by what was timed, one measurement per variant; and what ran alone, in ms."""

    name: str
    timed: dict[str, tuple[Measurement, ...]]
    alone_ms: dict[str, float]
    checks: str

    def as_dict(self) -> dict[str, object]:
        timed = {
            what: [
                {
                    "variant": each.label,
                    "median_ms": round(each.median_us / 1000, 4),
                    "least_ms": round(each.least_us / 1000, 4),
                    "ratio": round(each.ratio, 4),
                    "spread": round(each.spread, 4),
                    "rounds": each.num_rounds,
                }
                for each in found
            ]
            for what, found in self.timed.items()
        }
        return {"case": self.name, "timed": timed, "alone_ms": self.alone_ms, "checks": self.checks}


def all_variants(priority: int, held: Sequence[str] = ("*",)) -> tuple[Variant, ...]:
    """Nothing first. Head starts are for kernels of these names that follow a collective in another stream."""

    def rules(*parts: tuple[Sequence[str], OperationKind, Control]) -> tuple[FilterRule, ...]:
        directives = tuple(
            Directive(match=Match(name=name, kind=kind), controls=(control,), reason="to win the race")
            for names, kind, control in parts
            for name in names
        )
        return translate(Plan(directives=directives)).rules

    attribute: tuple[Sequence[str], OperationKind, Control] = (("*",), "communication", Priority(priority=priority))
    short, long = ((held, "computation", HeadStart(hold_us=hold_us)) for hold_us in HOLDS_US)
    return (
        Variant(NOTHING),
        Variant("attribute", rules(attribute)),
        Variant("option", has_option=True),
        Variant(f"start {HOLDS_US[0]:g}", rules(short)),
        Variant(f"start {HOLDS_US[1]:g}", rules(long)),
        Variant(f"attr+start {HOLDS_US[0]:g}", rules(attribute, short)),
        Variant(f"opt+start {HOLDS_US[0]:g}", rules(short), has_option=True),
    )


class Race:
    """This process's filter and both process groups; swaps tables, counts what they did, and keeps to the time."""

    def __init__(self, block_path: Path, num_rounds: int, priority: int) -> None:
        self.priority, self._num_rounds = priority, num_rounds
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        with_option = dist.new_group(list(range(dist.get_world_size())), pg_options=options)
        found = getattr(with_option._get_backend(torch.device("cuda")), "options", None)  # a torch that hides it: not proven
        self.has_option = bool(getattr(found, "is_high_priority_stream", False))
        self.groups = {False: dist.group.WORLD, True: with_option}
        for group in self.groups.values():  # both communicators come into being here
            dist.all_reduce(torch.ones(1, device="cuda"), group=group)
        torch.cuda.synchronize()
        self._block = ControlBlock(block_path)
        state = self._block.state()
        assert state.driver == "cuda", state.problem or "the filter has met no driver in this process"
        assert any("nccl" in seen.name for seen in state.functions), "the filter has not seen NCCL's launches"
        self.counts: dict[str, RuleCounters] = {}
        self.num_repetitions: dict[str, int] = {}
        self._start, self._seconds = time.monotonic(), 0.0

    def start_part(self, seconds: float) -> None:
        """Begin to count and to watch the time anew."""
        self.counts, self.num_repetitions = {}, {}
        self._start, self._seconds = time.monotonic(), seconds

    def seen(self) -> tuple[SeenFunction, ...]:
        """The kernels that this process has launched."""
        return self._block.state().functions

    def begin(self, variant: Variant) -> None:
        """Put the variant's table in force, on all ranks at the same place."""
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        self._block.swap(variant.rules)

    def end(self, variant: Variant, num_repetitions: int) -> None:
        """So many repetitions of the variant have run: add what the filter counted for it."""
        torch.cuda.synchronize()
        self.num_repetitions[variant.name] = self.num_repetitions.get(variant.name, 0) + num_repetitions
        total = self.counts.get(variant.name, RuleCounters())
        for counters in self._block.state().counters:
            total = add_counters(total, counters)
        self.counts[variant.name] = total

    def orders(self, num_candidates: int, share: float) -> Iterator[tuple[int, ...]]:
        """The order of each round, the same on all ranks, until there are enough or one has spent this share of the time."""
        deadline, rounds = self._start + share * self._seconds, shared_rounds(num_candidates)
        for number in range(self._num_rounds):
            if number >= LEAST_ROUNDS and largest([float(time.monotonic() > deadline)])[0]:
                return
            yield rounds.order(number)

    def counts_as_dict(self) -> dict[str, object]:
        figures = ("num_matched", "num_prioritized", "num_held", "num_refused", "num_retried", "refusal")
        found: dict[str, object] = {
            name: {"repetitions": self.num_repetitions[name], **{figure: getattr(counters, figure) for figure in figures}}
            for name, counters in self.counts.items()
        }
        return {**found, "the group has the option": self.has_option}


def measure(variants: Sequence[Variant], rounds_ms: Sequence[Sequence[float]]) -> tuple[Measurement, ...]:
    """What rounds say, one time in ms for each variant in each."""
    in_us = [[1000 * value for value in entry] for entry in rounds_ms]
    return summarize_rounds([variant.name for variant in variants], in_us)
