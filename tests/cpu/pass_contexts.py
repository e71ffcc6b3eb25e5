"""Captured graphs of small models, ready for single passes: traced once, copied for each test."""

from __future__ import annotations

import functools

import torch
from torch import fx

from hytrain_fx.capture.captured_graph import CapturedGraph, GraphKind
from hytrain_fx.capture.units import Unit
from hytrain_fx.passes.base import GraphPass, PassContext
from tests.cpu import models
from tests.cpu.recording_nodes import capture_only, copy_captured

SESSION = 4


def context(kind: GraphKind, name: str = "gpt") -> PassContext:
    """A model's forward or backward graph, not rewritten."""
    graphs, units = _captured(name)
    graph = next(graph for graph in graphs if graph.kind is kind)
    return PassContext(copy_captured(graph), units, SESSION)


def apply(context: PassContext, *passes: GraphPass) -> tuple[str, ...]:
    """Run passes; the notes of the last."""
    notes: tuple[str, ...] = ()
    for one in passes:
        notes = one(context.graph.module, context)
        context.graph.module.graph.lint()
    return notes


def calls(context: PassContext, target: torch._ops.OpOverload) -> list[fx.Node]:
    """The nodes that call `target`, in graph order."""
    return list(context.graph.module.graph.find_nodes(op="call_function", target=target))


def between(context: PassContext, first: fx.Node, last: fx.Node) -> list[fx.Node]:
    """Nodes after `first` and before `last`."""
    nodes = list(context.graph.module.graph.nodes)
    return nodes[nodes.index(first) + 1 : nodes.index(last)]


def rows_of_unit(context: PassContext, name: str) -> list[int]:
    """The rows of a unit by its name."""
    return list(next(unit.rows for unit in context.units if unit.name == name))


@functools.cache
def _captured(name: str) -> tuple[list[CapturedGraph], tuple[Unit, ...]]:
    torch.manual_seed(0)
    model, batches = models.CASES[name]()
    return capture_only(model, batches[0])
