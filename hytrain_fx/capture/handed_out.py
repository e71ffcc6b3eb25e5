"""Which parameters a graph of Dynamo's hands to code outside, or writes to.

    return (x, w.t())        who gets the view reads the parameter's memory whenever it likes
    w.add_(1)                the new value is for the parameter's own memory
    w.data.add_(1)           the same. The alias counts versions of its own

Such a parameter needs memory of its own. What a graph reads and keeps for itself does not show
here: it is saved inside of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from hytrain_fx.capture import dataflow
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
    written = (value for value in _values(list(gm.graph.nodes)) if not value.is_inference() and value._version > 0)
    out = {memory_of(value) for value in (*_values(gm.graph.output_node().args), *_written_unseen(gm), *written)}
    return frozenset(row for position, row in row_of_input.items() if memory_of(given[position]) in out)


def _written_unseen(gm: fx.GraphModule) -> Iterator[torch.Tensor]:
    """What operators may write to without counting a version up in a trace.

    Those named for it (`set_`, `_foreach_add_`), and those whose schema says that they write.
    """
    for node in gm.graph.nodes:
        name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
        if dataflow.mutates(node) or (name.endswith("_") and not name.endswith("__")):
            yield from _values((node.args, node.kwargs))


def _values(nodes: Any) -> Iterator[torch.Tensor]:
    for node in pytree.tree_leaves(nodes, is_leaf=lambda leaf: isinstance(leaf, fx.Node)):
        value = node.meta.get(_VALUE) if isinstance(node, fx.Node) else None
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                yield leaf
