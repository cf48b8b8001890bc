"""The links between GPUs as a matrix: the rate from each GPU to each other, and the rates of copies that run at once.

Two topologies. Behind a `switch` any two GPUs reach each other through their ports; a copy may take one of several ports
(NICs), so one copy may get less than all together. On `direct` links every pair of GPUs has wires of its own, which only
their copies share. Rates are peaks in bytes per second in one direction; what is really reached is in calibrations.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

from counterpoint.errors import MachineError
from counterpoint.value import Value, require

LEAST_ABSURD_RATE = 1e18
Topology = Literal["switch", "direct"]
Ends = tuple[int, int]  # (from, to): GPUs of a node, numbered from 0
_Resource = tuple[str, int, int]


class PairRate(Value, frozen=True, kw_only=True):
    """Pairs of GPUs, in both directions, whose link has this rate instead of `per_peer_bytes_per_s`."""

    bytes_per_s: float
    gpus: tuple[Ends, ...]

    def __str__(self) -> str:
        return f"{self.bytes_per_s:,.15g}: " + " ".join(f"{one}-{other}" for one, other in self.gpus)


class Link(Value, frozen=True, kw_only=True):
    """How the GPUs of a node (or the nodes) are connected.

    `bytes_per_s` is what one GPU can send in one direction to all its peers together, and receive; `per_peer_bytes_per_s`
    what one copy to one peer can reach, `pairs` where that differs between pairs. Behind a switch of one port each they are
    equal; with several ports (NICs) a copy has one of them. GPUs beyond those that `pairs` names have the usual rate.
    """

    kind: Literal["nvlink", "xgmi", "pcie", "network"]
    bytes_per_s: float
    per_peer_bytes_per_s: float
    latency_us: float
    topology: Topology = "switch"
    pairs: tuple[PairRate, ...] = ()

    def __post_init__(self) -> None:
        for name in ("bytes_per_s", "per_peer_bytes_per_s", "latency_us"):
            _check_figure(name, getattr(self, name))
        _check_most(self, "per_peer_bytes_per_s", self.per_peer_bytes_per_s)
        require(
            self.topology == "direct" or not self.pairs,
            MachineError,
            "link pairs are for topology 'direct', as behind a switch all pairs are alike; found topology 'switch'.",
        )
        seen: set[Ends] = set()
        for entry in self.pairs:
            _check_figure("pairs.bytes_per_s", entry.bytes_per_s)
            _check_most(self, "pairs.bytes_per_s", entry.bytes_per_s)
            _check_pairs(entry.gpus, seen)

    def between(self, sender: int, receiver: int) -> float:
        """What a copy from one GPU to another reaches while nothing else runs."""
        ends = (min(sender, receiver), max(sender, receiver))
        for entry in self.pairs:
            if any((min(pair), max(pair)) == ends for pair in entry.gpus):
                return entry.bytes_per_s
        return self.per_peer_bytes_per_s

    def to_all(self, sender: int, num_gpus: int) -> float:
        """What a GPU sends while it copies to each of the other GPUs 0 to `num_gpus` - 1 at once."""
        return sum(self.concurrent([(sender, receiver) for receiver in range(num_gpus) if receiver != sender]))

    def group_bytes_per_s(self, num_gpus: int) -> float:
        """What each of `num_gpus` GPUs sends while all copy to all others at once: of the slowest."""
        everybody = range(num_gpus)
        copies = [(sender, receiver) for sender in everybody for receiver in everybody if sender != receiver]
        sent = [0.0] * num_gpus
        for (sender, _), rate in zip(copies, self.concurrent(copies), strict=True):
            sent[sender] += rate
        return min(sent) if num_gpus > 1 else self.bytes_per_s

    def concurrent(self, copies: Sequence[Ends]) -> tuple[float, ...]:
        """The rate of each of these copies while all of them run.

        Rates rise together until something is full: what a GPU can send, what it can receive, what a copy can reach, the
        wires of a pair; copies through it stay there and the others rise on (max-min fairness). An assumption of how
        hardware arbitrates.
        """
        room, users = self._resources(copies)
        rates, rising = [0.0] * len(copies), set(range(len(copies)))
        while rising:
            step = min(left / len(users[name] & rising) for name, left in room.items() if users[name] & rising)
            for name in room:
                room[name] -= step * len(users[name] & rising)
            full = {number for name, left in room.items() if left <= 1e-9 * self.bytes_per_s for number in users[name]}
            for number in rising:
                rates[number] += step
            rising -= full
        return tuple(rates)

    def _resources(self, copies: Sequence[Ends]) -> tuple[dict[_Resource, float], dict[_Resource, set[int]]]:
        """What copies share, how much each can carry, and which copies use it."""
        room: dict[_Resource, float] = {}
        users: dict[_Resource, set[int]] = {}
        for number, (sender, receiver) in enumerate(copies):
            wires = ("wires", sender, receiver) if self.topology == "direct" else ("port", number, number)
            limits = {
                ("out", sender, sender): self.bytes_per_s,
                ("in", receiver, receiver): self.bytes_per_s,
                wires: self.between(sender, receiver),
            }
            for name, limit in limits.items():
                room[name] = limit
                users.setdefault(name, set()).add(number)
        return room, users


def _check_figure(name: str, number: float) -> None:
    require(0 < number < LEAST_ABSURD_RATE, MachineError, f"link {name} must be above 0 and below 1e18; found {number}.")


def _check_most(link: Link, name: str, rate: float) -> None:
    require(rate <= link.bytes_per_s, MachineError, f"link {name} must be at most {link.bytes_per_s}; found {rate}.")


def _check_pairs(pairs: Iterable[Ends], seen: set[Ends]) -> None:
    """Two different GPUs each, and no pair twice."""
    for one, other in pairs:
        ends = (min(one, other), max(one, other))
        require(
            0 <= ends[0] < ends[1],
            MachineError,
            f"link pairs.gpus names two different GPUs, numbered from 0; found [{one}, {other}].",
        )
        require(ends not in seen, MachineError, f"link pairs.gpus must name each pair once; found [{one}, {other}] again.")
        seen.add(ends)
