"""An analysis as people see it: figures agree in every form, names do no harm, and nothing is larger than it may be."""

import gzip
import html
import io
import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec.structs import replace
from rich.console import Console

from counterpoint.analysis.values import Analysis, Cause, Change, CollectiveSize, OperatorRow
from counterpoint.errors import CounterpointError, TraceError
from counterpoint.report import analysis_page, analysis_text
from counterpoint.report.analysis_markdown import markdown_summary
from counterpoint.report.analysis_page import MAX_PAGE_BYTES, AnalysisReport, render_page, write_page
from counterpoint.report.analysis_tables import tables_of
from counterpoint.report.analysis_text import _fitting
from counterpoint.report.analysis_timeline import Limits, step_origins, timeline_data
from counterpoint.report.analysis_trace import write_analysis_trace
from counterpoint.report.analysis_words import CAUSES, problems_of
from counterpoint.report.figure_tables import figure_columns, new_figures, text_column
from helpers.analysis_builder import (
    CLOCK_SHIFT_US,
    HOSTILE,
    NAMES,
    SHOWN_STEP,
    STEP_US,
    analysis,
    empty_analysis,
)

TERMINALS = [(80, "utf-8"), (42, "utf-8"), (200, "ascii")]


def printed(found: Analysis, width: int, encoding: str) -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    analysis_text.print_analysis(Console(file=file, width=width, markup=False, emoji=False), found)
    file.seek(0)
    return file.read()


def data_of(page: str) -> dict[str, Any]:
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert len(found) == 1
    data: dict[str, Any] = json.loads(found[0])
    return data


def starts_of(lane: dict[str, Any]) -> list[float]:
    at_ns, starts = 0, []
    for difference in lane["t"]:
        at_ns += difference
        starts.append(at_ns / 1000)
    return starts


def test_every_cause_has_words() -> None:
    assert tuple(CAUSES) == get_args(Cause)


@pytest.mark.parametrize(("width", "encoding"), TERMINALS)
def test_the_box_comes_first_and_lines_fit_the_terminal(width: int, encoding: str) -> None:
    lines = printed(analysis(), width, encoding).splitlines()
    end = next(place for place, line in enumerate(lines) if place and line[:1] in "╰+")
    box = " ".join(line.strip("│| ") for line in lines[:end])
    assert end < 24
    for words in ("11.2 % of the step is exposed", "why", "next", "counterpoint run", "4.5 ms (11.2", "ranks 0-1 of 8"):
        assert words in box
    pasted = "from counterpoint.integrations import fsdp2"
    assert pasted in lines  # what is pasted is never folded
    assert max(len(line) for line in lines if line != pasted) <= width


def test_a_table_leaves_out_columns_and_rows_that_do_not_fit_and_says_so() -> None:
    wide, narrow = printed(analysis(), 200, "utf-8"), printed(analysis(), 42, "utf-8")
    assert "certainty" in wide
    assert "certainty" not in narrow
    assert "and 20 more rows" in wide  # of 30 skews
    assert "dependent" in narrow


def test_an_empty_column_is_left_out_and_details_where_not_even_the_others_fit() -> None:
    columns = (text_column("name"), text_column("shapes"), *figure_columns("us", "time", "mean"))
    detail = text_column("of", is_detail=True)
    table = new_figures(
        "k", "T", "", (*columns, detail), [("matmul", "", 1234.5, 2345.6, "x"), ("add", None, 3.0, 4.0, "y")]
    )
    names = {width: [table.columns[place].name for place in _fitting(table, width)] for width in (80, 20)}
    assert names == {80: ["name", "time", "mean", "of"], 20: ["name", "time"]}


def test_rows_that_would_look_alike_are_told_apart() -> None:
    found = analysis()
    size = CollectiveSize(
        collective="all_reduce",
        transport="nccl",
        process_group="dp",
        num_bytes=128 << 20,
        group_size=4,
        count=21,
        mean_us=700.0,
        least_us=650.0,
        most_us=750.0,
    )
    operator = OperatorRow(name="aten::mm", kernel="nvjet_NNT", count=1, total_us=9000.0, mean_us=9000.0)
    adam = OperatorRow(
        name="adam",
        kernel="void at::native::(anonymous namespace)::apply_kernel<float>(int)",
        shapes="[[], [8192, 7168], [], [7168, 4096]]",
        count=1,
        total_us=8000.0,
        mean_us=8000.0,
    )
    first = replace(found.ranks[0], operators=(operator, replace(operator, kernel="nvjet_TNT"), adam))
    changed = Change(what="overlap", before=0.805, after=0.926, spread=0.01, unit="share")
    sizes = (size, replace(size, num_bytes=(128 << 20) + 16384), replace(size, num_bytes=4096))
    shown = printed(replace(found, ranks=(first,), sizes=sizes, changes=(changed,)), 80, "utf-8")
    for words in ("134,217,728", "134,234,112", "nvjet_NNT", "nvjet_TNT", "8192x7168, 7168x4096", "+12.1 points"):
        assert words in shown
    assert "4,096 " not in shown
    assert "apply_kernel" in shown
    assert "anonymous" not in shown


def test_a_trace_without_communication_prints_its_verdict_and_no_table() -> None:
    for shown in (printed(empty_analysis(), 80, "utf-8"), markdown_summary(empty_analysis()), render_page(empty_analysis())):
        assert "The trace holds no communication." in shown
        assert "Causes of exposed" not in shown


