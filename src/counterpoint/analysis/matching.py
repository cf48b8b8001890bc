"""Matches collectives across ranks: same process group, same order in it, same kind and size.

Profilers start and stop at different calls, and may lose events. So the sequences of a group are aligned at their longest
run of equal entries. Because steps repeat, many shifts may give long runs; the right one is the shift with which the ends of
the collectives coincide, up to the offset of the clocks. Groups that share ranks share that offset, and profilers of one
node mostly have none: in a very regular job nothing else tells one step from the next. Collectives that do not match are
left out and named.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from statistics import median

from counterpoint.analysis.coincidence import (
    LEAST_RUN,
    Pairs,
    distances,
    do_coincide,
    ends_together,
    steps_apart,
    telling,
    trimmed,
    usually_apart,
)
from counterpoint.analysis.values import RankAnalysis, TracedCollective
from counterpoint.errors import shown_path
from counterpoint.units import format_count, format_numbered
from counterpoint.value import Value

WINDOW = 1024  # collectives of each rank in which a shift is looked for; a larger shift means profiles of different steps
# of the shorter sequence, and of the longest run; fewer are matched by chance, or of profiles of different steps
LEAST_SHARE = 0.25
NEAR = 5  # collectives that give the offset of the clocks beside them
APART_BY_CHANCE = 0.05  # shifts that differ by less than this count as equally good
MOST_CONFLICTS = 0.25  # of the matched ones: with more conflicts, they were matched by chance

Group = tuple[str | None, tuple[int, ...], int]
Bounds = tuple[int, int]


class SharedCollective(Value, frozen=True, kw_only=True):
    """One collective as all present ranks of its group ran it: one entry per rank, ascending by rank."""

    members: tuple[TracedCollective, ...]


def ending_together(shared: Sequence[SharedCollective]) -> Sequence[SharedCollective]:
    """Return the collectives that end on all ranks together; all if there are none."""
    return [each for each in shared if ends_together(each.members[0])] or shared


def match_collectives(ranks: Sequence[RankAnalysis]) -> tuple[tuple[SharedCollective, ...], tuple[str, ...]]:
    """Return collectives that all present ranks of their group ran, in the first rank's order, and notes on the others."""
    shared: list[SharedCollective] = []
    problems: list[str] = []
    apart = ClocksApart({each.rank: each.origin_us for each in ranks if each.origin_us is not None})
    groups = [entry for entry in _groups(ranks).items() if len(entry[1]) > 1]
    groups.sort(key=lambda entry: _certainty(entry[1]), reverse=True)
    for is_last in (False, True):
        left = []
        for group, sequences in groups:
            matched, problem = _match_group(group, sequences, apart)
            if not matched and not is_last:  # once more, when other groups have shown the clocks
                left.append((group, sequences))
                continue
            apart.learn(matched)
            shared += matched
            problems += problem
        groups = left
    return tuple(sorted(shared, key=lambda c: (c.members[0].start_us, c.members[0].rank))), tuple(problems)


def _common_names(ranks: Sequence[RankAnalysis]) -> dict[tuple[int, ...], str | None]:
    """Return the first rank's name of each group of listed ranks, unless a rank has several groups of these."""
    found: dict[tuple[int, ...], dict[int, dict[str | None, None]]] = {}
    for analysis in ranks:
        for each in analysis.collectives:
            if each.group_ranks:
                found.setdefault(each.group_ranks, {}).setdefault(analysis.rank, {})[each.process_group] = None
    return {
        members: next(iter(by_rank[min(by_rank)]))
        for members, by_rank in found.items()
        if all(len(names) == 1 for names in by_rank.values())
    }


def _certainty(sequences: Mapping[int, Sequence[TracedCollective]]) -> tuple[bool, int]:
    """Return a key that is greater for groups that are matched more surely: those of which all ranks recorded as many
    collectives, and of these the ones with more ranks.
    """
    return len({len(sequence) for sequence in sequences.values()}) == 1, len(sequences)


