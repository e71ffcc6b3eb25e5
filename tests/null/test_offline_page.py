"""The offline report as an HTML page."""

from __future__ import annotations

import functools
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hytrain_fx.__main__ import main
from hytrain_fx.forecast.ranks import Ranks
from hytrain_fx.forecast.report import Report, report
from hytrain_fx.forecast.tables import placement, tables

pytest.importorskip("plotly")


@functools.cache
def the_report() -> Report:
    """The report of all pages here; not made where tests are only collected."""
    return report("llama-1.3b", "rtx4090", 4096, sequence=2048)


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

    return page(the_report())


def test_the_page_has_every_cell_of_every_table(page: str) -> None:
    """Tables are those of the Markdown, in order.

    The placement of every unit is listed with its reason.
    """
    parser = Cells()
    parser.feed(page)
    assert parser.cells == [cell for table in tables(the_report()) for line in (table.heads, *table.rows) for cell in line]
    assert all(line.replace(">", "&gt;") in page for line in placement(the_report()))


def test_the_page_needs_nothing_else(page: str) -> None:
    """No script, style sheet, picture or font is loaded, and the browser is told to refuse any.

    Scripts are in the page: plotly.js, the figures, and what draws them.
    """
    parser = Cells()
    parser.feed(page)
    assert not {"link", "img", "iframe", "object", "embed", "source", "base"} & {tag for tag, _ in parser.tags}
    assert not [name for _, attributes in parser.tags for name in attributes if name in ("src", "href", "xlink:href", "srcset")]
    policy = next(of["content"] for tag, of in parser.tags if tag == "meta" and of.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    assert "http" not in policy
    style = page[page.index("<style>") : page.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style


def test_figures_have_the_numbers_of_the_report(page: str) -> None:
    """Steps by k, tokens and size, bytes by tier, and a timeline as long as the predicted step."""
    figures = figures_of(page)
    assert len(figures) == 6
    by_k, timeline, of_gpu, of_host, by_tokens, by_size = figures.values()
    assert by_k["data"][0]["y"] == [point.step_us / 1e6 for point in the_report().sweep.ks]
    assert by_k["data"][0]["x"] == [point.k for point in the_report().sweep.ks]
    assert (by_k["data"][1]["x"], by_k["data"][1]["y"]) == ([the_report().ours.k], [the_report().ours.step_us / 1e6])
    ends = [start + lasts for trace in timeline["data"] for start, lasts in zip(trace["base"], trace["x"], strict=True)]
    assert max(ends) * 1e3 == pytest.approx(the_report().ours.step_us)
    for figure, bytes_of in ((of_gpu, "device_bytes"), (of_host, "host_bytes")):
        for at, row in enumerate(the_report().rows):
            assert sum(trace["x"][at] for trace in figure["data"]) * 1e9 == pytest.approx(getattr(row.memory, bytes_of))
    for figure, points in ((by_tokens, the_report().sweep.tokens), (by_size, the_report().sweep.sizes)):
        for trace in figure["data"]:
            assert trace["customdata"] == [point.steps_us[trace["name"]] / 1e6 for point in points]
    assert by_tokens["data"][0]["x"] == [point.tokens for point in the_report().sweep.tokens]


def test_collectives_are_a_lane_of_several_gpus(page: str) -> None:
    """The timeline of ranks has their collectives, as long as predicted; one GPU's has none."""
    from hytrain_fx.forecast.page import page as page_of

    made = report("llama-1.3b", "h200", 4096, sequence=2048, ranks=Ranks(2), sweep=False)
    lanes = {}
    for name, text in (("one", page), ("ranks", page_of(made))):
        timeline = next(figure for title, figure in figures_of(text).items() if title.startswith("Timeline"))
        lanes[name] = {lane for trace in timeline["data"] for lane in trace["y"]}, timeline["layout"]["yaxis"]["categoryarray"]
        bars = [trace for trace in timeline["data"] if trace["name"] in ("reduce-scatter", "all-gather")]
        expected_us = sum(u.reduce_scatter_us + u.all_gather_us for u in made.profile.units) if name == "ranks" else 0.0
        assert sum(us for trace in bars for us in trace["x"]) * 1e3 == pytest.approx(expected_us)
    assert all("collectives" in names for names in lanes["ranks"])
    assert not any("collectives" in names for names in lanes["one"])


def figures_of(page: str) -> dict[str, Any]:
    """Every figure's JSON by title."""
    found = re.findall(r'<figcaption>(.*?)</figcaption>.*?<script type="application/json">(.*?)</script>', page, flags=re.DOTALL)
    return {title: json.loads(text) for title, text in found}


def test_the_sweep_over_k_meets_the_other_rows() -> None:
    """With every state on the device it is the row of that system, within 3%."""
    last, everything = the_report().sweep.ks[-1], the_report().rows[-1]
    assert last.k == everything.k == len(the_report().profile.units)
    assert last.step_us == pytest.approx(everything.step_us, rel=0.03)
    assert (last.device_bytes, last.fits) == (everything.memory.device_bytes, everything.fits)
    assert [point.k for point in the_report().sweep.ks] == list(range(last.k + 1))


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--html FILE` writes the page there and prints the file's name; --out too is refused."""
    file = tmp_path / "report.html"
    asked = ["report", "--model", "llama-1.3b", "--device", "rtx4090", "--tokens", "512", "--html", str(file)]
    assert main(asked) == 0
    assert capsys.readouterr().out == f"{file}\n"
    assert len(figures_of(file.read_text(encoding="utf-8"))) == 6
    assert main([*asked, "--out", str(file)]) == 2


def test_without_plotly_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line says what to install, and no file is written."""
    for name in ("plotly", "plotly.graph_objects", "plotly.offline"):
        monkeypatch.setitem(sys.modules, name, None)
    file = tmp_path / "report.html"
    assert main(["report", "--model", "llama-1.3b", "--device", "h200", "--tokens", "512", "--html", str(file)]) == 2
    told = capsys.readouterr().err
    assert "pip install hytrain-fx[report]" in told
    assert told.count("\n") == 1
    assert not file.exists()


def test_names_are_escaped(page: str) -> None:
    """A model's name is text, whatever it holds."""
    from dataclasses import replace

    from hytrain_fx.forecast.page import page as page_of

    text = page_of(replace(the_report(), model="<script>alert(1)</script>"))
    assert text.count("<script>") == page.count("<script>")
    assert "&lt;script&gt;alert" in text
