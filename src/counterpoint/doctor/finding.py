"""A finding: one setting, what was found, the fact behind it, where that fact is from, and what to do.

Only "defeats overlap" makes `counterpoint check` exit with 1: the setting keeps communication and computation apart, or
stops the job. "may defeat overlap" depends on the job, or costs the control its effect. A "note" only explains.
"""

from typing import Literal

from counterpoint.value import Value

Severity = Literal["defeats overlap", "may defeat overlap", "note"]
SEVERITIES: tuple[Severity, ...] = ("defeats overlap", "may defeat overlap", "note")


class Finding(Value, frozen=True, kw_only=True):
    """`setting` is a variable, a flag or a piece of the machine; `found` its value and, if not the shell, its origin."""

    severity: Severity
    setting: str
    found: str
    fact: str
    source: str
    remedy: str
