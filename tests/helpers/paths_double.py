"""A job on `live_job_double.py` whose collectives have two paths, and what was in force in each of its steps."""

from collections.abc import Callable, Sequence

from counterpoint.integrations.paths import (
    LIBRARY,
    AbstractJobPaths,
    Integration,
    PathCounts,
    PathOffer,
    Paths,
)
from counterpoint.launch_filter.control_block import SeenFunction
from counterpoint.supervised.settings import LiveSettings
from helpers.live_job_double import HOLD_LIMIT_S, FakeJob, FakeRank, Rules

FSDP2 = PathOffer(integration="fsdp2", what="1 FSDP2 model", kinds=("all_gather", "reduce_scatter"))
DDP = PathOffer(integration="ddp", what="gradient buckets of 1 DDP model", kinds=("all_reduce",))
CALLS = PathOffer(integration="collectives", what="the job's own collectives", kinds=("all_gather", "all_reduce"))
LINEARS = PathOffer(integration="tensor_parallel", what="4 tensor-parallel linears")
EXPERTS = PathOffer(integration="expert_parallel", what="5 layers of routed experts")
BYTES_PER_CALL = 1024
PathTime = Callable[[int, int, Paths], float]  # rank, step, paths in force: microseconds


class FakePaths(AbstractJobPaths):
    """One rank's paths: each step makes one call of every control in force."""

    def __init__(self, offers: Sequence[PathOffer], failing: dict[Integration, str] | None = None) -> None:
        self.offers, self.failing = tuple(offers), failing or {}
        self.in_force = LIBRARY
        self.history: list[Paths] = []  # by step
        self.taken: list[Integration] = []
        self.dropped: list[Integration] = []
        self.num_surveys = 0
        self.fails_in = ""  # the method that raises
        self.late: list[str] = []  # models that came since

    def prepare(self) -> None:
        pass

    def survey(self) -> tuple[PathOffer, ...]:
        self.num_surveys += 1
        self._may_fail("survey")
        return self.offers

    def take(self, offers: Sequence[PathOffer]) -> dict[Integration, str]:
        self._may_fail("take")
        names = [offer.integration for offer in offers]
        self.taken.extend(names)
        return {name: self.failing[name] for name in names if name in self.failing}

    def late_models(self) -> tuple[str, ...]:
        found = tuple(self.late)
        self.late.clear()
        return found

    def _may_fail(self, method: str) -> None:
        if self.fails_in == method:
            raise KeyError(method)

    def drop(self, integrations: Sequence[Integration]) -> None:
        self.dropped.extend(integrations)

    def use(self, paths: Paths) -> None:
        self.in_force = paths

    def counts(self, paths: Paths) -> tuple[PathCounts, ...]:
        number = self.history.count(paths)
        return tuple(
            PathCounts(control=control, target=target, num_by_copies=number, num_bytes=number * BYTES_PER_CALL)
            for control, target in paths.targets
        )


class PathsJob:
    """Ranks whose steps take what a function of the rank, the step and the paths in force says."""

    def __init__(
        self,
        settings: LiveSettings,
        offers: Callable[[int], Sequence[PathOffer]] = lambda rank: (FSDP2,),
        *,
        functions: Sequence[SeenFunction] = (),
        failing: Callable[[int], dict[Integration, str]] = lambda rank: {},
        num_ranks: int = 2,
        lag: int = 2,
        most_ahead: int = 2,
        seed: int = 0,
        hold_limit_s: float = HOLD_LIMIT_S,
    ) -> None:
        self.paths = [FakePaths(offers(rank), failing(rank)) for rank in range(num_ranks)]
        self.job = FakeJob(
            settings,
            functions,
            num_ranks=num_ranks,
            lag=lag,
            most_ahead=most_ahead,
            seed=seed,
            hold_limit_s=hold_limit_s,
            paths=lambda rank: self.paths[rank],
        )

    @property
    def ranks(self) -> list[FakeRank]:
        """The ranks of the double."""
        return self.job.ranks

    def run(
        self,
        num_steps: int,
        path_time: PathTime,
        silent: frozenset[int] = frozenset(),
        issue_us: Callable[[Paths], float] = lambda paths: 0.0,
    ) -> None:
        """See `FakeJob.run`; every rank's paths are noted as a step begins. `issue_us`: how long the host issues a step."""

        def step_time(rank: int, step: int, rules: Rules) -> float:
            paths = self.paths[rank]
            paths.history.append(paths.in_force)
            self.ranks[rank].clock.issue_us = issue_us(paths.in_force)
            return path_time(rank, step, paths.in_force)

        self.job.run(num_steps, step_time, silent)

    def apart(self) -> list[tuple[int, list[Paths]]]:
        """The steps in which ranks had different paths in force: a real job would never end there."""
        by_step = zip(*(paths.history for paths in self.paths), strict=True)
        return [(number, list(found)) for number, found in enumerate(by_step, 1) if len(set(map(str, found))) > 1]
