"""For weights that rest on the host: where a graph needs them, and where it has read them.

A backward graph fetches a unit's weights before the first node that reads any of them:

    Before:  permute_20 = aten.permute(permute_3, [1, 0]);  mm_8 = aten.mm(tangents_1, permute_20)
    After:   fetch_1 = hytrain_fx.fetch([permute_3], 0, [permute_5, grad_offload], [3])
             permute_20 = aten.permute(permute_3, [1, 0]);  mm_8 = aten.mm(tangents_1, permute_20)

`fetch` says that it writes the weights, as `wait` does in a forward graph, and may say so for the
same reason: it comes before every reader. It names each placeholder that holds a weight or a saved
view of it, so that no reader of any of them comes first.

It also takes what came before it, for order only: a weight of the `fetch` before, and the tokens of
gradients in between. Else the compiler fuses kernels of two units, where activations are recomputed
above all, and a unit's gradients wait for the weights of the next. With sharded weights both go
from rank to rank, and all ranks need one order: the graph's.

A forward graph lets go of them after the last reader, as `release` does in a backward graph:

    Before:  addmm_1 = aten.addmm(primals_6, view_4, permute_1);  view_5 = ...
    After:   addmm_1 = aten.addmm(primals_6, view_4, permute_1)
             let_go = hytrain_fx.let_go([addmm_1], 0, [5]);  view_5 = ...

What is saved for the backward is an output, and no reader: the backward fetches it again. Weights
with a reader that may be inlined (an embedding's) are kept until the graph has run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from torch import fx

from hytrain_fx.capture import dataflow
from hytrain_fx.passes.base import Fact, GraphPass, PassContext, graph_pass
from hytrain_fx.passes.insert_release import NO_READERS, insert_after_readers
from hytrain_fx.passes.node_notes import by_unit, insert, rows_of
from hytrain_fx.passes.ops import FETCH, GRAD_OFFLOAD, LET_GO, OFFLOAD_AND_STEP, WAIT

_AFTER: Final = 2  # position among the operands of a `fetch`

NO_FORWARD_READERS: Final[frozenset[object]] = frozenset({WAIT, LET_GO, "output"})


@graph_pass(needs=Fact.GRADS_OFFLOADED, gives=Fact.FETCHES_INSERTED, kinds="backward")
def insert_fetches(module: fx.GraphModule, context: PassContext) -> str:
    """Insert one `fetch` for each unit whose weights a backward graph reads.

    They keep their order, and that with the gradients before them.
    """
    groups = by_unit(fetched_rows(context), context.unit_of)
    for unit, rows in groups.items():
        holders = [holder for row in rows for holder in context.graph.holders(row)]
        with module.graph.inserting_before(min(user for holder in holders for user in holder.users)):
            insert(module.graph, FETCH, (holders, context.session, [], list(rows)), unit)
    for fetch, before in coming_before(module.graph):
        fetch.update_arg(_AFTER, before)
    return f"fetches {sum(map(len, groups.values()))} weights of {len(groups)} units"


def coming_before(graph: fx.Graph) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """Each `fetch`, with what it is to take for order only.

    That is a weight that the `fetch` before it writes, and each gradient's token in between.
    """
    before: list[fx.Node] = []
    for node in graph.nodes:
        if node.target is GRAD_OFFLOAD:
            before.append(node)
        elif node.target is FETCH:
            yield node, before
            weights: Any = node.args[0]
            before = list(weights[:1])


def fetched_rows(context: PassContext) -> tuple[int, ...]:
    """Rows whose weight a backward graph reads."""
    return tuple(row for row in context.graph.held_rows if dataflow.readers(context.graph.holders(row), NO_READERS))


@graph_pass(needs=Fact.WAITS_INSERTED, gives=Fact.LET_GO, kinds=("forward", "inference"))
def insert_let_go(module: fx.GraphModule, context: PassContext) -> str:
    """Insert one `let_go` for each unit with rows whose readers can be shown to have run."""
    found = {row: dataflow.standalone_readers([holder], NO_FORWARD_READERS) for row, holder in context.graph.weights.items()}
    shown = {row: readers for row, readers in found.items() if readers}
    units = insert_after_readers(module, context, LET_GO, shown, {})
    return f"lets go of {len(shown)} weights of {units} units before the end"


STREAMED_PASSES: Final[tuple[GraphPass, ...]] = (insert_fetches, insert_let_go)
"""What runs besides `DEFAULT_PASSES` where weights are streamed."""


def fetching_calls(module: fx.GraphModule) -> tuple[tuple[tuple[int, ...], int], ...]:
    """The rows of each `fetch` or `wait` node of a rewritten graph, in order.

    And how many nodes that take gradients stand before it.
    """
    found, gradients = [], 0
    for node in module.graph.nodes:
        gradients += node.target in (GRAD_OFFLOAD, OFFLOAD_AND_STEP)
        if node.target in (FETCH, WAIT):
            found.append((rows_of(node), gradients))
    return tuple(found)
