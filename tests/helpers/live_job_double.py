"""A job of several ranks without GPUs: each step takes what a function of the rank, the step and the table in force says.

Ranks run ahead of each other as a seed says, and the "GPU" is some steps behind the host, so that times become known late.
Tables are swapped in a double of the control block that counts launches as the filter would.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import msgspec

from counterpoint.integrations.paths import AbstractJobPaths, NoPaths
from counterpoint.launch_filter.control_block import FilterRule, FilterState, RuleCounters, SeenFunction
from counterpoint.ranks import Exchange, LocalStore
from counterpoint.supervised.follower import LiveJob
from counterpoint.supervised.messages import Decision
from counterpoint.supervised.running_job import AbstractStepClock, JobGpu
from counterpoint.supervised.settings import LiveRecord, LiveSettings, Totals
from counterpoint.supervised.tuning import LiveTuner

GPU = JobGpu(name="NVIDIA H200", num_sms=132, greatest_priority=-3)
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
HOLD_LIMIT_S = 0.2
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
        self.num_swaps = 0
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
    """Time passes by `advance`; a mark is known once the host is `lag` steps past it."""

    def __init__(self, lag: int) -> None:
        self.now_us = 0.0
        self.step = 0
        self._lag = lag

    def advance(self, step_us: float) -> None:
        self.now_us += step_us
        self.step += 1

    def mark(self) -> tuple[int, float]:
        return self.step, self.now_us

    def elapsed_us(self, start: tuple[int, float], end: tuple[int, float]) -> float | None:
        return end[1] - start[1] if self.step >= end[0] + self._lag else None


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
        hold: Callable[["FakeRank"], None],
        paths: AbstractJobPaths,
    ) -> None:
        self.rank = exchange.rank
        self.paths = paths
        self.is_held = False
        self.table = FakeTable(functions, settings.given.rules)
        self.clock = FakeClock(lag)
        self.said: list[str] = []
        self.records: list[LiveRecord] = []
        self.totals: list[Totals] = []
        self.in_force: list[Rules] = []
        self.is_running = True
        job = LiveJob(
            clock=self.clock,
            exchange=exchange,
            table=self.table,
            gpu=GPU,
            say=self.said.append,
            record=self.records.append,
            keep=self.totals.append,
            draw_seed=draw_seed,
            hold=lambda: hold(self),
            hold_limit_s=HOLD_LIMIT_S,
            paths=paths,
        )
        self.tuner = LiveTuner(job, settings, earlier)

    def mostly(self, num_steps: int = 100) -> Rules:
        """The table that was in force in most of the last steps: a look of the guard takes turns."""
        return Counter(self.in_force[-num_steps:]).most_common(1)[0][0]

    def run_step(self, step_time: StepTime) -> None:
        """One step of the job: launches under the table in force, time, and the boundary."""
        self.in_force.append(self.table.rules)
        self.table.launch_all()
        self.clock.advance(step_time(self.rank, len(self.in_force), self.table.rules))
        if self.is_running:
            self.is_running = self.tuner.step_ended()


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
    ) -> None:
        self.store = LocalStore()
        drawn = random.Random(seed)
        exchanges = [Exchange(self.store, rank, num_ranks, limit_s=1.0) for rank in range(num_ranks)]
        self.ranks = [
            FakeRank(
                exchange,
                functions,
                settings,
                lag=lag,
                earlier=earlier,
                draw_seed=lambda: drawn.getrandbits(48),
                hold=self._run_others,
                paths=paths(exchange.rank),
            )
            for exchange in exchanges
        ]
        self._step_time: StepTime = lambda rank, step, rules: 0.0
        self._random = random.Random(seed)
        self._most_ahead = most_ahead

    def run(self, num_steps: int, step_time: StepTime, silent: frozenset[int] = frozenset()) -> None:
        """Until every rank has run `num_steps` more steps. Ranks in `silent` have lost their agent."""
        self._step_time = step_time
        last = max(len(rank.in_force) for rank in self.ranks) + num_steps
        for rank in self.ranks:
            rank.is_running = rank.is_running and rank.rank not in silent
        while True:
            behind = min(len(rank.in_force) for rank in self.ranks)
            if behind >= last:
                return
            able = [rank for rank in self.ranks if len(rank.in_force) < min(last, behind + self._most_ahead + 1)]
            self._random.choice(able).run_step(step_time)

    def _run_others(self, held: FakeRank) -> None:
        """What goes on while a rank is held: another one that is not runs a step."""
        held.is_held = True
        able = [rank for rank in self.ranks if not rank.is_held and len(rank.in_force) <= len(held.in_force)]
        if able:
            self._random.choice(able).run_step(self._step_time)
        held.is_held = False
