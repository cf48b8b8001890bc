"""Mark step boundaries by hand, for jobs without an optimizer. Imports nothing heavy, since the package imports it."""

import os


def step() -> None:
    """Say that a step of this job has ended, so that `counterpoint run --tune` can compare steps.

    Call it once per step on every rank, at the same place. From the first call on, optimizers no longer mark steps. Outside
    of `counterpoint run` it does nothing.
    """
    if os.environ.get("COUNTERPOINT_FILTER_DIRECTORY"):
        from counterpoint.launch_filter.agent import agent_of_job  # noqa: PLC0415  only inside a supervised job

        agent_of_job().mark_step()
