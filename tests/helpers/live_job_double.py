"""A job of several ranks without GPUs: each step takes what a function of the rank, the step and the table in force says.

Ranks run ahead of each other as a seed says, and the "GPU" is some steps behind the host, so that times become known late.
A rank whose job is held waits in a thread of its own; one rank runs at a time, and the seed says which.
Tables are swapped in a double of the control block that counts launches as the filter would.
"""

import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import msgspec

from counterpoint.integrations.paths import AbstractJobPaths, NoPaths
from counterpoint.launch_filter.control_block import FilterState, RuleCounters, SeenFunction
from counterpoint.launch_filter.rules import FilterRule
from counterpoint.ranks import Exchange, LocalStore
from counterpoint.supervised.messages import Decision
from counterpoint.supervised.running_job import AbstractStepClock, JobGpu, LiveJob
from counterpoint.supervised.settings import LiveRecord, LiveSettings, Totals
from counterpoint.supervised.tuning import LiveTuner

GPU = JobGpu(name="NVIDIA H200", num_sms=132, greatest_priority=-3)
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
HOLD_LIMIT_S = 30.0
NEVER = 1 << 60
Rules = tuple[FilterRule, ...]
StepTime = Callable[[int, int, Rules], float]  # rank, step, table: microseconds


def seen(name: str, num_ctas: int = 4096, **changes: object) -> SeenFunction:
    """A kernel with room beside it on an H200 only when capped."""
    function = SeenFunction(
        name=name,
        pattern=name,
        num_launches=0,
        num_changed=0,
        grid=(num_ctas, 1, 1),
        block=(128, 1, 1),
        dynamic_shared_bytes=0,
        static_shared_bytes=0,
        registers_per_thread=32,
        ctas_per_cluster=1,
        is_cooperative=False,
        is_collective=False,
    )
    return msgspec.structs.replace(function, **changes)


def nccl() -> SeenFunction:
    """NCCL's kernel as on H200s."""
    return seen(NCCL, 24, block=(544, 1, 1), registers_per_thread=96, dynamic_shared_bytes=82240, static_shared_bytes=21568)


class FakeTable:
    """A control block whose process launches each of its functions once a step."""

    def __init__(self, functions: Sequence[SeenFunction], rules: Rules) -> None:
        self.functions = list(functions)
        self.rules = rules
        self.num_swaps = self.num_states = 0  # how often they were asked for
        self.idle: frozenset[str] = frozenset()  # counters that stay at 0
        self._counted = 0
        self._launched: dict[str, int] = {}

    def swap(self, rules: Sequence[FilterRule]) -> int:
        self.rules = tuple(rules)
        self._counted = 0
        self.num_swaps += 1
        return self.num_swaps

    def launch_all(self) -> None:
        self._counted += 1
        for function in self.functions:
            self._launched[function.name] = self._launched.get(function.name, 0) + 1

    def state(self) -> FilterState:
        self.num_states += 1
        functions = [msgspec.structs.replace(each, num_launches=self._launched.get(each.name, 0)) for each in self.functions]
        return FilterState(
            pid=1,
            rank=0,
            generation=self.num_swaps,
            num_launches=sum(self._launched.values()),
            num_launches_ex=0,
            driver="cuda",
            rules=self.rules,
            counters=tuple(self._counters(rule) for rule in self.rules),
            functions=tuple(functions),
            problem="",
        )

    def rule_counters(self) -> tuple[tuple[FilterRule, RuleCounters], ...]:
        return tuple((rule, self._counters(rule)) for rule in self.rules)

    def _counters(self, rule: FilterRule) -> RuleCounters:
        is_nccl = {True: ("communication", None), False: ("computation", None)}
        matching = [
            each
            for each in self.functions
            if fnmatchcase(each.name, rule.pattern) and rule.kind in is_nccl[each.name == NCCL]
        ]
        number = self._counted * len(matching)
        counters = RuleCounters(
            num_matched=number,
            num_capped=number if rule.dynamic_shared_bytes is not None else 0,
            num_prioritized=number if rule.priority is not None else 0,
            num_held=number if rule.hold_us is not None else 0,
            residency_found=rule.ctas_per_sm if number else None,
        )
        return msgspec.structs.replace(counters, **dict.fromkeys(self.idle, 0))


class FakeClock(AbstractStepClock):
    """The GPU's time passes by `advance`; a mark is known once the host is `lag` steps past it, or has waited.

    The host issues the next step in `issue_us`, and the GPU cannot end it before.
    """

    def __init__(self, lag: int) -> None:
        self.now_us = self._host_us = 0.0
        self.step = self._caught_up_at = 0
        self.fails_from = NEVER
        self.lag, self.issue_us = lag, 0.0

    def advance(self, step_us: float) -> None:
        self._host_us += self.issue_us
        self.now_us = max(self.now_us + step_us, self._host_us)
        self.step += 1

    def catch_up(self) -> None:
        """The host waits for the GPU."""
        self._host_us, self._caught_up_at = self.now_us, self.step

    def mark(self) -> tuple[int, float]:
        if self.step >= self.fails_from:
            raise RuntimeError("the clock has stopped")
        return self.step, self.now_us

    def elapsed_us(self, start: tuple[int, float], end: tuple[int, float]) -> float | None:
        return end[1] - start[1] if self.step >= end[0] + self.lag or self._caught_up_at >= end[0] else None


