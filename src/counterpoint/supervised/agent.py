"""The agent inside each rank of a supervised job: detects steps, tunes live or guards the plan, and never breaks the
job.

`in_job/sitecustomize.py` registers it with torch's optimizers; `counterpoint.step()` calls it directly. A step is the
interval between two calls of `step()` on the first optimizer seen. Other optimizers are ignored until one of them takes
`SUCCEEDS_AFTER` steps in which the first takes none: from then on it marks the steps. Where paths are switched, only those
that train what is switched can do so, and the first optimizer is one of these, if there is any. After the first call of
`counterpoint.step()` all are ignored. If the agent fails, it ends and the job goes on: it empties the filter's table, prints
one line with the reason, and the job runs unchanged. If ranks switch paths together, the failed rank keeps switching until
rank 0 has ended it for all. The agent needs torch only after an optimizer was created or a step has ended, when the job has
loaded it anyway.
"""

import atexit
import logging
import os
import weakref
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from typing import final

from msgspec.structs import replace

from counterpoint.errors import LaunchFilterError, cause_of, package_version, reason_of, say
from counterpoint.integrations.paths import AbstractJobPaths, NoPaths
from counterpoint.launch_filter.control_block import ControlBlock, block_in_use
from counterpoint.ranks import Exchange, launched_rank
from counterpoint.supervised.handshake import (
    HandshakeError,
    RankReport,
    fail_handshake,
    meet,
    report_rank,
    why_no_filter,
)
from counterpoint.supervised.heartbeat import Heartbeat
from counterpoint.supervised.messages import Decision
from counterpoint.supervised.running_job import NOTHING_LAUNCHED, LiveJob, NoTable
from counterpoint.supervised.settings import (
    DIRECTORY_VARIABLE,
    LiveRecord,
    LiveSettings,
    Setting,
    Totals,
    read_record,
    read_settings,
    write_record,
    write_totals,
)
from counterpoint.supervised.tuning import LiveTuner

RANK_PROCESS_VARIABLE = "COUNTERPOINT_RANK_PROCESS"
SUCCEEDS_AFTER = 3  # steps of another optimizer, and none of the one that marks the job's steps
MOST_LETTERS = 600  # most letters of a failure's reason in a line


class NothingLaunchedError(LaunchFilterError):
    """This process has launched nothing that can be tuned."""


