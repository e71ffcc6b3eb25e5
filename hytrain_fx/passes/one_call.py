"""What the compiler is given: the four nodes that are chained in a unit's backward, as one call.

    Before:  grad_offload = hytrain_fx.grad_offload([mm_8, view_22], 0, [5, 6])
             cpu_step = hytrain_fx.cpu_step(grad_offload, 0, [5, 6])
             gpu_step = hytrain_fx.gpu_step(cpu_step, 0, [5, 6])
             reload = hytrain_fx.reload(gpu_step, 0, [5, 6])
    After:   offload_and_step = hytrain_fx.offload_and_step([mm_8, view_22], 0, [5, 6])

Each call costs the launching thread 5 us in a loop of its own and 20 to 100 in a backward, where
its code and data have left the caches. This is no pass: it changes nothing of what happens, and
`inspect` shows the graph as the passes left it. Nodes that a user's pass has parted stay as they
are.
"""

from __future__ import annotations

from torch import fx

from hytrain_fx.passes.node_notes import after_last, insert, note
from hytrain_fx.passes.ops import CPU_STEP, GPU_STEP, GRAD_OFFLOAD, OFFLOAD_AND_STEP, RELOAD


def join_calls(graph: fx.Graph) -> int:
    """Join the nodes of each unit whose four nodes form one chain; how many units those are."""
    joined = 0
    for offload in graph.find_nodes(op="call_function", target=GRAD_OFFLOAD):
        chain = _chain_of(offload)
        if chain is None:
            continue
        with after_last(graph, [offload]):
            call = insert(graph, OFFLOAD_AND_STEP, offload.args, note(offload).unit, offload.meta["val"])
        for node in reversed(chain):
            node.replace_all_uses_with(call)
            graph.erase_node(node)
        joined += 1
    return joined


def _chain_of(offload: fx.Node) -> list[fx.Node] | None:
    """The offload, and the three nodes that take the token before them and the same rows.

    None where a pass has put another node in the chain, or has taken one away.
    """
    chain = [offload]
    for target in (CPU_STEP, GPU_STEP, RELOAD):
        found = [user for user in chain[-1].users if user.target is target and user.args == (chain[-1], *offload.args[1:])]
        if len(found) != 1:
            return None
        chain += found
    return chain
