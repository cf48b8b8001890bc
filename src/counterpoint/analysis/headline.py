"""The summary that fits on one screen: what is exposed, why, and what to do next."""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from counterpoint.analysis.breakdowns import Collectives
from counterpoint.analysis.values import (
    Analysis,
    Cause,
    CauseTotal,
    ExposedInterval,
    Headline,
    Recoverable,
    StepOfRank,
    keys_of,
    label_of,
    steady_steps,
)
from counterpoint.units import format_numbered, format_percent, format_us

MOST_LINES = 3
LEAST_SHOWN_SHARE = 0.0005  # of the step or of the communication; a smaller share prints as 0.0 %
LEAST_LAUNCH_BOUND_SHARE = 0.05  # of the step; from this share on, a line about the host is added

CAUSE_WORDS: Mapping[Cause, str] = {
    "dependent": "the next kernel needs the result",
    "starved": "collectives wait for SMs that other kernels hold",
    "own_stream": "collectives run on the computation's own stream",
    "queued": "collectives wait behind other collectives",
    "hardware_queue": "collectives are serialized in a hardware queue",
    "launched_late": "the host launches collectives, or what could hide them, late",
    "slow_rank": "ranks wait for slower ones",
    "uneven": "all-to-alls are split unevenly",
    "tail": "nothing is left to compute at the end of the step",
    "gap": "the computation pauses between two kernels",
}


def headline(
    analysis: Analysis, collectives: Collectives, exposed: Sequence[ExposedInterval], unknown: str = ""
) -> Headline:
    """Return verdict, why and next, without recoverable times; `unknown` says why causes cannot be known."""
    wrong = next((rank for rank in analysis.ranks if rank.untrusted), None)
    if wrong is not None:
        verdict = f"UNKNOWN: the times of rank {wrong.rank} contradict each other. {wrong.untrusted}"
        return Headline(verdict=verdict, why=(), next=())
    if analysis.untrusted:
        return Headline(verdict=f"UNKNOWN: {analysis.untrusted}", why=(), next=())
    if analysis.step_us <= 0:
        why = (*analysis.problems, *(line for rank in analysis.ranks for line in rank.problems))[:MOST_LINES]
        return Headline(verdict="UNKNOWN: the traces hold no step with GPU operations.", why=why, next=())
    if analysis.communication_us <= 0:
        return _without_communication(analysis)
    share = analysis.exposed_us / analysis.step_us
    of_step = f"{format_us(analysis.exposed_us)} of {format_us(analysis.step_us)}"
    if unknown:
        verdict = (
            f"UNKNOWN: {format_percent(share)} of the step is exposed ({of_step}), but the causes are unknown. {unknown}"
        )
        return Headline(verdict=verdict, why=(), next=_next_lines(analysis))
    if analysis.exposed_us < LEAST_SHOWN_SHARE * analysis.communication_us:
        hidden = f"computation hides all {format_us(analysis.communication_us)} of communication per step"
        return Headline(verdict=f"Nothing is exposed: {hidden}, in {_scope(analysis)}.", why=(), next=_next_lines(analysis))
    because = f", mainly because {CAUSE_WORDS[analysis.causes[0].cause]}" if analysis.causes else ""
    part = format_percent(share) if share >= LEAST_SHOWN_SHARE else "Less than 0.1 %"
    return Headline(
        verdict=f"{part} of the step is exposed communication ({of_step}, {_scope(analysis)}){because}.",
        why=_why_lines(analysis, collectives, exposed),
        next=_next_lines(analysis),
    )


def _without_communication(analysis: Analysis) -> Headline:
    """Return the headline where steady steps do not communicate: the job does not at all, or other steps of it do."""
    steps = [step for rank in analysis.ranks for step in rank.steps]
    others_us = [step.communication_us for step in steps if step.communication_us > 0]
    if others_us:
        verdict = (
            f"UNKNOWN: the steady steps of {_scope(analysis)} do not communicate, but {len(others_us)} of all {len(steps)} "
            f"steps do, for {format_us(sum(others_us))}, and were left out."
        )
        remedy = "If the job accumulates gradients, call profiler.step() once per optimizer step."
    else:
        verdict = f"No communication in {_scope(analysis)}."
        remedy = "If the job has collectives, no rule knows the names of their kernels: name these in a file for --rules."
    return Headline(verdict=verdict, why=(), next=(remedy, *_next_lines(analysis)))


