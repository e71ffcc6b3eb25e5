"""Which parameters a graph of Dynamo's hands to code outside, or writes to.

    return (x, w.t())        who gets the view reads the parameter's memory whenever it likes
    w.add_(1)                the new value is for the parameter's own memory

Such a parameter needs memory of its own. What a graph reads and keeps for itself does not show
here: it is saved inside of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from hytrain_fx.torch_private.tensors import memory_of

_VALUE = "example_value"


def rows_handed_out(gm: fx.GraphModule, row_of_input: Mapping[int, int]) -> frozenset[int]:
    """The rows among a graph's inputs, `row_of_input` by position, as above.

    Every row counts where Dynamo does not say what its nodes are.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    given = {position: inputs[position].meta.get(_VALUE) for position in row_of_input}
    if not all(isinstance(value, torch.Tensor) for value in given.values()):
        return frozenset(row_of_input.values())
    out = {memory_of(value) for value in _outputs(gm)} | {memory_of(value) for value in _written(gm)}
    return frozenset(row for position, row in row_of_input.items() if memory_of(given[position]) in out)


def _outputs(gm: fx.GraphModule) -> Iterator[torch.Tensor]:
    yield from _values(gm.graph.output_node().args)


def _written(gm: fx.GraphModule) -> Iterator[torch.Tensor]:
    """Of methods and functions that write in place, by torch's names, what they are called on."""
    for node in gm.graph.nodes:
        if node.op not in ("call_method", "call_function"):
            continue
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        in_place = name.endswith("_") and not name.endswith("__") or name in ("setitem", "copy_") or (name.startswith("__i") and len(name) > 4)
        if in_place or name in ("iadd", "isub", "imul", "itruediv", "ipow", "iand", "ior", "ixor"):
            yield from _values(node.args[:1])
        if "out" in node.kwargs:
            yield from _values(node.kwargs["out"])


def _values(nodes: Any) -> Iterator[torch.Tensor]:
    for node in pytree.tree_leaves(nodes, is_leaf=lambda leaf: isinstance(leaf, fx.Node)):
        value = node.meta.get(_VALUE) if isinstance(node, fx.Node) else None
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                yield leaf
