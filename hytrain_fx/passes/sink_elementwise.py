"""Compute an elementwise value right before its first reader, where only such ops read it.

    Before:  s = sigmoid(c);  a = mul(g2, s);  g1 = mm(...);  b = mul(g1, s);  t = add(a, b);  ...
    After:   g1 = mm(...);  s = sigmoid(c);  a = mul(g2, s);  b = mul(g1, s);  t = add(a, b);  ...

The gradient of what all layers share, a condition or a bias of positions, is a sum over the layers.
Inductor makes one kernel of the whole sum and launches it where the sum's first part stands. Then
the kernels that the sum needs, which is the chain through all layers, come before the first of
these layers' gradients.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from hytrain_fx.capture import dataflow
from hytrain_fx.passes.base import PassContext, graph_pass
from hytrain_fx.passes.node_notes import NOTE_KEY, note


@graph_pass(kinds="backward")
def sink_elementwise(module: fx.GraphModule, context: PassContext) -> str:
    """Move such nodes, the last one first: what they read sinks after them.

    None goes past a node that has side effects, nor past another kind of reader of what it reads:
    Inductor writes the value to memory for such a reader, and that rounds it. A node that has sunk
    takes the unit of the place where it stands now, unless it reads a weight.
    """
    nodes = list(module.graph.nodes) if context.graph.grads else []  # without a gradient nothing is late
    place = {node: at for at, node in enumerate(nodes)}  # of a node that has sunk: of what it stands before
    head = list(nodes)  # at each place: the first of those that have sunk there, else the node itself
    effects = [at for at, node in enumerate(nodes) if node.op == "call_function" and _has_effects(node)]
    stores: dict[fx.Node, list[int]] = {}
    sunk = 0
    for node in reversed(nodes):
        if not node.users or not all(map(_is_elementwise, (node, *node.users))):
            continue
        at = min(map(place.__getitem__, node.users))
        bounds = [effects, *(_stores_of(dataflow.view_base(operand), stores, place) for operand in node.all_input_nodes)]
        if any(_has_between(bound, place[node], at) for bound in bounds):
            continue
        if node.next is not head[at]:
            head[at].prepend(node)
            sunk += 1
        place[node], head[at] = at, node
        if not note(node).reads:
            node.meta[NOTE_KEY] = replace(note(node), unit=note(nodes[at]).unit)
    return f"{sunk} elementwise nodes come later"


def _has_effects(node: fx.Node) -> bool:
    """Whether another node must stay on its side of this call.

    Drawing random numbers is no such effect, as what sinks draws none. On a GPU attention's
    backward is tagged as one that draws.
    """
    return dataflow.mutates(node) or (node.is_impure() and not _draws(node))


def _is_elementwise(node: fx.Node) -> bool:
    """Whether each element of its result comes of the operands' elements alone, without effects."""
    return torch.Tag.pointwise in _tags(node) and not _draws(node) and not dataflow.mutates(node)


def _draws(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in _tags(node)


def _tags(node: fx.Node) -> Sequence[torch.Tag]:
    return getattr(node.target, "tags", ()) if node.op == "call_function" else ()


def _stores_of(base: fx.Node, known: dict[fx.Node, list[int]], place: dict[fx.Node, int]) -> Sequence[int]:
    """Where other ops read this value or a view of it. Inputs of the graph are stored already."""
    if base.op != "call_function":
        return ()
    if base not in known:
        known[base] = sorted(place[reader] for reader in dataflow.readers([base]) if not _is_elementwise(reader))
    return known[base]


def _has_between(places: Sequence[int], low: int, high: int) -> bool:
    """Whether one of the ascending places lies between."""
    after = bisect_right(places, low)
    return after < len(places) and places[after] < high
