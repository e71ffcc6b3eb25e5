"""Inspected graphs as JSON: a figure's unit is the end of its name, `null` means not known.

    graphs        name, kind, node_count, counts; `texts` are the different texts of the graph,
                  exact; each pass says which of them it found (`before`) and left (`after`);
                  `nodes` are the inserted ones
    parameters    name, layer, elements, bytes, placement
    counts        inserted nodes of all graphs by operator
    task_graph    layers, tasks of a step under the plan in force with sizes and times, in how many
                  pieces each runs (`cuts`), edges
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from hytrain_fx.explain.graphs.inspected_graphs import InspectedGraph, InspectedGraphs
from hytrain_fx.explain.graphs.node_figures import InspectedNode


def inspection_json(inspection: InspectedGraphs) -> str:
    """The whole inspection as JSON text."""
    return json.dumps({
        "graphs": [_graph(inspection, graph) for graph in inspection],
        "parameters": [{"name": row.name, "layer": row.unit, "params": row.numel, "grad_bytes": row.grad_bytes, "placement": row.placement}
                       for row in inspection.rows],
        "counts": dict(inspection.counts()),
        "task_graph": _task_graph(inspection),
    }, indent=1)


def nodes_json(nodes: Iterable[InspectedNode]) -> str:
    """Inserted nodes, as in the graphs' `nodes`."""
    return json.dumps([asdict(node) for node in nodes], indent=1)


def _graph(inspection: InspectedGraphs, graph: InspectedGraph) -> dict[str, Any]:
    number_of = {text: number for number, text in enumerate(dict.fromkeys(graph.stages))}
    return {
        "name": graph.name, "index": graph.index, "kind": graph.kind, "node_count": len(graph.nodes), "counts": dict(graph.counts()),
        "texts": list(number_of),
        "passes": [{"name": record.name, "duration_us": record.duration_us, "notes": list(record.notes), "added": dict(record.added),
                    "rules": list(record.rules), "before": number_of[record.before], "after": number_of[record.after]}
                   for record in graph.passes],
        "nodes": [asdict(node) for node in inspection.nodes(graph)],
    }


def _task_graph(inspection: InspectedGraphs) -> dict[str, Any]:
    graph = inspection.task_graph
    return {
        "layers": [asdict(unit) for unit in graph.units],
        "tasks": [{"task": str(task), "kind": task.kind, "layer": graph.units[task.unit].name, **sizes,
                   "cuts": [asdict(cut) for cut in sizes["cuts"]]} for task, sizes in graph.dag.nodes(data=True)],
        "edges": [[str(before), str(after)] for before, after in graph.dag.edges],
    }
