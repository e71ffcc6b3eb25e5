"""End a backward graph with one node that runs after everything else and releases what is left.

    Before:  ...;  return (tangent_of_input, sum_15, mm_10)
    After:   ...;  backward_end = hytrain_fx.backward_end(
                 [tangent_of_input, gpu_step, gpu_step_1], 0, 1, [0, 2])
             return (tangent_of_input, sum_15, mm_10)

Whatever a backward graph computes ends in an output or in an operator whose result nobody takes;
`backward_end` takes all of these, so it comes after each kernel, whatever Inductor has inlined
where.
"""

from __future__ import annotations

import torch
from torch import fx

from hytrain_fx.passes.base import Fact, PassContext, graph_pass
from hytrain_fx.passes.insert_release import released_rows
from hytrain_fx.passes.node_notes import insert, rows_of
from hytrain_fx.passes.ops import BACKWARD_END, GPU_STEP, RELEASE


@graph_pass(needs={Fact.RELEASED, Fact.STEPS_INSERTED, Fact.RELOADS_INSERTED}, gives=Fact.BACKWARD_ENDED, kinds="backward")
def insert_backward_end(module: fx.GraphModule, context: PassContext) -> str:
    """Insert one `backward_end` before the output node.

    A graph without managed rows stays unchanged.
    """
    rows = released_rows(context)
    early = {row for node in module.graph.find_nodes(op="call_function", target=RELEASE) for row in rows_of(node)}
    left = [row for row in rows if row not in early]
    if not rows:
        return "no managed row"
    with module.graph.inserting_before(module.graph.output_node()):
        args = (_last_nodes(module.graph, context), context.session, context.graph.index, left)
        insert(module.graph, BACKWARD_END, args, None)
    return f"{len(left)} rows are released by the end of the backward"


def _last_nodes(graph: fx.Graph, context: PassContext) -> list[fx.Node]:
    """Tensors that are made after everything.

    These are the outputs that stay, the last tokens, and results that nobody takes.
    """
    offloaded = set(context.graph.grads.values())
    stay = [node for i, node in enumerate(context.graph.outputs) if isinstance(node, fx.Node) and i not in offloaded]
    tokens = graph.find_nodes(op="call_function", target=GPU_STEP)
    untaken = [node for node in graph.nodes if node.op == "call_function" and not node.users and node.is_impure()]
    found = dict.fromkeys(node for node in (*stay, *tokens, *untaken) if isinstance(node.meta.get("val"), torch.Tensor))
    return [node for node in found if node.op != "placeholder"] or [_any_tensor(graph)]


def _any_tensor(graph: fx.Graph) -> fx.Node:
    """Something to hold on to in a graph whose outputs are all inputs; nothing is made there."""
    tensors: list[fx.Node] = [node for node in graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    return tensors[0]
