"""What `counterpoint check` prints: findings, what was looked at, and what could not be looked at."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from counterpoint.doctor.finding import Finding, Severity
from counterpoint.doctor.surroundings import Surroundings
from counterpoint.units import format_count
from counterpoint.value import Value

STYLES: dict[Severity, str] = {"defeats overlap": "bold red", "may defeat overlap": "bold yellow", "note": "bold"}


class Checked(Value, frozen=True, kw_only=True):
    """A whole check, for programs."""

    findings: tuple[Finding, ...]
    looked_at: tuple[str, ...]
    not_looked_at: tuple[str, ...]
    surroundings: Surroundings


def summarize_check(surroundings: Surroundings, findings: Sequence[Finding]) -> Checked:
    """The findings, and in words what they rest on."""
    return Checked(
        findings=tuple(findings),
        looked_at=describe(surroundings),
        not_looked_at=surroundings.unknown,
        surroundings=surroundings,
    )


def print_check(console: Console, checked: Checked) -> None:
    """Each finding as a paragraph, then one line that sums up."""
    for finding in checked.findings:
        found = Text.assemble(
            (finding.severity, STYLES[finding.severity]), "  ", (finding.setting, "bold"), f": {finding.found}"
        )
        console.print(found)
        console.print(_paragraph(finding))
        console.print()
    console.print(Text(_verdict(checked.findings), style="bold"))
    console.print(
        _labelled(
            [("looked at", "; ".join(checked.looked_at)), *(("not looked at", line) for line in checked.not_looked_at)]
        )
    )


def describe(surroundings: Surroundings) -> tuple[str, ...]:
    """What was looked at, each in a few words."""
    parts = [_describe_gpus(surroundings), *_describe_versions(surroundings)]
    parts.append(f"{format_count(len(surroundings.environment), 'variable')} of CUDA, NCCL, torch and their like")
    if surroundings.preloaded:
        parts.append(format_count(len(surroundings.preloaded), "preloaded library", "preloaded libraries"))
    if surroundings.job is not None:
        parts.append(_describe_job(surroundings))
    return tuple(part for part in parts if part)


def _describe_gpus(surroundings: Surroundings) -> str:
    if not surroundings.gpus:
        return ""
    first = surroundings.gpus[0]
    capability = f" (compute capability {first.compute_capability})" if first.compute_capability else ""
    several = f"{len(surroundings.gpus)} x " if len(surroundings.gpus) > 1 else ""
    peers = " and their peer access" if len(surroundings.gpus) > 1 and surroundings.blocked_peers is not None else ""
    return f"{several}{first.name}{capability}{peers}"


def _describe_versions(surroundings: Surroundings) -> list[str]:
    driver = f"driver {surroundings.driver_version}".strip()
    versions = (
        (driver if surroundings.driver_version else "", True),
        (f"CUDA {surroundings.cuda_version}", bool(surroundings.cuda_version)),
        (f"torch {surroundings.torch_version}", bool(surroundings.torch_version)),
        (f"NCCL {surroundings.nccl_version}", bool(surroundings.nccl_version)),
    )
    return [text for text, is_known in versions if is_known]


def _describe_job(surroundings: Surroundings) -> str:
    job = surroundings.job
    assert job is not None
    nodes = f", {format_count(job.num_nodes, 'node')}" if job.num_nodes else ""
    signs = ", ".join(f"{sign.kind.replace('_', ' ')} ({sign.where})" for sign in job.signs if sign.kind != "megatron")
    return f"the command: {' '.join([*job.programs, job.script]).strip()}{nodes}; signs of {signs or 'no parallelism'}"


def _verdict(findings: Sequence[Finding]) -> str:
    if not findings:
        return "Nothing found that is known to defeat overlap."
    counts = {severity: sum(finding.severity == severity for finding in findings) for severity in STYLES}
    defeats, may, notes = counts["defeats overlap"], counts["may defeat overlap"], counts["note"]
    settings = (
        format_count(defeats, "setting defeats overlap", "settings defeat overlap") if defeats else "Nothing defeats overlap"
    )
    return f"{settings}; {may} may; {format_count(notes, 'note')}."


def _paragraph(finding: Finding) -> Table:
    return _labelled([("why", finding.fact), ("do", finding.remedy), ("source", finding.source)])


def _labelled(lines: Sequence[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 1, 0, 0))
    for label, text in lines:
        grid.add_row(Text(f"  {label}", style="dim"), Text(text, overflow="fold"))
    return grid
