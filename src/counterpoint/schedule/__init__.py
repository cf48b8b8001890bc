"""Copy schedules as values: how a collective and the matmul that needs it (or feeds it) are cut and ordered, and the
arithmetic of both. It does not depend on GPUs, torch or memory.
"""

from counterpoint.schedule.actions import Action, Buffer, CopySchedule, Problem, Region, split
from counterpoint.schedule.description import SEQUENTIAL, ScheduleDescription
from counterpoint.schedule.generate import backward_description, make_schedule

__all__ = [
    "SEQUENTIAL",
    "Action",
    "Buffer",
    "CopySchedule",
    "Problem",
    "Region",
    "ScheduleDescription",
    "backward_description",
    "make_schedule",
    "split",
]
