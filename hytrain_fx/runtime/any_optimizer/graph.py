"""A recorded step as an FX graph: the same operations of torch in the same order, so the same bits; every operation lets go of the GIL.

    forward(device, v0, v1, ..., n0, n1, ...)      device of the row; parameter, gradient, states; numbers
        mul_ = torch.ops.aten.mul_.Tensor(v0, n0)
        ...
        return (v5, ...)                           values that are kept and were not given
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from hytrain_fx.runtime.any_optimizer.recording import Device, Number, Recording, Value
from hytrain_fx.runtime.states.leaves import map_leaves


def returned(recording: Recording) -> tuple[int, ...]:
    """The values that the graph returns, in order."""
    return tuple(index for index in recording.kept if index >= recording.inputs or index in recording.copied)


def graph_of(recording: Recording) -> fx.GraphModule:
    """The graph, in which numbers are inputs: it serves every recording of the same key, on any device."""
    graph = fx.Graph()
    device = graph.placeholder("device")
    values = {index: graph.placeholder(f"v{index}") for index in range(recording.inputs)}
    numbers = [graph.placeholder(f"n{index}") for index in range(len(recording.numbers))]

    def node_of(leaf: Any) -> Any:
        if isinstance(leaf, Value):
            return values[leaf.index]
        if isinstance(leaf, Number):
            return numbers[leaf.index]
        return device if isinstance(leaf, Device) else leaf

    for call in recording.calls:
        node = graph.call_function(call.operation, map_leaves(call.args, node_of), map_leaves(call.kwargs, node_of))
        for position, index in call.made:
            values[index] = node if position is None else graph.call_function(operator.getitem, (node, position))
    results = []
    for index in returned(recording):
        copied = index in recording.copied
        results.append(graph.call_function(torch.ops.aten.clone.default, (values[index],)) if copied else values[index])
    graph.output(tuple(results))
    return fx.GraphModule(torch.nn.Module(), graph)
