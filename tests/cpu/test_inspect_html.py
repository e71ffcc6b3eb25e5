"""The page of a 32-layer model: complete, folded by layer, and read by a browser if present."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hytrain_fx.explain.graphs.inspection import Inspection
from hytrain_fx.explain.graphs.staged_code import code_lines

from .inspected import LAYERS, Counted, inspected

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
VOID = {"meta", "input"}
MAX_FOLDED_LINES = 2 * LAYERS  # lines to scroll through before anything is unfolded


@dataclass
class Fold:
    """A <details>: its classes, summary, lines of code as (text, attributes), and folds inside."""

    classes: list[str]
    attributes: dict[str, str | None]
    summary: str = ""
    lines: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    inner: list[Fold] = field(default_factory=list)


class Page(HTMLParser):
    """Folds, tags and the text of a page; a tag that is not closed is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.folds: list[Fold] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._stack: list[str] = []
        self._open: list[Fold] = []
        self._in_code = False
        self.feed(text)
        assert self._stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if tag in VOID:
            return
        self._stack.append(tag)
        if tag == "details":
            fold = Fold((attributes.get("class") or "").split(), attributes)
            (self._open[-1].inner if self._open else self.folds).append(fold)
            self._open.append(fold)
        elif tag == "span" and "pre" in self._stack:
            self._in_code = attributes.get("class") != "origin"
            if self._in_code:
                self._open[-1].lines.append(("", attributes))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._stack.pop() == tag
        if tag == "details":
            self._open.pop()

    def handle_data(self, data: str) -> None:
        if "summary" in self._stack:
            self._open[-1].summary += data
        elif self._stack[-1:] == ["span"] and "pre" in self._stack and self._in_code:
            text, attributes = self._open[-1].lines[-1]
            self._open[-1].lines[-1] = (text + data.strip(), attributes)

    def of(self, name: str) -> list[Fold]:
        """Outer folds of a class."""
        return [fold for fold in self.folds if name in fold.classes]


@pytest.fixture(scope="module")
def model() -> Iterator[tuple[Inspection, Counted]]:
    with inspected() as found:
        yield found


@pytest.fixture(scope="module")
def text(model: tuple[Inspection, Counted]) -> str:
    return model[0].to_html()


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def test_counts_are_those_of_the_graphs(model: tuple[Inspection, Counted], page: Page) -> None:
    """Every node that torch has in a graph is a line of its listing.

    So is every node of ours, marked as such.
    """
    _, counted = model
    graphs = page.of("graph")
    assert len(graphs) == len(counted.nodes) == 2
    for fold, (name, nodes) in zip(graphs, counted.nodes.items(), strict=True):
        lines = [line for segment in fold.inner for line in segment.lines if "data-end" not in line[1]]
        assert fold.summary.split()[:3] == [name, str(nodes), "nodes;"]
        assert len(lines) == nodes
        ours = Counter(re.findall(r"ops\.hytrain_fx\.(\w+)", " ".join(line for line, of in lines if of["class"] == "ours")))
        assert ours == counted.ops[name] != Counter()
        told = {op: int(count) for count, op in re.findall(r"(\d+) (\w+)", fold.summary.partition("nodes;")[2])}
        assert told == counted.ops[name]


def test_code_is_folded_by_layer(page: Page) -> None:
    """Each layer is one fold of a graph or two, forward in forward order, backward in reverse."""
    units = ["embed", *(f"layers.{number}" for number in range(LAYERS)), "head"]
    assert [fold.summary.split()[0] for fold in page.of("layer")] == units
    forward, backward = ([segment.summary.split()[0] for segment in fold.inner] for fold in page.of("graph"))
    assert list(dict.fromkeys(forward))[-len(units):] == units
    assert list(dict.fromkeys(backward))[-len(units):] == units[::-1]
    assert max(Counter(forward).values()) <= 2
    assert max(Counter(backward).values()) <= 2


def test_every_stage_is_in_the_page(model: tuple[Inspection, Counted], page: Page) -> None:
    """The lines that are shown for a stage are the lines of that stage's text."""
    for fold, graph in zip(page.of("graph"), model[0], strict=True):
        lines = [line for segment in fold.inner for line in segment.lines]
        for stage, stage_text in enumerate(graph.stages):
            shown = [line for line, of in lines if int(of.get("data-begin") or 0) <= stage < int(of.get("data-end") or 99)]
            assert shown == [line.text for line in code_lines(stage_text)]


def test_the_page_is_small_and_opens_folded(model: tuple[Inspection, Counted], text: str, page: Page) -> None:
    """The page takes less than two texts of each graph and 5 kB a layer.

    Before unfolding there is little more than a line a layer.
    """
    assert len(text) < 2 * sum(len(graph.after) for graph in model[0]) + 5_000 * (LAYERS + 2)
    assert sum("open" not in fold.attributes for fold in page.folds) < MAX_FOLDED_LINES
    assert not any("open" in inner.attributes for fold in page.folds for inner in fold.inner)


def test_the_page_needs_nothing_else(text: str, page: Page) -> None:
    """No script, style, picture or font is loaded."""
    assert not {"link", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert not [value for _, attributes in page.tags for name, value in attributes.items() if name in ("src", "href", "xlink:href")]
    assert not re.search(r"url\((?!#)|@import|fetch\(|XMLHttp", text)


def test_figures_stand_on_the_line(model: tuple[Inspection, Counted], text: str) -> None:
    """After each inserted node come its layer, share, bytes and times.

    The predicted time stands beside a measured or a profiled one.
    """
    found, _ = model
    for graph in found:
        for node in found.nodes(graph):
            assert html.escape(node.note) in text
    offload = next(node for node in found.find("layers.9") if node.op == "grad_offload")
    assert re.fullmatch(r"layers\.9: .*; \d+% cpu \+ \d+% stream; \d+ B to the host; predicted .*, profiled .*", offload.note)
    wait = next(node for node in found.find("layers.9") if node.op == "wait")
    assert re.search(r"predicted .*, measured ", wait.note)


def test_names_are_escaped(model: tuple[Inspection, Counted]) -> None:
    """A parameter's name is text, whatever it holds."""
    found, _ = model
    rows = (replace(found.rows[0], name="</script><b>'\""), *found.rows[1:])
    text = replace(found, rows=rows).to_html("\"><b>")
    assert "<b>" not in text
    assert text.count("</script>") == Page(text).tags.count(("script", {})) + 2


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_searches_and_shows_stages(model: tuple[Inspection, Counted], tmp_path: Path) -> None:
    """Headless Chromium runs the page's script: a search leaves its layer, a stage its lines."""
    assert CHROMIUM is not None
    choose = "<script>const g = all('.graph')[1]; g.querySelector('.stage').value = '0'; show(g);</script></body>"
    file = tmp_path / "page.html"
    file.write_text(model[0].to_html("layers.7").replace("</body>", choose))
    run = subprocess.run([CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom",
                          file.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    assert '<span id="found">layers: 1, parameters: 6</span>' in run.stdout
    page = Page(run.stdout)
    assert [fold.summary.split()[0] for fold in page.of("layer") if "away" not in fold.classes] == ["layers.7"]
    forward, backward = page.of("graph")
    assert {segment.summary.split()[0] for segment in backward.inner if "away" not in segment.classes} >= {"arguments", "layers.7"}
    assert not any("ours" in (of["class"] or "") and "away" not in (of["class"] or "") for s in backward.inner for _, of in s.lines)
    assert sum("ours" in (of["class"] or "") for s in forward.inner for _, of in s.lines if "away" not in (of["class"] or "")) == LAYERS + 2
