"""The page in a real browser: it opens, draws, pans, sorts and obeys keys, mouse and touch, and loads nothing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from counterpoint.report.analysis_page import write_page
from helpers.analysis_builder import analysis
from helpers.browser import CHROMIUM, Browser

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome on PATH"),
    pytest.mark.xdist_group("browser"),
]
PAN = """(async () => {
  const page = window.counterpointPage, costs = [];
  for (let i = 0; i < 60; i++) {
    const start = performance.now(), [from, to] = page.span();
    page.pan((to - from) * (i % 2 ? 0.1 : -0.1)); page.draw();
    costs.push(performance.now() - start);
    await new Promise((done) => requestAnimationFrame(done));
  }
  return costs.sort((a, b) => a - b)[30];
})()"""
SHOWN_ROWS = "[...document.querySelectorAll('#table-skews tbody tr')].filter((row) => row.offsetParent).length"
CAPTION = "document.querySelector('#details h3')?.textContent"
PAINTED = """(() => {
  const canvas = document.getElementById('canvas'), pen = canvas.getContext('2d');
  const data = pen.getImageData(0, 0, canvas.width, canvas.height).data;
  const seen = new Set();
  for (let i = 0; i < data.length; i += 4) seen.add(data[i] << 16 | data[i + 1] << 8 | data[i + 2]);
  return seen.size;
})()"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    kinds = {"small": analysis(2, 60, 9), "large": analysis(8, 12_000, 400)}
    for name, found in kinds.items():
        write_page(folder / f"{name}.html", found)
    return {name: folder / f"{name}.html" for name in kinds}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def browser(shared: Browser, pages: dict[str, Path]) -> Browser:
    shared.size(1440, 900)
    shared.scheme("light")
    shared.open(pages["small"])
    return shared


def middle(browser: Browser, row: int, share: float) -> tuple[float, float]:
    """A point on a lane, as a share of what is shown of the step, in the window."""
    box = browser.run(
        "(() => { document.getElementById('frame').scrollIntoView({block: 'center'});"
        "const box = document.getElementById('canvas').getBoundingClientRect(); return [box.left, box.top, box.width]; })()"
    )
    top = browser.run(f"window.counterpointPage.rows[{row}].y")
    return box[0] + 84 + share * (box[2] - 84), box[1] + 24 + top + 10


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_the_page_fits_and_follows_the_scheme(browser: Browser, pages: dict[str, Path], width: int, scheme: str) -> None:
    browser.size(width, 844, is_phone=width < 500)
    browser.scheme(scheme)
    browser.failures.clear()
    browser.requests.clear()
    browser.open(pages["small"])
    assert browser.run("document.documentElement.scrollWidth") == width
    assert browser.run("document.title") == "Counterpoint: ranks 0-1 of 8, NVIDIA H200"  # names of kernels ran nothing
    assert browser.failures == []
    assert browser.requests == [pages["small"].as_uri()]
    background = browser.run("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(246, 247, 249)", "dark": "rgb(16, 21, 27)"}[scheme]
    assert browser.run(PAINTED) > 10
    browser.run("document.getElementById('theme').click()")
    assert browser.run("getComputedStyle(document.body).backgroundColor") != background
    browser.run("localStorage.clear()")


def test_eight_ranks_open_in_two_seconds_and_pan_at_sixty_frames(browser: Browser, pages: dict[str, Path]) -> None:
    """Three times as long is allowed here, for the best of several tries: the machine is shared and draws without a GPU."""
    assert min(browser.open(pages["large"]) for _ in range(3)) < 6
    costs = []
    for _ in range(4):
        costs.append(browser.run(PAN))
        browser.run("document.querySelector('[data-do=in]').click()")
    assert min(costs) < 16.7, "one drawn frame, in milliseconds"


def test_keys_zoom_pan_and_go_through_exposed_intervals_and_operations(browser: Browser) -> None:
    span = "window.counterpointPage.span()"
    browser.run("document.getElementById('view').focus()")
    whole = browser.run(span)
    browser.key("+")
    half = browser.run(span)
    assert half[1] - half[0] == pytest.approx((whole[1] - whole[0]) / 2)
    browser.key("ArrowRight")
    assert browser.run(span)[0] == pytest.approx(half[0] + 0.15 * (half[1] - half[0]))
    browser.key("Home")
    assert browser.run(span) == whole
    found = []
    for key in ("n", "n", "p", "p"):
        browser.key(key)
        found.append(browser.run(CAPTION))
    assert (
        found == ["Exposed: dependent", "Exposed: starved", "Exposed: dependent", "Exposed: gap"]
        or found[:3] == found[2::-1]
    )
    browser.key("Home")
    browser.key("n")
    browser.key("ArrowDown", shift=True)
    first: dict[str, Any] = browser.run("window.counterpointPage.selected()")
    browser.key("ArrowRight", shift=True)
    second: dict[str, Any] = browser.run("window.counterpointPage.selected()")
    assert dict(first["facts"])["on"] == dict(second["facts"])["on"] == "rank 0, step 2, stream 7"
    assert first["title"] != second["title"]
    browser.key("Escape")
    assert browser.run(CAPTION) is None