def test_names_cannot_format_mention_or_inject_in_markdown() -> None:
    found = replace(analysis(), notes=("@everyone [x](http://x) `a` | <img> " + HOSTILE,))
    found = replace(found, recoverable=tuple(replace(each, what=each.what + HOSTILE) for each in found.recoverable))
    text = markdown_summary(found)
    assert not re.search(r"(?<!\\)<(?!/?(details|summary)>)", text)
    assert not re.search(r"@\w|(?<!\\)\[x|(?<!\\)`a|\u202e|\u2028", text)
    assert "4.5 ms (11.2 %)" in text
    rows = [line for line in text.splitlines() if line.startswith("| dependent")]
    assert len(rows) == 1
    assert len(re.findall(r"(?<!\\)\|", rows[0])) == 7


def test_the_page_is_one_file_that_loads_and_runs_nothing_else() -> None:
    page = render_page(analysis())
    assert not re.search(r"""(?:src|href)=["'](?!#)|url\(|@import|https?://""", page)
    policy = html.unescape(re.findall(r'Content-Security-Policy" content="([^"]*)"', page)[0])
    assert re.fullmatch(r"default-src 'none'; style-src 'sha256-[\w+/=]{44}'; script-src 'sha256-[\w+/=]{44}'", policy)
    assert page.count("<script") == 2
    assert page.lower().count("</script") == 2
    assert "\u202e" not in page
    assert "[[" not in page.split("<script")[0]


def test_page_and_tables_hold_the_same_figures() -> None:
    found = analysis()
    page = render_page(found)
    for table in tables_of(found):
        assert f'<table id="table-{table.key}"><caption>' in page
        body = page.split(f'id="table-{table.key}"')[1].split("</table>")[0]
        assert body.count("<tr>") == 1 + len(table.rows)
        numbers = [cell for row in table.rows for cell in row if isinstance(cell, int | float)]
        assert [float(value) for value in re.findall(r'data-v="([^"]*)"', body)] == pytest.approx(numbers, rel=1e-9)


def test_ranks_stand_on_one_clock_where_clocks_are_known() -> None:
    found = analysis(num_ranks=3)
    ranks = timeline_data(found, Limits())["ranks"]
    assert isinstance(ranks, list)
    for rank, source in zip(ranks, found.ranks, strict=True):
        operations = sum(len(lane["n"]) for lane in rank["lanes"])
        assert operations == len(source.lanes)
        assert min(starts_of(lane)[0] for lane in rank["lanes"]) == pytest.approx(0)
        assert starts_of(rank["exposed"])[0] == pytest.approx(0)
        assert len(rank["exposed"]["c"]) == 9
    assert set(step_origins(found).values()) == {SHOWN_STEP * STEP_US}
    apart = replace(found, clock_offsets_us=((0, 0.0),))
    assert step_origins(apart)[2] == SHOWN_STEP * STEP_US - 2 * CLOCK_SHIFT_US
    assert analysis_page.NOT_ONE_CLOCK in html.unescape(render_page(apart))


def test_a_page_of_eight_ranks_is_small_and_one_of_many_operations_says_what_it_leaves_out() -> None:
    assert len(render_page(analysis(8, 12_000, 400)).encode()) < MAX_PAGE_BYTES / 3
    most = analysis(2, 120_000, 10)
    page = render_page(replace(most, skews=most.skews * 40))
    assert len(page.encode()) < MAX_PAGE_BYTES
    titles = [rank["title"] for rank in data_of(page)["ranks"]]
    assert titles == ["rank 0, step 2", "rank 1, step 2 (operations left out: too many)"]
    assert "The first 500 rows of 1,200; --json has all." in page


def test_a_page_above_the_limit_is_made_smaller_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = analysis(4, 3_000, 400)
    monkeypatch.setattr(analysis_page, "MAX_PAGE_BYTES", 200_000)
    page = render_page(found)
    assert len(page.encode()) <= 200_000
    assert [bool(rank["lanes"]) for rank in data_of(page)["ranks"]][::3] == [True, False]
    monkeypatch.setattr(analysis_page, "MAX_PAGE_BYTES", 1_000)
    with pytest.raises(CounterpointError, match="the limit is 1000 B"):
        render_page(found)


def test_a_page_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CounterpointError, match=r"Cannot write the page to .*Name a file"):
        write_page(tmp_path / "none" / "page.html", empty_analysis())


def test_a_notebook_shows_the_page_in_a_frame() -> None:
    shown = AnalysisReport(analysis())._repr_html_()
    frame = re.fullmatch(r'<iframe [^>]*sandbox="allow-scripts"[^>]* srcdoc="([^"]*)"></iframe>', shown, re.DOTALL)
    assert frame is not None
    assert html.unescape(frame[1]) == render_page(analysis())


def test_the_merged_trace_holds_all_ranks_with_their_causes_first(tmp_path: Path) -> None:
    path = tmp_path / "merged.json.gz"
    found = analysis(num_ranks=2)
    write_analysis_trace(path, found)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == sum(len(rank.lanes) for rank in found.ranks) + len(found.exposed)
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    order = {(e["pid"], e["tid"]): e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    tracks = [place for place, name in threads.items() if name == "exposed, by cause"]
    assert [place[0] for place in tracks] == [0, 1]
    assert all(order[place] == 0 for place in tracks)
    first = min((e for e in complete if (e["pid"], e["tid"]) == tracks[1]), key=lambda e: e["ts"])
    assert (first["name"], first["ts"], first["dur"]) == ("dependent", 0, pytest.approx(500))
    assert first["args"]["collective"] == NAMES[2]
    with pytest.raises(TraceError):
        write_analysis_trace(tmp_path / "merged.txt", found)


def test_what_could_not_be_known_is_said_once() -> None:
    line = "The trace has no synchronization events: waits of streams are not known."
    found = analysis(num_ranks=3)
    assert problems_of(found) == [f"Rank 1: {line}"]
    assert problems_of(replace(found, problems=(line,))) == [line]
