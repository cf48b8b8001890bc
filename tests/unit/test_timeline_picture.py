"""Timelines as SVG: what is drawn is as long as the metrics say."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from counterpoint.metrics import measure
from counterpoint.report.timeline_picture import DARK, LEFT, LIGHT, RIGHT, WIDTH, draw_timelines, write_timelines
from counterpoint.step import OperationKind
from counterpoint.timeline import Interval, Timeline
from helpers.command import counterpoint, refusal

SVG = "{http://www.w3.org/2000/svg}"


def timeline(*spans: tuple[OperationKind, float, float], rank: int = 0, name: str = "s") -> Timeline:
    intervals = tuple(
        Interval(rank=rank, stream=0, operation=number, name="k", kind=kind, start_us=start, end_us=end)
        for number, (kind, start, end) in enumerate(spans)
    )
    return Timeline(step_name=name, origin="simulated", intervals=intervals)


BEFORE = timeline(("computation", 0, 400), ("communication", 300, 900), ("computation", 900, 1000))
AFTER = timeline(("computation", 0, 500), ("communication", 100, 600))


def drawn_us(picture: str, color: str, longest_us: float) -> list[float]:
    """For each row of a color how long its bars are in all."""
    paths = [path.get("d") or "" for path in ElementTree.fromstring(picture).iter(f"{SVG}path") if path.get("fill") == color]
    scale = longest_us / (WIDTH - LEFT - RIGHT)
    return [sum(float(width) for width in re.findall(r" \S+?h([\d.]+)v", path)) * scale for path in paths]


def test_bars_are_as_long_as_the_metrics_say() -> None:
    picture = draw_timelines({"before": BEFORE, "after": AFTER})
    for color, field in (
        (LIGHT.computation, "computation_us"),
        (LIGHT.hidden, "overlapped_us"),
        (LIGHT.exposed, "exposed_us"),
    ):
        expected = [getattr(measure(each).ranks[0], field) for each in (BEFORE, AFTER)]
        assert drawn_us(picture, color, 1000) == pytest.approx(expected, abs=0.02)


def test_each_timeline_says_its_makespan_and_what_changed() -> None:
    words = [
        text.text for text in ElementTree.fromstring(draw_timelines({"before": BEFORE, "after": AFTER})).iter(f"{SVG}text")
    ]
    assert "before: 1 ms" in words
    assert "after: 600 us, -40.0 %" in words


def test_a_step_that_starts_late_is_drawn_from_its_first_operation() -> None:
    late = timeline(("computation", 500, 900), ("communication", 900, 1000))
    assert drawn_us(draw_timelines({"it": late}), LIGHT.computation, 500) == pytest.approx([400], abs=0.02)


def test_thousands_of_operations_give_a_small_picture() -> None:
    many = timeline(*(("computation", 10.0 * i, 10.0 * i + 9.9) for i in range(5000)))
    assert len(draw_timelines({"it": many})) < 10_000


def test_a_name_cannot_break_the_picture() -> None:
    picture = draw_timelines({"a < b": timeline(("computation", 0, 1), name="</title>&\x1b")})
    assert ElementTree.fromstring(picture).find(f"{SVG}title") is not None


@pytest.mark.parametrize(("name", "colors"), [("a.svg", LIGHT), ("a.dark.svg", DARK)])
def test_the_name_of_the_file_chooses_the_theme(name: str, colors: object, tmp_path: Path) -> None:
    write_timelines(tmp_path / name, {"before": BEFORE})
    assert (tmp_path / name).read_text() == draw_timelines({"before": BEFORE}, colors)


def test_tune_draws_before_and_after(tmp_path: Path) -> None:
    done = counterpoint("tune", "cb_ar_opt1", "--timeline", "lanes.svg", cwd=tmp_path)
    assert done.stdout.endswith("Timelines saved to lanes.svg.\n")
    words = [text.text or "" for text in ElementTree.parse(tmp_path / "lanes.svg").iter(f"{SVG}text")]
    assert [word.split(":")[0] for word in words if word.startswith(("before:", "after:"))] == ["before", "after"]


def test_a_picture_of_another_kind_is_refused(tmp_path: Path) -> None:
    assert ".svg" in refusal("simulate", "cb_ar_opt1", "--timeline", "lanes.png", cwd=tmp_path)
