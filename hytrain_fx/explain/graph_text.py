"""What `hytrain_fx.inspect` returns: every captured graph before and after each pass, and where our nodes stand in it.

    graphs = hytrain_fx.inspect(model)
    print(graphs)                        # one line for each graph and pass
    print(graphs.diff())                 # only the inserted nodes, in context, with unit, parameters, bytes and placement
    print(graphs.annotated(1))           # the code of graph 1, annotated
    graphs.find("h.0")                   # the nodes that act for a layer or a parameter
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hytrain_fx.cost_model.figures import bytes_text, time_text
from hytrain_fx.errors import ConfigError
from hytrain_fx.explain.graph_lines import InsertedLine, annotated_text, count_inserted, diff_text, inserted_lines
from hytrain_fx.explain.tables import shortened
from hytrain_fx.ir.task_graph import TaskGraph

if TYPE_CHECKING:
    from hytrain_fx.passes.base import PassRecord


@dataclass(frozen=True, slots=True)
class InspectedRow:
    """One managed parameter: its name and its unit's, bytes of its gradient, and where it is updated now ("cpu", "gpu")."""

    name: str
    unit: str
    grad_bytes: int
    placement: str


@dataclass(frozen=True)
class InspectedGraph:
    """One captured graph. Each record in `passes` has `name`, `notes`, `added` (nodes by operator), `duration_us`, `before` and `after`."""

    index: int
    kind: str
    passes: tuple[PassRecord, ...]

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

    def text(self, after: str) -> str:
        """Its text after the pass of this name. Raises ConfigError where no such pass ran."""
        for record in self.passes:
            if record.name == after:
                return record.after
        raise ConfigError(f"found no pass {after!r} on {self.name}; the passes are {', '.join(record.name for record in self.passes)}")

    def counts(self) -> Counter[str]:
        """Inserted nodes by operator name."""
        return count_inserted(self.after)


@dataclass(frozen=True, slots=True)
class FoundNode:
    """One inserted node: the graph it is in, its operator, its line of code, and the parameters it acts for."""

    graph: str
    op: str
    parameters: tuple[str, ...]
    line: str


@dataclass(frozen=True)
class Inspection:
    """The graphs captured so far, in order of capture. Iterate over it, or index it by number or name.

    rows          the managed parameters by row number, with their placement at the time of the call
    task_graph    the layer-level DAG of a step, a networkx graph over `TaskId`s with sizes and FLOPs
    """

    graphs: tuple[InspectedGraph, ...]
    rows: tuple[InspectedRow, ...]
    task_graph: TaskGraph

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

    def annotated(self, graph: int | str | InspectedGraph) -> str:
        """The rewritten code of a graph, with unit, parameters, bytes and placement behind each inserted node."""
        found = graph if isinstance(graph, InspectedGraph) else self[graph]
        return annotated_text(found.after, self._note)

    def diff(self, context: int = 1) -> str:
        """Only what was inserted, for all graphs: each node between `context` lines of code."""
        parts = (f"{graph.name}\n{diff_text(graph.after, self._note, context)}" for graph in self.graphs if graph.counts())
        return "\n\n".join(parts)

    def find(self, name: str) -> tuple[FoundNode, ...]:
        """The inserted nodes that act for a parameter, or for any parameter of a layer or module path.

        Raises ConfigError for a name that is none of these.
        """
        wanted = {row for row, r in enumerate(self.rows) if name in (r.name, r.unit) or r.name.startswith(f"{name}.")}
        if not wanted:
            units = tuple(dict.fromkeys(row.unit for row in self.rows))
            raise ConfigError(f"found no managed parameter or layer {name!r}; the layers are {shortened(units, 8)}")
        return tuple(
            FoundNode(graph.name, node.op, tuple(self.rows[row].name for row in node.rows), node.text.strip())
            for graph in self.graphs for node in inserted_lines(graph.after) if wanted & set(node.rows)
        )

    def __str__(self) -> str:
        if not self.graphs:
            return "no graph has been captured yet: the first call of the model captures its forward, the first backward() its backward"
        return "\n".join(line for graph in self.graphs for line in self._overview(graph))

    def _overview(self, graph: InspectedGraph) -> Iterator[str]:
        counts = ", ".join(f"{count} {op}" for op, count in graph.counts().items())
        yield f"{graph.name}: {counts or 'nothing inserted'}"
        for record in graph.passes:
            yield f"  {record.name} ({time_text(record.duration_us)}): {'; '.join(record.notes)}"

    def _note(self, node: InsertedLine) -> str:
        if not node.rows:
            return "no parameter"
        rows = [self.rows[row] for row in node.rows]
        units = shortened(tuple(dict.fromkeys(row.unit for row in rows)))
        places = Counter(row.placement for row in rows)
        place = " and ".join(name if len(places) == 1 else f"{count} {name}" for name, count in places.items())
        names = shortened([row.name.removeprefix(f"{row.unit}.") for row in rows])
        return f"{units}: {names}; {bytes_text(sum(row.grad_bytes for row in rows))}; on {place}"
