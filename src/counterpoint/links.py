"""Links between GPUs: the rate from each GPU to each other, and the rates of concurrent copies.

There are two topologies. Behind a `switch`, any two GPUs reach each other through their ports. A GPU may have several
ports (NICs) and a copy takes one of them, so one copy may get less than the total. With `direct` links, every pair of
GPUs has its own wires, shared only by copies between the two. Rates are peaks in bytes per second in one direction;
calibrations hold the rates that are reached.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Literal

from counterpoint.errors import MachineError
from counterpoint.value import Value, require

LEAST_ABSURD_RATE = 1e18
LEAST_RATE = 1e6  # no link between GPUs is slower; the simulator's clock would overflow
Topology = Literal["switch", "direct"]
Ends = tuple[int, int]  # (from, to): GPUs of a node, numbered from 0
_Resource = int | Ends  # the port out of GPU n is n, the port into it -1 - n; wires are their ends


class PairRate(Value, frozen=True, kw_only=True):
    """Pairs of GPUs whose link, in both directions, has this rate instead of `per_peer_bytes_per_s`."""

    bytes_per_s: float
    gpus: tuple[Ends, ...]

    def __str__(self) -> str:
        return f"{self.bytes_per_s:,.15g}: " + " ".join(f"{one}-{other}" for one, other in self.gpus)


class Link(Value, frozen=True, kw_only=True):
    """How the GPUs of a node (or the nodes) are connected.

    `bytes_per_s` is what one GPU can send to all its peers together in one direction, and receive.
    `per_peer_bytes_per_s` is the limit of one copy to one peer; `pairs` lists pairs with another limit. Behind a switch
    with one port per GPU the two are equal; with several ports (NICs), a copy uses one of them. GPUs that `pairs` does
    not name have the usual rate. Without `has_peer_access`, GPUs cannot read or write each other's memory: libraries send
    through the host's memory, and copy engines and operators have no path.
    """

    kind: Literal["nvlink", "xgmi", "pcie", "network"]
    bytes_per_s: float
    per_peer_bytes_per_s: float
    latency_us: float
    topology: Topology = "switch"
    pairs: tuple[PairRate, ...] = ()
    has_peer_access: bool = True

    def __post_init__(self) -> None:
        for name in ("bytes_per_s", "per_peer_bytes_per_s", "latency_us"):
            _check_figure(name, getattr(self, name))
        _check_most(self, "per_peer_bytes_per_s", self.per_peer_bytes_per_s)
        require(
            self.topology == "direct" or not self.pairs,
            MachineError,
            "link pairs are for topology 'direct', because all pairs behind a switch are alike; found topology 'switch'.",
        )
        seen: set[Ends] = set()
        for entry in self.pairs:
            _check_figure("pairs.bytes_per_s", entry.bytes_per_s)
            _check_most(self, "pairs.bytes_per_s", entry.bytes_per_s)
            _check_pairs(entry.gpus, seen)

    def between(self, sender: int, receiver: int) -> float:
        """Return the rate of a copy from one GPU to another while nothing else runs."""
        ends = (min(sender, receiver), max(sender, receiver))
        for entry in self.pairs:
            if any((min(pair), max(pair)) == ends for pair in entry.gpus):
                return entry.bytes_per_s
        return self.per_peer_bytes_per_s

    def group_bytes_per_s(self, num_gpus: int) -> float:
        """Return what each of `num_gpus` GPUs sends while all copy to all others at once, for the slowest GPU."""
        everybody = range(num_gpus)
        copies = [(sender, receiver) for sender in everybody for receiver in everybody if sender != receiver]
        sent = [0.0] * num_gpus
        for (sender, _), rate in zip(copies, self.concurrent(copies), strict=True):
            sent[sender] += rate
        return min(sent) if num_gpus > 1 else self.bytes_per_s

    def concurrent(self, copies: Sequence[Ends]) -> tuple[float, ...]:
        """Return the rate of each of these copies while all of them run.

        Rates rise together until a resource is full: what a GPU can send or receive, what a copy can reach, the wires of
        a pair. The copies that use it keep their rate and the others rise further (max-min fairness). How hardware
        arbitrates is an assumption.
        """
        resources: dict[_Resource, list[int]] = {}  # the copies that use each
        names = [self._resources_of(each) for each in copies]
        for number, used in enumerate(names):
            for name in used:
                resources.setdefault(name, []).append(number)
        room = {name: self.between(*name) if isinstance(name, tuple) else self.bytes_per_s for name in resources}
        num_rising = {name: len(users) for name, users in resources.items()}
        most = math.inf if self.topology == "direct" else self.per_peer_bytes_per_s
        rates, rising, rate, tiny = [0.0] * len(copies), set(range(len(copies))), 0.0, 1e-9 * self.bytes_per_s
        while rising:
            step = min(most - rate, *(left / num_rising[name] for name, left in room.items()))
            rate += step
            room = {name: left - step * num_rising[name] for name, left in room.items()}
            full = {number for name, left in room.items() if left <= tiny for number in resources[name]}
            done = rising if most - rate <= tiny else rising & full
            for number in done:
                rates[number] = rate
                for name in names[number]:
                    num_rising[name] -= 1
            rising = rising - done
            room = {name: left for name, left in room.items() if num_rising[name]}
        return tuple(rates)

    def _resources_of(self, ends: Ends) -> tuple[_Resource, ...]:
        """Return what a copy shares with others: the ports out of one GPU and into another, and direct wires."""
        sender, receiver = ends
        return (sender, -1 - receiver) if self.topology == "switch" else (sender, -1 - receiver, ends)


def _check_figure(name: str, number: float) -> None:
    require(0 < number < LEAST_ABSURD_RATE, MachineError, f"link {name} must be above 0 and below 1e18; found {number}.")
    require(
        number >= LEAST_RATE or not name.endswith("bytes_per_s"),
        MachineError,
        f"link {name} must be at least {LEAST_RATE:g}, in bytes per second; found {number}.",
    )


def _check_most(link: Link, name: str, rate: float) -> None:
    require(rate <= link.bytes_per_s, MachineError, f"link {name} must be at most {link.bytes_per_s}; found {rate}.")


def _check_pairs(pairs: Iterable[Ends], seen: set[Ends]) -> None:
    """Check that each pair names two different GPUs and appears once."""
    for one, other in pairs:
        ends = (min(one, other), max(one, other))
        require(
            0 <= ends[0] < ends[1],
            MachineError,
            f"link pairs.gpus must name two different GPUs, numbered from 0; found [{one}, {other}].",
        )
        require(ends not in seen, MachineError, f"link pairs.gpus must name each pair once; found [{one}, {other}] again.")
        seen.add(ends)
