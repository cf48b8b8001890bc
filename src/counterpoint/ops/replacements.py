"""Replaces collectives of a captured step, group by group: every rank of a group gets the replacement of a collective, or
every rank gets the reason why there is none.

`captured_copies.py` and `light_collectives.py` make the replacements.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from counterpoint.cuda.capture import Captured
from counterpoint.cuda.collective_blocks import IssuedCollective
from counterpoint.errors import CounterpointError
from counterpoint.ops.agreement import Agreement, exchange_values

Replacement = TypeVar("Replacement")


class GroupReplacements(Protocol[Replacement]):
    """The replacements of one group's collectives, and the memory that they use."""

    made: list[Replacement | str]
    """For each collective its replacement, or why there is none."""

    def close(self) -> None:
        """Free all memory when running work has ended; no graph that holds a replacement may run any more."""


def replace_collectives(
    captured: Captured, make: Callable[[Sequence[IssuedCollective], torch.device], GroupReplacements[Replacement]]
) -> dict[int, Replacement | str]:
    """Return the replacement of each node that is a collective, or why there is none, by the node's number.

    All ranks call it together, and `make` once for each group. Raises `PlanError` if they captured different steps.
    """
    captured.agree("")
    device = torch.device("cuda", torch.cuda.current_device())
    by_group: dict[str, list[IssuedCollective]] = {}
    for issued in captured.collectives:
        by_group.setdefault(issued.group.group_name, []).append(issued)
    replacements: dict[int, Replacement | str] = {}
    for collectives in by_group.values():
        try:
            of_group = make(collectives, device)
            captured.keep(of_group.close)
            found = of_group.made
        except CounterpointError as problem:  # which every rank of the group sees
            found = [str(problem).rstrip(".")] * len(collectives)
        for issued, made in zip(collectives, found, strict=True):
            replacements |= dict.fromkeys(places_of(captured, issued), made)
    return replacements


def places_of(captured: Captured, issued: IssuedCollective) -> list[int]:
    """Return the numbers of a collective's nodes."""
    places = (captured.graph.number_of(handle) for handle in issued.nodes)
    return [place for place in places if place is not None]


def share_obstacles(made: Sequence[Replacement | str], agreement: Agreement) -> list[Replacement | str]:
    """Return what this rank made. If a rank has a text instead, which says why it made nothing, every rank gets that
    text.

    All ranks call it with the same number of entries; of several texts for one entry, the first rank's counts.
    """
    everyone = exchange_values(agreement, [each if isinstance(each, str) else "" for each in made], list[str])
    return [
        next((obstacle for obstacle in found if obstacle), each)
        for each, found in zip(made, zip(*everyone, strict=True), strict=True)
    ]
