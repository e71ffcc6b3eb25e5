"""Arm the updates after each offload.

Which of a unit's rows each update takes is read from the plan at run time.

    Before:  grad_offload = hytrain_fx.grad_offload([mm_8, view_22], 0, [5, 6])
    After:   grad_offload = hytrain_fx.grad_offload([mm_8, view_22], 0, [5, 6])
             cpu_step = hytrain_fx.cpu_step(grad_offload, 0, [5, 6])
             gpu_step = hytrain_fx.gpu_step(cpu_step, 0, [5, 6])
"""

from __future__ import annotations

from torch import fx

from hytrain_fx.passes.base import Fact, PassContext, graph_pass
from hytrain_fx.passes.node_notes import after_last, insert, note, rows_of
from hytrain_fx.passes.ops import CPU_STEP, GPU_STEP, GRAD_OFFLOAD, RELOAD


@graph_pass(needs=Fact.GRADS_OFFLOADED, gives=Fact.STEPS_INSERTED, kinds="backward")
def insert_steps(module: fx.GraphModule, context: PassContext) -> str:
    """Insert a `cpu_step` and a `gpu_step` after each `grad_offload`; one token links them."""
    offloads = module.graph.find_nodes(op="call_function", target=GRAD_OFFLOAD)
    for offload in offloads:
        token, rows, unit = offload, list(rows_of(offload)), note(offload).unit
        for target in (CPU_STEP, GPU_STEP):
            with after_last(module.graph, [token]):
                token = insert(module.graph, target, (token, context.session, rows), unit, offload.meta["val"].new_empty(0))
    return f"updates armed after {len(offloads)} offloads"


# ---- Arm the copy of new weights to the device after each unit's updates ----
#
#     Before:  gpu_step = hytrain_fx.gpu_step(cpu_step, 0, [5, 6])
#     After:   gpu_step = hytrain_fx.gpu_step(cpu_step, 0, [5, 6])
#              reload = hytrain_fx.reload(gpu_step, 0, [5, 6])
#
# The copy itself starts when the rows are updated and released.


@graph_pass(needs=Fact.STEPS_INSERTED, gives=Fact.RELOADS_INSERTED, kinds="backward")
def insert_reload(module: fx.GraphModule, context: PassContext) -> str:
    """Insert a `reload` after each `gpu_step`."""
    steps = module.graph.find_nodes(op="call_function", target=GPU_STEP)
    for step in steps:
        with after_last(module.graph, [step]):
            insert(module.graph, RELOAD, (step, context.session, list(rows_of(step))), note(step).unit)
    return f"{len(steps)} reloads armed"
