"""Every captured graph, before and after each pass, and where inserted nodes stand in it.

Values and questions only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from hytrain_fx.errors import ConfigError
from hytrain_fx.explain.graphs.lines import InsertedLine, count_inserted, inserted_lines
from hytrain_fx.explain.graphs.node_figures import InspectedNode, InspectedRow, UnitTimes, describe
from hytrain_fx.ir.figures import shortened
from hytrain_fx.ir.pass_record import NodeNote, PassRecord
from hytrain_fx.ir.task_graph import TaskGraph


@dataclass(frozen=True)
class InspectedGraph:
    """One captured graph.

    Each record in `passes` has `name`, `notes`, `added` (nodes by operator), `duration_us`,
    `before` and `after`.

    nodes    every node after the last pass, by name in graph order: the unit whose work it is, rows
             it holds, reads and makes gradients of, and the pass that made it
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

    @property
    def inserted(self) -> tuple[InsertedLine, ...]:
        """The lines of `after` whose nodes a pass made, in order."""
        return tuple(inserted_lines(self.after, {name for name, noted in self.nodes.items() if noted.made_by}))

    def counts(self) -> Counter[str]:
        """Inserted nodes by operator name."""
        return count_inserted(self.inserted)


@dataclass(frozen=True)
class InspectedGraphs:
    """The graphs captured so far, in order of capture.

    Iterate over it, or index it by number or name.

    rows          the managed parameters by row number, with their placement at the time of the call
    task_graph    the layer-level DAG of a step under the plan in force; its `dag` is a networkx
                  graph over `TaskId`s with sizes, FLOPs and times
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
        return tuple(self._describe(found, node) for node in found.inserted)

    def find(self, name: str) -> tuple[InspectedNode, ...]:
        """The inserted nodes that act for a parameter, or for any parameter of a layer or module.

        Raises ConfigError for a name that is none of these.
        """
        wanted = {row for row, r in enumerate(self.rows) if name in (r.name, r.unit) or r.name.startswith(f"{name}.")}
        if not wanted:
            units = tuple(dict.fromkeys(row.unit for row in self.rows))
            raise ConfigError(f"found no managed parameter or layer {name!r}; the layers are {shortened(units, 8)}")
        return tuple(node for graph in self.graphs for node in self.nodes(graph) if wanted & set(node.rows))

    def _describe(self, graph: InspectedGraph, node: InsertedLine) -> InspectedNode:
        # times are those of a training step
        times = {} if graph.kind == "inference" else self.times
        return describe(graph.name, node, graph.nodes.get(node.name, NodeNote()), self.unit_names, self.rows, times)