def test_mouse_hovers_selects_drags_and_zooms(browser: Browser) -> None:
    x, y = middle(browser, 1, 0.005)
    browser.mouse("Moved", x, y)
    assert "cause dependent" in browser.run("document.getElementById('tip').innerText")
    for kind in ("Pressed", "Released"):
        browser.mouse(kind, x, y, button="left", clickCount=1)
    details = browser.run("document.getElementById('details').innerText")
    assert "Exposed: dependent" in details
    assert "held 132 SMs" in details
    browser.mouse("Wheel", x + 300, y, deltaX=0, deltaY=-400, modifiers=2)
    start, end = browser.run("window.counterpointPage.span()")
    assert 0 < start < end < 40_000
    browser.mouse("Pressed", x + 300, y, button="left", clickCount=1)
    browser.mouse("Moved", x + 360, y, button="left", buttons=1)
    browser.mouse("Moved", x + 400, y, button="left", buttons=1)
    browser.mouse("Released", x + 400, y, button="left", clickCount=1)
    assert browser.run("window.counterpointPage.span()")[0] < start


def test_two_fingers_zoom(browser: Browser) -> None:
    browser.size(390, 844, is_phone=True)
    browser.call("Emulation.setTouchEmulationEnabled", enabled=True)
    x, y = middle(browser, 2, 0.4)
    before = browser.run("window.counterpointPage.span()")
    for kind, gap in (("touchStart", 20), ("touchMove", 40), ("touchMove", 80), ("touchMove", 120)):
        points = [{"x": x - gap / 2, "y": y, "id": 0}, {"x": x + gap / 2, "y": y, "id": 1}]
        browser.call("Input.dispatchTouchEvent", type=kind, touchPoints=points)
    browser.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    browser.call("Emulation.setTouchEmulationEnabled", enabled=False)
    after = browser.run("window.counterpointPage.span()")
    assert after[1] - after[0] == pytest.approx((before[1] - before[0]) * 20 / 120, rel=0.05)


def test_tables_fold_sort_and_filter(browser: Browser) -> None:
    head = "document.querySelectorAll('#table-skews thead th')[1]"
    first = "document.querySelector('#table-skews tbody tr').cells[1].textContent"
    assert browser.run(SHOWN_ROWS) == 12
    assert browser.run(first) == "129 us"
    for order, text in (("descending", "129 us"), ("ascending", "100 us")):
        browser.run(f"{head}.querySelector('button').click()")
        assert browser.run(f"{head}.getAttribute('aria-sort')") == order
        assert browser.run(first) == text
    browser.run("document.querySelector('#skews .under button').click()")
    assert browser.run(SHOWN_ROWS) == 30
    browser.run(
        "(() => { const input = document.querySelector('#skews input'); input.value = '#7';"
        "input.dispatchEvent(new Event('input')); })()"
    )
    assert browser.run(SHOWN_ROWS) == 1


def test_a_row_of_the_exposed_intervals_is_shown_in_the_timeline(browser: Browser) -> None:
    browser.run("[...document.querySelectorAll('#table-exposed tbody button')].at(-1).click()")
    row = browser.run("[...document.querySelectorAll('#table-exposed tbody tr')].at(-1).cells[0].firstChild.textContent")
    assert browser.run(CAPTION) == f"Exposed: {row}"
    assert browser.run("document.activeElement.id") == "view"


def test_a_screen_reader_finds_names_for_everything(browser: Browser) -> None:
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    named = {
        "button",
        "table",
        "columnheader",
        "region",
        "application",
        "navigation",
        "searchbox",
        "image",
        "img",
        "toolbar",
    }
    unnamed = [
        node["role"]["value"]
        for node in nodes
        if not node["ignored"] and node["role"]["value"] in named and not node.get("name", {}).get("value")
    ]
    assert unnamed == []
    roles = [node["role"]["value"] for node in nodes if not node["ignored"]]
    assert {"main", "banner", "navigation", "application", "table", "heading"} <= set(roles)
    words = browser.run("document.querySelector('.words').textContent")
    assert "Rank 1, step 2: 40 ms, 60 operations on 3 streams, 4.5 ms exposed in 9 intervals: " in words
