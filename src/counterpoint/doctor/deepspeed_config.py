"""Hints of a job's parallelism in DeepSpeed's configuration, a JSON file that the command names.

    {"zero_optimization": {"stage": 2, "overlap_comm": true}}

If `overlap_comm` is left out, DeepSpeed overlaps in stage 3 only (0.19, runtime/zero/config.py).
"""

from pathlib import Path

import msgspec

from counterpoint.doctor.job_context import Hint
from counterpoint.errors import JobContextError
from counterpoint.files import read_limited


class Zero(msgspec.Struct):
    """The part about ZeRO. A value may be "auto" where a framework fills it in."""

    stage: int | str = 0
    overlap_comm: bool | str | None = None


class DeepSpeedConfig(msgspec.Struct):
    """What is read of a configuration; all else is left out."""

    zero_optimization: Zero = msgspec.field(default_factory=Zero)


def read_deepspeed(path: str) -> tuple[Hint, ...]:
    """Return a hint if the configuration leaves the reductions of ZeRO's stage 1 or 2 without overlap. Raises
    `JobContextError` if the file cannot be read.
    """
    remedy = "name DeepSpeed's configuration, a JSON file"
    try:
        read = msgspec.json.decode(read_limited(path, JobContextError, remedy), type=DeepSpeedConfig)
    except msgspec.DecodeError as problem:
        raise JobContextError(f"{path} does not hold DeepSpeed's configuration: {problem}; {remedy}.") from problem
    zero = read.zero_optimization
    if zero.stage not in {1, 2} or zero.overlap_comm not in {None, False}:
        return ()
    return (Hint(kind="zero_without_overlap", where=f"stage {zero.stage} in {Path(path).name}"),)
