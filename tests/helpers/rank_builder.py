"""Builds a `RankAnalysis` by hand, or the collectives of one from the raw JSON of a trace, without any of the readers."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from counterpoint.analysis.values import ExposedInterval, RankAnalysis, StepFigures, TracedCollective
from counterpoint.step import CollectiveKind

MIB = 1 << 20
BYTES = {"Long": 8, "Float": 4, "BFloat16": 2}
KINDS: dict[str, CollectiveKind] = {
    "allreduce": "all_reduce",
    "_allgather_base": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "all_to_allv": "all_to_all",
}


def traced(rank: int, number: int, start_us: float, end_us: float, **more: Any) -> TracedCollective:
    """One collective; `more` are fields that differ from an all-reduce of 1 MiB in a group of two, in step 1."""
    fields: dict[str, Any] = {
        "group_number": number,
        "step": 1,
        "name": "nccl:all_reduce",
        "collective": "all_reduce",
        "transport": "NCCL",
        "stream": 20,
        "num_bytes": MIB,
        "group_size": 2,
        "process_group": "dp",
    }
    return TracedCollective(rank=rank, number=number, start_us=start_us, end_us=end_us, **(fields | more))


def all_exposed(collectives: Sequence[TracedCollective]) -> tuple[ExposedInterval, ...]:
    """An interval per collective, as if nothing ran beside it: the next kernel needs the result."""
    return tuple(
        ExposedInterval(
            rank=c.rank,
            step=c.step,
            start_us=c.start_us,
            end_us=c.end_us,
            collective=c.number,
            cause="dependent",
            evidence="The next kernel waits for it.",
        )
        for c in collectives
    )


def rank_of(
    rank: int,
    collectives: Sequence[TracedCollective],
    *,
    exposed: Sequence[ExposedInterval] | None = None,
    steady: Sequence[int] | None = None,
    **more: Any,
) -> RankAnalysis:
    """A rank with its collectives all exposed unless `exposed` says otherwise, and the steps they are in, 1000 us each."""
    intervals = all_exposed(collectives) if exposed is None else tuple(exposed)
    steps = sorted({c.step for c in collectives} | {i.step for i in intervals}) or [1]
    return RankAnalysis(
        path=more.pop("path", f"rank{rank}.json"),
        rank=rank,
        collectives=tuple(collectives),
        exposed=intervals,
        steps=tuple(step_of(rank, step, collectives, intervals, steady is None or step in steady) for step in steps),
        **({"world_size": 2} | more),
    )


def step_of(
    rank: int, step: int, collectives: Sequence[TracedCollective], exposed: Sequence[ExposedInterval], is_steady: bool
) -> StepFigures:
    """Figures of a step of 1000 us: collectives do not overlap each other, and computation fills the rest."""
    communication_us = sum(c.end_us - c.start_us for c in collectives if c.step == step)
    exposed_us = sum(i.duration_us for i in exposed if i.step == step)
    return StepFigures(
        rank=rank,
        step=step,
        start_us=1000.0 * (step - 1),
        end_us=1000.0 * step,
        computation_us=1000.0 - exposed_us,
        communication_us=communication_us,
        waiting_us=0.0,
        copy_us=0.0,
        exposed_us=exposed_us,
        overlapped_us=communication_us - exposed_us,
        idle_us=0.0,
        launch_bound_us=0.0,
        overlap_ratio=1 - exposed_us / communication_us if communication_us else None,
        is_steady=is_steady,
    )


def rank_of_raw_trace(path: Path, rank: int) -> RankAnalysis:
    """NCCL kernels of a real trace, from its first one, as the raw JSON has them."""
    document = json.loads(gzip.decompress(path.read_bytes()))
    kernels = [e for e in document["traceEvents"] if e.get("cat") == "kernel" and e["name"].startswith("nccl")]
    kernels.sort(key=lambda event: event["ts"])
    origin = kernels[0]["ts"]
    collectives = []
    for number, event in enumerate(kernels):
        args, start_us = event["args"], event["ts"] - origin
        most = max(args["In msg nelems"], args["Out msg nelems"])
        collectives.append(
            traced(
                rank,
                number,
                start_us,
                start_us + event["dur"],
                name=event["name"],
                collective=KINDS[args["Collective name"]],
                num_bytes=most * BYTES[args["dtype"]],
                group_size=args["Group size"],
                process_group=args["Process Group Description"],
            )
        )
    return rank_of(rank, collectives, world_size=document["distributedInfo"]["world_size"], path=str(path))
