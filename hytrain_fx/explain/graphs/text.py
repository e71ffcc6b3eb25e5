"""What `hytrain_fx.inspect` returns: every captured graph before and after each pass, and where our nodes stand in it.

    graphs = hytrain_fx.inspect(model)
    print(graphs)                        # one line for each graph and pass
    print(graphs.diff())                 # only the inserted nodes, in context, with unit, parameters, bytes and placement
    print(graphs.annotated(1))           # the code of graph 1, annotated
    graphs.find("h.0")                   # the nodes that act for a layer or a parameter
    graphs.save("graphs.html")           # one page, folded by layer; also .json, .txt and .svg (the task graph)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hytrain_fx.errors import ConfigError
from hytrain_fx.explain.graphs.lines import InsertedLine, annotated_text, count_inserted, diff_text, inserted_lines
from hytrain_fx.explain.graphs.node_figures import InspectedNode, InspectedRow, UnitTimes, describe
from hytrain_fx.ir.figures import shortened, time_text
from hytrain_fx.ir.task_graph import TaskGraph

if TYPE_CHECKING:
    from hytrain_fx.passes.base import NodeNote, PassRecord


@dataclass(frozen=True)
class InspectedGraph:
    """One captured graph. Each record in `passes` has `name`, `notes`, `added` (nodes by operator), `duration_us`, `before` and `after`.

    nodes    every node after the last pass, by name in graph order: the unit whose work it is, rows it holds, reads and makes gradients of
    """

    index: int
    kind: str
    passes: tuple[PassRecord, ...]
    nodes: Mapping[str, NodeNote] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """`01.backward`, as in dump file names."""
        return f"{self.index:02}.{self.kind}"

    @property
    def before(self) -> str:
        """The graph's Python text as captured."""
        return self.passes[0].before if self.passes else ""

    @property
    def after(self) -> str:
        """Its text after the last pass: what Inductor compiles."""
        return self.passes[-1].after if self.passes else ""

    @property
    def stages(self) -> tuple[str, ...]:
        """The texts as captured and after each pass."""
        return (self.before, *(record.after for record in self.passes))

    def text(self, after: str) -> str:
        """Its text after the pass of this name. Raises ConfigError where no such pass ran."""
        for record in self.passes:
            if record.name == after:
                return record.after
        raise ConfigError(f"found no pass {after!r} on {self.name}; the passes are {', '.join(record.name for record in self.passes)}")

    def counts(self) -> Counter[str]:
        """Inserted nodes by operator name."""
        return count_inserted(self.after)


@dataclass(frozen=True)
class Inspection:
    """The graphs captured so far, in order of capture. Iterate over it, or index it by number or name.

    rows          the managed parameters by row number, with their placement at the time of the call
    task_graph    the layer-level DAG of a step, a networkx graph over `TaskId`s with sizes and FLOPs
    unit_names    by the unit number that `InspectedGraph.nodes` has
    times         what is known of each unit's times, by its name
    """

    graphs: tuple[InspectedGraph, ...]
    rows: tuple[InspectedRow, ...]
    task_graph: TaskGraph
    unit_names: tuple[str, ...] = ()
    times: Mapping[str, UnitTimes] = field(default_factory=dict)

    def __iter__(self) -> Iterator[InspectedGraph]:
        return iter(self.graphs)

    def __len__(self) -> int:
        return len(self.graphs)

    def __getitem__(self, which: int | str) -> InspectedGraph:
        """A graph by number or name ("01.backward"). Raises ConfigError where there is none."""
        for graph in self.graphs:
            if which in (graph.index, graph.name):
                return graph
        names = ", ".join(graph.name for graph in self.graphs)
        raise ConfigError(f"found no graph {which!r}; captured are {names or 'none yet: run a step first'}")

    def counts(self) -> Counter[str]:
        """Inserted nodes of all graphs by operator name."""
        return sum((graph.counts() for graph in self.graphs), Counter[str]())

    def nodes(self, graph: int | str | InspectedGraph) -> tuple[InspectedNode, ...]:
        """The inserted nodes of a graph, in order, with layers, shares, bytes and times."""
        found = graph if isinstance(graph, InspectedGraph) else self[graph]
        return tuple(self._describe(found, node) for node in inserted_lines(found.after))

    def annotated(self, graph: int | str | InspectedGraph) -> str:
        """The rewritten code of a graph; behind each inserted node its layer, parameters, share, bytes and times."""
        found = graph if isinstance(graph, InspectedGraph) else self[graph]
        return annotated_text(found.after, lambda node: self._describe(found, node).note)

    def diff(self, context: int = 1) -> str:
        """Only what was inserted, for all graphs: each node between `context` lines of code."""
        return "\n\n".join(f"{graph.name}\n{self._diff(graph, context)}" for graph in self.graphs if graph.counts())

    def find(self, name: str) -> tuple[InspectedNode, ...]:
        """The inserted nodes that act for a parameter, or for any parameter of a layer or module path.

        Raises ConfigError for a name that is none of these.
        """
        wanted = {row for row, r in enumerate(self.rows) if name in (r.name, r.unit) or r.name.startswith(f"{name}.")}
        if not wanted:
            units = tuple(dict.fromkeys(row.unit for row in self.rows))
            raise ConfigError(f"found no managed parameter or layer {name!r}; the layers are {shortened(units, 8)}")
        return tuple(node for graph in self.graphs for node in self.nodes(graph) if wanted & set(node.rows))

    def to_json(self) -> str:
        """Everything as JSON text: every graph's text at every stage, inserted nodes with their figures, parameters, the task graph."""
        from hytrain_fx.explain.graphs.json import inspection_json

        return inspection_json(self)

    def to_html(self, search: str = "") -> str:
        """One page that needs no other file: code folded by layer, at every stage; `search` is put in its search field."""
        from hytrain_fx.explain.graphs.page import inspection_page

        return inspection_page(self, search)

    def to_svg(self) -> str:
        """The task graph as a picture, a row for each layer."""
        from hytrain_fx.explain.graphs.task_graph_svg import task_graph_svg

        return task_graph_svg(self.task_graph, self.rows, self.times)

    def to_text(self) -> str:
        """The overview, then the annotated code of every graph."""
        return "\n\n".join([str(self), *(f"{graph.name}\n{self.annotated(graph)}" for graph in self.graphs)])

    def save(self, path: str | Path) -> Path:
        """Write by the suffix of `path`: .html, .json, .svg or .txt. Raises ConfigError for another one."""
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
        return diff_text(graph.after, lambda node: self._describe(graph, node).note, context)

    def _describe(self, graph: InspectedGraph, node: InsertedLine) -> InspectedNode:
        times = {} if graph.kind == "inference" else self.times  # times are those of a training step
        return describe(graph.name, node.op, node.rows, node.text.strip(), self.rows, times)
