"""The race's results as text: ms and gains of each case, the proof that controls engaged, and who won how often."""

import statistics
from collections.abc import Iterator, Sequence

from benchmarks.race_variants import NOTHING, Case, Race
from counterpoint.launch_filter.control_block import RuleCounters
from counterpoint.measurement.values import Measurement

NAME_WIDTH, WHAT_WIDTH, CELL_WIDTH = 36, 18, 15


def print_part(part: str, cases: Sequence[Case], race: Race) -> Iterator[str]:
    """All tables of one part, the shortest last."""
    yield f"\n{part}: ms (less or more than nothing; * beyond the spread), medians of rounds, the slowest rank"
    yield from _times(cases)
    yield "\ncontrols, in launches on rank 0"
    yield from _controls(cases, race)
    yield "\nwho wins: cases faster and slower than nothing beyond the spread; median and worst change"
    yield from _wins(cases)


def _labels(cases: Sequence[Case]) -> list[str]:
    return [each.label for each in next(iter(cases[0].timed.values()))]


def _times(cases: Sequence[Case]) -> Iterator[str]:
    header = "".join(f"{label:>{CELL_WIDTH}}" for label in _labels(cases))
    yield f"{'case':{NAME_WIDTH}}{'alone':{WHAT_WIDTH}}{header}   spread"
    for case in cases:
        alone = " + ".join(f"{value:.3f}" for value in case.alone_ms.values())
        for place, (what, found) in enumerate(case.timed.items()):
            name = case.name if place == 0 else ""
            beside = alone if place == 0 else what
            cells = "".join(f"{_cell(each):>{CELL_WIDTH}}" for each in found)
            widest = max(each.spread for each in found)
            yield f"{name:{NAME_WIDTH}}{beside:{WHAT_WIDTH}}{cells}   {widest:.1%} of {found[0].num_rounds}"


def _cell(found: Measurement) -> str:
    is_clear = found.is_faster() or found.is_slower()
    change = "" if found.label == NOTHING else f" {found.ratio - 1:+.1%}{'*' if is_clear else ' '}"
    return f"{found.median_us / 1000:.3f}{change}"


def _controls(cases: Sequence[Case], race: Race) -> Iterator[str]:
    for label in _labels(cases):
        counts = race.counts[label]
        yield (
            f"{label:14}{race.num_repetitions[label]:6,} repetitions {counts.num_prioritized:7,} prioritized "
            f"{counts.num_held:7,} held {counts.num_retried:4,} retried "
            f"{counts.num_refused:4,} refused   {_engagement(label, counts, race)} {counts.refusal}".rstrip()
        )


def _engagement(label: str, counts: RuleCounters, race: Race) -> str:
    """Whether each control in the variant's name took effect, once a repetition at least."""
    wanted = {
        "attr": counts.num_prioritized >= race.num_repetitions[label],
        "opt": race.has_option,
        "start": counts.num_held >= race.num_repetitions[label],
    }
    missing = [what for what, is_there in wanted.items() if what in label and not is_there]
    if counts.num_retried or counts.num_refused:
        missing.append("some launches")
    return f"NOT ENGAGED: {', '.join(missing)}" if missing else "engaged" if label != NOTHING else ""


def _wins(cases: Sequence[Case]) -> Iterator[str]:
    first = next(iter(cases[0].timed))
    by_label = zip(*(case.timed[first] for case in cases), strict=True)
    for found in by_label:
        if found[0].label == NOTHING:
            continue
        ratios = [each.ratio - 1 for each in found]
        faster, slower = sum(each.is_faster() for each in found), sum(each.is_slower() for each in found)
        best = sum(each is _best(case, first) for each, case in zip(found, cases, strict=True))
        yield (
            f"{found[0].label:16}{faster:3} faster {slower:3} slower of {len(cases)}, best in {best:2};  median "
            f"{statistics.median(ratios):+.1%}, worst {max(ratios):+.1%}, best {min(ratios):+.1%}"
        )


def _best(case: Case, what: str) -> Measurement:
    return min(case.timed[what], key=lambda each: each.ratio)
