"""Offload a unit's gradients at the node that makes the last of them: one `grad_offload` a unit.

    Before:  mm_8 = aten.mm(permute_18, view_2);  view_22 = aten.view(sum_11, [8]);  mul_27 = ...
    After:   mm_8 = aten.mm(permute_18, view_2);  view_22 = aten.view(sum_11, [8])
             grad_offload = hytrain_fx.grad_offload([mm_8, view_22], 0, [5, 6]);  mul_27 = ...

One node for each parameter would tear Inductor's fusions of bias and norm gradients apart.
"""

from __future__ import annotations

import torch
from torch import fx

from hytrain_fx.passes.base import Fact, PassContext, graph_pass
from hytrain_fx.passes.node_notes import after_last, by_unit, insert, note, rows_of
from hytrain_fx.passes.ops import GRAD_OFFLOAD, OFFLOAD_AND_STEP


@graph_pass(gives=Fact.GRADS_OFFLOADED, kinds="backward")
def insert_grad_offload(module: fx.GraphModule, context: PassContext) -> str:
    """Insert one `grad_offload` for each unit that has gradients in this graph."""
    maker = {row: node for node in module.graph.nodes for row in note(node).makes}
    groups = by_unit(tuple(maker), context.unit_of)
    for unit, rows in groups.items():
        grads = [maker[row] for row in rows]
        with after_last(module.graph, grads):
            insert(module.graph, GRAD_OFFLOAD, (grads, context.session, list(rows)), unit, _token(grads[0]))
    return f"{len(maker)} gradients of {len(groups)} units are offloaded"


def offloading_calls(module: fx.GraphModule) -> tuple[tuple[int, ...], ...]:
    """The rows of each `grad_offload` of a rewritten graph, in the order of its nodes.

    Generated code keeps this order as a rule.
    """
    return tuple(rows_of(node) for node in module.graph.nodes if node.target in (GRAD_OFFLOAD, OFFLOAD_AND_STEP))


def _token(grad: fx.Node) -> torch.Tensor:
    value: torch.Tensor = grad.meta["val"]
    return value.new_empty(0)
