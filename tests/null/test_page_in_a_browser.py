"""The offline report's page in a real browser: it draws, shows what is under the mouse, and zooms.

Needs Chrome or Chromium: `CHROME=/path/to/chrome`, or one on PATH.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator

import pytest

from hytrain_fx.forecast.report import Report, report

from .browser import NAMES, Page, browsing, find_browser

pytest.importorskip("plotly")
BROWSER = find_browser()
pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"no browser: set CHROME, or install one of {', '.join(NAMES)}")

# The first figure is the step by k.
PLOT = "document.querySelector('.plot')"
RANGES = f"['xaxis', 'yaxis'].map(name => {PLOT}._fullLayout[name].range)"
TICKS = f"[...{PLOT}.querySelectorAll('.xtick text')].map(tick => tick.textContent)"
SHOWN = f"[...{PLOT}.querySelectorAll('.hoverlayer text')].map(text => text.textContent).join(' | ')"


@functools.cache
def the_report() -> Report:
    """The page's report; not made where there is no browser."""
    return report("llama-1.3b", "rtx4090", 4096, sequence=2048)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The page, open; the first figure is in view."""
    from hytrain_fx.forecast.page import page as page_of

    assert BROWSER is not None
    folder = tmp_path_factory.mktemp("browser")
    file = folder / "report.html"
    file.write_text(page_of(the_report()), encoding="utf-8")
    with browsing(BROWSER, folder / "profile") as opened:
        opened.open(file)
        opened.value(f"{PLOT}.scrollIntoView({{block: 'center'}})")
        yield opened


def test_every_figure_is_drawn_and_nothing_is_loaded(page: Page) -> None:
    """All six, without an error; the page's own file is the only one that is asked for."""
    drawn = "[...document.querySelectorAll('figure')].map(figure => figure.querySelectorAll('.main-svg').length > 0)"
    assert page.value(drawn) == [True] * 6
    asked = [event["params"]["request"]["url"] for event in page.events if event["method"] == "Network.requestWillBeSent"]
    assert [url for url in asked if not url.startswith(("data:", "blob:"))] == asked[:1]
    assert [event for event in page.events if event["method"] == "Runtime.exceptionThrown"] == []


def test_the_point_under_the_mouse_is_told(page: Page) -> None:
    """Its k, the step and the memory, as the report has them."""
    point = the_report().sweep.ks[3]
    x, y = middle_of_point(page, 3)
    page.mouse("mouseMoved", x + 40, y - 40)
    page.mouse("mouseMoved", x, y)
    told = re.search(r"k = (.*): (.*) s, (.*) GB on the GPU", shown := page.until(SHOWN))
    assert told is not None, shown
    assert [float(figure) for figure in told.groups()] == pytest.approx([point.k, point.step_us / 1e6, point.device_bytes / 1e9], rel=1e-3)
    assert "nothing streamed" in shown


def test_a_dragged_frame_is_zoomed_into(page: Page) -> None:
    """The axes show what was inside it, with other ticks."""
    before, ticks = page.value(RANGES), page.value(TICKS)
    (x0, y0), (x1, y1) = middle_of_point(page, 5), middle_of_point(page, 15)
    page.mouse("mouseMoved", x0, y0 + 20)
    page.mouse("mousePressed", x0, y0 + 20)
    page.mouse("mouseMoved", (x0 + x1) / 2, (y0 + y1) / 2, pressed=True)
    page.mouse("mouseMoved", x1, y1 - 20, pressed=True)
    page.mouse("mouseReleased", x1, y1 - 20)
    (left, right), (bottom, top) = page.until(f"JSON.stringify({RANGES}) != {json.dumps(compact(before))} && {RANGES}")
    assert bottom != before[1][0]
    assert top != before[1][1]
    assert page.until(f"JSON.stringify({TICKS}) != {json.dumps(compact(ticks))} && {TICKS}")
    assert (left, right) == pytest.approx((the_report().sweep.ks[5].k, the_report().sweep.ks[15].k), abs=0.2)


def middle_of_point(page: Page, number: int) -> tuple[float, float]:
    """Where in the window a point of the curve is."""
    x, y = page.value(f"(of => [of.left + of.width / 2, of.top + of.height / 2])({PLOT}.querySelectorAll('.scatterlayer .trace .point')"
                      f"[{number}].getBoundingClientRect())")
    return x, y


def compact(value: object) -> str:
    """As `JSON.stringify` has it."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
