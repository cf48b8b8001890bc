"""Measures the validation set on this machine's GPUs: every case is captured and runs under every control in turn.

Variants run in interleaved rounds. Traced cases also run eagerly: once under the profiler as they are, then with the
controls of PyTorch itself. If a case cannot be measured here, it is named with the reason, and the others go on.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import profile, schedule

from counterpoint.cuda.capture import Captured, Recording, capture, record
from counterpoint.cuda.conditions import measuring_conditions
from counterpoint.cuda.driver_graph import DriverGraph
from counterpoint.cuda.graph import AbstractExecutable
from counterpoint.cuda.graph_rewriting import rewrite
from counterpoint.cuda.rendezvous import num_ranks
from counterpoint.errors import CounterpointError, cause_of, say
from counterpoint.machine import Machine
from counterpoint.measurement.orders import draw_seed
from counterpoint.measurement.tournament import measure_rounds
from counterpoint.measurement.values import Measurement
from counterpoint.ops.captured_copies import offer_copies
from counterpoint.paper.values import PLAIN
from counterpoint.plan import Plan
from counterpoint.planner.on_gpu import machine_of
from counterpoint.step import Step
from counterpoint.traces.classify import classify_kernel
from counterpoint.validation.cases import CTA_LIMITS, Case, cases_for, set_digest
from counterpoint.validation.described import places_of
from counterpoint.validation.plans import plans_of, plans_of_limits
from counterpoint.validation.records import MeasuredCase, MeasuredRow, MeasuredSet, Setting, load_begun, trace_path
from counterpoint.validation.steps_on_gpu import CaseOnGpu, limited_groups

ROUNDS = 5
TRACED_STEPS = 5
LIMIT_S = 60.0  # how long ranks wait for each other, in seconds
Groups = Mapping[int, Any]
PlansOf = Callable[[Case, Step, Machine], Mapping[str, Plan]]


class CalledStep(AbstractExecutable):
    """Runs a step function in place of a graph launch."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def launch(self, stream: int) -> None:
        """Issue the step on the current stream, which must be `stream`."""
        self._run()

    def close(self) -> None:
        """Do nothing: the object holds no resources."""


class Runnable(msgspec.Struct, frozen=True, kw_only=True):
    """One variant that can be timed. Its controls were verified, or are those of PyTorch."""

    label: str
    setting: Setting
    plan: Plan
    executable: AbstractExecutable


def measure_set(output: Path, save: Callable[[MeasuredSet], None]) -> MeasuredSet:
    """Measure every case of the set that `output` does not hold, and `save` the results after each one; all ranks call it.

    `output` is the file that `save` writes: traces go beside it. Raises as `load_begun` does, and what capturing raises if
    no case can be measured.
    """
    known = load_begun(output, measuring_conditions(rounds=ROUNDS))
    names = {each.name for each in known.cases} if known is not None else set()
    number = num_ranks()
    left = (case for case in cases_for(number) if case.name not in names)
    measured = measure_cases(left, set_digest(number), output, save, CaseMeasuring.measure, known=known)
    if measured is None:
        raise CounterpointError("No case remains to be measured. Name another file with -o to measure the set anew.")
    return measured


def measure_cases(
    cases: Iterable[Case],
    digest: str,
    output: Path,
    save: Callable[[MeasuredSet], None],
    measure: "Callable[[CaseMeasuring], MeasuredCase]",
    *,
    known: MeasuredSet | None = None,
) -> MeasuredSet | None:
    """Measure cases in turn, and `save` the results after each one, behind those that are `known`.

    All ranks call it with the same cases. Returns None if no case could be measured.
    """
    number = num_ranks()
    groups = limited_groups(CTA_LIMITS) if number > 1 else {}
    found = list(known.cases) if known is not None else []
    measured: MeasuredSet | None = None
    for case in cases:
        with ExitStack() as opened:
            try:
                measuring = CaseMeasuring(case, groups, output, opened)
                found.append(measure(measuring))
            except (CounterpointError, RuntimeError) as refused:  # torch's RuntimeError: this GPU or this version lacks it
                say(f"{case.name} is left out: {cause_of(refused)}")
                continue
        torch.cuda.empty_cache()
        conditions = measuring_conditions(rounds=ROUNDS)
        measured = MeasuredSet(
            digest=digest,
            machine=measuring.machine.name,
            num_gpus=number,
            conditions=conditions if known is None else known.conditions_with(conditions),
            cases=tuple(found),
        )
        save(measured)
    return measured


