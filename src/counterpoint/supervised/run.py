"""`counterpoint run`: runs a command under the launch filter, from the plan's rules to the proof that they took effect.

Without a plan and without tuning, the command is only supervised: nothing is preloaded and its environment is unchanged.
The files of the filter and the agent are in a folder that is removed at the end.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from counterpoint.engagement import Engagement
from counterpoint.errors import LaunchFilterError, reason_of, say
from counterpoint.integrations.planned_paths import planned_paths
from counterpoint.launch_filter.control_block import INITIAL_BLOCK, ControlBlock, FilterState, block_paths
from counterpoint.launch_filter.executable import check_command, find_executable
from counterpoint.launch_filter.library import filter_library
from counterpoint.launch_filter.rules import Translation, translate
from counterpoint.plan import Plan
from counterpoint.step import Step
from counterpoint.supervised.applicable import check_applicable, variable_remarks
from counterpoint.supervised.control_folder import control_folder, make_readable, private_files
from counterpoint.supervised.environment import job_environment
from counterpoint.supervised.launchers import check_outer_launcher
from counterpoint.supervised.process import Ended, supervise
from counterpoint.supervised.proof import ControlProof, ProcessProof, count_setting, prove_paths, prove_process, refused
from counterpoint.supervised.settings import (
    RECORD_FILE,
    UNCHANGED,
    LiveRecord,
    LiveSettings,
    Setting,
    Totals,
    read_record,
    read_totals,
    totals_paths,
    write_settings,
)
from counterpoint.supervised.signals import HeldSignals
from counterpoint.value import Value

T = TypeVar("T")
NEVER_IN_FORCE = "it was not applied in this process, which ended too early, or began before the job was restarted"
NO_STEP = (
    "no process with a rank (RANK, as torchrun sets it) finished a step. A step ends with a call of an optimizer's step() "
    "or of counterpoint.step()"
)


class RunRequest(Value, frozen=True, kw_only=True):
    """What to run and how. `step` resolves the operation numbers of a plan to kernel names. `num_queues` are each rank's
    hardware queues; None leaves them as they are.
    """

    command: tuple[str, ...]
    plan: Plan = Plan()
    is_tuning: bool = False
    budget_steps: int = 200
    guard_every_steps: int = 500
    step: Step | None = None
    keeps_bits: bool = False
    num_queues: int | None = None

    @property
    def is_filtered(self) -> bool:
        """Whether there is anything for the filter to do."""
        return self.is_tuning or bool(self.plan.directives)


class RunOutcome(Value, frozen=True, kw_only=True):
    """The outcome: how the command ended, the proof of each process that reached a GPU, what could not even be
    requested.

    `record` is the result of tuning or of the guard, as far as rank 0 ran here. `damaged` says, by name, why files of
    the control folder cannot be read.
    """

    ended: Ended
    is_filtered: bool
    is_tuned: bool = False
    processes: tuple[ProcessProof, ...] = ()
    unasked: tuple[ControlProof, ...] = ()
    record: LiveRecord | None = None
    remarks: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()

    @property
    def has_rank_0(self) -> bool:
        """Whether rank 0, which decides and records, may have run here: it did, or no process had a rank."""
        return any(process.rank <= 0 for process in self.processes)

    @property
    def why_stopped(self) -> str:
        """Why rank 0 had to stop tuning or guarding, after which no control was applied; or nothing."""
        record = self.record
        return " ".join(record.notes) if record is not None and record.stage == "stopped" else ""

    @property
    def has_acted(self) -> bool:
        """Whether a process reached a GPU, or paths were tuned without one: a job with nothing to tune is left after its
        first step.
        """
        return bool(self.processes) or (self.record is not None and self.record.num_steps > 1)

    @property
    def plan_found(self) -> Plan | None:
        """The plan that live tuning decided on, unless it was taken out again."""
        record = self.record if self.is_tuned else None
        return None if record is None or record.stage == "reverted" else record.plan

    def first_unproven(self) -> Engagement | None:
        """Return the first control that did not take effect in some process, or None."""
        every = (*self.unasked, *(applied for process in self.processes for applied in process.applied))
        return next((applied.engagement for applied in every if applied.engagement.state != "verified"), None)


def run_job(request: RunRequest, signals: HeldSignals) -> RunOutcome:
    """Run the command to its end, and hold signals once it has started. If something is wrong, raises a
    `CounterpointError` before it starts.
    """
    executable = find_executable(request.command)
    if not request.is_filtered:
        return RunOutcome(ended=_start(request.command, dict(os.environ), signals), is_filtered=False)
    check_outer_launcher(request.command, os.environ)
    check_command(executable)
    translation, settings, left_out = check_plan(request)
    library = filter_library()
    if left_out:
        say(left_out)
    signals.hold()
    try:
        with control_folder() as directory:
            with private_files():
                ControlBlock.write_initial(directory / INITIAL_BLOCK, translation.rules)
                write_settings(directory, settings)
            environment = job_environment(
                os.environ,
                directory,
                library,
                request.plan,
                keeps_recordings=settings.may_switch_paths,
                num_queues=request.num_queues,
            )
            ended = _start(request.command, environment, signals)
            make_readable(directory)
            return outcome_of(directory, ended, request, (translation, settings))
    except OSError as problem:
        place = problem.filename or "a folder for temporary files"
        raise LaunchFilterError(f"Cannot use {place}: {problem.strerror}; free space or set TMPDIR.") from problem


def check_plan(request: RunRequest) -> tuple[Translation, LiveSettings, str]:
    """Return what the plan asks of the filter, the agent's settings, and one line on what a job does not get of the plan.

    Raises `PlanError` for a plan of which a job would get nothing.
    """
    translation, settings = _translate(request)
    left_out = check_applicable(request.plan, translation, settings.given.paths, keeps_bits=request.keeps_bits)
    return translation, settings, left_out


def _translate(request: RunRequest) -> tuple[Translation, LiveSettings]:
    translation = translate(request.plan, request.step)
    planned = planned_paths(request.plan.directives, request.step)
    settings = LiveSettings(
        is_tuning=request.is_tuning,
        plan=request.plan,
        given=Setting(rules=translation.rules, paths=planned.paths),
        keeps_bits=request.keeps_bits,
        budget_steps=request.budget_steps,
        guard_every_steps=request.guard_every_steps,
    )
    return replace(translation, refusals=(*translation.refusals, *planned.refusals)), settings


def _start(command: tuple[str, ...], environment: dict[str, str], signals: HeldSignals) -> Ended:
    try:
        return supervise(command, environment, signals)
    except OSError as problem:
        raise LaunchFilterError(
            f"'{command[0]}' cannot be started: {problem.strerror}. If it is a script, give it a first line with its "
            "interpreter."
        ) from problem


def outcome_of(directory: Path, ended: Ended, request: RunRequest, asked: tuple[Translation, LiveSettings]) -> RunOutcome:
    """Read what the filters and the agent left in the folder. Never raises: the job has ended with its own status."""
    damaged: list[str] = []
    translation, settings = asked
    record = _read_or_note(directory / RECORD_FILE, lambda _: read_record(directory), damaged)
    plan, setting = request.plan, settings.given
    if request.is_tuning:
        plan, setting = (record.plan or Plan(), record.setting) if record else (Plan(), UNCHANGED)

    def prove(path: Path) -> ProcessProof | None:
        state = _read_state(path)
        if not state.driver:
            return None
        kept = read_totals(directory, path.stem)
        if state.rank < 0 <= kept.rank:  # the launcher gave it no rank, but the process group did
            state = replace(state, rank=kept.rank)
        return prove_setting(state, plan, setting, kept, is_tuned=request.is_tuning)

    def prove_without_launches(path: Path) -> ProcessProof | None:
        name = path.name.partition(".")[0]
        pid, kept = int(name.partition("-")[0]), read_totals(directory, name)
        applied = tuple(prove_paths(kept)) if kept.setting == setting else ()
        return ProcessProof(pid=pid, rank=kept.rank, num_launches=0, applied=applied)

    by_name = {path.stem: _read_or_note(path, prove, damaged) for path in block_paths(directory)}
    proofs = [proof for proof in by_name.values() if proof is not None]
    launched = {f"{name}.totals.json" for name, proof in by_name.items() if proof is not None}
    others = [path for path in totals_paths(directory) if path.name not in launched]
    found = [_read_or_note(path, prove_without_launches, damaged) for path in others]
    proofs += [proof for proof in found if proof is not None and proof.applied]
    if record is None and not damaged and not totals_paths(directory):  # each rank saves its totals after its first step
        proofs = [_without_steps(proof, settings.given, why_no_step(ended)) for proof in proofs]
    return RunOutcome(
        ended=ended,
        is_filtered=True,
        is_tuned=request.is_tuning,
        processes=tuple(sorted(proofs, key=lambda proof: (proof.rank, proof.pid))),
        unasked=tuple(refused(translation.refusals)) if not request.is_tuning else (),
        record=record,
        remarks=(*translation.remarks, *variable_remarks(request.plan)),
        damaged=tuple(damaged),
    )


def _read_or_note(path: Path, read: Callable[[Path], T], damaged: list[str]) -> T | None:
    """Return what a file holds; if it cannot be read, add its name and the reason to `damaged`."""
    try:
        return read(path)
    # the disk was full, the process was killed during the write, or another program overwrote it
    except Exception as problem:
        damaged.append(f"{path.name}: {reason_of(problem)}")
        return None


def prove_setting(state: FilterState, plan: Plan, setting: Setting, kept: Totals, *, is_tuned: bool) -> ProcessProof:
    """Return what became of the plan's setting in one process.

    `kept` is the proof that the plan was applied. The filter's own table proves it only if nothing was tuned: in a tuned
    process the table may belong to a trial of the same rules, and its state at the end of a job is arbitrary.
    """
    if is_tuned and setting != kept.setting:
        state = replace(state, rules=(), counters=())
    proof = prove_process(state, plan, count_setting(setting, state, kept))
    return proof if setting == kept.setting or setting.rules == state.rules else _never_in_force(proof)


def _never_in_force(proof: ProcessProof) -> ProcessProof:
    """Return the proof of a table that this process never had; the reason is not a lack of launches, as it would seem."""
    applied = tuple(
        replace(each, engagement=replace(each.engagement, reason=NEVER_IN_FORCE))
        if each.engagement.state == "failed" and not each.num_matched
        else each
        for each in proof.applied
    )
    return replace(proof, applied=applied)


def why_no_step(ended: Ended) -> str:
    """Return why a job had no steps."""
    status = ended.exit_status
    return f"the command ended with status {status} before a rank finished a step" if status else NO_STEP


def _without_steps(proof: ProcessProof, setting: Setting, why: str) -> ProcessProof:
    """Return the proof of a process in a job without steps, such as one that serves a model: no rank switched its paths."""
    paths = {name for _, name in setting.paths.targets}
    applied = tuple(
        replace(each, engagement=replace(each.engagement, reason=why)) if each.engagement.target in paths else each
        for each in proof.applied
    )
    return replace(proof, applied=applied)


def _read_state(path: Path) -> FilterState:
    block = ControlBlock(path)
    try:
        return block.state()
    finally:
        block.close()