def _scope(analysis: Analysis) -> str:
    """Return which ranks the figures cover: "rank 0 of 4", "the 2 ranks present of 4", "4 ranks"."""
    present, missing = len(analysis.ranks), len(analysis.missing_ranks)
    if present == 1:
        return f"rank {analysis.ranks[0].rank}" + (f" of {1 + missing}" if missing else "")
    return f"{present} of {present + missing} ranks" if missing else f"{present} ranks"


def _why_lines(analysis: Analysis, collectives: Collectives, exposed: Sequence[ExposedInterval]) -> tuple[str, ...]:
    where = _largest_by_cause(collectives, exposed, keys_of(steady_steps(analysis.ranks)))
    return tuple(_why(total, where.get(total.cause, "")) for total in analysis.causes[:MOST_LINES])


def _why(total: CauseTotal, where: str) -> str:
    words = CAUSE_WORDS[total.cause]
    mostly = f", mostly in {where}" if where else ""
    figures = f"{format_us(total.exposed_us)} ({format_percent(total.share)})"
    return f"{words[0].upper()}{words[1:]}: {figures} of the exposed time{mostly}. {total.example}".rstrip()


def _largest_by_cause(
    collectives: Collectives, exposed: Sequence[ExposedInterval], steps: frozenset[StepOfRank]
) -> dict[Cause, str]:
    """Return, for each cause, the kind, size and module of the collectives that most of its time is in."""
    times: dict[Cause, dict[str, float]] = {}
    for interval in exposed:
        collective = collectives.get((interval.rank, interval.collective))
        if collective is not None and (interval.rank, interval.step) in steps:
            name = label_of(collective) + (f" in {collective.module}" if collective.module else "")
            held = times.setdefault(interval.cause, {})
            held[name] = held.get(name, 0.0) + interval.duration_us
    return {cause: min(held, key=lambda name: (-held[name], name)) for cause, held in times.items()}


def _next_lines(analysis: Analysis) -> tuple[str, ...]:
    """Return the next actions that need no simulation: record what is missing, look at the host."""
    lines: list[str] = []
    if analysis.launch_bound_us > LEAST_LAUNCH_BOUND_SHARE * analysis.step_us:
        share = format_percent(analysis.launch_bound_us / analysis.step_us)
        lines.append(
            f"The GPU waits for the host during {share} of the step: capture the step in a CUDA graph or compile it."
        )
    if analysis.missing_ranks and analysis.communication_us > 0:
        missing = format_numbered("rank", analysis.missing_ranks, MOST_LINES)
        lines.append(f"Add the traces of {missing} for the same steps; they show which rank the others wait for.")
    return tuple(lines)


def with_recoverable(analysis: Analysis, entries: Sequence[Recoverable]) -> Analysis:
    """Return the analysis with what changes would recover, largest first, what none would, and the next lines by value.

    Time is not recoverable if no entry explains it. Each cause counts as recovered by the largest entry that names it, and
    the time of an entry is given once to the causes it names. Entries within the replay error count as recovering nothing.
    """
    ordered = tuple(sorted(entries, key=lambda entry: (entry.is_within_replay_error, -entry.recovers_us)))
    left = {total.cause: total.exposed_us for total in analysis.causes}
    claimed: set[Cause] = set()
    for entry in ordered:
        budget_us = 0.0 if entry.is_within_replay_error else max(0.0, entry.recovers_us)
        for cause in entry.causes:
            if cause in left and cause not in claimed and budget_us > 0:
                taken_us = min(budget_us, left[cause])
                left[cause] -= taken_us
                budget_us -= taken_us
                claimed.add(cause)
    worth = [entry for entry in ordered if entry.recovers_us > 0 and not entry.is_within_replay_error]
    lines = [f"{entry.what}: recovers {_worth(entry, analysis)}." for entry in worth]
    return replace(
        analysis,
        recoverable=ordered,
        unrecoverable_us=sum(left.values()),
        headline=replace(analysis.headline, next=(*lines, *_next_lines(analysis))[:MOST_LINES]),
    )


def _worth(entry: Recoverable, analysis: Analysis) -> str:
    """Say what a change recovers, and why that may be more than the exposed time."""
    share = f" ({format_percent(entry.recovers_us / analysis.step_us)} of the step)" if analysis.step_us > 0 else ""
    why = [f"{format_us(entry.saved_us)} of kernels become unnecessary"] if entry.saved_us else []
    if entry.recovers_us > analysis.exposed_us + entry.saved_us:
        why.append("the rest of the gain is idle time, and computation that communication slows down now")
    return "; ".join([f"{format_us(entry.recovers_us)} per step{share}, simulated", *why])
