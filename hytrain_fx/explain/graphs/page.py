"""Inspected graphs as one HTML page without other files.

The task graph, a fold for each layer, and each graph's code folded by layer.

A graph's listing holds the lines of all its stages (`staged_code`); the page's script shows those
of the chosen one. Without the script every line is there, and folds work.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hytrain_fx.explain.graphs.inspected_graphs import InspectedGraph, InspectedGraphs
from hytrain_fx.explain.graphs.node_figures import InspectedNode, InspectedRow
from hytrain_fx.explain.graphs.staged_code import StagedLine, staged
from hytrain_fx.explain.graphs.task_graph_svg import task_graph_svg
from hytrain_fx.explain.template import render
from hytrain_fx.ir.figures import bytes_text, count_text, time_text
from hytrain_fx.ir.pass_record import NodeNote

ARGUMENTS = "arguments"
_NO_LAYER = "before any layer"


@dataclass(frozen=True, slots=True)
class PageLine:
    """A line of code.

    With it: what is noted of it, the operator that a pass inserted with it, the stages that have
    it, the rows it is about.
    """

    text: str
    note: str
    origin: str
    op: str
    begin: int
    end: int | None
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring lines of one layer: a fold.

    `ops` counts its inserted nodes; a search finds it by `layers`.
    """

    title: str
    layers: tuple[str, ...]
    lines: tuple[PageLine, ...]
    ops: Mapping[str, int]

    @property
    def nodes(self) -> int:
        """Lines of the last stage."""
        return sum(line.end is None for line in self.lines)


@dataclass(frozen=True, slots=True)
class PageGraph:
    """One graph: its stages ("as captured", then the passes) and its folds."""

    graph: InspectedGraph
    stages: tuple[str, ...]
    segments: tuple[Segment, ...]
    counts: str


@dataclass(frozen=True, slots=True)
class PageLayer:
    """One layer: its parameters, and the inserted nodes of all graphs that act for it."""

    name: str
    summary: str
    rows: tuple[InspectedRow, ...]
    nodes: tuple[InspectedNode, ...]


def inspection_page(inspection: InspectedGraphs, search: str = "") -> str:
    """The page's text; `search` stands in its search field when it opens."""
    layers = list(page_layers(inspection))
    graphs = [page_graph(inspection, graph) for graph in inspection]
    names = {layer.name: [row.name for row in layer.rows] for layer in layers}
    svg = task_graph_svg(inspection.task_graph, inspection.times)
    return render("inspection.html", graphs=graphs, layers=layers, names=names, search=search, svg=svg,
                  rows=[row.name for row in inspection.rows], counts=_words(inspection.counts()), time_text=time_text,
                  bytes_text=bytes_text, count_text=count_text, overview=_overview(inspection))


def page_layers(inspection: InspectedGraphs) -> Iterator[PageLayer]:
    """The layers in forward order."""
    nodes = [node for graph in inspection for node in inspection.nodes(graph)]
    for unit in inspection.task_graph.units:
        rows = tuple(row for row in inspection.rows if row.unit == unit.name)
        own = tuple(node for node in nodes if unit.name in node.layers)
        place = " + ".join(dict.fromkeys(place for row in rows for place in row.placed))
        waits = [node.times for node in own if node.op == "wait" and node.times][:1]
        parts = [f"{count_text(unit.params)} parameters", f"on {place}", f"nodes: {len(own)}", *(f"wait {times}" for times in waits)]
        yield PageLayer(unit.name, "; ".join(parts), rows, own)


def page_graph(inspection: InspectedGraphs, graph: InspectedGraph) -> PageGraph:
    """The graph's lines at all stages, in folds by layer."""
    lines = staged(graph.stages)
    units = list(_titles(lines, graph.nodes, inspection.unit_names))
    by_name = {_name_of(node.line): node for node in inspection.nodes(graph)}
    segments = []
    for title, group in itertools.groupby(zip(units, lines, strict=True), key=lambda pair: pair[0]):
        found = tuple(_page_line(inspection, one, graph.nodes, by_name) for _, one in group)
        segments.append(_segment(inspection, title, found))
    return PageGraph(graph, ("as captured", *(f"after {record.name}" for record in graph.passes)), tuple(segments), _words(graph.counts()))


def _titles(lines: Sequence[StagedLine], notes: Mapping[str, NodeNote], names: Sequence[str]) -> Iterator[str]:
    """The fold of each line.

    It is its layer's, or the fold of the line before where nothing is noted of it.
    """
    title = _NO_LAYER
    for one in lines:
        noted = notes.get(one.line.name)
        if one.line.is_argument:
            yield ARGUMENTS
            continue
        if noted is not None and noted.unit is not None:
            title = names[noted.unit]
        yield title


def _page_line(
    inspection: InspectedGraphs, one: StagedLine, notes: Mapping[str, NodeNote], inserted: Mapping[str, InspectedNode]
) -> PageLine:
    ours = inserted.get(one.line.name) if one.begin else None
    if ours is not None:
        return PageLine(one.line.text, ours.note, "", ours.op, one.begin, one.end, ours.rows)
    noted = notes.get(one.line.name)
    words: dict[str, tuple[int, ...]] = {}
    if noted is not None:
        words = {"holds": () if noted.holds is None else (noted.holds,), "reads": noted.reads, "makes the gradient of": noted.makes}
    note = "; ".join(f"{word} {', '.join(inspection.rows[row].name for row in rows)}" for word, rows in words.items() if rows)
    rows = tuple(dict.fromkeys(row for found in words.values() for row in found))
    return PageLine(one.line.text, note, one.line.origin, "", one.begin, one.end, rows)


def _segment(inspection: InspectedGraphs, title: str, lines: tuple[PageLine, ...]) -> Segment:
    ops = Counter(line.op for line in lines if line.op and line.end is None)
    about = dict.fromkeys(inspection.rows[row].unit for line in lines for row in line.rows)
    own = (title,) if title not in (ARGUMENTS, _NO_LAYER) else ()
    return Segment(title, tuple(dict.fromkeys((*own, *about))), lines, ops)


def _name_of(line: str) -> str:
    return line.split(" ", 1)[0].rstrip(":")


def _words(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {op}" for op, count in counts.items()) or "nothing inserted"


def _overview(inspection: InspectedGraphs) -> str:
    nodes = sum(len(graph.nodes) for graph in inspection)
    elements = sum(row.numel for row in inspection.rows)
    layers, inserted = len(inspection.task_graph.units), sum(inspection.counts().values())
    return f"{count_text(elements)} parameters in {layers} layers; {len(inspection)} graphs with {nodes} nodes, of them {inserted} inserted"
