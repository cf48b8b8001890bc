"""The agent inside each rank of a supervised job: finds steps, tunes live or guards the plan, never breaks the job.

`in_job/sitecustomize.py` makes it known to torch's optimizers; `counterpoint.step()` calls it by hand. A step is the time
from one call of the first optimizer that steps to its next; other optimizers are ignored, and all of them after the first
mark by hand. Whatever fails here ends the agent and not the job: the table is emptied, one line says why, and the job
runs as it was; where ranks switch paths together, this one goes on switching until rank 0 has ended it for all. Needs torch
only once an optimizer was made or a step has ended, when the job has loaded it anyway.
"""

import atexit
import os
import weakref
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path

from msgspec.structs import replace

from counterpoint.errors import LaunchFilterError, cause_of, reason_of, say
from counterpoint.integrations.paths import AbstractJobPaths, NoPaths
from counterpoint.launch_filter.control_block import ControlBlock
from counterpoint.ranks import Exchange, launched_rank
from counterpoint.supervised.handshake import (
    HandshakeError,
    RankReport,
    fail_handshake,
    meet,
    own_report,
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

MOST_LETTERS = 600  # of what went wrong, in a line


class NothingLaunchedError(LaunchFilterError):
    """This process has launched nothing that could be tuned."""


class JobAgent:
    """One process's agent. It begins with the first step that ends."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tuner: LiveTuner | None = None
        self._block: ControlBlock | None = None
        self._optimizer: weakref.ref[object] | None = None
        self._has_marks = False
        self._paths: AbstractJobPaths | None = None
        self._exchange: Exchange | None = None
        self._heartbeat: Heartbeat | None = None
        self._is_retired = self._is_failed = False
        self._pid = os.getpid()

    @property
    def is_retired(self) -> bool:
        """Whether there is nothing more to do."""
        return self._is_retired

    def optimizer_made(self) -> None:
        """An optimizer was made, as a rule for a model that is complete and has not run yet.

        What fails here fails again when the first step has ended, and is said then: the other ranks wait for the answer.
        """
        if self._is_retired:
            return
        if self._tuner is not None:
            self._tuner.optimizer_made()
            return
        with suppress(Exception):
            self._report_early()
        with suppress(Exception):
            if self._settings.may_switch_paths and launched_rank(os.environ) is not None:
                self._job_paths().prepare()

    def _report_early(self) -> None:
        """Report to the other ranks before the first step, which may take this one minutes to compile."""
        from counterpoint.supervised import torch_job  # noqa: PLC0415  the job has torch by now

        if self._exchange is None and torch_job.is_joined() and not why_no_filter(os.environ):
            self._exchange = torch_job.job_exchange()
            report_rank(self._exchange, self._report())

    def optimizer_stepped(self, optimizer: object) -> None:
        """An optimizer has stepped; the first one that ever does marks the job's steps."""
        if self._optimizer is None or self._optimizer() is None:
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is optimizer and not self._has_marks:
            self._step_ended()

    def mark_step(self) -> None:
        """The job's code says that a step has ended."""
        self._has_marks = True
        self._step_ended()

    def _step_ended(self) -> None:
        if self._is_retired or os.getpid() != self._pid:  # a fork of a rank is none
            return
        try:
            if self._tuner is None:
                self._tuner = self._begin()
            if self._tuner is None or not self._tuner.step_ended():
                self._is_retired = True
        except Exception as problem:  # whatever it is, the job goes on without us
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
        """What this process needs to take part; None in a process that is no rank."""
        from counterpoint.supervised import torch_job  # noqa: PLC0415  the job has torch by now

        if not torch_job.is_rank_of_job():
            return None
        problem = why_no_filter(os.environ)
        if not problem and not torch_job.is_joined() and self._settings.only_reports:
            return None  # ranks that cannot talk to each other can still have a plan that nobody guards
        path = self._directory / f"{self._pid}.block"
        if path.exists():
            self._block = ControlBlock.open(path)  # before the rest, so that whatever fails there can empty its table
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
            keep=lambda totals: write_totals(self._directory, totals),
            paths=self._job_paths() if self._settings.may_switch_paths else NoPaths(),
        )
        tuner = LiveTuner(job, self._settings, self._earlier())
        atexit.register(self._job_ends)
        return tuner

    def _meet(self, exchange: Exchange, problem: str = "") -> None:
        """Report to the other ranks, and hear of them. Raises `HandshakeError` where one of them cannot take part."""
        from counterpoint.supervised import torch_job  # noqa: PLC0415  the job has torch by now

        report_rank(exchange, self._report(problem))
        roll = meet(exchange)
        if len(set(roll.runs)) > 1:  # within one host the launcher says who is gone
            self._heartbeat = Heartbeat(torch_job.job_exchange("heartbeat"), roll, say)
            self._heartbeat.start()

    def _report(self, problem: str = "", *, is_silent: bool = False) -> RankReport:
        return own_report(str(self._directory), problem, is_silent=is_silent)

    def _earlier(self) -> Decision | None:
        """What was decided before a launcher such as torchrun started the job's processes again."""
        record = read_record(self._directory)
        if record is None or record.plan is None:
            return None
        return Decision(plan=record.plan, setting=record.setting, measurements=record.measurements)

    def _job_ends(self) -> None:
        if os.getpid() != self._pid:  # a fork of a rank is none
            return
        if self._heartbeat is not None:
            self._heartbeat.end()
        with suppress(Exception):  # the process ends, and what it kept before is nearly as good
            if self._tuner is not None:
                self._tuner.job_ends()

    def _retire(self, problem: Exception) -> None:
        outcome = "the job runs as it was"
        is_silent = isinstance(problem, NothingLaunchedError)  # of a job without a GPU, `run` says so once at the end
        reason = (cause_of(problem, MOST_LETTERS) or "no reason given").rstrip(".")
        if self._tuner is None and not isinstance(problem, HandshakeError):
            self._answer_others(reason_of(problem).rstrip("."), is_silent=is_silent)
        try:
            self._is_retired = self._is_failed or self._tuner is None or not self._tuner.fail(reason)
            self._is_failed = True
            if self._tuner is None and self._only_reports():
                outcome = "the plan, which nobody guards, stays in force on the ranks that have the filter"
            elif self._is_retired:
                self._empty_table()
            else:
                outcome = "the ranks go back to the job as it was together"
        except Exception:
            self._is_retired = True
            outcome = "the filter's table could not be emptied and stays in force"
        name = "" if isinstance(problem, LaunchFilterError) else f"{type(problem).__name__}: "
        rank = self._exchange.rank if self._exchange is not None else launched_rank(os.environ) or 0
        line = f"rank {rank} neither tunes nor guards ({name}{reason}); {outcome}"
        if isinstance(problem, HandshakeError):
            line, is_silent = f"{reason}; {outcome}", not problem.is_told
        if not is_silent:
            say(line)
        if rank == 0:
            with suppress(Exception):  # a full disk, perhaps the very reason
                record = read_record(self._directory) or LiveRecord(stage="stopped")
                write_record(self._directory, replace(record, stage="stopped", notes=(line,)))

    def _only_reports(self) -> bool:
        """See `LiveSettings.only_reports`; not where this rank has no settings."""
        with suppress(Exception):
            return self._settings.only_reports
        return False

    def _answer_others(self, reason: str, *, is_silent: bool) -> None:
        """This rank fails before it takes part, and the others may wait for its report."""
        from counterpoint.supervised import torch_job  # noqa: PLC0415  the job has torch by now

        with suppress(Exception):  # there may be no process group, and then nobody waits
            fail_handshake(self._exchange or torch_job.job_exchange(), self._report(reason, is_silent=is_silent))

    def _empty_table(self) -> None:
        """Revert, and keep what was counted for the plan, so that the proof at the end does not say that nothing was."""
        if self._tuner is not None:
            self._tuner.revert()
        elif self._block is not None:
            state = self._block.state()
            write_totals(self._directory, Totals(setting=Setting(rules=state.rules), counters=state.counters))
            self._block.swap(())


@cache
def agent_of_job() -> JobAgent:
    """The agent of this process; the same one however steps are marked."""
    return JobAgent(Path(os.environ[DIRECTORY_VARIABLE]))