class JobAgent:
    """The agent of one process. It begins when the first step ends."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tuner: LiveTuner | None = None
        self._block: ControlBlock | None = None
        self._optimizer: weakref.ref[object] | None = None  # that marks the job's steps
        # by id, since a subclass may compare by value: other optimizers, and their steps since its last one
        self._others: dict[int, tuple[weakref.ref[object], int]] = {}
        self._has_marks = False
        self._paths: AbstractJobPaths | None = None
        self._exchange: Exchange | None = None
        self._heartbeat: Heartbeat | None = None
        self._pid = os.getpid()
        self._totals_name = str(self._pid)
        self._is_within, self._is_retired, self._is_failed = _is_within_rank(self._pid), False, False

    @property
    def is_retired(self) -> bool:
        """Whether there is nothing more to do."""
        return self._is_retired

    @property
    def has_begun(self) -> bool:
        """Whether this process has taken part in what ranks agree on."""
        return self._exchange is not None or self._tuner is not None

    def _is_no_rank(self) -> bool:
        """Return whether there is nothing to do in this process: it is retired, a forked child of a rank, or started by a
        rank and not joined with ranks of its own.
        """
        if self._is_retired or os.getpid() != self._pid:
            return True
        if self._is_within:
            from counterpoint.supervised import torch_job  # noqa: PLC0415  the job has torch by now

            self._is_within = not torch_job.is_one_of_several()
            if not self._is_within:
                os.environ[RANK_PROCESS_VARIABLE] = str(self._pid)
        return self._is_within

    def optimizer_made(self) -> None:
        """Handle a new optimizer, usually for a model that is complete and has not run yet.

        What fails here fails again when the first step has ended, and is reported then, because the other ranks wait for
        the answer.
        """
        if self._is_no_rank():
            return
        if self._tuner is not None:
            self._tuner.optimizer_made()
            return
        with suppress(Exception):
            self._report_early()
        with suppress(Exception):
            from counterpoint.supervised import torch_job  # noqa: PLC0415  the job has torch by now

            if self._settings.may_switch_paths and torch_job.is_rank_of_job():
                self._job_paths().prepare()

    def _report_early(self) -> None:
        """Report to the other ranks before the first step, which may take this one minutes to compile."""
        from counterpoint.supervised import torch_job  # noqa: PLC0415  the job has torch by now

        if self._exchange is None and torch_job.is_joined() and not why_no_filter(os.environ):
            self._exchange = torch_job.job_exchange()
            report_rank(self._exchange, self._report())

    def optimizer_stepped(self, optimizer: object) -> None:
        """Handle a step of an optimizer; the first one that ever steps marks the job's steps while it goes on.

        Ranks have to count alike, so nothing depends on when the garbage collector of this rank removes an optimizer.
        """
        if self._has_marks or self._is_no_rank():
            return
        if self._optimizer is None or self._optimizer() is not optimizer:
            seen, num_steps = self._others.get(id(optimizer), (None, 0))
            num_steps = num_steps + 1 if seen is not None and seen() is optimizer else 1
            is_due = self._optimizer is None or num_steps >= SUCCEEDS_AFTER
            if not self._is_step_of_job(optimizer, is_due=is_due):
                return
            self._others[id(optimizer)] = weakref.ref(optimizer), num_steps
            if not is_due:
                return
            self._optimizer = weakref.ref(optimizer)
        self._others.clear()
        self._step_ended()

    def _is_step_of_job(self, optimizer: object, *, is_due: bool) -> bool:
        try:
            if self._tuner is not None:
                return self._tuner.is_step_of_job(optimizer, is_due=is_due)
            with suppress(Exception):  # what fails here fails again in the survey, which tells the other ranks
                return not self._must_count_alike() or self._job_paths().may_begin(optimizer)
        except Exception as problem:  # as in `_step_ended`
            self._retire(problem)
            return False
        return True

    def _must_count_alike(self) -> bool:
        """Return whether paths may be switched, which all ranks do after the same step."""
        from counterpoint.supervised import torch_job  # noqa: PLC0415  the job has torch by now

        return self._settings.may_switch_paths and torch_job.is_joined()

    def mark_step(self) -> None:
        """Handle the end of a step that the job's code marks. If paths may be switched, the first mark, on every rank alike,
        only begins the count of what the job calls itself: there may be no optimizer that has begun it.
        """
        is_first, self._has_marks = not self._has_marks, True
        is_begin = False
        if is_first and not self._is_no_rank():
            with suppress(Exception):  # as in `optimizer_made`
                is_begin = self._must_count_alike()
                if is_begin and self._tuner is None:
                    self._job_paths().prepare()
        if not is_begin:
            self._step_ended()

    def _step_ended(self) -> None:
        if self._is_no_rank():
            return
        try:
            if self._tuner is None:
                self._tuner = self._begin()
            if self._tuner is None or not self._tuner.step_ended():
                self._is_retired = True
        except Exception as problem:  # whatever failed, the job goes on without the agent
            self._retire(problem)

    @cached_property
    def _settings(self) -> LiveSettings:
        return read_settings(self._directory)

    def _job_paths(self) -> AbstractJobPaths:
        from counterpoint.supervised import torch_job  # noqa: PLC0415  the job has torch by now

        if self._paths is None:
            self._paths = torch_job.job_paths(self._settings.given.paths)
        return self._paths

    def _begin(self) -> LiveTuner | None:
        """Return what this process needs to take part; None in a process that is no rank."""
        from counterpoint.supervised import torch_job  # noqa: PLC0415  the job has torch by now

        if not torch_job.is_rank_of_job():
            return None
        problem = why_no_filter(os.environ)
        if not problem and not torch_job.is_joined() and self._settings.only_reports:
            return None  # ranks that cannot exchange messages can still have an unguarded plan
        path = block_in_use(self._directory, self._pid)
        if path is not None:
            self._block = ControlBlock(path)  # first, so that any later failure can empty the table
            self._totals_name = path.stem
        self._exchange = exchange = self._exchange or torch_job.job_exchange()
        if exchange.num_ranks > 1 and problem:
            self._meet(exchange, problem)
        if self._block is None and (not self._settings.may_switch_paths or exchange.num_ranks == 1):
            raise NothingLaunchedError(f"{NOTHING_LAUNCHED}.")
        if exchange.num_ranks > 1:
            self._meet(exchange)
        job = LiveJob(
            clock=torch_job.job_clock(),
            exchange=exchange,
            table=self._block or NoTable(self._pid),
            gpu=torch_job.job_gpu(),
            say=say,
            record=lambda record: write_record(self._directory, record),
            keep=lambda totals: write_totals(self._directory, self._totals_name, totals),
            paths=self._job_paths() if self._settings.may_switch_paths else NoPaths(),
        )
        tuner = LiveTuner(job, self._settings, self._earlier())
        atexit.register(self._job_ends)
        return tuner

    def _meet(self, exchange: Exchange, problem: str = "") -> None:
        """Report to the other ranks and receive their reports. Raises `HandshakeError` if one of them cannot take part."""
        from counterpoint.supervised import torch_job  # noqa: PLC0415  the job has torch by now

        report_rank(exchange, self._report(problem))
        roll = meet(exchange)
        if len(set(roll.runs)) > 1:  # on one host the launcher reports lost ranks
            self._heartbeat = Heartbeat(torch_job.job_exchange("heartbeat"), roll, say)
            self._heartbeat.start()

    def _report(self, problem: str = "", *, is_silent: bool = False) -> RankReport:
        return RankReport(
            host=os.uname().nodename,
            run=str(self._directory),
            version=package_version(),
            problem=problem,
            is_silent=is_silent,
        )

    def _earlier(self) -> Decision | None:
        """Return what was decided before a launcher such as torchrun restarted the job's processes."""
        record = read_record(self._directory)
        if record is None or record.plan is None:
            return None
        return Decision(plan=record.plan, setting=record.setting, measurements=record.measurements)

    def _job_ends(self) -> None:
        if os.getpid() != self._pid:  # a forked child of a rank is no rank
            return
        if self._heartbeat is not None:
            self._heartbeat.end()
        with suppress(Exception):  # the process ends, and what it saved before is nearly complete
            if self._tuner is not None:
                self._tuner.job_ends()

    def _retire(self, problem: Exception) -> None:
        outcome = "the job runs unchanged"
        is_silent = isinstance(problem, NothingLaunchedError)  # for a job without a GPU, `run` reports that once at the end
        reason = (cause_of(problem, MOST_LETTERS) or "no reason given").rstrip(".")
        if self._tuner is None and not isinstance(problem, HandshakeError):
            self._answer_others(reason_of(problem).rstrip("."), is_silent=is_silent)
        try:
            self._is_retired = self._is_failed or self._tuner is None or not self._tuner.fail(reason)
            self._is_failed = True
            if self._tuner is None and self._only_reports():
                outcome = "the plan stays applied, without a guard, on the ranks that have the filter"
            elif self._is_retired:
                self._empty_table()
            else:
                outcome = "all ranks return together to the unmodified job"
        except Exception:  # as where the job has ended the store through which ranks agree
            self._is_retired = True
            outcome = self._outcome_alone()
        name = "" if isinstance(problem, LaunchFilterError) else f"{type(problem).__name__}: "
        rank = self._exchange.rank if self._exchange is not None else launched_rank(os.environ) or 0
        line = f"rank {rank} does not tune or guard ({name}{reason}); {outcome}"
        if isinstance(problem, HandshakeError):
            line, is_silent = f"{reason}; {outcome}", not problem.is_told
        if not is_silent:
            say(line)
        if rank == 0:
            with suppress(Exception):  # a full disk, perhaps the cause of the failure
                record = read_record(self._directory) or LiveRecord(stage="stopped")
                write_record(self._directory, replace(record, stage="stopped", notes=(line,)))

    def _only_reports(self) -> bool:
        """See `LiveSettings.only_reports`; not where this rank has no settings."""
        with suppress(Exception):
            return self._settings.only_reports
        return False

    def _answer_others(self, reason: str, *, is_silent: bool) -> None:
        """Report that this rank failed before it took part; the others may wait for its report."""
        with suppress(Exception):  # without a process group, no rank waits
            from counterpoint.supervised import torch_job  # noqa: PLC0415  a job that marks its steps may have no torch

            fail_handshake(self._exchange or torch_job.job_exchange(), self._report(reason, is_silent=is_silent))

    def _outcome_alone(self) -> str:
        """Revert what concerns only this rank, and return in words what is left; paths change on all ranks or on none."""
        with suppress(Exception):
            if self._tuner is not None:
                self._tuner.empty_table()
                kept = "collectives keep their present path, because ranks can no longer agree"
                return f"launches are unchanged again, and {kept}"
        return "the filter's table could not be emptied and stays active"

    def _empty_table(self) -> None:
        """Revert, and keep the plan's counts, so that the proof at the end does not report zero."""
        if self._tuner is not None:
            self._tuner.revert()
        elif self._block is not None:
            state = self._block.state()
            totals = Totals(setting=Setting(rules=state.rules), counters=state.counters)
            write_totals(self._directory, self._totals_name, totals)
            self._block.swap(())


