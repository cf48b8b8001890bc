"""Unmodified jobs: started under the launch filter, tuned and guarded while they run, with proof of what took effect.

Defines the one function that such a job may call itself. It imports nothing, because `import counterpoint` loads it.
"""

import os


def step() -> None:
    """Mark the end of a step of this job, so that `counterpoint run --tune` can compare steps.

    Call it once per step on every rank, at the same place. After the first call, optimizers no longer mark steps.
    Outside of `counterpoint run` it does nothing.
    """
    if os.environ.get("COUNTERPOINT_FILTER_DIRECTORY"):
        from counterpoint.supervised.agent import agent_of_job  # noqa: PLC0415  only inside a supervised job

        agent_of_job().mark_step()
