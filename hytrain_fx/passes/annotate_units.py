"""Say of each node which rows it holds, reads and makes the gradient of, and of which unit it is.

    Before:  primals_5;  mm_9 = aten.mm(view_24, permute_21);  mm_10 = aten.mm(permute_22, view)
    After:   primals_5   # unit 1, holds 3
             mm_9 = aten.mm(view_24, permute_21)   # unit 1, reads (3,)
             mm_10 = aten.mm(permute_22, view)   # unit 1, makes (3,)

A node that touches no weight belongs to the unit of the node before it.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from hytrain_fx.capture import dataflow
from hytrain_fx.ir.pass_record import NodeNote
from hytrain_fx.passes.base import Fact, PassContext, graph_pass
from hytrain_fx.passes.node_notes import NOTE_KEY, note


@graph_pass(needs=(), gives=Fact.ANNOTATED)
def annotate_units(module: fx.GraphModule, context: PassContext) -> str:
    """Set `node.meta["hytrain_fx"]`, a `NodeNote`, on every node, in graph order.

    Nothing else changes.
    """
    holds = {holder: row for row in context.graph.held_rows for holder in context.graph.holders(row)}
    reads = _rows_read(context)
    makes = _rows_made(context)
    unit: int | None = None
    for node in module.graph.nodes:
        touched = (*reads.get(node, ()), *makes.get(node, ()))
        if touched and node.op != "output":
            unit = context.unit_of[touched[0]]
        own = context.unit_of[holds[node]] if node in holds else unit
        node.meta[NOTE_KEY] = NodeNote(own, holds.get(node), reads.get(node, ()), makes.get(node, ()), note(node).made_by)
    return f"{len(holds)} placeholders hold weights, {len(reads)} nodes read them, {len(makes)} make gradients"


def _rows_read(context: PassContext) -> Mapping[fx.Node, tuple[int, ...]]:
    found: dict[fx.Node, list[int]] = {}
    for row in context.graph.held_rows:
        for reader in dataflow.readers(context.graph.holders(row)):
            found.setdefault(reader, []).append(row)
    return {node: tuple(rows) for node, rows in found.items()}


def _rows_made(context: PassContext) -> Mapping[fx.Node, tuple[int, ...]]:
    found: dict[fx.Node, list[int]] = {}
    for row in sorted(context.graph.grads):
        found.setdefault(context.graph.gradient(row), []).append(row)
    return {node: tuple(rows) for node, rows in found.items()}