class ClocksApart:
    """By how much ranks' clocks differ, as far as matched collectives show it.

    `origins` says when each rank's times begin by its profiler's clock.
    """

    def __init__(self, origins: Mapping[int, float]) -> None:
        self._origins = origins
        self._known: dict[int, dict[int, float]] = {}

    def learn(self, matched: Sequence[SharedCollective]) -> None:
        """Add what the collectives of one group show of pairs of ranks of which nothing was known."""
        if not matched:
            return
        first, *others = matched[0].members
        told = ending_together(matched)
        for place, other in enumerate(others, 1):
            if self.us(first.rank, other.rank) is None:
                apart_us = median(each.members[0].end_us - each.members[place].end_us for each in told)
                self._known.setdefault(first.rank, {})[other.rank] = apart_us
                self._known.setdefault(other.rank, {})[first.rank] = -apart_us

    def us(self, rank: int, other: int) -> float | None:
        """Return a time on a rank's clock less the same time on another's, through other ranks if need be, or None."""
        found, left = {rank: 0.0}, [rank]
        while left and other not in found:
            known = left.pop(0)
            for near, apart_us in self._known.get(known, {}).items():
                if near not in found:
                    found[near] = found[known] + apart_us
                    left.append(near)
        return found.get(other)

    def likely_us(self, rank: int, other: int) -> float | None:
        """Return what `us` does or, where it is unknown, what it is if the profilers of both ranks use one clock."""
        known_us = self.us(rank, other)
        if known_us is not None or rank not in self._origins or other not in self._origins:
            return known_us
        return self._origins[other] - self._origins[rank]


def find_stranger(ranks: Sequence[RankAnalysis], shared: Sequence[SharedCollective]) -> str:
    """Return in one sentence which rank cannot be of the others' job; empty if none is known to be of another.

    Such a rank shares no collective with any other. In a process group whose ranks are known it ran other kinds and sizes
    than another rank, although a group's ranks run the same ones in whichever steps they were profiled; or its GPU is of
    another kind.
    """
    met = {member.rank for each in shared for member in each.members}
    paths = {analysis.rank: shown_path(analysis.path) for analysis in ranks}
    for (name, members, size), sequences in _groups(ranks).items():
        tokens = {rank: Counter(map(_token, sequence)) for rank, sequence in sequences.items() if rank in members}
        for rank, other in combinations(sorted(tokens), 2):
            least = min(tokens[rank].total(), tokens[other].total())
            if not {rank, other} <= met and (tokens[rank] & tokens[other]).total() < LEAST_SHARE * least:
                return (
                    f"{paths[rank]} and {paths[other]} are of ranks {rank} and {other}, which ran different collectives in "
                    f"{_named((name, members, size))}, so they are not of one job. Give the traces of one job."
                )
    for one, another in combinations(ranks, 2):
        gpus = (one.device_name, another.device_name)
        if not {one.rank, another.rank} <= met and None not in gpus and gpus[0] != gpus[1]:
            return (
                f"{paths[one.rank]} is from '{gpus[0]}' and {paths[another.rank]} from '{gpus[1]}', and they share no "
                "collective, so they are not of one job. Give the traces of one job."
            )
    return ""


def _groups(ranks: Sequence[RankAnalysis]) -> dict[Group, dict[int, list[TracedCollective]]]:
    """Return collectives by process group and rank, in the order of the group.

    Sends and receives in groups of more than two have no order that all ranks share. A group without a name is told by size.
    A rank's name for a group depends on its other groups, so the name counts only where a rank has two of the same ranks.
    """
    groups: dict[Group, dict[int, list[TracedCollective]]] = {}
    names = _common_names(ranks)
    for analysis in ranks:
        for collective in sorted(analysis.collectives, key=lambda c: (c.group_number, c.start_us)):
            is_pairwise = collective.collective == "send_recv" and collective.group_size > 2
            if collective.group_size > 1 and not is_pairwise:
                name = names.get(collective.group_ranks, collective.process_group)
                key = (name, collective.group_ranks, collective.group_size if name is None else 0)
                groups.setdefault(key, {}).setdefault(analysis.rank, []).append(collective)
    return groups


