"""The offline report as an HTML page."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from hytrain_fx.forecast.report import report
from hytrain_fx.forecast.tables import placement, tables

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

REPORT = report("llama-1.3b", "rtx4090", 4096, sequence=2048)


class Cells(HTMLParser):
    """Collects the texts of table cells, and every tag with its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._in_cell = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in_cell = tag in ("td", "th")
        if self._in_cell:
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_cell = False

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.cells[-1] += data


@pytest.fixture(scope="module")
def page() -> str:
    from hytrain_fx.forecast.page import page

    return page(REPORT)


def test_the_page_has_every_cell_of_every_table(page: str) -> None:
    """Tables are those of the Markdown, in order.

    The placement of every unit is listed with its reason.
    """
    parser = Cells()
    parser.feed(page)
    assert parser.cells == [cell for table in tables(REPORT) for line in (table.heads, *table.rows) for cell in line]
    assert all(line.replace(">", "&gt;") in page for line in placement(REPORT))


def test_the_page_needs_nothing_else(page: str) -> None:
    """No script, style sheet, picture or font is loaded: all links lead into the page."""
    parser = Cells()
    parser.feed(page)
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in parser.tags}
    targets = [value for _, attributes in parser.tags for name, value in attributes.items() if name in ("src", "href", "xlink:href")]
    assert all(value and value.startswith("#") for value in targets)
    assert "url(http" not in page


def test_plots_are_well_formed_and_apart(page: str) -> None:
    """Five plots, each an SVG of its own; what one defines for clipping no other uses."""
    pictures = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(pictures) == 5
    clips = []
    for picture in pictures:
        root = ElementTree.fromstring(picture)
        clips += [element.get("id") for element in root.iter() if element.tag.endswith("clipPath")]
    assert len(clips) == len(set(clips)) > 0
    assert all(row.system in pictures[0] for row in REPORT.rows)


def test_names_are_escaped() -> None:
    """A model's name is text, whatever it holds."""
    from dataclasses import replace

    from hytrain_fx.forecast.page import page

    text = page(replace(REPORT, model="<script>alert(1)</script>"))
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