def _is_within_rank(pid: int) -> bool:
    """Return whether this process was started by a rank, whose environment it has; a rank is noted there."""
    noted = os.environ.get(RANK_PROCESS_VARIABLE, "")
    if noted not in ("", str(pid)) and Path("/proc", noted).exists():
        return True
    if launched_rank(os.environ) is not None:
        os.environ[RANK_PROCESS_VARIABLE] = str(pid)
    return False


@final
class SaidRecords(logging.Handler):
    """Prints what the package logs, as `say` does."""

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler.emit`."""
        say(record.getMessage().removeprefix("counterpoint: "))


@cache
def agent_of_job() -> JobAgent:
    """Return the agent of this process; the same one however steps are marked.

    The job did not ask for the package's messages, so they do not go where it sends its own.
    """
    logger = logging.getLogger("counterpoint")
    logger.propagate = False
    if not any(isinstance(each, SaidRecords) for each in logger.handlers):  # a forked child has those of its parent
        logger.addHandler(SaidRecords())
    return JobAgent(Path(os.environ[DIRECTORY_VARIABLE]))


def _forked() -> None:
    """In a forked child, drop the agent of a parent that is no rank: notebooks start ranks so."""
    if agent_of_job.cache_info().currsize and not agent_of_job().has_begun:
        agent_of_job.cache_clear()


os.register_at_fork(after_in_child=_forked)
