"""How a node of ours gets into a graph: where, with which meta, under which fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from hytrain_fx.passes.base import NOTE_KEY, NodeNote


def insert(graph: fx.Graph, target: Any, args: tuple[Any, ...], unit: int | None, value: torch.Tensor | None = None) -> fx.Node:
    """Call `target` at the graph's insertion point. `value` is the fake result, None for an operator without one."""
    node = graph.call_function(target, args)
    node.meta["val"] = value
    node.meta[NOTE_KEY] = NodeNote(unit)
    return node


@contextlib.contextmanager
def after_last(graph: fx.Graph, nodes: Iterable[fx.Node]) -> Iterator[None]:
    """Insert right behind the last of `nodes` in graph order, and behind all placeholders."""
    last = max(nodes)
    while last.next.op == "placeholder":
        last = last.next
    with graph.inserting_after(last):
        yield
