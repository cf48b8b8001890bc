"""The setting in force on one rank: rules of the launch filter and paths of collectives, the counts meanwhile, and which
controls took effect.

It decides nothing and knows nothing of other ranks: what they agreed on is passed in.
"""

from collections.abc import Sequence
from typing import final

from msgspec.structs import replace

from counterpoint.integrations.paths import LIBRARY, PathCounts, PathOffer, Paths, path_problems
from counterpoint.launch_filter.control_block import RuleCounters, SeenFunction
from counterpoint.plan import Refusal
from counterpoint.supervised.decisions import Grid
from counterpoint.supervised.messages import ControlTarget
from counterpoint.supervised.proof import prove_rule, why_no_copies
from counterpoint.supervised.running_job import LiveJob
from counterpoint.supervised.settings import UNCHANGED, Setting, Totals, add_counters


@final
class InForce:
    """One rank's current setting, its counts and its proofs. `offers` are the paths that all ranks agreed on."""

    def __init__(self, job: LiveJob, setting: Setting) -> None:
        self._job = job
        self._setting = setting
        self._totals = Totals(setting=setting, rank=job.exchange.rank)
        self.offers: Sequence[PathOffer] = ()
        self._launches: dict[str, int] = {}
        self._proofs: dict[ControlTarget, Refusal | None] = {}  # why a control had no effect here; None if it had one

    @property
    def setting(self) -> Setting:
        """The current setting."""
        return self._setting

    @property
    def engaged(self) -> tuple[ControlTarget, ...]:
        """Controls that took effect here."""
        return tuple(control for control, refusal in self._proofs.items() if refusal is None)

    @property
    def unengaged(self) -> tuple[Refusal, ...]:
        """Controls that did not take effect, with the reason."""
        return tuple(refusal for refusal in self._proofs.values() if refusal is not None)

    def use(self, setting: Setting) -> None:
        """Apply a setting, unless it is current already."""
        if setting == self._setting:
            return
        if self._setting != UNCHANGED and self._setting == self._totals.setting:
            self.keep_totals()
        if setting.rules or self._setting.rules:  # swapping a table for itself would reset its counters
            self._job.table.swap(setting.rules)
        self._job.paths.use(setting.paths)
        self._setting = setting

    def empty_table(self) -> None:
        """Remove all rules, and leave the paths as they are."""
        if self._setting == self._totals.setting:
            self.keep_totals()
        if self._setting.rules:
            self._job.table.swap(())
            self._setting = replace(self._setting, rules=())

    def count_for(self, setting: Setting) -> None:
        """Count for this plan from now on, whenever it is applied; saved counts prove that it was."""
        self._totals = Totals(setting=setting, rank=self._job.exchange.rank)
        self._job.keep(self._totals)

    def forget_proofs(self) -> None:
        """Forget earlier proofs when a tuning begins."""
        self._proofs.clear()

    def see_launches(self, functions: Sequence[SeenFunction]) -> tuple[dict[str, Grid], dict[str, int]]:
        """Return grids and launch counts of the kernels launched since the last call; `functions` are those of the table's
        present state."""
        grids: dict[str, Grid] = {}
        totals: dict[str, int] = {}
        for function in functions:
            totals[function.name] = totals.get(function.name, 0) + function.num_launches
            grids[function.name] = function.grid
        launches = {name: total - self._launches.get(name, 0) for name, total in totals.items()}
        self._launches = totals
        active = {name for name, number in launches.items() if number > 0}
        return {name: grids[name] for name in active}, {name: launches[name] for name in active}

    def keep_totals(self) -> None:
        """Keep the counts for the final proof when the plan is suspended."""
        counted = tuple(counters for _, counters in self._job.table.rule_counters())
        before = self._totals.counters or tuple(RuleCounters() for _ in counted)
        counters = tuple(add_counters(*pair) for pair in zip(before, counted, strict=True))
        self._totals = replace(self._totals, counters=counters, paths=self._counts_of(self._totals.setting.paths))
        self._job.keep(self._totals)

    def keep_paths(self) -> None:
        """Keep the counts of the plan's paths so far; the filter's own counters stay in its block until a swap."""
        if self._totals.setting.paths != LIBRARY:
            self._job.keep(replace(self._totals, paths=self._counts_of(self._totals.setting.paths)))

    def _counts_of(self, paths: Paths) -> tuple[PathCounts, ...]:
        """Return the counts of these paths; for paths that no rank could take, the reason."""
        problems = path_problems(paths, self.offers)
        return tuple(replace(each, problem=problems.get(each.target, "")) for each in self._job.paths.counts(paths))

    def prove(self) -> None:
        """Record which of the table's controls took effect in the turn that ends; one effect in any turn counts."""
        for counts in self._counts_of(self._setting.paths):
            key = (counts.control, counts.target)
            if counts.num_applied:
                self._proofs[key] = None
            elif self._proofs.get(key, counts) is not None:
                self._proofs[key] = Refusal(control=counts.control, target=counts.target, reason=why_no_copies(counts))
        for rule, counters in self._job.table.rule_counters():
            for proven in prove_rule(rule, counters):
                entry = proven.engagement
                key = (entry.control, entry.target)
                if entry.state == "verified":
                    self._proofs[key] = None
                elif self._proofs.get(key, entry) is not None:
                    self._proofs[key] = Refusal(control=entry.control, target=entry.target, reason=entry.reason)
