"""Return None for each offloaded gradient, so that its buffer dies as soon as it is offloaded.

    Before:  return (add_14, None, sum_15, mm_10)          # user_visible_output_idxs [0, 2, 3]
    After:   return (None, None, None, mm_10)              # user_visible_output_idxs [3]

What the output node's meta says of each output goes with it: on CUDA, Inductor's padding pass fails
on a visible output that is None.
"""

from __future__ import annotations

from torch import fx

from hytrain_fx.passes.base import Fact, PassContext, graph_pass

_POSITIONS = "user_visible_output_idxs"  # positions of outputs whose strides Inductor must keep
# an entry for each output; "desc" keeps its entries: callers are told by it
_PER_OUTPUT = ("output_stack_traces", "original_output_strides")


@graph_pass(needs={Fact.GRADS_OFFLOADED, Fact.BACKWARD_ENDED}, gives=Fact.OUTPUTS_DROPPED, kinds="backward")
def drop_grad_outputs(module: fx.GraphModule, context: PassContext) -> str:
    """Make offloaded gradients None among the outputs, and in the output node's meta."""
    gone = set(context.graph.grads.values())
    output = module.graph.output_node()
    values = [None if i in gone else value for i, value in enumerate(context.graph.outputs)]
    output.args = (tuple(values),)
    if _POSITIONS in output.meta:
        output.meta[_POSITIONS] = [i for i in output.meta[_POSITIONS] if i not in gone]
    for key in _PER_OUTPUT:
        if key in output.meta:
            output.meta[key] = [None if i in gone else entry for i, entry in enumerate(output.meta[key])]
    return f"{len(gone)} of {len(values)} outputs are None now"