def _match_group(
    group: Group, sequences: dict[int, list[TracedCollective]], apart: ClocksApart
) -> tuple[list[SharedCollective], list[str]]:
    name = _named(group)
    sizes = {collective.group_size for sequence in sequences.values() for collective in sequence}
    ranks = sorted(sequences)
    if len(sizes) > 1:
        return [], [
            (f"Ranks state different sizes of {name} ({sorted(sizes)}), so its collectives are not matched across ranks.")
        ]
    if len(ranks) > min(sizes):
        count = format_count(len(ranks), "rank")
        return [], [
            (
                f"{count} ran collectives of {name}, which has {min(sizes)}. Several groups share the name, so none "
                "is matched."
            )
        ]
    base, matched = _best_base(sequences, apart)
    strangers = [rank for rank in ranks if rank != base and rank not in matched]
    problems = [_describe_strangers(name, base, strangers)] if strangers else []
    if not matched:
        return [], problems
    places = {rank: {i: sequences[rank][j] for i, j in pairs} for rank, pairs in matched.items()}
    places[base] = dict(enumerate(sequences[base]))
    alike = [rank for rank in ranks if rank in places]
    common = [i for i in range(len(sequences[base])) if all(i in place for place in places.values())]
    problems += _describe_rest(name, {rank: len(sequences[rank]) for rank in alike}, len(common))
    return [SharedCollective(members=tuple(places[rank][i] for rank in alike)) for i in common], problems


def _best_base(sequences: Mapping[int, Sequence[TracedCollective]], apart: ClocksApart) -> tuple[int, dict[int, Pairs]]:
    """Return the first rank that most others match, else the one that the most match, and its pairs with those ranks."""
    best: tuple[int, dict[int, Pairs]] = (min(sequences), {})
    for base in sorted(sequences):
        pairs = {
            rank: match_sequences(sequences[base], sequences[rank], apart.likely_us(base, rank))
            for rank in sorted(sequences)
            if rank != base
        }
        matched = {rank: found for rank, found in pairs.items() if found}
        best = max(best, (base, matched), key=lambda entry: len(entry[1]))
        if 2 * len(matched) >= len(pairs):
            break
    return best


def _named(group: Group) -> str:
    name, members, size = group
    listed = f" of ranks {', '.join(map(str, members[:8]))}{', ...' if len(members) > 8 else ''}" if members else ""
    return f"process group '{name}'{listed}" if name is not None else f"an unnamed process group of {size} ranks{listed}"


def _describe_strangers(name: str, base: int, strangers: Sequence[int]) -> str:
    """Return a sentence on ranks with which nothing is matched."""
    return (
        f"In {name}, {format_numbered('rank', strangers)} ran other collectives than rank {base}, or at times "
        "that do not coincide, so nothing is matched with them. Give traces of the same steps of one job."
    )


def _describe_rest(name: str, counts: Mapping[int, int], num_common: int) -> list[str]:
    """Return sentences on collectives that not all ranks have; none if all have them."""
    rank = max(counts, key=lambda rank: (counts[rank], -rank))
    if counts[rank] == num_common:
        return []
    return [
        (
            f"{num_common} collectives of {name} are in the traces of all its ranks that were given. Up to "
            f"{counts[rank] - num_common} more (of rank {rank}) are not, because profiles began or ended at other "
            "calls, or lost events."
        )
    ]


def match_sequences(
    first: Sequence[TracedCollective], second: Sequence[TracedCollective], apart_us: float | None = None
) -> Pairs:
    """Return pairs of places in two ranks' sequences of one group that are one collective, ascending; empty if none fit.

    `apart_us` is the first clock less the second, as far as it is known. Of shifts that fit, the one that agrees is taken.
    """
    pairs: Pairs = []
    left: list[tuple[Bounds, Bounds, float | None]] = [((0, len(first)), (0, len(second)), None)]
    while left:
        (low, high), (other_low, other_high), distance_us = left.pop()
        if low == high or other_low == other_high:
            continue
        parts = first[low:high], second[other_low:other_high]
        run = _best_run(*parts, distance_us) if distance_us is not None else _first_run(*parts, apart_us)
        if not run:
            continue
        run = [(i + low, j + other_low) for i, j in run]
        pairs += run
        told = telling(first, run)
        near, far = (median(distances(first, second, part)) for part in (told[:NEAR], told[-NEAR:]))
        left.append(((low, run[0][0]), (other_low, run[0][1]), near))
        left.append(((run[-1][0] + 1, high), (run[-1][1] + 1, other_high), far))
    is_by_chance = _num_conflicts(pairs, len(first), len(second)) > MOST_CONFLICTS * len(pairs)
    is_enough = len(pairs) >= LEAST_SHARE * min(len(first), len(second))
    return sorted(pairs) if is_enough and not is_by_chance else []


