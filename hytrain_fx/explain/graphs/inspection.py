"""What `hytrain_fx.inspect` returns.

Every captured graph before and after each pass, and where inserted nodes stand in it.

    graphs = hytrain_fx.inspect(model)
    print(graphs)                   # one line for each graph and pass
    print(graphs.diff())            # only the inserted nodes, in context, with unit, parameters,
                                    # bytes and placement
    print(graphs.annotated(1))      # the code of graph 1, annotated
    graphs.find("h.0")              # the nodes that act for a layer or a parameter
    graphs.save("graphs.html")      # one page, folded by layer; also .json, .txt and .svg (the
                                    # task graph)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hytrain_fx.errors import ConfigError
from hytrain_fx.explain.graphs.inspected_graphs import InspectedGraph, InspectedGraphs
from hytrain_fx.explain.graphs.json import inspection_json
from hytrain_fx.explain.graphs.lines import annotated_text, diff_text
from hytrain_fx.explain.graphs.page import inspection_page
from hytrain_fx.explain.graphs.task_graph_svg import task_graph_svg
from hytrain_fx.ir.figures import time_text


@dataclass(frozen=True)
class Inspection(InspectedGraphs):
    """The graphs captured so far, in order of capture, as text, page, picture and JSON.

    Iterate over it, or index it by number or name.
    """

    def annotated(self, graph: int | str | InspectedGraph) -> str:
        """The rewritten code of a graph, annotated.

        After each inserted node stand its layer, parameters, share, bytes, times and pass.
        """
        found = graph if isinstance(graph, InspectedGraph) else self[graph]
        return annotated_text(found.after, self._notes(found))

    def diff(self, context: int = 1) -> str:
        """Only what was inserted, for all graphs: each node between `context` lines of code."""
        return "\n\n".join(f"{graph.name}\n{self._diff(graph, context)}" for graph in self.graphs if graph.counts())

    def to_json(self) -> str:
        """Everything as JSON text.

        Every graph's text at every stage, inserted nodes with their figures, parameters, the task
        graph.
        """
        return inspection_json(self)

    def to_html(self, search: str = "") -> str:
        """One page that needs no other file: code folded by layer, at every stage.

        `search` is put in its search field.
        """
        return inspection_page(self, search)

    def to_svg(self) -> str:
        """The task graph as a picture, a row for each layer."""
        return task_graph_svg(self.task_graph, self.times)

    def to_text(self) -> str:
        """The overview, then the annotated code of every graph."""
        return "\n\n".join([str(self), *(f"{graph.name}\n{self.annotated(graph)}" for graph in self.graphs)])

    def save(self, path: str | Path) -> Path:
        """Write by the suffix of `path`: .html, .json, .svg or .txt.

        Raises ConfigError for another suffix.
        """
        path = Path(path)
        forms = {".html": self.to_html, ".json": self.to_json, ".svg": self.to_svg, ".txt": self.to_text}
        if path.suffix not in forms:
            raise ConfigError(f"found the suffix {path.suffix!r} of {path}, expected one of {', '.join(forms)}")
        path.write_text(forms[path.suffix](), encoding="utf-8")
        return path

    def __str__(self) -> str:
        if not self.graphs:
            return "no graph has been captured yet: the first call of the model captures its forward, the first backward() its backward"
        return "\n".join(line for graph in self.graphs for line in self._overview(graph))

    def _overview(self, graph: InspectedGraph) -> Iterator[str]:
        counts = ", ".join(f"{count} {op}" for op, count in graph.counts().items())
        yield f"{graph.name}: {len(graph.nodes)} nodes, of them {counts or 'nothing inserted'}"
        for record in graph.passes:
            yield f"  {record.name} ({time_text(record.duration_us)}): {'; '.join(record.notes)}"

    def _diff(self, graph: InspectedGraph, context: int) -> str:
        return diff_text(graph.after, self._notes(graph), context)

    def _notes(self, graph: InspectedGraph) -> dict[int, str]:
        return {node.line: self._describe(graph, node).note for node in graph.inserted}
