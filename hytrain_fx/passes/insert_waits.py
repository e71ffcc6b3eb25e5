"""Wait for a unit's new weights before the first node that reads any of them: one `wait` a unit.

    Before:  mul_1 = aten.mul(mul, primals_3);  ...
             permute = aten.permute(primals_5, [1, 0]);  addmm = ...
    After:   wait = hytrain_fx.wait([primals_3, primals_5], 0, [1, 3])
             mul_1 = aten.mul(mul, primals_3);  ...
             permute = aten.permute(primals_5, [1, 0]);  addmm = ...

`wait` says that it writes the weights; that alone keeps every reader after it. It may say so only
because it comes before every reader, views included: Inductor compiles a write after a pointwise
reader wrongly.
"""

from __future__ import annotations

from torch import fx

from hytrain_fx.capture import dataflow
from hytrain_fx.passes.base import Fact, PassContext, graph_pass
from hytrain_fx.passes.node_notes import by_unit, insert, note, rows_of
from hytrain_fx.passes.ops import WAIT


@graph_pass(gives=Fact.WAITS_INSERTED, kinds=("forward", "inference"))
def insert_waits(module: fx.GraphModule, context: PassContext) -> str:
    """Insert one `wait` for each unit whose weights the graph reads or hands on.

    It comes before the first reader or view.
    """
    holder = {row: node for node in module.graph.find_nodes(op="placeholder") if (row := note(node).holds) is not None}
    read = [row for row, node in holder.items() if dataflow.readers([node])]
    groups = by_unit(read, context.unit_of)
    for unit, rows in groups.items():
        weights = [holder[row] for row in rows]
        with module.graph.inserting_before(min(user for weight in weights for user in weight.users)):
            insert(module.graph, WAIT, (weights, context.session, list(rows)), unit)
    return f"waits for {len(read)} weights of {len(groups)} units"


def waited_rows(module: fx.GraphModule) -> int:
    """How many rows the `wait` nodes of a rewritten graph name."""
    return sum(len(rows_of(node)) for node in module.graph.nodes if node.target is WAIT)
