"""Say, at the last call that reads a unit's weights, that they may be overwritten.

    Before:  mm_9 = aten.mm(view_24, permute_21);  view_26 = aten.view(mm_9, [2, 5, 8])
    After:   mm_9 = aten.mm(view_24, permute_21)
             release = hytrain_fx.release([mm_9], 0, [3, 4]);  view_26 = aten.view(mm_9, [2, 5, 8])

Only weights whose readers all stand alone (`dataflow.standalone_readers`) are released here: the
release takes readers' results, so it cannot run before them. Of the readers it takes the fewest
that need all the others, so that no buffer lives longer for it; of a product that Inductor joins
with a sum, the sum. An `addmm` that Inductor would take apart is taken apart here, for a release of
its product (`dataflow.ProductsAndSums`). A weight that this backward does not read (a bias) goes
with its unit's readers, or else with its unit's gradients. What has an inlined reader (a norm's
weight) is left to `backward_end`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from hytrain_fx.capture import dataflow
from hytrain_fx.passes.base import Fact, PassContext, graph_pass
from hytrain_fx.passes.node_notes import after_last, by_unit, insert, note
from hytrain_fx.passes.ops import BACKWARD_END, FETCH, GRAD_OFFLOAD, RELEASE
from hytrain_fx.torch_private.operators import fake_result

aten = torch.ops.aten

# they take tensors for order only
NO_READERS: frozenset[object] = frozenset({RELEASE, BACKWARD_END, FETCH})


@graph_pass(needs=Fact.GRADS_OFFLOADED, gives=Fact.RELEASED, kinds="backward")
def insert_release(module: fx.GraphModule, context: PassContext) -> str:
    """Insert one `release` for each unit with rows that can be released before the end."""
    tokens = {note(node).unit: node for node in module.graph.find_nodes(op="call_function", target=GRAD_OFFLOAD)}
    rows = released_rows(context)
    found = {row: dataflow.standalone_readers(context.graph.holders(row), NO_READERS) for row in rows}
    shown = {row: readers for row, readers in found.items() if readers is not None}
    insert_after_readers(module, context, RELEASE, shown, tokens)
    return f"{len(shown)} of {len(rows)} rows are released before the end of the backward"


def insert_after_readers(
    module: fx.GraphModule, context: PassContext, target: Any, shown: Mapping[int, Sequence[fx.Node]], otherwise: Mapping[int | None, Any]
) -> int:
    """Insert one call of `target` for each unit, which takes its readers' results; how many.

    shown        by row: its readers
    otherwise    by unit: what the call takes where no reader of its rows has a result
    """
    choices = dataflow.ProductsAndSums.of(module.graph, NO_READERS)
    shown = _taken_apart(module.graph, shown, choices.apart)
    order, groups = dataflow.Order.of(module.graph), by_unit(list(shown), context.unit_of)
    for unit, rows in groups.items():
        readers = order.frontier([reader for row in rows for reader in shown[row]])
        shown_by = dict.fromkeys(choices.sums.get(reader, reader) for reader in readers)
        results = [result for node in shown_by if (result := dataflow.result_tensor(node)) is not None] or [otherwise[unit]]
        with after_last(module.graph, results):
            insert(module.graph, target, (results, context.session, list(rows)), unit)
    return len(groups)


def _taken_apart(graph: fx.Graph, shown: Mapping[int, Sequence[fx.Node]], apart: Container[fx.Node]) -> dict[int, list[fx.Node]]:
    """These readers, with the product of each `addmm` that Inductor takes apart instead of it."""
    product_of: dict[fx.Node, fx.Node] = {}
    for reader in dict.fromkeys(reader for readers in shown.values() for reader in readers):
        if reader in apart:
            addend, left, right = reader.args
            with graph.inserting_before(reader):
                product_of[reader] = product = _called(graph, aten.mm.default, left, right)
                scaled = _scaled(graph, product, reader.kwargs.get("alpha", 1))
                total = _called(graph, aten.add.Tensor, _scaled(graph, addend, reader.kwargs.get("beta", 1)), scaled)
            reader.replace_all_uses_with(total)
    return {row: [product_of.get(reader, reader) for reader in readers] for row, readers in shown.items()}


def _scaled(graph: fx.Graph, node: Any, factor: Any) -> Any:
    return node if factor == 1 else _called(graph, aten.mul.Tensor, node, factor)


def _called(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = fake_result(node)
    return node


def released_rows(context: PassContext) -> tuple[int, ...]:
    """Rows that a backward graph releases: those it offloads, and those it only reads."""
    held = (row for row in context.graph.held_rows if dataflow.readers(context.graph.holders(row), NO_READERS))
    return tuple(sorted({*context.graph.grads, *held}))
