"""Ranks on CPUs that call the operators of experts as nobody should, or end in the middle, and print what each is told."""

import math
import os
import random
from contextlib import suppress

import torch

from counterpoint import ops
from counterpoint.errors import CounterpointError
from counterpoint.schedule import SEQUENTIAL, ScheduleDescription
from helpers.experts_definition import DIM, Experts
from helpers.gloo_sections import run_sections

D = ScheduleDescription
COPIES = D(pattern="all_peers", along="experts")


def faults() -> None:
    """Calls that cannot be made are one line on every rank, and the next call works."""
    experts = Experts(random.Random(9), torch.float64, kind="random", num_local=2)
    tokens, _ = experts.own()
    counts, is_wrong = experts.counts[experts.rank], experts.rank == 1
    first, second, *rest = counts
    too_many, negative = [first + 1, second, *rest], [first + second + 1, -1, *rest]
    wrapping = [2**63 - 1, 2**63 - 1, 2 + sum(counts), 0]  # in 64 bits their sum is right

    def call(
        hidden: int, rows: object = tokens, counts: object = counts, w2: torch.Tensor | None = None, **more: object
    ) -> None:
        """With a size of its own, so that the ranks have not agreed on it before."""
        w1 = torch.ones(2, hidden, DIM, dtype=torch.float64)
        ops.expert_ffn(rows, counts, w1, w1.mT if w2 is None else w2, **more)  # type: ignore[arg-type]

    def call_in_bf16(*, is_fp8: bool) -> None:
        w1 = torch.ones(2, 16, 16, dtype=torch.bfloat16)
        ops.expert_ffn(torch.ones(sum(counts), 16, dtype=torch.bfloat16), counts, w1, w1, is_fp8=is_fp8)

    def second_half(weights: torch.Tensor | None) -> None:
        groups, routing = ops.dispatch_grouped_matmul(tokens, counts, torch.ones(2, 4, DIM, dtype=torch.float64))
        ops.grouped_matmul_combine(groups, weights, routing)  # type: ignore[arg-type]

    bad = {
        "counts that do not add up": lambda: call(1, counts=too_many if is_wrong else counts),
        "negative counts": lambda: call(1, counts=negative if is_wrong else counts),
        "counts that wrap around": lambda: call(1, counts=wrapping if is_wrong else counts),
        "fractions": lambda: call(1, counts=torch.tensor(counts) + 0.25 * is_wrong),
        "no number": lambda: call(1, counts=torch.tensor([*counts[1:], math.nan]) if is_wrong else counts),
        "whole numbers of 8 bits": lambda: call(1, counts=torch.tensor(counts).to(torch.float8_e5m2)),
        "sparse counts": lambda: call(18, counts=torch.tensor(counts).to_sparse() if is_wrong else counts),
        "fp8 differs": lambda: call_in_bf16(is_fp8=is_wrong),
        "no counts": lambda: call(14, counts=None if is_wrong else counts),
        "counts in a matrix": lambda: call(15, counts=[counts] if is_wrong else counts),
        "whole numbers of another type": lambda: call(1, counts=torch.tensor(counts).float()),
        "sizes differ": lambda: call(2 + is_wrong),
        "schedules differ": lambda: call(1, schedule=SEQUENTIAL if is_wrong else COPIES),
        "a count is missing": lambda: call(4, counts=counts[is_wrong:]),
        "types differ": lambda: call(6, tokens.float() if is_wrong else tokens),
        "shapes do not fit": lambda: call(5, w2=torch.ones(2, 5, DIM, dtype=torch.float64) if is_wrong else None),
        "sparse tokens": lambda: call(17, tokens.detach().to_sparse() if is_wrong else tokens),
        "no tensor": lambda: call(7, None if is_wrong else tokens),
        "an activation by name": lambda: call(16, activation="gelu" if is_wrong else None),
        "totals are missing": lambda: call(16, totals=(None,) if is_wrong else ()),
        "no schedule": lambda: call(8, schedule="ring"),
        "biases are missing": lambda: call(10, biases=[None] * (2 - is_wrong)),
        "fp8 of other types": lambda: call(13, is_fp8=True),
        "a bias does not fit": lambda: call(11, biases=[tokens if is_wrong else None, None]),
        "second halves differ": lambda: second_half(torch.ones(2, 3 + is_wrong, 4, dtype=torch.float64)),
        "a second half without weights": lambda: second_half(None if is_wrong else torch.ones(2, 6, 4, dtype=torch.float64)),
        "a schedule that does not fit": lambda: call(9, schedule=D(pattern="ring")),
        "after all that": lambda: call(1),
        "refused when agreed": lambda: call(1, counts=counts[is_wrong:]),
    }
    for name, attempt in bad.items():
        try:
            attempt()
            print(f"{name}: ok", flush=True)
        except CounterpointError as problem:
            print(f"{name}: {problem}", flush=True)
    for _ in range(3 * is_wrong):  # before the others have read what was refused first
        with suppress(CounterpointError):
            call(1, tokens[:, 1:])


def a_rank_ends() -> None:
    """One rank ends between dispatch and combine; the others get one line."""
    experts = Experts(random.Random(9), torch.float64, kind="random", num_local=2)
    experts.found_by_halves(COPIES)  # the ranks agree on these calls
    tokens, (w1, w2, _) = experts.own()
    hidden, routing = ops.dispatch_grouped_matmul(tokens, experts.counts[experts.rank], w1, schedule=COPIES)
    if experts.rank == 1:
        os._exit(0)
    try:
        ops.grouped_matmul_combine(hidden, w2, routing)
    except CounterpointError as problem:
        print(f"a rank ends: {problem}", flush=True)


if __name__ == "__main__":
    run_sections(globals())