def _num_conflicts(pairs: Pairs, num_first: int, num_second: int) -> int:
    """Return how many collectives both ranks have at the same place in the order, although they do not match.

    At either end of two profiles of one job, only one of them lacks what the other has.
    """
    edges = [(-1, -1), *sorted(pairs), (num_first, num_second)]
    return sum(min(i - before - 1, j - other - 1) for (before, other), (i, j) in pairwise(edges))


def _first_run(first: Sequence[TracedCollective], second: Sequence[TracedCollective], apart_us: float | None) -> Pairs:
    """Return the run whose ends coincide on clocks that are so far apart, or equal if that is unknown; else the best run."""
    tokens, others = [_token(c) for c in first], [_token(c) for c in second]
    middle = len(first) // 2
    at_us = first[middle].end_us - (apart_us or 0.0)
    nearest = min(range(len(second)), key=lambda place: abs(second[place].end_us - at_us))
    run = _longest_run(tokens, others, nearest - middle)
    least = max(min(LEAST_RUN, len(first), len(second)), LEAST_SHARE * min(len(first), len(second)))
    if len(run) >= least and do_coincide(first, second, run, apart_us or 0.0):
        return trimmed(first, second, _followed(run, tokens, others))
    return _best_run(first, second, None)


def _best_run(first: Sequence[TracedCollective], second: Sequence[TracedCollective], distance_us: float | None) -> Pairs:
    """Return the longest run of equal entries whose ends coincide; empty if there is none.

    `distance_us` is the offset of the clocks beside the run, if known: the ends must agree with it, except for lost events.
    """
    tokens, others = [_token(c) for c in first], [_token(c) for c in second]
    if tokens == others and distance_us is None:
        whole = [(i, i) for i in range(len(first))]
        if do_coincide(first, second, whole):
            return whole
    runs = [run for shift in _shifts(len(first), len(second)) if (run := _longest_run(tokens, others, shift))]
    shortest = 1 if distance_us is not None else min(LEAST_RUN, len(first), len(second))
    least = max(shortest, LEAST_SHARE * max(map(len, runs), default=0))
    fitting = [run for run in runs if len(run) >= least and do_coincide(first, second, run, distance_us)]
    apart = [usually_apart(steps_apart(first, second, telling(first, run))) for run in fitting]
    close = [run for run, usual in zip(fitting, apart, strict=True) if usual <= 2 * min(apart) + APART_BY_CHANCE]
    return trimmed(first, second, _followed(max(close, key=len), tokens, others)) if close else []


def _token(collective: TracedCollective) -> tuple[str, int]:
    """Return what must be equal on both ranks; in an uneven all-to-all, ranks send different sizes."""
    return collective.collective, -1 if collective.collective == "all_to_all" else collective.num_bytes


def _shifts(num_first: int, num_second: int) -> range:
    """Return the shifts to try: by how many places the second sequence may lie behind the first."""
    return range(-min(num_first, WINDOW) + 1, min(num_second, WINDOW))


def _longest_run(tokens: Sequence[tuple[str, int]], others: Sequence[tuple[str, int]], shift: int) -> Pairs:
    """Return the longest run of equal tokens at one shift, within the window."""
    low = max(0, -shift)
    high = min(len(tokens), len(others) - shift, low + WINDOW)
    unequal = [i for i in range(low, high) if tokens[i] != others[i + shift]]
    edges = pairwise([low - 1, *unequal, high])
    length, start = max((after - before - 1, before + 1) for before, after in edges)
    return [(i, i + shift) for i in range(start, start + length)]


def _followed(run: Pairs, tokens: Sequence[tuple[str, int]], others: Sequence[tuple[str, int]]) -> Pairs:
    """Extend the run by the equal entries that follow it beyond the window."""
    i, j = run[-1]
    while i + 1 < len(tokens) and j + 1 < len(others) and tokens[i + 1] == others[j + 1]:
        i, j = i + 1, j + 1
        run.append((i, j))
    return run
