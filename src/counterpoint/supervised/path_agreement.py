"""Agreement of ranks, after the first step, on the paths that all of them can switch: each reports what it could take
over, and prepares what all of them offer.

Every rank answers, whatever fails in it, because the others wait: a failure is a refusal with its reason.
"""

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from counterpoint.errors import reason_of
from counterpoint.integrations.paths import (
    COPIED_KINDS,
    UNKNOWN_OFFERS,
    WORDS,
    AbstractJobPaths,
    Integration,
    PathOffer,
)
from counterpoint.supervised.follower import Follower, Steps
from counterpoint.supervised.messages import PathsTaken, PathSurvey

OFFERED_TOPIC, TAKEN_TOPIC = "paths offered", "paths taken"


def everyones_surveys(follower: Follower, paths: AbstractJobPaths) -> Steps[list[PathSurvey]]:
    """Return what each rank could take over, by rank. All ranks get here after the same step, and wait for each other."""
    try:
        own = PathSurvey(offers=paths.survey())
    except Exception as problem:  # whatever failed, the others wait for an answer
        own = PathSurvey(problem=reason_of(problem))
    texts = yield from follower.everyone(OFFERED_TOPIC, msgspec.json.encode(own).decode())
    return [msgspec.json.decode(text, type=PathSurvey) for text in texts]


def make_ready(follower: Follower, paths: AbstractJobPaths, offers: Sequence[PathOffer]) -> Steps[tuple[PathOffer, ...]]:
    """Take over what all ranks offer, on all of them or on none; return the offers, refused where that failed."""
    able = [offer for offer in offers if not offer.refusal]
    if able:
        try:
            own = PathsTaken(failed=paths.take(able))
        except Exception as problem:  # as above
            own = PathsTaken(failed=dict.fromkeys((offer.integration for offer in able), reason_of(problem)))
        texts = yield from follower.everyone(TAKEN_TOPIC, msgspec.json.encode(own).decode())
        offers = with_failures(offers, [msgspec.json.decode(text, type=PathsTaken) for text in texts])
    ready = {offer.integration for offer in offers if not offer.refusal}
    # what is prepared here must not be switched if another rank has refused it
    paths.drop(list(dict.fromkeys(offer.integration for offer in offers if offer.integration not in ready)))
    return tuple(offers)


def agree_on_paths(surveys: Sequence[PathSurvey]) -> tuple[PathOffer, ...]:
    """Return what every rank offers, by integration, and refusals, with the rank, of what some rank cannot do or does
    not have.
    """
    failed = next(((rank, survey.problem) for rank, survey in enumerate(surveys) if survey.problem), None)
    if failed is not None:
        reason = f"rank {failed[0]} could not look for models: {failed[1]}"
        return tuple(replace(offer, refusal=reason) for offer in UNKNOWN_OFFERS)
    by_rank = [{offer.integration: offer for offer in survey.offers} for survey in surveys]
    names = dict.fromkeys(name for offers in by_rank for name in offers)
    return tuple(agreed for name in names for agreed in _agree_on([offers.get(name) for offers in by_rank]))


def _agree_on(offers: Sequence[PathOffer | None]) -> list[PathOffer]:
    """Return what all ranks offer of one integration and, separately, the kinds of collectives that only some of them
    offer.
    """
    first = next(offer for offer in offers if offer is not None)
    if first.integration == "collectives":  # a rank that offers none has called none that are large enough
        offers = [replace(first, kinds=(), refusal="") if offer is None else offer for offer in offers]
    given = [(rank, offer) for rank, offer in enumerate(offers) if offer is not None]
    first_rank = given[0][0]
    every = tuple(kind for kind in COPIED_KINDS if any(kind in offer.kinds for _, offer in given))
    problem = ""
    for rank, offer in enumerate(offers):
        if offer is None:
            problem = problem or f"rank {rank} has no such model"
        elif offer.refusal:
            problem = problem or (f"rank {rank}: {offer.refusal}" if _differ(offers) else offer.refusal)
        elif offer.what != first.what:
            problem = problem or f"rank {rank} has {offer.what}, and rank {first_rank} {first.what}"
    if problem:
        return [replace(first, kinds=every, refusal=problem)]
    lacking = {kind: rank for rank, offer in reversed(given) for kind in every if kind not in offer.kinds}
    common = tuple(kind for kind in every if kind not in lacking)
    agreed = [replace(first, kinds=common)] if common or not every else []
    return agreed + [
        replace(first, kinds=(kind,), refusal=f"rank {rank} has called no {WORDS[kind]} that are large enough")
        for kind, rank in lacking.items()
    ]


def _differ(offers: Sequence[PathOffer | None]) -> bool:
    return len({offer.refusal if offer else None for offer in offers}) > 1


def with_failures(offers: Sequence[PathOffer], taken: Sequence[PathsTaken]) -> tuple[PathOffer, ...]:
    """Return the offers, refused where some rank could not prepare them."""
    failed: dict[Integration, str] = {}
    for rank, each in enumerate(taken):
        for integration, reason in each.failed.items():
            failed.setdefault(integration, f"rank {rank}: {reason}")
    return tuple(replace(offer, refusal=offer.refusal or failed.get(offer.integration, "")) for offer in offers)
