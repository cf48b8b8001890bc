"""Prints `counterpoint check`: findings, what was checked, and what could not be checked."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from counterpoint.doctor.job_context import Finding, JobContext, Severity
from counterpoint.units import format_count
from counterpoint.value import Value

STYLES: dict[Severity, str] = {"defeats overlap": "bold red", "may defeat overlap": "bold yellow", "note": "bold"}


class Checked(Value, frozen=True, kw_only=True):
    """The result of a check, for programs."""

    findings: tuple[Finding, ...]
    looked_at: tuple[str, ...]
    not_looked_at: tuple[str, ...]
    context: JobContext


def summarize_check(context: JobContext, findings: Sequence[Finding]) -> Checked:
    """Return the findings, and a description of what they are based on."""
    return Checked(
        findings=tuple(findings),
        looked_at=describe(context),
        not_looked_at=context.unknown,
        context=context,
    )


def print_check(console: Console, checked: Checked) -> None:
    """Print each finding as a paragraph, then one line that sums up."""
    for finding in checked.findings:
        found = Text.assemble(
            (finding.severity, STYLES[finding.severity]), "  ", (finding.setting, "bold"), f": {finding.found}"
        )
        console.print(found)
        console.print(_labelled([("why", finding.fact), ("do", finding.remedy), ("source", finding.source)]))
        console.print()
    console.print(Text(_verdict(checked.findings), style="bold"))
    console.print(
        _labelled(
            [
                ("checked", f"{'; '.join(checked.looked_at)}."),
                *(("not checked", f"{line.rstrip('.')}.") for line in checked.not_looked_at),
            ]
        )
    )


def describe(context: JobContext) -> tuple[str, ...]:
    """Describe what was checked, each in a few words."""
    parts = [_describe_gpus(context), *_describe_versions(context)]
    parts.append(f"{format_count(len(context.environment), 'variable')} for CUDA, NCCL, torch and launchers")
    if context.preloaded:
        parts.append(format_count(len(context.preloaded), "preloaded library", "preloaded libraries"))
    if context.job is not None:
        parts.append(_describe_job(context))
    return tuple(part for part in parts if part)


def _describe_gpus(context: JobContext) -> str:
    if not context.gpus:
        return ""
    first = context.gpus[0]
    capability = f" (compute capability {first.compute_capability})" if first.compute_capability else ""
    several = f"{len(context.gpus)} x " if len(context.gpus) > 1 else ""
    peers = " and their peer access" if len(context.gpus) > 1 and context.blocked_peers is not None else ""
    return f"{several}{first.name}{capability}{peers}"


def _describe_versions(context: JobContext) -> list[str]:
    driver = f"driver {context.driver_version}".strip()
    versions = (
        (driver if context.driver_version else "", True),
        (f"CUDA {context.cuda_version}", bool(context.cuda_version)),
        (f"torch {context.torch_version}", bool(context.torch_version)),
        (f"NCCL {context.nccl_version}", bool(context.nccl_version)),
    )
    return [text for text, is_known in versions if is_known]


def _describe_job(context: JobContext) -> str:
    job = context.job
    assert job is not None
    nodes = f", {format_count(job.num_nodes, 'node')}" if job.num_nodes else ""
    hints = ", ".join(f"{hint.kind.replace('_', ' ')} ({hint.where})" for hint in job.hints if hint.kind != "megatron")
    found = f"hints of {hints}" if hints else "no hints of parallelism in what was read"
    return f"the command: {' '.join([*job.programs, job.script]).strip()}{nodes}; {found}"


def _verdict(findings: Sequence[Finding]) -> str:
    if not findings:
        return "No setting was found that is known to defeat overlap."
    counts = {severity: sum(finding.severity == severity for finding in findings) for severity in STYLES}
    defeats, may, notes = counts["defeats overlap"], counts["may defeat overlap"], counts["note"]
    defeating = format_count(defeats, "setting defeats", "settings defeat") if defeats else "No setting defeats"
    return f"{defeating} overlap, {may} may defeat it; {format_count(notes, 'note')}."


def _labelled(lines: Sequence[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 1, 0, 0))
    for label, text in lines:
        grid.add_row(Text(f"  {label}", style="dim"), Text(text, overflow="fold"))
    return grid
