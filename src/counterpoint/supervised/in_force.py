"""What is in force on one rank: rules of the launch filter and paths of collectives; what was counted for the plan
meanwhile, and which controls took effect.

It decides nothing, and knows nothing of other ranks: what they agreed on is handed in.
"""

from collections.abc import Sequence
from typing import final

from msgspec.structs import replace

from counterpoint.integrations.paths import LIBRARY, PathCounts, PathOffer, Paths, path_problems
from counterpoint.launch_filter.control_block import RuleCounters
from counterpoint.plan import Refusal
from counterpoint.supervised.decisions import Grid
from counterpoint.supervised.messages import ControlTarget
from counterpoint.supervised.proof import prove_rule, why_no_copies
from counterpoint.supervised.running_job import LiveJob
from counterpoint.supervised.settings import UNCHANGED, Setting, Totals, add_counters


@final
class InForce:
    """One rank's setting in force, its counts and its proofs. `offers` of paths are what all ranks agreed on."""

    def __init__(self, job: LiveJob, setting: Setting) -> None:
        self._job = job
        self._setting = setting
        self._totals = Totals(setting=setting, rank=job.exchange.rank)
        self.offers: Sequence[PathOffer] = ()
        self._launches: dict[str, int] = {}
        self._proofs: dict[ControlTarget, Refusal | None] = {}  # why a control had no effect here; None if it had

    @property
    def setting(self) -> Setting:
        """The setting in force."""
        return self._setting

    @property
    def engaged(self) -> tuple[ControlTarget, ...]:
        """Controls that took effect here."""
        return tuple(control for control, refusal in self._proofs.items() if refusal is None)

    @property
    def unengaged(self) -> tuple[Refusal, ...]:
        """Controls that did not, with the reason."""
        return tuple(refusal for refusal in self._proofs.values() if refusal is not None)

    def use(self, setting: Setting) -> None:
        """Put a setting in force, unless it is already."""
        if setting == self._setting:
            return
        if self._setting != UNCHANGED and self._setting == self._totals.setting:
            self.keep_totals()
        if setting.rules or self._setting.rules:  # a swap of a table for itself sets its counters to 0
            self._job.table.swap(setting.rules)
        self._job.paths.use(setting.paths)
        self._setting = setting

    def empty_table(self) -> None:
        """Put no rules in force, and leave the paths as they are."""
        if self._setting == self._totals.setting:
            self.keep_totals()
        if self._setting.rules:
            self._job.table.swap(())
            self._setting = replace(self._setting, rules=())

    def count_for(self, setting: Setting) -> None:
        """Count for this plan from now on, whenever it is in force; that this is kept proves that it was."""
        self._totals = Totals(setting=setting, rank=self._job.exchange.rank)
        self._job.keep(self._totals)

    def forget_proofs(self) -> None:
        """A tuning begins: what took effect before does not count."""
        self._proofs.clear()

    def see_launches(self) -> tuple[dict[str, Grid], dict[str, int]]:
        """Grids, and numbers of launches, of the kernels launched since the last call."""
        grids: dict[str, Grid] = {}
        totals: dict[str, int] = {}
        for function in self._job.table.state().functions:
            totals[function.name] = totals.get(function.name, 0) + function.num_launches
            grids[function.name] = function.grid
        launches = {name: total - self._launches.get(name, 0) for name, total in totals.items()}
        self._launches = totals
        active = {name for name, number in launches.items() if number > 0}
        return {name: grids[name] for name in active}, {name: launches[name] for name in active}

    def keep_totals(self) -> None:
        """The plan leaves force for a while: keep what was counted, for the proof at the end."""
        counted = self._job.table.state().counters
        before = self._totals.counters or tuple(RuleCounters() for _ in counted)
        counters = tuple(add_counters(*pair) for pair in zip(before, counted, strict=True))
        self._totals = replace(self._totals, counters=counters, paths=self._counts_of(self._totals.setting.paths))
        self._job.keep(self._totals)

    def keep_paths(self) -> None:
        """Keep what was counted of the plan's paths so far; the filter's own counters are in its block until a swap."""
        if self._totals.setting.paths != LIBRARY:
            self._job.keep(replace(self._totals, paths=self._counts_of(self._totals.setting.paths)))

    def _counts_of(self, paths: Paths) -> tuple[PathCounts, ...]:
        """What was counted under these paths; of what nobody could take, why."""
        problems = path_problems(paths, self.offers)
        return tuple(replace(each, problem=problems.get(each.target, "")) for each in self._job.paths.counts(paths))

    def prove(self) -> None:
        """What became of the table's controls in the turn that ends; an effect in any turn counts."""
        for counts in self._counts_of(self._setting.paths):
            key = (counts.control, counts.target)
            if counts.num_by_copies:
                self._proofs[key] = None
            elif self._proofs.get(key, counts) is not None:
                self._proofs[key] = Refusal(control=counts.control, target=counts.target, reason=why_no_copies(counts))
        state = self._job.table.state()
        for rule, counters in zip(state.rules, state.counters, strict=True):
            for proven in prove_rule(rule, counters):
                entry = proven.engagement
                key = (entry.control, entry.target)
                if entry.state == "verified":
                    self._proofs[key] = None
                elif self._proofs.get(key, entry) is not None:
                    self._proofs[key] = Refusal(control=entry.control, target=entry.target, reason=entry.reason)