class FakeRank:
    """One rank with its tuner, and all that it said, recorded and had in force."""

    def __init__(
        self,
        exchange: Exchange,
        functions: Sequence[SeenFunction],
        settings: LiveSettings,
        *,
        lag: int,
        earlier: Decision | None,
        draw_seed: Callable[[], int],
        hold: Callable[[], None],
        hold_limit_s: float,
        paths: AbstractJobPaths,
    ) -> None:
        self.rank = exchange.rank
        self.paths = paths
        self.held_steps: set[int] = set()  # after which the job was held
        self._let_others_run = hold
        self.table = FakeTable(functions, settings.given.rules)
        self.clock = FakeClock(lag)
        self.said: list[str] = []
        self.records: list[LiveRecord] = []
        self.totals: list[Totals] = []
        self.in_force: list[Rules] = []
        self.is_running, self.is_failed = True, False
        job = LiveJob(
            clock=self.clock,
            exchange=exchange,
            table=self.table,
            gpu=GPU,
            say=self.said.append,
            record=self.records.append,
            keep=self.totals.append,
            draw_seed=draw_seed,
            hold=self._hold,
            hold_limit_s=hold_limit_s,
            paths=paths,
        )
        self.tuner = LiveTuner(job, settings, earlier)

    def mostly(self) -> Rules:
        """The table that was in force in most of the last 100 steps: a look of the guard takes turns."""
        return Counter(self.in_force[-100:]).most_common(1)[0][0]

    def run_step(self, step_time: StepTime) -> None:
        """One step of the job: launches under the table in force, time, and the boundary."""
        self.in_force.append(self.table.rules)
        self.table.launch_all()
        self.clock.advance(step_time(self.rank, len(self.in_force), self.table.rules))
        if self.is_running:
            self._step_ended()

    def _hold(self) -> None:
        self.held_steps.add(len(self.in_force))
        self._let_others_run()
        self.clock.catch_up()

    def _step_ended(self) -> None:
        """As the agent in a job does it: what fails ends it, once no other rank depends on it."""
        try:
            self.is_running = self.tuner.step_ended()
        except Exception as problem:
            self.is_running = not self.is_failed and self.tuner.fail(str(problem))
            self.is_failed = True
            if not self.is_running:
                self.tuner.revert()


class Baton:
    """Runs the steps of one rank in a thread, which goes on only while the scheduler waits for it."""

    def __init__(self) -> None:
        self.is_busy = False  # within a step, where the rank is held
        self._begin, self._pause = threading.Semaphore(0), threading.Semaphore(0)
        self._step: Callable[[], None] | None = None
        self._problem: BaseException | None = None
        self._thread: threading.Thread | None = None

    def go_on(self, step: Callable[[], None]) -> None:
        """Let the rank run until its step ends or it is held."""
        if not self.is_busy:
            self.is_busy, self._step = True, step
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()
        self._begin.release()
        self._pause.acquire()
        if self._problem is not None:
            raise self._problem

    def hold(self) -> None:
        """On the rank: let others run."""
        self._pause.release()
        self._begin.acquire()

    def end(self) -> None:
        """End the thread, between two steps."""
        if self._thread is not None:
            self._step = None
            self._begin.release()
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while True:
            self._begin.acquire()
            if self._step is None:
                return
            try:
                self._step()
            except BaseException as problem:  # the test's to see
                self._problem = problem
            self.is_busy = False
            self._pause.release()


class FakeJob:
    """Ranks that run steps, up to `most_ahead` steps ahead of the slowest of them."""

    def __init__(
        self,
        settings: LiveSettings,
        functions: Sequence[SeenFunction],
        *,
        num_ranks: int = 2,
        lag: int = 2,
        most_ahead: int = 2,
        seed: int = 0,
        earlier: Decision | None = None,
        paths: Callable[[int], AbstractJobPaths] = lambda rank: NoPaths(),
        hold_limit_s: float = HOLD_LIMIT_S,
    ) -> None:
        self.store = LocalStore()
        drawn = random.Random(seed)
        exchanges = [Exchange(self.store, rank, num_ranks, limit_s=1.0) for rank in range(num_ranks)]
        self._batons = [Baton() for _ in exchanges]
        self.ranks = [
            FakeRank(
                exchange,
                functions,
                settings,
                lag=lag,
                earlier=earlier,
                draw_seed=lambda: drawn.getrandbits(48),
                hold=baton.hold,
                hold_limit_s=hold_limit_s,
                paths=paths(exchange.rank),
            )
            for exchange, baton in zip(exchanges, self._batons, strict=True)
        ]
        self._may_be_held = settings.may_switch_paths and num_ranks > 1
        self._random = random.Random(seed)
        self._most_ahead = most_ahead

    def run(self, num_steps: int, step_time: StepTime, silent: frozenset[int] = frozenset()) -> None:
        """Until every rank has run `num_steps` more steps. Ranks in `silent` have lost their agent."""
        last = max(len(rank.in_force) for rank in self.ranks) + num_steps
        for rank in self.ranks:
            rank.is_running = rank.is_running and rank.rank not in silent
        try:
            while able := self._able(last):
                rank = self._random.choice(able)
                self._go_on(rank, step_time)
        finally:
            for baton in self._batons:
                if not baton.is_busy:
                    baton.end()

    def _able(self, last: int) -> list[FakeRank]:
        """The ranks within a step, and those that may begin one."""
        behind = min(len(rank.in_force) for rank in self.ranks)
        most = min(last, behind + self._most_ahead + 1)
        return [rank for rank in self.ranks if self._batons[rank.rank].is_busy or len(rank.in_force) < most]

    def _go_on(self, rank: FakeRank, step_time: StepTime) -> None:
        if self._may_be_held:
            self._batons[rank.rank].go_on(lambda: rank.run_step(step_time))
        else:
            rank.run_step(step_time)
