"""Prints what a plan leaves out: one line for each control and kind of reason, however many kernels it is for.

Two reasons are of one kind if their first sentences differ in figures alone. Plan files and JSON have every reason in full.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.text import Text

from counterpoint.display import cut
from counterpoint.errors import printable
from counterpoint.kernel_names import base_name
from counterpoint.plan import Plan, Refusal
from counterpoint.report.text import bullets, shorten
from counterpoint.supervised.settings import CANDIDATE, UNTRIED
from counterpoint.units import format_count

KERNEL_CONTROLS = frozenset({"residency_cap", "carveout", "head_start"})  # the targets of the others are collectives
MOST_NAMED, LISTED_WIDTH = 2, 40  # kernels that a line names, and the letters of each
SENTENCE_END = re.compile(r"(?<=\.) (?=[A-Z])")
FIGURE = re.compile(r"(?<![\w.,-])-?\d+(?:,\d{3})*(?:\.\d+)?(?!\w)")
VARYING = "\0"  # stands before a range of figures until a sentence is complete
VARYING_NOTE = re.compile(rf" \([^()]*{VARYING}[^()]*\)")


def print_left_out(console: Console, plan: Plan) -> None:
    """Print what was refused, or tried in vain, below a heading; nothing if that is nothing."""
    if plan.refusals:
        console.print(Text("left out", style="bold"))
        console.print(bullets(describe_refusals(plan.refusals)))
        console.print()


def describe_refusals(refusals: Iterable[Refusal]) -> Iterator[Text]:
    """Yield one line for each control and kind of reason."""
    for each in merge_alike(refusals):
        if each.control == CANDIDATE and each.reason.startswith(UNTRIED):
            advice = each.reason.removeprefix(f"{UNTRIED}: ")
            yield Text(f"{_capitalized(UNTRIED)}: {each.target}. {_capitalized(advice)}.", style="dim")
        else:
            yield Text.assemble((each.control, "bold"), f" on {each.target}: {each.reason}", style="dim")


def merge_alike(refusals: Iterable[Refusal]) -> Iterator[Refusal]:
    """Yield one refusal in words, safe to print, for all with the same control and kind of reason."""
    alike: dict[tuple[str, str], list[Refusal]] = {}
    for refusal in refusals:
        alike.setdefault((refusal.control, _kind(refusal.reason)), []).append(refusal)
    for (control, _), found in alike.items():
        reason = _in_common([each.reason for each in found])
        target = printable(", ".join(each.target for each in found)) if control == CANDIDATE else _target(found)
        yield Refusal(control=printable(control), target=target, reason=printable(reason))


def _target(refusals: Sequence[Refusal]) -> str:
    """Return the only target of refusals of one control, or how many there are, with the first names."""
    first, number = refusals[0], sum(each.num_targets for each in refusals)
    if number == 1:
        return shorten(first.target)
    if first.control not in KERNEL_CONTROLS:
        return f"{shorten(first.target)} and {format_count(number - 1, 'other')}"
    listed = list(dict.fromkeys(cut(base_name(each.target), LISTED_WIDTH) for each in refusals))
    more = ", ..." if len(listed) > MOST_NAMED or number > len(refusals) else ""
    return f"{number} kernels ({printable(', '.join(listed[:MOST_NAMED]))}{more})"


def _kind(reason: str) -> str:
    """Return a reason's first sentence without its figures."""
    return _masked(SENTENCE_END.split(reason, maxsplit=1)[0])


def _masked(sentence: str) -> str:
    return FIGURE.sub("#", sentence)


def _in_common(reasons: Sequence[str]) -> str:
    """Return the sentences that all reasons have, with ranges for figures that differ; notes of such figures are left
    out.
    """
    distinct = list(dict.fromkeys(reasons))
    if len(distinct) == 1:
        return distinct[0]
    masked = [{_masked(sentence): sentence for sentence in SENTENCE_END.split(reason)} for reason in distinct]
    shared = [kind for kind in masked[0] if all(kind in each for each in masked)]
    return " ".join(_ranged([each[kind] for each in masked]) for kind in shared)


def _ranged(sentences: Sequence[str]) -> str:
    """Return sentences that differ in figures as one."""
    columns = iter(zip(*(FIGURE.findall(sentence) for sentence in sentences), strict=True))
    ranged = FIGURE.sub(lambda _: _range(next(columns)), sentences[0])
    return VARYING_NOTE.sub("", ranged).replace(VARYING, "")


def _range(figures: Sequence[str]) -> str:
    """Return the figure that all have, or the least and the greatest."""
    ordered = sorted(set(figures), key=lambda figure: float(figure.replace(",", "")))
    return ordered[0] if len(ordered) == 1 else f"{VARYING}{ordered[0]} to {ordered[-1]}"


def _capitalized(words: str) -> str:
    return words[:1].upper() + words[1:]
