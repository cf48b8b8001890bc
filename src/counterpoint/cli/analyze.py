"""The command `analyze`: reads traces, and gives a report, a page, a file for programs, or the verdict of a gate."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click
from msgspec.structs import replace

from counterpoint.cli.options import Command, argument, file_option, json_option, machine_option, output_option
from counterpoint.errors import AnalysisError, CounterpointError, shown
from counterpoint.value import check_outputs, save_text, write_json

if TYPE_CHECKING:
    from counterpoint.analysis.gate import Condition
    from counterpoint.analysis.values import Analysis
    from counterpoint.traces import TracedStep

FAILED = 1


class Outputs(NamedTuple):
    """Files to write, besides what is printed."""

    saved: Path | None
    html: Path | None
    markdown: Path | None
    merged: Path | None

    def check(self, inputs: Sequence[str | Path | None]) -> None:
        """Raise `CounterpointError` for a file that cannot be written, or would replace something else."""
        from counterpoint.analysis.gate import ANALYSIS  # noqa: PLC0415  a fast --help
        from counterpoint.report.analysis_markdown import SUMMARY  # noqa: PLC0415
        from counterpoint.report.analysis_page import PAGE  # noqa: PLC0415
        from counterpoint.traces.chrome import CHROME  # noqa: PLC0415

        check_outputs(tuple(zip(self, (ANALYSIS, PAGE, SUMMARY, CHROME), strict=True)), inputs)


@click.command(
    cls=Command,
    examples=(
        "counterpoint analyze traces/*.json.gz --html page.html",
        "counterpoint analyze new.json.gz --compare old.json.gz",
        "counterpoint analyze trace.json.gz --fail-if 'exposed > 5%'",
    ),
)
@argument(
    "traces",
    metavar="TRACE...",
    nargs=-1,
    required=True,
    type=click.Path(),
    help="Profiler traces (.json, .json.gz, .sqlite) or NCCL Inspector logs of one job, one file for each rank.",
)
@click.option(
    "--compare", metavar="TRACE", multiple=True, help="A trace of another run to compare with. Repeat it for more ranks."
)
@machine_option("A machine's name or file (.toml), to simulate what can be recovered.  [default: the traced GPU's]")
@file_option("--rules", help="Your own rules for kernel names (.toml). They are tried before the built-in ones.")
@output_option("Save the analysis (.json), as a baseline for later runs.")
@file_option("--html", help="Save a page for a browser (.html).")
@file_option("--markdown", help="Save a summary for a pull request (.md).")
@file_option("--merge", help="Save all ranks and causes as one trace for Perfetto (.json, .json.gz).")
@click.option(
    "--fail-if",
    metavar="CONDITION",
    multiple=True,
    help="Exit with code 1 if this holds, as in 'exposed > 5%'. May be repeated.",
)
@file_option("--baseline", help="A saved analysis, for conditions such as 'step > baseline + 3%'.")
@click.option(
    "--recover/--no-recover",
    "simulates",
    default=True,
    help="Simulate how much could be recovered, or skip it.  [default: recover]",
)
@json_option
def analyze(
    traces: tuple[str, ...],
    *,
    compare: tuple[str, ...],
    machine: str | None,
    rules: Path | None,
    output: Path | None,
    html: Path | None,
    markdown: Path | None,
    merge: Path | None,
    fail_if: tuple[str, ...],
    baseline: Path | None,
    simulates: bool,
    is_json: bool,
) -> None:
    """Show which communication is exposed in traces, why, and how much can be recovered.

    Exposed and overlapped times are those of the traced job. What can be recovered is simulated. With traces of several
    ranks, the report also shows which rank the others waited for.
    """
    from counterpoint.analysis.gate import load_baseline, parse_condition, violations  # noqa: PLC0415  a fast --help
    from counterpoint.machine import load_machine  # noqa: PLC0415
    from counterpoint.traces.classify import use_rules  # noqa: PLC0415

    outputs = Outputs(output, html, markdown, merge)
    outputs.check((*traces, *compare, baseline, rules))
    if machine is not None and not simulates:
        raise CounterpointError("--machine is for what can be recovered. Leave out --machine or --no-recover.")
    if machine is not None:
        load_machine(machine)  # an unknown machine is an error; one that the trace does not fit leaves out the simulation
    conditions = [parse_condition(text) for text in fail_if]
    saved = load_baseline(baseline) if baseline is not None else None
    if baseline is not None and not fail_if:
        raise CounterpointError("--baseline is for conditions. Add --fail-if, or leave out --baseline.")
    use_rules(rules)
    found = _analyze(traces, machine, rules, simulates=simulates)
    if compare:
        from counterpoint.analysis import comparison  # noqa: PLC0415

        other = _analyze(compare, machine, rules, simulates=False)
        problems = (*found.problems, *comparison.comparison_problems(other, found))
        found = replace(found, changes=comparison.compare(other, found), problems=problems)
    failures = violations(found, conditions, saved)
    _write(outputs, found, failures)
    _print(found, is_json=is_json)
    _tell(outputs, conditions, failures, is_quiet=is_json)
    if failures:
        raise click.exceptions.Exit(FAILED)


def _analyze(traces: Sequence[str], machine: str | None, rules: Path | None, *, simulates: bool) -> "Analysis":
    """Analyze all ranks together, and find what could be recovered of the step of the rank that sets the pace: what others
    wait for it cannot be recovered on them.
    """
    from counterpoint.cli.ranks_of_job import read_ranks  # noqa: PLC0415
    from counterpoint.report.text import ProgressLine  # noqa: PLC0415

    with ProgressLine() as show:
        found, step, source = read_ranks(traces, rules, show, simulates=simulates)
        if step is None:
            return found
        show("simulating what can be recovered")
        return _with_recoverable(found, step, source, machine, has_own_rules=rules is not None)


def _with_recoverable(
    found: "Analysis", step: "TracedStep", source: str, machine_name: str | None, *, has_own_rules: bool
) -> "Analysis":
    """Return the analysis with the planner's gain, or with the reason why it is unknown: the GPU is not described, or the
    simulated machine cannot run a kernel of the step.
    """
    from counterpoint.analysis.headline import with_recoverable  # noqa: PLC0415
    from counterpoint.analysis.recoverable import find_recoverable  # noqa: PLC0415
    from counterpoint.job import job_of  # noqa: PLC0415

    if not found.communication_us or found.untrusted:
        return found
    try:
        job = job_of(step, machine_name)
        entries = find_recoverable(found, job, source, machine_name, has_own_rules=has_own_rules)
    except CounterpointError as problem:
        return replace(found, problems=(*found.problems, f"What can be recovered is not known: {problem}"))
    return with_recoverable(found, entries)


def _write(outputs: Outputs, found: "Analysis", failures: Sequence[str]) -> None:
    if outputs.merged is not None:
        from counterpoint.report.analysis_trace import write_analysis_trace  # noqa: PLC0415

        write_analysis_trace(outputs.merged, found)
    if outputs.saved is not None:
        from counterpoint.analysis.gate import ANALYSIS  # noqa: PLC0415

        save_text(outputs.saved, write_json(found), ANALYSIS, AnalysisError)
    if outputs.html is not None:
        from counterpoint.report.analysis_page import write_page  # noqa: PLC0415

        write_page(outputs.html, found)
    if outputs.markdown is not None:
        from counterpoint.report.analysis_markdown import SUMMARY, markdown_summary  # noqa: PLC0415

        failed = "".join(f"- **fails**: {line}\n" for line in failures)
        save_text(outputs.markdown, failed + markdown_summary(found), SUMMARY, AnalysisError)


def _print(found: "Analysis", *, is_json: bool) -> None:
    if is_json:
        print(write_json(found))
        return
    from counterpoint.report.analysis_text import print_analysis  # noqa: PLC0415
    from counterpoint.report.text import new_console  # noqa: PLC0415

    print_analysis(new_console(), found)


def _tell(outputs: Outputs, conditions: "Sequence[Condition]", failures: Sequence[str], *, is_quiet: bool) -> None:
    """Print which files were written and the gate's verdict; reasons go to standard error, where a CI log shows them."""
    for what, path in zip(("Analysis", "Page", "Summary", "Trace"), outputs, strict=True):
        if path is not None and not is_quiet:
            print(f"{what} saved to {path}.")
    for line in failures:
        print(f"counterpoint: fails: {shown(line, 400)}", file=sys.stderr)
    if conditions and not failures and not is_quiet:
        print("No condition of --fail-if holds.")
