"""How much the forward keeps for each unit's backward, from the sizes in a captured graph.

A backward graph takes as inputs what its forward has kept. Weights, views of them and what the loop
hands in are there anyway, and do not count. What shares memory counts once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import fx

from hytrain_fx.capture import dataflow
from hytrain_fx.capture.captured_graph import CapturedGraph
from hytrain_fx.torch_private import compiling
from hytrain_fx.torch_private.operators import size_hint
from hytrain_fx.torch_private.tensors import memory_of


def kept_bytes(graph: CapturedGraph, unit_of: Mapping[int, int]) -> dict[int, int]:
    """Bytes by the number of the unit whose backward reads them last, of a backward graph.

    A symbolic size counts as the size it had while tracing.
    """
    unit_at, position = _units(graph, unit_of), {node: at for at, node in enumerate(graph.module.graph.nodes)}
    last: dict[int, tuple[int, int, int]] = {}  # by memory: the last reader's position, its unit, bytes
    for node, value in _kept(graph):
        readers = [reader for reader in dataflow.readers([node]) if reader in unit_at]
        if not readers:
            continue
        reader = max(readers, key=position.__getitem__)
        nbytes = value.element_size() * _product(value.shape)
        at, unit, before = last.get(memory_of(value), (-1, 0, 0))
        at, unit = max((at, unit), (position[reader], unit_at[reader]))
        last[memory_of(value)] = at, unit, max(before, nbytes)
    found: dict[int, int] = {}
    for _, unit, nbytes in last.values():
        found[unit] = found.get(unit, 0) + nbytes
    return found


def _kept(graph: CapturedGraph) -> Iterator[tuple[fx.Node, torch.Tensor]]:
    """What the forward has made of a backward graph's inputs."""
    weights = {holder for row in graph.held_rows for holder in graph.holders(row)}
    inputs = graph.module.graph.find_nodes(op="placeholder")
    values = {node: value for node in inputs if isinstance(value := node.meta.get("val"), torch.Tensor) and value.layout is torch.strided}
    handed_in = {memory_of(value) for node, value in values.items() if compiling.plain_input(node.meta.get("desc")) is not None}
    for node, value in values.items():
        is_given = node in weights or compiling.is_given_gradient(node.meta.get("desc"))
        if not is_given and memory_of(value) not in handed_in:
            yield node, value


def _units(graph: CapturedGraph, unit_of: Mapping[int, int]) -> dict[fx.Node, int]:
    """The unit of each node but inputs and output, as `captured_graph.unit_flops` has it."""
    owner = {reader: unit_of[row] for row in graph.held_rows for reader in dataflow.readers(graph.holders(row))}
    owner.update({dataflow.view_base(graph.gradient(row)): unit_of[row] for row in graph.grads})
    nodes = [node for node in graph.module.graph.nodes if node.op not in ("placeholder", "output")]
    unit = next((owner[node] for node in nodes if node in owner), None)
    found = {}
    for node in nodes:
        unit = owner.get(node, unit)
        if unit is not None:
            found[node] = unit
    return found


def _product(shape: torch.Size) -> int:
    numel = 1
    for size in shape:
        numel *= size_hint(size)
    return numel