class CaseMeasuring:
    """Measures one case."""

    def __init__(self, case: Case, groups: Groups, output: Path, opened: ExitStack) -> None:
        self._case, self._groups, self._output = case, groups, output
        self._opened = opened  # closes the resources of the case
        self._recordings: list[Recording] = []  # the graphs use their memory
        self._on_gpu = CaseOnGpu(case)
        self._captured: Captured = capture(self._on_gpu.step(), case.name, limit_s=LIMIT_S)
        self._opened.callback(self._captured.close)
        self.machine: Machine = machine_of(self._captured)

    def measure(self) -> MeasuredCase:
        """Return all variants of the case, plain overlap first, and its trace if it is traced."""
        found = self.measure_captured(with_limits=self._case.is_traced)
        if not self._case.is_traced:
            return found
        engaged = {row.label for row in found.rows}
        eager = [each for each in self._eager() if each.label in engaged]
        rows = [*found.rows, *(self._rows(eager) if eager else ())]
        return msgspec.structs.replace(found, rows=tuple(rows), trace=self._trace())

    def measure_captured(self, *, with_limits: bool, plans: PlansOf = plans_of) -> MeasuredCase:
        """Return the variants that replay a graph: those of `plans` and, `with_limits`, those with fewer CTAs for
        collectives.
        """
        step = self._captured.read.step
        places_of(self._case, step)  # raises if the case runs other operations here
        offer_copies(self._captured)
        rewritten = rewritten_variants(self._captured, plans(self._case, step, self.machine), self._opened)
        rows = self._rows([*rewritten, *(self._limited() if with_limits else ())])
        return MeasuredCase(name=self._case.name, step=step, rows=tuple(rows), sum_by="one kernel")

    def _limited(self) -> Iterator[Runnable]:
        """Yield captures of the step in process groups with fewer CTAs; the graph proves their number and the priority."""
        for label, (plan, limit, priority) in plans_of_limits(self._captured.read.step, self.machine).items():
            recording = record(self._on_gpu.step(self._groups[limit], priority))
            graph = DriverGraph(recording.graph.raw_cuda_graph())
            collectives = [each for each in graph.nodes() if classify_kernel(each.name).kind == "communication"]
            launches = [(each.footprint.num_ctas if each.footprint else 0, each.priority) for each in collectives]
            # torch maps a priority to the nearest one that its pool of streams has
            is_engaged = all(num_ctas <= limit and (given < 0) == (priority < 0) for num_ctas, given in launches)
            if not self._captured.is_everywhere(is_engaged):
                if self._captured.rendezvous.is_first_rank:
                    say(f"{self._case.name}: '{label}' did not take effect: {sorted(set(launches))}")
                continue
            executable = graph.instantiate()
            self._opened.callback(executable.close)
            self._recordings.append(recording)
            yield Runnable(label=label, setting="captured", plan=plan, executable=executable)

    def _eager(self) -> Iterator[Runnable]:
        """Yield the step function as it is, with a priority of its streams, and in process groups with fewer CTAs."""
        step, machine = self._captured.read.step, self.machine
        plans: dict[str, tuple[Plan, int, int]] = {PLAIN: (Plan(), 0, 0)}
        prioritized = plans_of(self._case, step, machine).get("priority")
        if prioritized is not None:
            plans["priority"] = prioritized, 0, machine.gpu.greatest_priority
        plans |= plans_of_limits(step, machine)
        for label, (plan, limit, priority) in plans.items():
            called = CalledStep(self._on_gpu.step(self._groups.get(limit), priority))
            yield Runnable(label=label, setting="eager", plan=plan, executable=called)

    def _rows(self, runnables: Sequence[Runnable]) -> list[MeasuredRow]:
        """Measure all variants of one setting in the same rounds."""
        seed = int(self._captured.agree(str(draw_seed())))
        labels = [each.label for each in runnables]
        found = measure_rounds(labels, lambda number: self._captured.time_us(runnables[number].executable), ROUNDS, seed)
        digests = [self._digest(each) for each in runnables]
        return [
            row_of(runnable, measurement, None if digest is None else digest == digests[0])
            for runnable, measurement, digest in zip(runnables, found, digests, strict=True)
        ]

    def _digest(self, runnable: Runnable) -> bytes | None:
        if runnable.setting == "eager":
            return None
        return hashlib.sha256(self._on_gpu.output_bits(runnable.executable)).digest()

    def _trace(self) -> str:
        """Trace a few steps on all ranks, keep rank 0's trace, and return the name of its file."""
        name = f"{self._case.name.replace(', ', '.').replace(': ', '.').replace(' ', '_')}.json.gz"
        path = trace_path(self._output, name)
        run = self._on_gpu.step()
        config = _ExperimentalConfig(enable_cuda_sync_events=True)
        torch.cuda.synchronize()
        self._captured.rendezvous.meet()

        def export(profiler: profile) -> None:
            if self._captured.rendezvous.is_first_rank:
                path.parent.mkdir(exist_ok=True)
                profiler.export_chrome_trace(str(path))

        turns = schedule(wait=0, warmup=1, active=TRACED_STEPS, repeat=1)
        options = {"record_shapes": True, "experimental_config": config, "acc_events": True}
        with profile(schedule=turns, on_trace_ready=export, **options) as profiler:
            for _ in range(1 + TRACED_STEPS):
                run()
                profiler.step()
        return name


def rewritten_variants(captured: Captured, plans: Mapping[str, Plan], opened: ExitStack) -> Iterator[Runnable]:
    """Yield plans that a rewritten graph puts in force, until `opened` closes; plans that not every rank can verify are left
    out.
    """
    for label, plan in plans.items():
        rewritten = rewrite(captured.graph, captured.read, plan)
        is_engaged = all(entry.state == "verified" for entry in rewritten.engagements)
        with closing(rewritten.graph):
            if not captured.is_everywhere(is_engaged):
                continue
            executable = rewritten.graph.instantiate()
        opened.callback(executable.close)
        yield Runnable(label=label, setting="captured", plan=plan, executable=executable)


def row_of(runnable: Runnable, measurement: Measurement, is_identical: bool | None = None) -> MeasuredRow:
    """Return what was measured of a variant; `is_identical` is as in `MeasuredRow`."""
    return MeasuredRow(
        label=runnable.label,
        setting=runnable.setting,
        plan=runnable.plan,
        measured_us=measurement.median_us,
        ratio=measurement.ratio,
        spread=measurement.spread,
        num_rounds=measurement.num_rounds,
        is_identical=is_identical,
    )
